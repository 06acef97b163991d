"""Small problems for tests of pipelines and other strategies, and the outcome of 10 training steps.

Dims: B examples, T positions.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxpar import cluster, models, strategies, tasks
from jaxpar.choose.stages import until_chosen, with_stages
from jaxpar.config import default_config, override
from jaxpar.core import optimizer
from jaxpar.core import state as states
from jaxpar.core.plan import Plan
from jaxpar.core.state import Canonical
from jaxpar.core.step import Problem, abstract
from jaxpar.data import DataInfo
from jaxpar.models import Model, resnet
from jaxpar.strategies import Strategy
from jaxpar.strategies.pipeline.details import PipelineDetails
from jaxpar.strategies.pipeline.executor.state import StagedState

NUM_STEPS = 10
BATCH, LENGTH, VOCABULARY, CLASSES = 16, 8, 24, 5
NUM_MICROBATCHES = 8  # of all pipelines; the reference has as many accumulation steps
TEXT = DataInfo("text", (LENGTH,), CLASSES, tuple("abcde"), VOCABULARY, 0)
IMAGE = DataInfo("image", (8, 8, 3), CLASSES, tuple("abcde"), 0, 0)
TWO_STREAMS = "tests.models.two_streams"
TRANSFORMER = {"hidden_size": 16, "num_heads": 2, "mlp_size": 32, "max_length": LENGTH, "dropout": 0.2}
SIZES: dict[str, dict[str, Any]] = {
    "bert": TRANSFORMER,
    "gpt": TRANSFORMER,
    "untied llama": {
        **{"name": "gpt", "hidden_size": 16, "num_heads": 2, "mlp_size": 32, "dropout": 0.2, "num_kv_heads": 1},
        **{"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "rope_base": 500.0, "head_dim": 6},
        **{"qkv_bias": True, "tied_embeddings": False},
    },
    "resnet": {"size": "18", "hidden_size": 32, "dropout": 0.2},
    "mlp": {"size": "tiny", "hidden_size": 16, "dropout": 0.2},
    TWO_STREAMS: {"hidden_size": 16, "dropout": 0.2},
}
OF_IMAGES = ("resnet", "mlp")
# ResNet-18 without its last and widest blocks, ResNet-18, and a ResNet with enough blocks for two chunks on 8 devices.
RESNET_BLOCKS = {6: (2, 2, 2), 8: (2, 2, 2, 2), 14: (5, 5, 4)}
LEARNING_RATES = {"adamw": 1e-3, "sgd": 0.03}
GRADIENTS = {"adamw": "['mu']", "sgd": "['trace']"}  # the part of the optimizer state that contains them


class Task(NamedTuple):
    """A model, task and optimizer. layers: number of blocks; the model has two more layers."""

    model: str
    task: str
    optimizer: str = "adamw"
    layers: int = 6
    dtype: str = "float32"


class Outcome(NamedTuple):
    """The outcome of 10 steps of a strategy, on the host.

    Attributes:
      losses: the loss of each step.
      norms: the gradient norm of each step.
      gradients: the gradients of the first step up to a factor, from the optimizer state.
      params: the parameters after the last step, by path.
      tree: the canonical state after the last step.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    tree: Canonical


def staged_state(strategy: Strategy[Any]) -> StagedState:
    """Return the distribution of the state of a pipeline."""
    details = strategy.plan.details
    assert isinstance(details, PipelineDetails)
    return details.staged


def make_batch(task: Task, step: int, size: int = BATCH) -> dict[str, np.ndarray]:
    """Make a batch of random inputs and lengths. The example weights differ, so that shards have different weights."""
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
    """Return the config of a task. The default strategy is `single`, with one replica."""
    config = default_config()
    config.task, config.model.name, config.model.dtype = task.task, task.model, task.dtype
    config.model.update(SIZES[task.model] | ({} if task.model == "resnet" else {"num_layers": task.layers}))
    with config.ignore_type():
        config.model.scan_layers = task.layers > 2  # the reference of a deep model takes long to load if it is unrolled
    config.optimizer.name, config.optimizer.lr = task.optimizer, LEARNING_RATES[task.optimizer]
    config.optimizer.weight_decay = 0.1 if task.optimizer == "adamw" else 0.0  # with sgd, the trace would include it
    base = ["strategy=single", "mesh.data=1", f"batch_size={BATCH}", "pipeline.executor=lockstep"]
    override(config, [*(f"--config.{one}" for one in base), *overrides])
    return config


