"""Tests of PowerSGD, against the paper's algorithms 1 and 2 in NumPy.

Dims: N replicas, S steps.
"""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxpar.core.optimizer import clip_by_norm
from jaxpar.exchange.exchange import Rule
from jaxpar.exchange.named import make_exchange
from jaxpar.exchange.powersgd import is_compressed, largest_rank, matrix_shape
from tests.exchange.replicas import axis, close, only, train

N, STEPS, RANK = 4, 5, 2
SHAPES = {"bias": (12,), "conv": (3, 3, 4, 9), "kernel": (20, 12), "narrow": (40, 2)}
COMPRESSED = ("conv", "kernel")  # 2 * RANK * (m + n) < m * n
RNG = np.random.default_rng(0)
GRADS = {name: RNG.normal(size=(N, STEPS, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
START = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def make(**options: Any) -> Any:
    """Return PowerSGD around plain SGD with a learning rate of 1, so that the updates are the negated means."""
    settings = {"rank": RANK, "warmup": 0.0} | options
    return make_exchange("powersgd", axis(N), Rule(optax.sgd(1.0), START, num_steps=STEPS), **settings)


def orthonormal(p: np.ndarray) -> np.ndarray:
    """Return the columns of p after the Gram-Schmidt process, as in the paper."""
    columns: list[np.ndarray] = []
    for column in p.T:
        for other in columns:
            column = column - (other @ column) * other
        columns.append(column / np.linalg.norm(column))
    return np.stack(columns, 1)


def vogels(matrices: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the approximate mean over replicas in each step [S, m, n], and the last residuals [N, m, n].

    matrices: the gradients, [N, S, m, n]; q: the first right factor.
    """
    residuals, sent = np.zeros_like(matrices[:, 0]), []
    for step in range(matrices.shape[1]):
        deltas = matrices[:, step] + residuals
        p = orthonormal(np.mean([delta @ q for delta in deltas], axis=0))
        q = np.mean([delta.T @ p for delta in deltas], axis=0)
        sent.append(p @ q.T)
        residuals = deltas - sent[-1]
    return np.stack(sent), residuals


def test_equals_the_paper() -> None:
    exchange = make()
    factors = dict(zip(COMPRESSED, exchange.init(START).private.factors, strict=True))
    _, updates, _, state = train(N, exchange, START, GRADS)
    for number, name in enumerate(COMPRESSED):
        matrices = GRADS[name].astype(np.float64).reshape(N, STEPS, *matrix_shape(SHAPES[name]))
        means, residuals = vogels(matrices, np.asarray(factors[name], np.float64))
        close(only(updates[name]), -means.reshape(STEPS, *SHAPES[name]), 1e-4, 1e-4)
        close(state.private.residuals[number], residuals, 1e-4, 1e-4)
        assert np.abs(residuals).max() > 0.1
    for name in SHAPES.keys() - {*COMPRESSED}:
        close(only(updates[name]), -GRADS[name].mean(0), 1e-6, 1e-6)


def test_gradients_of_low_rank_are_exact() -> None:
    """One power iteration finds the column space of a matrix whose rank is at most that of the factors.

    The other columns of P are rounding errors, and must be orthogonal to the first.
    """
    left, right = RNG.normal(size=(N, STEPS, 20, 1)), RNG.normal(size=(1, STEPS, 1, 12))
    grads = GRADS | {"kernel": (left @ right).astype(np.float32), "conv": np.zeros_like(GRADS["conv"])}
    _, updates, _, state = train(N, make(), START, grads)
    mean = (left @ right).mean(0)
    sent, wanted = -np.cumsum(only(updates["kernel"]), 0), np.cumsum(mean, 0)
    close(sent[0], wanted[0], 1e-4, 1e-5)
    assert not only(updates["conv"]).any()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_clips_the_approximate_mean() -> None:
    clip = 5.0
    rule = Rule(optax.chain(clip_by_norm(clip), optax.sgd(1.0)), START, clip_norm=clip, num_steps=STEPS)
    exchange = make_exchange("powersgd", axis(N), rule, rank=RANK, warmup=0.0)
    _, whole, norms, wanted = train(N, make(), START, GRADS)
    _, updates, clipped_norms, state = train(N, exchange, START, GRADS)
    squares = sum((only(whole[name]).reshape(STEPS, -1) ** 2).sum(1) for name in SHAPES)
    scales = np.minimum(1, clip / np.sqrt(squares))
    assert scales.max() < 0.8
    for name, shape in SHAPES.items():
        close(only(updates[name]), only(whole[name]) * scales.reshape(STEPS, *[1] * len(shape)), 1e-4, 1e-5)
    close(only(clipped_norms), only(norms), 1e-5, 1e-5)
    for got, expected in zip(state.private.residuals, wanted.private.residuals, strict=True):
        close(got, expected, 1e-5, 1e-5)


def test_nothing_is_lost() -> None:
    """The sum of the sent means and the mean residual is the sum of the mean gradients."""
    _, updates, _, state = train(N, make(), START, GRADS)
    for number, name in enumerate(COMPRESSED):
        sent, residual = -only(updates[name]).sum(0), state.private.residuals[number].mean(0)
        close(sent + residual.reshape(SHAPES[name]), GRADS[name].mean(0).sum(0), 1e-4, 1e-5)


def test_the_warm_up_is_exact() -> None:
    exchange = make(warmup=0.4)
    _, updates, _, _ = train(N, exchange, START, GRADS)
    for name in SHAPES:
        close(only(updates[name])[:2], -GRADS[name].mean(0)[:2], 1e-6, 1e-6)
    assert np.abs(only(updates["kernel"])[2] + GRADS["kernel"].mean(0)[2]).max() > 0.1
    assert exchange.branches == {"powersgd_warmup": (0.6, 0.4)}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), (1, 1)), ((7,), (7, 1)), ((20, 12), (20, 12)), ((3, 3, 4, 9), (36, 9)), ((64, 4, 16), (64, 64))],
)
def test_arrays_as_matrices(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    assert matrix_shape(shape) == expected


@pytest.mark.parametrize(
    ("shapes", "expected"), [([(20, 12), (40, 2), (7,)], 3), ([(64, 4, 16)], 15), ([(4, 4)], 0), ([(4, 5)], 1), ([], 0)]
)
def test_largest_rank(shapes: list[tuple[int, ...]], expected: int) -> None:
    """Factors of rank 3 of [20, 12] have 96 elements, less than half of 240; those of rank 4 have 128."""
    assert largest_rank([jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]) == expected
    for rank in range(1, 20):
        assert any(is_compressed(shape, rank) for shape in shapes) == (rank <= expected)


def test_traffic() -> None:
    """The factors of the kernel and the convolution have 2 columns, and a ring sends 2 (N - 1) / N of each element."""
    elements = RANK * (20 + 12) + RANK * (36 + 9) + 12 + 80
    whole = 12 + 3 * 3 * 4 * 9 + 240 + 80
    for warmup, expected in ((0.0, elements), (0.4, 0.6 * elements + 0.4 * whole)):
        traffic = make(warmup=warmup).traffic(START, 1)
        assert sum(one.nbytes for one in traffic) == pytest.approx(1.5 * 4 * expected)
