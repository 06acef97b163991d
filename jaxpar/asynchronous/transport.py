"""Transports, which take weights to workers and gradients to the server: the seam below the algorithm.

The algorithm is the server's (server.py): it applies gradients one by one as a transport delivers them. Transports:

    virtual time (virtual_time.py)   what a table says, in its order: the same every time, whatever the devices
    threads (threads.py)             a thread for each worker; whichever gradient is there first

Another one, such as processes on other machines, is another class with these methods, made by a `BeginTransport`. Where
its workers compete, as threads do, it adds `deliver` and `close` to `LiveTransport`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from jaxpar.asynchronous.gradient_rows import GradientRow
from jaxpar.asynchronous.live_schedule import LiveSchedule
from jaxpar.asynchronous.places import Places
from jaxpar.asynchronous.programs import Chunk, Programs
from jaxpar.asynchronous.table import UpdateTable
from jaxpar.models.model import Params
from jaxpar.state import Canonical, State
from jaxpar.tasks import Sums

SentGradient = tuple[Params, Sums, Params | None]  # a gradient, its sums, and the weights that it was computed from


class Delivery(NamedTuple):
    """A gradient that has reached the server's device.

    Attributes:
      row: which gradient it is, and its place in its update.
      grads: the gradient.
      sums: over its examples.
      read: the weights that it was computed from; None where no mitigation needs them.
    """

    row: GradientRow
    grads: Params
    sums: Sums
    read: Params | None


class InFlight(NamedTuple):
    """The state of a transport between steps.

    Attributes:
      weights: by version, older weights that workers have read and will send gradients of.
      record: arrays by name, other than numbers: chunks to come, and what `table` needs.
    """

    weights: Mapping[int, Params]
    record: Canonical


class Workers(NamedTuple):
    """The workers of a run: what they compute, and where.

    Attributes:
      programs: of the run.
      places: of workers and server.
      devices: of the workers, by their numbers.
      server: the server's device, which may be one of them.
      key: of the run, as in State.
    """

    programs: Programs
    places: Places
    devices: Sequence[jax.Device]
    server: jax.Device
    key: jax.Array

    @property
    def number(self) -> int:
        """Number of workers."""
        return self.places.num_workers

    def device_of(self, worker: int) -> jax.Device:
        """Return a worker's device."""
        return self.devices[self.places.of_worker(worker)]

    def compute(self, worker: int, read: Params, chunk: Chunk) -> tuple[Params, Sums]:
        """Return the gradient of a chunk and the sums over its examples, on the worker's device. read: there too."""
        inputs = (self.key, np.int32(chunk.step), chunk.examples, chunk.weight)
        inputs = jax.device_put(inputs, self.device_of(worker))
        made: tuple[Params, Sums] = self.programs.gradient(read, *inputs)
        return made

    def send(self, made: tuple[Params, Sums], read: Params) -> SentGradient:
        """Return what `compute` made, and the weights where a mitigation needs them, on the server's device."""
        needs_read = self.programs.mitigations.needs_read
        sent: SentGradient = jax.device_put((*made, read if needs_read else None), self.server)
        return sent


class Transport(Protocol):
    """The workers of one run, as its server sees them. One thread calls these methods."""

    def deliver(self, chunks: Mapping[int, Chunk], *, drain: bool) -> Iterator[Delivery]:
        """Begin a step: give out its chunks, and yield gradients in the order of their updates until it is over.

        The server applies each one, and publishes the weights that it has made, before it asks for the next.

        Args:
          chunks: the parts of the step's batch, by their number in the run; empty: no step begins.
          drain: whether to wait for what workers still compute.

        Raises:
          RuntimeError: the transport is closed, and there are chunks.
        """

    def publish(self, params: Params) -> None:
        """Take the newest version of the weights, on the server's device, for workers that read from now on."""

    def in_flight(self) -> InFlight:
        """Return what is held between steps."""

    def restore(self, in_flight: InFlight) -> None:
        """Take back what `in_flight` returned in a run of the same table. Its record may have more names."""

    def table(self) -> UpdateTable | None:
        """Return who has done what since the run began; None where it made no step."""

    def close(self) -> None:
        """End the workers. Nothing computes when this is called."""


class LiveTransport:
    """The common part of transports whose workers compete: the weights to read, the schedule and its record."""

    def __init__(self, workers: Workers, state: State, *, bound: float):
        """bound: iterations that a worker may be ahead of the slowest."""
        self._workers, self._params = workers, state.params
        self._schedule = LiveSchedule(workers.number, int(state.step), bound)

    def publish(self, params: Params) -> None:
        """Take the weights for the next assignment."""
        self._params = params

    def in_flight(self) -> InFlight:
        """Return the record. The run has been drained, so no worker has weights."""
        return InFlight({}, self._schedule.record())

    def restore(self, in_flight: InFlight) -> None:
        """Continue the record."""
        self._schedule.restore(in_flight.record)

    def table(self) -> UpdateTable | None:
        """Return what workers did; None where they did nothing."""
        return self._schedule.table()


BeginTransport = Callable[[Workers, State], Transport]  # from a canonical state
