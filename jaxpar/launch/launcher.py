"""Starts, restarts and ends the processes of a run on this machine, for `jaxpar launch` and for comparisons."""

import contextlib
import ctypes
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TextIO

from jaxpar.errors import FAILED, HANGS, USER_ERROR, UserError, format_bytes, format_count, is_failure
from jaxpar.host_memory import host_bytes
from jaxpar.launch.place import BIND, COMMAND, FLAGS, MEET, MEET_SECONDS, command_of, free_port, free_ports
from jaxpar.launch.signals import SIGNALS

LAUNCHER = "JAXPAR_LAUNCHER"  # environment variable with the launcher's process id
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# If several processes failed, the one with the lowest value is reported; 0 for other signals, 2 for other exit codes.
ORDER = {HANGS: 0, USER_ERROR: 1, -signal.SIGABRT: 3}
# Texts in lines that Gloo prints about its connections, and JAX about runs that continue without processes.
NOISE = ("[Gloo] Rank ", "Using experimental recoverable task feature")

HEADER = "platform "  # prefix of the first line of process 0, which it prints once all processes have met
PROCESS_BYTES = 250_000_000  # memory of a process that trains the smallest model, without what it shares with others
PROCESS_THREADS = 40  # that JAX starts on two CPU cores; more on more cores
POLL_SECONDS = 0.05
GROW_SECONDS = 60.0  # default of --grow_seconds
END_SECONDS = 10.0  # for the other processes to end after process 0 of an elastic run
CONTINUE_SECONDS = 300.0  # for process 0 to notice a loss and start again; JAX's default time to meet
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


class Launch(NamedTuple):
    """The processes of a run to start, and when to start them again."""

    counts: tuple[int, int]  # fewest and most processes of the run
    max_restarts: int  # number of failures of the whole run after which it is not restarted
    grow_seconds: float  # after the start of fewer processes than the most, or the loss of one, until all are started
    elastic_seconds: int  # config.elastic_seconds; 0: processes do not continue without others
    of_process: Sequence[str]  # the arguments of `jaxpar train`
    gpus: Sequence[str]  # the visible GPUs, to divide between the most processes

    @property
    def command(self) -> str:
        """The user's command up to `--`, quoted for a shell."""
        least, most = self.counts
        flags = [f"--num_processes={most if least == most else f'{least}:{most}'}"]
        flags += [f"--max_restarts={self.max_restarts}"] if self.max_restarts else []
        flags += [f"--grow_seconds={self.grow_seconds:g}"] if self.grow_seconds != GROW_SECONDS else []
        return command_of([sys.argv[0], "launch", *flags])


def run_processes(launch: Launch, signals: list[int]) -> int:
    """Start the processes, restart all of them at most `max_restarts` times if the run fails, and return the exit code.

    A restart lacks the processes that failed, as far as fewer are allowed.

    signals: the signals received so far; signal handlers append to it.
    """
    least, most = launch.counts
    places, restarts = list(range(most)), 0  # the shares of the GPUs that are used
    while True:
        try:
            group = Group(launch, places)
        except OSError as error:
            print_line(f"a process could not be started: {error.strerror}")
            return FAILED
        number, code = group.wait(signals)
        if group.grows and not is_failure(code) and not signals:
            places = list(range(most))
            print_line(f"all {most} processes are started, from the last checkpoint")
            continue
        if not is_failure(code):
            return code
        others = "; the other processes were killed" if len(places) > 1 else ""
        print_line(f"process {number} {format_exit(code)}{others}")
        if code == USER_ERROR or signals or restarts == launch.max_restarts:
            return code if code >= 0 else 128 - code
        restarts += 1
        lost = [*sorted(group.lost), number][: len(places) - least]
        places = [place for index, place in enumerate(places) if index not in lost]
        fewer = f", with {format_count(len(places), 'process')}" if len(places) < most else ""
        print_line(f"restart {restarts} of {launch.max_restarts}, from the last checkpoint{fewer}")


