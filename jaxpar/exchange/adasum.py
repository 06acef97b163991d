"""Adasum: a sum of updates that counts only once what two of them have in common."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.exchange.exchange import OWN, DistributedState, Exchange, Update, mean_norm
from jaxpar.exchange.reduce import Axis, Traffic


def adasum(axis: Axis, optimizer: optax.GradientTransformation) -> Exchange:
    """Each replica's optimizer takes its step from its own gradient; the steps are combined, pair by pair.

    Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, equation 7 and section 3.5: applied to
    the update, not the gradient, for each array apart. In round k a replica combines with the one whose number differs
    in bit k; both compute the same, so that after log2(n) rounds all have the same update.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    rounds = [1 << bit for bit in range(axis.size.bit_length() - 1)]

    def update(grads: Any, state: DistributedState, params: Any) -> Update:
        updates, inner = optimizer.update(grads, state.optimizer, params)
        for bit in rounds:
            to_partner = [(i, i ^ bit) for i in range(axis.size)]
            leaves, structure = jax.tree.flatten(updates)
            sizes = [leaf.size for leaf in leaves]
            own = jnp.concatenate([leaf.reshape(-1).astype(jnp.float32) for leaf in leaves])
            other = jax.lax.ppermute(own, axis.name, to_partner)
            offsets = [sum(sizes[:i]) for i in range(1, len(sizes))]
            pairs = zip(jnp.split(own, offsets), jnp.split(other, offsets), leaves, strict=True)
            combined = [combine(a, b).reshape(leaf.shape).astype(leaf.dtype) for a, b, leaf in pairs]
            updates = jax.tree.unflatten(structure, combined)
        return Update(updates, DistributedState(inner, ()), mean_norm(axis, grads))

    def traffic(params: Any, num_microbatches: int) -> list[Traffic]:
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        return [Traffic("collective-permute", "float32", axis.name, len(rounds) * 4 * size)]

    return Exchange(lambda params: DistributedState(optimizer.init(params), ()), update, traffic, optimizer=OWN)


def combine(a: jax.Array, b: jax.Array) -> jax.Array:
    """(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: the sum where they are orthogonal, the mean where they are equal.

    Scaled, so that squares of large or small updates are in range. The same, bitwise, for (b, a).
    """
    largest = jnp.maximum(jnp.max(jnp.abs(a)), jnp.max(jnp.abs(b)))
    largest = jnp.where(largest > 0, largest, 1)
    x, y = a / largest, b / largest
    dot, xx, yy = jnp.vdot(x, y), jnp.vdot(x, x), jnp.vdot(y, y)

    def rest(square: jax.Array) -> jax.Array:
        return 1 - dot / jnp.where(square > 0, 2 * square, 1)

    return rest(xx) * a + rest(yy) * b
