"""Compares predicted with measured times and memory of training steps, on the GPUs of this machine.

    scripts/python scripts/bench/gpu_steps.py [--only=gpt2] [--rounds=5] [--profile=FOLDER] [--json=FILE]

Trains each of CASES on one GPU, or those of --only, which can also be some of PARALLEL, on all GPUs. Tokens are random,
and each case has a process of its own. The dtype is bfloat16, or float16 on GPUs without bfloat16. A batch that does
not fit is halved until it does; a case that never fits is a row with what it needs. The host enqueues steps ahead of
the GPUs, as the training loop does. Prints the time of a step, MFU, the peak memory of a GPU, and predicted / measured
of time and of memory, first of the planner, then of the program:

  planner   time and memory that `jaxpar plan` predicts
  program   time and memory that `jaxpar audit --target=here --time` predicts for the compiled step

With --json, adds a line for each row to FILE. With --profile, writes the measured time of each instruction, the
predicted parts, and the program to FOLDER.
"""

import json
import math
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
from jaxpar.choose.costs.step import StepCosts
from jaxpar.cluster import Cluster
from jaxpar.cluster.target import HERE, Target, find_target
from jaxpar.command_line import Parser, choice, integer
from jaxpar.core import mesh
from jaxpar.core.step import Problem
from jaxpar.errors import TrainingError, UserError, exit_code, format_bytes
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
REPLICAS = ("strategy=data_parallel",)
ZERO2 = (*REPLICAS, "exchange=zero2")
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
    "gpt2, activations stored": (GPT2, ("model.recompute_activations=False",)),
    "bert_base, activations recomputed": (BERT, ("model.recompute_activations=True",)),
    "bert_base, xla": (BERT, ("model.attention=xla",)),
    "bert_base, float32": (BERT, ("model.dtype=float32",)),
    "gpt2, zero2": (GPT2, ZERO2),
    "gpt2, zero2, offload": (GPT2, (*ZERO2, "exchange.offload=True")),
    "llama_1b, zero2": (LLAMA_1B, (*REMAT, *ZERO2)),
    "llama_1b, zero2, offload": (LLAMA_1B, (*REMAT, *ZERO2, "exchange.offload=True")),
}
LLAMA_8B = ("model.num_layers=32", "model.hidden_size=4096", "model.mlp_size=14336")
DISPATCH = (
    *("strategy=pipeline", "mesh.stage={stages}", "pipeline.executor=dispatch", "pipeline.schedule=1f1b"),
    "pipeline.num_microbatches=16",
)
PARALLEL = {  # with the batch of one GPU
    "gpt2, ddp": (GPT2._replace(size=64), REPLICAS),  # the batch of llm.c on eight GPUs (predicted.py)
    "gpt2, 1f1b": (GPT2, DISPATCH),
    "llama_1b, zero3": (LLAMA_1B, (*REMAT, *REPLICAS, "exchange=zero3")),
    "llama_8b, zero3": (LLAMA_1B._replace(size=1, length=8192), (*LLAMA_8B, *REMAT, *REPLICAS, "exchange=zero3")),
}
ALIKE = ("gpt2, float16", "bert_base, xla")  # equal to another case on GPUs without bfloat16
COLUMNS = (
    *("case", "batch", "step time", "MFU", "predicted / measured time"),
    *("peak memory", "predicted / measured memory"),
)
PROFILED = 3  # steps of a profile
STEPS = 8  # in flight


def main() -> None:
    """Print a row for each case."""
    parser = Parser(__doc__)
    parser.add_argument("--only", type=case_names, default=list(CASES), help="the cases, separated by semicolons")
    parser.add_argument("--rounds", type=integer(1), default=5, help=f"measured rounds of {STEPS} steps")
    parser.add_argument("--profile", type=Path, help="the folder of the profiles")
    parser.add_argument("--json", type=Path, help="the file of the rows")
    arguments = parser.parse()
    names = arguments.only
    if len(names) == 1:
        found = measured(names[0], arguments.rounds, arguments.profile)
        show(COLUMNS, [row(found)])
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


def case_names(text: str) -> list[str]:
    """Return the value of --only."""
    return [choice([*CASES, *PARALLEL])(name) for name in text.split(";")]


