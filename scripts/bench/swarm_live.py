"""Compares the step of a live swarm of one peer per stage with the same pipeline in one SPMD program.

    scripts/python scripts/bench/swarm_live.py [--stages=3] [--rounds=5] [--examples=4] [--config.KEY=VALUE ...]

The model is that of scripts/bench/pipeline.py. Both have four microbatches per stage and use the same cores: the
pipeline 1f1b as many virtual CPU devices as stages, the swarm as many processes with one thread each. Steps alternate.
Prints the medians of both, their ratio, and what the time of the peers consists of: computing; the rest of the time
between a call and its answer, which is Ray and copying; and waiting for work or for the averaging and the update.
"""

import statistics
import sys
import time
from typing import Any

import jax

from jaxpar import config as configs
from jaxpar import strategies
from jaxpar.command_line import Parser, integer
from jaxpar.core import mesh
from jaxpar.errors import exit_code
from jaxpar.strategies.swarm.live.events import EventKind, LiveEvent, listeners
from jaxpar.strategies.swarm.live.trainer import LiveTrainer
from scripts.bench.pipeline_case import Maker
from scripts.bench.tables import COLUMNS, show


def main() -> None:
    """Measure and print."""
    parser = Parser(__doc__)
    parser.add_argument("--stages", type=integer(1), default=3, help="number of stages")
    parser.add_argument("--rounds", type=integer(1), default=5, help="number of steps to time")
    parser.add_argument("--examples", type=integer(1), default=4, help="examples in a microbatch")
    arguments, overrides = parser.parse_with_overrides()
    num_stages, rounds = arguments.stages, arguments.rounds
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_stages)
    mesh.partition_by_gspmd()
    maker = Maker(tuple(overrides), arguments.examples)
    case = maker.pipeline(num_stages, "1f1b")
    config = case.config.copy_and_resolve_references()
    settings = {"mode": "live", "stages": num_stages, "peers": num_stages, "num_microbatches": 4 * num_stages}
    more = [f"--config.swarm.{key}={value}" for key, value in settings.items()]
    configs.override(config, ["--config.strategy=swarm", "--config.mesh.stage=1", *more])
    contenders = [case.contender, strategies.make(config, case.problem)]
    computed: list[float] = []

    def listen(event: LiveEvent) -> None:
        if event.kind == EventKind.COMPUTED:
            computed.append(event.value)

    listeners.append(listen)
    states: list[Any] = [contender.init(jax.random.key(0)) for contender in contenders]
    seconds: list[list[float]] = [[], []]
    for number in range(rounds + 2):  # the first two compile
        for index, contender in enumerate(contenders):
            computed.clear()
            begin = time.perf_counter()
            states[index], metrics = contender.step(states[index], contender.place(case.batch))
            jax.block_until_ready((states[index][1], metrics))
            if number > 1:
                seconds[index].append(time.perf_counter() - begin)
    spmd, alive = map(statistics.median, seconds)
    step: LiveTrainer = contenders[1].step.__self__  # type: ignore[attr-defined]
    table = step.routing_table()
    busy = float((table.finish - table.start)[table.step == step.num_steps - 1].sum())
    last = seconds[1][-1]
    parts = {"computing": sum(computed), "Ray and copying": busy - sum(computed), "waiting": num_stages * last - busy}
    rows = [["step of a live swarm / of `1f1b` in one program", f"{alive:.3f} / {spmd:.3f} s = {alive / spmd:.2f}", ""]]
    rows += [[f"{name}, of the time of peers", f"{part / (num_stages * last):.1%}", ""] for name, part in parts.items()]
    show(COLUMNS, rows)


if __name__ == "__main__":
    sys.exit(exit_code(main))
