"""Tests schedules against closed forms, optimizers against NumPy, and which parameters have weight decay."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxpar import cluster, models
from jaxpar.config import default_config, override
from jaxpar.core import optimizer
from jaxpar.core.leaf_paths import leaf_paths
from jaxpar.data import DataInfo
from jaxpar.errors import UserError

ATTENTION = [f"['attention']['{name}']" for name in ("query", "key", "value", "out")]


def config_with(**values: object) -> ConfigDict:
    config = default_config()
    override(config, [f"--config.optimizer.{key}={value}" for key, value in values.items()])
    return config


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("constant", lambda _u: 1.0),
        ("linear", lambda u: 1 - 0.8 * u),
        ("cosine", lambda u: 0.2 + 0.8 * (1 + math.cos(math.pi * u)) / 2),
    ],
)
def test_schedule(name: str, after: Callable[[float], float]) -> None:
    config = config_with(schedule=name, lr=2.0, warmup=0.1, final_lr=0.2)
    learning_rate = optimizer.build_learning_rate(config, num_steps=200)
    for step in (0, 5, 10, 20, 21, 110, 199):
        expected = 2.0 * (step / 20 if step < 20 else after((step - 20) / 180))
        assert float(learning_rate(step)) == pytest.approx(expected, rel=1e-5), step


@pytest.mark.parametrize("name", optimizer.OPTIMIZERS)
def test_decay_is_on_matrices_only(name: str) -> None:
    """With a gradient of zero, only weight decay moves a parameter."""
    config = config_with(name=name, lr=0.1, weight_decay=0.5, schedule="constant", warmup=0)
    transform = optimizer.make_optimizer(config, optimizer.build_learning_rate(config, 10))
    params = {"block": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2), "scale": jnp.ones((2, 2))}}
    updates, _ = transform.update(jax.tree.map(jnp.zeros_like, params), transform.init(params), params)
    # The decay is scaled by the learning rate. LAMB scales each update to the norm of the weights.
    expected = -0.1 if name == "lamb" else -0.1 * 0.5
    np.testing.assert_allclose(updates["block"]["kernel"], expected, rtol=1e-5)
    assert np.all(updates["block"]["bias"] == 0)
    assert np.all(updates["block"]["scale"] == 0)


def test_adamw_with_clipping_equals_numpy() -> None:
    """Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2."""
    config = config_with(lr=0.1, weight_decay=0.2, clip_norm=0.5, schedule="constant", warmup=0)
    transform = optimizer.make_optimizer(config, optimizer.build_learning_rate(config, 10))
    rng = np.random.default_rng(0)
    w = rng.normal(size=(3, 2))
    params = {"layer": {"kernel": jnp.asarray(w, jnp.float32)}}
    state = transform.init(params)
    m = v = np.zeros_like(w)
    for t in range(1, 6):
        g = rng.normal(size=w.shape)
        updates, state = transform.update({"layer": {"kernel": jnp.asarray(g, jnp.float32)}}, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        g = g * min(1.0, 0.5 / float(np.linalg.norm(g)))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - 0.1 * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) + 0.2 * w)
    np.testing.assert_allclose(params["layer"]["kernel"], w, rtol=1e-4)


def test_muon_equals_numpy() -> None:
    """Muon is Nesterov momentum and five steps of the quintic Newton-Schulz iteration (Jordan et al., 2024), scaled as
    in Liu et al., 2025. The kernel of a convolution is a matrix with a column for each output channel. AdamW updates
    the kernels of the input layer and of the classifier, and the bias.
    """
    values = {"lr": 0.1, "weight_decay": 0.2, "clip_norm": 0.0, "momentum": 0.8, "schedule": "constant", "warmup": 0}
    config, adamw = config_with(name="muon", **values), config_with(name="adamw", **values)
    transform, other = (optimizer.make_optimizer(c, optimizer.build_learning_rate(c, 10)) for c in (config, adamw))
    rng = np.random.default_rng(0)
    hidden = {"linear": (3, 5), "wide": (3, 2, 2, 20), "tall": (3, 3, 2, 4)}
    shapes: dict[str, Any] = {name: {"kernel": shape, "bias": shape[-1:]} for name, shape in hidden.items()}
    shapes |= {"stem": {"kernel": (3, 3, 2, 4)}, "head": {"classifier": {"kernel": (3, 2)}}}
    draw = functools.partial(jax.tree.map, lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32))
    params = expected = draw(shapes, is_leaf=lambda x: isinstance(x, tuple))
    state, other_state = transform.init(params), other.init(params)
    weights = {name: np.asarray(params[name]["kernel"], np.float64).reshape(-1, hidden[name][-1]) for name in hidden}
    momenta = {name: np.zeros_like(w) for name, w in weights.items()}
    for t in range(1, 6):
        grads = draw(shapes, is_leaf=lambda x: isinstance(x, tuple))
        updates, state = transform.update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        updates, other_state = other.update(grads, other_state, expected)
        expected = jax.tree.map(jnp.add, expected, updates)
        for name, w in weights.items():
            g = np.asarray(grads[name]["kernel"], np.float64).reshape(w.shape)
            m = momenta[name] = 0.8 * momenta[name] + 0.2 * g  # moving average
            x = 0.8 * m / (1 - 0.8 ** (t + 1)) + 0.2 * g / (1 - 0.8**t)  # Nesterov momentum with bias correction
            x = x / np.linalg.norm(x)
            for _ in range(5):
                a = x @ x.T
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            weights[name] = w - 0.1 * (0.2 * math.sqrt(max(w.shape)) * x + 0.2 * w)
    for name, w in weights.items():
        np.testing.assert_allclose(params[name]["kernel"], w.reshape(hidden[name]), rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(params[name]["bias"], expected[name]["bias"], rtol=1e-5)
    np.testing.assert_allclose(params["stem"]["kernel"], expected["stem"]["kernel"], rtol=1e-5)
    head, expected_head = (tree["head"]["classifier"]["kernel"] for tree in (params, expected))
    np.testing.assert_allclose(head, expected_head, rtol=1e-5)


@pytest.mark.parametrize("model", ["mlp", "bert", "gpt", "vit", "resnet"])
def test_muon_updates_hidden_kernels_alone(model: str) -> None:
    """AdamW updates embeddings, input and output layers, biases and gains (Jordan et al., 2024).

    The same holds for the marked layer names that `leaf_paths` uses for pipelines.
    """
    config = default_config()
    info = DataInfo("image", (32, 32, 3), 5, tuple("abcde"), 0, 0)
    if model in ("bert", "gpt"):
        info = DataInfo("text", (8,), 5, tuple("abcde"), 24, 0)
    config.model.name, config.optimizer.name = model, "muon"
    config.model.size = "18" if model == "resnet" else "tiny"
    shapes = models.build(config, info, cluster.named_cluster("cpu", 1)).shapes
    transform = optimizer.make_optimizer(config, optimizer.build_learning_rate(config, 10))
    found = {leaf for leaf in leaf_paths(transform.init, shapes) if "['muon']" in leaf.path}
    layers = [layer for layer in shapes if layer.startswith("block_")]
    block = ["['linear']"] if model == "mlp" else [*ATTENTION, "['mlp']['up']", "['mlp']['down']"]
    expected = {(layer, f"{kernel}['kernel']") for layer in layers for kernel in block}
    expected |= {("head", "['pooler']['kernel']")} if model == "bert" else set()
    if model == "resnet":
        expected = {(layer, f"['convs'][{i}]['kernel']") for layer in layers for i in (0, 1)}
        expected |= {(f"block_{i}", "['projection']['kernel']") for i in (2, 4, 6)}
    moments = [leaf for leaf in found if ".mu[]" in leaf.path]
    assert {(leaf.layer, leaf.path.split("[]")[1]) for leaf in moments} == expected


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", "adam", "Did you mean 'adamw'"),
        ("schedule", "cosin", "Did you mean 'cosine'"),
        ("warmup", 100, "config.optimizer.warmup is 100.0; it must be between 0 and 1"),
        ("lr", -1, "config.optimizer.lr is -1.0"),
        ("lr", math.inf, "config.optimizer.lr is inf; it must be at least 0 and at most 3.402823e+38"),
        ("lr", 1e39, "config.optimizer.lr is 1e+39; it must be at least 0 and at most"),
        ("weight_decay", math.inf, "config.optimizer.weight_decay is inf; it must be at least 0 and at most"),
        ("eps", math.nan, "config.optimizer.eps is nan; it must be in the range of float32, from 1.175494e-38 to 3.40"),
        ("eps", 0, "config.optimizer.eps is 0.0; it must be in the range of float32"),
        ("eps", 1e-300, "config.optimizer.eps is 1e-300; it must be in the range of float32"),
        ("b1", 1, "config.optimizer.b1 is 1.0; it must be at least 0 and less than 1, also when it is rounded"),
        ("b2", 1, "config.optimizer.b2 is 1.0; it must be at least 0 and less than 1"),
        ("b2", 1 - 1e-9, "config.optimizer.b2 is 0.999999999; it must be at least 0 and less than 1, also when"),
        ("momentum", 1, "config.optimizer.momentum is 1.0; it must be at least 0 and less than 1"),
        ("clip_norm", -1, "config.optimizer.clip_norm is -1.0; it must be at least 0"),
        ("clip_norm", math.nan, "config.optimizer.clip_norm is nan; it must be at least 0"),
        ("accumulation_steps", 0, "config.optimizer.accumulation_steps is 0"),
        ("nonfinite", "ignore", "stop, skip"),
        ("max_skipped_steps", 0, "config.optimizer.max_skipped_steps is 0; it must be at least 1"),
    ],
)
def test_mistakes(key: str, value: object, message: str) -> None:
    with pytest.raises(UserError) as caught:
        optimizer.check_optimizer(config_with(**{key: value}))
    assert message in str(caught.value)


def test_an_infinite_norm_clips_nothing_as_0_does() -> None:
    grads = {"layer": {"bias": jnp.array([3.0, -1e4])}}
    updates = []
    for clip_norm in (0.0, math.inf):
        config = config_with(name="sgd", clip_norm=clip_norm)
        optimizer.check_optimizer(config)
        transform = optimizer.make_optimizer(config, optimizer.build_learning_rate(config, 10))
        updates.append(transform.update(grads, transform.init(grads), grads)[0])
    assert jax.tree.all(jax.tree.map(jnp.array_equal, *updates))