def half_dtype(cluster: Cluster) -> str:
    """Return the dtype of 16 bits that the tensor cores of a GPU have: float16 before compute capability 8."""
    return "float16" if 0 < float(cluster.compute_capability or 0) < 8 else "bfloat16"


def cases_of(cluster: Cluster) -> dict[str, tuple[Case, tuple[str, ...]]]:
    """Return the cases for GPUs of this kind and number with their settings: those on all, if several, and on one."""
    n, half = cluster.num_devices, half_dtype(cluster)
    stages = next(number for number in (4, 2, n) if n % number == 0)
    on_all = {
        name: (case._replace(size=n * case.size), ("mesh.data=-1", *(one.format(stages=stages) for one in settings)))
        for name, (case, settings) in (PARALLEL if n > 1 else {}).items()
    }
    return {name: (case, (f"model.dtype={half}", *settings)) for name, (case, settings) in (on_all | CASES).items()}


def planned_costs(case: Case, settings: tuple[str, ...], target: Target) -> StepCosts:
    """Return what the planner predicts."""
    cluster, config = target.cluster, configured(case, settings)
    whole = configured(case, tuple(one for one in settings if not one.startswith("model.remat")))
    space = gpu_space(config, make_problem(whole, case, cluster), cluster, 0.0, {})
    plan = strategies.plan(config, make_problem(config, case, cluster), cluster)
    return planner.candidate_of_plan(space, config, plan).costs


def halved(case: Case, settings: tuple[str, ...], target: Target) -> Case | None:
    """Return the case with half the batch; None if the strategy cannot divide that."""
    half = case._replace(size=case.size // 2)
    config = configured(half, settings)
    has_plan = not case.size % 2 and not isinstance(
        strategies.possible(config, make_problem(config, half, target.cluster), target.cluster), str
    )
    return half if has_plan else None


def measured(name: str, rounds: int, profile: Path | None) -> dict[str, Any]:
    """Return the measured and predicted seconds and bytes of a case; if it does not fit, only the bytes it needs."""
    target = find_target(HERE)
    cases = cases_of(target.cluster)
    if name not in cases:
        raise UserError(f"--only is {name!r}, on one GPU; it must be one of {', '.join(cases)}")
    case, settings = cases[name]
    while True:
        planned = planned_costs(case, settings, target)
        needed = planned.nbytes
        if needed <= target.usable_bytes:
            config, problem, strategy = built(case, settings, target)
            programs = strategy.compile()
            needed = sum(audit.needed_bytes(programs, strategy).values())
        found = {"case": name, "examples": case.size, "length": case.length, "needs": [needed, target.usable_bytes]}
        if needed <= target.usable_bytes:
            break
        half = halved(case, settings, target)
        if half is None:
            return found
        case = half
    predicted = step_time.predict(programs, target.cluster, strategy.plan.offloaded_bytes)
    batch = random_batch(problem, case.words)
    seconds = race({name: strategy}, batch, rounds=rounds, steps=STEPS)[name].seconds
    peak = max(device.memory_stats()["peak_bytes_in_use"] for device in target.devices)
    peak_flops = math.prod(strategy.plan.axes.values()) * target.cluster.peak_flops[config.model.dtype]
    found |= {"seconds": seconds, "mfu": model_flops(problem) / seconds / peak_flops, "bytes": peak}
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
    cells = [found["case"], f"{found['examples']:,} x {found['length']:,}"]
    if "seconds" not in found:
        return [*cells, "", "", "", f"needs {' of '.join(map(format_bytes, found['needs']))}", ""]
    of_time, of_memory = (", ".join(f"{ratio:.3f}" for ratio in ratios) for ratios in ratios_of(found))
    step = f"{1e3 * found['seconds']:.2f} ms"
    return [*cells, step, f"{found['mfu']:.3f}", of_time, format_bytes(found["bytes"]), of_memory]


def ratios_of(found: dict[str, Any]) -> list[list[float]]:
    """Return predicted / measured time by the planner and by the program, and the same of the memory."""
    measured = (found["seconds"], found["bytes"])
    return [[found[key][i] / measured[i] for key in ("planned", "program")] for i in range(2)]


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
