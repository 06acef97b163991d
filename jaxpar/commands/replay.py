"""Repeats the runs of an outer step (config.outer) in one process, without Ray, and compares the results bit by bit.

    jaxpar replay runs/w0 runs/w1 [runs/w2 ...]

The arguments are the workdirs of all workers that contributed. The table outer/contributions.csv in that of worker 0
decides in which round each contribution counts, also those of workers that were killed, joined or came late. Each run
is repeated up to its newest checkpoint, with which the state is compared: parameters, optimizer, anchors and residuals.

Exit codes: 0 if all of them are equal, 1 for the first difference, 2 for invalid arguments.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxpar import config as configs
from jaxpar import data
from jaxpar.command_line import Parser
from jaxpar.errors import UserError, printable


def main(argv: Sequence[str]) -> None:
    parser = Parser(__doc__, "jaxpar replay")
    parser.require("runs", "runs/w0 runs/w1", nargs="+", type=Path, help="workdirs of the workers")
    workdirs = parser.parse(argv).runs
    # Imported late, because JAX must be configured before it is used.
    from jaxpar.core import mesh
    from jaxpar.run.replay import replay_runs

    # Checkpoints are read later, because that uses JAX.
    saved = [configs.read_config(workdir) for workdir in workdirs]
    if len(numbers := {one.mesh.virtual_cpu_devices for one in saved}) > 1:
        raise UserError(
            f"config.mesh.virtual_cpu_devices of the runs is {' and '.join(map(str, sorted(numbers)))}; it must be the "
            "same in all of them, because one process repeats them on its devices"
        )
    mesh.prepare_jax(saved[0], data.cache_dir(saved[0]) / "xla")
    for line in replay_runs(workdirs):
        print(printable(line))
