"""Workers with local weights, which synchronize from time to time: local_sgd, diloco, model_average.

Each worker is its own server: its gradient is applied to its local weights immediately. When the last gradient of an
update has been applied, the workers synchronize:

    local_sgd      all continue from the mean of their weights (Stich, "Local SGD Converges Fast and Communicates
                   Little", 2019)
    diloco         an outer optimizer, SGD with Nesterov momentum, takes as its gradient the weights at the start of the
                   round minus the mean of the weights at its end; all continue from its result (Douillard et al.,
                   "DiLoCo", 2023, algorithm 1)
    model_average  workers continue training during an averaging, which computes the correction mean - local of each
                   worker from the weights at its start. A worker adds the correction before the first gradient that it
                   begins after the end of the averaging (Bagua's asynchronous model average). If the next averaging
                   starts before that, it counts the correction as added, so that it does not correct twice
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.core.loss_scale import LossScale, find_scale, least_scale, with_scale
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Metrics, Problem
from jaxpar.layout import Tree
from jaxpar.models.model import Params
from jaxpar.strategies.asynchronous.layouts import DeviceNumbers
from jaxpar.strategies.asynchronous.mitigations import Mitigations
from jaxpar.strategies.asynchronous.programs import FIRST_STEP, Arrival, Programs, Server, Totals, leaves, with_leaves
from jaxpar.strategies.asynchronous.table import UpdateTable, rows_by_step, since


class LocalState(NamedTuple):
    """State of training at a step."""

    step: int  # the step, on the host
    first_step: int  # the step at which the run switched to this strategy
    key: jax.Array  # key of the run
    params: tuple[Params, ...]  # each worker's weights, on its device
    servers: tuple[Server, ...]  # each worker's server state, on its device: its optimizer, for example
    outer: Tree  # for diloco: the weights at the start of the round and the state of the outer optimizer; otherwise ()
    # for model_average: {(number of an averaging, worker that has not added its correction yet): correction}
    averages: Mapping[tuple[int, int], Params]
    taken: tuple[int, ...]  # for each worker, the number of averagings whose corrections it has added


class LocalEngine:
    """Workers with weights of their own. It runs a table, and every gradient makes an update.

    It has the methods of `ServerEngine` (server.py), which documents them.
    """

    def __init__(
        self,
        problem: Problem,
        mitigations: Mitigations,
        table: UpdateTable,
        numbers: DeviceNumbers,
        devices: Sequence[jax.Device],
        *,
        outer: optax.GradientTransformation | None,
        waits: bool,
    ):
        """Take the devices of the workers by number; the first one also holds what workers share.

        outer: the outer optimizer of diloco; None for other policies. waits: whether workers wait for each other when
        they synchronize: true for all policies except model_average.
        """
        self._num_workers, self._waits, self._outer = table.num_workers, waits, outer
        self._table, self._rows, self._device_numbers = table, rows_by_step(table), devices
        self._devices = [devices[number] for number in numbers.of_workers]
        self._programs = Programs(problem, mitigations, table.num_workers)
        self._mean = jax.jit(_mean)
        self._total = jax.jit(_add_up)
        self._subtract, self._add = jax.jit(optax.tree.sub), jax.jit(optax.tree.add)
        self._outer_step = jax.jit(self._outer_update)

    def start(self, state: State, private: Canonical | None = None) -> LocalState:
        """Start a run; all workers start from the same state."""
        step = int(state.step)
        params = self._spread(state.params)
        optimizers = [jax.device_put(state.optimizer, device, may_alias=False) for device in self._devices]
        of_workers = zip(params, optimizers, self._devices, strict=True)
        servers = tuple(self._programs.server(*each, is_grouped=False) for each in of_workers)
        outer = (state.params, self._outer.init(state.params)) if self._outer else ()
        behind = self._rows[step][0].update if step < len(self._rows) else 0
        run = LocalState(step, step, state.key, params, servers, outer, {}, (behind,) * self._num_workers)
        return run if private is None else _restored(run, private)

    def step(self, state: LocalState, batch: Mapping[str, np.ndarray]) -> tuple[LocalState, Metrics]:
        """Train on a batch; all gradients arrive in its step."""
        programs, chunks = self._programs, self._programs.chunks(state.step, batch, self._devices[0])
        params, servers, taken = list(state.params), list(state.servers), list(state.taken)
        outer, averages = state.outer, dict(state.averages)
        for row in self._rows[state.step]:
            worker, device = row.worker, self._devices[row.worker]
            for number in range(taken[worker], row.read) if not self._waits else ():
                if (number, worker) in averages:  # otherwise the run began after this averaging
                    params[worker] = self._add(params[worker], averages.pop((number, worker)))
                taken[worker] = number + 1
            examples, weight, *_ = chunks[row.chunk]
            inputs = jax.device_put((state.key, np.int32(state.step), examples, weight), device)
            scaling = find_scale(servers[worker].optimizer)
            made = programs.gradient(params[worker], *inputs, None if scaling is None else scaling.scale)
            at = Arrival(np.float32(0), np.float32(1), np.float32(1), np.int32(state.step))
            sent = (*made, None)
            params[worker], servers[worker] = programs.arrive(True, True, params[worker], servers[worker], sent, at)
            if row.is_last and self._waits:
                meeting, outer = self._outer_step(self._mean_of(params), outer)
                params = list(self._spread(meeting))
            elif row.is_last:
                averages |= self._average(row.update, params, averages)
        of_workers = [(server.totals, find_scale(server.optimizer)) for server in servers]
        metrics = programs.metrics(*self._total(jax.device_put(of_workers, self._devices[0])))
        for worker, device in enumerate(self._devices):
            servers[worker] = servers[worker]._replace(totals=programs.new_totals(device))
        rest = tuple(params), tuple(servers), outer, averages, tuple(taken)
        return LocalState(state.step + 1, state.first_step, state.key, *rest), metrics

    def drain(self, _state: LocalState) -> None:
        """Return None: no gradient is in flight between steps."""

    def params(self, state: LocalState) -> Params:
        """Return the mean of all workers' weights, on the first device."""
        return self._mean_of(state.params)

    def canonical(self, state: LocalState) -> State:
        """Return the canonical state: the mean over workers of the weights and the optimizer state."""
        optimizer = self._mean_of([server.optimizer for server in state.servers])
        return State(jnp.int32(state.step), state.key, self.params(state), optimizer)

    def private(self, state: LocalState) -> Canonical:
        """Return the state of each worker, and the averagings that workers have not applied yet."""
        local, averages = jax.device_put((_arrays(state), state.averages), self._devices[0])
        by_worker = {f"{number} {i}": leaves(tree) for (number, i), tree in averages.items()}
        counters = {"taken": np.array(state.taken), FIRST_STEP: np.int32(state.first_step)}
        return {"own": leaves(local), "averages": by_worker, **counters}

    def table(self, state: LocalState) -> UpdateTable | None:
        """Return the rows since the run switched to this strategy; None if it made no step."""
        return since(self._table, state.first_step)

    def lower(self, like: State) -> list[jax.stages.Lowered]:
        """Lower the programs of a step. Weights are updated on every device."""
        return self._programs.lower(like, self._device_numbers, self._device_numbers, is_grouped=False)

    def _average(
        self, number: int, params: Sequence[Params], averages: Mapping[tuple[int, int], Params]
    ) -> dict[tuple[int, int], Params]:
        """Return an averaging of model_average: mean - local of each worker. averages: those not applied yet."""
        local = list(params)
        for (_, worker), difference in sorted(averages.items(), key=lambda item: item[0]):
            local[worker] = self._add(local[worker], difference)
        mean = self._spread(self._mean_of(local))
        return {(number, i): self._subtract(mean[i], local[i]) for i in range(self._num_workers)}

    def _spread(self, tree: Params) -> tuple[Params, ...]:
        """Return a copy for each worker, on its device."""
        return tuple(jax.device_put(tree, device) for device in self._devices)

    def _mean_of(self, trees: Sequence[Tree]) -> Tree:
        return self._mean(jax.device_put(list(trees), self._devices[0]))

    def _outer_update(self, mean: Params, outer: Tree) -> tuple[Params, Tree]:
        """Return the weights from which all workers continue, and the outer optimizer's new state."""
        if self._outer is None:
            return mean, outer
        anchor, state = outer
        updates, state = self._outer.update(optax.tree.sub(anchor, mean), state, anchor)
        params = optax.apply_updates(anchor, updates)
        return params, (params, state)


