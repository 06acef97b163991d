import itertools
from typing import Any

import numpy as np
import optax
import pytest

from jaxpar.exchange import gossip, reduce
from jaxpar.exchange.compress import dithering, min_max_uint8
from jaxpar.exchange.fuse import fused
from tests.exchange import compressors
from tests.exchange.replicas import Tree, axis, train

RATE = 0.5
START: Tree = {"a": np.array([[1.0, -2, 3], [0, 5, -1]], np.float32), "b": np.arange(4, dtype=np.float32) / 4}


def draw(n: int, steps: int, silent_after: int = 10**6) -> Tree:
    """Draw gradients, which are zero from step `silent_after` on."""
    rng = np.random.default_rng(n)
    grads = {k: rng.normal(size=(n, steps, *v.shape)).astype(np.float32) for k, v in START.items()}
    return {k: v * (np.arange(steps) < silent_after).reshape(1, -1, *[1] * (v.ndim - 2)) for k, v in grads.items()}


def vectors(tree: Any, ndim: int) -> np.ndarray:
    """Return a tree with `ndim` leading dims as float64 vectors [.., L]."""
    leaves = [np.asarray(x, np.float64) for x in tree.values()]
    return np.concatenate([x.reshape(*x.shape[:ndim], -1) for x in leaves], axis=-1)


