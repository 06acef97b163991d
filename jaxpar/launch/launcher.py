"""Starts, restarts and ends the processes of a run on this machine, for `jaxpar launch` and for comparisons."""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from jaxpar.errors import FAILED, HANGS, USER_ERROR, UserError, format_bytes, is_failure
from jaxpar.host_memory import host_bytes
from jaxpar.launch.place import BIND, COMMAND, FLAGS, command_of, free_port
from jaxpar.launch.signals import SIGNALS

LAUNCHER = "JAXPAR_LAUNCHER"  # environment variable with the launcher's process id
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# If several processes failed, the one with the lowest value is reported; 0 for other signals, 2 for other exit codes.
ORDER = {HANGS: 0, USER_ERROR: 1, -signal.SIGABRT: 3}
NOISE = "[Gloo] Rank "  # prefix of lines that Gloo prints about its connections
PROCESS_BYTES = 250_000_000  # memory of a process that trains the smallest model, without what it shares with others
PROCESS_THREADS = 40  # that JAX starts on two CPU cores; more on more cores
POLL_SECONDS = 0.05
MAX_FORWARDED = 2  # signals that are forwarded; another one kills the processes


def check_capacity(num_processes: int) -> None:
    """Raise UserError if this machine cannot hold that many processes, even of the smallest run."""
    threads, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [(host_bytes(), PROCESS_BYTES, f"{format_bytes(host_bytes())} of memory", format_bytes(PROCESS_BYTES))]
    if threads != resource.RLIM_INFINITY:
        limits.append((threads, PROCESS_THREADS, f"{threads:,} threads (ulimit -u)", str(PROCESS_THREADS)))
    for available, needed, everything, share in limits:
        if num_processes * needed > available:
            reason = f"on this machine: {everything} / {share}, the least for a process"
            raise UserError(f"--num_processes is {num_processes}; it must be at most {available // needed} {reason}")


def run_processes(
    num_processes: int, max_restarts: int, of_process: Sequence[str], gpus: Sequence[str], signals: list[int]
) -> int:
    """Start the processes, restart all of them at most `max_restarts` times if one fails, and return the exit code.

    Args:
      of_process: the arguments of `jaxpar train`.
      gpus: the visible GPUs, to divide between the processes.
      signals: the signals received so far; signal handlers append to it.
    """
    flags = [f"--num_processes={num_processes}", *([f"--max_restarts={max_restarts}"] if max_restarts else [])]
    command = command_of([sys.argv[0], "launch", *flags])
    for restart in range(max_restarts + 1):
        try:
            group = Group(of_process, num_processes, gpus, command)
        except OSError as error:
            print_line(f"a process could not be started: {error.strerror}")
            return FAILED
        number, code = group.wait(signals)
        if not is_failure(code):
            return code
        others = "; the other processes were killed" if num_processes > 1 else ""
        print_line(f"process {number} {format_exit(code)}{others}")
        if code == USER_ERROR or signals or restart == max_restarts:
            break
        print_line(f"restart {restart + 1} of {max_restarts}, from the last checkpoint")
    return code if code >= 0 else 128 - code


class Group:
    """The processes of one start of the run."""

    def __init__(self, arguments: Sequence[str], num_processes: int, gpus: Sequence[str], command: str):
        """Start the processes. See `run_processes`. command: the user's command up to `--`, quoted for a shell."""
        share = len(gpus) // num_processes
        address = f"127.0.0.1:{free_port()}"
        variables = {
            FLAGS["coordinator_address"].variable: address,
            BIND: address,
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
                options = ["-P"] if sys.flags.safe_path else []  # do not import from the current folder
                command_line = [sys.executable, *options, "-m", "jaxpar", "train", *arguments]
                process = start_process(command_line, environment, subprocess.PIPE)
                self._processes.append(process)
                printer = threading.Thread(target=show, args=(number, process), daemon=True)
                printer.start()
                self._printers.append(printer)
        except BaseException:
            self._end()
            raise

    def wait(self, signals: list[int]) -> tuple[int, int]:
        """Forward signals until all processes have ended or one has failed, and kill the rest.

        Return the number and exit code of a process that failed or, if none did, that was stopped or finished.
        """
        sent = 0
        try:
            while True:
                for number in signals[sent:]:
                    sent += 1
                    self._send(number if sent <= MAX_FORWARDED else signal.SIGKILL)
                codes = [process.poll() for process in self._processes]
                ended = [(number, code) for number, code in enumerate(codes) if code is not None]
                failed = [(number, code) for number, code in ended if is_failure(code)]
                stopped = [(number, code) for number, code in ended if not is_failure(code)]
                # A process that stops makes the others fail, which is expected: either there was nothing to save, or
                # all processes have saved.
                if signals and failed and stopped:
                    return stopped[0]
                # The first failure makes other processes abort or fail in a collective: report the likely cause.
                if failed:
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
        for process in reversed(self._processes):  # the first coordinates the others, which fail once it has ended
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


def end_with_launcher() -> None:
    """Make Linux kill this process when the launcher that started it ends for any reason."""
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # the launcher ended before the call of prctl
        os.kill(os.getpid(), signal.SIGKILL)


def start_process(command: list[str], environment: Mapping[str, str], output: int | TextIO) -> "subprocess.Popen[str]":
    """Start a process of `jaxpar train` whose signals this process forwards, and whose output goes to `output`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the process unblocks them: signals.Ending
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # only this process receives a Ctrl-C from the terminal
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def show(number: int, process: "subprocess.Popen[str]") -> None:
    """Print the output of a process, each line prefixed with the process number."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if not line.startswith(NOISE):
                with contextlib.suppress(OSError):  # stdout is closed: keep reading so that the process does not block
                    print(f"[{number}] {line}", end="" if line.endswith("\n") else "\n", flush=True)


def print_line(text: str) -> None:
    """Print a message of the launcher itself to stderr."""
    print(f"launch: {text}", file=sys.stderr, flush=True)


def format_exit(code: int) -> str:
    """Return how a process ended: `exited with code 1`, `was killed by SIGKILL`."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


@contextlib.contextmanager
def forwarded(signals: list[int]) -> Iterator[None]:
    """Within `with`, append SIGINT and SIGTERM to `signals` as they arrive. SIGHUP is appended as SIGTERM."""

    def note(number: int, _: object) -> None:
        signals.append(signal.SIGTERM if number == signal.SIGHUP else number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def visible_gpus() -> list[str]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES or, if it is not set, all GPUs that nvidia-smi lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]
