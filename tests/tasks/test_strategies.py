"""Tests that strategies train every kind of task, and a ViT, with the same sums and parameters as `single`."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar import models, strategies, tasks
from jaxpar.cluster import find_cluster
from jaxpar.config import default_config, override
from jaxpar.core import optimizer
from jaxpar.core.step import Problem, abstract
from jaxpar.data import DataInfo
from tests.selection import slow_except

BATCH, LENGTH, VOCABULARY, NUM_STEPS = 8, 8, 24, 3
INFO = {
    "classification": DataInfo("image", (8, 8, 3), 5, tuple("abcde"), 0, 0),
    "regression": DataInfo("text", (LENGTH,), 0, (), VOCABULARY, 0, ("a", "b")),
    "token_classification": DataInfo("text", (LENGTH,), 5, ("O", "B-A", "I-A", "B-B", "I-B"), VOCABULARY, 0),
}
MODELS = {"classification": "vit", "regression": "bert", "token_classification": "bert"}
VARIANTS = {
    "data_parallel": ["--config.mesh.data=2"],
    "data_parallel, shard_map": ["--config.mesh.data=2", "--config.data_parallel.implementation=shard_map"],
    "data_parallel, pmap": ["--config.mesh.data=2", "--config.data_parallel.implementation=pmap"],
    "pipeline": [
        *("--config.mesh.stage=2", "--config.mesh.data=1"),
        *("--config.pipeline.num_microbatches=4", "--config.pipeline.schedule=1f1b"),
        "--config.pipeline.executor=lockstep",
    ],
    "async_data_parallel": ["--config.mesh.data=2", "--config.asynchronous.policy=sync"],
    "swarm": ["--config.mesh.data=1", "--config.swarm.num_microbatches=4"],
}


def make_batch(task: str, step: int) -> dict[str, np.ndarray]:
    """Return a batch of random texts or images. Examples have different weights, and the last is padding."""
    rng = np.random.default_rng(step)
    index, weights_B = np.arange(BATCH, dtype=np.int32), rng.uniform(0.5, 2, BATCH).astype(np.float32)
    weights_B[-1] = 0
    if task == "classification":
        pixels = rng.integers(0, 256, (BATCH, 8, 8, 3), np.uint8)
        labels = rng.integers(0, 5, BATCH).astype(np.int32)
        return {"inputs": pixels, "labels": labels, "weights": weights_B, "index": index}
    mask = np.arange(LENGTH) < rng.integers(3, LENGTH + 1, (BATCH, 1))
    tokens = (rng.integers(5, VOCABULARY, (BATCH, LENGTH)) * mask).astype(np.int32)
    batch = {"inputs": tokens, "mask": mask, "index": index}
    if task == "regression":
        return batch | {"labels": rng.normal(size=(BATCH, 2)).astype(np.float32), "weights": weights_B}
    is_word = mask & (rng.random((BATCH, LENGTH)) < 0.7) & (weights_B > 0)[:, None]
    tags = rng.integers(0, 5, (BATCH, LENGTH)).astype(np.int32)
    return batch | {"labels": tags, "weights": is_word.astype(np.float32)}


@functools.cache
def outcome(task: str, variant: str) -> tuple[list[Any], Any, dict[str, np.ndarray]]:
    """Return the sums of each step, the sums of an evaluation, and the final parameters."""
    config = default_config()
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "mlp_size": 32, "dropout": 0.2, "name": MODELS[task]}
    sizes |= {"patch_size": 4} if MODELS[task] == "vit" else {"max_length": LENGTH}
    override(config, [f"--config.model.{key}={value}" for key, value in sizes.items()])
    override(config, [f"--config.task={task}", f"--config.strategy={variant.split(',')[0]}"])
    override(config, ["--config.data.target_columns=('a','b')", f"--config.batch_size={BATCH}"])
    override(config, VARIANTS.get(variant, []))
    rule = optimizer.make_optimizer(config, optimizer.build_learning_rate(config, NUM_STEPS))
    batch = abstract(make_batch(task, 0))
    problem = Problem(
        models.build(config, INFO[task], find_cluster()), rule, 1, batch, NUM_STEPS, tasks.find_task(config)
    )
    strategy = strategies.make(config, problem)
    state, sums = strategy.init(jax.random.key(0)), []
    for step in range(NUM_STEPS):
        state, metrics = strategy.step(state, strategy.place(make_batch(task, step)))
        sums.append(jax.device_get(metrics.sums))
    evaluated = jax.device_get(strategy.evaluate(state, strategy.place(make_batch(task, NUM_STEPS))))
    leaves = jax.tree_util.tree_leaves_with_path(strategy.to_canonical(state)["params"])
    return sums, evaluated, {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


CASES = [(task, variant) for variant in VARIANTS for task in INFO]
# A pipeline computes the sums of a task on its last stage. The others add them up alike, in three ways.
FAST = [
    *((task, "pipeline") for task in INFO),
    *(("token_classification", name) for name in ("data_parallel", "swarm")),
]


@pytest.mark.parametrize(("task", "variant"), slow_except(FAST, CASES))
def test_equals_single(task: str, variant: str) -> None:
    (expected, expected_evaluation, expected_params), (got, evaluation, params) = (
        outcome(task, name) for name in ("single", variant)
    )
    for ours, theirs in zip([*got, evaluation], [*expected, expected_evaluation], strict=True):
        assert ours.terms.keys() == theirs.terms.keys()
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6), ours, theirs)
    if task != "regression":  # counts are exact
        jax.tree.map(np.testing.assert_array_equal, evaluation.terms, expected_evaluation.terms)
    if task == "token_classification":
        assert evaluation.terms["actual"] > 5
    if task == "classification":  # the last example is padding
        assert evaluation.terms["confusion"].sum() == evaluation.terms["examples"] == BATCH - 1
    for name, value in expected_params.items():
        if "['key']['bias']" not in name:  # the gradient is zero up to rounding
            assert np.linalg.norm(params[name] - value) <= 1e-5 * np.linalg.norm(value), name


@pytest.mark.parametrize("task", INFO)
def test_training_moves_the_loss(task: str) -> None:
    """Without this, test_equals_single could pass without training."""
    sums, _, _ = outcome(task, "single")
    assert len({float(one.loss) for one in sums}) == NUM_STEPS
