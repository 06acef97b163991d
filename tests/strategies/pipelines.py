"""Small problems that pipelines are tried on, and what 10 steps of a strategy make of one.

Dims: B rows, T positions.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxpar import cluster, models, optimizer, strategies, tasks
from jaxpar import state as states
from jaxpar.config import default_config, override
from jaxpar.data import DataInfo
from jaxpar.models import resnet
from jaxpar.state import Canonical
from jaxpar.step import Problem, abstract
from jaxpar.strategies import Strategy

NUM_STEPS = 10
BATCH, LENGTH, VOCABULARY, CLASSES = 16, 8, 24, 5
NUM_MICROBATCHES = 8  # of all runs: their references have as many accumulation steps
TEXT = DataInfo("text", (LENGTH,), CLASSES, tuple("abcde"), VOCABULARY, 0)
IMAGE = DataInfo("image", (8, 8, 3), CLASSES, tuple("abcde"), 0, 0)
TWO_STREAMS = "tests.models.two_streams"
TRANSFORMER = {"hidden_size": 16, "num_heads": 2, "mlp_size": 32, "max_length": LENGTH, "dropout": 0.2}
SIZES: dict[str, dict[str, Any]] = {
    "bert": TRANSFORMER,
    "gpt": TRANSFORMER,
    "resnet": {"size": "18", "hidden_size": 32, "dropout": 0.2},
    "mlp": {"size": "tiny", "hidden_size": 16, "dropout": 0.2},
    TWO_STREAMS: {"hidden_size": 16, "dropout": 0.2},
}
OF_IMAGES = ("resnet", "mlp")
# Without the last and widest blocks, all of ResNet-18, and one with as many blocks as two chunks on 8 devices need.
RESNET_BLOCKS = {6: (2, 2, 2), 8: (2, 2, 2, 2), 14: (5, 5, 4)}
LEARNING_RATES = {"adamw": 1e-3, "sgd": 0.03}
GRADIENTS = {"adamw": "['mu']", "sgd": "['trace']"}  # where the optimizer keeps them


class Task(NamedTuple):
    """What is trained. layers: blocks of the model, which has two layers more."""

    model: str
    task: str
    optimizer: str = "adamw"
    layers: int = 6
    dtype: str = "float32"


class Outcome(NamedTuple):
    """What 10 steps of a strategy gave, on the host.

    Attributes:
      losses: by step.
      norms: of the gradient, by step.
      gradients: of the first step, but for a factor: what the optimizer remembers of it.
      params: after the last step, by path.
      tree: the canonical state after the last step.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    tree: Canonical


def make_batch(task: Task, step: int, size: int = BATCH) -> dict[str, np.ndarray]:
    """Random inputs, texts of random lengths. The weights differ, so that shares of the batch weigh unequally."""
    rng = np.random.default_rng((step, size))
    weights = rng.uniform(0.5, 2, size).astype(np.float32)
    weights[-3:] = 0
    rows: dict[str, np.ndarray]
    rows = {"index": np.arange(size, dtype=np.int32), "labels": rng.integers(0, CLASSES, size).astype(np.int32)}
    if task.model in OF_IMAGES:
        return {**rows, "weights": weights, "inputs": rng.integers(0, 256, (size, 8, 8, 3), np.uint8)}
    mask_BT = np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (size, 1))
    rows["inputs"] = (rng.integers(5, VOCABULARY, (size, LENGTH)) * mask_BT).astype(np.int32)
    if task.task != "causal_lm":
        rows["mask"] = mask_BT
    if task.task == "classification":
        return {**rows, "weights": weights}
    predicted_BT = mask_BT & (rng.random((size, LENGTH)) < 0.6)
    rows["labels"] = rng.integers(5, VOCABULARY, (size, LENGTH)).astype(np.int32)
    return {**rows, "weights": weights[:, None] * predicted_BT.astype(np.float32)}


def make_config(task: Task, *overrides: str) -> ConfigDict:
    """The config of a task, on one replica by `single` unless the overrides say otherwise."""
    config = default_config()
    config.task, config.model.name, config.model.dtype = task.task, task.model, task.dtype
    config.model.update(SIZES[task.model] | ({} if task.model == "resnet" else {"num_layers": task.layers}))
    config.optimizer.name, config.optimizer.lr = task.optimizer, LEARNING_RATES[task.optimizer]
    config.optimizer.weight_decay = 0.1 if task.optimizer == "adamw" else 0.0  # of sgd it would be in the trace
    base = ["--config.strategy=single", "--config.mesh.data=1", f"--config.batch_size={BATCH}"]
    override(config, [*base, *overrides])
    return config


def pipeline(schedule: str, stages: int, *overrides: str, replicas: int = 1, remat: str = "none") -> tuple[str, ...]:
    """The overrides that make a pipeline."""
    return (
        "--config.strategy=pipeline",
        f"--config.pipeline.schedule={schedule}",
        f"--config.mesh.stage={stages}",
        f"--config.mesh.data={replicas}",
        f"--config.pipeline.num_microbatches={NUM_MICROBATCHES}",
        f"--config.pipeline.remat={remat}",
        *overrides,
    )