def peers(n: int, step: int) -> np.ndarray:
    """Return the mixing matrix, which averages the weights of paired replicas."""
    mixing = np.zeros((n, n))
    for i in range(n // 2):
        peer = n // 2 + (i + step) % (n // 2)
        for a, b in ((i, peer), (peer, i)):
            mixing[a, a] = mixing[a, b] = 0.5
    return mixing


def ring(n: int) -> np.ndarray:
    mixing = np.zeros((n, n))
    for i in range(n):
        for j in (i - 1, i, i + 1):
            mixing[i, j % n] += 1 / 3
    return mixing


def distance(x_NL: np.ndarray) -> float:
    """Return the squared distance to consensus."""
    return float(np.sum((x_NL - x_NL.mean(0)) ** 2))


@pytest.mark.parametrize(("n", "group"), [(2, 1), (4, 1), (8, 1), (4, 2), (8, 2), (8, 4)])
def test_decentralized_is_the_mean_with_a_peer_and_a_step(n: int, group: int) -> None:
    grads = draw(n, 6)
    exchange = gossip.decentralized(axis(n), optax.sgd(RATE, momentum=0.9), group=group)
    params, _, _, state = train(n, exchange, START, grads)
    got, g_NSL = vectors(params, 2), vectors(grads, 2)
    x, momentum = np.stack([vectors(START, 0)] * n), np.zeros((n, 10))
    for step in range(6):
        momentum = 0.9 * momentum + g_NSL[:, step]
        mixing = np.kron(peers(n // group, step), np.full((group, group), 1 / group))
        x = mixing @ x - RATE * momentum
        np.testing.assert_allclose(got[:, step], x, 1e-5, 1e-5)
    np.testing.assert_array_equal(state.private, 6)


@pytest.mark.parametrize(
    ("n", "mode", "interval"), [(4, "shift_one", 2), (8, "shift_one", 3), (3, "all", 1), (4, "all", 2)]
)
def test_decentralized_with_all_peers_or_sometimes(n: int, mode: str, interval: int) -> None:
    """As in the reference of Bagua's own tests: weights are averaged in every `interval`-th step, from the first on."""
    grads = draw(n, 7)
    exchange = gossip.decentralized(axis(n), optax.sgd(RATE, momentum=0.9), peers=mode, interval=interval)
    params, *_ = train(n, exchange, START, grads)
    got, g_NSL = vectors(params, 2), vectors(grads, 2)
    x, momentum = np.stack([vectors(START, 0)] * n), np.zeros((n, 10))
    for step in range(7):
        momentum = 0.9 * momentum + g_NSL[:, step]
        if step % interval == 0:
            x = np.full((n, n), 1 / n) @ x if mode == "all" else peers(n, step // interval) @ x
        x = x - RATE * momentum
        np.testing.assert_allclose(got[:, step], x, 1e-5, 1e-5)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_decentralized_comes_to_consensus(n: int) -> None:
    """The first step drives replicas apart; a cycle of all shifts without gradients brings them together."""
    cycle = n // 2
    params, *_ = train(n, gossip.decentralized(axis(n), optax.sgd(RATE)), START, draw(n, 1 + cycle, silent_after=1))
    got = vectors(params, 2)
    product = np.eye(n)
    for step in range(1, 1 + cycle):
        product = peers(n, step) @ product
    expected = distance(product @ got[:, 0])
    assert distance(got[:, -1]) == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert expected < 0.51 * distance(got[:, 0])
    np.testing.assert_allclose(got[:, -1].mean(0), got[:, 0].mean(0), 0, 1e-6)


@pytest.mark.parametrize("n", [2, 4])
def test_low_precision_as_in_numpy(n: int) -> None:
    grads = draw(n, 8)
    exchange = gossip.low_precision_decentralized(axis(n), optax.sgd(RATE), min_max_uint8())
    params, *_ = train(n, exchange, START, grads)
    got, g_NSL = vectors(params, 2), vectors(grads, 2)
    x = np.stack([vectors(START, 0)] * n)
    left, right = x.copy(), x.copy()
    for step in range(8):
        z = (x + left + right) / 3 - RATE * g_NSL[:, step] - x
        moved = np.stack([compressors.min_max_uint8(row) for row in z])
        x, left, right = x + moved, left + np.roll(moved, 1, axis=0), right + np.roll(moved, -1, axis=0)
        np.testing.assert_allclose(got[:, step], x, 1e-5, 1e-5)
    assert np.abs(z - moved).max() > 1e-4


@pytest.mark.parametrize(("n", "group"), [(4, 2), (8, 2), (8, 4)])
def test_low_precision_between_groups_as_in_numpy(n: int, group: int) -> None:
    """Groups step on the mean of their gradients, and have a ring for each shard. The tenth element is padded to 12."""
    grads = draw(n, 8)
    exchange = gossip.low_precision_decentralized(axis(n), optax.sgd(RATE), min_max_uint8(), group)
    params, *_ = train(n, exchange, START, grads)
    got = vectors(params, 2)
    g_GSL = vectors(grads, 2).reshape(n // group, group, 8, -1).mean(1)
    length = -(-10 // group) * group
    x = np.pad(np.stack([vectors(START, 0)] * (n // group)), ((0, 0), (0, length - 10)))
    left, right = x.copy(), x.copy()
    for step in range(8):
        z = (x + left + right) / 3 - RATE * np.pad(g_GSL[:, step], ((0, 0), (0, length - 10))) - x
        moved = np.stack([np.concatenate([compressors.min_max_uint8(y) for y in np.split(row, group)]) for row in z])
        x, left, right = x + moved, left + np.roll(moved, 1, axis=0), right + np.roll(moved, -1, axis=0)
        np.testing.assert_allclose(got[:, step], np.repeat(x, group, axis=0)[:, :10], 1e-5, 1e-5)
    assert np.abs(z - moved).max() > 1e-4


@pytest.mark.parametrize("compressor", [min_max_uint8(), dithering(7)])
@pytest.mark.parametrize("n", [2, 8])
def test_low_precision_knows_its_neighbours(n: int, compressor: Any) -> None:
    params, _, _, state = train(
        n, gossip.low_precision_decentralized(axis(n), optax.sgd(RATE), compressor), START, draw(n, 10)
    )
    last = np.concatenate([x[:, -1].reshape(n, -1) for x in params.values()], axis=1)
    assert state.private["left"].tobytes() == np.roll(last, 1, axis=0).tobytes()
    assert state.private["right"].tobytes() == np.roll(last, -1, axis=0).tobytes()


@pytest.mark.parametrize("n", [2, 4, 8])
def test_low_precision_comes_to_consensus(n: int) -> None:
    steps = 25
    exchange = gossip.low_precision_decentralized(axis(n), optax.sgd(RATE), min_max_uint8())
    params, *_ = train(n, exchange, START, draw(n, steps, silent_after=1))
    x_SNL = vectors(params, 2).swapaxes(0, 1)
    lost = np.zeros(10)
    for x, after in itertools.pairwise(x_SNL):
        z = ring(n) @ x - x
        half_a_step = 0.51 * (z.max(1) - z.min(1)) / 255 + 1e-6
        assert np.all(np.abs(after - x - z) <= half_a_step[:, None])
        lost += half_a_step.mean()
    exact = distance(np.linalg.matrix_power(ring(n), steps - 1) @ x_SNL[0])
    assert distance(x_SNL[-1]) == pytest.approx(exact, rel=0.05, abs=1e-4)
    assert exact < 0.05 * distance(x_SNL[0])
    assert np.all(np.abs(x_SNL[-1].mean(0) - x_SNL[0].mean(0)) <= lost)


@pytest.mark.parametrize("n", [2, 4])
def test_model_average_is_the_mean_after_each_interval(n: int) -> None:
    interval, grads = 3, draw(n, 7)
    exchange = gossip.model_average(fused(reduce.psum(axis(n)), 20), optax.sgd(RATE, momentum=0.9), interval)
    params, _, _, state = train(n, exchange, START, grads)
    got, g_NSL = vectors(params, 2), vectors(grads, 2)
    x, momentum = np.stack([vectors(START, 0)] * n), np.zeros((n, 10))
    for step in range(7):
        momentum = 0.9 * momentum + g_NSL[:, step]
        x = x - RATE * momentum
        if step % interval == interval - 1:
            x = np.stack([x.mean(0)] * n)
            np.testing.assert_allclose(got[:, step], np.stack([got[0, step]] * n), 1e-6, 1e-6)
        else:
            assert np.abs(got[0, step] - got[1, step]).max() > 0.1
        np.testing.assert_allclose(got[:, step], x, 1e-5, 1e-5)
    assert len(np.unique(state.optimizer[0].trace["b"], axis=0)) == n  # momentum is never averaged


def test_traffic() -> None:
    def sent(exchange: Any) -> list[tuple[str, str, float]]:
        return [(one.kind, one.dtype, one.nbytes) for one in exchange.traffic(START, 1)]

    sgd, average = optax.sgd(RATE), fused(reduce.psum(axis(4)), 100)
    low_precision = gossip.low_precision_decentralized(axis(4), sgd, min_max_uint8())
    assert sent(gossip.decentralized(axis(4), sgd)) == [("collective-permute", "float32", 40)]
    assert sent(low_precision) == [("collective-permute", "uint8", 2 * (10 + 8))]
    assert sent(gossip.model_average(average, sgd, 5)) == [("all-reduce", "float32", 2 * 3 / 4 * 40 / 5)]
