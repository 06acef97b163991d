"""Times steps on CPUs with one choice of jaxpar / with the other one, on one device and with DDP on two.

    scripts/python scripts/bench/options.py OPTION [--only=quickstart] [--rounds=9]

OPTION is a choice that a config's `auto` or jaxpar itself makes:

  scan      layers are unrolled / scanned
  products  matrix products are XLA's / YNNPACK's
  kernels   products for the gradients of kernels are of transposed copies / of what the backward pass has

Both programs take turns in one process, which each cell has for itself, on random texts. Prints the ratio of the
medians of time and of CPU time.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from jaxpar import data, strategies
from jaxpar.cluster import find_cluster
from jaxpar.command_line import Parser, integer
from jaxpar.core import mesh
from jaxpar.errors import check_choice, exit_code
from jaxpar.models import layers
from jaxpar.strategies import Strategy, placement
from scripts.bench.gpu_steps import random_batch
from scripts.bench.peers import in_new_process
from scripts.bench.planned_memory import GPT, Case, configured, make_problem
from scripts.bench.steps import race
from scripts.bench.tables import show

CASES = {
    "quickstart, 256 x 16 tokens": Case(256, 16, 8192, ("model.pooling=mean",)),
    "quickstart, 256 x 48 tokens": Case(256, 48, 8192, ("model.pooling=mean",)),
    "BERT small, 64 x 64 tokens": Case(64, 64, 30522, ("model.size=small",)),
    "BERT base, 32 x 128 tokens": Case(32, 128, 30522, ("model.size=base",)),
    **{
        f"GPT, 8 layers of width {width}, 32 x 128 tokens": Case(
            32, 128, 8192, (*GPT, "model.num_layers=8", f"model.hidden_size={width}", f"model.num_heads={width // 64}")
        )
        for width in (128, 256, 768)
    },
}
TWO_DEVICES = "mesh.virtual_cpu_devices=2"
PLACES = {
    "one device": ("strategy=single", "mesh.data=1"),
    "DDP, 2 devices": ("strategy=data_parallel", "exchange=ddp", "mesh.data=2"),
}


class Choice(NamedTuple):
    """The choices of one of two programs."""

    settings: tuple[str, ...] = ()
    large_model: int = placement.LARGE_MODEL  # the number of parameters from which XLA computes the products
    kernel_gradient: Callable[[jax.Array, jax.Array], jax.Array] = layers.kernel_gradient


OPTIONS = {
    "scan": (Choice(("model.scan_layers=False",)), Choice(("model.scan_layers=True",))),
    "products": (Choice(large_model=0), Choice(large_model=sys.maxsize)),
    "kernels": (Choice(), Choice(kernel_gradient=lambda x_NF, slope_NG: x_NF.T @ slope_NG)),
}


def main() -> None:
    """Print a row for each model."""
    parser = Parser(__doc__)
    parser.add_argument("option", metavar="OPTION", help="scan, products or kernels")
    parser.add_argument("--only", default="", help="models whose name contains this text")
    parser.add_argument("--rounds", type=integer(1), default=9, help="measured rounds of a step")
    arguments = parser.parse()
    check_choice("OPTION", arguments.option, OPTIONS)
    show(
        ["model", *PLACES],
        (
            [
                name,
                *(in_new_process(ratios, case, place, arguments.option, arguments.rounds) for place in PLACES.values()),
            ]
            for name, case in CASES.items()
            if arguments.only in name
        ),
    )


def ratios(case: Case, place: tuple[str, ...], option: str, rounds: int) -> str:
    """Return the ratios of the times and of the CPU times of a step."""
    config = configured(case, (TWO_DEVICES, *place))
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    batch = random_batch(make_problem(config, case, find_cluster()), case.words)
    contenders = {str(number): build(case, place, choice, batch) for number, choice in enumerate(OPTIONS[option])}
    one, other = race(contenders, batch, rounds=rounds).values()
    return f"{one.seconds / other.seconds:.3f}, {one.cpu_seconds / other.cpu_seconds:.3f}"


def build(case: Case, place: tuple[str, ...], choice: Choice, batch: Mapping[str, np.ndarray]) -> Strategy[Any]:
    """Return the strategy of a case on virtual devices, whose step is compiled."""
    config = configured(case, (TWO_DEVICES, *place, *choice.settings))
    with (
        mock.patch.object(placement, "LARGE_MODEL", choice.large_model),
        mock.patch.object(layers, "kernel_gradient", choice.kernel_gradient),
    ):
        strategy = strategies.make(config, make_problem(config, case, find_cluster()))
        jax.block_until_ready(strategy.step(strategy.init(jax.random.key(0)), strategy.place(batch)))
    return strategy


if __name__ == "__main__":
    sys.exit(exit_code(main))
