"""Ctrl-C and SIGTERM: in the training loop a request, heeded between two steps; before it and after it the end.

Python runs the handler of a signal in the main thread, which may be in a compilation, or wait for other processes, for
minutes. So that the end does not wait for it, a thread brings it, which learns of each signal as it comes.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AT_ONCE = 130  # exit code


class Ending:
    """Within `with`, the nth SIGINT or SIGTERM ends the process, whatever its main thread is at."""

    def __init__(self, nth: int, code: int, text: Callable[[], str]):
        """code: to exit with; text: what to print."""
        self._nth, self._code, self._text = nth, code, text

    def __enter__(self) -> Self:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True)
        self._thread.start()
        self._handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._writer)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher has them wait until here
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._writer)
        self._thread.join()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Take a signal, in the main thread."""

    def _watch(self, reader: int) -> None:
        come = 0
        with open(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):  # empty: the writer was closed
                come += number[0] in SIGNALS
                if come == self._nth:
                    self._end()

    def _end(self) -> None:
        try:
            print(self._text(), flush=True)
        finally:
            os._exit(self._code)  # not by way of threads that may be in the middle of a step or a checkpoint


class StoppedEarly(Exception):
    """Asked to stop before its first step, the run failed; another of its processes may have ended before this one."""


class Interrupt(Ending):
    """Within `with`, the first SIGINT or SIGTERM sets `requested`; a second one ends the process with code 130.

    Raises StoppedEarly instead of what is raised within `with` when the signal has come and nobody has looked yet.
    """

    was_entered = False  # by anyone

    def __init__(self) -> None:
        text = "stopped at once; the steps since the last checkpoint are lost"
        super().__init__(nth=2, code=AT_ONCE, text=lambda: text)
        self._requested: signal.Signals | None = None
        self._was_looked_at = False

    @property
    def requested(self) -> signal.Signals | None:
        """The signal that has come. The loop looks at it after each step."""
        self._was_looked_at = True
        return self._requested

    @requested.setter
    def requested(self, number: signal.Signals) -> None:
        self._requested = number

    def __enter__(self) -> Self:
        Interrupt.was_entered = True
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        error = exception[1]
        if isinstance(error, Exception) and self._requested and not self._was_looked_at:
            raise StoppedEarly from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number)
