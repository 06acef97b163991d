"""Reducers, which average a vector over the replicas of a mesh axis, inside `shard_map`. fuse.py applies them to trees.

Dims: n replicas, L elements of a vector.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.typing import DTypeLike

from jaxpar.core.plan import Traffic, ring_traffic
from jaxpar.layout import Tree


class Axis(NamedTuple):
    """The mesh axis of the replicas, or groups of them. Collectives of different groups are independent."""

    name: str  # name of the mesh axis
    size: int  # number of replicas, in each group
    groups: tuple[tuple[int, ...], ...] | None = None  # the replicas of each group; None: all replicas are one group

    def position(self) -> jax.Array:
        """Return the position of this replica in its group."""
        replica = jax.lax.axis_index(self.name)
        if self.groups is None:
            return replica
        place_of = {member: place for members in self.groups for place, member in enumerate(members)}
        return jnp.array([place_of[member] for member in sorted(place_of)])[replica]

    def traffic(self, kind: str, ways: int, nbytes: float, dtype: str, num_vectors: int = 1) -> Traffic:
        """Return the `ring_traffic` of collectives over this axis."""
        members = self.groups[0] if self.groups else ()
        return ring_traffic(kind, ways, self.name, self.size, nbytes, dtype, num_vectors=num_vectors, members=members)

    def within(self, group: int) -> "Axis":
        """Return the axis of groups of `group` neighbours, such as the replicas of a node."""
        return Axis(self.name, group, tuple(tuple(range(i, i + group)) for i in range(0, self.size, group)))

    def between(self, group: int) -> "Axis":
        """Return the axis of groups with one replica of each group of `within`, at the same position."""
        groups = tuple(tuple(range(i, self.size, group)) for i in range(group))
        return Axis(self.name, self.size // group, groups)


EQUAL_ON_ALL = "invarying"  # the type of gathered arrays: equal on all devices


class Groups(NamedTuple):
    """Groups of neighbours, such as the replicas of a node, that average exactly. Each replica has a shard of the mean.

    The links within a group are faster, so only shards are sent between groups.
    """

    axis: Axis
    size: int  # number of replicas in a group; 1: nothing is sent

    def shard_of_mean(self, x: jax.Array) -> jax.Array:
        """Return this replica's shard of the mean of vectors [L] over its group, [ceil(L / size)], padded with 0."""
        if self.size == 1:
            return x
        groups = self.axis.within(self.size).groups
        return jax.lax.psum_scatter(self._padded(x) / self.size, self.axis.name, axis_index_groups=groups, tiled=True)

    def shard(self, x: jax.Array) -> jax.Array:
        """Return this replica's shard of a vector [L] that all replicas of its group have."""
        if self.size == 1:
            return x
        return self._padded(x).reshape(self.size, -1)[self.axis.within(self.size).position()]

    def whole(self, shard: jax.Array, length: int) -> jax.Array:
        """Return the vector [length] of the shards of a group."""
        if self.size == 1:
            return shard
        groups = self.axis.within(self.size).groups
        return jax.lax.all_gather(shard, self.axis.name, axis_index_groups=groups, tiled=True)[:length]

    def traffic(self, length: int, dtype: DTypeLike) -> list[Traffic]:
        """Return the traffic of `shard_of_mean` and `whole` for a vector [length]."""
        within, dtype = self.axis.within(self.size), jnp.dtype(dtype)
        nbytes = self.size * math.ceil(length / self.size) * dtype.itemsize
        kinds = ("reduce-scatter", "all-gather") if self.size > 1 else ()
        return [within.traffic(kind, 1, nbytes, dtype.name) for kind in kinds]

    def routes(self, of_groups: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the pairs of replicas at the same position of pairs of groups."""
        return [(a * self.size + place, b * self.size + place) for a, b in of_groups for place in range(self.size)]

    @property
    def members(self) -> tuple[int, ...]:
        """The replicas at the first position of each group, if there are groups, as in `Traffic`."""
        return tuple(range(0, self.axis.size, self.size)) if self.size > 1 else ()

    def _padded(self, x: jax.Array) -> jax.Array:
        return jnp.pad(x, (0, -len(x) % self.size))


class Reducer(NamedTuple):
    """An algorithm that averages a vector over replicas, exactly or approximately."""

    # (L, key) -> private state of this replica. key: the same on all replicas, different for each vector.
    init: Callable[[int, jax.Array], Tree]
    # ([L], state) -> (exact or approximate mean over replicas [L], the same on all of them; state)
    mean: Callable[[jax.Array, Tree], tuple[jax.Array, Tree]]
    traffic: Callable[[int, DTypeLike], list[Traffic]]  # (L, dtype) -> the traffic that a device sends
    multiple: int = 1  # L must be a multiple of this


def psum(axis: Axis, *, predivide: float = 1.0, dtype: DTypeLike | None = None) -> Reducer:
    """Return XLA's all-reduce. See `_mean_of` for the options, which all reducers of this file share."""
    return _mean_of(lambda x: jax.lax.psum(x, axis.name), [("all-reduce", 2, axis, 1)], axis, predivide, dtype)


def ring(axis: Axis, *, predivide: float = 1.0, dtype: DTypeLike | None = None) -> Reducer:
    """Return a ring all-reduce, written out: 2(n-1) steps, in each of which a replica sends L/n to the next one.

    Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009.
    """
    n = axis.size
    to_next = [(i, (i + 1) % n) for i in range(n)]

    def pass_on(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x.view(_moved_dtype(x.dtype)), axis.name, to_next).view(x.dtype)

    def total(x: jax.Array) -> jax.Array:
        replica, shards = jax.lax.axis_index(axis.name), x.reshape(n, -1)
        for step in range(n - 1):  # reduce-scatter: shards travel round the ring, and each replica adds its own
            moving = pass_on(shards[(replica - step) % n])
            shards = shards.at[(replica - step - 1) % n].add(moving)
        moving = shards[(replica + 1) % n]
        for step in range(n - 1):  # all-gather
            moving = pass_on(moving)
            shards = shards.at[(replica - step) % n].set(moving)
        # Otherwise XLA repeats these updates in each kernel that reads a part of the vector.
        return jax.lax.optimization_barrier(shards).reshape(-1)

    return _mean_of(total, [("collective-permute", 2, axis, 1)], axis, predivide, dtype, multiple=n)


def push_pull(axis: Axis, *, predivide: float = 1.0, dtype: DTypeLike | None = None) -> Reducer:
    """Return BytePS's all-reduce: each replica is also the server of 1/n of the vector; workers push, then pull.

    Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training", 2020, section 4.
    """
    total = partial(_pushed_and_pulled, axis)
    sends = [("reduce-scatter", 1, axis, 1), ("all-gather", 1, axis, 1)]
    return _mean_of(total, sends, axis, predivide, dtype, multiple=axis.size)


def _pushed_and_pulled(axis: Axis, x: jax.Array) -> jax.Array:
    """Return the sum over the replicas of each group of the axis: of a shard on its server, then gathered."""
    shard = jax.lax.psum_scatter(x, axis.name, axis_index_groups=axis.groups, tiled=True)
    to = "varying" if axis.groups else EQUAL_ON_ALL  # of groups, JAX has no types
    return jax.lax.all_gather(shard, axis.name, axis_index_groups=axis.groups, tiled=True, to=to)


def hierarchical(
    axis: Axis, group: int, *, has_servers: bool = False, predivide: float = 1.0, dtype: DTypeLike | None = None
) -> Reducer:
    """Return an all-reduce within groups of `group` neighbours, whose links are faster, and then between groups.

    Each replica of a group sums 1/group of the vector, and only that shard is reduced between groups. has_servers: by
    push and pull, as BytePS does, instead of XLA's all-reduce.
    """
    within, between = axis.within(group), axis.between(group)

    def over_groups(shard: jax.Array) -> jax.Array:
        if has_servers:
            return _pushed_and_pulled(between, shard)
        return jax.lax.psum(shard, axis.name, axis_index_groups=between.groups)

    def total(x: jax.Array) -> jax.Array:
        shard = over_groups(jax.lax.psum_scatter(x, axis.name, axis_index_groups=within.groups, tiled=True))
        return jax.lax.all_gather(shard, axis.name, axis_index_groups=within.groups, tiled=True)

    all_reduce = [("all-reduce", 2, between, group)]
    push_and_pull = [("reduce-scatter", 1, between, group), ("all-gather", 1, between, group)]
    between_groups = push_and_pull if has_servers else all_reduce
    sends = [("reduce-scatter", 1, within, 1), *between_groups, ("all-gather", 1, within, 1)]
    return _mean_of(total, sends, axis, predivide, dtype, multiple=axis.size if has_servers else group)


def _mean_of(
    total: Callable[[jax.Array], jax.Array],
    sends: Sequence[tuple[str, int, Axis, int]],
    axis: Axis,
    predivide: float,
    dtype: DTypeLike | None,
    multiple: int = 1,
) -> Reducer:
    """Return the reducer that divides by `predivide`, sums over replicas, and divides by the rest of n.

    In a narrow dtype, the sum of many gradients can overflow, and their quotients can underflow. PyTorch's DDP divides
    by n before the sum, Horovod by its gradient_predivide_factor (1 by default).

    Args:
      total: [L] -> the sum over replicas, [L]. L must be a multiple of `multiple`.
      sends: (kind, ways, axis, divisor) of each collective of `total`, which sends 1/divisor of the vector over the
        axis; see `ring_traffic`.
      dtype: the dtype of quotients, sums and messages; None: that of the vector.
    """

    def mean(x: jax.Array, state: Tree) -> tuple[jax.Array, Tree]:
        sent = x if dtype is None else x.astype(dtype)
        summed = total(sent if predivide == 1 else sent / predivide)
        rest = axis.size / predivide
        return (summed if rest == 1 else summed / rest).astype(x.dtype), state

    def traffic(length: int, vector_dtype: DTypeLike) -> list[Traffic]:
        sent = jnp.dtype(vector_dtype if dtype is None else dtype)
        names = {"collective-permute": _moved_dtype(sent).name}
        return [
            over.traffic(kind, ways, length // divisor * sent.itemsize, names.get(kind, sent.name))
            for kind, ways, over, divisor in sends
        ]

    return Reducer(lambda _length, _key: (), mean, traffic, multiple)


def _moved_dtype(dtype: Any) -> Any:
    """Return the dtype in which the ring sends `dtype`: bits instead of 16-bit floats, which XLA widens on CPUs."""
    return jnp.dtype(jnp.uint16) if dtype.itemsize == 2 else dtype


def psum_small(tree: Tree, axes: str | tuple[str, ...]) -> Tree:
    """Return the sums over mesh axes of a tree of a few numbers, in one collective. Its leaves must have one dtype."""
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.psum(flat, axes))


def added_up(traffic: Iterable[Traffic]) -> list[Traffic]:
    """Return the traffic of each kind, dtype and group in one entry. All of it is required, or the same fraction."""
    total: dict[tuple[str, str, str, tuple[int, ...]], Traffic] = {}
    for one in traffic:
        key = (*one[:3], one.members)
        before = total.get(key, one._replace(nbytes=0.0, messages=0.0))
        total[key] = one._replace(nbytes=before.nbytes + one.nbytes, messages=before.messages + one.messages)
    return list(total.values())
