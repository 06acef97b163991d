"""Workers with weights of their own, which meet from time to time: local_sgd, diloco, model_average.

Each worker is a server to itself: its gradient arrives at its own weights at once. What they make of it is brought
together when the last gradient of an update is there:

    local_sgd      all go on from the mean of their weights (Stich, "Local SGD Converges Fast and Communicates Little",
                   2019)
    diloco         the way from where they began to that mean is the gradient of an outer optimizer, SGD with Nesterov's
                   momentum; all go on from what it makes (Douillard et al., "DiLoCo", 2023, algorithm 1)
    model_average  they train on meanwhile; each adds mean - own, as these were when the averaging began, before the
                   first gradient that it begins after the averaging (Bagua's asynchronous model average)
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.asynchronous.programs import (
    BEGUN,
    Arrival,
    Mitigations,
    Programs,
    Server,
    add_up,
    leaves,
    with_leaves,
)
from jaxpar.asynchronous.server import rows_by_step
from jaxpar.asynchronous.table import UpdateTable, since
from jaxpar.models.model import Params
from jaxpar.state import Canonical, State, nbytes
from jaxpar.step import Metrics, Problem


class LocalState(NamedTuple):
    """Training at a step.

    Attributes:
      step: on the host.
      begun: the step at which the run took on this strategy.
      key: of the run.
      params: of each worker, on its device.
      servers: likewise: its optimizer.
      outer: of diloco: where this round began, and the outer optimizer's state; else ().
      averages: of model_average: (number of an averaging, worker that has not taken it in yet) -> mean - own.
      taken: averagings that each worker has behind it.
    """

    step: int
    begun: int
    key: jax.Array
    params: tuple[Params, ...]
    servers: tuple[Server, ...]
    outer: Any
    averages: Mapping[tuple[int, int], Params]
    taken: tuple[int, ...]


def num_under_way(table: UpdateTable, num_devices: int) -> list[int]:
    """By device, the most averagings of model_average at a time that its workers have not taken in yet."""
    ends = np.flatnonzero(np.diff(table.update, append=-1))  # the rows after which an averaging begins
    num_rows = len(table.update)
    change = np.zeros((num_devices, num_rows + 2), int)
    for worker in range(table.num_workers):
        rows = np.append(np.flatnonzero(table.worker == worker), num_rows + 1)  # or it never takes it
        taken = rows[np.searchsorted(table.read[rows[:-1]], np.arange(len(ends)), side="right")]
        np.add.at(change[worker % num_devices], ends + 1, 1)
        np.add.at(change[worker % num_devices], taken, -1)
    return [int(peak) for peak in change.cumsum(axis=1).max(axis=1)]


class LocalEngine:
    """A table, ready to run."""

    is_grouped = False  # every gradient makes an update of its worker's weights

    def __init__(
        self,
        problem: Problem,
        mitigations: Mitigations,
        table: UpdateTable,
        devices: Sequence[jax.Device],
        *,
        outer: optax.GradientTransformation | None = None,
        waits: bool = True,
    ):
        """devices: of the workers, the first for what they have in common; outer: of diloco; waits: all meet."""
        self.num_workers, self._waits, self._outer = table.num_workers, waits, outer
        self._table, self._rows = table, rows_by_step(table)
        self._devices = [devices[worker % len(devices)] for worker in range(table.num_workers)]
        self.programs = Programs(problem, mitigations, table.num_workers)
        self._mean = jax.jit(lambda trees: jax.tree.map(lambda *leaves: _mean(leaves), *trees))
        self._total = jax.jit(add_up)
        self._subtract, self._add = jax.jit(optax.tree.sub), jax.jit(optax.tree.add)
        self._outer_step = jax.jit(self._outer_update)

    def start(self, state: State) -> LocalState:
        """Of a canonical state, with which all workers begin."""
        step = int(state.step)
        params = self._spread(state.params)
        optimizers = [jax.device_put(state.optimizer, device, may_alias=False) for device in self._devices]
        of_workers = zip(params, optimizers, self._devices, strict=True)
        servers = tuple(self.programs.server(*each, is_grouped=False) for each in of_workers)
        behind = self._rows[step][0].update if step < len(self._rows) else 0
        return LocalState(
            step, step, state.key, params, servers, self.outer(state.params), {}, (behind,) * self.num_workers
        )

    def outer(self, params: Params) -> Any:
        """Of diloco, at its beginning."""
        return (params, self._outer.init(params)) if self._outer else ()

    def memory(self, like: State) -> dict[jax.Device, dict[str, int]]:
        """Bytes by device. like: abstract."""
        size, optimizer = nbytes(like.params), nbytes(like.optimizer)
        memory: dict[jax.Device, dict[str, int]] = {}
        for device in self._devices:
            parts = memory.setdefault(device, {"parameters": 0, "optimizer": 0})
            parts |= {"parameters": parts["parameters"] + size, "optimizer": parts["optimizer"] + optimizer}
        if self._outer:
            memory[self._devices[0]]["outer"] = nbytes(jax.eval_shape(self.outer, like.params))
        if not self._waits:
            under_way = num_under_way(self._table, len(memory))
            for parts, number in zip(memory.values(), under_way, strict=True):
                parts["averages"] = number * size
        return memory

    def sent(self) -> float:
        """Weights that go to the first device and back in a step: of the workers of others, when they meet."""
        elsewhere = sum(device != self._devices[0] for device in self._devices)
        return 2 * elsewhere * self._table.num_updates / len(self._rows)

    def step(self, state: LocalState, batch: Mapping[str, np.ndarray]) -> tuple[LocalState, Metrics]:
        """The gradients of one step. batch: on the host."""
        programs, chunks = self.programs, self.programs.chunks(state.step, batch, self._devices[0])
        params, servers, taken = list(state.params), list(state.servers), list(state.taken)
        outer, averages = state.outer, dict(state.averages)
        for row in self._rows[state.step]:
            worker, device = row.worker, self._devices[row.worker]
            for number in range(taken[worker], row.read) if not self._waits else ():
                if (number, worker) in averages:  # else the run began after it
                    params[worker] = self._add(params[worker], averages.pop((number, worker)))
                taken[worker] = number + 1
            rows, weight, _ = chunks[row.chunk]
            given = jax.device_put((state.key, np.int32(state.step), rows, weight), device)
            made = programs.gradient(params[worker], *given)
            at = Arrival(np.float32(0), np.float32(0), np.float32(1), np.int32(state.step))
            params[worker], servers[worker] = programs.arrive(
                True, True, params[worker], servers[worker], *made, None, at
            )
            if row.is_last and self._waits:
                meeting, outer = self._outer_step(self._mean_of(params), outer)
                params = list(self._spread(meeting))
            elif row.is_last:
                mean = self._spread(self._mean_of(params))
                averages |= {(row.update, i): self._subtract(mean[i], params[i]) for i in range(self.num_workers)}
        metrics = self._metrics(servers)
        servers = [
            server._replace(totals=self.programs.new_totals(device))
            for server, device in zip(servers, self._devices, strict=True)
        ]
        own = tuple(params), tuple(servers), outer, averages, tuple(taken)
        return LocalState(state.step + 1, state.begun, state.key, *own), metrics

    def params(self, state: LocalState) -> Params:
        """The mean of all workers' weights, on the first device."""
        return self._mean_of(state.params)

    def canonical(self, state: LocalState) -> State:
        """Of what differs between workers: the mean."""
        optimizer = self._mean_of([server.optimizer for server in state.servers])
        return State(jnp.int32(state.step), state.key, self.params(state), optimizer)

    def private(self, state: LocalState) -> Canonical:
        """What workers have of their own, and what is on its way."""
        own, averages = jax.device_put((_parts(state), state.averages), self._devices[0])
        numbered = {f"{number} {i}": leaves(tree) for (number, i), tree in averages.items()}
        figures = {"taken": np.array(state.taken), BEGUN: np.int32(state.begun)}
        return {"own": leaves(own), "averages": numbered, **figures}

    def restored(self, state: LocalState, private: Canonical) -> LocalState:
        """A state that `start` has made, with what `private` had."""
        params, optimizers, outer, mitigations = with_leaves(_parts(state), private["own"])
        of_workers = zip(state.servers, optimizers, mitigations, strict=True)
        servers = tuple(
            server._replace(optimizer=own, mitigations=mitigations) for server, own, mitigations in of_workers
        )
        there = private.get("averages", {})
        averages = {}
        for name, numbered in there.items():
            number, worker = map(int, name.split())
            averages[number, worker] = with_leaves(state.params[worker], numbered)
        taken = tuple(np.asarray(private["taken"]).tolist())
        return LocalState(state.step, int(private[BEGUN]), state.key, params, servers, outer, averages, taken)

    def table(self, state: LocalState) -> UpdateTable | None:
        """Of the run, since it took on this strategy; None where no step was left."""
        return since(self._table, state.begun)

    def _spread(self, tree: Params) -> tuple[Params, ...]:
        """A copy for each worker, on its device."""
        return tuple(jax.device_put(tree, device) for device in self._devices)

    def _mean_of(self, trees: Sequence[Any]) -> Any:
        return self._mean(jax.device_put(list(trees), self._devices[0]))

    def _outer_update(self, mean: Params, outer: Any) -> tuple[Params, Any]:
        """Where all go on from."""
        if self._outer is None:
            return mean, outer
        begun, state = outer
        updates, state = self._outer.update(optax.tree.sub(begun, mean), state, begun)
        params = optax.apply_updates(begun, updates)
        return params, (params, state)

    def _metrics(self, servers: Sequence[Server]) -> Metrics:
        totals = jax.device_put([server.totals for server in servers], self._devices[0])
        return self.programs.metrics(self._total(totals))


def _parts(state: LocalState) -> tuple[Any, ...]:
    optimizers = tuple(server.optimizer for server in state.servers)
    return state.params, optimizers, state.outer, tuple(server.mitigations for server in state.servers)


def _mean(leaves: Sequence[jax.Array]) -> jax.Array:
    """Of floats; of counters, the first."""
    total = sum(leaves[1:], leaves[0])
    return total / len(leaves) if jnp.issubdtype(total.dtype, jnp.floating) else leaves[0]
