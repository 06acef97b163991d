"""Adasum: a sum of updates that counts the component shared by two updates only once."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.core.plan import Traffic
from jaxpar.exchange.exchange import DistributedState, Exchange, ExchangeUpdate
from jaxpar.exchange.fuse import flat, flat_size
from jaxpar.exchange.reduce import Axis
from jaxpar.layout import PER_REPLICA, Tree


def adasum(axis: Axis, optimizer: optax.GradientTransformation) -> Exchange:
    """Return Adasum: each replica's optimizer steps on its local gradient, and the steps are combined in pairs.

    Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, equation 7 and section 3.5. It
    combines updates instead of gradients, each array separately. In round k a replica is paired with the one whose
    number differs in bit k. Both compute the same result, so that all replicas have the same update after log2(n)
    rounds.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    rounds = [1 << bit for bit in range(axis.size.bit_length() - 1)]

    def update(grads: Tree, state: DistributedState, params: Tree, **extra: Any) -> ExchangeUpdate:
        updates, inner = optimizer.update(grads, state.optimizer, params, **extra)
        for bit in rounds:
            to_partner = [(i, i ^ bit) for i in range(axis.size)]
            vector, unflatten = flat(updates)
            others = unflatten(jax.lax.ppermute(vector, axis.name, to_partner))
            is_first = (jax.lax.axis_index(axis.name) & bit) == 0  # so that both compute bitwise the same result

            def pair(a: jax.Array, b: jax.Array, is_first: jax.Array = is_first) -> jax.Array:
                x, y = a.astype(jnp.float32), b.astype(jnp.float32)
                return combine(jnp.where(is_first, x, y), jnp.where(is_first, y, x)).astype(a.dtype)

            updates = jax.tree.map(pair, updates, others)
        return ExchangeUpdate(updates, DistributedState(inner, ()), None)

    def traffic(params: Tree, _num_microbatches: int) -> list[Traffic]:
        nbytes = 4 * flat_size(params)
        return [Traffic("collective-permute", "float32", axis.name, nbytes, messages=1, distance=bit) for bit in rounds]

    return Exchange(lambda params: DistributedState(optimizer.init(params), ()), update, traffic, optimizer=PER_REPLICA)


def combine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: the sum of orthogonal vectors, the mean of equal ones.

    Each vector is first scaled by its largest element, so that squares neither overflow nor underflow while the sum is
    in range, however different the two magnitudes are.
    """

    def scaled(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        largest = jnp.max(jnp.abs(x), initial=0.0)
        unit = x / jnp.where(largest > 0, largest, 1)
        square = jnp.vdot(unit, unit)
        return largest, unit, jnp.where(square > 0, 2 * square, 1)

    (largest_a, x, xx), (largest_b, y, yy) = scaled(a), scaled(b)
    dot = jnp.vdot(x, y)
    return (a - dot / xx * largest_b * x) + (b - dot / yy * largest_a * y)
