"""Measures mitigations of staleness at a learning rate at which stale gradients do harm.

    scripts/python scripts/bench/mitigations.py [--config=configs/mlp_mnist.py] [--workers=8] [--seeds=3]
        [--cases=async,async+dc_asgd,..] [--workdir=runs/mitigations] [--config.KEY=VALUE ...]

Each case is trained by the command line in a separate process, once for each seed; `jaxpar compare updates` has the
cases. The table has the mean over seeds, and the range from the lowest to the highest score. Runs with results in the
workdir are not repeated. `dc_strength` is the lambda of Zheng et al., 2017; the cases without it have their values for
CIFAR-10.
"""

import sys

from jaxpar.command_line import Parser, integer, names, output_path
from jaxpar.compare.updates import UPDATE_CASES
from jaxpar.errors import exit_code
from scripts.bench.accuracy import compare

ROWS = (
    "sync",
    "async",
    "async+staleness_aware",
    "async+dc_asgd",
    "async+dc_asgd dc_strength=16",
    "async+dc_asgd dc_strength=64",
    "async+adaptive_dc_asgd",
    "async+adaptive_dc_asgd dc_strength=8",
    "async+adaptive_dc_asgd dc_strength=16",
)


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--config", default="configs/mlp_mnist.py", help="config file as PATH[:PRESET]")
    parser.add_argument("--workers", type=integer(1), default=8, help="number of workers")
    parser.add_argument("--seeds", type=integer(1), default=3, help="number of runs of each case")
    parser.add_argument(
        "--cases", type=names(ROWS), default=list(ROWS), help=f"some of {', '.join(map(repr, ROWS))} (default: all)"
    )
    parser.add_argument("--workdir", type=output_path, default="runs/mitigations", help="directory of the runs")
    arguments, overrides = parser.parse_with_overrides()
    overrides += [
        "--config.strategy=async_data_parallel",
        "--config.mesh.data=1",
        f"--config.asynchronous.num_workers={arguments.workers}",
    ]
    settings = {row: chosen(row) for row in ("sync", *arguments.cases)}
    compare("updates", settings, arguments.config, overrides, arguments.workdir, arguments.seeds)


def chosen(row: str) -> list[str]:
    """Return the overrides that select a case and its settings: `CASE`, or `CASE KEY=VALUE ..`."""
    case, *settings = row.split()
    return [f"--config.asynchronous.{setting}" for setting in (*UPDATE_CASES[case], *settings)]


if __name__ == "__main__":
    sys.exit(exit_code(main))
