"""Checks bottlenecks: their layers against NumPy, their place in the model, and their errors."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.errors import UserError
from tests.models.small import dropout_keys, small


def normalized(x: np.ndarray, norm: dict[str, np.ndarray]) -> np.ndarray:
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * norm["scale"] + norm["bias"]


@pytest.mark.parametrize(("kind", "factor"), [("linear", 2), ("maxout", 4)])
def test_layers_of_a_bottleneck(kind: str, factor: int) -> None:
    model, params, batch = small(
        "gpt", "causal_lm", bottlenecks="block_1", bottleneck=kind, bottleneck_factor=factor, dropout=0.0
    )
    assert [layer.name for layer in model.layers] == [
        *("embed", "block_0", "compress_1", "expand_1", "block_1", "block_2", "head")
    ]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params)
    x = rng.normal(size=(4, 12, 16)).astype(np.float32)
    compressed = model.apply_layers(params, x, batch, None, 2, 3)
    expanded = model.apply_layers(params, compressed, batch, None, 3, 4)
    compress, expand = params["compress_1"], params["expand_1"]["linear"]
    expected = normalized(x, compress["norm"])
    if kind == "linear":
        expected = expected @ compress["linear"]["kernel"] + compress["linear"]["bias"]
    else:
        assert "linear" not in compress
        expected = np.stack([expected[..., i::4] for i in range(4)]).max(axis=0)
    expected = normalized(expected, compress["compressed_norm"])
    assert compressed.shape == (4, 12, 16 // factor)
    np.testing.assert_allclose(compressed, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(expanded, expected @ expand["kernel"] + expand["bias"], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["bert", "vit", "mlp"])
def test_models_with_bottlenecks(name: str) -> None:
    """The hidden states have half the features between the layers of a bottleneck, in the dtype of the model."""
    model, params, batch = small(name, "classification", bottlenecks="block_0, block_2", dtype="bfloat16")
    names = [layer.name for layer in model.layers]
    assert names == [
        "embed",
        "compress_0",
        "expand_0",
        "block_0",
        "block_1",
        "compress_2",
        "expand_2",
        "block_2",
        "head",
    ]
    inputs = dict(
        zip(names, model.inputs(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)), strict=True)
    )
    width = inputs["block_1"].shape[-1]
    assert inputs["expand_0"].shape[-1] == inputs["expand_2"].shape[-1] == width // 2
    assert {inputs[name].dtype.name for name in names[1:]} == {"bfloat16"}
    assert np.isfinite(model.apply(params, batch, dropout_keys())).all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"bottleneck": "maxout"}, "bottleneck is 'maxout'; it must be None without config.model.bottlenecks"),
        ({"bottleneck_factor": 4}, "bottleneck_factor is 4; it must be None without config.model.bottlenecks"),
        (
            {"bottlenecks": "block_1,blok_2"},
            "bottlenecks is 'block_1,blok_2'; it must list blocks, from block_0 to block_2, separated by commas; "
            "'blok_2' is not one. Did you mean 'block_2'?",
        ),
        (
            {"bottlenecks": ""},
            "bottlenecks is ''; it must list blocks, from block_0 to block_2, separated by commas; '' is not one",
        ),
        ({"bottlenecks": "block_1,block_1"}, "bottlenecks is 'block_1,block_1'; it must list each block once"),
        (
            {"bottlenecks": "block_1", "bottleneck": "pca"},
            "bottleneck is 'pca'; it must be one of linear, maxout",
        ),
        (
            {"bottlenecks": "block_1", "bottleneck_factor": 3},
            "bottleneck_factor is 3; it must be at least 2 and divide the number of features, 16",
        ),
    ],
)
def test_bottlenecks_that_cannot_be(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        small("mlp", "classification", **overrides)
    assert str(raised.value) == f"config.model.{message}"
