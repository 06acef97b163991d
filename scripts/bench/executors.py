"""Compares the executors of pipelines: time of a step in lockstep, divided by that of dispatched stages.

    scripts/python scripts/bench/executors.py [--widths=128,256,768] [--stages=2,4,8] [--schedules=1f1b,zb_h1]
        [--rounds=7] [--config.KEY=VALUE ...]

The GPT has 8 layers, a microbatch has 4 texts of 128 random tokens, and there are 4 microbatches per stage, on virtual
CPU devices. The two take turns, and the medians are compared; their first losses must be equal to 1e-5. The next column
is the time of the host in which it enqueues the programs and transfers of a step, per action of the table. The last one
is the simulated length of the timeline of a dispatched step, divided by the measured one: the simulation takes the
median measured time of each kind of action on each device.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import jax
import numpy as np

from jaxpar import config as configs
from jaxpar import data, strategies
from jaxpar.command_line import Parser, integer, names
from jaxpar.core import mesh
from jaxpar.errors import TrainingError, exit_code
from jaxpar.strategies import Strategy
from jaxpar.strategies.pipeline.executor.timeline import measured_times
from jaxpar.strategies.pipeline.schedules import DISPATCH, EXECUTORS
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES
from jaxpar.strategies.pipeline.tables.simulate import simulate_table
from scripts.bench.peers import HEAD, widths
from scripts.bench.pipeline_case import Maker
from scripts.bench.steps import race
from scripts.bench.tables import show

TOLERANCE = 1e-5
COLUMNS = ["width, stages", "schedule", "step time, lockstep / dispatch", "host, us per action", "simulated / measured"]
TRACED = 3  # number of the step whose actions are measured


def main() -> None:
    """Print a row for each width, number of stages and schedule."""
    parser = Parser(__doc__)
    parser.add_argument("--widths", type=widths, default=[128, 256, 768], help="widths of the model")
    parser.add_argument("--stages", type=names("248"), default=["2", "4", "8"], help="numbers of stages")
    parser.add_argument("--schedules", type=names(SCHEDULES), default=["1f1b", "zb_h1"], help="schedules")
    parser.add_argument("--rounds", type=integer(1), default=7, help="steps of each, after those that do not count")
    arguments, overrides = parser.parse_with_overrides()
    config = configs.default_config()
    configs.override(config, [f"--config.mesh.virtual_cpu_devices={max(map(int, arguments.stages))}"])
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    mesh.partition_by_gspmd()
    cases = product(arguments.widths, map(int, arguments.stages), arguments.schedules)
    show(COLUMNS, (compared(overrides, *case, arguments.rounds) for case in cases))


def compared(overrides: Sequence[str], width: int, p: int, schedule: str, rounds: int) -> list[str]:
    """Return a row."""
    sizes = (f"--config.model.hidden_size={width}", f"--config.model.num_heads={width // HEAD}")
    maker = Maker((*overrides, *sizes), 4)
    cases = {name: maker.more(f"--config.pipeline.executor={name}").pipeline(p, schedule) for name in EXECUTORS}
    strategies_of = {name: strategies.make(case.config, case.problem) for name, case in cases.items()}
    batch = cases[DISPATCH].batch
    timings = race(strategies_of, batch, rounds=rounds)
    lockstep, dispatch = (timings[name] for name in EXECUTORS)
    if not abs(lockstep.first_loss - dispatch.first_loss) <= TOLERANCE * abs(lockstep.first_loss):
        raise TrainingError(f"the losses differ: {lockstep.first_loss} and {dispatch.first_loss}")
    strategy = strategies_of[DISPATCH]
    details: Any = strategy.plan.details
    host = host_seconds(strategy, batch) / len(details.table.actions)
    times = f"{lockstep.seconds:.3f} / {dispatch.seconds:.3f} s = {lockstep.seconds / dispatch.seconds:.2f}"
    simulated = simulated_over_measured(maker, p, schedule)
    return [f"{width}, {p}", schedule, times, f"{host * 1e6:.0f}", f"{simulated:.2f}"]


def host_seconds(strategy: Strategy[Any], batch: Mapping[str, np.ndarray]) -> float:
    """Return the time in which the host enqueues a step, with nothing in flight: the shortest of several."""
    state, placed, seconds = strategy.init(jax.random.key(0)), strategy.place(batch), []
    for _ in range(5):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state, _ = strategy.step(state, placed)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def simulated_over_measured(maker: Maker, p: int, schedule: str) -> float:
    """Return the simulated length of the timeline of a dispatched step, divided by the measured one."""
    case = maker.more(f"--config.pipeline.executor={DISPATCH}", f"--config.pipeline.trace={TRACED}").pipeline(
        p, schedule
    )
    strategy = strategies.make(case.config, case.problem._replace(num_steps=TRACED))
    state, placed = strategy.init(jax.random.key(0)), strategy.place(case.batch)
    for _ in range(TRACED):
        state, _ = strategy.step(state, placed)
    jax.block_until_ready(state)
    *_, measured = strategy.timelines().values()
    details: Any = strategy.plan.details
    simulated = simulate_table(details.table, measured_times(details.table, measured))
    return float(simulated.makespan / max(span.end for span in measured))


if __name__ == "__main__":
    sys.exit(exit_code(main))
