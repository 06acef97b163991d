"""Where arrays live, said once, leaf by leaf. Shardings, local views, conversions and bytes follow from it.

Three forms of a tree: *canonical*, as on one device; *global*, arrays over the mesh as jit sees them; *local*, what a
device sees of a global one inside `shard_map`. A leaf is replicated over every mesh axis that its layout does not name:

    replicated              P()              canonical = global = local
    split over an axis      P(.., axis)      global is padded along the dim, local is one of its shards
    differing over an axis  P(axis)          global has a leading dim of the replicas; canonical is their mean
    held by some devices                     of an axis: the stages of a pipeline, or a master device

What the stages of a pipeline hold differs in shape, so it is packed besides (jaxpar/pipeline/executor/packing.py);
which leaves a device packs is said here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, keystr

Tree = Any  # a pytree of arrays, or of their shapes

REPLICATED, PER_REPLICA, SHARDED = "replicated", "per replica", "sharded"


class DimSplit(NamedTuple):
    """A dim that is divided over a mesh axis, padded with zeros so that the axis divides it."""

    dim: int
    axis: str


class Holders(NamedTuple):
    """The devices of a mesh axis that hold a leaf, by their number on it. The first one owns it, others have copies."""

    axis: str
    numbers: tuple[int, ...]


class LeafLayout(NamedTuple):
    """Where one array lives.

    Attributes:
      shape: of the canonical array.
      dtype: of the array.
      split: the dim that is divided; None: none.
      differs_over: the axis on which every replica has an array of its own; empty: none.
      holders: the devices that hold it; None: all.
    """

    shape: tuple[int, ...]
    dtype: Any
    split: DimSplit | None = None
    differs_over: str = ""
    holders: Holders | None = None

    def nbytes_on(self, axes: Mapping[str, int], number: Mapping[str, int]) -> int:
        """Return the bytes on the device of this number on each axis."""
        if self.holders and number[self.holders.axis] not in self.holders.numbers:
            return 0
        shape = shard_shape(self.shape, axes[self.split.axis], self.split.dim) if self.split else self.shape
        return int(np.prod(shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def spec(self) -> PartitionSpec:
        """The spec of the global array."""
        if self.differs_over:
            return PartitionSpec(self.differs_over)
        if self.split:
            return PartitionSpec(*[None] * self.split.dim, self.split.axis)
        return PartitionSpec()


class Layout:
    """The layout of a tree.

    Attributes:
      axes: size of each mesh axis.
      leaves: a tree of LeafLayout, of the canonical tree's structure.
    """

    def __init__(self, axes: Mapping[str, int], leaves: Any):
        self.axes, self.leaves = dict(axes), leaves

    @cached_property
    def kind(self) -> str:
        """The layout of the whole in a word: replicated, per replica, or sharded."""
        kinds = {SHARDED if leaf.split else PER_REPLICA if leaf.differs_over else REPLICATED for leaf in self._flat}
        return SHARDED if SHARDED in kinds else PER_REPLICA if PER_REPLICA in kinds else REPLICATED

    @cached_property
    def _flat(self) -> list[LeafLayout]:
        return jax.tree.leaves(self.leaves, is_leaf=_is_layout)

    def _map(self, function: Callable[..., Any], *trees: Any) -> Any:
        return jax.tree.map(function, self.leaves, *trees, is_leaf=_is_layout)

    @property
    def specs(self) -> Any:
        """A tree of the specs of the global arrays."""
        return self._map(lambda leaf: leaf.spec)

    def shardings(self, mesh: Mesh) -> Any:
        """Return a tree of the shardings of the global arrays."""
        return self._map(lambda leaf: NamedSharding(mesh, leaf.spec))

    @property
    def shapes(self) -> Any:
        """A tree of the shapes and dtypes of the global arrays."""
        return self._map(lambda leaf: jax.eval_shape(lambda: self._to_global(leaf, jnp.zeros(leaf.shape, leaf.dtype))))

    def local(self, tree: Any) -> Any:
        """Return what a device sees of a global tree inside `shard_map`, without leading dims."""
        return self._map(lambda leaf, x: x[0] if leaf.differs_over else x, tree)

    def out(self, tree: Any) -> Any:
        """Return what a device gives `shard_map` of a local tree: the reverse of `local`."""
        return self._map(lambda leaf, x: x[None] if leaf.differs_over else x, tree)

    def to_global(self, tree: Any, numpy: Any = jnp) -> Any:
        """Return the global form of a canonical tree. numpy: np on the host, jnp where it is to be jitted."""
        return self._map(lambda leaf, x: self._to_global(leaf, x, numpy), tree)

    def _to_global(self, leaf: LeafLayout, x: Any, numpy: Any = jnp) -> Any:
        if leaf.differs_over:
            return numpy.broadcast_to(x, (self.axes[leaf.differs_over], *x.shape))
        return pad(x, self.axes[leaf.split.axis], numpy, leaf.split.dim) if leaf.split else x

    def to_canonical(self, tree: Any) -> Any:
        """Return the canonical form of a global tree; of floats that differ between replicas, the mean. Jittable."""

        def canonical(leaf: LeafLayout, x: Any) -> Any:
            if leaf.differs_over:
                return jnp.mean(x, axis=0) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]
            return unpad(x, leaf.shape) if leaf.split else x

        return self._map(canonical, tree)

    def nbytes_on(self, **number: int) -> int:
        """Return the bytes on the device of this number on each axis (0 where it is not given)."""
        return sum(leaf.nbytes_on(self.axes, {**dict.fromkeys(self.axes, 0), **number}) for leaf in self._flat)

    def held_by(self, axis: str, number: int) -> list[int]:
        """Return the numbers of the leaves, in the tree's order, that a device of the axis holds."""
        return [i for i, leaf in enumerate(self._flat) if _holds(leaf.holders, axis, number)]

    def owner_of(self, leaf: int) -> int:
        """Return the number, on the axis of its holders, of the device that owns a leaf; 0 where all hold it."""
        holders = self._flat[leaf].holders
        return holders.numbers[0] if holders else 0


