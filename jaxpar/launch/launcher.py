"""Starts several processes of one run on this machine, as torchrun does.

    scripts/launch --num_processes=2 [--max_restarts=3] -- --config=configs/quickstart.py --workdir=DIR [...]

What follows -- is for scripts/train, except what the launcher sets for each process: --coordinator_address,
--num_processes and --process_id. Each process gets its share of the GPUs, if there are any, and its lines of output
have its number before them. When one ends with an error the others are ended too, and all are started again, from the
last checkpoint, up to --max_restarts times. Ctrl-C and SIGTERM go to all of them, which then save and stop; a second
one ends them at once, a third kills them. None of them outlives the launcher.

Exit codes: 0 all finished, or stopped by a signal with everything saved (or the --stopped_exit_code of scripts/train);
2 a mistake of the user's, after which nothing is started again; else that of the process that failed, 128 + N where
signal N ended it.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from jaxpar.errors import FAILED, HANGS, USER_ERROR, is_failure
from jaxpar.launch.place import COMMAND, FLAGS
from jaxpar.launch.signals import SIGNALS

NAME = "python -m jaxpar.launch.launcher"
LAUNCHER = "JAXPAR_LAUNCHER"  # environment variable of its processes: its process id
PR_SET_PDEATHSIG = 1  # linux/prctl.h
ORDER = {HANGS: 0, USER_ERROR: 1, -signal.SIGABRT: 3}  # of several that failed; another signal 0, another code 2
NOISE = "[Gloo] Rank "  # how lines begin that a library prints about its connections
POLL_SECONDS = 0.05


def main() -> int:
    """The command line."""
    signals: list[int] = []
    with forwarded(signals):
        asked, gpus = read_arguments()
        return run_processes(asked, gpus, signals)


def read_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments of the command line, and the GPUs there are."""
    parser = argparse.ArgumentParser(
        prog="scripts/launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num_processes", type=int, required=True, help="how many, 1 or more")
    parser.add_argument("--max_restarts", type=int, default=0, help="how often all may be started again")
    parser.add_argument("arguments", nargs="*", help="of scripts/train, after --")
    arguments, unknown = parser.parse_known_args()
    if unknown:
        parser.error(f"{unknown[0]!r} is not an argument of the launcher; those of scripts/train come after --")
    for argument in arguments.arguments:
        name = argument.partition("=")[0].lstrip("-")
        if argument.startswith("-") and name in FLAGS:
            parser.error(f"--{name} is set by the launcher for each process; it must not come after --")
    if arguments.num_processes < 1:
        parser.error(f"--num_processes is {arguments.num_processes}; it must be 1 or more")
    if arguments.max_restarts < 0:
        parser.error(f"--max_restarts is {arguments.max_restarts}; it must be 0 or more")
    gpus = visible_gpus()
    if len(gpus) % arguments.num_processes:
        parser.error(f"--num_processes is {arguments.num_processes}; it must divide the {len(gpus)} GPUs")
    return arguments, gpus


def run_processes(asked: argparse.Namespace, gpus: Sequence[str], signals: list[int]) -> int:
    """Start the processes, again where one fails, and return the exit code. signals: those received, as they come."""
    flags = f"--num_processes={asked.num_processes}" + f" --max_restarts={asked.max_restarts}" * (
        asked.max_restarts > 0
    )
    command = f"{os.environ.get(COMMAND, NAME)} {flags}"
    for restart in range(asked.max_restarts + 1):
        try:
            group = Group(asked.arguments, asked.num_processes, gpus, command)
        except OSError as error:
            print_line(f"a process cannot be started: {error.strerror}")
            return FAILED
        number, code = group.wait(signals)
        if not is_failure(code):
            return code
        print_line(
            f"process {number} ended {format_exit(code)}" + "; the others were ended too" * (asked.num_processes > 1)
        )
        if code == USER_ERROR or signals or restart == asked.max_restarts:
            break
        print_line(f"restart {restart + 1} of {asked.max_restarts}, from the last checkpoint")
    return code if code >= 0 else 128 - code


