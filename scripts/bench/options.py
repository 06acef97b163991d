"""Times steps on CPUs with one choice of jaxpar / with the other one, on one device and with DDP on two.

    scripts/python scripts/bench/options.py OPTION [--only=quickstart] [--rounds=9]

OPTION is a choice that a config's `auto` or jaxpar itself makes:

  scan      layers are unrolled / scanned
  products  matrix products are XLA's / YNNPACK's

Both programs take turns in one process, on random texts. Prints the ratio of the medians of time and of CPU time.
"""

import sys
from typing import Any

from jaxpar import data, strategies
from jaxpar.cluster import find_cluster
from jaxpar.command_line import Parser, integer
from jaxpar.core import mesh
from jaxpar.errors import check_choice, exit_code
from jaxpar.strategies import Strategy, placement
from scripts.bench.gpu_steps import random_batch
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
PLACES = {
    "one device": ("strategy=single", "mesh.data=1"),
    "DDP, 2 devices": ("strategy=data_parallel", "exchange=ddp", "mesh.data=2"),
}
# For each option, the settings of both programs, and the number of parameters from which XLA computes the products.
OPTIONS = {
    "scan": (
        (("model.scan_layers=False",), placement.LARGE_MODEL),
        (("model.scan_layers=True",), placement.LARGE_MODEL),
    ),
    "products": (((), 0), ((), sys.maxsize)),
}


def main() -> None:
    """Print a row for each model."""
    parser = Parser(__doc__)
    parser.add_argument("option", metavar="OPTION", help="scan or products")
    parser.add_argument("--only", default="", help="models whose name contains this text")
    parser.add_argument("--rounds", type=integer(1), default=9, help="measured rounds of a step")
    arguments = parser.parse()
    check_choice("OPTION", arguments.option, OPTIONS)
    show(
        ["model", *PLACES],
        (
            [name, *(ratios(case, place, arguments.option, arguments.rounds) for place in PLACES.values())]
            for name, case in CASES.items()
            if arguments.only in name
        ),
    )


def ratios(case: Case, place: tuple[str, ...], option: str, rounds: int) -> str:
    """Return the ratios of the times and of the CPU times of a step."""
    contenders = {str(number): build(case, place, *choice) for number, choice in enumerate(OPTIONS[option])}
    config = configured(case, place)
    batch = random_batch(make_problem(config, case, find_cluster()), case.words)
    one, other = race(contenders, batch, rounds=rounds).values()
    return f"{one.seconds / other.seconds:.3f}, {one.cpu_seconds / other.cpu_seconds:.3f}"


def build(case: Case, place: tuple[str, ...], settings: tuple[str, ...], large_model: int) -> Strategy[Any]:
    """Return the strategy of a case on virtual devices."""
    config = configured(case, ("mesh.virtual_cpu_devices=2", *place, *settings))
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    placement.LARGE_MODEL = large_model
    return strategies.make(config, make_problem(config, case, find_cluster()))


if __name__ == "__main__":
    sys.exit(exit_code(main))