def pipeline(schedule: str, stages: int, *overrides: str, replicas: int = 1, remat: str = "none") -> tuple[str, ...]:
    """Return the config overrides of a pipeline."""
    return (
        "--config.strategy=pipeline",
        f"--config.pipeline.schedule={schedule}",
        f"--config.mesh.stage={stages}",
        f"--config.mesh.data={replicas}",
        f"--config.pipeline.num_microbatches={NUM_MICROBATCHES}",
        f"--config.pipeline.remat={remat}",
        *overrides,
    )


_models: dict[Any, Model] = {}


def build_once(config: ConfigDict, info: DataInfo, there: cluster.Cluster) -> Model:
    """Build a model once per process, so that the strategies that train it share the traces of its layers."""
    key = (config.task, str(config.model), info)
    if config.model.name == "resnet":  # tests change its blocks
        return models.build(config, info, there)
    if key not in _models:
        _models[key] = models.build(config, info, there)
    return _models[key]


def make_problem(config: ConfigDict, task: Task, build: Callable[..., Model] = models.build) -> Problem:
    """Check a config of `make_config`, and return its problem. build: builds the model."""
    info = IMAGE if task.model in OF_IMAGES else TEXT
    with pytest.MonkeyPatch.context() as patch:
        if task.model == "resnet":
            patch.setitem(resnet.BLOCKS, "18", RESNET_BLOCKS[task.layers])
        strategies.decide(until_chosen(config, cluster.find_cluster()), cluster.find_cluster())
        info = info if task.task == "classification" else info._replace(num_classes=0)
        model = build(config, info, cluster.find_cluster())
    rule = optimizer.make_optimizer(config, optimizer.build_learning_rate(config, NUM_STEPS))
    return Problem(
        model,
        rule,
        config.optimizer.accumulation_steps,
        abstract(make_batch(task, 0, size=config.batch_size)),
        NUM_STEPS,
        tasks.find_task(config),
    )


