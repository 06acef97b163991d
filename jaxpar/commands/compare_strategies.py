"""Trains a config with every strategy, and compares their time, traffic, memory and accuracy.

    jaxpar compare strategies --config=configs/compare_bert.py [--workdir=runs/compare]
        [--strategies=ddp,gpipe,..] [--devices=2] [--cluster=h100:8] [--config.KEY=VALUE ...]

Each strategy is a run of `jaxpar train` in WORKDIR/STRATEGY, with the same examples in the same order and the same
seed. Finished runs are kept, and unfinished ones are resumed. `single`, the reference, is always one of them, and so is
every strategy with a finished run of these settings in WORKDIR. The settings of a strategy override those of the config
and the command line.

With --cluster, further columns are the times that `jaxpar plan` predicts for a cluster that need not exist.

The table is written as WORKDIR/compare.md and WORKDIR/compare.csv, pictures as WORKDIR/*.png, and both as the page
WORKDIR/compare.html, which is self-contained. docs/howto/compare.md explains the columns. A strategy that fails is in
the table with the reason.

Exit codes: 0 if all strategies have results; 1 if some failed; 2 for invalid arguments; 130 for a Ctrl-C, which stops
the current run after it has saved its state.
"""

from collections.abc import Sequence

from jaxpar.cluster.files import find_named
from jaxpar.command_line import integer, output_path
from jaxpar.commands.config_flags import ConfigParser
from jaxpar.compare.strategies import COMPARED, compare_strategies
from jaxpar.errors import FAILED


def main(argv: Sequence[str]) -> int:
    parser = ConfigParser(__doc__, "jaxpar compare strategies", "configs/compare_bert.py")
    parser.add_argument("--workdir", type=output_path, default="runs/compare", help="directory of the runs")
    parser.add_names("--strategies", COMPARED)
    parser.add_argument("--devices", type=integer(2), help="number of devices (default: all)")
    parser.add_argument("--cluster", metavar="FILE|NAME:HOSTSxDEVICES", help="also predict times on this cluster")
    arguments, overrides = parser.parse_with_overrides(argv)
    named, workdir = arguments.cluster, arguments.workdir
    outcomes, lines = compare_strategies(
        arguments.config,
        overrides,
        workdir,
        names=arguments.strategies,
        num_devices=arguments.devices,
        predict_for=None if named is None else (named, find_named(named, "--cluster")[1]),
    )
    print("\n".join(["", *lines, "", f"page      {workdir}/compare.html"]))
    return FAILED if any(row.failed for row in outcomes.values()) else 0
