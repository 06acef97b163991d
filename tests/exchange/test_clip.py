"""Clipping with error feedback, against NumPy: each replica clips its gradient before it adds its residual."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from jax.tree_util import tree_leaves_with_path

from jaxpar import layout
from jaxpar.core.optimizer import clip_by_norm
from jaxpar.exchange.exchange import Rule
from jaxpar.exchange.named import EXCHANGES, make_all_reduce, make_exchange
from tests.exchange import compressors
from tests.exchange.replicas import DATA, axis, only, train

N, STEPS, LENGTH, CLIP, RATE = 4, 5, 24, 0.5, 0.1
START = {"w": np.linspace(-1, 1, LENGTH, dtype=np.float32)}
OPTIMIZER = optax.chain(clip_by_norm(CLIP), optax.sgd(RATE))


def draw() -> np.ndarray:
    """Return gradients [N, STEPS, LENGTH] with norms from about 0.1 to 5: some are clipped, others are not."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=(N, STEPS, LENGTH)) * np.geomspace(0.02, 1, N)[:, None, None]).astype(np.float32)


def clipped(g: np.ndarray) -> np.ndarray:
    return g * min(1.0, CLIP / np.linalg.norm(g))


@pytest.mark.parametrize(
    ("name", "settings", "lossy"),
    [
        ("byteps_onebit", {"block": 3}, compressors.onebit("mean", 3)),
        ("byteps_topk", {"ratio": 0.34}, compressors.topk(3)),  # of the 6 elements of a shard
    ],
)
def test_clipping_precedes_the_residual(name: str, settings: dict[str, float], lossy: compressors.Lossy) -> None:
    g_NSL = draw()
    exchange = make_exchange(name, axis(N), Rule(OPTIMIZER, None, clip_norm=CLIP), min_compress_bytes=0, **settings)
    params, _, norms, _ = train(N, exchange, START, {"w": g_NSL})
    servers, w = compressors.Servers(N, LENGTH, lossy, lossy, feedback=True), START["w"].astype(np.float64)
    for step in range(STEPS):
        mean = servers.mean(np.stack([clipped(g) for g in g_NSL[:, step]]))
        w = w - RATE * mean
        np.testing.assert_allclose(only(params)["w"][step], w, rtol=1e-4, atol=1e-6)
        assert only(norms)[step] == pytest.approx(np.linalg.norm(mean), rel=1e-5)


def test_other_exchanges_clip_the_mean() -> None:
    g_NSL = draw()
    exchange = make_exchange("ddp", axis(N), Rule(OPTIMIZER, None, clip_norm=CLIP))
    params, *_ = train(N, exchange, START, {"w": g_NSL})
    w = START["w"] - RATE * np.cumsum([clipped(g_NSL[:, step].mean(0)) for step in range(STEPS)], axis=0)
    np.testing.assert_allclose(only(params)["w"], w, rtol=1e-5, atol=1e-6)


def test_exchanges_with_error_feedback() -> None:
    """The exchanges that clip first are those with a residual in their private state."""
    for name in (name for name, row in EXCHANGES.items() if row.averages):
        settings = {"min_compress_bytes": 0} if "min_compress_bytes" in EXCHANGES[name].options else {}
        all_reduce = make_all_reduce(name, axis(1), CLIP, **settings)
        private = layout.made_by_replicas({DATA: 1}, partial(all_reduce.init, START), DATA).shapes
        has_residual = any("residual" in jax.tree_util.keystr(path) for path, _ in tree_leaves_with_path(private))
        assert (all_reduce.clip_norm == CLIP) == has_residual, name
