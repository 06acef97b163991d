r"""Examines what a run needs before it starts, and names what will break it, in one table.

    jaxpar doctor [--workdir=DIR] [--num_processes=3] [--seconds=60]
    jaxpar doctor [--workdir=DIR] --coordinator_address=HOST:PORT --num_processes=N --process_id=I

Run it where the run will: in each task of SLURM, each pod, or by hand on each machine, with the flags of `jaxpar train`
for several processes. With --num_processes alone, the processes start on this machine. Examined are: versions that
differ or are known to hang, drivers, memory, disk, clocks, whether all share the workdir, whether every pair of
processes can send and how fast, and an all-reduce over all devices.

Exit codes: 0 if nothing was found; 2 with a line that names the culprit, or for invalid arguments.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpar.command_line import Parser, format_rows, integer, number
from jaxpar.errors import TrainingError, UserError
from jaxpar.launch import doctor
from jaxpar.launch.launcher import check_capacity
from jaxpar.launch.place import FLAGS, Place, find_place, free_port


def main(argv: Sequence[str]) -> int:
    parser = Parser(__doc__, "jaxpar doctor")
    parser.add_argument("--workdir", type=Path, help="directory of the run, which need not exist")
    parser.add_argument("--seconds", type=number("be positive", 1), default=60.0, help="time for each answer")
    for name, flag in FLAGS.items():
        parser.add_argument(f"--{name}", type=integer(0) if flag.kind is int else str, help=flag.help)
    arguments = parser.parse(argv)
    flags = {name: getattr(arguments, name) for name in FLAGS}
    others: list[subprocess.Popen[bytes]] = []
    if arguments.num_processes and arguments.coordinator_address is None and arguments.process_id is None:
        check_capacity(arguments.num_processes)
        address, count = f"127.0.0.1:{free_port()}", arguments.num_processes
        place = Place(address, count, 0) if count > 1 else None
        command = [sys.executable, "-m", "jaxpar", "doctor", *(one for one in argv if "num_processes" not in one)]
        command += [f"--coordinator_address={address}", f"--num_processes={count}"]
        others = [subprocess.Popen([*command, f"--process_id={i}"], stdout=subprocess.DEVNULL) for i in range(1, count)]
    else:
        place = find_place(flags)
    try:
        return _examine(place, arguments.workdir, arguments.seconds)
    finally:
        for process in others:
            process.kill()  # JAX, in which it may wait for this one, would not answer a SIGTERM
            process.wait()


def _examine(place: Place | None, workdir: Path | None, seconds: float) -> int:
    if place is not None and place.process_id:
        with doctor.guarded(10 * seconds, lambda: None):
            try:
                doctor.answer(place, workdir, seconds)
            except TrainingError as error:
                raise UserError(str(error)) from None
        return 0
    examination = doctor.Examination(place, workdir, seconds)

    def show() -> None:
        table = [["", "found", ""], *([row.what, row.found, row.problem and "PROBLEM"] for row in examination.rows)]
        print(format_rows(table), flush=True)

    def hangs() -> None:
        show()
        print(f"jaxpar: the devices do not answer within {10 * seconds:g} s; the rows above are right", file=sys.stderr)

    with doctor.guarded(10 * seconds, hangs):
        rows = examination.run()
    show()
    problems = [row for row in rows if row.problem]
    if problems:
        raise UserError("; ".join(f"{row.what}: {row.problem}" for row in problems))
    return 0
