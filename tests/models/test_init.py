"""Tests the initial values of parameters, and the scaling of pixels in the first layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models import build
from tests.models.small import CPU, IMAGE, VECTOR, fast_jit, info_of, make_params, small_config


def spread(array: jax.Array) -> float:
    return float(np.std(array))


@pytest.mark.parametrize(("name", "task", "scale"), [("bert", "masked_lm", 1.0), ("gpt", "causal_lm", 6**-0.5)])
def test_transformers_start_small(name: str, task: str, scale: float) -> None:
    """The standard deviation is 0.02; in GPT, residual branches are scaled by 1 / sqrt(2 * num_layers)."""
    config = small_config(name, task, hidden_size=64, num_heads=2)
    params = fast_jit(build(config, info_of(name, task), CPU).init)(jax.random.key(0))
    block = params["block_1"]
    for kernel in (params["embed"]["tokens"], block["attention"]["query"]["kernel"], block["mlp"]["up"]["kernel"]):
        assert spread(kernel) == pytest.approx(0.02, rel=0.1)
    for kernel in (block["attention"]["out"]["kernel"], block["mlp"]["down"]["kernel"]):
        assert spread(kernel) == pytest.approx(0.02 * scale, rel=0.1)
    assert {float(np.abs(block["mlp"][name]["bias"]).max()) for name in ("up", "down")} == {0.0}
    np.testing.assert_array_equal(block["mlp_norm"]["scale"], 1)


def test_residual_blocks_start_as_the_identity() -> None:
    model = build(small_config("resnet", "classification", scan_layers=False), IMAGE, CPU)
    params = fast_jit(model.init)(jax.random.key(0))
    x = jax.nn.relu(jax.random.normal(jax.random.key(1), (2, 8, 8, 32)))
    np.testing.assert_array_equal(model.apply_layers(params, x, {}, None, 1, 2), x)
    kernel = params["block_1"]["convs"][0]["kernel"]  # He initialisation: variance 2 / (9 * 32)
    assert spread(kernel) == pytest.approx((2 / (9 * 32)) ** 0.5, rel=0.1)


def test_mlp_equals_numpy() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    vectors = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    for info, inputs, first in ((IMAGE, pixels, pixels / 127.5 - 1), (VECTOR, vectors, vectors)):
        model = build(small_config("mlp", "classification"), info, CPU)
        params = make_params(model)
        x = first.reshape(4, -1)
        for name in ("embed", "block_0", "block_1", "block_2"):
            linear = params[name]["linear"]
            x = np.maximum(x @ linear["kernel"] + linear["bias"], 0)
        expected = x @ params["head"]["classifier"]["kernel"] + params["head"]["classifier"]["bias"]
        logits = fast_jit(model.apply)(params, {"inputs": jnp.asarray(inputs)})
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
