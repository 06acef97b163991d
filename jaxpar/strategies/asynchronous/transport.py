"""Transports, which carry weights to workers and gradients to the server, independently of the algorithm.

The algorithm belongs to the server (server.py), which applies gradients one by one as a transport delivers them:

    virtual time (virtual_time.py)   in the order of a table: the same every time, on any devices
    threads (threads.py)             a thread for each worker; in the order of arrival

To add a transport, such as processes on other machines, write a class with the methods of `Transport`, and a
`BeginTransport` that makes it. If its workers compete, as threads do, derive it from `LiveTransport` and add `deliver`
and `close`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from jaxpar.core.state import Canonical, State
from jaxpar.models.model import Params
from jaxpar.strategies.asynchronous.layouts import DeviceNumbers
from jaxpar.strategies.asynchronous.programs import Chunk, MadeGradient, Programs, SentGradient
from jaxpar.strategies.asynchronous.table import COLUMNS, TIMES, GradientRow, UpdateTable

# A gradient that has reached the server's device, after its row of the table.
Delivery = tuple[GradientRow, SentGradient]


class InFlight(NamedTuple):
    """The state of a transport between steps."""

    weights: Mapping[int, Params]  # by version, older weights whose gradients have not arrived yet
    # arrays by name (names must not be numbers): shards that are still to be computed, and the data of `table`
    record: Canonical


class Workers(NamedTuple):
    """The workers of a run: their programs and devices."""

    programs: Programs  # programs of the run
    numbers: DeviceNumbers  # device numbers of workers and server
    devices: Sequence[jax.Device]  # devices of the workers, by device number
    server: jax.Device  # the server's device, which may be one of them
    key: jax.Array  # key of the run, as in State

    def device_of(self, worker: int) -> jax.Device:
        """Return a worker's device."""
        return self.devices[self.numbers.of_worker(worker)]

    def compute(self, worker: int, read: Params, chunk: Chunk) -> MadeGradient:
        """Return a shard's gradient, with the sums and the scale. `read` and results are on the worker's device."""
        inputs = (self.key, np.int32(chunk.step), chunk.examples, chunk.weight, chunk.loss_scale)
        return self.programs.gradient(read, *jax.device_put(inputs, self.device_of(worker)))

    def send(self, made: MadeGradient, read: Params) -> SentGradient:
        """Return the result of `compute`, and the weights if a mitigation needs them, on the server's device."""
        needs_read = self.programs.mitigations.needs_read
        return jax.device_put((*made, read if needs_read else None), self.server)


class Transport(Protocol):
    """The server's interface to the workers of one run. Only one thread calls these methods."""

    def deliver(self, chunks: Mapping[int, Chunk], *, drain: bool) -> Iterator[Delivery]:
        """Begin a step: assign its shards, and yield gradients in the order of their updates until the step is over.

        The server applies each gradient, and publishes the new weights, before it takes the next gradient.

        chunks: the workers' shards of the step's batch, by their number in the run; empty: no step begins. drain:
        whether to wait for the gradients that workers are still computing. Raises RuntimeError if it is closed.
        """

    def publish(self, params: Params) -> None:
        """Take the newest version of the weights, on the server's device, for all later reads."""

    def in_flight(self) -> InFlight:
        """Return the state between steps."""

    def restore(self, in_flight: InFlight) -> None:
        """Restore the result of `in_flight` from a run of the same table. Its record may contain additional names."""

    def table(self) -> UpdateTable | None:
        """Return the table of updates since the run began; None if it made no step."""

    def close(self) -> None:
        """End the workers. None of them may be computing when this is called."""


BeginTransport = Callable[[Workers, State], Transport]  # starts from a canonical state


class Assignment(NamedTuple):
    """A shard for a worker to compute, and the weights to compute it from."""

    worker: int  # its number
    number: int  # number of the shard
    chunk: Chunk  # the shard itself
    version: int  # version of the weights that the worker reads
    start: float  # seconds since the run began


class LiveTransport:
    """Base of transports whose workers compete: the newest weights, the queue of shards, and the record of the run.

    The next shard goes to the worker that has been idle longest, and a worker reads the newest weights. No worker waits
    for others, unless a bound limits how far it can run ahead of the slowest (ssp). Each gradient makes an update, so
    the newest version is the number of recorded rows.
    """

    def __init__(self, workers: Workers, state: State, *, bound: float):
        """bound: iterations that a worker may be ahead of the slowest."""
        self._workers, self._params, self._bound = workers, state.params, bound
        self._num_steps, self._begin = int(state.step), time.perf_counter()
        self._rows: list[tuple[float, ...]] = []  # columns as in COLUMNS
        self._completed = [0] * workers.numbers.num_workers  # gradients of each worker
        self._idle = list(range(len(self._completed)))  # in the order in which they became idle
        self._chunks = deque[tuple[int, Chunk]]()

    def publish(self, params: Params) -> None:
        """Take the weights for the next assignment."""
        self._params = params

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
        """Return whether the step is over: all shards are assigned, and a worker (to drain: each one) is ready."""
        if drain:
            return len(self._idle) == len(self._completed) and not self._chunks
        return not self._chunks and bool(self._ready())

    def arrived(self, assignment: Assignment) -> GradientRow:
        """Return the row of the gradient that is applied next, which makes an update alone."""
        worker, chunk, _, read, _ = assignment
        staleness = len(self._rows) - read
        return GradientRow(worker, read, len(self._rows), chunk, staleness, True, True, 1, 1 / max(staleness, 1))

    def applied(self, assignment: Assignment) -> None:
        """Record that a gradient has been applied. Its worker becomes idle."""
        worker, number, _, version, start = assignment
        self._rows.append((worker, version, len(self._rows), number, self._num_steps - 1, start, self._now()))
        self._completed[worker] += 1
        self._idle.append(worker)

    def in_flight(self) -> InFlight:
        """Return the recorded rows, by column. The run has been drained, so no worker holds weights."""
        columns = zip(COLUMNS, zip(*self._rows, strict=True), strict=False)
        # Checkpoints have no float64.
        return InFlight({}, {column: np.array(values, np.float64).view(np.uint32) for column, values in columns})

    def restore(self, in_flight: InFlight) -> None:
        """Continue the run that was recorded, including its clock."""
        record = in_flight.record
        columns = [np.asarray(record[column]).view(np.float64).tolist() for column in COLUMNS if column in record]
        self._rows = list(zip(*columns, strict=True))
        self._completed = np.bincount([int(row[0]) for row in self._rows], minlength=len(self._completed)).tolist()
        self._begin -= self._rows[-1][-1] if self._rows else 0.0

    def table(self) -> UpdateTable | None:
        """Return the recorded rows as a table; None if there are none."""
        if not self._rows:
            return None
        columns = zip(COLUMNS, zip(*self._rows, strict=True), strict=True)
        typed = [np.array(values, "f8" if name in TIMES else "i4") for name, values in columns]
        return UpdateTable(len(self._completed), *typed)

    def _ready(self) -> list[int]:
        """Return the idle workers that are not too far ahead."""
        least = min(self._completed)
        return [worker for worker in self._idle if self._completed[worker] - least <= self._bound]

    def _now(self) -> float:
        return time.perf_counter() - self._begin
