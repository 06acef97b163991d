"""Compares jaxpar with PyTorch: seconds of a training step of the same GPT, with equal weights and batches.

    scripts/python scripts/bench/peers.py --torch_python=TORCH/bin/python [--widths=128,256,768] [--rounds=7]
        [--norms=layernorm,rmsnorm] [--strategies=single,ddp,1f1b] [--gpu] [--config.KEY=VALUE ...]

The GPT has 8 layers, with LayerNorm and biases or with RMSNorm and no biases. A batch has 32 texts of 128 random
tokens, and the optimizer of both is SGD without momentum. `single` is one device, `ddp` two replicas, `1f1b` a pipeline
of two stages with 8 microbatches. jaxpar runs on virtual CPU devices, in a new process for each case, torch
(scripts/bench/peers_torch.py) in one process per device, connected by gloo. Both use all cores.

The first steps do not count: their losses must be equal to 1e-5. Then the two take turns, and the medians are compared.
A ratio above 1 means that jaxpar is faster. Overrides of the config change jaxpar, and torch only by the shapes of the
weights and of the batch.

With --gpu, both train GPT-2 124M in bfloat16 on 32 texts of 1,024 tokens on one GPU (in float16 on one without
bfloat16), torch with `torch.compile` and its fused attention, and the losses must be equal to 1e-2.

Make the environment of torch with

    python3 -m venv TORCH
    TORCH/bin/pip install torch numpy
"""

import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar import config as configs
from jaxpar import data, strategies
from jaxpar.cluster import find_cluster
from jaxpar.command_line import Parser, integer, names
from jaxpar.core import mesh
from jaxpar.errors import TrainingError, exit_code
from jaxpar.tasks import mean_loss
from scripts.bench.gpu_steps import half_dtype
from scripts.bench.pipeline_case import MODEL, random_data
from scripts.bench.steps import make_problem
from scripts.bench.tables import show

HEAD = 64  # features of an attention head
LR = 0.1
EQUAL_STEPS = 3
WARM_STEPS = 5  # more steps that do not count, until no step needs new memory
TOLERANCE, GPU_TOLERANCE = 1e-5, 1e-2
GPU_MODEL = {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "max_length": 1024, "vocab_size": 50304}
TWO_CPUS = "--config.mesh.virtual_cpu_devices=2"
STRATEGIES = {
    "single": ["--config.strategy=single"],
    "ddp": ["--config.strategy=data_parallel", "--config.mesh.data=2", TWO_CPUS],
    "1f1b": [
        "--config.strategy=pipeline",
        "--config.pipeline.schedule=1f1b",
        "--config.pipeline.executor=dispatch",  # which `auto`, the default, chooses
        "--config.mesh.data=1",
        "--config.mesh.stage=2",
        TWO_CPUS,
    ],
}
SGD = [f"--config.optimizer.{key}" for key in ("name=sgd", "momentum=0", "weight_decay=0", "clip_norm=0")]
# Both sides keep the memory that a step frees; see jaxpar.core.host.keep_freed_memory.
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**62), "MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1"}


