from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.exchange import gradients
from jaxpar.exchange.compress import Compressor, dithering, error_feedback, float8, min_max_uint8, onebit, randomk, topk
from jaxpar.exchange.fuse import fused
from jaxpar.exchange.reduce import Reducer
from jaxpar.exchange.scatter_gather import in_groups, scatter_gather
from tests.exchange import compressors
from tests.exchange.replicas import axis, on_replicas, only

STEPS, LENGTH = 5, 48
FEEDBACK = {"onebit", "topk"}
PAIRS: dict[str, tuple[Compressor, compressors.Lossy]] = {
    "onebit": (error_feedback(onebit(block=4)), compressors.onebit("mean", 4)),
    "topk": (error_feedback(topk(0.3)), compressors.topk(0)),  # the test sets k, which depends on the shard length
    "min_max_uint8": (min_max_uint8(), compressors.min_max_uint8),
    "float8_e4m3fn": (float8("float8_e4m3fn", 4), compressors.float8("float8_e4m3fn", 4)),
}


def run(n: int, reducer: Reducer, x_NSL: np.ndarray) -> tuple[np.ndarray, Any]:
    """Return the means of all steps [N, S, L], and the last states."""

    def replica(x_SL: jax.Array) -> Any:
        def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            mean, state = reducer.mean(x, state)
            return state, mean

        state, means = jax.lax.scan(step, reducer.init(x_SL.shape[1], jax.random.key(0)), x_SL)
        return means, state

    means, state = on_replicas(n, replica, x_NSL)
    return means, state


def draw(n: int, length: int = LENGTH) -> np.ndarray:
    rng = np.random.default_rng(n)
    scale = np.exp(rng.normal(size=(n, 1, length)))
    return np.asarray(rng.normal(0.2, scale, size=(n, STEPS, length)), np.float32)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_as_workers_and_servers_in_numpy(n: int, name: str) -> None:
    compressor, lossy = PAIRS[name]
    if name == "topk":
        lossy = compressors.topk(int(np.ceil(0.3 * LENGTH / n)))
    x = draw(n)
    got = only(run(n, scatter_gather(axis(n), compressor, compressor), x)[0])
    servers = compressors.Servers(n, LENGTH, lossy, lossy, name in FEEDBACK)
    expected = np.array([servers.mean(x[:, step]) for step in range(STEPS)])
    np.testing.assert_allclose(got, expected, 1e-4, 1e-5)
    assert n == 1 or np.abs(got - x.mean(0)).max() > 1e-3  # it must be lossy


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("n", "group"), [(4, 2), (8, 2), (8, 4)])
def test_exact_within_groups_and_compressed_between(n: int, group: int, name: str) -> None:
    """Neighbours average their vectors exactly; replica i of each group is then a worker for shard i of the mean."""
    compressor, lossy = PAIRS[name]
    num_groups, length = n // group, LENGTH // group
    if name == "topk":
        lossy = compressors.topk(int(np.ceil(0.3 * length / num_groups)))
    x = draw(n)
    reducer = in_groups(axis(n), group, scatter_gather(axis(n).between(group), compressor, compressor))
    got = only(run(n, reducer, x)[0])
    shards = x.reshape(num_groups, group, STEPS, group, length).mean(1)  # group, step, shard, element
    servers = [compressors.Servers(num_groups, length, lossy, lossy, name in FEEDBACK) for _ in range(group)]
    expected = [np.concatenate([s.mean(shards[:, step, i]) for i, s in enumerate(servers)]) for step in range(STEPS)]
    np.testing.assert_allclose(got, expected, 1e-4, 1e-5)
    assert np.abs(got - x.mean(0)).max() > 1e-3


