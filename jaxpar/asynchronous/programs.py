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
from jax.sharding import SingleDeviceSharding

from jaxpar import step as steps
from jaxpar.asynchronous.mitigations import Mitigations
from jaxpar.layout import Tree
from jaxpar.models.model import Batch, Params
from jaxpar.state import State
from jaxpar.step import Metrics, Problem
from jaxpar.tasks import Sums
from jaxpar.tasks.task import Scalar

FIRST_STEP = "begun"  # in the private state: the step at which the run took on this strategy


class Totals(NamedTuple):
    """Totals over the gradients that have arrived in a step.

    Attributes:
      sums: over their examples.
      square: of the norms of the updates' gradients, squared.
      num_updates: that they have made.
      finite: whether all of them are.
    """

    sums: Sums
    square: Scalar
    num_updates: Scalar
    finite: Scalar


class Server(NamedTuple):
    """State of the server besides the weights.

    Attributes:
      optimizer: state of the optimizer.
      waiting: the sum of the gradients that have arrived for the next update; () where each gradient makes one.
      mitigations: states of the mitigations, of gradients and of updates.
      totals: of this step.
    """

    optimizer: Tree
    waiting: Tree
    mitigations: tuple[Tree, Tree]
    totals: Totals


class Arrival(NamedTuple):
    """The numbers that the server's program takes of a gradient.

    Attributes:
      staleness: of the gradient.
      mean_staleness: over all gradients of its update.
      size: gradients in its update.
      step: of the run, in which it arrives.
    """

    staleness: Scalar
    mean_staleness: Scalar
    size: Scalar
    step: Scalar


class Chunk(NamedTuple):
    """A worker's part of a batch, on the host: examples i, i + n, i + 2n, .. of n workers.

    Attributes:
      examples: as a batch has them.
      weight: what their gradient is divided by.
      step: of the run, whose batch they are of.
    """

    examples: dict[str, Any]
    weight: Scalar
    step: int


def gradient(
    problem: Problem, params: Params, key: jax.Array, step: jax.Array, examples: Batch, weight: Scalar
) -> tuple[Params, Sums]:
    """Return the gradient of the examples of a chunk at the weights that its worker has read: a worker's program."""
    return steps.gradients(problem, State(step, key, params, None), examples, weight)


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
    """Take a gradient, and update the weights if it is the last one of its update: the server's program.

    Args:
      problem: what is trained.
      mitigations: against staleness.
      is_first: of its update.
      is_last: of its update.
      params: the weights as they are.
      server: the rest of the server's state.
      grads: what arrives.
      sums: over its examples.
      read: the weights that it is of; None where no mitigation needs them.
      at: its staleness and place in its update.
    """
    before, after = server.mitigations
    arrived = steps.is_finite(optax.tree.norm(grads), sums)
    grads, remembered = mitigations.gradients.update(grads, before, params, staleness=at.staleness, read=read)
    before = jax.tree.map(lambda new, old: jnp.where(arrived, new, old), remembered, before)
    total = jax.tree.map(jnp.add, server.totals.sums, sums)
    if not (is_first and is_last):  # what is not finite, be it the loss alone, spoils the update that it is a part of
        grads = jax.tree.map(lambda g: jnp.where(arrived, g, jnp.nan), grads)
    grads = grads if is_first else jax.tree.map(jnp.add, server.waiting, grads)
    server = server._replace(mitigations=(before, after), totals=server.totals._replace(sums=total))
    if not is_last:
        finite = server.totals.finite & arrived
        return params, server._replace(waiting=grads, totals=server.totals._replace(finite=finite))
    if not is_first:  # a division by 1 would not change a number, but how XLA rounds those after it
        grads = jax.tree.map(lambda x: x / at.size, grads)
    return _update(problem, mitigations, params, server, grads, sums, at)


def _update(
    problem: Problem, mitigations: Mitigations, params: Params, server: Server, grads: Params, sums: Sums, at: Arrival
) -> tuple[Params, Server]:
    """Update the weights by the gradient of a whole update, of which `sums` and `at` are the last gradient's."""
    before, after = server.mitigations
    totals, grad_norm = server.totals, optax.tree.norm(grads)
    optimizer = at_step(server.optimizer, at.step)
    updates, optimizer = problem.optimizer.update(grads, optimizer, params, grad_norm=grad_norm)
    finite = steps.is_finite(grad_norm, sums)
    updates, remembered = mitigations.updates.update(updates, after, params, staleness=at.mean_staleness)
    after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), remembered, after)
    state = State(at.step, jnp.zeros(()), params, server.optimizer)
    state, metrics = steps.apply(state, updates, optimizer, Metrics(totals.sums, grad_norm, finite))
    totals = Totals(
        totals.sums,
        totals.square + jnp.where(metrics.finite, grad_norm, 0) ** 2,
        totals.num_updates + 1,
        totals.finite & metrics.finite,
    )
    waiting = jax.tree.map(jnp.zeros_like, server.waiting)
    return state.params, Server(state.optimizer, waiting, (before, after), totals)


