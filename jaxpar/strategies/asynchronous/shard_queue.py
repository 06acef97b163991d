"""The queue of a live run: the assignment of shards to workers, and the record. It uses no devices and no threads.

The next shard goes to the worker that has been idle longest, and a worker reads the newest weights. No worker waits for
others, unless a bound limits how far it can run ahead of the slowest (ssp).
"""

import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxpar.core.state import Canonical
from jaxpar.strategies.asynchronous.gradient_rows import GradientRow, single_row
from jaxpar.strategies.asynchronous.programs import Chunk
from jaxpar.strategies.asynchronous.table import COLUMNS, TIMES, UpdateTable


class Assignment(NamedTuple):
    """A shard for a worker to compute, and the weights to compute it from."""

    worker: int  # its number
    number: int  # number of the shard
    chunk: Chunk  # the shard itself
    version: int  # version of the weights that the worker reads
    start: float  # seconds since the run began


class ShardQueue:
    """The server's view of live workers. Each gradient makes an update, so the newest version is the number of rows."""

    def __init__(self, num_workers: int, step: int, bound: float):
        """step: the step at which the run begins; bound: iterations that a worker may be ahead of the slowest."""
        self._num_steps, self._bound, self._begin = step, bound, time.perf_counter()
        self._rows: list[tuple[float, ...]] = []  # columns as in COLUMNS
        self._completed = [0] * num_workers  # gradients of each worker
        self._idle = list(range(num_workers))  # in the order in which they became idle
        self._chunks = deque[tuple[int, Chunk]]()

    def give_out(self, chunks: Mapping[int, Chunk]) -> None:
        """Begin a step with these shards."""
        self._chunks.extend(chunks.items())
        self._num_steps += 1

    def assign(self) -> Assignment | None:
        """Return the next assignment; None if there is no shard, or no worker that may take one."""
        ready = self._ready()
        if not self._chunks or not ready:
            return None
        self._idle.remove(ready[0])
        return Assignment(ready[0], *self._chunks.popleft(), len(self._rows), self._now())

    def is_over(self, *, drain: bool) -> bool:
        """Return whether the step is over: all shards are assigned, and a worker is ready for more.

        drain: require that all workers are idle.
        """
        if drain:
            return len(self._idle) == len(self._completed) and not self._chunks
        return not self._chunks and bool(self._ready())

    def arrived(self, assignment: Assignment) -> GradientRow:
        """Return the row of the gradient that is applied next."""
        return single_row(assignment.worker, assignment.version, len(self._rows), assignment.number)

    def applied(self, assignment: Assignment) -> None:
        """Record that a gradient has been applied. Its worker becomes idle."""
        worker, number, _, version, start = assignment
        self._rows.append((worker, version, len(self._rows), number, self._num_steps - 1, start, self._now()))
        self._completed[worker] += 1
        self._idle.append(worker)

    def record(self) -> Canonical:
        """Return the recorded rows, by column."""
        columns = zip(COLUMNS, zip(*self._rows, strict=True), strict=False)
        # Checkpoints have no float64.
        return {column: np.array(values, np.float64).view(np.uint32) for column, values in columns}

    def restore(self, record: Canonical) -> None:
        """Continue the run whose `record` is given, including its clock."""
        columns = [np.asarray(record[column]).view(np.float64).tolist() for column in COLUMNS if column in record]
        self._rows = list(zip(*columns, strict=True))
        self._completed = np.bincount([int(row[0]) for row in self._rows], minlength=len(self._completed)).tolist()
        self._begin -= self._rows[-1][-1] if self._rows else 0.0

    def table(self) -> UpdateTable | None:
        """Return the recorded rows as a table; None if there are none."""
        if not self._rows:
            return None
        columns = [np.array(values) for values in zip(*self._rows, strict=True)]
        typed = [x.astype("f8" if name in TIMES else "i4") for name, x in zip(COLUMNS, columns, strict=True)]
        return UpdateTable(len(self._completed), *typed)

    def _ready(self) -> list[int]:
        """Return the idle workers that are not too far ahead."""
        least = min(self._completed)
        return [worker for worker in self._idle if self._completed[worker] - least <= self._bound]

    def _now(self) -> float:
        return time.perf_counter() - self._begin