def test_one_group_of_all_replicas_compresses_nothing() -> None:
    """BytePS sums exactly within a machine and compresses only between machines."""
    x = draw(4)
    reducer = gradients.lossy(axis(4), 4, onebit(), onebit())
    np.testing.assert_allclose(only(run(4, reducer, x)[0]), x.mean(0), 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("n", "compressor"),
    [
        *((n, compressor) for n in (2, 4, 8) for compressor in (onebit("l2", 4), topk(0.3))),
        *((4, compressor) for compressor in (randomk(0.3), dithering(3), min_max_uint8())),
    ],
)
def test_all_comes_out_or_is_left(n: int, compressor: Compressor) -> None:
    x = draw(n)
    means, state = run(n, scatter_gather(axis(n), error_feedback(compressor), error_feedback(compressor)), x)
    workers = state["worker"]["residual"].reshape(n, LENGTH)
    servers = state["server"]["residual"].reshape(LENGTH)
    got = only(means).sum(0, np.float64) + workers.mean(0, np.float64) + servers
    np.testing.assert_allclose(got, x.mean(0, np.float64).sum(0), 0, 2e-5)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_on_one_replica_comes_out_on_all(name: str, value: float) -> None:
    compressor, _ = PAIRS[name]
    x = draw(4)
    x[2, 1, 17] = value
    for means in run(4, scatter_gather(axis(4), compressor, compressor), x)[0]:
        assert np.all(np.isfinite(means[0]))
        assert not np.all(np.isfinite(means[1]))


def test_all_draw_the_same_elements_of_a_part() -> None:
    """A server therefore sends on exactly the elements it received. Each shard has a different draw."""
    x = np.ones((4, 1, 160), np.float32)
    means, state = run(4, scatter_gather(axis(4), error_feedback(randomk(0.5)), error_feedback(randomk(0.5))), x)
    unsent = state["worker"]["residual"].reshape(4, 4, 40)
    assert (unsent == unsent[0]).all()
    assert len(np.unique(unsent[0], axis=0)) == 4
    np.testing.assert_array_equal(np.asarray(means).reshape(-1, 160)[0], 1 - unsent[0].reshape(-1))
    assert not state["server"]["residual"].any()


def test_senders_round_apart() -> None:
    x = np.full((4, 1, 160), 0.3, np.float32)
    x[..., ::40] = 1
    _, state = run(4, scatter_gather(axis(4), error_feedback(dithering(1)), error_feedback(topk(1.0))), x)
    assert len(np.unique(state["worker"]["residual"].reshape(16, 40), axis=0)) == 16


def test_lengths_that_need_padding() -> None:
    x = draw(4, 13)
    all_reduce = fused(scatter_gather(axis(4), min_max_uint8(), min_max_uint8()), 1000)

    def replica(x_SL: jax.Array) -> Any:
        tree = {"a": x_SL[0, :6].reshape(2, 3), "b": x_SL[0, 6:]}
        mean = all_reduce.mean(tree, all_reduce.init(tree))[0]
        return jnp.concatenate([mean["b"], mean["a"].reshape(-1)])

    servers = compressors.Servers(4, 13, compressors.min_max_uint8, compressors.min_max_uint8, False)
    ordered = np.concatenate([x[:, 0, 6:], x[:, 0, :6]], axis=1)
    np.testing.assert_allclose(only(on_replicas(4, replica, x)), servers.mean(ordered), 1e-4, 1e-5)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_traffic_is_payloads_of_shards(n: int) -> None:
    reducer = scatter_gather(axis(n), error_feedback(onebit(block=4)), min_max_uint8())
    assert reducer.multiple == n
    part = LENGTH // n
    signs = (n - 1) * (-(-part // 8) + 4 * -(-part // 4))
    assert [(one.kind, one.dtype, one.nbytes) for one in reducer.traffic(LENGTH, jnp.float32)] == [
        ("all-to-all", "uint8", signs),
        ("all-gather", "uint8", (n - 1) * (part + 8)),
    ]


@pytest.mark.parametrize("compressor", [randomk(0.5), dithering(3)])
def test_vectors_of_one_length_draw_different_numbers(compressor: Compressor) -> None:
    """Vectors of the same length use different random numbers, and so do different seeds."""
    tree = {"a": jnp.arange(1.0, 65.0), "b": jnp.arange(1.0, 65.0)}

    def mean(tree: Any) -> Any:
        result = {}
        for seed in (0, 1):
            all_reduce = fused(scatter_gather(axis(2), compressor, compressor), 64 * 4, seed=seed)
            result[seed] = all_reduce.mean(tree, all_reduce.init(tree))[0]
        return result

    got = only(on_replicas(2, mean, {name: np.stack([x, x]) for name, x in tree.items()}))
    vectors = [np.asarray(got[seed][name]) for seed in (0, 1) for name in ("a", "b")]
    assert all(not np.array_equal(x, y) for i, x in enumerate(vectors) for y in vectors[:i])
