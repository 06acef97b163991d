"""Tests the decoder against a Llama in NumPy, and that causal models do not attend to later positions."""

from typing import Any

import jax
import numpy as np

from tests.models.small import BATCH, LENGTH, LLAMA, fast_jit, small

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 4  # hidden size 16


def rms_norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + 1e-5) * scale


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def turn(x: np.ndarray, position: int) -> np.ndarray:
    """Rotate pair (i, i + K/2), as a complex number, by the angle position * 10000^(-2i/K)."""
    half = HEAD_DIM // 2
    numbers = x[:half] + 1j * x[half:]
    numbers = numbers * np.exp(1j * position / 10_000.0 ** (2 * np.arange(half) / HEAD_DIM))
    return np.concatenate([numbers.real, numbers.imag])


def attend(x_TD: np.ndarray, weights: dict[str, Any]) -> np.ndarray:
    """Compute causal attention one position and one head at a time."""
    q, k, v = (x_TD @ weights[name]["kernel"] for name in ("query", "key", "value"))
    out = np.zeros_like(x_TD)
    for t in range(len(x_TD)):
        for head in range(HEADS):
            own = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            group = head // (HEADS // KV_HEADS)
            shared = slice(group * HEAD_DIM, (group + 1) * HEAD_DIM)
            query = turn(q[t, own], t)
            scores = np.array([query @ turn(k[s, shared], s) for s in range(t + 1)]) / np.sqrt(HEAD_DIM)
            weight = np.exp(scores - scores.max())
            out[t, own] = weight / weight.sum() @ v[: t + 1, shared]
    return out @ weights["out"]["kernel"]


def llama(params: Any, tokens_T: np.ndarray) -> np.ndarray:
    """Compute the logits [T, V] of one text in float64."""
    params = jax.tree.map(np.float64, params)
    table = params["embed"]["tokens"]
    x = table[tokens_T]
    for index in range(3):
        weights = params[f"block_{index}"]
        x = x + attend(np.stack([rms_norm(row, weights["attention_norm"]["scale"]) for row in x]), weights["attention"])
        y = np.stack([rms_norm(row, weights["mlp_norm"]["scale"]) for row in x])
        mlp = {name: kernel["kernel"] for name, kernel in weights["mlp"].items()}
        x = x + (silu(y @ mlp["gate"]) * (y @ mlp["up"])) @ mlp["down"]
    return np.stack([rms_norm(row, params["head"]["norm"]["scale"]) for row in x]) @ table.T


def test_llama_options_equal_numpy() -> None:
    model, params, batch = small("gpt", "causal_lm", **LLAMA)
    # Rotary positions, no biases, and an MLP size of 8/3 D rounded up to 64.
    assert set(params["embed"]) == {"tokens"}
    assert params["block_0"]["mlp"]["gate"]["kernel"].shape == (16, 64)
    assert not any("bias" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params))
    logits = fast_jit(model.apply)(params, batch)
    for row in range(2):
        np.testing.assert_allclose(logits[row], llama(params, batch["inputs"][row]), rtol=1e-4, atol=1e-4)


def test_future_tokens_change_no_past_logits() -> None:
    for overrides in ({}, LLAMA):
        model, params, batch = small("gpt", "causal_lm", **overrides)
        apply = fast_jit(model.apply)
        changed = batch["inputs"].copy()
        changed[:, 6] = (changed[:, 6] + 1) % 50
        before, after = apply(params, batch), apply(params, {"inputs": changed})
        np.testing.assert_array_equal(before[:, :6], after[:, :6])
        assert np.all(np.abs(before[:, 6:] - after[:, 6:]).max(axis=2) > 1e-3)


def test_classifier_reads_the_last_real_token() -> None:
    model, params, batch = small("gpt", "classification")
    apply = fast_jit(model.apply)
    logits = apply(params, batch)
    padding = ~batch["mask"]
    other_padding = {**batch, "inputs": np.where(padding, 9, batch["inputs"])}
    np.testing.assert_array_equal(apply(params, other_padding), logits)
    last = batch["mask"].sum(axis=1) - 1
    tokens = batch["inputs"].copy()
    tokens[np.arange(BATCH), last] += 1
    assert np.all(np.abs(apply(params, {**batch, "inputs": tokens}) - logits).max(axis=1) > 1e-3)
    # Without a mask all positions are real.
    full = {"inputs": batch["inputs"], "mask": np.ones((BATCH, LENGTH), bool)}
    np.testing.assert_allclose(apply(params, {"inputs": batch["inputs"]}), apply(params, full), rtol=1e-5)
