"""Measures the bubble of a pipeline of two stages on the timeline of one step, without and with a flush.

    scripts/python scripts/bench/bubble.py [--schedules=pipedream,1f1b] [--rounds=3] [--config.KEY=VALUE ...]

The model is a BERT classifier with 4 blocks of width 512 on random tokens; a batch has 16 microbatches of 4 texts of
128 tokens. Every round trains each schedule again; a row has the least and the most of its bubbles.
"""

import sys

import jax

from jaxpar import config as configs
from jaxpar import data, strategies
from jaxpar.command_line import Parser, integer, names
from jaxpar.core import mesh
from jaxpar.errors import exit_code
from jaxpar.strategies.pipeline.executor.timeline import bubble_rate
from jaxpar.strategies.pipeline.tables.periodic import CONTINUOUS
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES
from scripts.bench.pipeline_case import CLASSIFIER, Case, Maker
from scripts.bench.tables import COLUMNS, show

STEP, NUM_STAGES, NUM_MICROBATCHES, NUM_EXAMPLES = 6, 2, 16, 4
MODEL = ("--config.model.num_layers=4", "--config.model.hidden_size=512", f"--config.pipeline.trace={STEP}")


def bubble(case: Case) -> float:
    """Train until the measured step, and return its measured bubble."""
    strategy = strategies.make(case.config, case.problem)
    state, batch = strategy.init(jax.random.key(0)), strategy.place(case.batch)
    for _ in range(STEP):
        state, _ = strategy.step(state, batch)
    jax.block_until_ready(state)
    *_, measured = strategy.timelines().values()
    return bubble_rate(measured)


def main() -> None:
    """Print the bubbles."""
    parser = Parser(__doc__)
    known = (*SCHEDULES, *CONTINUOUS)
    parser.add_argument("--schedules", type=names(known), default=["pipedream", "1f1b"], help="schedules")
    parser.add_argument("--rounds", type=integer(1), default=3, help="measurements of each schedule")
    parsed, overrides = parser.parse_with_overrides()
    config = configs.default_config()
    configs.override(config, [f"--config.mesh.virtual_cpu_devices={NUM_STAGES}"])
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    mesh.partition_by_gspmd()
    maker = Maker((*CLASSIFIER, *MODEL, *overrides), NUM_EXAMPLES)
    rates: dict[str, list[float]] = {schedule: [] for schedule in parsed.schedules}
    for _ in range(parsed.rounds):
        for schedule in parsed.schedules:
            rates[schedule].append(bubble(maker.pipeline(NUM_STAGES, schedule, m=NUM_MICROBATCHES)))
    rows = [
        [
            f"bubble of {name}, {NUM_STAGES} stages",
            f"{min(of):.1%} to {max(of):.1%}",
            "<= 5%" if name in CONTINUOUS else "",
        ]
        for name, of in rates.items()
    ]
    show(COLUMNS, rows)


if __name__ == "__main__":
    sys.exit(exit_code(main))
