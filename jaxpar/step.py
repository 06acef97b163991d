"""The arithmetic of one training step on one device: gradients of a batch, then an update.

Strategies place it on devices and put their exchange between the two halves.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar.models.model import Batch, Fetch, Model, Params
from jaxpar.state import State, nbytes
from jaxpar.tasks import Sums, Task, mean_loss


class Problem(NamedTuple):
    """What is trained, without a word on which devices."""

    model: Model
    optimizer: optax.GradientTransformationExtraArgs  # its update may ask for grad_norm, of all layers
    accumulation_steps: int
    batch: Mapping[str, Any]  # abstract: a global batch at its longest
    num_steps: int  # of the run
    task: Task


class Metrics(NamedTuple):
    """Of one step over the global batch; scalars. `finite`: loss and gradient are, and so the update was applied."""

    sums: Sums
    grad_norm: jax.Array
    finite: jax.Array


def gradients(
    problem: Problem,
    state: State,
    batch: Batch,
    weight: jax.Array,
    *,
    fetch: Fetch | None = None,
    scatter: Callable[[Params], Params] | None = None,
) -> tuple[Params, Sums]:
    """The gradient of sum(weights * losses) / weight over these rows, and the rows' sums.

    Args:
      batch: all rows of the global batch, or a replica's share.
      weight: `batch_weight` of the global batch, so that shares add up to the mean.
      fetch: as in `Model.apply`, where state.params are not whole.
      scatter: what of a microbatch's gradient is added up here; None: all.
    """
    key = dropout_key(state.key, state.step)

    def loss(params: Params, rows: Batch) -> tuple[jax.Array, Sums]:
        keys_B = example_keys(key, rows)
        total = problem.task.sums(problem.model.apply(params, rows, keys_B, fetch=fetch), rows)
        return mean_loss(total.loss, weight), total

    def microbatch_gradients(rows: Batch) -> tuple[Params, Sums]:
        grads, total = jax.grad(loss, has_aux=True)(state.params, rows)
        return grads if scatter is None else scatter(grads), total

    num = problem.accumulation_steps
    if num == 1:
        return microbatch_gradients(batch)
    rows = microbatches(batch, num)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(microbatch_gradients, abstract(rows, 1)))

    def add(total: tuple[Params, Sums], rows: Batch) -> tuple[tuple[Params, Sums], None]:
        return jax.tree.map(jnp.add, total, microbatch_gradients(rows)), None

    return jax.lax.scan(add, zeros, rows)[0]


def saved_bytes(problem: Problem, num_shares: int) -> int:
    """Return the bytes that the forward pass of one of `num_shares` equal shares of the batch saves for the backward.

    Of the model as it is traced, without its parameters; XLA has more arrays than these while it computes a layer.
    """

    def saved(state_key: jax.Array, params: Params, rows: Batch) -> Any:
        keys_B = example_keys(dropout_key(state_key, jnp.zeros((), jnp.int32)), rows)
        return jax.vjp(lambda p: problem.task.sums(problem.model.apply(p, rows, keys_B), rows).loss, params)[1]

    state_key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    share = abstract_share(problem.batch, num_shares)
    traced, saved_shapes = jax.make_jaxpr(saved, return_shape=True)(state_key, problem.model.shapes, share)
    inputs = {id(variable) for variable in (*traced.jaxpr.invars, *traced.jaxpr.constvars)}
    arrays = dict(
        zip(map(id, traced.jaxpr.outvars), jax.tree.leaves(saved_shapes), strict=True)
    )  # some are saved twice
    return nbytes([x for variable, x in arrays.items() if variable not in inputs])


def batch_weight(batch: Batch) -> jax.Array:
    """Return the sum of the rows' weights: what gradients are divided by, where it is the global batch's. Scalar."""
    return batch["weights"].sum()


def nonfinite_count(tree: Any) -> jax.Array:
    """Return 1.0 where some array of a tree is not finite, else 0.0: summed over devices, a count of those at fault."""
    return 1.0 - jnp.isfinite(optax.tree.norm(tree))


def update(
    problem: Problem, state: State, grads: Params, sums: Sums, grad_norm: jax.Array | None = None
) -> tuple[State, Metrics]:
    """One optimizer step, which is not applied where the loss or the gradient is not finite.

    Args:
      state: of all layers, or of a device's own.
      grads: as state.params.
      sums: over the global batch.
      grad_norm: of the gradient of all layers; None: `grads` is that.
    """
    grad_norm = optax.tree.norm(grads) if grad_norm is None else grad_norm
    updates, optimizer = problem.optimizer.update(grads, state.optimizer, state.params, grad_norm=grad_norm)
    return apply(state, updates, optimizer, Metrics(sums, grad_norm, is_finite(grad_norm, sums)))


def is_finite(grad_norm: jax.Array, sums: Sums) -> jax.Array:
    """Return whether an update is to be applied: neither gradient nor loss has overflowed. A bool, as an array."""
    return jnp.isfinite(grad_norm) & jnp.isfinite(sums.loss)


def apply(state: State, updates: Params, optimizer: Any, metrics: Metrics) -> tuple[State, Metrics]:
    """The state after a step with these updates; the old parameters and optimizer where metrics.finite is false."""
    params, finite = optax.apply_updates(state.params, updates), metrics.finite
    params, optimizer = jax.tree.map(
        # A state keeps its dtypes, or it could not be saved and resumed: a float32 norm makes wide what was narrow.
        lambda new, old: jnp.where(finite, new.astype(old.dtype), old),
        (params, optimizer),
        (state.params, state.optimizer),
    )
    return State(state.step + 1, state.key, params, optimizer), metrics


def evaluate(problem: Problem, params: Params, batch: Batch, *, fetch: Fetch | None = None) -> Sums:
    """The sums of a batch without dropout."""
    return problem.task.sums(problem.model.apply(params, batch, fetch=fetch), batch)


def microbatches(batch: Batch, num: int) -> dict[str, jax.Array]:
    """[B, ..] -> [num, B / num, ..]. Row i goes to microbatch i % num, so a replica's share splits as the whole."""
    return {name: x.reshape(-1, num, *x.shape[1:]).swapaxes(0, 1) for name, x in batch.items()}


def abstract(tree: Any, leading: int = 0) -> Any:
    """Shapes and dtypes in the place of arrays, without that many leading dims."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[leading:], x.dtype), tree)


def abstract_share(batch: Mapping[str, Any], num: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of one of `num` equal shares of a batch."""
    return {name: jax.ShapeDtypeStruct((len(x) // num, *x.shape[1:]), x.dtype) for name, x in batch.items()}


def with_shardings(tree: Any, shardings: Any) -> Any:
    """Return abstract arrays with these shardings; `shardings`: of each, or one for all."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def example_keys(key: jax.Array, batch: Batch) -> jax.Array:
    """Return the keys of the examples, [B]: `key` with each one's number folded in, wherever it is computed."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, batch["index"])


def dropout_key(key: jax.Array, step: jax.Array) -> jax.Array:
    """The key of a step; examples and layers fold their numbers into it. key: the run's, as in State."""
    return jax.random.fold_in(jax.random.wrap_key_data(key), step)
