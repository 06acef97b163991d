from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.core.plan import Traffic
from jaxpar.exchange.adasum import adasum, combine
from tests.exchange.replicas import axis, close, on_replicas, only, train

SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 5), "b": (7,), "c": ()}


def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    aa, bb, ab = np.vdot(a, a), np.vdot(b, b), np.vdot(a, b)
    return np.asarray((1 - ab / (2 * aa) if aa else 1) * a + (1 - ab / (2 * bb) if bb else 1) * b)


def recursion(rows: list[np.ndarray]) -> np.ndarray:
    """Combine in pairs: in round k, vectors whose numbers differ in bit k."""
    while len(rows) > 1:
        rows = [pair(rows[i], rows[i + 1]) for i in range(0, len(rows), 2)]
    return rows[0]


def draw(n: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    return {k: ((rng.normal(size=(n, *v)) + 0.5) * scale).astype(np.float32) for k, v in SHAPES.items()}


def updates(n: int, rows: dict[str, np.ndarray], learning_rate: float = 1.0) -> dict[str, np.ndarray]:
    """Return the exchange's result if SGD's updates are these rows. It must be the same on all replicas."""
    exchange = adasum(axis(n), optax.sgd(learning_rate))
    params = {k: np.zeros(v.shape[1:], np.float32) for k, v in rows.items()}

    def replica(grads: Any) -> Any:
        return exchange.update(grads, exchange.init(params), params).updates

    result: dict[str, np.ndarray] = only(on_replicas(n, replica, {k: -v / learning_rate for k, v in rows.items()}))
    return result


def test_orthogonal_updates_give_the_sum() -> None:
    rows = np.diag(np.array([1.0, 2, -3, 4], np.float32))
    np.testing.assert_allclose(updates(4, {"a": rows})["a"], [1, 2, -3, 4], 1e-6)


def test_equal_updates_give_the_mean() -> None:
    x = np.random.default_rng(0).normal(size=9).astype(np.float32)
    np.testing.assert_allclose(updates(4, {"a": np.stack([x] * 4)})["a"], x, 1e-6)


def test_parallel_updates_of_any_length_give_the_mean() -> None:
    x = np.random.default_rng(0).normal(size=9).astype(np.float32)
    np.testing.assert_allclose(updates(2, {"a": np.stack([x, 3 * x])})["a"], 2 * x, 1e-6)


def test_zero_with_another_gives_the_other() -> None:
    x = np.random.default_rng(0).normal(size=9).astype(np.float32)
    zero = np.zeros_like(x)
    got = updates(2, {"a": np.stack([x, zero]), "b": np.stack([zero, x]), "c": np.stack([zero, zero])})
    close(got, {"a": x, "b": x, "c": zero})


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_as_the_recursion_in_numpy(n: int) -> None:
    rows = draw(n)
    expected = {k: recursion(list(v.astype(np.float64))) for k, v in rows.items()}
    close(updates(n, rows), expected, 1e-5, 1e-5)


@pytest.mark.parametrize("n", [2, 8])
def test_large_arrays_are_bitwise_the_same_on_all_replicas(n: int) -> None:
    rows = {"a": np.random.default_rng(0).normal(size=(n, 1000)).astype(np.float32)}
    expected = recursion(list(rows["a"].astype(np.float64)))
    np.testing.assert_allclose(updates(n, rows)["a"], expected, 1e-4, 1e-5)


def test_combination_is_bitwise_commutative() -> None:
    """Each operation is commutative. But compilers may fuse operations in one half of the sum, so pairs are ordered."""
    a, b = (jnp.asarray(x, jnp.float32) for x in np.random.default_rng(0).normal(size=(2, 1000)))
    np.testing.assert_array_equal(combine(a, b), combine(b, a))


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_scales_with_the_updates(scale: float) -> None:
    rows = {k: v.astype(np.float32) for k, v in draw(4, scale).items()}
    expected = {k: recursion(list(v.astype(np.float64))) for k, v in rows.items()}
    for name, got in updates(4, rows).items():
        np.testing.assert_allclose(got, expected[name], 1e-5, 1e-5 * scale)


@pytest.mark.parametrize("ratio", [1e-6, 1e-15, 1e-25])
def test_updates_of_unlike_lengths(ratio: float) -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 9)).astype(np.float32)
    rows = np.stack([x, (x + y) * np.float32(ratio)])
    np.testing.assert_allclose(updates(2, {"a": rows})["a"], pair(*rows.astype(np.float64)), 1e-4, 1e-4)


def test_each_replica_has_a_local_optimizer() -> None:
    """Updates are combined, not gradients: here they depend on the gradients' signs, not on their sizes."""
    rng = np.random.default_rng(0)
    grads = {"a": rng.normal(size=(4, 3, 6)).astype(np.float32)}
    params, _, _, state = train(4, adasum(axis(4), optax.adam(0.1)), {"a": np.ones(6, np.float32)}, grads)
    m, v, x = np.zeros((4, 6)), np.zeros((4, 6)), np.ones(6)
    for step in range(3):
        g = grads["a"][:, step].astype(np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        local = -0.1 * m / (1 - 0.9 ** (step + 1)) / (np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-8)
        x = x + recursion(list(local))
        np.testing.assert_allclose(params["a"][:, step], np.stack([x] * 4), 1e-5)
    np.testing.assert_allclose(state.optimizer[0].mu["a"], m, 1e-5)


@pytest.mark.parametrize(("n", "rounds"), [(1, 0), (2, 1), (4, 2), (8, 3)])
def test_traffic_is_all_of_it_each_round(n: int, rounds: int) -> None:
    exchange = adasum(axis(n), optax.sgd(1.0))
    found = exchange.traffic({k: np.zeros(v, np.float32) for k, v in SHAPES.items()}, 1)
    each = Traffic("collective-permute", "float32", "data", 4 * 23, 1)
    assert found == [each._replace(distance=2**bit) for bit in range(rounds)]
