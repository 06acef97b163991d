"""One form of arrays for trees that differ: what stages with different layers hold, in one program for all devices.

The devices of a mesh run one program, so an array has one shape on all of them. Arrays that all the trees have alike
(those without any leaf apart) are kept as they are: they are "shared". What else a tree has lies end to end in one
vector a dtype, as long as the longest tree needs. So no device holds more than the fullest one does, and a pipeline of
equal stages has no vectors.
"""

import functools
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Packed = tuple[jax.Array, ...]  # the shared arrays, then the vectors


class _Place(NamedTuple):
    """The place of a leaf: packed[array], as a whole or from `offset` on."""

    array: int
    offset: int | None


class Packing:
    """The packed form of some trees, each known by its kind: its index among them.

    Attributes:
      shapes: of the packed form.
    """

    def __init__(self, trees: Sequence[Any]):
        """trees: with leaves that have a shape and a dtype."""
        flat = [jax.tree.flatten(tree) for tree in trees]
        self._structures = [structure for _, structure in flat]
        self._leaves = [[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves] for leaves, _ in flat]
        counts = [Counter((leaf.shape, leaf.dtype) for leaf in leaves) for leaves in self._leaves]
        some = [count for count in counts if count] or [Counter()]
        common = functools.reduce(operator.and_, some)
        self.shapes = [jax.ShapeDtypeStruct(*key) for key in common.elements()]
        first = {}  # the first shared array of a shape and dtype
        for index, array in reversed(list(enumerate(self.shapes))):
            first[array.shape, array.dtype] = index
        dtypes = sorted({key[1] for count in counts for key in count - common}, key=str)
        vectors = {dtype: len(self.shapes) + index for index, dtype in enumerate(dtypes)}
        lengths = dict.fromkeys(dtypes, 0)
        self._places: list[list[_Place]] = []
        for leaves in self._leaves:
            seen, filled = Counter[Any](), dict.fromkeys(dtypes, 0)
            places = []
            for leaf in leaves:
                key = (leaf.shape, leaf.dtype)
                if seen[key] < common[key]:
                    places.append(_Place(first[key] + seen[key], None))
                    seen[key] += 1
                else:
                    places.append(_Place(vectors[leaf.dtype], filled[leaf.dtype]))
                    filled[leaf.dtype] += leaf.size
            self._places.append(places)
            lengths = {dtype: max(lengths[dtype], filled[dtype]) for dtype in dtypes}
        self.shapes += [jax.ShapeDtypeStruct((lengths[dtype],), dtype) for dtype in dtypes]

    def tree(self, kind: int) -> Any:
        """Return the tree of a kind, abstract."""
        return jax.tree.unflatten(self._structures[kind], self._leaves[kind])

    @property
    def nbytes(self) -> int:
        """Bytes of one packed form."""
        return sum(array.size * array.dtype.itemsize for array in self.shapes)

    def zeros(self, *leading: int) -> Packed:
        """Return the packed form of zeros, with leading dims."""
        return tuple(jnp.zeros((*leading, *array.shape), array.dtype) for array in self.shapes)

    def pack(self, kind: int, tree: Any, lib: Any = jnp) -> Packed:
        """Pack a tree of a kind. lib: jnp or np."""
        packed: list[Any] = [[] for _ in self.shapes]
        for place, leaf in zip(self._places[kind], jax.tree.leaves(tree), strict=True):
            if place.offset is None:
                packed[place.array] = leaf
            else:
                packed[place.array].append(lib.reshape(leaf, -1))
        for index, (parts, shape) in enumerate(zip(packed, self.shapes, strict=True)):
            if isinstance(parts, list) and not parts:  # a vector, or shared by all that have any leaf
                packed[index] = lib.zeros(shape.shape, shape.dtype)
            elif isinstance(parts, list):
                rest = shape.size - sum(part.size for part in parts)
                packed[index] = lib.concatenate([*parts, lib.zeros(rest, shape.dtype)])
        return tuple(packed)

    def unpack(self, kind: int, packed: Sequence[Any]) -> Any:
        """Return the tree, of the arrays' own type (NumPy or JAX)."""
        leaves = []
        for place, leaf in zip(self._places[kind], self._leaves[kind], strict=True):
            array = packed[place.array]
            if place.offset is not None:
                array = array[place.offset : place.offset + leaf.size].reshape(leaf.shape)
            leaves.append(array)
        return jax.tree.unflatten(self._structures[kind], leaves)

    def add(self, kind: int, packed: Packed, leaves: Sequence[Any], which: Sequence[int]) -> Packed:
        """Return `packed` plus leaves of the tree, those of numbers `which`; in place where XLA can."""
        result = list(packed)
        spans: dict[int, list[tuple[int, list[Any]]]] = {}  # by vector: where neighbours begin, and they
        for index, leaf in sorted(zip(which, leaves, strict=True), key=lambda item: item[0]):
            place = self._places[kind][index]
            if place.offset is None:
                result[place.array] += leaf
                continue
            of_vector = spans.setdefault(place.array, [])
            if not of_vector or of_vector[-1][0] + sum(part.size for part in of_vector[-1][1]) != place.offset:
                of_vector.append((place.offset, []))
            of_vector[-1][1].append(leaf.reshape(-1))
        # Neighbours at once: XLA copies the whole vector for each addition to a part of it.
        for array, of_vector in spans.items():
            for offset, parts in of_vector:
                total = jnp.concatenate(parts)
                result[array] = result[array].at[offset : offset + total.size].add(total)
        return tuple(result)

    def replace(self, kind: int, packed: Packed, index: int, leaf: Any) -> Packed:
        """Return `packed` with another leaf of number `index`."""
        result, place = list(packed), self._places[kind][index]
        if place.offset is None:
            result[place.array] = leaf
        else:
            span = slice(place.offset, place.offset + leaf.size)
            result[place.array] = result[place.array].at[span].set(leaf.reshape(-1))
        return tuple(result)

    def write(self, kind: int, slots: Packed, slot: jax.Array, tree: Any) -> Packed:
        """Return `slots`, packed forms one below the other, with the tree in number `slot`."""
        result = list(slots)
        for place, leaf in zip(self._places[kind], jax.tree.leaves(tree), strict=True):
            array = result[place.array]
            if place.offset is None:
                result[place.array] = jax.lax.dynamic_update_index_in_dim(array, leaf, slot, 0)
            else:
                part = leaf.reshape(1, -1)
                result[place.array] = jax.lax.dynamic_update_slice(array, part, (slot, place.offset))
        return tuple(result)

    def read(self, kind: int, slots: Packed, slot: jax.Array) -> Any:
        """Return the tree in number `slot`."""
        leaves = []
        for place, leaf in zip(self._places[kind], self._leaves[kind], strict=True):
            array = slots[place.array]
            if place.offset is None:
                leaves.append(jax.lax.dynamic_index_in_dim(array, slot, 0, keepdims=False))
            else:
                part = jax.lax.dynamic_slice(array, (slot, place.offset), (1, leaf.size))
                leaves.append(part.reshape(leaf.shape))
        return jax.tree.unflatten(self._structures[kind], leaves)
