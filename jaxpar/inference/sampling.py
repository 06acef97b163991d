"""Chooses the next token from the logits of a language model. Array dims: B texts, V vocabulary."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import UserError

COLDEST, HOTTEST = 1e-5, 100_000  # temperatures by which logits can be divided in float32


class Sampling(NamedTuple):
    """Options for drawing tokens. The defaults always choose the most likely token.

    Attributes:
      temperature: divisor of the logits, from 1e-05 to 100,000; 0: choose the most likely token.
      top_k: number of most likely tokens to draw from; 0: all.
      top_p: draw from the fewest most likely tokens whose probabilities sum up to at least this (Holtzman et al.,
        "The Curious Case of Neural Text Degeneration", 2020); 1: from all.
      seed: seed of the random numbers, which depend on it and on the position alone.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self, prefix: str = "") -> None:
        """Raise UserError if a value is of another type or out of range. prefix: what stands before its name."""
        for name, value in self._asdict().items():
            kinds = int if name in ("top_k", "seed") else int | float
            if isinstance(value, bool) or not isinstance(value, kinds):
                kind = "an integer" if kinds is int else "a number"
                raise UserError(f"{prefix}{name} is {value!r}; it must be {kind}")
        if self.temperature != 0 and not COLDEST <= self.temperature <= HOTTEST:
            raise UserError(
                f"{prefix}temperature is {self.temperature!r:.30}; it must be 0, or from {COLDEST} to {HOTTEST:,}"
            )
        if self.top_k < 0:
            raise UserError(f"{prefix}top_k is {self.top_k!r:.60}; it must be at least 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"{prefix}top_p is {self.top_p}; it must be more than 0 and at most 1 (1: all tokens)")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"{prefix}seed is {self.seed!r:.60}; it must be at least 0 and less than 2**32")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0


def text_keys(seeds: Sequence[int]) -> jax.Array:
    """Return a random key for each seed."""
    return jax.vmap(jax.random.key)(np.asarray(seeds, np.uint32))


def choose_tokens(logits_BV: jax.Array, sampling: Sampling, keys_B: jax.Array, positions_B: jax.Array) -> jax.Array:
    """Return the next token of each text, int32 [B].

    Args:
      logits_BV: float32.
      sampling: temperature, then top_k, then top_p apply.
      keys_B: one random key per text.
      positions_B: position of the next token.
    """
    if sampling.is_greedy:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        logits_BV = jnp.where(_is_likely(logits_BV, sampling.top_k, sampling.top_p), logits_BV, -jnp.inf)
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, positions_B)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def _is_likely(logits_BV: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """Return whether a token may be drawn. Tokens that are as likely as the last one of them may be drawn, too."""
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    if top_k:
        sorted_BV = sorted_BV.at[:, top_k:].set(-jnp.inf)
    probabilities_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
    # The first token always stays, whatever the rounding.
    stays_BV = (before_BV < top_p).at[:, 0].set(True) & jnp.isfinite(sorted_BV)
    least_B1 = jnp.min(jnp.where(stays_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    return logits_BV >= least_B1
