"""Builds the model of every shipped config and traces its training step abstractly, without computing."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxpar import cluster, models, strategies, tasks
from jaxpar import config as configs
from jaxpar.choose.stages import until_chosen
from jaxpar.core import optimizer, state, step
from jaxpar.data import DataInfo, check_data

PATHS = sorted(configs.config_folder().glob("*.py"))
CASES = [str(path) for path in PATHS] + [f"{configs.config_folder()}/gpt_wordnet.py:llama"]
NEEDS_FILES = ("cifar10", "mnist")


@pytest.mark.parametrize("name", CASES, ids=lambda name: Path(name).name)
def test_config(name: str) -> None:
    config = configs.load_config(name)
    config.model.init_from = ""  # the pretrained weights are not available in tests
    models.check_model(config, cluster.find_cluster())
    optimizer.check_optimizer(config)
    strategies.decide(until_chosen(config, cluster.find_cluster()), cluster.find_cluster())
    is_image = config.data.source in NEEDS_FILES
    if not is_image:
        check_data(config, tasks.find_task(config).labels)
    is_lm = config.task != "classification"
    length, rows = config.data.max_length, config.batch_size
    info = DataInfo(
        kind="image" if is_image else "text",
        input_shape=(32, 32, 3) if is_image else (length,),
        num_classes=0 if is_lm else 10,
        class_names=() if is_lm else tuple("0123456789"),
        vocab_size=0 if is_image else config.data.vocab_size,
        pad_id=0,
    )
    labels = (rows, length) if is_lm else (rows,)
    batch = {
        "inputs": jax.ShapeDtypeStruct((rows, *info.input_shape), jnp.uint8 if is_image else jnp.int32),
        "mask": jax.ShapeDtypeStruct((rows, length), jnp.bool_),
        "labels": jax.ShapeDtypeStruct(labels, jnp.int32),
        "weights": jax.ShapeDtypeStruct(labels, jnp.float32),
        "index": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }
    rule = optimizer.make_optimizer(config, optimizer.build_learning_rate(config, 100))
    problem = step.Problem(
        models.build(config, info, cluster.find_cluster()), rule, 1, batch, 100, tasks.find_task(config)
    )
    before = jax.eval_shape(functools.partial(state.init, problem.model, problem.optimizer), jax.random.key(0))

    def train_step(before: state.State, batch: dict[str, jax.Array]) -> tuple[state.State, step.Metrics]:
        grads, sums = step.gradients(problem, before, batch, batch["weights"].sum())
        return step.update(problem, before, grads, sums)

    after, metrics = jax.eval_shape(train_step, before, batch)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), before
    )
    assert metrics.sums.loss.shape == ()


def test_configs_are_short_and_open_with_their_command() -> None:
    for path in PATHS:
        text = path.read_text()
        assert f"scripts/train --config=configs/{path.name}" in text.split('"""')[1], path
        assert path.name == "default.py" or text.partition("def get_config")[2].count("\n") <= 30, path
