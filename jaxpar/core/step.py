"""The arithmetic of one training step on one device: the gradient of a batch, then an update.

Strategies place this arithmetic on devices and exchange gradients between the two halves.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar.core.loss_scale import after_step, find_scale, unscaled, with_scale
from jaxpar.core.optimizer import at_step
from jaxpar.core.state import State
from jaxpar.models.model import Batch, Model, Params
from jaxpar.tasks import Sums, Task, mean_loss


class Problem(NamedTuple):
    """A training problem, independent of strategy and devices."""

    model: Model
    optimizer: optax.GradientTransformationExtraArgs  # update can take grad_norm, the norm over all layers
    accumulation_steps: int
    batch: Mapping[str, Any]  # abstract global batch with the longest sequences
    num_steps: int  # number of steps of the run
    task: Task


class Metrics(NamedTuple):
    """Metrics of one step over the global batch; scalars."""

    sums: Sums
    grad_norm: jax.Array
    finite: jax.Array  # whether the loss and the gradient are finite, in which case the update was applied
    loss_scale: jax.Array | None = None  # what the loss was multiplied by, if the model computes in float16


def gradients(
    problem: Problem,
    state: State,
    batch: Batch,
    weight: jax.Array,
    *,
    scatter: Callable[[Params], Params] | None = None,
    last_apart: bool = False,
) -> tuple[Params, Sums]:
    """Return the gradient of sum(weights * losses) / weight over these examples, and the task's sums over them.

    batch: the global batch, or the shard of one replica; weight: `batch_weight` of the global batch, so that the
    gradients of the shards add up to the mean; scatter: maps the gradient of a microbatch to the part accumulated on
    this device; last_apart: whether the last microbatch is computed after the loop over the others, so that its
    backward pass can overlap with an exchange.
    """
    if (scaling := find_scale(state.optimizer)) is not None:
        state, scale = state._replace(optimizer=()), scaling.scale
        grads, sums = gradients(problem, state, batch, weight / scale, scatter=scatter, last_apart=last_apart)
        return unscaled(grads, scale), sums
    key = dropout_key(state.key, state.step)

    def loss(params: Params, examples: Batch) -> tuple[jax.Array, Sums]:
        keys_B = example_keys(key, examples)
        total = problem.task.sums(problem.model.outputs(params, examples, keys_B), examples)
        return mean_loss(total.loss, weight), total

    def microbatch_gradients(examples: Batch) -> tuple[Params, Sums]:
        grads, total = jax.grad(loss, has_aux=True)(state.params, examples)
        return grads if scatter is None else scatter(grads), total

    num = problem.accumulation_steps
    if num == 1:
        return microbatch_gradients(batch)
    stacked = microbatches(batch, num)
    # From the arrays, not from their shapes, so that in `shard_map` zeros have the types of the gradients.
    first = jax.eval_shape(lambda stacked: microbatch_gradients({name: x[0] for name, x in stacked.items()}), stacked)
    zeros = jax.tree.map(jnp.zeros_like, first)

    def add(total: tuple[Params, Sums], examples: Batch) -> tuple[tuple[Params, Sums], None]:
        return jax.tree.map(jnp.add, total, microbatch_gradients(examples)), None

    if not last_apart:
        return jax.lax.scan(add, zeros, stacked)[0]
    total, _ = jax.lax.scan(add, zeros, {name: x[:-1] for name, x in stacked.items()})
    # Without this order, XLA may compute the last forward pass before the loop, and hold its activations meanwhile.
    total, last = jax.lax.optimization_barrier((total, {name: x[-1] for name, x in stacked.items()}))
    return add(total, last)[0]


def batch_weight(batch: Batch) -> jax.Array:
    """Return the sum of a batch's example weights, a scalar. Gradients are divided by that of the global batch."""
    return batch["weights"].sum()


