"""Tests that a model with a cache of earlier positions computes the logits of whole texts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models.attention import KeyValueCache, Stored, empty
from jaxpar.models.gpt import resolve
from tests.models.small import LLAMA, fast_jit, info_of, small, small_config

OPTIONS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "applied twice": {"num_applications": 2},
    "bottleneck": {"bottlenecks": "block_1"},
}
START_B = np.array([1, 4, 7, 9], np.int32)  # tokens of each text that are read first
SIZE = 16


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_equal_those_of_whole_texts(name: str) -> None:
    """The prompts have different lengths; then each text continues at its own position, one token at a time."""
    model, params, batch = small("gpt", "causal_lm", **OPTIONS[name])
    spec = resolve(small_config("gpt", "causal_lm", **OPTIONS[name]), info_of("gpt", "causal_lm"))[1]
    inputs_BT = batch["inputs"]
    whole_BTV = np.asarray(fast_jit(model.apply)(params, batch))

    @fast_jit
    def extend(params: Any, tokens_BT: jax.Array, start_B: jax.Array, stored: Stored) -> tuple[jax.Array, Stored]:
        cache = KeyValueCache(stored, start_B)
        return model.last(params, model.extend(params, tokens_BT, cache)), cache.extended()

    shape = (len(inputs_BT), SIZE, spec.num_kv_heads, spec.head_dim)
    stored = empty(spec.num_layers * spec.num_applications, shape, jnp.float32)
    prompts_BT = np.where(np.arange(START_B.max()) < START_B[:, None], inputs_BT[:, : START_B.max()], 13)
    logits_BTV, stored = extend(params, prompts_BT, np.zeros_like(START_B), stored)
    for text, length in enumerate(START_B):
        np.testing.assert_allclose(logits_BTV[text, :length], whole_BTV[text, :length], rtol=1e-5, atol=1e-5)
    rows = np.arange(len(inputs_BT))
    for step in range(3):
        positions_B = START_B + step
        logits_B1V, stored = extend(params, inputs_BT[rows, positions_B][:, None], positions_B, stored)
        np.testing.assert_allclose(logits_B1V[:, 0], whole_BTV[rows, positions_B], rtol=1e-5, atol=1e-5)
