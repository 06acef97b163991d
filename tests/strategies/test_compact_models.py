"""Checks that strategies train models with bottlenecks and repeated layers as one device does."""

import functools

import jax
import numpy as np
import pytest

from jaxpar import cluster, strategies
from tests.strategies.pipelines import (
    NUM_MICROBATCHES,
    Outcome,
    Task,
    advance,
    make,
    make_config,
    make_problem,
    pipeline,
    relative_error,
    start,
)

MLP = Task("mlp", "classification", layers=2)
MODEL = ("--config.model.num_applications=2", "--config.model.bottlenecks=block_1", "--config.model.bottleneck=maxout")
NARROW = "--config.pipeline.partition=narrow"
SWARM = (
    *("--config.strategy=swarm", "--config.swarm.stages=2", "--config.swarm.peers=3"),
    *(f"--config.swarm.num_microbatches={NUM_MICROBATCHES}", "--config.swarm.failures.lifetime=3"),
    "--config.swarm.failures.rejoin=1",
)
STRATEGIES = {
    "1f1b": pipeline("1f1b", 2, NARROW),
    "zb_h1": pipeline("zb_h1", 2, NARROW),
    "zero3": ("--config.strategy=data_parallel", "--config.exchange=zero3", "--config.mesh.data=2"),
    "zero3, remat": (
        *("--config.strategy=data_parallel", "--config.exchange=zero3", "--config.mesh.data=2"),
        *("--config.model.remat=full", "--config.model.scan_layers=True"),
    ),
    "swarm": (*SWARM, NARROW),
}


def train(*overrides: str) -> Outcome:
    return advance(make(MLP, *MODEL, *overrides), MLP, start(MLP, *MODEL), 0, 3)


@functools.cache
def one_device() -> Outcome:
    return train(f"--config.optimizer.accumulation_steps={NUM_MICROBATCHES}")


@pytest.mark.parametrize("name", STRATEGIES)
def test_equal_to_one_device(name: str) -> None:
    got, expected = train(*STRATEGIES[name]), one_device()
    np.testing.assert_allclose(got.losses, expected.losses, rtol=2e-6)
    np.testing.assert_allclose(got.norms, expected.norms, rtol=5e-6)
    for key, array in expected.params.items():
        assert relative_error(got.params[key], array) < 2e-6, key


@pytest.mark.parametrize("compress", ["none", "int8"])
def test_a_swarm_sends_the_compressed_features(compress: str) -> None:
    """A message has half the features, so a cut at the bottleneck sends half of what a cut at a block sends."""
    sizes = ("--config.model.hidden_size=256", f"--config.batch_size={64 * NUM_MICROBATCHES}")
    sent, cuts = [], []
    for cut in ("narrow", "compress_1"):
        config = make_config(MLP, *MODEL, *SWARM, *sizes, f"--config.pipeline.partition={cut}")
        config.swarm.compress = compress
        config.swarm.failures.lifetime = 0.0
        plan = strategies.plan(config, make_problem(config, MLP), cluster.find_cluster())
        sent.append(plan.traffic[0].nbytes / plan.traffic[0].messages)
        cuts.append(plan.details.stages.layers)
    assert cuts[0] == [["embed", "block_0", "compress_1"], ["expand_1", "block_1", "head"]]
    assert sent[0] / sent[1] == pytest.approx(0.5)
    assert sent[1] == pytest.approx(64 * 256 * 4 if compress == "none" else 64 * 256 * (1 + 4 / 4096))


def test_arrays_are_those_of_the_layers() -> None:
    """Applications have no arrays of their own."""
    params = start(MLP, *MODEL)["params"]
    assert params.keys() == {"embed", "block_0", "compress_1", "expand_1", "block_1", "head"}
    plain = start(MLP)["params"]
    assert jax.tree.map(np.shape, params["block_1"]) == jax.tree.map(np.shape, plain["block_1"])
