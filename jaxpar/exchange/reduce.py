"""Reducers: they average a vector over the replicas of a mesh axis, inside `shard_map`.

A `Reducer` may have state, which is private to this replica. `fused` (jaxpar/exchange/fuse.py) applies a reducer to
trees.

Dims: n replicas, L elements of a vector.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.typing import DTypeLike

from jaxpar.layout import Tree
from jaxpar.plan import Traffic


class Axis(NamedTuple):
    """The mesh axis of the replicas."""

    name: str
    size: int


class Reducer(NamedTuple):
    """An algorithm that averages a vector over replicas, exactly or approximately.

    Attributes:
      init: (L, key) -> state of this replica. key: the same on all replicas, different for each vector.
      mean: ([L], state) -> (exact or approximate mean over replicas [L], the same on all of them; state).
      traffic: (L, dtype) -> the traffic that a device sends.
      multiple: L must be a multiple of this.
    """

    init: Callable[[int, jax.Array], Tree]
    mean: Callable[[jax.Array, Tree], tuple[jax.Array, Tree]]
    traffic: Callable[[int, DTypeLike], list[Traffic]]
    multiple: int = 1


def psum(axis: Axis) -> Reducer:
    """Return XLA's all-reduce."""

    def mean(x: jax.Array, state: Tree) -> tuple[jax.Array, Tree]:
        return jax.lax.psum(x, axis.name) / axis.size, state

    return Reducer(_stateless, mean, lambda length, dtype: [_traffic("all-reduce", 2, axis, length, dtype)])


def ring(axis: Axis) -> Reducer:
    """Return a ring all-reduce, written out: 2(n-1) steps, in each of which a replica sends L/n to the next one.

    Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009. 16-bit floats are
    sent as their bits, because XLA would widen them on CPUs.
    """
    n = axis.size
    to_next = [(i, (i + 1) % n) for i in range(n)]

    def bits_dtype(dtype: DTypeLike) -> DTypeLike:
        return jnp.uint16 if jnp.dtype(dtype).itemsize == 2 else dtype

    def pass_on(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, bits_dtype(x.dtype))
        return jax.lax.bitcast_convert_type(jax.lax.ppermute(bits, axis.name, to_next), x.dtype)

    def mean(x: jax.Array, state: Tree) -> tuple[jax.Array, Tree]:
        replica, shards = jax.lax.axis_index(axis.name), x.reshape(n, -1)
        for step in range(n - 1):  # reduce-scatter: shards travel round the ring, and each replica adds its own
            moving = pass_on(shards[(replica - step) % n])
            shards = shards.at[(replica - step - 1) % n].add(moving)
        moving = shards[(replica + 1) % n] / n
        shards = shards.at[(replica + 1) % n].set(moving)
        for step in range(n - 1):  # all-gather
            moving = pass_on(moving)
            shards = shards.at[(replica - step) % n].set(moving)
        return shards.reshape(-1), state

    def traffic(length: int, dtype: DTypeLike) -> list[Traffic]:
        return [_traffic("collective-permute", 2, axis, length, bits_dtype(dtype))]

    return Reducer(_stateless, mean, traffic, multiple=n)


def push_pull(axis: Axis) -> Reducer:
    """Return BytePS's all-reduce: each replica is also the server of 1/n of the vector; workers push, then pull.

    Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training", 2020, section 4.
    """
    n = axis.size

    def mean(x: jax.Array, state: Tree) -> tuple[jax.Array, Tree]:
        shard = jax.lax.psum_scatter(x, axis.name, tiled=True) / n
        return jax.lax.all_gather(shard, axis.name, tiled=True), state

    def traffic(length: int, dtype: DTypeLike) -> list[Traffic]:
        return [_traffic(kind, 1, axis, length, dtype) for kind in ("reduce-scatter", "all-gather")]

    return Reducer(_stateless, mean, traffic, multiple=n)


def hierarchical(axis: Axis, group: int) -> Reducer:
    """Return an all-reduce within groups of `group` neighbours, whose links are faster, and then between groups.

    Each replica of a group sums 1/group of the vector, and only that shard is reduced between groups.
    """
    n, num_groups = axis.size, axis.size // group
    within = [[first * group + i for i in range(group)] for first in range(num_groups)]
    between = [[first * group + i for first in range(num_groups)] for i in range(group)]

    def mean(x: jax.Array, state: Tree) -> tuple[jax.Array, Tree]:
        shard = jax.lax.psum_scatter(x, axis.name, axis_index_groups=within, tiled=True)
        shard = jax.lax.psum(shard, axis.name, axis_index_groups=between) / n
        return jax.lax.all_gather(shard, axis.name, axis_index_groups=within, tiled=True), state

    def traffic(length: int, dtype: DTypeLike) -> list[Traffic]:
        return [
            _traffic("reduce-scatter", 1, axis._replace(size=group), length, dtype),
            _traffic("all-reduce", 2, axis._replace(size=num_groups), length // group, dtype),
            _traffic("all-gather", 1, axis._replace(size=group), length, dtype),
        ]

    return Reducer(_stateless, mean, traffic, multiple=group)


def cast(reducer: Reducer, dtype: DTypeLike) -> Reducer:
    """Send vectors in another dtype, like Horovod's fp16 compression."""

    def mean(x: jax.Array, state: Tree) -> tuple[jax.Array, Tree]:
        total, state = reducer.mean(x.astype(dtype), state)
        return total.astype(x.dtype), state

    return reducer._replace(mean=mean, traffic=lambda length, _: reducer.traffic(length, dtype))


def predivide(reducer: Reducer, factor: float) -> Reducer:
    """Divide by `factor` before the sum instead of after it: Horovod's gradient_predivide_factor.

    In a narrow dtype the sum of many gradients may overflow, or their quotients underflow.
    """

    def mean(x: jax.Array, state: Tree) -> tuple[jax.Array, Tree]:
        total, state = reducer.mean(x / factor, state)
        return total * factor, state

    return reducer._replace(mean=mean)


def psum_small(tree: Tree, axes: str | tuple[str, ...]) -> Tree:
    """Return the sums over mesh axes of a tree of a few numbers, in one collective. Its leaves must have one dtype."""
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.psum(flat, axes))


def _stateless(_length: int, _key: jax.Array) -> Tree:
    return ()


def ring_traffic(
    kind: str, ways: int, axis: str, size: int, nbytes: float, dtype: str, *, num_vectors: int = 1
) -> Traffic:
    """Return a device's traffic under ring algorithms, which send (n-1)/n of the vectors' bytes in each pass.

    Patarasuk and Yuan, 2009.

    Args:
      kind: of the collective.
      ways: number of passes: 2 for an all-reduce, 1 for a reduce-scatter or an all-gather, times the number of such
        collectives for each vector.
      axis: name of the mesh axis.
      size: n, the size of the axis.
      nbytes: bytes of all vectors together.
      dtype: of the vectors.
      num_vectors: number of vectors, each of which is sent in separate messages.
    """
    return Traffic(kind, dtype, axis, ways * (size - 1) * nbytes / size, ways * (size - 1) * num_vectors)


def _traffic(kind: str, ways: int, axis: Axis, length: int, dtype: DTypeLike) -> Traffic:
    dtype = jnp.dtype(dtype)
    return ring_traffic(kind, ways, axis.name, axis.size, length * dtype.itemsize, dtype.name)
