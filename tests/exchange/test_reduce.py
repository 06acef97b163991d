import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxpar.exchange import Traffic, reduce
from jaxpar.exchange.reduce import Reducer
from tests.exchange.replicas import axis, on_replicas, only

LENGTH = 48
COLLECTIVE = re.compile(r" = (psum|ppermute|reduce_scatter|all_gather)\w*\[")
REPLICAS = (1, 2, 3, 4, 8)
PLAIN: dict[str, Callable[..., Reducer]] = {
    "psum": reduce.psum,
    "ring": reduce.ring,
    "push_pull": reduce.push_pull,
    "groups of 2": partial(reduce.hierarchical, group=2),
    "groups of 4": partial(reduce.hierarchical, group=4),
    "push_pull between groups of 2": partial(reduce.hierarchical, group=2, has_servers=True),
}


def possible(name: str, n: int) -> bool:
    return "groups" not in name or n % int(name[-1]) == 0


def means(n: int, reducers: dict[str, Reducer], x: np.ndarray) -> dict[str, np.ndarray]:
    """Return the mean computed by each reducer. All of them are stateless."""

    def all_of_them(x: jax.Array) -> Any:
        return {name: reducer.mean(x, reducer.init(x.size, jax.random.key(0)))[0] for name, reducer in reducers.items()}

    result: dict[str, np.ndarray] = only(on_replicas(n, all_of_them, x))
    return result


def draw(n: int) -> np.ndarray:
    return np.random.default_rng(n).normal(1, 2, size=(n, LENGTH)).astype(np.float32)


@pytest.mark.parametrize("n", REPLICAS)
def test_mean_is_the_same_on_all_replicas(n: int) -> None:
    x = draw(n)
    makes = {name: make for name, make in PLAIN.items() if possible(name, n)}
    reducers = {
        f"{name} / {factor}": make(axis(n), predivide=factor)
        for name, make in makes.items()
        for factor in (1.0, 3.0, n)
    }
    results = means(n, reducers, x)
    assert results.keys() == reducers.keys()
    for name, got in results.items():
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, x.astype(np.float64).mean(0), 2e-6, 2e-6, err_msg=name)


