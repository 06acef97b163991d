"""Compares the time of a step with config.pipeline.schedule=auto and other schedules with that of 1f1b.

    scripts/python scripts/bench/auto_schedule.py [--stages=2,4,8] [--microbatches=8,16]
        [--schedules=eager_1f1b,zb_h1] [--rounds=9] [--config.KEY=VALUE ...]

The model and the microbatches are those of scripts/bench/pipeline.py. Each row is a number of stages, a number of
microbatches and a schedule. It has the median time of a step in alternating rounds / that of 1f1b, and the same for the
CPU time; auto has the schedule that it chose. The benchmark runs on GPUs if there are any, and otherwise on as
many virtual CPU devices as there are stages, in a process for each number of stages.
"""

import subprocess
import sys
from collections.abc import Iterator
from itertools import chain

import jax

from jaxpar import config as configs
from jaxpar import data
from jaxpar.command_line import Parser, integer, names
from jaxpar.core import mesh
from jaxpar.errors import exit_code
from jaxpar.strategies.pipeline.executor.partition import AUTO
from scripts.bench.pipeline import SCHEDULES, stage_counts
from scripts.bench.pipeline_case import Maker, Parts
from scripts.bench.steps import race
from scripts.bench.tables import show

REFERENCE = "1f1b"
EXAMPLES = 4  # of a microbatch
COLUMNS = ["stages x microbatches", "schedule", "step", "step time / that of `1f1b`", "CPU time / that of `1f1b`"]


def compared(maker: Maker, p: int, m: int, schedules: list[str], rounds: int) -> Iterator[list[str]]:
    """Yield the rows of a number of stages and of microbatches."""
    cases = {name: maker.pipeline(p, name, m=m) for name in dict.fromkeys((REFERENCE, AUTO, *schedules))}
    contenders = {name: case.contender for name, case in cases.items()}
    timings = race(contenders, cases[REFERENCE].batch, rounds=rounds)
    reference = timings[REFERENCE]
    for name, timing in timings.items():
        ratios = timing.seconds / reference.seconds, timing.cpu_seconds / reference.cpu_seconds
        label = f"auto: {Parts(cases[name]).details.schedule}" if name == AUTO else name
        yield [f"{p} x {m}", label, f"{timing.seconds:.3f} s", *(f"{ratio:.3f}" for ratio in ratios)]
    jax.clear_caches()


def main(arguments: list[str]) -> None:
    """Parse the command line and print the ratios."""
    parser = Parser(__doc__)
    parser.add_argument("--stages", type=stage_counts, default=[2, 4, 8], help="numbers of stages")
    parser.add_argument("--microbatches", type=stage_counts, default=[8, 16], help="numbers of microbatches")
    parser.add_argument("--schedules", type=names(SCHEDULES), default=["eager_1f1b", "zb_h1"], help="others")
    parser.add_argument("--rounds", type=integer(1), default=9, help="number of repetitions")
    parsed, overrides = parser.parse_with_overrides(arguments)
    first, *others = parsed.stages
    config = configs.default_config()
    configs.override(config, [f"--config.mesh.virtual_cpu_devices={first}", *overrides])
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    mesh.partition_by_gspmd()
    maker = Maker(tuple(overrides), EXAMPLES)
    of_m = (compared(maker, first, m, parsed.schedules, parsed.rounds) for m in parsed.microbatches)
    show(COLUMNS, chain.from_iterable(of_m))
    for p in others:
        subprocess.run([sys.executable, __file__, *arguments, f"--stages={p}"], check=True)  # the last flags win


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
