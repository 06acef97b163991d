"""Reducers: the mean of a vector over the replicas of a mesh axis, for use inside `shard_map`.

A `Reducer` may keep a state, which is private to this replica. `fused` (jaxpar/exchange/fuse.py) applies one to trees.

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
    """The mesh axis that replicas are on."""

    name: str
    size: int


class Reducer(NamedTuple):
    """An algorithm by which replicas come to the mean of a vector, exactly or nearly.

    Attributes:
      init: (L, key) -> state of this replica. key: the same on all of them, another for each vector.
      mean: ([L], state) -> (about the mean over replicas [L], the same on all of them; state).
      traffic: (L, dtype) -> what a device sends.
      multiple: L must be one of this.
    """

    init: Callable[[int, jax.Array], Tree]
    mean: Callable[[jax.Array, Tree], tuple[jax.Array, Tree]]
    traffic: Callable[[int, DTypeLike], list[Traffic]]
    multiple: int = 1


def psum(axis: Axis) -> Reducer:
    """XLA's all-reduce."""

    def mean(x: jax.Array, state: Tree) -> tuple[jax.Array, Tree]:
        return jax.lax.psum(x, axis.name) / axis.size, state

    return Reducer(_stateless, mean, lambda length, dtype: [_traffic("all-reduce", 2, axis, length, dtype)])


def ring(axis: Axis) -> Reducer:
    """Ring all-reduce, written out: 2(n-1) steps, in each of which a replica sends L/n to the next one.

    Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009. Floats of 16 bits
    travel as their bits: XLA would widen them on CPUs.
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
        for step in range(n - 1):  # reduce-scatter: shard i goes round, each replica adds its part
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
    """BytePS: every replica is also the server of 1/n of the vector; workers push to servers, then pull from them.

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
    """All-reduce within groups of `group` neighbours, as the links in a node are faster, then between groups.

    Each replica of a group adds up 1/group of its vectors, and goes on with that alone.
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
    """Send the vector in another dtype, as Horovod's fp16 compression."""

    def mean(x: jax.Array, state: Tree) -> tuple[jax.Array, Tree]:
        total, state = reducer.mean(x.astype(dtype), state)
        return total.astype(x.dtype), state

    return reducer._replace(mean=mean, traffic=lambda length, _: reducer.traffic(length, dtype))


def predivide(reducer: Reducer, factor: float) -> Reducer:
    """Divide by `factor` before the sum, not after: Horovod's gradient_predivide_factor.

    In a narrow dtype the sum of many gradients may overflow, or their quotients vanish.
    """

    def mean(x: jax.Array, state: Tree) -> tuple[jax.Array, Tree]:
        total, state = reducer.mean(x / factor, state)
        return total * factor, state

    return reducer._replace(mean=mean)


def psum_small(tree: Tree, axes: str | tuple[str, ...]) -> Tree:
    """Return the sums over mesh axes of a tree's few numbers, in one collective; leaves of one dtype, any shapes."""
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.psum(flat, axes))


def _stateless(_length: int, _key: jax.Array) -> Tree:
    return ()


def ring_traffic(
    kind: str, ways: int, axis: str, size: int, nbytes: float, dtype: str, *, num_vectors: int = 1
) -> Traffic:
    """Return what a device sends of vectors by ring algorithms: (n-1)/n of their bytes, each way.

    Patarasuk and Yuan, 2009.

    Args:
      kind: of the collective.
      ways: 2 for an all-reduce, 1 for one of its halves, times the collectives of each vector.
      axis: of the mesh.
      size: n, of the axis.
      nbytes: of all vectors together.
      dtype: of the vectors.
      num_vectors: each is sent in separate messages.
    """
    return Traffic(kind, dtype, axis, ways * (size - 1) * nbytes / size, ways * (size - 1) * num_vectors)


def _traffic(kind: str, ways: int, axis: Axis, length: int, dtype: DTypeLike) -> Traffic:
    dtype = jnp.dtype(dtype)
    return ring_traffic(kind, ways, axis.name, axis.size, length * dtype.itemsize, dtype.name)
