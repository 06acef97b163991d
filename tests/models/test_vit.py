"""Tests the vision transformer against the equations of the paper in NumPy, and errors for invalid configs."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.errors import UserError
from jaxpar.models import build
from tests.models.small import CLASSES, CPU, IMAGE, fast_jit, make_params, small_config

SIZE = {"num_layers": 2, "hidden_size": 12, "num_heads": 3, "patch_size": 4}


def layer_norm(x: np.ndarray, weights: Any) -> np.ndarray:
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * weights["scale"] + weights["bias"]


def linear(x: np.ndarray, weights: Any) -> np.ndarray:
    return x @ weights["kernel"] + weights["bias"]


def attend(x_TD: np.ndarray, weights: Any, heads: int) -> np.ndarray:
    """Compute multi-head attention for one image, head by head (appendix A of the paper)."""
    q, k, v = (np.split(linear(x_TD, weights[name]), heads, axis=1) for name in ("query", "key", "value"))
    mixed = []
    for i in range(heads):
        scores = np.exp(q[i] @ k[i].T / math.sqrt(q[i].shape[1]))
        mixed.append(scores / scores.sum(1, keepdims=True) @ v[i])
    return linear(np.concatenate(mixed, axis=1), weights["out"])


def vit(params: Any, image: np.ndarray, pooling: str) -> np.ndarray:
    """Compute equations 1 to 4 of the paper for one image, and a linear head."""
    params = jax.tree.map(np.float64, params)
    embed, p, heads = params["embed"], SIZE["patch_size"], SIZE["num_heads"]
    image = image / 127.5 - 1
    kernel = embed["patches"]["kernel"].reshape(-1, SIZE["hidden_size"])
    patches = [image[i : i + p, j : j + p].reshape(-1) for i in range(0, 8, p) for j in range(0, 8, p)]
    x = np.stack(patches) @ kernel + embed["patches"]["bias"]
    if pooling == "cls":
        x = np.concatenate([embed["class_token"][None], x])
    x = x + embed["positions"]
    for i in range(SIZE["num_layers"]):
        block = params[f"block_{i}"]
        x = x + attend(layer_norm(x, block["attention_norm"]), block["attention"], heads)
        hidden = linear(layer_norm(x, block["mlp_norm"]), block["mlp"]["up"])
        hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
        x = x + linear(hidden, block["mlp"]["down"])
    x = layer_norm(x, params["head"]["norm"])
    return linear(x[0] if pooling == "cls" else x.mean(0), params["head"]["classifier"])


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_equals_numpy(pooling: str) -> None:
    model = build(small_config("vit", "classification", pooling=pooling, **SIZE), IMAGE, CPU)
    params = make_params(model)
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
    logits = fast_jit(model.apply)(params, {"inputs": images})
    expected = np.stack([vit(params, image, pooling) for image in images])
    assert logits.shape == (3, CLASSES)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    assert np.ptp(expected, axis=0).min() > 0.05  # images differ


# Parameters of timm's deit_tiny, deit_small, vit_base and vit_large (all _patch16_224) with 1,000 classes.
@pytest.mark.parametrize(
    ("size", "count"), [("tiny", 5_717_416), ("small", 22_050_664), ("base", 86_567_656), ("large", 304_326_632)]
)
def test_sizes(size: str, count: int) -> None:
    info = IMAGE._replace(input_shape=(224, 224, 3), num_classes=1000)
    published = dict.fromkeys(("num_layers", "hidden_size", "num_heads", "patch_size"))
    shapes = build(small_config("vit", "classification", **published, size=size), info, CPU).shapes
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"patch_size": 3}, r"model.patch_size is 3; it must divide the image size \(8 x 8\)"),
        ({"patch_size": 4, "hidden_size": 16}, r"model.hidden_size is 16; it must be a multiple .*num_heads \(3\)"),
        ({"pooling": "max"}, "model.pooling is 'max'"),
        ({"activation": "swiglu"}, "model.activation is 'swiglu'"),
        ({"norm": "rmsnorm"}, "model.norm is 'rmsnorm'; it must be None with model 'vit'"),
    ],
)
def test_mistakes(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(small_config("vit", "classification", **overrides), IMAGE, CPU)
