"""Every synchronous strategy trains like `single` on the same global batches.

If a strategy is missing from VARIANTS, `test_every_strategy_is_here` fails.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxpar import cluster, models, strategies, tasks
from jaxpar.config import default_config, override
from jaxpar.core import optimizer
from jaxpar.core.step import Problem, abstract
from jaxpar.data import DataInfo
from tests.selection import slow_except

NUM_STEPS = 20
BATCH, LENGTH, VOCABULARY, CLASSES = 16, 12, 64, 5
LEARNING_RATES = {"adamw": 1e-3, "sgd": 0.1, "muon": 1e-3}
VARIANTS = {
    "single": [],
    "single, 4 microbatches": ["--config.optimizer.accumulation_steps=4"],
    "data_parallel, 2 devices": ["--config.mesh.data=2"],
    "data_parallel, 8 devices": ["--config.mesh.data=8"],
    "data_parallel, 4 devices, 2 microbatches": ["--config.mesh.data=4", "--config.optimizer.accumulation_steps=2"],
    "pipeline, 1f1b, 2 stages": ["--config.mesh.stage=2", "--config.mesh.data=1", "--config.pipeline.schedule=1f1b"],
    "pipeline, zb_h1, 2 stages, 2 replicas": [
        "--config.mesh.stage=2",
        "--config.mesh.data=2",
        "--config.pipeline.schedule=zb_h1",
        "--config.pipeline.num_microbatches=4",
    ],
    "async_data_parallel, sync, 4 workers on 2 devices": [
        "--config.mesh.data=2",
        "--config.asynchronous.policy=sync",
        "--config.asynchronous.num_workers=4",
    ],
    "swarm, 5 peers in 2 stages on 2 devices": [
        "--config.mesh.data=2",
        "--config.swarm.peers=5",
        "--config.swarm.num_microbatches=4",
    ],
    "data_parallel, pmap, 2 devices": ["--config.mesh.data=2", "--config.data_parallel.implementation=pmap"],
}
INFO = DataInfo(
    kind="text", input_shape=(LENGTH,), num_classes=CLASSES, class_names=tuple("abcde"), vocab_size=VOCABULARY, pad_id=0
)


class Outcome(NamedTuple):
    """The outcome of 20 steps of a strategy, on the host."""

    losses: list[float]
    start: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    evaluation: float


def batch(step: int) -> dict[str, np.ndarray]:
    """Make a batch of random texts and lengths. Weights differ, so that shards have different weights."""
    rng = np.random.default_rng(step)
    mask = np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (BATCH, 1))
    weights = rng.uniform(0.5, 2.0, BATCH).astype(np.float32)
    weights[-3:] = 0
    return {
        "inputs": (rng.integers(5, VOCABULARY, (BATCH, LENGTH)) * mask).astype(np.int32),
        "mask": mask,
        "labels": rng.integers(0, CLASSES, BATCH).astype(np.int32),
        "weights": weights,
        "index": np.arange(BATCH, dtype=np.int32),
    }


@functools.cache
def outcome(variant: str, optimizer_name: str) -> Outcome:
    """Train a small BERT with dropout by a strategy of VARIANTS."""
    config = default_config()
    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "mlp_size": 32, "max_length": LENGTH, "dropout": 0.3}
    override(config, [f"--config.model.{key}={value}" for key, value in sizes.items()])
    override(config, [f"--config.strategy={variant.split(',')[0]}", f"--config.optimizer.name={optimizer_name}"])
    override(config, [f"--config.optimizer.lr={LEARNING_RATES[optimizer_name]}", *VARIANTS[variant]])
    override(config, [f"--config.batch_size={BATCH}", f"--config.data.max_length={LENGTH}"])
    strategies.decide(config, cluster.find_cluster())
    schedule = optimizer.build_learning_rate(config, NUM_STEPS)
    problem = Problem(
        models.build(config, INFO, cluster.find_cluster()),
        optimizer.make_optimizer(config, schedule),
        config.optimizer.accumulation_steps,
        abstract(batch(0)),
        NUM_STEPS,
        tasks.find_task(config),
    )
    strategy = strategies.make(config, problem)
    state = strategy.init(jax.random.key(0))
    start = named(strategy.to_canonical(state)["params"])
    losses = []
    for step in range(NUM_STEPS):
        state, metrics = strategy.step(state, strategy.place(batch(step)))
        losses.append(float(metrics.sums.loss / metrics.sums.weight))
    sums = strategy.evaluate(state, strategy.place(batch(NUM_STEPS)))
    # Convert to the canonical state and back, to check that nothing is lost.
    tree = jax.device_get(strategy.to_canonical(strategy.from_canonical(strategy.to_canonical(state))))
    assert int(tree["step"]) == NUM_STEPS
    return Outcome(losses, start, named(tree["params"]), float(sums.loss / sums.weight))


def named(tree: Any) -> dict[str, np.ndarray]:
    """Return the leaves by path, copied to the host."""
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_every_strategy_is_here() -> None:
    assert {name.split(",")[0] for name in VARIANTS} == set(strategies.STRATEGIES)


CASES = [(variant, optimizer) for variant in VARIANTS if variant != "single" for optimizer in LEARNING_RATES]
# AdamW runs under every variant. Muon, whose state differs from matrix to matrix, runs with and without stages.
FAST = [*((variant, "adamw") for variant in VARIANTS), ("pipeline, zb_h1, 2 stages, 2 replicas", "muon")]


@pytest.mark.parametrize(("variant", "optimizer_name"), slow_except(FAST, CASES))
def test_equals_single(variant: str, optimizer_name: str) -> None:
    expected, got = outcome("single", optimizer_name), outcome(variant, optimizer_name)
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-6)
    np.testing.assert_allclose(got.evaluation, expected.evaluation, rtol=1e-6)
    for name, value in expected.params.items():
        # The bias of a key adds the same value to all scores of a query, so its gradient is rounding error, which Adam
        # scales up to full steps.
        if "['key']['bias']" not in name:
            error = np.linalg.norm(got.params[name] - value) / np.linalg.norm(value)
            assert error < 1e-6, f"{name}: relative error {error}"


def test_training_learns_and_dropout_is_on() -> None:
    """Guards the test above: the equality of runs that do not train would prove nothing."""
    result = outcome("single", "adamw")
    assert len(set(result.losses)) == NUM_STEPS
    for name, start in result.start.items():
        moved = np.linalg.norm(result.params[name] - start) / np.linalg.norm(result.params[name])
        assert moved > 1e-3, f"{name} moved by {moved}"