def make_problem(config: ConfigDict, task: Task) -> Problem:
    """The problem of a config made by `make_config`, which is checked first."""
    info = IMAGE if task.model in OF_IMAGES else TEXT
    with pytest.MonkeyPatch.context() as patch:
        if task.model == "resnet":
            patch.setitem(resnet.BLOCKS, "18", RESNET_BLOCKS[task.layers])
        strategies.decide(config, cluster.find_cluster())
        info = info if task.task == "classification" else info._replace(num_classes=0)
        model = models.build(config, info, cluster.find_cluster())
    rule = optimizer.make_optimizer(config, optimizer.build_schedule(config, NUM_STEPS))
    return Problem(
        model,
        rule,
        config.optimizer.accumulation_steps,
        abstract(make_batch(task, 0)),
        NUM_STEPS,
        tasks.find_task(config),
    )


@contextlib.contextmanager
def without_kinks() -> Iterator[None]:
    """Has GELU in the place of ReLU wherever a model is traced: where a strategy is planned and where it takes steps.

    Of a million units of a ResNet some are so near zero that rounding decides whether a ReLU passes their gradient on,
    which no comparison to 1e-6 survives.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.nn, "relu", jax.nn.gelu)
        yield


def make(task: Task, *overrides: str) -> Strategy[Any]:
    """The strategy of a config."""
    config = make_config(task, *overrides)
    with without_kinks():
        return strategies.make(config, make_problem(config, task))


@functools.lru_cache(maxsize=8)  # a program of a pipeline takes some 50 MB
def shared(task: Task, *overrides: str) -> Strategy[Any]:
    """The strategy of a config, traced and compiled once for the tests that need it next to each other.

    Not for asynchronous updates, which keep what they have done, nor where a test patches what a program is made of.
    """
    return make(task, *overrides)


@functools.cache
def start(task: Task, *overrides: str) -> Canonical:
    """Where training begins: weights larger than fresh ones. Among those, many mistakes would not show."""
    rng = np.random.default_rng(1)
    problem = make_problem(make_config(task, *overrides), task)
    state = jax.eval_shape(lambda key: states.init(problem.model, problem.optimizer, key), jax.random.key(0))
    tree = states.to_canonical(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state))

    def draw(path: Any, leaf: np.ndarray) -> np.ndarray:
        fan_out = leaf.shape[0] * leaf.shape[1] * leaf.shape[3] if leaf.ndim == 4 else 200  # of a convolution
        scaled = rng.normal(size=leaf.shape) * np.sqrt(2 / fan_out)
        is_last_norm = jax.tree_util.keystr(path[1:3]) == "['norms']['1']"  # of a ResNet's block, which starts small
        return (scaled + float(path[-1].key == "scale" and not is_last_norm)).astype(np.float32)

    return tree | {"params": jax.tree_util.tree_map_with_path(draw, tree["params"]), "key": np.array([3, 4], np.uint32)}


def filled(tree: Canonical) -> Canonical:
    """A canonical state in which no two numbers are alike."""
    leaves, structure = jax.tree.flatten(tree)
    ends = np.cumsum([leaf.size for leaf in leaves])
    numbers = [np.arange(end - leaf.size, end).reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)]
    return jax.tree.unflatten(structure, [n.astype(leaf.dtype) for n, leaf in zip(numbers, leaves, strict=True)])


def assert_bitwise_equal(got: Any, expected: Any) -> None:
    """As `named`, with equal dtypes."""
    got, expected = named(got), named(expected)
    assert got.keys() == expected.keys()
    for name, leaf in expected.items():
        assert got[name].dtype == leaf.dtype
        np.testing.assert_array_equal(got[name], leaf, err_msg=name)


def assert_survives(strategy: Strategy[Any], tree: Canonical) -> None:
    """A canonical state comes back from the strategy's form bit for bit."""
    assert_bitwise_equal(strategy.to_canonical(strategy.from_canonical(tree)), tree)


def advance(strategy: Strategy[Any], task: Task, tree: Canonical, first: int = 0, last: int = NUM_STEPS) -> Outcome:
    """Trains from the state `tree` over the batches first to last."""
    state = strategy.from_canonical(tree)
    losses, norms, after_one = [], [], tree
    for step in range(first, last):
        with without_kinks():
            state, metrics = strategy.step(state, strategy.place(make_batch(task, step)))
        losses.append(float(metrics.sums.loss / metrics.sums.weight))
        norms.append(float(metrics.grad_norm))
        if step == first:
            after_one = jax.device_get(strategy.to_canonical(state))
    # Through the canonical state and back: nothing may be lost on the way.
    final = jax.device_get(strategy.to_canonical(strategy.from_canonical(strategy.to_canonical(state))))
    gradients = {k: v for k, v in named(after_one["optimizer"]).items() if GRADIENTS[task.optimizer] in k}
    return Outcome(losses, norms, gradients, named(final["params"]), final)


@functools.cache
def outcome(task: Task, *overrides: str) -> Outcome:
    """Ten steps of the strategy that the overrides say; without any: the reference, on one device."""
    overrides = overrides or (f"--config.optimizer.accumulation_steps={NUM_MICROBATCHES}",)
    return advance(shared(task, *overrides), task, start(task))


def named(tree: Any) -> dict[str, np.ndarray]:
    """The leaves, copied to the host, by path."""
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Of an array as a whole."""
    return float(np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected.astype(np.float64)))
