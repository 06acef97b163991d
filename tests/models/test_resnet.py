"""Tests the residual networks against the equations of the paper in NumPy."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.models import build
from tests.models.small import CPU, IMAGE, fast_jit, make_params, small_config

FIRST_OF_STAGES = {"18": (2, 4, 6), "50": (3, 7, 13)}  # blocks with stride 2


def conv(x: np.ndarray, kernel: np.ndarray, stride: int = 1) -> np.ndarray:
    """Convolve [B, H, W, C] with [k, k, C, D], padded with k // 2 zeros on each side."""
    size = len(kernel)
    x = np.pad(x, ((0, 0), (size // 2,) * 2, (size // 2,) * 2, (0, 0)))
    height, width = ((length - size) // stride + 1 for length in x.shape[1:3])
    out = np.zeros((len(x), height, width, kernel.shape[-1]))
    for i in range(size):
        for j in range(size):
            window = x[:, i : i + stride * height : stride, j : j + stride * width : stride]
            out += window @ kernel[i, j]
    return out


def group_norm(x: np.ndarray, weights: Any) -> np.ndarray:
    grouped = x.reshape(*x.shape[:3], 32, -1)
    mean, variance = (f(grouped, axis=(1, 2, 4), keepdims=True) for f in (np.mean, np.var))
    return ((grouped - mean) / np.sqrt(variance + 1e-6)).reshape(x.shape) * weights["scale"] + weights["bias"]


def max_pool(x: np.ndarray) -> np.ndarray:
    """Apply 3x3 max pooling with stride 2 and padding 1."""
    height, width = x.shape[1] // 2, x.shape[2] // 2
    x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    windows = [x[:, i : i + 2 * height : 2, j : j + 2 * width : 2] for i in range(3) for j in range(3)]
    return np.max(windows, axis=0)


def resnet(params: Any, pixels: np.ndarray, size: str, *, large: bool) -> np.ndarray:
    params = jax.tree.map(np.float64, params)
    x = conv(pixels / 127.5 - 1, params["stem"]["conv"]["kernel"], 2 if large else 1)
    x = np.maximum(group_norm(x, params["stem"]["norm"]), 0)
    if large:
        x = max_pool(x)
    for index in range(len(params) - 2):
        block, y = params[f"block_{index}"], x
        last = len(block["convs"]) - 1
        stride = 2 if index in FIRST_OF_STAGES[size] else 1
        for i in range(last + 1):
            # The stride is in the first of two 3x3 convolutions, or in the 3x3 convolution of a bottleneck.
            y = conv(y, block["convs"][i]["kernel"], stride if i == last - 1 else 1)
            y = group_norm(y, block["norms"][i])
            y = y if i == last else np.maximum(y, 0)
        if "projection" in block:
            x = group_norm(conv(x, block["projection"]["kernel"], stride), block["projection_norm"])
        x = np.maximum(x + y, 0)
    classifier = params["head"]["classifier"]
    return x.mean(axis=(1, 2)) @ classifier["kernel"] + classifier["bias"]


@pytest.mark.parametrize(("size", "pixels"), [("18", 8), ("50", 16), ("18", 72)])
def test_equals_numpy(size: str, pixels: int) -> None:
    info = IMAGE._replace(input_shape=(pixels, pixels, 3))
    model = build(small_config("resnet", "classification", size=size), info, CPU)
    params = make_params(model)
    images = np.random.default_rng(0).integers(0, 256, (2, pixels, pixels, 3), np.uint8)
    logits = fast_jit(model.apply)(params, {"inputs": images})
    expected = resnet(params, images, size, large=pixels > 64)
    np.testing.assert_allclose(logits, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())