def _is_layout(node: Any) -> bool:
    return isinstance(node, LeafLayout)


def _holds(holders: Holders | None, axis: str, number: int) -> bool:
    return holders is None or holders.axis != axis or number in holders.numbers


# ---- layouts of whole trees ---------------------------------------------------------------------


def replicated(axes: Mapping[str, int], like: Any) -> Layout:
    """Return the layout in which every device has all of a tree. like: the canonical tree, or its shapes."""
    return Layout(axes, jax.tree.map(lambda x: LeafLayout(x.shape, x.dtype), like))


def per_replica(axes: Mapping[str, int], like: Any, axis: str) -> Layout:
    """Return the layout in which every replica on `axis` has a tree of its own."""
    return Layout(axes, jax.tree.map(lambda x: LeafLayout(x.shape, x.dtype, differs_over=axis), like))


def sharded(axes: Mapping[str, int], like: Any, axis: str) -> Layout:
    """Return the layout in which arrays are divided over `axis` along their longest dim; scalars are replicated."""

    def leaf(x: Any) -> LeafLayout:
        dim = split_dim(x.shape)
        return LeafLayout(x.shape, x.dtype, split=None if dim is None else DimSplit(dim, axis))

    return Layout(axes, jax.tree.map(leaf, like))


def on_one(axes: Mapping[str, int], like: Any, axis: str, number: int = 0) -> Layout:
    """Return the layout in which one device of `axis` has all of a tree, and the others nothing."""
    holders = Holders(axis, (number,))
    return Layout(axes, jax.tree.map(lambda x: LeafLayout(x.shape, x.dtype, holders=holders), like))


def by_kind(kind: str, axes: Mapping[str, int], like: Any, axis: str) -> Layout:
    """Return the layout of a kind: REPLICATED, or PER_REPLICA or SHARDED over `axis`."""
    if kind == REPLICATED:
        return replicated(axes, like)
    return {PER_REPLICA: per_replica, SHARDED: sharded}[kind](axes, like, axis)


# ---- leaves that belong to layers ---------------------------------------------------------------


class Address(NamedTuple):
    """A leaf of a tree that has parameters, or arrays made for them, in it.

    Attributes:
      layer: that the leaf belongs to; None where it belongs to none, such as a counter of steps.
      path: of the leaf, with the layer left open; it is the same for the same array of equal layers.
    """

    layer: str | None
    path: str


MARK = "\0"  # before the name of a layer: no key of an optimizer begins so, and layers sort as without it


def addresses(function: Callable[[Any], Any], params: Mapping[str, Any]) -> list[Address]:
    """Return the addresses of the leaves of function(params), in its tree's order.

    The keys of the layers are marked before the function is traced, so an optimizer may put parameters anywhere in its
    state, and have dicts with keys of its own, such as the labels of a partitioned one.

    Args:
      function: such as an optimizer's init; it computes each array of a layer from that layer's alone.
      params: {layer: ..}, abstract.
    """
    marked = {MARK + name: tree for name, tree in params.items()}
    made = jax.eval_shape(function, marked)
    return [_address(path) for path, _ in jax.tree_util.tree_leaves_with_path(made)]


def layer_name(key: str) -> str:
    """Return the name of a layer from its key in parameters, which `addresses` may have marked."""
    return key.removeprefix(MARK)


def _address(path: Sequence[Any]) -> Address:
    for place, part in enumerate(path):
        if isinstance(part, DictKey) and str(part.key).startswith(MARK):
            return Address(layer_name(part.key), f"{keystr(tuple(path[:place]))}[]{keystr(tuple(path[place + 1 :]))}")
    return Address(None, keystr(tuple(path)))


# ---- shards -------------------------------------------------------------------------------------


def split_dim(shape: tuple[int, ...]) -> int | None:
    """Return the dim along which an array is divided: the longest; None where it has no dims."""
    return int(np.argmax(shape)) if shape else None


def shard_shape(shape: tuple[int, ...], n: int, dim: int | None = None) -> tuple[int, ...]:
    """Return the shape of each of the n shards of an array. dim: that is divided; None: `split_dim`."""
    dim = split_dim(shape) if dim is None else dim
    return tuple(-(-size // n) if i == dim else size for i, size in enumerate(shape))


def pad(x: Any, n: int, numpy: Any = jnp, dim: int | None = None) -> Any:
    """Return the array with zeros at the end of the dim that is divided, so that n divides it."""
    dim = split_dim(x.shape) if dim is None else dim
    return x if dim is None else numpy.pad(x, [(0, -x.shape[i] % n if i == dim else 0) for i in range(x.ndim)])


def unpad(x: Any, shape: tuple[int, ...]) -> Any:
    """Return the array of that shape that was padded."""
    return x[tuple(slice(size) for size in shape)]