class Group:
    """The processes of one start of the run."""

    def __init__(self, launch: Launch, places: Sequence[int]):
        """Start a process for each of these places. See `run_processes`."""
        least, most = launch.counts
        number = len(places)
        self._least, self._grow_seconds, self._elastic_seconds = least, launch.grow_seconds, launch.elastic_seconds
        self.lost: set[int] = set()  # processes that failed, without which the others continue
        self._lost_at = -math.inf  # when the last of them was lost
        self._has_met = False  # whether the processes have met since then
        self._is_silent = False  # whether process 0 was killed because they did not meet
        self.grows = False  # whether the processes were asked to stop, so that all are started again
        self._grow_at = time.monotonic() + launch.grow_seconds if number < most else math.inf
        address = f"127.0.0.1:{free_ports(most) if launch.elastic_seconds else free_port()}"
        variables = {
            FLAGS["coordinator_address"].variable: address,
            BIND: address,
            FLAGS["num_processes"].variable: str(number),
            LAUNCHER: str(os.getpid()),
            **({MEET: str(MEET_SECONDS)} if launch.elastic_seconds else {}),
            COMMAND: f"{launch.command} --",
            "PYTHONUNBUFFERED": "1",
        }
        self._processes: list[subprocess.Popen[str]] = []
        self._printers: list[threading.Thread] = []
        try:
            for number, place in enumerate(places):
                environment = os.environ | variables | {FLAGS["process_id"].variable: str(number)}
                environment |= share_of_gpus(launch.gpus, place, most)
                options = ["-P"] if sys.flags.safe_path else []  # do not import from the current folder
                command_line = [sys.executable, *options, "-m", "jaxpar", "train", *launch.of_process]
                process = start_process(command_line, environment, subprocess.PIPE)
                self._processes.append(process)
                printer = threading.Thread(target=show, args=(number, process, self._read), daemon=True)
                printer.start()
                self._printers.append(printer)
        except BaseException:
            self._end()
            raise

    def wait(self, signals: list[int]) -> tuple[int, int]:
        """Forward signals until all processes have ended or the run has failed, and kill the rest.

        Return the number and exit code of a process that failed or, if none did, that was stopped or finished.
        """
        sent = 0
        try:
            while True:
                for number in signals[sent:]:
                    sent += 1
                    self._send(number if sent <= MAX_FORWARDED else signal.SIGKILL)
                if not signals and time.monotonic() > self._grow_at:
                    self.grows, self._grow_at = True, math.inf
                    print_line("the run is stopped and saved, so that it can continue with all processes")
                    self._send(signal.SIGTERM)
                if ended := self._ended(is_stopping=bool(signals) or self.grows):
                    return ended
                time.sleep(POLL_SECONDS)
        finally:
            self._end()

    def _ended(self, *, is_stopping: bool) -> tuple[int, int] | None:
        """Return the result of `wait`, or None if the run continues. is_stopping: whether it was asked to stop."""
        polled = enumerate(process.poll() for process in self._processes)
        codes = {number: code for number, code in polled if code is not None}
        if self._elastic_seconds and 0 in codes and not is_failure(codes[0]):
            # Processes that were lost, but not to this machine, never end.
            with contextlib.suppress(subprocess.TimeoutExpired):
                for process in self._processes:
                    process.wait(END_SECONDS)
            return 0, codes[0]
        failed = [(number, code) for number, code in codes.items() if is_failure(code) and number not in self.lost]
        stopped = [(number, code) for number, code in codes.items() if not is_failure(code)]
        # A process that stops makes the others fail, which is expected: either there was nothing to save, or all
        # processes have saved.
        if is_stopping and failed and stopped:
            return stopped[0]
        # The others also abort if process 0 hangs or is stopped, and then nobody continues.
        late = time.monotonic() - self._lost_at - self._elastic_seconds > CONTINUE_SECONDS
        if self.lost and late and not self._has_met and not self._is_silent:
            self._is_silent = True
            print_line(f"process 0 has not continued within {CONTINUE_SECONDS:g} s, and is killed")
            self._processes[0].kill()
        if failed and self._can_continue(failed):
            for number, code in failed:
                self.lost.add(number)
                print_line(f"process {number} {format_exit(code)}; the others continue without it")
            self._lost_at, self._has_met = time.monotonic(), False
            self._grow_at = min(self._grow_at, self._lost_at + self._grow_seconds)
            return None
        # The first failure makes other processes abort or fail in a collective: report the likely cause.
        if failed:
            return min(failed, key=lambda one: (ORDER.get(one[1], 0 if one[1] < 0 else 2), one[0]))
        if len(codes) == len(self._processes):
            return max(codes.items(), key=lambda one: one[1])
        return None

    def _can_continue(self, failed: Sequence[tuple[int, int]]) -> bool:
        """Return whether the other processes can continue without these numbers, which failed with these codes."""
        if not self._elastic_seconds:
            return False
        left = len(self._processes) - len(self.lost) - len(failed)
        is_possible = all(number != 0 and code != USER_ERROR for number, code in failed) and left >= self._least
        # Processes that wait to meet cannot agree on a loss: at the start, and when survivors start again.
        is_meeting = not self._has_met and time.monotonic() - self._lost_at > self._elastic_seconds / 2
        return is_possible and not is_meeting

    def _read(self, number: int, line: str) -> None:
        """Read a line of the output of a process."""
        self._has_met |= number == 0 and line.startswith(HEADER)

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


def show(number: int, process: "subprocess.Popen[str]", read: Callable[[int, str], None]) -> None:
    """Print the output of a process, each line prefixed with the process number. read: gets each line, too."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            read(number, line)
            if not any(text in line for text in NOISE):
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


def gpus_to_divide(num_processes: int) -> list[str]:
    """Return the visible GPUs. Raises UserError if the processes cannot have as many of them each."""
    gpus = visible_gpus()
    if len(gpus) % num_processes:
        raise UserError(f"--num_processes is {num_processes}; it must divide the number of visible GPUs, {len(gpus)}")
    return gpus


def share_of_gpus(gpus: Sequence[str], place: int, number: int) -> dict[str, str]:
    """Return the environment variable with the GPUs of one of `number` processes; nothing if there are no GPUs."""
    share = len(gpus) // number
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[place * share : (place + 1) * share])} if gpus else {}


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