def nonfinite_count(tree: Any) -> jax.Array:
    """Return 1.0 if any array of a tree has a nonfinite value, otherwise 0.0, to be summed over devices."""
    return 1.0 - jnp.isfinite(optax.tree.norm(tree))


def update(
    problem: Problem,
    state: State,
    grads: Params,
    sums: Sums,
    grad_norm: jax.Array | None = None,
    loss_scale: jax.Array | None = None,
) -> tuple[State, Metrics]:
    """Apply one optimizer step to all layers, or those on this device, unless the loss or gradient is not finite.

    sums: over the global batch; grad_norm: the norm of the gradient of all layers; None: the norm of `grads`.
    loss_scale: what the loss was multiplied by; None: the scale in the state, if it has one.
    """
    grad_norm = optax.tree.norm(grads) if grad_norm is None else grad_norm
    optimizer = at_step(state.optimizer, state.step)
    updates, optimizer = problem.optimizer.update(grads, optimizer, state.params, grad_norm=grad_norm)
    return apply(state, updates, optimizer, Metrics(sums, grad_norm, is_finite(grad_norm, sums), loss_scale))


def is_finite(grad_norm: jax.Array, sums: Sums) -> jax.Array:
    """Return whether both gradient and loss are finite, so that the update should be applied. A boolean array."""
    return jnp.isfinite(grad_norm) & jnp.isfinite(sums.loss)


def apply(state: State, updates: Params, optimizer: Any, metrics: Metrics) -> tuple[State, Metrics]:
    """Return the state after a step with these updates. Keeps parameters and optimizer if metrics.finite is false."""
    params, finite = optax.apply_updates(state.params, updates), metrics.finite
    with jax.named_scope("optimizer"):  # XLA fuses the optimizer with this selection, its last operation
        params, optimizer = jax.tree.map(
            # Keep the dtypes, so that a saved state can be resumed: a float32 norm promotes narrower arrays.
            lambda new, old: jnp.where(finite, new.astype(old.dtype), old),
            (params, optimizer),
            (state.params, state.optimizer),
        )
    if (scaling := find_scale(state.optimizer)) is not None:
        used = scaling.scale if metrics.loss_scale is None else metrics.loss_scale
        optimizer = with_scale(optimizer, after_step(scaling, finite, used))
        metrics = metrics._replace(loss_scale=used)
    return State(state.step + 1, state.key, params, optimizer), metrics


def evaluate(problem: Problem, params: Params, batch: Batch) -> Sums:
    """Return the task's evaluation sums over a batch, computed without dropout."""
    return problem.task.evaluation_sums(problem.model.outputs(params, batch), batch)


def microbatches(batch: Batch, num: int) -> dict[str, jax.Array]:
    """Reshape each array from [B, ..] to [num, B / num, ..]. Example i goes to microbatch i % num, as in any shard."""
    return {name: x.reshape(-1, num, *x.shape[1:]).swapaxes(0, 1) for name, x in batch.items()}


def abstract(tree: Any, leading: int = 0) -> Any:
    """Replace the arrays of a tree by their shapes and dtypes, without the first `leading` dims."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[leading:], x.dtype), tree)


def abstract_share(batch: Mapping[str, Any], num: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of one of `num` equal shards of a batch."""
    return {name: jax.ShapeDtypeStruct((len(x) // num, *x.shape[1:]), x.dtype) for name, x in batch.items()}


def with_shardings(tree: Any, shardings: Any) -> Any:
    """Return abstract arrays with these shardings. shardings: a tree of shardings, or one sharding for all arrays."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def example_keys(key: jax.Array, batch: Batch) -> jax.Array:
    """Return the keys of the examples, [B]: `key` with the index of each example folded in, on whichever device."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, batch["index"])


def dropout_key(key: jax.Array, step: jax.Array) -> jax.Array:
    """Return the key of a step, into which examples and layers fold their indices. key: the run's key, as in State."""
    return jax.random.fold_in(jax.random.wrap_key_data(key), step)
