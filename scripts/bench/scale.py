"""Predicts the memory and the throughput of strategies for GPT-2 XL on H100s, and draws both. Nothing is compiled.

    scripts/python scripts/bench/scale.py [--memory=docs/memory.png] [--throughput=docs/scale.png]

The model has 1.5 billion parameters, computes in bfloat16, and is trained on 512 texts of 1,024 tokens per step,
without dropout, on hosts of 8. A device computes 4 texts at a time, fewer where it has less; gradients are accumulated.
Pipelines have 8 stages, one for each device of a host; gpipe computes activations again (pipeline.remat), because it
does not fit otherwise. Memory is that of the fullest of 8 devices.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from jaxpar import config as configs
from jaxpar.choose.asynchronous import predicted
from jaxpar.choose.candidates import Candidate, gpu_space, state_ratios
from jaxpar.choose.costs.step import StepCosts
from jaxpar.cluster.files import find_named
from jaxpar.cluster.target import memory_fraction
from jaxpar.colors import CURVE_COLORS
from jaxpar.command_line import Parser, check_new_file, output_path
from jaxpar.compare.pictures import MARKERS, PICTURE_STYLE, draw_memory
from jaxpar.compare.strategies import strategy_settings
from jaxpar.errors import exit_code, format_bytes
from scripts.bench.tables import show
from scripts.bench.vocabulary import DEFAULTS, make_problem

TEXTS, LENGTH, STAGES, AT_ONCE = 512, 1024, 8, 4
TICKS = (0.2, 0.5, 1, 2, 5, 10)  # million tokens/s
GPUS = (8, 16, 32, 64, 128, 256)
REMAT = "gpipe"  # the strategy that computes activations again
PIPELINES = (REMAT, "1f1b", "zb_h1")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", *PIPELINES)
COLUMNS = ("strategy", "H100s", "tokens/s", "memory of a GPU")
SHOWN = ("ddp", "zero1", "zero3", *PIPELINES)


def main() -> None:
    """Print a row for each strategy and number of GPUs, and draw the pictures."""
    parser = Parser(__doc__)
    parser.add_argument("--memory", type=output_path, default="docs/memory.png", help="the picture of the memory")
    parser.add_argument("--throughput", type=output_path, default="docs/scale.png", help="that of the throughput")
    arguments = parser.parse()
    check_new_file("--memory", arguments.memory, [".png", ".svg"])
    check_new_file("--throughput", arguments.throughput, [".png", ".svg"])
    found: list[Predicted] = []

    def rows() -> Iterator[list[str]]:
        for one in predictions():
            found.append(one)
            yield row(one)

    show(COLUMNS, rows())
    rates: dict[str, dict[int, float]] = defaultdict(dict)
    for one in found:
        if one.strategy in SHOWN:
            rates[one.label][one.gpus] = one.rate
    memory = {
        one.label: {**one.costs.state._asdict(), "activations": one.costs.nbytes - sum(one.costs.state)}
        for one in found
        if one.gpus == GPUS[0]
    }
    with matplotlib.rc_context(PICTURE_STYLE):
        draw_memory(memory).savefig(arguments.memory, dpi=150)
        draw_rates(rates).savefig(arguments.throughput, dpi=150)


class Predicted(NamedTuple):
    """The predicted costs of a strategy."""

    gpus: int
    strategy: str
    costs: StepCosts

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return TEXTS * LENGTH / self.costs.seconds

    @property
    def label(self) -> str:
        """Its name in the pictures."""
        return f"{self.strategy} (remat)" if self.strategy == REMAT else self.strategy


def predictions() -> Iterator[Predicted]:
    """Yield the predictions of each strategy for each number of GPUs."""
    for number in GPUS:
        cluster = find_named(f"h100:{number // 8}x8", "cluster")[1]
        base: Any = configs.default_config()
        base.update_from_flattened_dict(DEFAULTS | {"model.size": "gpt2_xl", "batch_size": TEXTS})
        base.pipeline.executor = "dispatch"
        problem = make_problem(base, cluster, length=LENGTH)
        assert cluster.memory_bytes is not None
        space = gpu_space(base, problem, cluster, memory_fraction() * cluster.memory_bytes, {})
        ratios = state_ratios(problem)
        for name in STRATEGIES if number == GPUS[0] else SHOWN:
            found = predicted(space, settings_of(base, name, number), ratios)
            assert isinstance(found, Candidate), found
            yield Predicted(number, name, found.costs)


def row(one: Predicted) -> list[str]:
    """Return the row of a prediction in the table."""
    return [one.strategy, str(one.gpus), f"{one.rate:,.0f}", format_bytes(one.costs.nbytes)]


def settings_of(base: Any, name: str, number: int) -> Any:
    """Return the config of a strategy on this number of GPUs."""
    config = base.copy_and_resolve_references()
    configs.override(config, strategy_settings(name, number, STAGES))
    replicas = number // STAGES if name in PIPELINES else config.mesh.data
    microbatches = max(TEXTS // (replicas * AT_ONCE), 1)
    if name in PIPELINES:
        config.pipeline.num_microbatches = min(max(microbatches, 2 * STAGES), TEXTS // replicas)
        config.pipeline.remat = "full" if name == REMAT else "none"
    else:
        config.optimizer.accumulation_steps = microbatches
    return config


def draw_rates(rates: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draw tokens per second against the number of GPUs, both logarithmic, and what is proportional to the latter."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    for (name, of_name), color, marker in zip(rates.items(), CURVE_COLORS[1:], MARKERS, strict=False):
        axes.loglog(GPUS, [of_name[number] / 1e6 for number in GPUS], marker=marker, color=color, ms=5, label=name)
    fastest = max(of_name[GPUS[0]] for of_name in rates.values()) / GPUS[0] / 1e6
    axes.loglog(GPUS, [fastest * number for number in GPUS], ":", color="black", lw=1, label="fastest on 8, scaled")
    axes.set_xticks(GPUS, [str(number) for number in GPUS])
    axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    axes.set(xlabel="number of H100s", ylabel="predicted throughput (million tokens/s)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(exit_code(main))
