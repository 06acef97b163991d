"""The layout of arrays on the mesh, defined once for each leaf of a tree.

Shardings, local views, conversions between forms and memory sizes are derived from the layout. A tree has three forms:
*canonical*, as on one device; *global*, arrays over the mesh as jit sees them; and *local*, the part of a global array
that one device sees inside `shard_map`. A leaf is replicated over every mesh axis that its layout does not mention:

    replicated              P()              canonical = global = local
    split over axes         P(.., axis)      global is padded along the split dims, and repeated if groups of devices
                                             hold copies; local is one shard
    differing over axes     P(axis, ..)      global has a leading dim per axis, canonical is the mean over one axis
    copied over an axis     P(axis)          global has a leading dim, as in pmap; all copies equal the canonical array
    held by some devices                     only some devices of an axis store the leaf: pipeline stages, or a master

A leaf can be split over several axes, one after another: the shards of the first axis over the second, along the same
dim or another one. Those of the tensor axis are split over the data axis in this way.

The arrays of different pipeline stages differ in shape, so each device also packs its arrays into one vector
(jaxpar/strategies/pipeline/executor/packing.py). The layout defines which leaves each device packs.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

Tree = Any  # a pytree of arrays or of their shapes

REPLICATED, PER_REPLICA, SHARDED, HELD = "replicated", "per replica", "sharded", "on some devices"
LAYOUT_KINDS = (HELD, SHARDED, PER_REPLICA, REPLICATED)


class DimSplit(NamedTuple):
    """A dim that is split over a mesh axis, zero-padded to a multiple of the number of shards."""

    dim: int  # the dim
    axis: str  # the mesh axis
    copies: int = 1  # number of groups of neighbours on the axis, each of which holds all shards

    def num_shards(self, axes: Mapping[str, int]) -> int:
        """Return the number of shards."""
        return axes[self.axis] // self.copies


class Holders(NamedTuple):
    """The devices that hold a leaf, by index on a mesh axis. The first one owns the leaf, the others hold copies."""

    axis: str
    numbers: tuple[int, ...]


class LeafLayout(NamedTuple):
    """The layout of one array on the mesh."""

    shape: tuple[int, ...]  # shape of the canonical array, or of the array on each device if there is no canonical form
    dtype: Any  # dtype of the array
    splits: tuple[DimSplit, ...] = ()  # the dims that are split; each one splits the shards of those before it
    # the axes along which every device has its own array, in the order of the global array's leading dims
    leading: tuple[str, ...] = ()
    are_copies: bool = False  # whether the arrays along `leading` are equal
    holders: Holders | None = None  # the devices that hold the array; None if all devices do
    on_host: bool = False  # whether the array is in host memory between steps

    def local_shape(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the array on one device, without leading dims."""
        shape = self.shape
        for split in self.splits:
            shape = shard_shape(shape, split.num_shards(axes), split.dim)
        return shape

    def global_shape(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the global array."""
        local = list(self.local_shape(axes))
        for split in self.splits:
            local[split.dim] *= axes[split.axis]
        return (*(axes[axis] for axis in self.leading), *local)

    def local_nbytes(self, axes: Mapping[str, int]) -> int:
        """Return the bytes on one of the devices that hold the array."""
        return math.prod(self.local_shape(axes)) * np.dtype(self.dtype).itemsize

    def dims_over(self, axis: str) -> list[int]:
        """Return the dim that is split over an axis, in a list; empty if there is none."""
        return [split.dim for split in self.splits if split.axis == axis]

    @property
    def kind(self) -> str:
        """Kind of the layout, one of LAYOUT_KINDS."""
        if self.holders:
            return HELD
        return SHARDED if self.splits else PER_REPLICA if self.leading and not self.are_copies else REPLICATED

    @property
    def spec(self) -> PartitionSpec:
        """Partition spec of the global array."""
        of_dims: list[tuple[str, ...]] = [()] * (1 + max((split.dim for split in self.splits), default=-1))
        for split in self.splits:
            of_dims[split.dim] += (split.axis,)
        return PartitionSpec(*self.leading, *(axes[0] if len(axes) == 1 else axes or None for axes in of_dims))

    def sharding(self, mesh: Mesh) -> Sharding:
        """Return the sharding of the global array. An array that one device holds is placed on that device alone."""
        if self.holders is None:
            return NamedSharding(mesh, self.spec)
        [number] = self.holders.numbers
        [device] = np.take(mesh.devices, [number], mesh.axis_names.index(self.holders.axis)).flat
        return SingleDeviceSharding(device)


class Layout:
    """The layout of a tree."""

    def __init__(self, axes: Mapping[str, int], leaves: Tree):
        self.axes = dict(axes)  # size of each mesh axis
        self.leaves = leaves  # a tree of LeafLayout with the structure of the canonical tree

    @cached_property
    def kind(self) -> str:
        """Kind of the whole layout: among the kinds of its leaves, the one that comes first in LAYOUT_KINDS."""
        return min((leaf.kind for leaf in self.flat), key=LAYOUT_KINDS.index, default=REPLICATED)

    @cached_property
    def flat(self) -> list[LeafLayout]:
        """The leaves, in the order of `jax.tree.leaves`."""
        return jax.tree.leaves(self.leaves, is_leaf=is_layout)

    def _map(self, function: Callable[..., Any], *trees: Tree) -> Tree:
        return jax.tree.map(function, self.leaves, *trees, is_leaf=is_layout)

    @property
    def specs(self) -> Tree:
        """Tree of the partition specs of the global arrays."""
        return self._map(lambda leaf: leaf.spec)

    def shardings(self, mesh: Mesh, *, in_step: bool = False) -> Tree:
        """Return a tree of the shardings of the global arrays. in_step: place arrays kept on the host on the device."""

        def sharding(leaf: LeafLayout) -> Sharding:
            made = leaf.sharding(mesh)
            return made.with_memory_kind("pinned_host") if leaf.on_host and not in_step else made

        return self._map(sharding)

    @property
    def shapes(self) -> Tree:
        """Tree of the shapes and dtypes of the global arrays."""
        return self._map(lambda leaf: jax.ShapeDtypeStruct(leaf.global_shape(self.axes), leaf.dtype))

    @property
    def local_shapes(self) -> Tree:
        """Tree of the shapes and dtypes of the arrays on one device, without leading dims."""
        return self._map(lambda leaf: jax.ShapeDtypeStruct(leaf.local_shape(self.axes), leaf.dtype))

    def abstract(self, mesh: Mesh) -> Tree:
        """Return a tree of the shapes, dtypes and shardings of the global arrays."""
        at = self.shardings(mesh)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self.shapes, at)

    @property
    def is_canonical(self) -> bool:
        """Whether the global arrays equal the canonical arrays."""
        return not any(leaf.leading or leaf.splits for leaf in self.flat)

    def moved_to_host(self) -> "Layout":
        """Return the same layout for arrays that are in host memory between steps."""
        return Layout(self.axes, self._map(lambda leaf: leaf._replace(on_host=True)))

    def local(self, tree: Tree) -> Tree:
        """Return the local form of a global tree inside `shard_map`, by removing the leading dims."""
        return self._map(lambda leaf, x: reduce(lambda part, _: part[0], leaf.leading, x), tree)

    def out(self, tree: Tree) -> Tree:
        """Return the output of `shard_map` for a local tree, by adding the leading dims. The inverse of `local`."""
        return self._map(lambda leaf, x: reduce(lambda part, _: part[None], leaf.leading, x), tree)

    def to_global(self, tree: Tree, numpy: Any = jnp) -> Tree:
        """Return the global form of a canonical tree. numpy: np to compute on the host, jnp inside jit."""

        def made(leaf: LeafLayout, x: Any) -> Any:
            x = _divided(x, leaf.splits, self.axes, numpy)
            return numpy.broadcast_to(x, leaf.global_shape(self.axes)) if leaf.leading else x

        return self._map(made, tree)

    def to_canonical(self, tree: Tree) -> Tree:
        """Return the canonical form of a global tree. Floats that differ between replicas are averaged. Jittable."""

        def canonical(leaf: LeafLayout, x: Any) -> Any:
            if leaf.leading:
                is_mean = jnp.issubdtype(x.dtype, jnp.floating) and not leaf.are_copies
                x = jnp.mean(x, axis=0) if is_mean else x[0]
            return _joined(x, leaf.shape, leaf.splits, self.axes)

        return self._map(canonical, tree)

    def shards(self, tree: Tree, axis: str, numpy: Any = np) -> list[Tree]:
        """Return the parts of a global tree that the devices along an axis hold. Axes of other splits come first."""
        size = self.axes[axis]

        def parts(leaf: LeafLayout, x: Any) -> Any:
            dims = leaf.dims_over(axis)
            return numpy.split(x, size, *dims) if dims else [x] * size

        leaves, structure = jax.tree.flatten(tree)
        by_leaf = [parts(*pair) for pair in zip(self.flat, leaves, strict=True)]
        return [jax.tree.unflatten(structure, [of_leaf[i] for of_leaf in by_leaf]) for i in range(size)]

    def joined(self, shards: Sequence[Tree], axis: str, numpy: Any = np) -> Tree:
        """Return the tree whose parts the devices along an axis hold. The inverse of `shards`."""

        def join(leaf: LeafLayout, *of: Any) -> Any:
            dims = leaf.dims_over(axis)
            return numpy.concatenate(of, *dims) if dims else of[0]

        return self._map(join, *shards)

    def own(self, tree: Tree) -> Tree:
        """Return the part of a canonical tree that this device holds, inside `shard_map`."""

        def part(leaf: LeafLayout, x: jax.Array) -> jax.Array:
            x = _divided(x, leaf.splits, self.axes)
            for split in leaf.splits:
                size = x.shape[split.dim] // self.axes[split.axis]
                x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(split.axis) * size, size, split.dim)
            return x

        return self._map(part, tree)

    def per_replica(self, axis: str) -> "Layout":
        """Return the layout in which each device along `axis` has arrays of its own."""
        return Layout(self.axes, self._map(lambda leaf: leaf._replace(leading=(*leaf.leading, axis))))

    def sharded(self, axis: str, copies: int = 1) -> "Layout":
        """Return the layout in which each array is also split over `axis`, along its longest dim on a device.

        Scalars are not split. copies: number of groups on the axis that each hold all shards.
        """

        def leaf_layout(leaf: LeafLayout) -> LeafLayout:
            dim = split_dim(leaf.local_shape(self.axes))
            return leaf if dim is None else leaf._replace(splits=(*leaf.splits, DimSplit(dim, axis, copies)))

        return Layout(self.axes, self._map(leaf_layout))

    @cached_property
    def nbytes_by_device(self) -> list[int]:
        """Bytes on each device, in mesh order."""
        held: Counter[Holders | None] = Counter()
        for leaf in self.flat:
            held[leaf.holders] += leaf.local_nbytes(self.axes)
        total = np.full(tuple(self.axes.values()), held[None])
        for holders, nbytes in held.items():
            if holders is not None:
                by_index = np.moveaxis(total, list(self.axes).index(holders.axis), 0)  # a view
                by_index[list(holders.numbers)] += nbytes
        return total.ravel().tolist()

    @property
    def on_host(self) -> bool:
        """Whether the arrays are in host memory between steps."""
        return any(leaf.on_host for leaf in self.flat)

    def owner_of(self, leaf: int) -> int:
        """Return the index of the device that owns a leaf on the axis of its holders; 0 if all devices hold it."""
        holders = self.flat[leaf].holders
        return holders.numbers[0] if holders else 0


def join(layouts: Tree) -> Layout:
    """Join a tree of layouts into the layout of the whole tree."""
    first, *_ = jax.tree.leaves(layouts)  # a Layout is a leaf to jax.tree
    return Layout(first.axes, jax.tree.map(lambda one: one.leaves, layouts))


def is_layout(node: Any) -> bool:
    """Return whether a node of a tree is the layout of a leaf."""
    return isinstance(node, LeafLayout)


# ---- layouts of whole trees ---------------------------------------------------------------------


def replicated(axes: Mapping[str, int], like: Any) -> Layout:
    """Return the layout of a tree replicated on every device. like: the canonical tree or its shapes."""
    return Layout(axes, jax.tree.map(lambda x: LeafLayout(x.shape, x.dtype), like))


def per_replica(axes: Mapping[str, int], like: Tree, *over: str, are_copies: bool = False) -> Layout:
    """Return the layout of a tree that each device along the axes `over` has separately. are_copies: all are equal."""
    return Layout(axes, jax.tree.map(lambda x: LeafLayout(x.shape, x.dtype, leading=over, are_copies=are_copies), like))


def made_by_replicas(axes: Mapping[str, int], make: Callable[[], Tree], axis: str, *outer: str) -> Layout:
    """Return the per-replica layout of the tree that `make` creates on each device of the axes `outer` and `axis`.

    make: runs inside `shard_map`, and can call `jax.lax.axis_index(axis)`.
    """
    made = jax.eval_shape(lambda: jax.vmap(lambda _: make(), axis_name=axis)(jnp.zeros(axes[axis])))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), made)
    return per_replica(axes, like, *outer, axis)


def sharded(axes: Mapping[str, int], like: Any, axis: str) -> Layout:
    """Return the layout of a tree sharded over `axis` along each array's longest dim. Scalars are replicated."""
    return replicated(axes, like).sharded(axis)


def on_one(axes: Mapping[str, int], like: Any, axis: str, number: int = 0) -> Layout:
    """Return the layout of a tree that only one device of `axis` holds."""
    return on_some(axes, like, axis, (number,))


def on_some(axes: Mapping[str, int], like: Tree, axis: str, numbers: Sequence[int]) -> Layout:
    """Return the layout of a tree that only the devices `numbers` of `axis` hold, each the whole tree."""
    holders = Holders(axis, tuple(numbers))
    return Layout(axes, jax.tree.map(lambda x: LeafLayout(x.shape, x.dtype, holders=holders), like))


def by_kind(kind: str, layout: Layout, axis: str, copies: int = 1) -> Layout:
    """Return a layout refined to a kind over `axis`: REPLICATED, PER_REPLICA or SHARDED, with `copies` copies."""
    if kind == REPLICATED:
        return layout
    return layout.per_replica(axis) if kind == PER_REPLICA else layout.sharded(axis, copies)


# ---- shards -------------------------------------------------------------------------------------


def split_dim(shape: tuple[int, ...]) -> int | None:
    """Return the dim along which an array is split: the longest one, or None for a scalar."""
    return int(np.argmax(shape)) if shape else None


def shard_shape(shape: tuple[int, ...], n: int, dim: int | None = None) -> tuple[int, ...]:
    """Return the shape of each of the n shards of an array. dim: the split dim; None: `split_dim(shape)`."""
    dim = split_dim(shape) if dim is None else dim
    return tuple(-(-size // n) if i == dim else size for i, size in enumerate(shape))


def pad(x: Any, n: int, numpy: Any = jnp, dim: int | None = None) -> Any:
    """Return the array zero-padded at the end of the split dim, to a multiple of n."""
    dim = split_dim(x.shape) if dim is None else dim
    return x if dim is None else numpy.pad(x, [(0, -x.shape[i] % n if i == dim else 0) for i in range(x.ndim)])


def unpad(x: Any, shape: tuple[int, ...]) -> Any:
    """Return the array of the original shape `shape`, without the padding. The inverse of `pad`."""
    return x[tuple(slice(size) for size in shape)]


def _divided(x: Any, splits: Sequence[DimSplit], axes: Mapping[str, int], numpy: Any = jnp) -> Any:
    """Return the global form of an array with these splits: padded, and repeated for copies."""
    for dim, of_dim in _by_dim(splits).items():
        after = x.shape[dim + 1 :]
        for place, split in enumerate(of_dim, dim):  # before this place are the numbers of shards of earlier splits
            n = split.num_shards(axes)
            x = pad(x, n, numpy, place)
            if len(of_dim) > 1:
                x = x.reshape(*x.shape[:place], n, x.shape[place] // n, *after)
            if split.copies > 1:
                x = numpy.concatenate([x] * split.copies, place)
        x = x.reshape(*x.shape[:dim], math.prod(x.shape[dim : x.ndim - len(after)]), *after)
    return x


def _joined(x: Any, shape: tuple[int, ...], splits: Sequence[DimSplit], axes: Mapping[str, int]) -> Any:
    """Return the array of shape `shape` whose global form is x. The inverse of `_divided`."""
    for dim, of_dim in _by_dim(splits).items():
        if len(of_dim) == 1:
            continue  # of several copies, the first one is not removed
        after, sizes = x.shape[dim + 1 :], [shape[dim]]  # sizes: of the dim, before each split
        for split in of_dim[:-1]:
            sizes.append(-(-sizes[-1] // split.num_shards(axes)))
        x = x.reshape(*x.shape[:dim], *(axes[split.axis] for split in of_dim), -1, *after)
        for place, split, size in reversed(list(zip(range(dim, x.ndim), of_dim, sizes, strict=False))):
            x = x[(slice(None),) * place + (slice(split.num_shards(axes)),)]  # the first one of several copies
            x = x.reshape(*x.shape[:place], -1, *after)[(slice(None),) * place + (slice(size),)]
    return unpad(x, shape)


def _by_dim(splits: Sequence[DimSplit]) -> dict[int, list[DimSplit]]:
    by_dim: dict[int, list[DimSplit]] = {}
    for split in splits:
        by_dim.setdefault(split.dim, []).append(split)
    return by_dim
