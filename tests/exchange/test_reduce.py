import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.exchange import Axis, Traffic, reduce
from jaxpar.exchange.reduce import Reducer
from tests.exchange.replicas import axis, on_replicas, only

LENGTH = 48
COLLECTIVE = re.compile(r" = (psum|ppermute|reduce_scatter|all_gather)\w*\[")
REPLICAS = (1, 2, 3, 4, 8)
PLAIN: dict[str, Callable[[Axis], Reducer]] = {
    "psum": reduce.psum,
    "ring": reduce.ring,
    "push_pull": reduce.push_pull,
    "groups of 2": lambda axis: reduce.hierarchical(axis, 2),
    "groups of 4": lambda axis: reduce.hierarchical(axis, 4),
}


def possible(name: str, n: int) -> bool:
    return not name.startswith("groups") or n % int(name[-1]) == 0


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
    plain = {name: make(axis(n)) for name, make in PLAIN.items() if possible(name, n)}
    predivided = {f"{name} / {factor}": reduce.predivide(r, factor) for name, r in plain.items() for factor in (3.0, 4)}
    results = means(n, plain | predivided, x)
    assert results.keys() == (plain | predivided).keys()
    for name, got in results.items():
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, x.astype(np.float64).mean(0), 2e-6, 2e-6, err_msg=name)


@pytest.mark.parametrize("n", REPLICAS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_cast_vectors_are_sent_in_its_dtype(n: int, dtype: Any) -> None:
    x = draw(n)
    reducers = {name: reduce.cast(make(axis(n)), dtype) for name, make in PLAIN.items() if possible(name, n)}
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
        return reduce.cast(PLAIN[name](axis(8)), jnp.float16).mean(x, ())[0]

    program = str(jax.make_jaxpr(mean, axis_env=[("data", 8)])(jnp.zeros(LENGTH)))
    sent = [line for line in program.splitlines() if COLLECTIVE.search(line)]
    assert len(sent) == {"psum": 1, "ring": 14, "push_pull": 2}.get(name, 3)
    assert all((":u16[" if name == "ring" else ":f16[") in line for line in sent)  # the ring sends bits


def test_predivision_keeps_a_narrow_sum_in_range() -> None:
    x = np.full((8, LENGTH), 3e4, np.float32)
    plain = reduce.psum(axis(8))
    reducers = {"plain": plain, "divided": reduce.predivide(plain, 8)}
    results = means(8, {name: reduce.cast(reducer, jnp.float16) for name, reducer in reducers.items()}, x)
    assert np.all(np.isinf(results["plain"]))
    np.testing.assert_allclose(results["divided"], 3e4, 1e-3)


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
    for name, make in PLAIN.items():
        if possible(name, n):
            sent_dtype = jnp.uint16 if name == "ring" and width == 2 else dtype  # the ring sends bits
            for reducer in (make(axis(n)), reduce.predivide(make(axis(n)), 2)):
                assert_traffic(reducer.traffic(LENGTH, dtype), sent_dtype, expected[name])
            assert_traffic(reduce.cast(make(axis(n)), dtype).traffic(LENGTH, jnp.float32), sent_dtype, expected[name])


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
