"""Tests the FLOP count against closed forms."""

import jax
import jax.numpy as jnp
import pytest

from jaxpar.measure.flops import forward_flops, peak_flops
from tests.models.small import BATCH, CLASSES, LENGTH, LLAMA, VOCAB, dropout_keys, make_batch, small

B, T, D, F, V = BATCH, LENGTH, 16, 64, VOCAB
ATTENTION = 4 * B * T * D * D * 2 + 2 * B * T * T * D * 2  # four projections, scores and weighted sum
MLP = 2 * B * T * D * F * 2


def count(name: str, task: str, **overrides: object) -> int:
    model, params, batch = small(name, task, **overrides)
    return forward_flops(model.apply, params, batch, dropout_keys())


def test_transformers() -> None:
    for scan in (True, False):
        for remat in ("none", "full", "dots"):
            masked_lm = count("bert", "masked_lm", scan_layers=scan, remat=remat)
            assert masked_lm == 3 * (ATTENTION + MLP) + 2 * B * T * D * D + 2 * B * T * D * V
    assert count("gpt", "causal_lm") == 3 * (ATTENTION + MLP) + 2 * B * T * D * V
    assert count("bert", "classification") == 3 * (ATTENTION + MLP) + 2 * B * D * D + 2 * B * D * CLASSES
    # Keys and values have half the width, and the MLP has three matrices.
    llama = 3 * (ATTENTION - 2 * B * T * D * D + MLP * 3 // 2) + 2 * B * T * D * V
    assert count("gpt", "causal_lm", **LLAMA) == llama


def test_residual_network() -> None:
    """ResNet-18, width 32, 8x8 images: a 3x3 stem, stages at 8, 4, 2 and 1 pixels, the last three with projections."""
    pixels, widths = (64, 16, 4, 1), (32, 64, 128, 256)
    expected = 64 * 27 * 32 + 256 * CLASSES
    for stage, (area, width) in enumerate(zip(pixels, widths, strict=True)):
        first = width if stage == 0 else width // 2
        expected += area * width * 9 * (first + 3 * width)
        expected += area * width * first if stage else 0
    assert count("resnet", "classification") == 2 * B * expected
    assert make_batch("resnet", "classification")["inputs"].shape == (B, 8, 8, 3)


def test_grouped_convolution_and_batched_product() -> None:
    x, kernel = jnp.ones((2, 10, 10, 8)), jnp.ones((3, 3, 2, 12))

    def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (2, 2), "VALID", dimension_numbers=dims, feature_group_count=4)

    assert forward_flops(conv, x, kernel) == 2 * (2 * 4 * 4 * 12) * (9 * 2)
    product = forward_flops(lambda a, b: jnp.einsum("gij,gjk->gik", a, b), jnp.ones((7, 2, 3)), jnp.ones((7, 3, 5)))
    assert product == 2 * 7 * 2 * 3 * 5


def test_control_flow() -> None:
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    one = 2 * 4**3

    def cond(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    def scan(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (jax.jit(jnp.dot)(x, x), None), x, None, length=5)[0]

    assert forward_flops(cond, x) == 2 * one
    assert forward_flops(scan, x) == 5 * one
    assert forward_flops(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x @ x, x), x) == 3 * one
    assert forward_flops(lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x - 1, x), x) == 0
    with pytest.raises(ValueError, match="while_loop"):
        forward_flops(lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, x), x)


@pytest.mark.parametrize(
    ("kind", "bfloat16", "float32"),
    [
        ("NVIDIA H200", 989.5e12, 494.5e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12, 494.5e12),
        ("NVIDIA H100 PCIe", 756.5e12, 378e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 156e12),
        ("Tesla V100-PCIE-16GB", 14e12, 14e12),
        ("NVIDIA L4", 121e12, 60e12),
        ("NVIDIA L40S", 362e12, 183e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("cpu", None, None),
    ],
)
def test_peaks(kind: str, bfloat16: float | None, float32: float | None) -> None:
    assert (peak_flops(kind, "bfloat16"), peak_flops(kind, "float32")) == (bfloat16, float32)
