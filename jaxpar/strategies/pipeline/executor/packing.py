"""Packs trees of different structure into arrays of the same shapes, so that different stages can run one program.

All devices of a mesh run the same program, so an array has the same shape on all of them. Leaves whose shape and dtype
occur in every non-empty tree are stored unchanged; they are called "shared". The remaining leaves of a tree are
flattened and concatenated into one vector per dtype, which is as long as the largest tree needs. So no device
allocates more than the most heavily loaded one needs, and a pipeline of equal stages has no vectors at all.

Leaves can have marks. An array of the packed form has either marked leaves or others: in a vector of both, a lossy
exchange would mix what the devices of a group have in common with what each of them has alone.
"""

import functools
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Packed = tuple[jax.Array, ...]  # the shared arrays, then the vectors


class _Key(NamedTuple):
    """The leaves that can share an array, or with shape (), a vector."""

    shape: tuple[int, ...]
    dtype: Any
    is_marked: bool


class _Place(NamedTuple):
    """The place of a leaf: all of packed[array], or the part of that vector that starts at `offset`."""

    array: int
    offset: int | None


def at_index(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return x[index], of dim 0. The index is on a device."""
    return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def written_at(packed: Packed, slot: jax.Array, slots: Packed) -> Packed:
    """Return `slots`, packed trees stacked along dim 0, with number `slot` replaced."""
    update = jax.lax.dynamic_update_index_in_dim
    return tuple(update(old, new, slot, 0) for old, new in zip(slots, packed, strict=True))


class Packing:
    """The packed form that several trees share. A tree is identified by its kind: its index among the trees."""

    def __init__(self, trees: Sequence[Any], marks: Sequence[Sequence[bool]] | None = None):
        """Lay out the packed form.

        trees: one tree per kind; their leaves have a shape and a dtype. marks: of the leaves of each tree; None: no
        leaf is marked.
        """
        flat = [jax.tree.flatten(tree) for tree in trees]
        self._structures = [structure for _, structure in flat]
        self._leaves = [[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves] for leaves, _ in flat]
        marks = marks or [[False] * len(leaves) for leaves in self._leaves]
        keys = [
            [_Key(leaf.shape, leaf.dtype, mark) for leaf, mark in zip(leaves, of_tree, strict=True)]
            for leaves, of_tree in zip(self._leaves, marks, strict=True)
        ]
        counts = [Counter(of_tree) for of_tree in keys]
        # The intersection of multisets: if one tree has two leaves of a shape and another has three, then two are
        # shared, and the third one of the latter goes to a vector.
        common = functools.reduce(operator.and_, [count for count in counts if count] or [Counter()])
        shared = list(common.elements())
        first = {key: shared.index(key) for key in common}  # the first shared array of a key
        rest = {key for count in counts for key in count - common}
        vectors = sorted({key._replace(shape=()) for key in rest}, key=lambda key: (str(key.dtype), key.is_marked))
        numbers = {key: len(shared) + index for index, key in enumerate(vectors)}
        lengths = dict.fromkeys(vectors, 0)
        self._places: list[list[_Place]] = []
        for leaves, of_tree in zip(self._leaves, keys, strict=True):
            seen, filled = Counter[_Key](), dict.fromkeys(vectors, 0)
            places = []
            for leaf, key in zip(leaves, of_tree, strict=True):
                if seen[key] < common[key]:
                    places.append(_Place(first[key] + seen[key], None))
                    seen[key] += 1
                else:
                    vector = key._replace(shape=())
                    places.append(_Place(numbers[vector], filled[vector]))
                    filled[vector] += leaf.size
            self._places.append(places)
            lengths = {vector: max(lengths[vector], filled[vector]) for vector in vectors}
        arrays = [*shared, *(vector._replace(shape=(lengths[vector],)) for vector in vectors)]
        self.shapes = tuple(jax.ShapeDtypeStruct(key.shape, key.dtype) for key in arrays)  # of the packed arrays
        self.is_marked = tuple(key.is_marked for key in arrays)  # whether the leaves of each packed array are

    def tree(self, kind: int) -> Any:
        """Return the tree of a kind, with the shapes and dtypes of its leaves."""
        return jax.tree.unflatten(self._structures[kind], self._leaves[kind])

    @property
    def nbytes(self) -> int:
        """Bytes of one packed tree."""
        return sum(array.size * array.dtype.itemsize for array in self.shapes)

    @property
    def vector_bytes(self) -> int:
        """Bytes of the vectors of one packed tree."""
        shared = {place.array for places in self._places for place in places if place.offset is None}
        vectors = (array for index, array in enumerate(self.shapes) if index not in shared)
        return sum(array.size * array.dtype.itemsize for array in vectors)

    def zeros(self, *leading: int) -> Packed:
        """Return packed arrays of zeros, with leading dims."""
        return tuple(jnp.zeros((*leading, *array.shape), array.dtype) for array in self.shapes)

    def pack(self, kind: int, tree: Any, lib: Any = jnp) -> Packed:
        """Pack a tree of the given kind. lib: jnp or np."""
        packed: list[Any] = [[] for _ in self.shapes]
        for place, leaf in zip(self._places[kind], jax.tree.leaves(tree), strict=True):
            if place.offset is None:
                packed[place.array] = leaf
            else:
                packed[place.array].append(lib.reshape(leaf, -1))
        for index, (parts, shape) in enumerate(zip(packed, self.shapes, strict=True)):
            if isinstance(parts, list) and not parts:  # unused vector, or shared array of an empty tree
                packed[index] = lib.zeros(shape.shape, shape.dtype)
            elif isinstance(parts, list):
                rest = shape.size - sum(part.size for part in parts)
                packed[index] = lib.concatenate([*parts, lib.zeros(rest, shape.dtype)])
        return tuple(packed)

    def unpack(self, kind: int, packed: Sequence[Any]) -> Any:
        """Unpack a tree of the given kind. Leaves are NumPy or JAX arrays, as the packed arrays are."""
        leaves = []
        for place, leaf in zip(self._places[kind], self._leaves[kind], strict=True):
            array = packed[place.array]
            if place.offset is not None:
                array = array[place.offset : place.offset + leaf.size].reshape(leaf.shape)
            leaves.append(array)
        return jax.tree.unflatten(self._structures[kind], leaves)

    def add(self, kind: int, packed: Packed, leaves: Sequence[Any], which: Sequence[int]) -> Packed:
        """Return `packed` with `leaves` added to the leaves numbered `which`. XLA can do this in place."""
        result = list(packed)
        spans: dict[int, list[tuple[int, list[Any]]]] = {}  # by vector: offset and leaves of each contiguous span
        for index, leaf in sorted(zip(which, leaves, strict=True), key=lambda item: item[0]):
            place = self._places[kind][index]
            if place.offset is None:
                result[place.array] += leaf
                continue
            of_vector = spans.setdefault(place.array, [])
            if not of_vector or of_vector[-1][0] + sum(part.size for part in of_vector[-1][1]) != place.offset:
                of_vector.append((place.offset, []))
            of_vector[-1][1].append(leaf.reshape(-1))
        # One addition per contiguous span, because XLA copies the whole vector for every addition to a part of it.
        for array, of_vector in spans.items():
            for offset, parts in of_vector:
                total = jnp.concatenate(parts)
                result[array] = result[array].at[offset : offset + total.size].add(total)
        return tuple(result)

    def write(self, kind: int, slots: Packed, slot: jax.Array, tree: Any) -> Packed:
        """Return `slots`, packed trees stacked along dim 0, with the tree written to number `slot`.

        In an array of which the tree has nothing, it writes a zero, which nothing reads: XLA copies whole arrays that a
        branch returns as they are, unless it is the first branch (openxla/xla, pull request 46314).
        """
        result = list(slots)
        for index in set(range(len(slots))) - {place.array for place in self._places[kind]}:
            zero = jnp.zeros((1,) * slots[index].ndim, slots[index].dtype)
            result[index] = jax.lax.dynamic_update_slice(slots[index], zero, (slot, *[0] * (zero.ndim - 1)))
        for place, leaf in zip(self._places[kind], jax.tree.leaves(tree), strict=True):
            array = result[place.array]
            if place.offset is None:
                result[place.array] = jax.lax.dynamic_update_index_in_dim(array, leaf, slot, 0)
            else:
                part = leaf.reshape(1, -1)
                result[place.array] = jax.lax.dynamic_update_slice(array, part, (slot, place.offset))
        return tuple(result)

    def read(self, kind: int, slots: Packed, slot: jax.Array) -> Any:
        """Return the tree in slot number `slot`."""
        leaves = []
        for place, leaf in zip(self._places[kind], self._leaves[kind], strict=True):
            array = slots[place.array]
            if place.offset is None:
                leaves.append(at_index(array, slot))
            else:
                part = jax.lax.dynamic_slice(array, (slot, place.offset), (1, leaf.size))
                leaves.append(part.reshape(leaf.shape))
        return jax.tree.unflatten(self._structures[kind], leaves)
