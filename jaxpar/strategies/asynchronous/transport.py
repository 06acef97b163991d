"""Transports, which carry weights to workers and gradients to the server, independently of the algorithm.

The algorithm belongs to the server (server.py), which applies gradients one by one as a transport delivers them:

    virtual time (virtual_time.py)   in the order of a table: the same every time, on any devices
    threads (threads.py)             a thread for each worker; in the order of arrival

To add a transport, such as processes on other machines, write a class with the methods of `Transport`, and a
`BeginTransport` that makes it. If its workers compete, as threads do, derive it from `LiveTransport` and add `deliver`
and `close`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from jaxpar.core.state import Canonical, State
from jaxpar.models.model import Params
from jaxpar.strategies.asynchronous.device_numbers import DeviceNumbers
from jaxpar.strategies.asynchronous.gradient_rows import GradientRow
from jaxpar.strategies.asynchronous.programs import Chunk, Programs
from jaxpar.strategies.asynchronous.shard_queue import ShardQueue
from jaxpar.strategies.asynchronous.table import UpdateTable
from jaxpar.tasks import Sums

SentGradient = tuple[Params, Sums, Params | None]  # a gradient, its sums, and the weights it was computed from


class Delivery(NamedTuple):
    """A gradient that has reached the server's device."""

    row: GradientRow  # its row of the table
    grads: Params  # the gradient
    sums: Sums  # sums over its examples
    read: Params | None  # the weights that it was computed from; None if no mitigation needs them


class InFlight(NamedTuple):
    """The state of a transport between steps."""

    # by version, older weights that workers have read and whose gradients have not arrived yet
    weights: Mapping[int, Params]
    # arrays by name (names must not be numbers): shards that are still to be computed, and the data of `table`
    record: Canonical


class Workers(NamedTuple):
    """The workers of a run: their programs and devices."""

    programs: Programs  # programs of the run
    numbers: DeviceNumbers  # device numbers of workers and server
    devices: Sequence[jax.Device]  # devices of the workers, by device number
    server: jax.Device  # the server's device, which may be one of them
    key: jax.Array  # key of the run, as in State

    @property
    def number(self) -> int:
        """Number of workers."""
        return self.numbers.num_workers

    def device_of(self, worker: int) -> jax.Device:
        """Return a worker's device."""
        return self.devices[self.numbers.of_worker(worker)]

    def compute(self, worker: int, read: Params, chunk: Chunk) -> tuple[Params, Sums]:
        """Return a shard's gradient and the sums over its examples. `read` and results are on the worker's device."""
        inputs = (self.key, np.int32(chunk.step), chunk.examples, chunk.weight)
        inputs = jax.device_put(inputs, self.device_of(worker))
        made: tuple[Params, Sums] = self.programs.gradient(read, *inputs)
        return made

    def send(self, made: tuple[Params, Sums], read: Params) -> SentGradient:
        """Return the result of `compute`, and the weights if a mitigation needs them, on the server's device."""
        needs_read = self.programs.mitigations.needs_read
        sent: SentGradient = jax.device_put((*made, read if needs_read else None), self.server)
        return sent


class Transport(Protocol):
    """The server's interface to the workers of one run. Only one thread calls these methods."""

    def deliver(self, chunks: Mapping[int, Chunk], *, drain: bool) -> Iterator[Delivery]:
        """Begin a step: assign its shards, and yield gradients in the order of their updates until the step is over.

        The server applies each gradient, and publishes the new weights, before it takes the next gradient.

        Args:
          chunks: the workers' shards of the step's batch, by their number in the run; empty: no step begins.
          drain: whether to wait for the gradients that workers are still computing.

        Raises:
          RuntimeError: the transport is closed, and there are shards.
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


class LiveTransport:
    """Base of transports whose workers compete: it holds the weights to read, the queue and its record."""

    def __init__(self, workers: Workers, state: State, *, bound: float):
        """bound: iterations that a worker may be ahead of the slowest."""
        self._workers, self._params = workers, state.params
        self._shards = ShardQueue(workers.number, int(state.step), bound)

    def publish(self, params: Params) -> None:
        """Take the weights for the next assignment."""
        self._params = params

    def in_flight(self) -> InFlight:
        """Return the record. The run has been drained, so no worker holds weights."""
        return InFlight({}, self._shards.record())

    def restore(self, in_flight: InFlight) -> None:
        """Continue from a restored record."""
        self._shards.restore(in_flight.record)

    def table(self) -> UpdateTable | None:
        """Return the table of updates; None if there are none."""
        return self._shards.table()


BeginTransport = Callable[[Workers, State], Transport]  # starts from a canonical state
