"""Continues a data-parallel run on the processes that are left when others are lost (config.elastic_seconds).

A collective in which a process waits for a lost one may never return, neither may a barrier or a compilation that
others wait for. So a survivor does not wait for its main thread: a thread replaces the program of the process by a new
one (exec), which starts the run again with fewer processes. Only the state comes from memory and not from a checkpoint:

    all        keep the state after each step until the next one is complete
    all        the coordination service of process 0 notices missing heartbeats, and every thread gets the same list of
               processes that are left, because the call returns when all of these have made it
    process 0  writes its kept state to a file in memory, which stays open
    all        agree on the list again, so that the file is complete and nobody else was lost
    all        exec; the address of process 0 gets the next port
    process 0  reads the file and sends the state to the others

A signal that asks this process to stop is sent again to the new program, which takes a step and saves it.

Process 0 cannot be lost, as the service ends with it: the others end, too, and the launcher or the cluster restarts the
run from the last checkpoint. The same happens if survivors do not meet again within MEET_SECONDS.
"""

import contextlib
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jax.experimental.multihost_utils import ProcessFailureError, live_devices

from jaxpar.errors import TrainingError, UserError
from jaxpar.launch import processes
from jaxpar.launch.place import BIND, MEET, MEET_SECONDS, SURVIVOR, Place, Survivor, find_survivor
from jaxpar.launch.signals import SIGNALS, Ending, Interrupt

LOOK_SECONDS = 0.5  # between two calls for the list of processes that are left
LEAD_SECONDS = 1.0  # by which the others exec before process 0, whose service ends with its program
GRACE_SECONDS = 10.0  # for a lost process to be noticed, in addition to the timeout
CAUSE = "a lost process can be the cause of this error"


class Survival:
    """Within `with`, replaces this process by a survivor if another one is lost. Does nothing in a single process.

    The end of the `with` block without an error is a barrier. After it, processes may leave.
    """

    def __init__(self, place: Place | None, seconds: int):
        """place: of this process. seconds: config.elastic_seconds; 0: a lost process ends the run."""
        self.is_on = place is not None and seconds > 0
        self._place, self._seconds = place, seconds
        survivor = find_survivor()
        self._numbers = survivor.numbers if survivor else tuple(range(place.num_processes if place else 1))
        self._kept: Callable[[], Any] | None = None
        self._since = time.time()
        self._is_over = False
        self._thread = threading.Thread(target=self._watch, name="elastic", daemon=True)

    def keep(self, contents: Callable[[], Any]) -> None:
        """Keep the state after a complete step, instead of the one before. contents: returns what to pickle."""
        self._kept, self._since = contents, time.time()

    def __enter__(self) -> "Survival":
        if self.is_on:
            self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if Ending.has_begun:  # the others received the signal, too: their end is not a loss
            return
        if not self.is_on:
            if len(self._numbers) > 1 and isinstance(error, jax.errors.JaxRuntimeError):
                again = "repeat the command in all processes to continue from the last checkpoint"
                print(f"jaxpar: {CAUSE}; {again}: {_first_line(error)}", file=sys.stderr, flush=True)
            return
        if error is None:
            processes.wait("the run has ended")
        elif isinstance(error, Exception) and not _is_own(error):
            most = 2 * self._seconds + GRACE_SECONDS
            print(
                f"jaxpar: waiting up to {most:g} s, because {CAUSE}; then the run continues, unless process 0 "
                f"is lost: {_first_line(error)}",
                file=sys.stderr,
                flush=True,
            )
            with Interrupt():  # the state is not saved yet
                self._thread.join(most)  # does not return if it is
        self._is_over = True
        if error is None and processes.is_first():
            self._thread.join(2 * self._seconds)  # the others lose their connection if this process ends first
        elif error is None:
            jax.distributed.shutdown()

    def _watch(self) -> None:
        """Wait for lost processes. Process 0 returns when the others have left after the end."""
        everyone, first = range(len(self._numbers)), processes.is_first()
        ready: set[int] = set()  # the survivors for whom this process is ready to exec
        file: int | None = None
        while not (self._is_over and (not first or ready == {0})):
            try:
                with live_devices(jax.devices()) as devices:
                    alive = {device.process_index for device in devices}
            except ProcessFailureError:
                continue  # within the call
            except RuntimeError:  # from the end of the connection
                if not self._is_over:
                    raise
                return
            if self._is_over:
                ready = alive
            elif len(alive) == len(everyone):
                time.sleep(LOOK_SECONDS)
            elif alive == ready:
                self._exec(sorted(alive), file)
            else:
                ready, file = alive, self._write() if first else None

    def _write(self) -> int | None:
        """Write the kept state to a file in memory, and return its descriptor; None if no state was kept."""
        if self._kept is None:
            return None
        file = os.memfd_create("jaxpar", 0)
        with os.fdopen(file, "wb", closefd=False) as stream:
            pickle.dump(self._kept(), stream)
        return file

    def _exec(self, alive: list[int], file: int | None) -> None:
        """Replace the program of this process by one with its place among those that are alive."""
        assert self._place is not None
        address, _, own, device = self._place
        place = Place(_next_port(address), len(alive), alive.index(own), device)
        numbers = tuple(self._numbers[process] for process in alive)
        lost = tuple(number for number in self._numbers if number not in numbers)
        record = {SURVIVOR: json.dumps(Survivor(place, numbers, lost, self._since, file)), MEET: str(MEET_SECONDS)}
        if BIND in os.environ:
            record[BIND] = _next_port(os.environ[BIND])
        if own == 0:
            time.sleep(LEAD_SECONDS)
        for number in sorted(int(path.name) for path in Path("/proc/self/fd").iterdir())[3:]:
            with contextlib.suppress(OSError):  # closed in the meantime
                os.set_inheritable(number, number == file)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the training of the new program: signals.Interrupt
        if Interrupt.received:
            signal.pthread_kill(threading.get_ident(), Interrupt.received)  # arrives there
        os.execve(sys.executable, sys.orig_argv, os.environ | record)


def _next_port(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _is_own(error: Exception) -> bool:
    """Return whether an error is of this run itself, and does not come from JAX or orbax."""
    return isinstance(error, UserError | TrainingError) and error.__cause__ is None


def read_kept(survivor: Survivor) -> Any:
    """Return the contents that process 0 kept, and free their memory; None if it kept none, or in other processes."""
    if survivor.file is None:
        return None
    os.lseek(survivor.file, 0, os.SEEK_SET)
    with os.fdopen(survivor.file, "rb") as stream:
        return pickle.load(stream)  # written by this process
