"""Times steps on virtual CPU devices without / with what jaxpar sets in the process (jaxpar.core.host).

    scripts/python scripts/bench/host.py [--only=ddp] [--rounds=3]

Without: the gaps that compilations leave in the heap stay, and XLA has a thread for each core or device. Each round
starts two processes, one after the other, which compile the step and take the median of STEPS steps. Prints the median
of both, and the ratio; above 1, jaxpar's settings are faster.
"""

import os
import statistics
import subprocess
import sys
import tempfile

import jax

from jaxpar import data, strategies
from jaxpar.cluster import find_cluster
from jaxpar.command_line import Parser, integer
from jaxpar.core import host, mesh
from jaxpar.errors import exit_code
from scripts.bench.gpu_steps import random_batch
from scripts.bench.options import CASES
from scripts.bench.planned_memory import configured, make_problem
from scripts.bench.steps import race
from scripts.bench.tables import show

STEPS = 7
STAGES = "strategy=pipeline", "pipeline.schedule=1f1b", "pipeline.executor=dispatch", "mesh.data=1", "mesh.stage=2"
ROWS = {
    f"GPT of width {width}, {name}": (f"GPT, 8 layers of width {width}, 32 x 128 tokens", count, settings)
    for name, count, settings, widths in (
        ("one device", 1, ("strategy=single",), (128,)),
        ("ddp, 2 devices", 2, ("mesh.data=2",), (128, 256)),
        ("ddp, 8 devices", 8, ("mesh.data=8",), (128,)),
        ("1f1b, 2 devices", 2, STAGES, (256,)),
    )
    for width in widths
}


def main() -> None:
    """Print a row for each model and number of devices."""
    parser = Parser(__doc__)
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    parser.add_argument("--rounds", type=integer(1), default=3, help="processes of each kind")
    parser.add_argument("--row", help="for the processes: the row to time")
    parser.add_argument("--without", action="store_true", help="for the processes: without the settings")
    arguments = parser.parse()
    if arguments.row:
        print(seconds(arguments.row, without=arguments.without))
        return
    show(
        ["model, devices", "seconds without / with", "ratio"],
        ([name, *compared(name, arguments.rounds)] for name in ROWS if arguments.only in name),
    )


def compared(row: str, rounds: int) -> tuple[str, str]:
    """Return the medians over processes, and their ratio."""
    times: dict[str, list[float]] = {"--without": [], "": []}
    for _ in range(rounds):
        for kind, values in times.items():
            with tempfile.TemporaryDirectory() as cache:  # empty: the process compiles
                values.append(float(in_process(["--row", row, *kind.split()], cache)))
    before, now = map(statistics.median, times.values())
    return f"{before:.3f} / {now:.3f}", f"{before / now:.2f}"


def in_process(arguments: list[str], cache: str) -> str:
    """Return what this script prints last in a process of its own."""
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"}
    environment.pop("NPROC", None)
    command = [sys.executable, "-m", "scripts.bench.host", *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1]


def seconds(row: str, *, without: bool) -> float:
    """Return the median seconds of a step in this process."""
    if without:
        for owner, name in ((host.Gaps, "close"), (host, "add_threads")):
            setattr(owner, name, lambda _: None)
    model, count, settings = ROWS[row]
    case = CASES[model]
    config = configured(case, (f"mesh.virtual_cpu_devices={count}", *settings))
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    assert jax.device_count() == count
    problem = make_problem(config, case, find_cluster())
    contenders = {row: strategies.make(config, problem)}
    return race(contenders, random_batch(problem, case.words), rounds=STEPS)[row].seconds


if __name__ == "__main__":
    sys.exit(exit_code(main))