@pytest.mark.parametrize("n", REPLICAS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_cast_vectors_are_sent_in_its_dtype(n: int, dtype: Any) -> None:
    x = draw(n)
    reducers = {name: make(axis(n), dtype=dtype) for name, make in PLAIN.items() if possible(name, n)}
    rounding = float(jnp.finfo(dtype).eps) / 2
    terms = np.abs(x).astype(np.float64).mean(0)
    for name, got in means(n, reducers, x).items():
        assert got.dtype == np.float32
        # each term is rounded once, and so are n - 1 sums and a quotient
        assert np.all(np.abs(got - x.astype(np.float64).mean(0)) <= (n + 2) * rounding * terms), name
        assert np.any(got != x.astype(np.float64).mean(0).astype(np.float32)), name


@pytest.mark.parametrize("name", PLAIN)
def test_collectives_of_a_cast_are_in_its_dtype(name: str) -> None:
    def mean(x: jax.Array) -> jax.Array:
        return PLAIN[name](axis(8), dtype=jnp.float16).mean(x, ())[0]

    mesh, same = Mesh(np.array(jax.devices()), ("data",)), PartitionSpec()
    mapped = jax.shard_map(mean, mesh=mesh, in_specs=same, out_specs=same, check_vma=False)
    program = str(jax.make_jaxpr(mapped)(jnp.zeros(LENGTH)))
    sent = [line for line in program.splitlines() if COLLECTIVE.search(line)]
    assert len(sent) == {"psum": 1, "ring": 14, "push_pull": 2, "push_pull between groups of 2": 4}.get(name, 3)
    assert all((":u16[" if name == "ring" else ":f16[") in line for line in sent)  # the ring sends bits


def test_predivision_keeps_a_narrow_sum_in_range() -> None:
    x = np.full((8, LENGTH), 3e4, np.float32)
    results = means(8, {str(factor): reduce.psum(axis(8), predivide=factor, dtype=jnp.float16) for factor in (1, 8)}, x)
    assert np.all(np.isinf(results["1"]))
    np.testing.assert_allclose(results["8"], 3e4, 1e-3)


def in_float16(n: int, predivide: float, x: np.ndarray) -> np.ndarray:
    """The original's formula in NumPy: a quotient, n - 1 sums in the order of the ring, and a quotient, in float16."""
    terms = (x.astype(np.float16) / np.float16(predivide)).astype(np.float16)
    shards = terms.reshape(n, n, -1)  # replica, shard, element
    totals = []
    for shard in range(n):  # its sum begins at the replica of its number and travels round the ring
        total = shards[shard, shard]
        for step in range(1, n):
            total = shards[(shard + step) % n, shard] + total
        totals.append(total)
    return (np.concatenate(totals) / np.float16(n / predivide)).astype(np.float32)


@pytest.mark.parametrize("predivide", [1.0, 4.0, 8.0])
def test_a_ring_in_float16_is_the_formula_of_horovod(predivide: float) -> None:
    """Small gradients: dividing by n in float16 between the sum and its multiplication would lose three bits more."""
    x = np.random.default_rng(0).normal(2e-4, 5e-5, size=(8, LENGTH)).astype(np.float32)
    got = means(8, {"ring": reduce.ring(axis(8), predivide=predivide, dtype=jnp.float16)}, x)["ring"]
    np.testing.assert_array_equal(got, in_float16(8, predivide, x))


@pytest.mark.parametrize("n", REPLICAS)
@pytest.mark.parametrize(("dtype", "width"), [(jnp.float32, 4), (jnp.float16, 2), (jnp.bfloat16, 2)])
def test_traffic_is_what_rings_send(n: int, dtype: Any, width: int) -> None:
    payload, share = LENGTH * width, (n - 1) / n
    expected = {
        "psum": [("all-reduce", 2 * share * payload)],
        "ring": [("collective-permute", 2 * share * payload)],
        "push_pull": [("reduce-scatter", share * payload), ("all-gather", share * payload)],
    }
    for group in (2, 4):
        within = (group - 1) / group * payload
        between = 2 * (n / group - 1) / (n / group) * payload / group
        expected[f"groups of {group}"] = [("reduce-scatter", within), ("all-reduce", between), ("all-gather", within)]
        half = [("reduce-scatter", between / 2), ("all-gather", between / 2)]
        expected[f"push_pull between groups of {group}"] = [("reduce-scatter", within), *half, ("all-gather", within)]
    for name, make in PLAIN.items():
        if possible(name, n):
            sent_dtype = jnp.uint16 if name == "ring" and width == 2 else dtype  # the ring sends bits
            for predivide in (1, 2):
                reducer = make(axis(n), predivide=predivide)
                assert_traffic(reducer.traffic(LENGTH, dtype), sent_dtype, expected[name])
            assert_traffic(make(axis(n), dtype=dtype).traffic(LENGTH, jnp.float32), sent_dtype, expected[name])


def assert_traffic(got: list[Traffic], dtype: Any, expected: list[tuple[str, float]]) -> None:
    assert [one.kind for one in got] == [kind for kind, _ in expected]
    assert {(one.dtype, one.axis) for one in got} == {(jnp.dtype(dtype).name, "data")}
    np.testing.assert_allclose([one.nbytes for one in got], [nbytes for _, nbytes in expected])


@pytest.mark.parametrize("n", [2, 4, 8])
def test_rings_send_the_traffic_they_state(n: int) -> None:
    program = str(
        jax.make_jaxpr(lambda x: reduce.ring(axis(n)).mean(x, ())[0], axis_env=[("data", n)])(jnp.zeros(LENGTH))
    )
    sent = [line for line in program.splitlines() if "ppermute[" in line]
    [traffic] = reduce.ring(axis(n)).traffic(LENGTH, jnp.float32)
    assert len(sent) == traffic.messages == 2 * (n - 1)
    assert all(f":f32[{LENGTH // n}] =" in line for line in sent)
