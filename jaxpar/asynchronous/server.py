"""Workers that send gradients to a server: sync, async, ssp, softsync.

What workers would do by chance is done in the order that the table says. The host calls the two programs row by row and
waits for neither, so that devices compute side by side where the table lets them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.asynchronous.programs import (
    BEGUN,
    Arrival,
    Chunk,
    Mitigations,
    Programs,
    Server,
    leaves,
    with_leaves,
)
from jaxpar.asynchronous.table import UpdateTable, since
from jaxpar.models.model import Params
from jaxpar.state import Canonical, State
from jaxpar.step import Metrics, Problem

WEIGHT = "weight of the batch"  # in the private state, next to the rows of a chunk


class AsyncState(NamedTuple):
    """Training at a step.

    Attributes:
      step: on the host.
      begun: the step at which the run took on this strategy: its table is that from there on.
      key: of the run.
      params: on the server's device.
      server: what else is there.
      kept: by (version, number of a device), older weights that a worker of that device will need.
      chunks: of batches that have come, whose gradients come later: in the tables of live runs.
    """

    step: int
    begun: int
    key: jax.Array
    params: Params
    server: Server
    kept: dict[tuple[int, int], Params]
    chunks: dict[int, Chunk]


class GradientRow(NamedTuple):
    """A gradient, as an engine needs it.

    Attributes:
      worker: whose it is.
      read: the version that it is computed from.
      update: the one that it is applied to.
      chunk: part of the data.
      staleness: update - read.
      is_first: of its update.
      is_last: likewise.
      size: of its update: how many gradients are in it.
      mean_staleness: of its update.
    """

    worker: int
    read: int
    update: int
    chunk: int
    staleness: int
    is_first: bool
    is_last: bool
    size: int
    mean_staleness: float


def rows_by_step(table: UpdateTable) -> list[list[GradientRow]]:
    """The rows of each step."""
    sizes = np.bincount(table.update)
    means = np.bincount(table.update, table.staleness) / sizes
    is_first, is_last = np.diff(table.update, prepend=-1) != 0, np.diff(table.update, append=-1) != 0
    columns = table.worker, table.read, table.update, table.chunk, table.staleness, is_first, is_last
    of_update = sizes[table.update], means[table.update]
    rows = [GradientRow(*values) for values in zip(*(x.tolist() for x in (*columns, *of_update)), strict=True)]
    ends = np.searchsorted(table.step, np.arange(1, table.step[-1] + 2)).tolist()
    return [rows[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def last_uses(table: UpdateTable, num_devices: int) -> dict[tuple[int, int], int]:
    """(version, number of a device) -> the last update to which a gradient of that version is applied there."""
    uses = zip(table.read.tolist(), (table.worker % num_devices).tolist(), table.update.tolist(), strict=True)
    return {(read, device): update for read, device, update in uses}


def num_kept(table: UpdateTable, num_devices: int) -> list[int]:
    """By device, the most older versions that are kept there at a time."""
    change = np.zeros((num_devices, table.num_updates + 2), int)
    for (version, device), last in last_uses(table, num_devices).items():
        if last > version:
            change[device, version + 1] += 1
            change[device, last + 1] -= 1
    return [int(peak) for peak in change.cumsum(axis=1).max(axis=1)]


class ServerEngine:
    """A table, ready to run."""

    def __init__(
        self,
        problem: Problem,
        mitigations: Mitigations,
        table: UpdateTable,
        devices: Sequence[jax.Device],
        at: jax.Device,
    ):
        """devices: of the workers, which they have in turn; at: the server's, which may be one of them."""
        self._devices, self._server, self._table = devices, at, table
        self._rows, self._last_uses = rows_by_step(table), last_uses(table, len(devices))
        self._keepers: dict[int, list[int]] = {}  # version -> devices that need it when the next one is there
        for (version, device), last in self._last_uses.items():
            if last > version:
                self._keepers.setdefault(version, []).append(device)
        self.programs = Programs(problem, mitigations, table.num_workers)
        self.num_workers, self.is_grouped = table.num_workers, len(table.update) > table.num_updates

    def start(self, state: State) -> AsyncState:
        """Of a canonical state, with which all workers begin."""
        step = int(state.step)
        version = self._rows[step][0].update if step < len(self._rows) else 0
        alive = [use for use, last in self._last_uses.items() if use[0] < version <= last]
        kept = {(read, device): jax.device_put(state.params, self._devices[device]) for read, device in alive}
        server = self.programs.server(state.params, state.optimizer, self._server, is_grouped=self.is_grouped)
        return AsyncState(step, step, state.key, state.params, server, kept, {})

    def memory(self, like: State) -> dict[jax.Device, dict[str, int]]:
        """Bytes by device. like: abstract."""
        kept = num_kept(self._table, len(self._devices))
        return self.programs.memory(like, self._devices, self._server, kept, is_grouped=self.is_grouped)

    def sent(self) -> float:
        """Weights and gradients that go to the server's device and from it in a step, to and from workers of others.

        A version of the weights goes to a device once; with a gradient goes what it was computed from, where a
        mitigation needs that.
        """
        is_apart = np.array([device != self._server for device in self._devices])
        places = self._table.worker % len(self._devices)
        uses = np.stack([self._table.read, places])[:, is_apart[places]]
        gradients = uses.shape[1] * (2 if self.programs.mitigations.needs_read else 1)
        return (np.unique(uses, axis=1).shape[1] + gradients) / len(self._rows)

    def needs_private(self, step: int) -> bool:
        """Whether gradients from that step on are of batches before it, as in the tables of live runs."""
        first = step * self.num_workers
        return any(row.chunk < first for rows in self._rows[step:] for row in rows)

    def step(self, state: AsyncState, batch: Mapping[str, np.ndarray]) -> tuple[AsyncState, Metrics]:
        """The gradients of one step. batch: on the host."""
        step, _, key, params, server, kept, chunks = state
        kept, copies = dict(kept), dict[int, Params]()
        chunks = {**chunks, **self.programs.chunks(step, batch, self._server)}
        for row in self._rows[step]:
            place = row.worker % len(self._devices)
            device = self._devices[place]
            if row.read == row.update and place not in copies:
                copies[place] = jax.device_put(params, device)
            read = copies[place] if row.read == row.update else kept[row.read, place]
            rows, weight, of_step = chunks.pop(row.chunk)
            made = self.programs.gradient(read, *jax.device_put((key, np.int32(of_step), rows, weight), device))
            sent = jax.device_put((*made, read if self.programs.mitigations.needs_read else None), self._server)
            figures = map(np.float32, (row.staleness, row.mean_staleness, row.size))
            at = Arrival._make((*figures, np.int32(step)))
            old, (params, server) = params, self.programs.arrive(row.is_first, row.is_last, params, server, *sent, at)
            if row.is_last:
                for number in self._keepers.get(row.update, ()):
                    there = copies[number] if number in copies else jax.device_put(old, self._devices[number])
                    kept[row.update, number] = there
                kept = {use: x for use, x in kept.items() if self._last_uses[use] > row.update}
                copies = {}
        metrics = self.programs.metrics(server.totals)
        server = server._replace(totals=self.programs.new_totals(self._server))
        return AsyncState(step + 1, state.begun, key, params, server, kept, chunks), metrics

    def params(self, state: AsyncState) -> Params:
        """The weights as they are, on the server's device."""
        return state.params

    def canonical(self, state: AsyncState) -> State:
        """Without what is on its way."""
        return State(jnp.int32(state.step), state.key, state.params, state.server.optimizer)

    def private(self, state: AsyncState) -> Canonical:
        """What is in flight: weights that workers have read, gradients that wait for others; states of mitigations."""
        private = leaves(jax.device_put(_parts(state), self._server)) | {BEGUN: np.int32(state.begun)}
        for number, chunk in state.chunks.items():
            private |= {f"{number} {name}": x for name, x in (chunk.rows | {WEIGHT: chunk.weight}).items()}
        return private

    def restored(self, state: AsyncState, private: Canonical) -> AsyncState:
        """A state that `start` has made, with what `private` had."""
        versions, waiting, mitigations = with_leaves(_parts(state), private)
        kept = {(version, i): jax.device_put(versions[version], self._devices[i]) for version, i in state.kept}
        server = state.server._replace(waiting=waiting, mitigations=mitigations)
        parts: dict[int, dict[str, Any]] = {}
        for number, _, name in (name.partition(" ") for name in private if " " in name):
            parts.setdefault(int(number), {})[name] = private[f"{number} {name}"]
        chunks = {number: Chunk(rows, rows.pop(WEIGHT), number // self.num_workers) for number, rows in parts.items()}
        return state._replace(begun=int(private[BEGUN]), kept=kept, server=server, chunks=chunks)

    def table(self, state: AsyncState) -> UpdateTable | None:
        """Of the run, since it took on this strategy; None where no step was left."""
        return since(self._table, state.begun)


def _parts(state: AsyncState) -> tuple[dict[int, Params], Any, Any]:
    """Each older version once, wherever it is: the run may go on on other devices."""
    return {version: x for (version, _), x in state.kept.items()}, state.server.waiting, state.server.mitigations
