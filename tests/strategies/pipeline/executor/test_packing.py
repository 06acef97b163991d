"""Packing is compared with plain trees: it must be lossless, and need no more memory than the largest tree."""

from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.strategies.pipeline.executor.packing import Packing

F32, BF16 = np.dtype("float32"), np.dtype(jnp.bfloat16)
Spec = tuple[tuple[int, ...], Any]  # shape, dtype of a leaf


def tree(seed: int, **specs: Spec) -> dict[str, np.ndarray]:
    """Return a tree of random integers, which every dtype represents exactly."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-99, 99, shape).astype(dtype) for name, (shape, dtype) in specs.items()}


MATRIX, BIAS, MASK = ((3, 4), F32), ((4,), F32), ((5,), np.dtype(bool))
TREES = [
    tree(0, w=MATRIX, b=BIAS, v=MATRIX),
    tree(1, table=((7, 2), F32), b=BIAS, w=MATRIX, gain=((), F32)),
    tree(2, w=MATRIX, u=MATRIX, v=MATRIX, half=((2, 3), BF16), mask=MASK, b=BIAS),
]


def same(got: Any, expected: Any) -> None:
    """Assert that trees are bitwise equal, with the same structure, shapes and dtypes."""

    def compare(a: Any, b: Any) -> None:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)

    jax.tree.map(compare, got, expected)


def size(leaves: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(leaves))


def test_form_by_hand() -> None:
    """All three trees share a matrix and a bias. The remaining leaves are in one vector per dtype."""
    packing = Packing(TREES)
    forms = [(shape.shape, shape.dtype) for shape in packing.shapes]
    assert Counter(forms[:2]) == Counter([MATRIX, BIAS])
    assert forms[2:] == [
        ((6,), BF16),
        ((5,), np.dtype(bool)),
        ((24,), F32),
    ]  # 24: u and v of the last tree; the second tree needs 15
    assert packing.nbytes == 48 + 16 + 12 + 5 + 96 == size(TREES[2])
    assert packing.vector_bytes == 12 + 5 + 96
    packed = packing.pack(1, TREES[1])
    # Leaves of a dict are sorted by key: b, gain, table, w.
    np.testing.assert_array_equal(packed[4], np.r_[TREES[1]["gain"], TREES[1]["table"].ravel(), np.zeros(24 - 15)])


@pytest.mark.parametrize("lib", [np, jnp])
def test_there_and_back(lib: Any) -> None:
    packing = Packing(TREES)
    for kind, held in enumerate(TREES):
        packed = packing.pack(kind, jax.tree.map(lib.asarray, held), lib)
        assert [(array.shape, array.dtype) for array in packed] == [(s.shape, s.dtype) for s in packing.shapes]
        assert all(isinstance(array, np.ndarray if lib is np else jax.Array) for array in packed)
        same(packing.unpack(kind, packed), held)
        assert packing.tree(kind) == jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), held)


def test_every_array_is_written() -> None:
    """XLA copies an array that a branch returns as it is. What is written where a tree has nothing is in its slot."""
    packing = Packing([*TREES, {}])
    slots = tuple(jnp.ones((3, *shape.shape), shape.dtype) for shape in packing.shapes)
    for kind, held in enumerate([*TREES, {}]):
        write = partial(packing.write, kind, slot=jnp.int32(1), tree=jax.tree.map(jnp.asarray, held))
        traced = jax.make_jaxpr(write)(slots).jaxpr
        assert not set(traced.invars) & set(traced.outvars), kind
        written = write(slots)
        same(packing.read(kind, written, jnp.int32(1)), held)
        for before, after in zip(slots, written, strict=True):
            np.testing.assert_array_equal(before[::2], after[::2])


def test_equal_trees_have_no_vectors() -> None:
    held = tree(3, w=MATRIX, b=BIAS, v=MATRIX)
    other = {"x": {"y": held["v"], "z": held["b"]}, "z": held["w"]}
    packing = Packing([held, other])
    same(packing.unpack(0, packing.pack(0, held)), held)
    same(packing.unpack(1, packing.pack(1, other)), other)
    assert sorted(shape.shape for shape in packing.shapes) == [(3, 4), (3, 4), (4,)]
    assert packing.nbytes == size(held)
    assert Packing([{}]).shapes == ()


def test_an_empty_tree_costs_nothing() -> None:
    """The last stage sends nothing, but the outputs of the other stages must still be stored unchanged."""
    held = tree(4, w=MATRIX)
    packing = Packing([held, {}, held])
    assert [shape.shape for shape in packing.shapes] == [(3, 4)]
    assert packing.tree(1) == packing.unpack(1, packing.pack(0, held)) == {}


def test_arrays_have_either_marked_leaves_or_others() -> None:
    """Leaves of one shape, but different marks, do not share an array. Nor a vector."""
    trees = [tree(3, a=BIAS, b=BIAS, c=MATRIX), tree(4, a=BIAS, b=BIAS, c=((2,), F32))]
    packing = Packing(trees, [[True, False, True], [False, False, False]])
    assert [shape.shape for shape in packing.shapes] == [(4,), (6,), (16,)]
    assert packing.is_marked == (False, False, True)
    for kind, held in enumerate(trees):
        same(packing.unpack(kind, packing.pack(kind, held, np)), held)


def test_no_more_room_than_the_fullest_tree() -> None:
    """With a single dtype, the packed form is exactly as large as the largest tree."""
    rng = np.random.default_rng(5)
    shapes: list[tuple[int, ...]] = [(2, 2), (4,), (3,), (1, 5), ()]
    for _ in range(30):
        trees = [[np.zeros(shapes[i], F32) for i in rng.integers(0, 5, rng.integers(1, 8))] for _ in range(4)]
        assert Packing(trees).nbytes == max(map(size, trees))


def test_slots() -> None:
    """Trees of different kinds are in different slots. Overwriting a slot must not change the others."""
    packing, rng = Packing(TREES), np.random.default_rng(6)
    slots, held = packing.zeros(3), dict[int, tuple[int, Any]]()
    write, read = jax.jit(packing.write, static_argnums=0), jax.jit(packing.read, static_argnums=0)
    for _ in range(12):
        slot, kind = int(rng.integers(3)), int(rng.integers(3))
        values = jax.tree.map(lambda leaf: rng.integers(-99, 99, leaf.shape).astype(leaf.dtype), TREES[kind])
        slots = write(kind, slots, jnp.int32(slot), values)
        held[slot] = (kind, values)
        for where, (which, expected) in held.items():
            same(read(which, slots, jnp.int32(where)), expected)


def test_add_any_of_the_leaves() -> None:
    """The leaves may be adjacent in a vector or not, and in any order."""
    held = tree(7, a=BIAS, b=((2, 3), F32), c=((5,), F32), d=((1, 2), F32), e=BIAS, f=((3,), BF16), g=((2,), F32))
    packing, names, rng = Packing([{"only": held["a"]}, held]), list(held), np.random.default_rng(8)
    packed = packing.pack(1, jax.tree.map(jnp.asarray, held))
    for number in (0, 1, 2, 3, 4, 4, 5, 5, 7):
        which = rng.permutation(len(names))[:number].tolist()
        more = {names[index]: np.full_like(held[names[index]], index + 1) for index in which}
        got = packing.add(1, packed, [jnp.asarray(leaf) for leaf in more.values()], which)
        same(packing.unpack(1, got), {name: leaf + more.get(name, np.zeros_like(leaf)) for name, leaf in held.items()})


def test_a_tree_without_leaves_has_zeros_for_what_the_others_share() -> None:
    leaf = jax.ShapeDtypeStruct((2, 3), np.float32)
    packing = Packing([{"a": leaf}, {}, {"a": leaf, "b": jax.ShapeDtypeStruct((4,), np.float32)}])
    for lib in (np, jnp):
        packed = packing.pack(1, {}, lib)
        assert [array.shape for array in packed] == [(2, 3), (4,)]
        assert not any(array.any() for array in packed)
    assert packing.unpack(1, packing.pack(1, {})) == {}
