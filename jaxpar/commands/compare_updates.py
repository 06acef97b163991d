"""Measures how stale gradients affect a model: trains it with each update policy, with and without a straggler.

    jaxpar compare updates --config=configs/quickstart.py [--workdir=runs/updates] [--workers=4]
        [--slowdown=4] [--cases=sync,async,..] [--config.KEY=VALUE ...]

Each case is a run of `jaxpar train`; a run that is already in the workdir is not repeated. The training
loss against virtual time is drawn as WORKDIR/updates.png: without and with the straggler, and the mitigations in
panels of their own. A table is printed, and written as WORKDIR/updates.md:

  throughput   gradients per virtual second; one worker computes 1 by default
  staleness    number of versions between the one a gradient is computed from and the one it is applied to: mean,
               maximum
  recovered    for a mitigation: the share of the gap between async and sync that it closes (of log perplexity)
  time to      virtual seconds to the training loss that sync without a straggler has after 1/4 of the run

A case that diverges has no results and no curve; the legend names it.

The delays are those of config.asynchronous.delays; --config.asynchronous.delays.distribution=lognormal, for example,
changes them.
"""

from collections.abc import Sequence

from jaxpar.command_line import integer, number, output_path
from jaxpar.commands.config_flags import ConfigParser
from jaxpar.compare.updates import UPDATE_CASES, compare_updates


def main(argv: Sequence[str]) -> None:
    parser = ConfigParser(__doc__, "jaxpar compare updates")
    add, at_least_1 = parser.add_argument, number("a number of at least 1", minimum=1)
    add("--workdir", type=output_path, default="runs/updates", help="directory of the runs")
    add("--workers", type=integer(1), default=4, help="number of workers")
    add("--slowdown", type=at_least_1, default=4.0, help="how many times slower the straggler is")
    parser.add_names("--cases", UPDATE_CASES)
    arguments, overrides = parser.parse_with_overrides(argv)
    workdir, workers, slowdown = arguments.workdir, arguments.workers, arguments.slowdown
    lines = compare_updates(
        arguments.config, overrides, workdir, num_workers=workers, slowdown=slowdown, cases=arguments.cases
    )
    print("\n".join(["", *lines, "", f"picture   {workdir}/updates.png"]))
