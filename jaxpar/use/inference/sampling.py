"""Chooses the next token from the logits of a language model. Array dims: B texts, V vocabulary."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import UserError

COLDEST, HOTTEST = 1e-5, 100_000  # temperatures by which logits can be divided in float32


class Sampling(NamedTuple):
    """Options for drawing tokens. The defaults always choose the most likely token."""

    temperature: float = 0.0  # divisor of the logits, from 1e-05 to 100,000; 0: choose the most likely token
    top_k: int = 0  # number of most likely tokens to draw from; 0: all
    # draw from the fewest most likely tokens whose probabilities sum up to at least this (Holtzman et al., "The Curious
    # Case of Neural Text Degeneration", 2020); 1: from all
    top_p: float = 1.0
    seed: int = 0  # seed of the random numbers, which depend on it and on the position alone

    def check(self, prefix: str = "") -> None:
        """Raise UserError if a value is of another type or out of range. prefix: what stands before its name."""
        for name, value in self._asdict().items():
            kinds = int if name in ("top_k", "seed") else int | float
            if isinstance(value, bool) or not isinstance(value, kinds):
                kind = "an integer" if kinds is int else "a number"
                raise UserError(f"{prefix}{name} is {value!r:.60}; it must be {kind}")
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


class Samplings(NamedTuple):
    """The options of several texts, as arrays, so that one program computes all options."""

    temperatures_B: np.ndarray  # float32
    top_ks_B: np.ndarray  # int32
    top_ps_B: np.ndarray  # float32
    seeds_B: np.ndarray  # uint32


def stack_samplings(samplings: Sequence[Sampling], vocab_size: int) -> Samplings:
    """Return the options of all texts. vocab_size: larger values of top_k are replaced by it."""
    temperatures, top_ks, top_ps, seeds = zip(*samplings, strict=True)
    return Samplings(
        np.asarray(temperatures, np.float32),
        np.asarray([min(top_k, vocab_size) for top_k in top_ks], np.int32),
        np.asarray(top_ps, np.float32),
        np.asarray(seeds, np.uint32),
    )


def choose_tokens(logits_BV: jax.Array, samplings: Samplings, positions_B: jax.Array) -> jax.Array:
    """Return the next token of each text, int32 [B], at positions_B. Temperature, then top_k, then top_p apply."""
    temperatures_B, top_ks_B, top_ps_B, seeds_B = map(jnp.asarray, samplings)
    best_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        warm_BV = logits_BV / jnp.where(temperatures_B > 0, temperatures_B, 1)[:, None]
        warm_BV = jax.lax.cond(
            jnp.any((top_ks_B > 0) | (top_ps_B < 1)),
            lambda: jnp.where(_is_likely(warm_BV, top_ks_B[:, None], top_ps_B[:, None]), warm_BV, -jnp.inf),
            lambda: warm_BV,
        )
        keys_B = jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(seeds_B), positions_B)
        drawn_B = jax.vmap(jax.random.categorical)(keys_B, warm_BV).astype(jnp.int32)
        return jnp.where(temperatures_B > 0, drawn_B, best_B)

    return jax.lax.cond(jnp.any(temperatures_B > 0), draw, lambda: best_B)


def _is_likely(logits_BV: jax.Array, top_ks_B1: jax.Array, top_ps_B1: jax.Array) -> jax.Array:
    """Return whether a token may be drawn. Tokens that are as likely as the last one of them may be drawn, too."""
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    is_beyond_BV = (top_ks_B1 > 0) & (jnp.arange(sorted_BV.shape[-1])[None] >= top_ks_B1)
    sorted_BV = jnp.where(is_beyond_BV, -jnp.inf, sorted_BV)
    probabilities_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
    # The first token always stays, and without top_p all do, whatever the rounding.
    stays_BV = ((before_BV < top_ps_B1) | (top_ps_B1 == 1)).at[:, 0].set(True) & jnp.isfinite(sorted_BV)
    least_B1 = jnp.min(jnp.where(stays_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    return logits_BV >= least_B1