class Group:
    """The processes of one start."""

    def __init__(self, arguments: Sequence[str], num_processes: int, gpus: Sequence[str], command: str):
        """arguments: of scripts/train; gpus: as in CUDA_VISIBLE_DEVICES, to divide; command: what comes before `--`."""
        share = len(gpus) // num_processes
        variables = {
            FLAGS["coordinator_address"].variable: f"localhost:{free_port()}",
            FLAGS["num_processes"].variable: str(num_processes),
            LAUNCHER: str(os.getpid()),
            COMMAND: f"{command} --",
            "PYTHONUNBUFFERED": "1",
        }
        self._processes: list[subprocess.Popen[str]] = []
        self._printers: list[threading.Thread] = []
        try:
            for number in range(num_processes):
                environment = os.environ | variables | {FLAGS["process_id"].variable: str(number)}
                if gpus:
                    environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[number * share : (number + 1) * share])
                self._start([sys.executable, "-m", "jaxpar.main", *arguments], environment)
        except BaseException:
            self._end()
            raise

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the process can heed them: interrupt.py
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C on a terminal comes to the launcher alone
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._processes.append(process)
        printer = threading.Thread(target=show, args=(len(self._printers), process), daemon=True)
        printer.start()
        self._printers.append(printer)

    def wait(self, signals: list[int]) -> tuple[int, int]:
        """Waits until all have ended, or one has failed, and ends the rest.

        signals: that have come; each is sent to all.

        Returns:
          The number and exit code of one that failed; or, where none has, of one that was stopped, or finished.
        """
        sent = 0
        try:
            while True:
                for number in signals[sent:]:
                    sent += 1
                    self._send(number if sent <= 2 else signal.SIGKILL)
                codes = [process.poll() for process in self._processes]
                ended = [(number, code) for number, code in enumerate(codes) if code is not None]
                failed = [(number, code) for number, code in ended if is_failure(code)]
                stopped = [(number, code) for number, code in ended if not is_failure(code)]
                if signals and failed and stopped:  # the one had nothing to save, or all have; the other misses it
                    return stopped[0]
                if failed:  # several: one pulls others down, which abort, or cannot go on with what it was to send
                    return min(failed, key=lambda one: (ORDER.get(one[1], 0 if one[1] < 0 else 2), one[0]))
                if len(ended) == len(codes):
                    return max(ended, key=lambda one: one[1])
                time.sleep(POLL_SECONDS)
        finally:
            self._end()

    def _end(self) -> None:
        self._send(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for printer in self._printers:
            printer.join(timeout=5)

    def _send(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


def end_with_launcher() -> None:
    """Have Linux kill this process when the launcher that has started it ends, however that happens."""
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it has ended before
        os.kill(os.getpid(), signal.SIGKILL)


def show(number: int, process: "subprocess.Popen[str]") -> None:
    """Prints what a process prints, with its number before each line."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if not line.startswith(NOISE):
                with contextlib.suppress(OSError):  # nobody reads any more: the process must not wait for a reader
                    print(f"[{number}] {line}", end="" if line.endswith("\n") else "\n", flush=True)


def print_line(text: str) -> None:
    """Print a line of the launcher itself."""
    print(f"launch: {text}", file=sys.stderr, flush=True)


def format_exit(code: int) -> str:
    """How a process ended."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


@contextlib.contextmanager
def forwarded(signals: list[int]) -> Iterator[None]:
    """Within `with`, Ctrl-C and SIGTERM are added to `signals`; a terminal that is closed counts as SIGTERM."""

    def note(number: int, _: object) -> None:
        signals.append(signal.SIGTERM if number == signal.SIGHUP else number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def visible_gpus() -> list[str]:
    """Return the GPUs as in CUDA_VISIBLE_DEVICES; without it, all that nvidia-smi names."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]


if __name__ == "__main__":
    sys.exit(main())
