"""Repeats the runs of an outer step (config.outer) in one process, without Ray, and compares the results bit by bit.

    jaxpar replay runs/w0 runs/w1 [runs/w2 ...]

The arguments are the workdirs of all workers that contributed. The table outer/contributions.csv in that of worker 0
decides in which round each contribution counts, also those of workers that were killed, joined or came late. Each run
is repeated up to its newest checkpoint, with which the state is compared: parameters, optimizer, anchors and residuals.

Exit codes: 0 if all of them are equal, 1 for the first difference, 2 for invalid arguments.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxpar import checkpoint, data
from jaxpar.command_line import Parser
from jaxpar.errors import printable


def main(argv: Sequence[str]) -> None:
    parser = Parser(__doc__, "jaxpar replay")
    parser.require("runs", "runs/w0 runs/w1", nargs="+", type=Path, help="workdirs of the workers")
    workdirs = parser.parse(argv).runs
    # Imported late, because JAX must be configured before it is used.
    from jaxpar.core import mesh
    from jaxpar.run.replay import replay_runs

    config = checkpoint.config_of(checkpoint.of_run(workdirs[0]), workdirs[0])
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    for line in replay_runs(workdirs):
        print(printable(line))
