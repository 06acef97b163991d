"""Small transformers on a tensor axis, and their training.

Texts have 5 tokens and the vocabulary has 21 words, which no axis divides. Of 4 devices, the last one has no position
of a text, and 3 words where the others have 6.

Dims: B examples, T positions.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxpar import cluster, strategies, tasks
from jaxpar.config import default_config, override
from jaxpar.core import optimizer
from jaxpar.core import state as states
from jaxpar.core.groups import ReplicaGroup
from jaxpar.core.mesh import TENSOR
from jaxpar.core.state import Canonical
from jaxpar.core.step import Metrics, Problem, abstract
from jaxpar.data import DataInfo
from jaxpar.strategies import Strategy
from jaxpar.tasks import Sums, token_logits
from tests.strategies.pipelines import build_once

SIZE, LENGTH, VOCABULARY, CLASSES = 12, 5, 21, 5
NUM_STEPS = 3
MANY_STEPS = 20
TEXT = DataInfo("text", (LENGTH,), CLASSES, tuple("abcde"), VOCABULARY, 0)
IMAGE = DataInfo("image", (6, 4, 3), CLASSES, tuple("abcde"), 0, 0)  # 6 patches of 2 x 2

WIDE = "model.num_heads=8 model.num_kv_heads=4 model.head_dim=2"
MODELS = {
    "bert": "task=classification model.name=bert",
    "bert, mean": "task=classification model.name=bert model.pooling=mean model.flatten_positions=False",
    "bert of tokens": "task=token_classification model.name=bert model.attention=xla",
    "masked bert": "task=masked_lm model.name=bert",
    "albert": "task=masked_lm model.name=bert model.num_applications=2",
    "gpt": "task=causal_lm model.name=gpt",
    "gpt of texts": "task=classification model.name=gpt",
    "bottlenecks": "task=causal_lm model.name=gpt model.bottlenecks=block_1",
    "llama": "task=causal_lm model.name=gpt model.norm=rmsnorm model.activation=swiglu model.positions=rotary"
    f" model.qkv_bias=True model.tied_embeddings=False {WIDE}",
    "tied llama": "task=causal_lm model.name=gpt model.norm=rmsnorm model.activation=swiglu model.positions=rotary"
    f" {WIDE}",
    "vit": "task=classification model.name=vit model.pooling=cls model.patch_size=2",
    "vit, mean": "task=classification model.name=vit model.pooling=mean model.patch_size=2",
}
CHUNKS = "chunks"  # word of a case whose loss is computed in chunks of the positions


class Case(NamedTuple):
    """A model, and the settings of a strategy. A setting of CHUNKS is none of the config."""

    model: str
    settings: str

    def __str__(self) -> str:
        return f"{self.model}: {self.settings}"


class TensorTraining(NamedTuple):
    """Training with one strategy: the metrics and the canonical state of every step, and the last state."""

    strategy: Strategy[Any]
    metrics: list[Metrics]
    trees: list[Canonical]
    state: Any


def make_config(case: Case) -> ConfigDict:
    """Return the config of a case: two layers, dropout, clipped gradients."""
    config = default_config()
    values = [
        *("model.num_layers=2", "model.hidden_size=16", "model.num_heads=4", "model.mlp_size=32", "model.dropout=0.2"),
        *("optimizer.clip_norm=0.2", "optimizer.weight_decay=0", "optimizer.name=sgd", "optimizer.lr=0.03"),
        *("strategy=data_parallel", "pipeline.executor=lockstep", f"batch_size={SIZE}", *MODELS[case.model].split()),
        *(word for word in case.settings.split() if word != CHUNKS),
    ]
    override(config, [f"--config.{value}" for value in values])
    return config


def make_batch(model: str, step: int) -> dict[str, np.ndarray]:
    """Make a batch of different weights, whose last three examples are padding."""
    rng, task = np.random.default_rng((step, SIZE)), MODELS[model].split()[0].removeprefix("task=")
    weights = rng.uniform(0.5, 2, SIZE).astype(np.float32)
    weights[-3:] = 0
    rows: dict[str, np.ndarray]
    rows = {"index": np.arange(SIZE, dtype=np.int32), "labels": rng.integers(0, CLASSES, SIZE).astype(np.int32)}
    if model.startswith("vit"):
        return {**rows, "weights": weights, "inputs": rng.integers(0, 256, (SIZE, *IMAGE.input_shape), np.uint8)}
    mask_BT = np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (SIZE, 1))
    rows["inputs"] = (rng.integers(1, VOCABULARY, (SIZE, LENGTH)) * mask_BT).astype(np.int32)
    if task != "causal_lm":
        rows["mask"] = mask_BT
    if task == "classification":
        return {**rows, "weights": weights}
    most = VOCABULARY if task.endswith("_lm") else CLASSES
    rows["labels"] = rng.integers(0, most, (SIZE, LENGTH)).astype(np.int32)
    return {**rows, "weights": (weights[:, None] * (mask_BT & (rng.random((SIZE, LENGTH)) < 0.7))).astype(np.float32)}


def make_problem(case: Case) -> Problem:
    """Return the problem of a case."""
    config = make_config(case)
    info = IMAGE if case.model.startswith("vit") else TEXT
    if config.task.endswith("_lm"):
        info = info._replace(num_classes=0)
    strategies.decide(config, cluster.find_cluster())
    model = build_once(config, info, cluster.find_cluster())
    rule = optimizer.make_optimizer(config, optimizer.build_learning_rate(config, NUM_STEPS))
    batch, steps = abstract(make_batch(case.model, 0)), config.optimizer.accumulation_steps
    return Problem(model, rule, steps, batch, NUM_STEPS, tasks.find_task(config))


@functools.lru_cache(maxsize=8)
def build(case: Case) -> Strategy[Any]:
    """Return the strategy of a case, which is built once for several tests of it."""
    problem, there = make_problem(case), cluster.find_cluster()
    return strategies.build(strategies.plan(make_config(case), problem, there), problem, cluster.devices())


def replica_group(case: Case) -> ReplicaGroup:
    """Return the tensor axis of a case, with one replica."""
    size = make_config(case).mesh.tensor
    return ReplicaGroup(make_problem(case), {"data": 1, "stage": 1, TENSOR: size})


@functools.cache
def start(model: str, optimizer: str = "sgd") -> Canonical:
    """Return a state at step 0 with large weights, because small initial weights would hide many bugs."""
    problem = make_problem(Case(model, f"strategy=single optimizer.name={optimizer}"))
    rng, shapes = np.random.default_rng(1), states.abstract_state(problem.model, problem.optimizer)
    tree = states.to_canonical(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes))

    def draw(path: Any, leaf: np.ndarray) -> np.ndarray:
        scaled = rng.normal(size=leaf.shape) * (0.3 if leaf.ndim > 1 else 0.1)
        return (scaled + float(path[-1].key == "scale")).astype(np.float32)

    return tree | {"params": jax.tree_util.tree_map_with_path(draw, tree["params"]), "key": np.array([3, 4], np.uint32)}


def evaluate(case: Case, strategy: Strategy[Any], state: Any) -> Sums:
    """Return the sums of an evaluation of a further batch."""
    return jax.device_get(strategy.evaluate(state, strategy.place(make_batch(case.model, NUM_STEPS))))


@contextlib.contextmanager
def chunked(case: Case) -> Iterator[None]:
    """Compute the loss in chunks wherever a program is traced, if the case has them."""
    with pytest.MonkeyPatch.context() as patch:
        if CHUNKS in case.settings.split():
            patch.setattr(token_logits, "CHUNK_BYTES", 1)
        yield


@functools.lru_cache(maxsize=2)
def train(case: Case) -> TensorTraining:
    """Train with the strategy of a case."""
    with chunked(case):
        strategy = build(case)
        trained = TensorTraining(strategy, [], [], None)
        state = strategy.from_canonical(start(case.model, make_config(case).optimizer.name))
        for step in range(NUM_STEPS):
            state, metrics = strategy.step(state, strategy.place(make_batch(case.model, step)))
            trained.metrics.append(jax.device_get(metrics))
            trained.trees.append(jax.device_get(strategy.to_canonical(state)))
        evaluate(case, strategy, state)  # traced with the chunks
    return trained._replace(state=state)


def after_many_steps(case: Case, trained: TensorTraining) -> Canonical:
    """Return the canonical state after MANY_STEPS steps."""
    strategy = trained.strategy
    state = strategy.from_canonical(trained.trees[-1])
    for step in range(NUM_STEPS, MANY_STEPS):
        state, _ = strategy.step(state, strategy.place(make_batch(case.model, step)))
    tree: Canonical = jax.device_get(strategy.to_canonical(state))
    return tree


@functools.cache
def single(model: str, optimizer: str) -> TensorTraining:
    """Return the training on one device. optimizer: settings of config.optimizer."""
    return train(Case(model, f"strategy=single {optimizer}"))


@functools.cache
def end_of_single(model: str, optimizer: str) -> Canonical:
    """Return the state of one device after MANY_STEPS steps."""
    return after_many_steps(Case(model, ""), single(model, optimizer))


def optimizer_of(case: Case) -> str:
    """Return the settings of a case that one device also has."""
    settings = [word for word in case.settings.split() if word.startswith("optimizer.")]
    return " ".join(word for word in settings if "accumulation_steps" not in word)


def single_of(case: Case) -> TensorTraining:
    """Return the training on one device with the model and optimizer of a case, and whole logits."""
    return single(case.model, optimizer_of(case))
