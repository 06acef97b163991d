r"""Examines what a run needs before it starts, and names what will break it, in one table.

    jaxpar doctor [--workdir=DIR] [--num_processes=3] [--seconds=60]
    jaxpar doctor [--workdir=DIR] --coordinator_address=HOST:PORT --num_processes=N --process_id=I

Run it where the run will: in each task of SLURM, each pod, or by hand on each machine, with the flags of `jaxpar train`
for several processes. With --num_processes alone, the processes start on this machine. Examined are: versions that
differ or are known to hang, drivers, memory, disk, clocks, whether all share the workdir, whether every pair of
processes can send and how fast, and an all-reduce over all devices.

Exit codes: 0 if nothing was found; 2 with a line that names the culprit, or for invalid arguments.
"""

import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from jaxpar.command_line import Parser, format_rows, integer, number
from jaxpar.errors import TrainingError, UserError
from jaxpar.launch.doctor.examination import Examination, answer, guarded
from jaxpar.launch.launcher import check_capacity, gpus_to_divide, share_of_gpus
from jaxpar.launch.place import BIND, FLAGS, Place, find_place, free_port


def main(argv: Sequence[str]) -> int:
    parser = Parser(__doc__, "jaxpar doctor")
    parser.add_argument("--workdir", type=Path, help="directory of the run, which need not exist")
    parser.add_argument("--seconds", type=number("at least 1", 1), default=60.0, help="time for each answer")
    for name, flag in FLAGS.items():
        parser.add_argument(
            f"--{name}", type=integer(int(name == "num_processes")) if flag.kind is int else str, help=flag.help
        )
    arguments = parser.parse(argv)
    count = arguments.num_processes
    others: list[subprocess.Popen[bytes]] = []
    if count and arguments.coordinator_address is None and arguments.process_id is None:
        check_capacity(count)
        gpus = gpus_to_divide(count)
        place = Place(f"127.0.0.1:{free_port()}", count, 0) if count > 1 else None
        if place is not None:
            others = [_start(place._replace(process_id=i), arguments, gpus) for i in range(1, count)]
            os.environ |= {BIND: place.coordinator_address, **share_of_gpus(gpus, 0, count)}
    else:
        place = find_place({name: getattr(arguments, name) for name in FLAGS})
    try:
        return _examine(place, arguments.workdir, arguments.seconds)
    finally:
        for process in others:
            process.kill()  # JAX, in which it may wait for this one, would not answer a SIGTERM
            process.wait()


def _start(place: Place, arguments: Namespace, gpus: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start another process of this examination on this machine."""
    flags = [f"--{name}={value}" for name, value in zip(FLAGS, place, strict=False)]
    flags += [f"--seconds={arguments.seconds}", *([f"--workdir={arguments.workdir}"] if arguments.workdir else [])]
    command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", "jaxpar", "doctor", *flags]
    environment = os.environ | share_of_gpus(gpus, place.process_id, place.num_processes)
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def _examine(place: Place | None, workdir: Path | None, seconds: float) -> int:
    if place is not None and place.process_id:
        with guarded(10 * seconds, lambda: None):
            try:
                answer(place, workdir, seconds)
            except TrainingError as error:
                raise UserError(str(error)) from None
        return 0
    examination = Examination(place, workdir, seconds)

    def show() -> None:
        table = [["", "found", ""], *([row.what, row.found, row.problem and "PROBLEM"] for row in examination.rows)]
        print(format_rows(table), flush=True)

    def hangs() -> None:
        show()
        part = f"the examination of {examination.part} did not end"
        print(f"jaxpar: {part} within {10 * seconds:g} s; the rows above are complete", file=sys.stderr, flush=True)

    with guarded(10 * seconds, hangs):
        rows = examination.run()
    show()
    problems = [row for row in rows if row.problem]
    if problems:
        raise UserError("; ".join(f"{row.what}: {row.problem}" for row in problems))
    print("no problem found", flush=True)
    return 0
