"""The two programs of asynchronous training: the worker's and the server's.

They are compiled separately, and do not depend on the number of workers or devices, because XLA may round the same
arithmetic differently as part of another program. A run is therefore bitwise the same on any number of devices, and a
run with threads can be replayed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from jaxpar.core import step as steps
from jaxpar.core.loss_scale import LossScale, find_scale
from jaxpar.core.optimizer import at_step
from jaxpar.core.state import State
from jaxpar.core.step import Metrics, Problem
from jaxpar.layout import Tree
from jaxpar.models.model import Batch, Params
from jaxpar.strategies.asynchronous.mitigations import Mitigations
from jaxpar.strategies.placement import product_options
from jaxpar.tasks import Sums
from jaxpar.tasks.task import Scalar

FIRST_STEP = "begun"  # in the private state: the step at which the run switched to this strategy

# A gradient, sums over its examples, and what its loss was multiplied by, and the gradient has been divided by; None:
# nothing. If it is sent to the server, also the weights that it was computed from; None if no mitigation needs them.
MadeGradient = tuple[Params, Sums, Scalar | None]
SentGradient = tuple[Params, Sums, Scalar | None, Params | None]


class Totals(NamedTuple):
    """Totals over the gradients that have arrived in a step."""

    sums: Sums  # sums over their examples
    square: Scalar  # sum of the squared gradient norms of the updates
    num_updates: Scalar  # number of updates that they have made
    finite: Scalar  # whether all of them are finite
    # the smallest scale of a loss whose gradient or update was not finite, otherwise inf; None: no scale
    failed_scale: Scalar | None


class Server(NamedTuple):
    """State of the server except the weights."""

    optimizer: Tree  # state of the optimizer
    waiting: Tree  # the sum of the gradients that have arrived for the next update; () if each gradient makes an update
    mitigations: tuple[Tree, Tree]  # states of the mitigations, of gradients and of updates
    totals: Totals  # totals of this step


class Arrival(NamedTuple):
    """The scalars of a gradient that the server's program takes."""

    staleness: Scalar  # staleness of the gradient
    mean_share: Scalar  # mean of 1 / max(staleness, 1) over all gradients of its update
    size: Scalar  # number of gradients in its update
    step: Scalar  # the step of the run in which it arrives


class Chunk(NamedTuple):
    """A worker's shard of a batch, on the host: examples i, i + n, i + 2n, .. of n workers."""

    examples: dict[str, Any]  # the same arrays as in a batch
    weight: Scalar  # the divisor of their gradient
    step: int  # the step of the run whose batch they belong to
    loss_scale: Scalar | None = None  # what their loss is multiplied by: the server's scale in this step; None: nothing