def at_step(optimizer: Tree, step: jax.Array) -> Tree:
    """Return an optimizer's state with the learning rate of a step of the run, however many updates it has made."""

    def is_schedule(node: Tree) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def node(old: Tree) -> Tree:
        return optax.ScaleByScheduleState(step) if is_schedule(old) else old

    return jax.tree.map(node, optimizer, is_leaf=is_schedule)


class Programs:
    """The programs of a run, compiled when they are first called on a device.

    Attributes:
      gradient: (params, key, step, examples, weight) -> (gradient, sums over the examples).
      arrive: (is it the first of its update, is it the last, params, server, grads, sums, read, at) -> (params,
        server); the old server is donated.
      weight: (batch) -> what a worker's gradient is divided by: their sum / num_workers.
    """

    def __init__(self, problem: Problem, mitigations: Mitigations, num_workers: int):
        self._problem, self.mitigations, self.num_workers = problem, mitigations, num_workers
        # Unused arguments are kept for the audit, which tells arguments apart.
        self.gradient = jax.jit(partial(gradient, problem), keep_unused=True)
        self.arrive = jax.jit(
            partial(arrive, problem, mitigations), static_argnums=(0, 1), donate_argnums=3, keep_unused=True
        )
        self.weight = jax.jit(lambda batch: steps.batch_weight(batch) / num_workers)
        self._root_mean = jax.jit(_root_mean)

    def server(self, params: Params, optimizer: Tree, device: jax.Device | None, *, is_grouped: bool) -> Server:
        """Return the server's state at its beginning. is_grouped: whether an update has several gradients."""
        waiting = jax.tree.map(jnp.zeros_like, params) if is_grouped else ()
        return Server(optimizer, waiting, self.mitigations.init(params), self.new_totals(device))

    def abstract_server(self, like: State, *, is_grouped: bool) -> Server:
        """Return the shapes and dtypes of what `server` returns."""
        made: Server = jax.eval_shape(
            lambda params, optimizer: self.server(params, optimizer, None, is_grouped=is_grouped),
            *(like.params, like.optimizer),
        )
        return made

    def lower(
        self, like: State, devices: Sequence[jax.Device], update_devices: Sequence[jax.Device], *, is_grouped: bool
    ) -> list[jax.stages.Lowered]:
        """Lower the programs of a step: a worker's, and the server's for the last gradient of an update.

        Args:
          like: the state, abstract.
          devices: of the workers.
          update_devices: on which weights are updated.
          is_grouped: as in `server`.
        """
        n = self.num_workers
        examples = steps.abstract_share(self._problem.batch, n)
        number, step = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
        inputs = (like.params, like.key, step, examples, number)
        workers = [self.gradient.lower(*_on(inputs, device)) for device in devices]
        server = self.abstract_server(like, is_grouped=is_grouped)
        read = like.params if self.mitigations.needs_read else None
        arguments = (like.params, server, *workers[0].out_info, read, Arrival(number, number, number, step))
        updates = [self.arrive.lower(not is_grouped, True, *_on(arguments, device)) for device in update_devices]
        return [*workers, *updates]

    def chunks(self, step: int, batch: Mapping[str, np.ndarray], device: jax.Device) -> dict[int, Chunk]:
        """Return the parts of a step's batch by their number in the run. device: for their weight."""
        weight, n = self.weight(jax.device_put({"weights": batch["weights"]}, device)), self.num_workers
        return {step * n + i: Chunk({k: x[i::n] for k, x in batch.items()}, weight, step) for i in range(n)}

    def new_totals(self, device: jax.Device | None) -> Totals:
        """Return the totals at the beginning of a step. device: None where they are abstract."""
        zero: Scalar = np.zeros((), np.float32)
        totals: Totals = jax.device_put(Totals(self._problem.task.zeros(), zero, zero, np.ones((), bool)), device)
        return totals

    def metrics(self, totals: Totals) -> Metrics:
        """Return a step's metrics: the norm is the root mean square over its updates, where all of them are finite."""
        return Metrics(totals.sums, self._root_mean(totals), totals.finite)


def _on(tree: Tree, device: jax.Device) -> Tree:
    """Abstract arrays on a device."""
    return steps.with_shardings(tree, SingleDeviceSharding(device))


def _root_mean(totals: Totals) -> jax.Array:
    return jnp.where(totals.finite, jnp.sqrt(totals.square / jnp.maximum(totals.num_updates, 1)), jnp.nan)


def add_up_totals(totals: Sequence[Totals]) -> Totals:
    """Return the totals over several servers."""
    finite = [one.finite for one in totals]
    added: Totals = jax.tree.map(lambda *x: sum(x[1:], x[0]), *(one._replace(finite=()) for one in totals))
    return added._replace(finite=jnp.all(jnp.stack(finite)))


def leaves(tree: Tree) -> dict[str, Any]:
    """Return the arrays of a tree, by their number."""
    return {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(tree))}


def with_leaves(tree: Tree, arrays: Mapping[str, Any]) -> Tree:
    """Return the tree with the arrays of `leaves`, on the devices of the present ones."""
    old, structure = jax.tree.flatten(tree)
    new = [jax.device_put(arrays[str(number)], leaf.sharding) for number, leaf in enumerate(old)]
    return jax.tree.unflatten(structure, new)
