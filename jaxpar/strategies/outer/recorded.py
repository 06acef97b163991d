"""Workers in threads of one process, and a server for which the table of a live run decides what counts when.

`Turns` lets one thread compute at a time, until it waits for an anchor.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from jaxpar.errors import TrainingError
from jaxpar.strategies.outer.options import OuterSettings
from jaxpar.strategies.outer.server import Anchor, Difference, Joined, OuterAnswer, OuterServer, Vector
from jaxpar.strategies.outer.table import Contribution, OuterEvent

Found = TypeVar("Found")
NO_ANSWER = OuterAnswer(-1, np.zeros(0, np.float32))  # to a worker that has left instead of waiting


class Turns:
    """The turns of threads, each of which computes inside `with`. An error of one ends the others."""

    def __init__(self, num_threads: int):
        self._condition = threading.Condition()
        self._num_threads, self._num_waiting, self._failed = num_threads, 0, ""

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        self._num_threads -= 1
        if error and not self._failed:
            self._failed = f"another worker failed: {error}"
        self.notify()
        self._condition.release()

    def notify(self) -> None:
        """Wake the other threads, which can compute as soon as this one waits."""
        self._num_waiting = 0
        self._condition.notify_all()

    def wait_for(self, find: Callable[[], Found | None]) -> Found:
        """Let the others compute until `find` returns something. Raises TrainingError if all wait, or one failed."""
        while (found := find()) is None:
            self._num_waiting += 1
            if self._num_waiting >= self._num_threads and not self._failed:
                self._failed = "all workers wait for a contribution that nobody makes"
                self.notify()
            if self._failed:
                raise TrainingError(self._failed)
            self._condition.wait()
        return found


class LocalLink:
    """The connection of a worker to a server in this process. See `OuterLink`."""

    def __init__(self, server: "OuterServer | RecordedServer", turns: Turns, worker: int):
        self._server, self._turns, self._worker = server, turns, worker
        self._start = 0

    def join(self, step: int | None, read: int, _initial: Sequence[Vector]) -> Joined:
        """See OuterLink."""
        joined = self._turns.wait_for(lambda: self._server.join(self._worker, step, read, 0.0))
        self._start = joined.start
        self._turns.notify()
        return joined

    def offer(self, difference: Difference) -> None:
        """See OuterLink."""
        self._server.offer(self._worker, difference, 0.0)
        self._turns.notify()

    def result(self, fragment: int, step: int) -> OuterAnswer | None:
        """See OuterLink."""
        found = self._turns.wait_for(lambda: self._server.answer(self._worker, self._start, fragment, step))
        return None if found is NO_ANSWER else found

    def leave(self) -> None:
        """See OuterLink."""
        self._server.leave(self._worker, self._start, 0.0)
        self._turns.notify()


class RecordedServer:
    """A server that counts each difference in the round in which the table of a live run counts it."""

    def __init__(self, settings: OuterSettings, initial: Sequence[Vector], table: Sequence[Contribution]):
        """initial: the first anchors."""
        self._anchors = [Anchor(settings, vector) for vector in initial]
        self._joins: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # versions by worker, start and fragment
        self._steps: dict[tuple[int, int], int] = {}  # first step, by worker and start
        self._rows: dict[
            tuple[OuterEvent, int, int, int, int], Contribution
        ] = {}  # by event, worker, start, fragment, step
        self._sizes: Counter[tuple[int, int]] = Counter()  # number of differences, by fragment and round
        self._open: dict[tuple[int, int], dict[int, Difference]] = defaultdict(dict)  # by fragment and round
        self._versions = {(n, 0): anchor.answer for n, anchor in enumerate(self._anchors)}
        self.starts: dict[int, int] = {}  # number of the start that each worker repeats, which its thread sets
        self._answered: set[tuple[int, int, int, int]] = set()  # worker, start, fragment and step
        self._left: set[tuple[int, int]] = set()  # worker and start
        left: set[tuple[int, int]] = set()
        for row in table:
            if row.event == OuterEvent.LEAVE:
                left.add((row.worker, row.start))
            elif row.event == OuterEvent.RETURN:
                left.discard((row.worker, row.start))
            if row.event == OuterEvent.JOIN:
                self._joins[row.worker, row.start][row.fragment] = row.got
                self._steps[row.worker, row.start] = row.step
            elif row.event in (OuterEvent.COUNTED, OuterEvent.REPEATED):
                if (row.worker, row.start) not in left:
                    self._answered.add((row.worker, row.start, row.fragment, row.step))
                self._rows[row.event, row.worker, row.start, row.fragment, row.step] = row
                self._sizes[row.fragment, row.counted] += row.event == OuterEvent.COUNTED
            self._left |= left

    def join(self, worker: int, step: int | None, _read: int, _now: float) -> Joined | None:
        """Return the place of a run, once the anchors with which it begins are known."""
        start = self.starts[worker]
        if step is not None:
            return Joined(start, step, [])
        found = [self._versions.get(place) for place in sorted(self._joins[worker, start].items())]
        anchors = [anchor for anchor in found if anchor]
        return Joined(start, self._steps[worker, start], anchors) if len(anchors) == len(found) else None

    def offer(self, worker: int, difference: Difference, _now: float) -> None:
        """Take a difference. Raises TrainingError if it is not the one of the table."""
        fragment = difference.fragment
        row = self._rows.get((OuterEvent.COUNTED, worker, difference.start, fragment, difference.step))
        if row is None:
            return  # another start of this worker has sent the one that counted
        if (row.read, row.nbytes) != (difference.read, len(difference.payload)):
            raise TrainingError(
                f"worker {worker} contributes {len(difference.payload)} bytes, from version {difference.read}, after "
                f"step {row.step}; the table has {row.nbytes} bytes, from version {row.read}"
            )
        self._open[fragment, row.counted][worker] = difference
        anchor = self._anchors[fragment]
        while len(waiting := self._open[fragment, anchor.version]) == self._sizes[fragment, anchor.version] > 0:
            del self._open[fragment, anchor.version]
            anchor.close(waiting)
            self._versions[fragment, anchor.version] = anchor.answer

    def answer(self, worker: int, start: int, fragment: int, step: int) -> OuterAnswer | None:
        """Return the anchor that the worker got; None if its round is open, and NO_ANSWER if it left before it closed.

        Raises TrainingError if the table has no contribution.
        """
        place = worker, start, fragment, step
        row = self._rows.get((OuterEvent.REPEATED, *place)) or self._rows.get((OuterEvent.COUNTED, *place))
        if place not in self._answered and (worker, start) in self._left:
            return NO_ANSWER
        if row is None:
            raise TrainingError(f"the table has no contribution of worker {worker} after step {step}")
        return self._versions.get((fragment, row.got))

    def leave(self, _worker: int, _start: int, _now: float) -> bool:
        """Do nothing: who is waited for is in the table."""
        return False
