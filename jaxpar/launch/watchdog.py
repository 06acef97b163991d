"""Ends a process that hangs, so that the launcher, or the cluster, starts the run again from its last checkpoint.

A thread looks at the last sign of life: the begin or end of a phase of the run, or a batch of an evaluation. When there
has been none for `config.watchdog_seconds`, it prints which process hangs, at which step and in which phase,
what every thread is at, and ends the process. A process that waits for one that hangs does so too, in its phase.
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
    """Raises UserError where config.watchdog_seconds cannot be this."""
    if not 0 <= seconds <= MOST_SECONDS:
        raise UserError(f"config.watchdog_seconds is {seconds}; it must be 0 (none) to {MOST_SECONDS:g}")


class Watchdog:
    """Within `with`, ends the process when `phases` has shown no sign of life for so many seconds; 0: never."""

    def __init__(self, seconds: float, phases: Phases):
        self._seconds, self._phases = seconds, phases
        self._look = min(seconds / 10, 1.0)  # seconds from one look to the next
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
            # Where a thread holds Python's lock, this one stops as well; the timer needs no lock, and ends with code 1.
            faulthandler.dump_traceback_later(self._seconds + self._look, exit=True, file=_STDERR)
            if self._done.wait(self._look):
                return
            if time.monotonic() - self._phases.alive_at > self._seconds:
                self._end()

    def _end(self) -> None:
        process, number, phases = jax.process_index(), jax.process_count(), self._phases
        where = f"step {phases.step}, phase {phases.name}, for {self._seconds:g} s"
        print(f"jaxpar: process {process} of {number} hangs: {where}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        # The first that ends takes the others with it: they too shall have printed where they are.
        time.sleep(2 * self._look)
        os._exit(HANGS)