def _arrays(state: LocalState) -> tuple[Tree, ...]:
    optimizers = tuple(server.optimizer for server in state.servers)
    return state.params, optimizers, state.outer, tuple(server.mitigations for server in state.servers)


def _restored(run: LocalState, private: Canonical) -> LocalState:
    """Return a started run with the private state restored."""
    params, optimizers, outer, mitigations = with_leaves(_arrays(run), private["own"])
    of_workers = zip(run.servers, optimizers, mitigations, strict=True)
    servers = tuple(server._replace(optimizer=one, mitigations=other) for server, one, other in of_workers)
    averages = {}
    for name, arrays in private.get("averages", {}).items():
        number, worker = map(int, name.split())
        averages[number, worker] = with_leaves(run.params[worker], arrays)
    taken = tuple(np.asarray(private["taken"]).tolist())
    return LocalState(run.step, int(private[FIRST_STEP]), run.key, params, servers, outer, averages, taken)


def _add_up(of_workers: Sequence[tuple[Totals, LossScale | None]]) -> tuple[Totals, LossScale | None]:
    """Return the totals over all workers, and the smallest scale."""
    totals, scalings = zip(*of_workers, strict=True)
    finite, failed = jnp.all(jnp.stack([one.finite for one in totals])), [one.failed_scale for one in totals]
    summed = (one._replace(finite=(), failed_scale=None) for one in totals)
    added: Totals = jax.tree.map(lambda *x: sum(x[1:], x[0]), *summed)
    return added._replace(finite=finite, failed_scale=least_scale(failed)), least_scale(scalings)


def _mean(trees: Sequence[Tree]) -> Tree:
    """Return the mean of floats, the first of counters, and the smallest scale, because a mean is no power of 2."""

    def of_leaves(*leaves: jax.Array) -> jax.Array:
        total = sum(leaves[1:], leaves[0])
        return total / len(leaves) if jnp.issubdtype(total.dtype, jnp.floating) else leaves[0]

    mean = jax.tree.map(of_leaves, *trees)
    return with_scale(mean, least_scale([find_scale(tree) for tree in trees]))
