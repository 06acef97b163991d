import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpar.exchange import reduce
from jaxpar.exchange.fuse import Piece, buckets, fused, in_layer_order
from jaxpar.exchange.named import make_all_reduce
from tests.exchange.replicas import axis, on_replicas, only

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
MODES = list(itertools.product((False, True), (False, True)))  # cut, backwards


def leaves(rng: np.random.Generator) -> list[Any]:
    sizes = rng.choice([0, 1, 2, 3, 7, 16, 50], rng.integers(0, 9))
    return [jax.ShapeDtypeStruct((int(size),), DTYPES[rng.choice(3, p=[0.6, 0.2, 0.2])]) for size in sizes]


@pytest.mark.parametrize(("cut", "backwards"), MODES)
@pytest.mark.parametrize("num_bytes", [1, 4, 10, 32, 64, 1000])
def test_buckets_have_every_element_once_in_order(num_bytes: int, cut: bool, backwards: bool) -> None:
    rng = np.random.default_rng(num_bytes)
    for _ in range(50):
        arrays = leaves(rng)
        plan = buckets(arrays, num_bytes, cut=cut, backwards=backwards)
        elements = [(leaf, i) for bucket in plan for leaf, start, stop in bucket for i in range(start, stop)]
        numbers = list(range(len(arrays)))[:: -1 if backwards else 1]
        assert elements == [(number, i) for number in numbers for i in range(arrays[number].size)]
        assert all(piece.stop > piece.start for bucket in plan for piece in bucket)