class Programs:
    """The programs of a run, compiled when they are first called on a device."""

    def __init__(self, problem: Problem, mitigations: Mitigations, num_workers: int):
        self._problem, self.mitigations, self.num_workers = problem, mitigations, num_workers

        self._scaling = find_scale(jax.eval_shape(problem.optimizer.init, problem.model.shapes))

        def gradient(
            params: Params, key: jax.Array, step: jax.Array, examples: Batch, weight: Scalar, loss_scale: Scalar | None
        ) -> Any:
            scaling = None if loss_scale is None else LossScale(jnp.asarray(loss_scale), jnp.int32(0))
            made = steps.gradients(problem, State(step, key, params, scaling), examples, weight)
            return *made, None if loss_scale is None else jnp.copy(loss_scale)  # the server's program donates its scale

        # The worker's program: -> (gradient, sums over the examples, what the loss was multiplied by).
        # Unused arguments are kept, because the audit counts the bytes of each argument.
        self.gradient = jax.jit(gradient, keep_unused=True, compiler_options=product_options(problem.model))
        # The server's program. The old server is donated.
        self.arrive = jax.jit(self._arrive, static_argnums=(0, 1), donate_argnums=3, keep_unused=True)
        # (batch) -> the divisor of a worker's gradient: the sum of the batch's weights / num_workers
        self.weight = jax.jit(lambda batch: steps.batch_weight(batch) / num_workers)
        # (totals, scale of the loss) -> a step's metrics. The norm is the root mean square over its updates; nan if one
        # is nonfinite.
        self.metrics = jax.jit(_metrics)

    def server(self, params: Params, optimizer: Tree, device: jax.Device | None, *, is_grouped: bool) -> Server:
        """Return the server's initial state. is_grouped: whether an update has several gradients."""
        waiting = jax.tree.map(jnp.zeros_like, params) if is_grouped else ()
        return Server(optimizer, waiting, self.mitigations.init(params), self.new_totals(device))

    def lower(
        self, like: State, devices: Sequence[jax.Device], update_devices: Sequence[jax.Device], *, is_grouped: bool
    ) -> list[jax.stages.Lowered]:
        """Lower the programs of a step from abstract shapes: the worker's, and the server's on `update_devices`."""

        def on(tree: Tree, device: jax.Device) -> Tree:
            return steps.with_shardings(tree, SingleDeviceSharding(device))

        examples = steps.abstract_share(self._problem.batch, self.num_workers)
        number, step = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
        inputs = (like.params, like.key, step, examples, number, None if self._scaling is None else number)
        workers = [self.gradient.lower(*on(inputs, device)) for device in devices]
        server = jax.eval_shape(
            lambda state: self.server(state.params, state.optimizer, None, is_grouped=is_grouped), like
        )
        read = like.params if self.mitigations.needs_read else None
        arguments = (like.params, server, (*workers[0].out_info, read), Arrival(number, number, number, step))
        updates = [self.arrive.lower(not is_grouped, True, *on(arguments, device)) for device in update_devices]
        return [*workers, *updates]

    def _arrive(
        self, is_first: bool, is_last: bool, params: Params, server: Server, sent: SentGradient, at: Arrival
    ) -> tuple[Params, Server]:
        """Take a gradient, and update the newest weights if it is the last one of its update."""
        loss_scale: Any
        grads, sums, loss_scale, read = sent
        before, after = server.mitigations
        arrived = steps.is_finite(optax.tree.norm(grads), sums)
        details = {"staleness": at.staleness, "read": read, "mean_share": at.mean_share}
        grads, remembered = self.mitigations.gradients.update(grads, before, params, **details)
        before = jax.tree.map(lambda new, old: jnp.where(arrived, new, old), remembered, before)
        total, failed = jax.tree.map(jnp.add, server.totals.sums, sums), server.totals.failed_scale
        if failed is not None:
            failed = jnp.where(arrived, failed, jnp.minimum(failed, loss_scale))
        if not (is_first and is_last):  # a nonfinite gradient or loss invalidates the whole update
            grads = jax.tree.map(lambda g: jnp.where(arrived, g, jnp.nan), grads)
        grads = grads if is_first else jax.tree.map(jnp.add, server.waiting, grads)
        totals = server.totals._replace(sums=total, failed_scale=failed)
        server = server._replace(mitigations=(before, after), totals=totals)
        if not is_last:
            return params, server._replace(waiting=grads, totals=totals._replace(finite=totals.finite & arrived))
        if not is_first:  # dividing by 1 would change no value, but could change how XLA rounds later operations
            grads = jax.tree.map(lambda x: x / at.size, grads)
        return self._update(params, server, grads, sent, at)

    def _update(
        self, params: Params, server: Server, grads: Params, last: SentGradient, at: Arrival
    ) -> tuple[Params, Server]:
        """Update the weights by the gradient of a whole update. last, at: its last gradient."""
        loss_scale: Any
        _, sums, loss_scale, _ = last
        before, after = server.mitigations
        totals, grad_norm = server.totals, optax.tree.norm(grads)
        optimizer = at_step(server.optimizer, at.step)
        updates, optimizer = self._problem.optimizer.update(grads, optimizer, params, grad_norm=grad_norm)
        finite = steps.is_finite(grad_norm, sums)
        if (failed := totals.failed_scale) is not None:  # an earlier gradient may have failed at a larger scale
            loss_scale = jnp.where(finite | jnp.isinf(failed), loss_scale, failed)
            failed = jnp.where(finite, failed, jnp.minimum(failed, loss_scale))
        updates, remembered = self.mitigations.updates.update(updates, after, params, mean_share=at.mean_share)
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), remembered, after)
        state = State(at.step, jnp.zeros(()), params, server.optimizer)
        state, metrics = steps.apply(state, updates, optimizer, Metrics(totals.sums, grad_norm, finite, loss_scale))
        totals = Totals(
            totals.sums,
            totals.square + jnp.where(metrics.finite, grad_norm, 0) ** 2,
            totals.num_updates + 1,
            totals.finite & metrics.finite,
            failed,
        )
        waiting = jax.tree.map(jnp.zeros_like, server.waiting)
        return state.params, Server(state.optimizer, waiting, (before, after), totals)

    def chunks(
        self, step: int, batch: Mapping[str, np.ndarray], device: jax.Device, scaling: LossScale | None = None
    ) -> dict[int, Chunk]:
        """Return the shards of a step's batch, by their number in the run. device: the device of their weight.

        scaling: the scale of their loss.
        """
        scale = None if scaling is None else jnp.copy(scaling.scale)
        weight, n = self.weight(jax.device_put({"weights": batch["weights"]}, device)), self.num_workers
        return {step * n + i: Chunk({k: x[i::n] for k, x in batch.items()}, weight, step, scale) for i in range(n)}

    def new_totals(self, device: jax.Device | None) -> Totals:
        """Return the totals at the start of a step. device: None if they are abstract."""
        zero: Scalar = np.zeros((), np.float32)
        failed = None if self._scaling is None else np.float32(np.inf)
        totals = Totals(self._problem.task.zeros(), zero, zero, np.ones((), bool), failed)
        return jax.device_put(totals, device)


def _metrics(totals: Totals, scaling: LossScale | None) -> Metrics:
    root_mean = jnp.sqrt(totals.square / jnp.maximum(totals.num_updates, 1))
    sums, finite = jax.tree.map(jnp.copy, (totals.sums, totals.finite))  # copies: later arrivals donate `totals`
    failed = totals.failed_scale
    scale = None if scaling is None or failed is None else jnp.where(jnp.isinf(failed), scaling.scale, failed)
    return Metrics(sums, jnp.where(finite, root_mean, jnp.nan), finite, scale)


def leaves(tree: Tree) -> dict[str, Any]:
    """Return the arrays of a tree, keyed by index."""
    return {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(tree))}


def with_leaves(tree: Tree, arrays: Mapping[str, Any]) -> Tree:
    """Return the tree with its arrays replaced by those of `leaves`, on the same devices as before."""
    old, structure = jax.tree.flatten(tree)
    new = [jax.device_put(arrays[str(number)], leaf.sharding) for number, leaf in enumerate(old)]
    return jax.tree.unflatten(structure, new)