@contextlib.contextmanager
def without_kinks() -> Iterator[None]:
    """Replace ReLU by GELU wherever a model is traced: when a strategy is planned, and when it takes steps.

    Some of the million units of a ResNet are so close to zero that rounding decides whether a ReLU passes their
    gradient, which would break comparisons to 1e-6.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.nn, "relu", jax.nn.gelu)
        yield


def plan_on(config: ConfigDict, problem: Problem, there: cluster.Cluster) -> Plan[Any]:
    """Plan the strategy of a config whose pipeline can have `auto`."""
    with tempfile.TemporaryDirectory() as folder:
        return strategies.plan(with_stages(config, problem, there, Path(folder)), problem, there)


def plan_of(task: Task, *overrides: str) -> Plan[Any]:
    """Plan the strategy of a config, which is faster than to build it."""
    config = make_config(task, *overrides)
    return plan_on(config, make_problem(config, task), cluster.find_cluster())


def make(task: Task, *overrides: str, build: Callable[..., Model] = models.build) -> Strategy[Any]:
    """Build the strategy of a config. build: builds the model."""
    config = make_config(task, *overrides)
    with without_kinks():
        problem = make_problem(config, task, build)
        return strategies.build(plan_on(config, problem, cluster.find_cluster()), problem, cluster.devices())


@functools.lru_cache(maxsize=8)  # a compiled pipeline takes about 50 MB
def shared(task: Task, *overrides: str) -> Strategy[Any]:
    """Build the strategy of a config once, so that consecutive tests share its compiled programs.

    Do not use it for asynchronous strategies, which have state, or in tests that patch the code of a program.
    """
    return make(task, *overrides, build=build_once)


@functools.cache
def start(task: Task, *overrides: str) -> Canonical:
    """Return a state at step 0 with large weights, because small initial weights would hide many bugs."""
    rng = np.random.default_rng(1)
    problem = make_problem(make_config(task, *overrides), task)
    state = jax.eval_shape(lambda key: states.init(problem.model, problem.optimizer, key), jax.random.key(0))
    tree = states.to_canonical(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state))

    def draw(path: Any, leaf: np.ndarray) -> np.ndarray:
        fan_out = leaf.shape[0] * leaf.shape[1] * leaf.shape[3] if leaf.ndim == 4 else 200  # 4 dims: a convolution
        scaled = rng.normal(size=leaf.shape) * np.sqrt(2 / fan_out)
        is_last_norm = (
            jax.tree_util.keystr(path[1:3]) == "['norms']['1']"
        )  # of a residual block, whose scale starts small
        return (scaled + float(path[-1].key == "scale" and not is_last_norm)).astype(np.float32)

    return tree | {"params": jax.tree_util.tree_map_with_path(draw, tree["params"]), "key": np.array([3, 4], np.uint32)}


def filled(tree: Canonical) -> Canonical:
    """Return a canonical state in which all numbers are different."""
    leaves, structure = jax.tree.flatten(tree)
    ends = np.cumsum([leaf.size for leaf in leaves])
    numbers = [np.arange(end - leaf.size, end).reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)]
    return jax.tree.unflatten(structure, [n.astype(leaf.dtype) for n, leaf in zip(numbers, leaves, strict=True)])


def assert_bitwise_equal(got: Any, expected: Any) -> None:
    """Assert that trees have bitwise equal leaves of the same dtypes at the same paths."""
    got, expected = named(got), named(expected)
    assert got.keys() == expected.keys()
    for name, leaf in expected.items():
        assert got[name].dtype == leaf.dtype
        np.testing.assert_array_equal(got[name], leaf, err_msg=name)


def assert_survives(strategy: Strategy[Any], tree: Canonical) -> None:
    """Assert that the conversion of a canonical state to the form of the strategy and back is bitwise exact."""
    assert_bitwise_equal(strategy.to_canonical(strategy.from_canonical(tree)), tree)


def advance(strategy: Strategy[Any], task: Task, tree: Canonical, first: int = 0, last: int = NUM_STEPS) -> Outcome:
    """Train from the state `tree` on the batches of steps first to last - 1."""
    state = strategy.from_canonical(tree)
    losses, norms, after_one = [], [], tree
    for step in range(first, last):
        with without_kinks():
            state, metrics = strategy.step(state, strategy.place(make_batch(task, step)))
        losses.append(float(metrics.sums.loss / metrics.sums.weight))
        norms.append(float(metrics.grad_norm))
        if step == first:
            after_one = jax.device_get(strategy.to_canonical(state))
    # Convert to the canonical state and back, to check that nothing is lost.
    final = jax.device_get(strategy.to_canonical(strategy.from_canonical(strategy.to_canonical(state))))
    gradients = {k: v for k, v in named(after_one["optimizer"]).items() if GRADIENTS[task.optimizer] in k}
    return Outcome(losses, norms, gradients, named(final["params"]), final)


@functools.cache
def outcome(task: Task, *overrides: str) -> Outcome:
    """Train ten steps with the strategy in the overrides, or without overrides on one device, the reference."""
    overrides = overrides or (f"--config.optimizer.accumulation_steps={NUM_MICROBATCHES}",)
    return advance(shared(task, *overrides), task, start(task))


def named(tree: Any) -> dict[str, np.ndarray]:
    """Return the leaves by path, copied to the host."""
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the norm of the difference relative to the norm of the expected array."""
    return float(np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected.astype(np.float64)))
