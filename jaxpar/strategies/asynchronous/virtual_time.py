"""The transport of emulated runs, which delivers the gradients of a table in its order, without waiting.

The order of events has been decided in virtual time (simulate.py) or recorded (threads.py). A gradient is
computed when its row is next, from the version of the weights given in the row. Each device stashes the
older versions that its workers still need. The host does not wait for programs, so that devices compute concurrently
if the table allows it.
"""

from collections.abc import Iterator, Mapping

import jax
import numpy as np

from jaxpar.core.state import Canonical, State
from jaxpar.models.model import Params
from jaxpar.strategies.asynchronous.layouts import last_uses
from jaxpar.strategies.asynchronous.programs import FIRST_STEP, Chunk
from jaxpar.strategies.asynchronous.table import UpdateTable, rows_by_step, since
from jaxpar.strategies.asynchronous.transport import Delivery, InFlight, Workers

# in the record, next to the examples of a shard
WEIGHT, SCALE = "weight of the batch", "scale of the loss"


class VirtualTime:
    """A `Transport`. Its `history` holds older weights, by (version, device number)."""

    def __init__(self, table: UpdateTable, workers: Workers, state: State):
        self._table, self._rows, self._last_uses = table, rows_by_step(table), last_uses(table, workers.numbers)
        self._keepers: dict[int, list[int]] = {}  # version -> devices that need it after the next one is published
        for (version, device), last in self._last_uses.items():
            if last > version:
                self._keepers.setdefault(version, []).append(device)
        self._workers, self._params = workers, state.params
        self._step = self._first_step = int(state.step)
        self._version = self._rows[self._step][0].update if self._step < len(self._rows) else 0
        alive = [use for use, last in self._last_uses.items() if use[0] < self._version <= last]
        self.history = {(read, place): self._put(state.params, place) for read, place in alive}
        self._copies: dict[int, Params] = {}  # copies of the newest weights, by device
        self._chunks: dict[int, Chunk] = {}

    def _put(self, params: Params, place: int) -> Params:
        return jax.device_put(params, self._workers.devices[place])

    def deliver(self, chunks: Mapping[int, Chunk], *, drain: bool) -> Iterator[Delivery]:
        """Yield the gradients of the next step, if there are shards. There is nothing to drain."""
        if not chunks:
            return
        self._chunks.update(chunks)
        for row in self._rows[self._step]:
            place = self._workers.numbers.of_worker(row.worker)
            if row.read == row.update and place not in self._copies:
                self._copies[place] = self._put(self._params, place)
            read = self._copies[place] if row.read == row.update else self.history[row.read, place]
            made = self._workers.compute(row.worker, read, self._chunks.pop(row.chunk))
            yield row, self._workers.send(made, read)
        self._step += 1

    def publish(self, params: Params) -> None:
        """Stash the previous version on the devices that will need it, and drop those that are no longer needed."""
        for place in self._keepers.get(self._version, ()):
            copy = self._copies[place] if place in self._copies else self._put(self._params, place)
            self.history[self._version, place] = copy
        self.history = {use: x for use, x in self.history.items() if self._last_uses[use] > self._version}
        self._params, self._copies, self._version = params, {}, self._version + 1

    def in_flight(self) -> InFlight:
        """Return each older version once, not per device, because the run may continue on other devices."""
        record: Canonical = {FIRST_STEP: np.int32(self._first_step)}
        for number, chunk in self._chunks.items():
            scalars = {WEIGHT: chunk.weight, SCALE: chunk.loss_scale}
            named = {name: x for name, x in (chunk.examples | scalars).items() if x is not None}
            record |= {f"{number} {name}": x for name, x in named.items()}
        return InFlight({version: x for (version, _), x in self.history.items()}, record)

    def restore(self, in_flight: InFlight) -> None:
        """Put older weights on their devices, and restore shards whose gradients are still to come."""
        self._first_step = int(in_flight.record[FIRST_STEP])
        self.history = {
            (version, place): self._put(in_flight.weights[version], place) for version, place in self.history
        }
        arrays: dict[int, Canonical] = {}
        for name in in_flight.record:
            number, space, field = name.partition(" ")
            if space:
                arrays.setdefault(int(number), {})[field] = in_flight.record[name]
        num_workers = self._workers.numbers.num_workers
        self._chunks = {
            number: Chunk(x, x.pop(WEIGHT), number // num_workers, x.pop(SCALE, None)) for number, x in arrays.items()
        }

    def table(self) -> UpdateTable | None:
        """Return the rows since the run switched to this strategy."""
        return since(self._table, self._first_step)

    def close(self) -> None:
        """Do nothing: workers compute only during `deliver`."""
