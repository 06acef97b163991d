"""Ends a process that hangs, so that the launcher or the cluster can restart the run from its last checkpoint.

Progress is the start or end of a phase of the run, or a batch of an evaluation. A process that waits for a hung process
makes no progress either, so it ends in the same way.
"""

import faulthandler
import os
import sys
import threading
import time

import jax

from jaxpar.errors import HANGS, UserError
from jaxpar.measure.phases import Phases

MOST_SECONDS = 1e9
_STDERR = 2  # the file descriptor


def check_seconds(seconds: float) -> None:
    """Raise UserError if config.watchdog_seconds is out of range."""
    if seconds != 0 and not 1 <= seconds <= MOST_SECONDS:
        most = f"{MOST_SECONDS:g}"
        raise UserError(f"config.watchdog_seconds is {seconds}; it must be 0 (no watchdog), or between 1 and {most}")


class Watchdog:
    """Within `with`, prints all stacks and ends the process after `seconds` without progress; 0: never."""

    def __init__(self, seconds: float, phases: Phases):
        self._seconds, self._phases = seconds, phases
        self._look = min(seconds / 10, 1.0)  # seconds between two checks
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._phases.alive()
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        if self._seconds:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while True:
            # If a thread hangs while it holds the GIL, this thread hangs too. The timer of faulthandler does not need
            # the GIL and then ends the process with code 1.
            faulthandler.dump_traceback_later(self._seconds + self._look, exit=True, file=_STDERR)
            if self._done.wait(self._look):
                return
            if time.monotonic() - self._phases.alive_at > self._seconds:
                break
        where = f"no progress for {self._seconds:g} s at step {self._phases.step}, phase {self._phases.name}"
        process = f"process {jax.process_index()} of {jax.process_count()}"
        print(f"jaxpar: {process} hangs: {where}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        # The first process that ends also ends the others. Wait, so that they can print their stacks too.
        time.sleep(2 * self._look)
        os._exit(HANGS)