class Torch:
    """The processes of torch, one per device. Each takes a step when it reads a line, then prints its loss."""

    def __init__(self, python: str, case: Path, strategy: str, device: str):
        """Start the processes on the weights and the batch in `case`."""
        world = 1 if strategy == "single" else 2
        threads = max(len(os.sched_getaffinity(0)) // world, 1)
        script, environment = Path(__file__).with_name("peers_torch.py"), {**os.environ, **KEEP_FREED_MEMORY}
        self._processes = [
            subprocess.Popen(
                [python, str(script), str(case), strategy, str(rank), str(threads), device],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(world)
        ]

    def step(self) -> float:
        """Take a step, and return its loss."""
        for process in self._processes:
            assert process.stdin
            process.stdin.write("step\n")
            process.stdin.flush()
        shares = [process.stdout.readline() for process in self._processes if process.stdout]
        if not all(shares):
            raise TrainingError("a process of torch ended; its error is above")
        return sum(map(float, shares))

    @property
    def processes(self) -> list[int]:
        """The ids of the processes."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.communicate()


class Contender(NamedTuple):
    """A side of the comparison."""

    step: Callable[[], float]  # takes a step, and returns its loss
    processes: list[int]  # ids of its processes


@contextmanager
def contenders(
    python: str, model: Mapping[str, Any], strategy: str, overrides: Sequence[str], *, is_on_gpu: bool = False
) -> Iterator[dict[str, Contender]]:
    """Yield torch and jaxpar, after the first steps, whose losses are equal."""
    config, tolerance = configs.default_config(), GPU_TOLERANCE if is_on_gpu else TOLERANCE
    of_model = [f"--config.model.{key}={value}" for key, value in model.items()]
    more = ["--config.task=causal_lm", "--config.batch_size=32", *SGD, *of_model, *STRATEGIES[strategy]]
    configs.override(config, [*more, *overrides])
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    if is_on_gpu:  # its dtypes are known only now; overrides take precedence
        configs.override(config, [f"--config.model.dtype={half_dtype(find_cluster())}", *overrides])
    info, batch = random_data(config)
    ours = strategies.make(config, make_problem(config, info, batch, lr=LR))
    state, placed = ours.init(jax.random.key(0)), ours.place(batch)

    def step() -> float:
        nonlocal state
        state, metrics = ours.step(state, placed)
        jax.block_until_ready(state)
        return float(mean_loss(metrics.sums.loss, metrics.sums.weight))

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        case = Path(folder) / "case.npz"
        np.savez(case, **flat(ours.to_canonical(state)["params"]), inputs=batch["inputs"], labels=batch["labels"])
        torch = Torch(python, case, strategy, "cuda" if is_on_gpu else "cpu")
        stack.callback(torch.close)
        found = {"torch": Contender(torch.step, torch.processes), "jaxpar": Contender(step, [os.getpid()])}
        for _ in range(EQUAL_STEPS):
            losses = {name: one.step() for name, one in found.items()}
            if not abs(losses["torch"] - losses["jaxpar"]) <= tolerance:
                raise TrainingError(f"the losses of a step differ by more than {tolerance}: {losses}")
        yield found


def compare(
    python: str, model: Mapping[str, Any], strategy: str, overrides: Sequence[str], is_on_gpu: bool, rounds: int
) -> list[float]:
    """Return the median seconds of a step of torch and of jaxpar."""
    with contenders(python, model, strategy, overrides, is_on_gpu=is_on_gpu) as found:
        times: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(WARM_STEPS + rounds):
            for name, one in found.items():
                start = time.perf_counter()
                one.step()
                times[name].append(time.perf_counter() - start)
    return [statistics.median(times[name][WARM_STEPS:]) for name in found]


def flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the arrays of a nested dict, keyed by their names joined by dots."""
    arrays: dict[str, Any] = {}
    for name, value in params.items():
        arrays |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return arrays


def widths(text: str) -> list[int]:
    """Return the value of --widths."""
    values = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if not all(value and value % HEAD == 0 for value in values):
        raise ArgumentTypeError(f"{text!r}; it must be one or more positive multiples of {HEAD}, such as 128,256")
    return values


def interpreter(text: str) -> str:
    """Return the value of --torch_python."""
    if shutil.which(text) is None:
        raise ArgumentTypeError(f"{text!r}, which does not exist; it must be an interpreter")
    return text


def peers_parser(description: str | None) -> Parser:
    """Return a parser with the flags that choose the cases."""
    parser, example = Parser(description), "--torch_python=TORCH/bin/python"
    parser.require("--torch_python", example, type=interpreter, help="interpreter of an environment with torch")
    parser.add_argument("--widths", type=widths, default=[128, 256, 768], help="widths of the model")
    parser.add_argument("--norms", type=names(["layernorm", "rmsnorm"]), default=["layernorm", "rmsnorm"], help="norms")
    parser.add_argument("--strategies", type=names(STRATEGIES), default=list(STRATEGIES), help="strategies")
    return parser


def in_new_process(measure: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `measure`, a function of a module, in a new process, so that cases share no heap."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def model_of(norm: str, width: int) -> dict[str, Any]:
    """Return the keys of config.model of a case."""
    return {**MODEL, "hidden_size": width, "num_heads": width // HEAD, "norm": norm}


def main() -> None:
    """Print the ratios."""
    parser = peers_parser(__doc__)
    parser.add_argument("--rounds", type=integer(1), default=7, help="steps of each, after those that do not count")
    parser.add_argument("--gpu", action="store_true", help="compare on one GPU")
    parsed, overrides = parser.parse_with_overrides()
    configs.override(configs.default_config(), overrides)  # errors before the first case
    if parsed.gpu:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")  # torch needs the rest
        parsed.widths, parsed.strategies = [GPU_MODEL["hidden_size"]], ["single"]

    def ratio(strategy: str, norm: str, width: int) -> str:
        model = model_of(norm, width) | (GPU_MODEL if parsed.gpu else {})
        arguments = (parsed.torch_python, model, strategy, overrides, parsed.gpu, parsed.rounds)
        torch, ours = in_new_process(compare, *arguments)
        return f"{torch:.3f} / {ours:.3f} = {torch / ours:.3f}"

    version = "import torch; print('torch', torch.__version__)"
    torch = subprocess.run([parsed.torch_python, "-c", version], stdout=subprocess.PIPE, text=True, check=True).stdout
    columns = [f"strategy ({torch.strip()} / jaxpar, s)", "norm", *(f"width {width}" for width in parsed.widths)]
    cases = product(parsed.strategies, parsed.norms)
    show(columns, ([*case, *(ratio(*case, width) for width in parsed.widths)] for case in cases))


if __name__ == "__main__":
    sys.exit(exit_code(main))
