"""Starts several processes of one run on this machine, as torchrun does.

    jaxpar launch --num_processes=2 [--max_restarts=3] -- --config=configs/quickstart.py --workdir=DIR [...]

Arguments after -- are passed to `jaxpar train`. The launcher sets --coordinator_address, --num_processes and
--process_id for each process. GPUs are divided equally between the processes, and every line of output is prefixed with
the process number. When one process fails, the launcher kills the others and restarts all of them from the last
checkpoint, up to --max_restarts times. Ctrl-C and SIGTERM are forwarded to all processes, which save and stop. A second
signal stops them without saving, and a third one kills them. No process outlives the launcher.

Exit codes:
  0      all processes finished, or were stopped by a signal after saving the state (--stopped_exit_code of
         `jaxpar train` replaces 0 for a stopped run)
  2      user error; the processes are not restarted
  other  the exit code of the process that failed, or 128 + N if signal N killed it
"""

from collections.abc import Sequence

from jaxpar.command_line import BEHIND, Parser, integer
from jaxpar.errors import UserError
from jaxpar.launch.launcher import check_capacity, forwarded, run_processes, visible_gpus
from jaxpar.launch.place import FLAGS


def main(argv: Sequence[str]) -> int:
    signals: list[int] = []
    with forwarded(signals):
        parser = Parser(__doc__, "jaxpar launch", BEHIND)
        parser.require("--num_processes", "--num_processes=2", type=integer(1), help="number of processes, 1 or more")
        restarts = "maximum number of restarts after a failure (default: 0)"
        parser.add_argument("--max_restarts", type=integer(0), default=0, help=restarts)
        arguments, rest = parser.parse_before_training(argv, "--num_processes=2", FLAGS)
        number = arguments.num_processes
        check_capacity(number)
        gpus = visible_gpus()
        if len(gpus) % number:
            raise UserError(f"--num_processes is {number}; it must divide the number of visible GPUs, {len(gpus)}")
        return run_processes(number, arguments.max_restarts, rest, gpus, signals)
