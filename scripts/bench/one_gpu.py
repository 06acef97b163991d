"""Compares predicted with measured times and memory of training steps, on a GPU of this machine.

    scripts/python scripts/bench/one_gpu.py [--only=gpt2] [--rounds=5] [--profile=FOLDER] [--json=FILE]

Trains each of CASES in bfloat16 on random tokens, in a process of its own. The host enqueues steps ahead of the GPU, as
the training loop does. Prints the time of a step, MFU, the peak memory of the process, and predicted / measured of time
and of memory, first of the planner, then of the program:

  planner   time and memory that `jaxpar plan` predicts
  program   time and memory that `jaxpar audit --target=here --time` predicts for the compiled step

With --json, adds a line for each row to FILE. With --profile, writes the measured time of each instruction, the
predicted parts, and the program to FOLDER.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar import data, strategies
from jaxpar.choose import planner
from jaxpar.choose.candidates import gpu_space
from jaxpar.cluster.target import HERE, Target, find_target
from jaxpar.command_line import Parser, integer
from jaxpar.core import mesh
from jaxpar.core.step import Problem
from jaxpar.errors import TrainingError, check_choice, exit_code, format_bytes
from jaxpar.inspect import audit, step_time
from jaxpar.inspect.audit_report import model_flops
from jaxpar.strategies import Strategy
from scripts.bench.planned_memory import GPT, Case, configured, make_problem
from scripts.bench.steps import race
from scripts.bench.tables import show

SINGLE = ("strategy=single", "mesh.data=1", "model.dtype=bfloat16")
BERT = Case(64, 512, 30522, (*SINGLE, "model.size=base"))
GPT2 = Case(32, 1024, 50304, (*SINGLE, *GPT, "model.dropout=0.0"))
LLAMA = (
    *("model.num_layers=16", "model.hidden_size=2048", "model.num_heads=32", "model.num_kv_heads=8"),
    *("model.mlp_size=8192", "model.norm=rmsnorm", "model.activation=swiglu", "model.positions=rotary"),
)
LLAMA_1B = Case(
    4, 4096, 128256, (*SINGLE, "task=causal_lm", "model.name=gpt", "model.dropout=0.0", *LLAMA, "model.max_length=None")
)
SCANNED, UNROLLED = ("model.scan_layers=True",), ("model.scan_layers=False",)
REMAT = ("model.remat=full",)
ZERO2 = ("strategy=data_parallel", "exchange=zero2")
CASES = {
    "gpt2": (GPT2, ()),
    "gpt2, scanned": (GPT2, SCANNED),
    "gpt2, float16": (GPT2, ("model.dtype=float16",)),
    "bert_base": (BERT, ()),
    "bert_base, scanned": (BERT, SCANNED),
    "gpt2, remat": (GPT2, REMAT),
    "gpt2, remat unrolled": (GPT2, (*REMAT, *UNROLLED)),
    "llama_1b": (LLAMA_1B, REMAT),
    "llama_1b, unrolled": (LLAMA_1B, (*REMAT, *UNROLLED)),
    "gpt2, dropout": (GPT2, ("model.dropout=0.1",)),
    "bert_base, xla": (BERT, ("model.attention=xla",)),
    "bert_base, float32": (BERT, ("model.dtype=float32",)),
    "gpt2, zero2": (GPT2, ZERO2),
    "gpt2, zero2, offload": (GPT2, (*ZERO2, "exchange.offload=True")),
    "llama_1b, zero2": (LLAMA_1B, (*REMAT, *ZERO2)),
    "llama_1b, zero2, offload": (LLAMA_1B, (*REMAT, *ZERO2, "exchange.offload=True")),
}
PROFILED = 3  # steps of a profile
STEPS = 8  # in flight


def main() -> None:
    """Print a row for each case."""
    parser = Parser(__doc__)
    parser.add_argument("--only", help="the cases, separated by semicolons; without it, all")
    parser.add_argument("--rounds", type=integer(1), default=5, help=f"measured rounds of {STEPS} steps")
    parser.add_argument("--profile", type=Path, help="the folder of the profiles")
    parser.add_argument("--json", type=Path, help="the file of the rows")
    arguments = parser.parse()
    names = list(CASES) if arguments.only is None else arguments.only.split(";")
    for name in names:
        check_choice("--only", name, CASES)
    if len(names) == 1:
        found = measured(names[0], arguments.rounds, arguments.profile)
        show(["case", "step", "MFU", "predicted / step", "peak", "predicted / peak"], [row(found)])
        if arguments.json is not None:
            with arguments.json.open("a") as file:
                file.write(json.dumps(found) + "\n")
        return
    others = [argument for argument in sys.argv[1:] if not argument.startswith("--only")]
    codes = [  # the peak of a process cannot be reset
        subprocess.run([sys.executable, __file__, *others, f"--only={name}"], check=False).returncode for name in names
    ]
    if any(codes):
        raise TrainingError(f"{sum(map(bool, codes))} of {len(names)} cases failed")


def measured(name: str, rounds: int, profile: Path | None) -> dict[str, Any]:
    """Return the measured and predicted seconds and bytes of a case."""
    (case, settings), target = CASES[name], find_target(HERE)
    config, problem, strategy = built(case, settings, target)
    programs = strategy.compile()
    predicted = step_time.predict(programs, target.cluster)
    needed = sum(audit.needed_bytes(programs, strategy).values())
    without = configured(case, tuple(one for one in settings if not one.startswith("model.remat")))
    space = gpu_space(config, make_problem(without, case, target.cluster), target.cluster, 0.0, {})
    planned = planner.candidate_of_plan(space, config, strategy.plan).costs
    batch = random_batch(problem, case.words)
    seconds = race({name: strategy}, batch, rounds=rounds, steps=STEPS)[name].seconds
    peak = target.devices[0].memory_stats()["peak_bytes_in_use"]
    mfu = model_flops(problem) / seconds / target.cluster.peak_flops[config.model.dtype]
    found: dict[str, Any] = {"case": name, "seconds": seconds, "mfu": mfu, "bytes": peak}
    found |= {"planned": [planned.seconds, planned.nbytes], "program": [predicted.seconds, needed]}
    if profile is not None:
        path = profile / name.replace(", ", "_")
        kernels = of_kernels(strategy, batch, path)
        parts = [[*part, at] for part, at in predicted.longest()]
        path.with_suffix(".json").write_text(json.dumps(found | {"kernels": kernels, "parts": parts}))
        path.with_suffix(".hlo").write_text(programs[0].compiled.as_text() or "")
    return found


def row(found: dict[str, Any]) -> list[str]:
    """Return the row of a case: what was measured, and predicted / measured by the planner and by the program."""
    seconds, nbytes = found["seconds"], found["bytes"]
    of_time, of_memory = (
        ", ".join(f"{found[key][i] / measured:.3f}" for key in ("planned", "program"))
        for i, measured in enumerate((seconds, nbytes))
    )
    return [found["case"], f"{1e3 * seconds:.2f} ms", f"{found['mfu']:.3f}", of_time, format_bytes(nbytes), of_memory]


def built(case: Case, settings: tuple[str, ...], target: Target) -> tuple[Any, Problem, Strategy[Any]]:
    """Return the config, problem and strategy of a case."""
    config = configured(case, settings)
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    problem = make_problem(config, case, target.cluster)
    plan = strategies.plan(config, problem, target.cluster)
    return config, problem, strategies.build(plan, problem, target.devices)


def random_batch(problem: Problem, words: int) -> dict[str, np.ndarray]:
    """Return a batch of random tokens and labels."""
    rng = np.random.default_rng(0)
    made = {name: rng.integers(0, 2, x.shape).astype(x.dtype) for name, x in problem.batch.items()}
    made["inputs"] = rng.integers(1, words, problem.batch["inputs"].shape, np.int32)
    if "mask" in made:
        made["mask"] = np.ones_like(made["mask"])
    else:
        made["labels"] = np.roll(made["inputs"], -1, axis=1)
    return made | {
        "weights": np.ones(problem.batch["weights"].shape, np.float32),
        "index": np.arange(len(made["inputs"]), dtype=np.int32),
    }


def of_kernels(strategy: Strategy[Any], batch: dict[str, np.ndarray], folder: Path) -> dict[str, float]:
    """Return the measured seconds of each instruction in a step, by its name or that of its kernel."""
    state, placed = strategy.init(jax.random.key(0)), strategy.place(batch)
    state, _ = strategy.step(state, placed)
    jax.block_until_ready(state)
    with jax.profiler.trace(str(folder)):
        for _ in range(PROFILED):
            state, _ = strategy.step(state, placed)
        jax.block_until_ready(state)
    [path] = folder.rglob("*.xplane.pb")
    found = Counter[str]()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                # XLA's command buffers name themselves instead of their instructions.
                found[f"{dict(event.stats).get('hlo_op', '')} {event.name}"] += event.duration_ns / 1e9 / PROFILED
    return dict(found.most_common())


if __name__ == "__main__":
    sys.exit(exit_code(main))