@pytest.mark.parametrize(("cut", "backwards"), MODES)
@pytest.mark.parametrize("num_bytes", [1, 4, 10, 32, 64, 1000])
def test_buckets_are_of_one_dtype_and_as_full_as_may_be(num_bytes: int, cut: bool, backwards: bool) -> None:
    rng = np.random.default_rng(num_bytes)
    for _ in range(50):
        arrays = leaves(rng)
        plan = buckets(arrays, num_bytes, cut=cut, backwards=backwards)
        lengths = [sum(piece.stop - piece.start for piece in bucket) for bucket in plan]
        dtypes = [{arrays[piece.leaf].dtype for piece in bucket} for bucket in plan]
        limits = [max(1, num_bytes // next(iter(dtype)).itemsize) for dtype in dtypes]
        assert all(len(dtype) == 1 for dtype in dtypes)
        for bucket, length, limit in zip(plan, lengths, limits, strict=True):
            assert length <= limit or (not cut and len(bucket) == 1)
        for i in range(1, len(plan)):
            begin = plan[i][0]
            needed = 1 if cut else begin.stop - begin.start
            assert dtypes[i] != dtypes[i - 1] or lengths[i - 1] + needed > limits[i]


def test_buckets_of_three_arrays() -> None:
    arrays = [np.zeros(5, np.float32), np.zeros((2, 3), np.float32), np.zeros(1, np.float32)]
    whole = buckets(arrays, 28, cut=False, backwards=True)
    assert whole == [[Piece(2, 0, 1), Piece(1, 0, 6)], [Piece(0, 0, 5)]]
    assert buckets(arrays, 16, cut=True, backwards=False) == [
        [Piece(0, 0, 4)],
        [Piece(0, 4, 5), Piece(1, 0, 3)],
        [Piece(1, 3, 6), Piece(2, 0, 1)],
    ]


def torch_buckets(sizes: list[int], limits: list[int]) -> list[list[int]]:
    """Port of PyTorch's compute_bucket_assignment_by_size, for tensors of one dtype. sizes: bytes, in its order."""
    result: list[list[int]] = []
    bucket: list[int] = []
    total = 0
    for number, size in enumerate(sizes):
        bucket.append(number)
        total += size
        if total >= limits[0]:
            result.append(bucket)
            bucket, total, limits = [], 0, limits[1:] or limits
    return [*result, bucket] if bucket else result


@pytest.mark.parametrize(("num_bytes", "first"), [(40, 8), (30, 30), (64, 16), (1000, 10)])
def test_buckets_of_ddp_are_those_of_torch(num_bytes: int, first: int) -> None:
    rng = np.random.default_rng(num_bytes)
    for _ in range(50):
        sizes = rng.choice([1, 2, 3, 7, 16, 50], 12).tolist()
        arrays = [jax.ShapeDtypeStruct((size,), np.float32) for size in sizes]
        plan = buckets(arrays, num_bytes, cut=False, backwards=True, first_bytes=first, overfull=True)
        backwards = [4 * size for size in sizes[::-1]]
        expected = torch_buckets(backwards, [first, num_bytes])
        assert [[len(sizes) - 1 - piece.leaf for piece in bucket] for bucket in plan] == expected


def test_small_arrays_are_not_compressed() -> None:
    """Arrays of fewer bytes than the limit are averaged exactly, others lossily, and all come back in their places."""
    rng = np.random.default_rng(0)
    sizes = {"a": 3, "b": 40, "c": 1, "d": 16, "e": 17}
    tree = {name: rng.normal(size=(2, size)).astype(np.float32) for name, size in sizes.items()}
    all_reduce = make_all_reduce("byteps_topk", axis(2), 0.0, ratio=0.25, min_compress_bytes=4 * 17)
    got = only(on_replicas(2, lambda x: all_reduce.mean(x, all_reduce.init(x))[0], tree))
    for name, x in tree.items():
        if name in ("a", "c", "d"):
            np.testing.assert_allclose(got[name], x.mean(0), rtol=1e-6)
    sent = np.concatenate([got["b"], got["e"]])
    mean = np.concatenate([tree["b"].mean(0), tree["e"].mean(0)])
    # Of the 28 or 29 elements of a shard, a worker sends 8 to each server, which sends 8 of the mean.
    assert 8 <= np.count_nonzero(sent) <= 16
    assert np.linalg.norm(sent - mean) < np.linalg.norm(mean)
    traffic = {(one.kind, one.dtype): one.nbytes for one in all_reduce.traffic({k: x[0] for k, x in tree.items()})}
    assert traffic == {
        ("reduce-scatter", "float32"): 20 * 4 / 2,  # of 20 exact elements
        ("all-gather", "float32"): 20 * 4 / 2,
        ("all-to-all", "uint8"): 8 * 8,  # 8 values and indices, to the other replica
        ("all-gather", "uint8"): 8 * 8,
    }


def test_ddp_starts_with_a_small_bucket() -> None:
    """1 MiB, as in PyTorch: of five arrays of 1 MiB, the last one is sent first, alone."""
    arrays = [jax.ShapeDtypeStruct((2**18,), np.float32) for _ in range(5)]
    messages = [
        len(make_all_reduce("ddp", axis(2), 0.0, bucket_bytes=size * 2**20).traffic(arrays)) for size in (1, 2, 25)
    ]
    assert messages == [5, 3, 2]


def assert_fused_mean(n: int, tree: dict[str, np.ndarray], num_bytes: int, cut: bool, backwards: bool) -> None:
    all_reduce = fused(reduce.ring(axis(n)), num_bytes, cut=cut, backwards=backwards)

    def mean(tree: Any) -> Any:
        return all_reduce.mean(tree, all_reduce.init(tree))[0]

    got = only(on_replicas(n, mean, tree))
    assert got.keys() == tree.keys()
    for name, x in tree.items():
        rounding = (n + 2) * float(jnp.finfo(x.dtype).eps) / 2
        assert (got[name].shape, got[name].dtype) == (x.shape[1:], x.dtype)
        error = np.abs(got[name].astype(np.float64) - x.astype(np.float64).mean(0))
        assert np.all(error <= rounding * np.abs(x.astype(np.float64)).mean(0)), name


def draw(n: int, shapes: dict[str, tuple[tuple[int, ...], Any]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(n, *shape)).astype(dtype) for name, (shape, dtype) in shapes.items()}


@pytest.mark.parametrize(("cut", "backwards"), MODES)
def test_a_tree_comes_back_as_its_mean(cut: bool, backwards: bool) -> None:
    shapes = {
        "a": ((3, 5), np.float32),
        "b": ((), np.float32),
        "c": ((1,), np.float16),
        "d": ((2, 2, 3), np.float16),
        "e": ((37,), np.float32),  # larger than a bucket
        "f": ((6,), ml_dtypes.bfloat16),
        "g": ((4,), np.float32),
    }
    assert_fused_mean(3, draw(3, shapes), 64, cut, backwards)


def test_arrays_without_elements_come_back() -> None:
    shapes = {"a": ((2,), np.float32), "b": ((0, 3), np.float32), "c": ((3,), np.float32)}
    assert_fused_mean(2, draw(2, shapes), 64, False, True)


def test_each_vector_has_a_state_of_its_length_and_traffic() -> None:
    counting = reduce.ring(axis(4))._replace(init=lambda length, _key: length)
    tree = {"a": np.zeros(5, np.float32), "b": np.zeros(6, np.float16), "c": np.zeros(9, np.float16)}
    all_reduce = fused(counting, 20, cut=True)
    assert all_reduce.init(tree) == (12, 8, 8)  # 10 of c and b, 5 of b, 5 of a: multiples of 4
    traffic = all_reduce.traffic(tree)
    assert [one.dtype for one in traffic] == ["uint16", "uint16", "float32"]
    assert [one.nbytes for one in traffic] == [1.5 * 12 * 2, 1.5 * 8 * 2, 1.5 * 8 * 4]
    assert [one.messages for one in traffic] == [6, 6, 6]  # 2 (4 - 1) for each vector


def test_states_stay_with_their_vectors() -> None:
    def mean(x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        return x, state + x[0]

    mine = reduce.psum(axis(1))._replace(init=lambda length, _key: 100.0 * length, mean=mean)
    all_reduce = fused(mine, 8, backwards=True)
    tree = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0])}
    _, state = all_reduce.mean(tree, all_reduce.init(tree))
    assert [float(one) for one in state] == [103.0, 201.0]


def test_vectors_follow_the_layers() -> None:
    """Buckets are in the order of layers, not of names, and the tree keeps its structure."""
    tree = {
        "block_10": jnp.array([3.0]),
        "block_2": jnp.array([2.0]),
        "embed": jnp.array([1.0]),
        "head": jnp.array([4.0]),
    }
    layers = ["embed", "block_2", "block_10", "head"]
    seen: list[float] = []

    def mean(x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        seen.append(float(x[0]))
        return 10 * x, state

    all_reduce = in_layer_order(fused(reduce.psum(axis(1))._replace(mean=mean), 4), layers)
    got, _ = all_reduce.mean(tree, all_reduce.init(tree))
    assert seen == [4, 3, 2, 1]
    assert len(all_reduce.traffic(tree)) == 4
    assert {name: float(x[0]) for name, x in got.items()} == {name: 10 * float(x[0]) for name, x in tree.items()}
