"""The two programs of asynchronous training: a worker's, and the server's.

They are compiled apart from each other, and from how many workers and devices there are: XLA rounds the same arithmetic
in other ways when it is a part of other programs. So a run is the same, bitwise, on any number of devices, and what
threads have made can be replayed.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar import step as steps
from jaxpar.models.model import Batch, Params
from jaxpar.state import State, nbytes
from jaxpar.step import Metrics, Problem
from jaxpar.tasks import Sums

BEGUN = "begun"  # in the private state: the step at which the run took on this strategy


class Mitigations(NamedTuple):
    """Transformations of gradients and of updates (jaxpar/asynchronous/mitigations.py). needs_read: of `gradients`."""

    gradients: optax.GradientTransformationExtraArgs
    updates: optax.GradientTransformationExtraArgs
    needs_read: bool


class Totals(NamedTuple):
    """Of the gradients that have arrived in a step: sums over their rows, squared norms, updates, whether finite."""

    sums: Sums
    square: Any
    num_updates: Any
    finite: Any


class Server(NamedTuple):
    """What the server has besides the weights.

    Attributes:
      optimizer: its state.
      waiting: the sum of the gradients that have arrived for the next update; () where each gradient makes one.
      mitigations: their states.
      totals: of this step.
    """

    optimizer: Any
    waiting: Any
    mitigations: Any
    totals: Totals


class Arrival(NamedTuple):
    """What the table says of a gradient that reaches the server.

    Attributes:
      staleness: its own.
      mean_staleness: of all gradients of its update.
      size: how many these are.
      step: of the run.
    """

    staleness: Any
    mean_staleness: Any
    size: Any
    step: Any


class Chunk(NamedTuple):
    """A part of a batch, on the host: rows i, i + n, i + 2n, .. of n workers.

    Attributes:
      rows: of the batch.
      weight: what its gradient is divided by.
      step: of the run, whose batch it is of.
    """

    rows: dict[str, Any]
    weight: Any
    step: int


def gradient(problem: Problem, params: Params, key: Any, step: Any, rows: Batch, weight: Any) -> tuple[Params, Sums]:
    """A worker's program: the gradient of its rows at the weights that it has read."""
    return steps.gradients(problem, State(step, key, params, None), rows, weight)


def arrive(
    problem: Problem,
    mitigations: Mitigations,
    is_first: bool,
    is_last: bool,
    params: Params,
    server: Server,
    grads: Params,
    sums: Sums,
    read: Params | None,
    at: Arrival,
) -> tuple[Params, Server]:
    """The server's program: a gradient arrives, and if it is the last one of its update the weights change.

    Args:
      problem: what is trained.
      mitigations: against staleness.
      is_first: of its update.
      is_last: of its update.
      params: the weights as they are.
      server: the rest of what the server has.
      grads: what arrives.
      sums: of its rows.
      read: the weights that it is of; None where no mitigation needs them.
      at: what the table says of it.
    """
    before, after = server.mitigations
    arrived = jnp.isfinite(optax.tree.norm(grads)) & jnp.isfinite(sums.loss)
    grads, remembered = mitigations.gradients.update(grads, before, params, staleness=at.staleness, read=read)
    before = jax.tree.map(lambda new, old: jnp.where(arrived, new, old), remembered, before)
    total = jax.tree.map(jnp.add, server.totals.sums, sums)
    grads = grads if is_first else jax.tree.map(jnp.add, server.waiting, grads)
    if not is_last:
        return params, server._replace(
            waiting=grads, mitigations=(before, after), totals=server.totals._replace(sums=total)
        )
    if not is_first:  # a division by 1 would not change a number, but how XLA rounds those after it
        grads = jax.tree.map(lambda x: x / at.size, grads)
    grad_norm = optax.tree.norm(grads)
    optimizer = at_step(server.optimizer, at.step)
    updates, optimizer = problem.optimizer.update(grads, optimizer, params, grad_norm=grad_norm)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums.loss)
    updates, remembered = mitigations.updates.update(updates, after, params, staleness=at.mean_staleness)
    after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), remembered, after)
    state = State(at.step, jnp.zeros(()), params, server.optimizer)
    state, metrics = steps.apply(state, updates, optimizer, Metrics(total, grad_norm, finite))
    totals = Totals(
        total,
        server.totals.square + jnp.where(metrics.finite, grad_norm, 0) ** 2,
        server.totals.num_updates + 1,
        server.totals.finite & metrics.finite,
    )
    waiting = jax.tree.map(jnp.zeros_like, server.waiting)
    return state.params, Server(state.optimizer, waiting, (before, after), totals)


