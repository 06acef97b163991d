"""Handles SIGINT (Ctrl-C), SIGTERM, and SIGHUP, which arrives when the terminal is closed.

In the training loop a signal is a request to stop after the step in progress. Outside the loop it ends the process.

Python runs signal handlers in the main thread, which can be busy for minutes with a compilation or waiting for other
processes. A separate thread therefore receives each signal immediately, answers it and can end the process.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Self

from jaxpar.errors import AT_ONCE

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OUTPUTS = (1, 2)  # file descriptors
PRINT_SECONDS = 1.0  # time to print the last line, before the process ends


class Ending:
    """Within `with`, the nth signal ends the process with this exit code and text, even if the main thread is busy.

    SIGHUP stays ignored under `nohup`. It counts only as the first signal, because a closed terminal can send several.
    """

    has_begun = False  # whether the main thread has handled a signal on which another thread ends the process

    def __init__(self, nth: int, code: int, text: Callable[[], str], *, unblocks: bool = True):
        """unblocks: whether blocked signals arrive from now on, or only in an Ending within this one."""
        self._nth, self._code, self._text, self._unblocks = nth, code, text, unblocks

    def __enter__(self) -> Self:
        if self._nth == 1:
            Ending.has_begun = False
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True)
        self._thread.start()
        self._terminals = [output for output in OUTPUTS if os.isatty(output)]
        handled = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._handle) for number in handled}
        self._wakeup = signal.set_wakeup_fd(self._writer)
        if self._unblocks:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher starts processes with blocked signals
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._writer)
        self._thread.join()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread. A terminal that was closed is replaced, as writing to it fails."""
        if self._nth == 1:
            Ending.has_begun = True
        if number == signal.SIGHUP:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for output in self._terminals:
                os.dup2(nowhere, output)
            os.close(nowhere)

    def _watch(self, reader: int) -> None:
        count = 0
        with open(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):  # empty: the writer was closed
                if number[0] in SIGNALS and (count == 0 or number[0] != signal.SIGHUP):
                    count += 1
                    self._received(count, signal.Signals(number[0]))

    def _received(self, count: int, number: signal.Signals) -> None:
        """Act on the signal number `count`, counted from 1, in the thread of the signals."""
        if count == self._nth:
            try:
                print_from_thread(self._text()).join(timeout=PRINT_SECONDS)
            finally:
                os._exit(self._code)  # does not wait for threads that are in the middle of a step or a checkpoint


def print_from_thread(text: str) -> threading.Thread:
    """Print a line in a thread of its own, because nobody may read the pipe to which it is printed.

    On a terminal, the line begins below the progress bar and the ^C.
    """
    above = "\n" if sys.stdout.isatty() else ""

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal or the pipe was closed
            sys.stdout.write(f"{above}{text}\n")  # at once, unlike `print`: the main thread can print, too
            sys.stdout.flush()

    thread = threading.Thread(target=write, name="signals print", daemon=True)
    thread.start()
    return thread


class Stopped(Exception):
    """Raised when a run stopped on a signal, and its state is saved."""


class StoppedEarly(Exception):
    """Raised if a run fails after a stop request before its first step, for example because another process ended."""


class Interrupt(Ending):
    """Within `with`, the first signal sets `requested`, and is answered with a line at once.

    A second SIGINT or SIGTERM ends the process with code 130 or, if the process belongs to a notebook or to another
    program, raises KeyboardInterrupt. If the `with` block raises after a signal, before `requested` has been read,
    StoppedEarly is raised instead.
    """

    was_entered = False  # whether any Interrupt was entered in this process
    received: signal.Signals | None = None  # the last first signal of an Interrupt of this process
    _current: "Interrupt | None" = None  # the one whose `with` block runs

    def __init__(self, *, ends_process: bool = True) -> None:
        """ends_process: whether a second signal ends the process, or raises KeyboardInterrupt."""
        text = "stopped immediately; the steps since the last checkpoint are lost"
        super().__init__(nth=2 if ends_process else 0, code=AT_ONCE, text=lambda: text)
        self.answer = "stopping after this step"  # what happens after the first signal
        self._ends_process = ends_process
        self._requested: signal.Signals | None = None
        self._was_looked_at = False

    @staticmethod
    def is_requested() -> bool:
        """Whether this process received a signal inside the `with` block that runs."""
        return Interrupt._current is not None and Interrupt._current._requested is not None

    @property
    def requested(self) -> signal.Signals | None:
        """The signal received, or None. The training loop reads it after each step."""
        self._was_looked_at = True
        return self._requested

    @requested.setter
    def requested(self, number: signal.Signals) -> None:
        self._requested = number

    def __enter__(self) -> Self:
        Interrupt.was_entered, Interrupt._current = True, self
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        Interrupt._current = None
        error = exception[1]
        was_stopped = self._requested and not self._was_looked_at
        if was_stopped and isinstance(error, Exception) and not isinstance(error, Stopped):
            raise StoppedEarly from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        super()._handle(number, frame)
        if self._requested and number != signal.SIGHUP and not self._ends_process:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number)

    def _received(self, count: int, number: signal.Signals) -> None:
        if count == 1:
            Interrupt.received = number
        if count == 1 and number != signal.SIGHUP:  # a terminal that was closed shows nothing
            print_from_thread(f"{number.name}: {self.answer}; a second signal exits at once, without saving")
        super()._received(count, number)


@contextlib.contextmanager
def called_after(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Within `with`, call a function in a thread after `seconds`, unless the block has ended by then."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
