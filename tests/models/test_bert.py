"""Tests padding, pooling and segments of the encoder. test_hf.py compares it with the reference BERT."""

from typing import Any

import numpy as np
import pytest

from jaxpar.models import build
from tests.models.small import CLASSES, CPU, LENGTH, TEXT, dropout_keys, fast_jit, small, small_config


@pytest.mark.parametrize(
    ("task", "overrides"), [("classification", {}), ("classification", {"pooling": "mean"}), ("masked_lm", {})]
)
def test_padding_changes_nothing(task: str, overrides: dict[str, Any]) -> None:
    """More padding and other tokens in the padding do not change the logits of real tokens."""
    _, params, batch = small("bert", task, **overrides)
    model = build(small_config("bert", task, max_length=2 * LENGTH, **overrides), TEXT, CPU)
    params["embed"]["positions"] = np.concatenate([params["embed"]["positions"]] * 2)
    apply = fast_jit(model.apply)
    # Without and with dropout: the mask at a position does not depend on the padded length.
    for keys_B in (None, dropout_keys()):
        logits = apply(params, batch, keys_B)
        longer = {
            "inputs": np.pad(batch["inputs"], ((0, 0), (0, LENGTH)), constant_values=7),
            "mask": np.pad(batch["mask"], ((0, 0), (0, LENGTH))),
        }
        again = apply(params, longer, keys_B)
        if task == "masked_lm":
            logits, again = logits[batch["mask"]], again[:, :LENGTH][batch["mask"]]
        np.testing.assert_allclose(again, logits, rtol=1e-5, atol=1e-5)


def test_mean_pooling_is_the_mean_over_real_tokens() -> None:
    model, params, batch = small("bert", "classification", pooling="mean")
    hidden = model.apply_layers(params, batch["inputs"], batch, None, 0, 4)
    for row, length in enumerate(batch["mask"].sum(axis=1)):
        pooled = np.mean(hidden[row, :length], axis=0)
        expected = pooled @ params["head"]["classifier"]["kernel"] + params["head"]["classifier"]["bias"]
        np.testing.assert_allclose(model.apply(params, batch)[row], expected, rtol=1e-4, atol=1e-5)
    assert expected.shape == (CLASSES,)


def test_segments_are_seen() -> None:
    model, params, batch = small("bert", "classification")
    apply = fast_jit(model.apply)
    logits = apply(params, batch)
    zeros = np.zeros((4, LENGTH), np.int32)
    np.testing.assert_allclose(apply(params, {**batch, "segments": zeros}), logits, rtol=1e-6)
    ones = zeros.copy()
    ones[1] = 1
    changed = np.abs(apply(params, {**batch, "segments": ones}) - logits).max(axis=1)
    assert changed[1] > 1e-3
    assert np.all(changed[[0, 2, 3]] < 1e-6)