def at_step(optimizer: Any, step: jax.Array) -> Any:
    """An optimizer's state whose learning rate is that of a step of the run, however many updates it has made."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def node(old: Any) -> Any:
        return optax.ScaleByScheduleState(step) if is_schedule(old) else old

    return jax.tree.map(node, optimizer, is_leaf=is_schedule)


class Programs:
    """Compiled when they are first called on a device.

    Attributes:
      gradient: (params, key, step, rows, weight) -> (gradient, sums of the rows).
      arrive: (is it the first of its update, is it the last, params, server, grads, sums, read, at) -> (params,
        server); the old server is donated.
      weight: (weights of a batch) -> what a worker's gradient is divided by: its part of their sum.
    """

    def __init__(self, problem: Problem, mitigations: Mitigations, num_workers: int):
        self.mitigations, self.num_workers = mitigations, num_workers
        self._task = problem.task
        self.gradient = jax.jit(
            partial(gradient, problem), keep_unused=True
        )  # for the audit, which tells arguments apart
        self.arrive = jax.jit(
            partial(arrive, problem, mitigations), static_argnums=(0, 1), donate_argnums=3, keep_unused=True
        )
        self.weight = jax.jit(lambda weights: weights.sum() / num_workers)
        self._root_mean = jax.jit(_root_mean)

    def server(self, params: Params, optimizer: Any, device: jax.Device | None, *, is_grouped: bool) -> Server:
        """At its beginning."""
        waiting = jax.tree.map(jnp.zeros_like, params) if is_grouped else ()
        mitigations = (self.mitigations.gradients.init(params), self.mitigations.updates.init(params))
        return Server(optimizer, waiting, mitigations, self.new_totals(device))

    def abstract_server(self, like: State, *, is_grouped: bool) -> Server:
        """The same, without its arrays."""
        made: Server = jax.eval_shape(
            lambda params, optimizer: self.server(params, optimizer, None, is_grouped=is_grouped),
            *(like.params, like.optimizer),
        )
        return made

    def memory(
        self,
        like: State,
        devices: Sequence[jax.Device],
        at: jax.Device,
        num_kept: Sequence[int],
        *,
        is_grouped: bool,
    ) -> dict[jax.Device, dict[str, int]]:
        """Bytes by device: of the weights, older ones, and at the server of what it has besides.

        Args:
          like: the state, abstract.
          devices: of the workers.
          at: the server's.
          num_kept: of each of `devices`, how many older versions it has.
          is_grouped: as in `server`.
        """
        size, server = nbytes(like.params), self.abstract_server(like, is_grouped=is_grouped)
        of_each = zip(devices, num_kept, strict=True)
        memory = {device: {"parameters": size, "history": number * size} for device, number in of_each}
        there = {name: nbytes(getattr(server, name)) for name in ("optimizer", "waiting", "mitigations")}
        memory[at] = memory.get(at, {"parameters": size}) | {name: size for name, size in there.items() if size}
        return memory

    def chunks(self, step: int, batch: Mapping[str, np.ndarray], device: jax.Device) -> dict[int, Chunk]:
        """The parts of a step's batch by their number in the run; device: for its weight."""
        weight, n = self.weight(jax.device_put(batch["weights"], device)), self.num_workers
        return {step * n + i: Chunk({k: x[i::n] for k, x in batch.items()}, weight, step) for i in range(n)}

    def new_totals(self, device: jax.Device | None) -> Totals:
        """Return the totals at the beginning of a step. device: None where they are abstract."""
        zero: Any = np.zeros((), np.float32)
        totals: Totals = jax.device_put(Totals(self._task.zeros(), zero, zero, np.ones((), bool)), device)
        return totals

    def metrics(self, totals: Totals) -> Metrics:
        """Of a step: the norm is the root mean square over its updates, where all of them are finite."""
        return Metrics(totals.sums, self._root_mean(totals), totals.finite)


def _root_mean(totals: Totals) -> jax.Array:
    return jnp.where(totals.finite, jnp.sqrt(totals.square / jnp.maximum(totals.num_updates, 1)), jnp.nan)


def add_up(totals: Sequence[Totals]) -> Totals:
    """Of several servers."""
    finite = [one.finite for one in totals]
    added: Totals = jax.tree.map(lambda *x: sum(x[1:], x[0]), *(one._replace(finite=()) for one in totals))
    return added._replace(finite=jnp.all(jnp.stack(finite)))


def leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a tree, by their number."""
    return {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(tree))}


def with_leaves(tree: Any, numbered: Mapping[str, Any]) -> Any:
    """The tree with other arrays, where its own are."""
    old, structure = jax.tree.flatten(tree)
    new = [jax.device_put(numbered[str(number)], leaf.sharding) for number, leaf in enumerate(old)]
    return jax.tree.unflatten(structure, new)
