"""The arithmetic of one training step on one device: gradients of a batch, then an update.

Strategies place it on devices and put their exchange between the two halves.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar import tasks
from jaxpar.models.model import Batch, Model, Params
from jaxpar.state import State
from jaxpar.tasks import Sums


class Problem(NamedTuple):
    """What is trained, without a word on which devices."""

    model: Model
    optimizer: optax.GradientTransformation
    accumulation_steps: int


class Metrics(NamedTuple):
    """Of one step over the global batch; scalars. `finite`: loss and gradient are, and so the update was applied."""

    sums: Sums
    grad_norm: jax.Array
    finite: jax.Array


def gradients(problem: Problem, state: State, batch: Batch, weight: jax.Array) -> tuple[Params, Sums]:
    """The gradient of sum(weights * losses) / weight over these rows, and the rows' sums.

    Args:
      batch: all rows of the global batch, or a replica's share.
      weight: sum of batch["weights"] over the global batch, so that shares add up to the mean.
    """
    keys = dropout_keys(state)

    def loss(params: Params, rows: Batch) -> tuple[jax.Array, Sums]:
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(keys, rows["index"])
        total = tasks.sums(problem.model.apply(params, rows, keys_B), rows)
        return total.loss / jnp.maximum(weight, 1e-30), total  # a batch may have nothing to predict

    def microbatch_gradients(rows: Batch) -> tuple[Params, Sums]:
        grads, total = jax.grad(loss, has_aux=True)(state.params, rows)
        return grads, total

    num = problem.accumulation_steps
    if num == 1:
        return microbatch_gradients(batch)
    # Row i goes to microbatch i % num: so each replica's share splits without moving a row.
    microbatches = jax.tree.map(lambda x: x.reshape(-1, num, *x.shape[1:]).swapaxes(0, 1), dict(batch))
    zeros = jax.tree.map(
        jnp.zeros_like, jax.eval_shape(microbatch_gradients, {k: v[0] for k, v in microbatches.items()})
    )

    def add(total: tuple[Params, Sums], rows: Batch) -> tuple[tuple[Params, Sums], None]:
        return jax.tree.map(jnp.add, total, microbatch_gradients(rows)), None

    return jax.lax.scan(add, zeros, microbatches)[0]


def update(problem: Problem, state: State, grads: Params, sums: Sums) -> tuple[State, Metrics]:
    """One optimizer step, which is not applied where the loss or the gradient is not finite."""
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums.loss)
    updates, optimizer = problem.optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    params, optimizer = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), (params, optimizer), (state.params, state.optimizer)
    )
    return State(state.step + 1, state.key, params, optimizer), Metrics(sums, grad_norm, finite)


def evaluate(problem: Problem, params: Params, batch: Batch) -> Sums:
    """The sums of a batch without dropout."""
    return tasks.sums(problem.model.apply(params, batch), batch)


def dropout_keys(state: State) -> jax.Array:
    """The key of this step; examples and layers fold their numbers into it."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
