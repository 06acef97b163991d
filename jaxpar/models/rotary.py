"""Rotary positions (Su et al. 2021, section 3.4.2), with the bases and scalings of Llama and models like it.

Array dims: B examples, T positions, H heads, K features of a head.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.errors import UserError
from jaxpar.files import parse_json

# The keys of each scaling, as in config.json of Hugging Face
SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class Rope(NamedTuple):
    """The frequencies of rotary positions."""

    base: float = 10_000.0  # pair i of K/2 turns by base^(-2i/K) from one position to the next
    factor: float = 1.0  # what the scaling divides the frequencies by
    # with `length`, frequencies of at most this many turns within it are divided by the factor
    low_freq_factor: float = 1.0
    # those of at least this many turns are not; between the two, the divisor is interpolated
    high_freq_factor: float = 1.0
    length: float = 0.0  # number of positions of the training before the scaling (Llama 3); 0: all are divided (linear)

    def frequencies(self, half: int) -> jax.Array:
        """Return the angle between two positions of each pair of features, [K/2]."""
        frequencies_K = self.base ** (-jnp.arange(half, dtype=jnp.float32) / half)
        if self.factor == 1:
            return frequencies_K
        if not self.length:
            return frequencies_K / self.factor
        turns_K = self.length * frequencies_K / (2 * math.pi)
        kept_K = jnp.clip((turns_K - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return frequencies_K * ((1 - kept_K) / self.factor + kept_K)


def rope_of(base: float | None, scaling: str | None) -> Rope:
    """Return the frequencies for config.model.rope_base and rope_scaling. Raises UserError if one is invalid."""
    base = Rope().base if base is None else base
    if not 1 < base < math.inf:
        raise UserError(f"config.model.rope_base is {base}; it must be a number greater than 1")
    if scaling is None:
        return Rope(base)
    try:
        values = parse_json(scaling)
        problem = scaling_problem(values)
    except ValueError as error:
        problem = str(error)
    if problem:
        example = '{"rope_type": "linear", "factor": 2.0}, see docs/howto/pretrained.md'
        what = f"{scaling!r:.200} ({problem})"
        raise UserError(f"config.model.rope_scaling is {what}; it must be None or JSON like {example}")
    names = ("factor", "low_freq_factor", "high_freq_factor", "length")
    numbers = [values[key] for key in SCALINGS[values["rope_type"]]]
    return Rope(base, **dict(zip(names, numbers, strict=False)))


def scaling_problem(values: Any) -> str:
    """Return why values are not a scaling in the form of config.json of Hugging Face; empty if they are one."""
    kind = values.get("rope_type") if isinstance(values, Mapping) else None
    if not isinstance(kind, str) or kind not in SCALINGS:
        return f"rope_type must be {' or '.join(SCALINGS)}"
    if values.keys() != {"rope_type", *SCALINGS[kind]}:
        return f"the keys must be rope_type, {', '.join(SCALINGS[kind])}"
    numbers = [values[key] for key in SCALINGS[kind]]
    if not all(type(number) in (int, float) and 0 < number < math.inf for number in numbers) or values["factor"] < 1:
        return "the values must be positive numbers, and factor at least 1"
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        return "low_freq_factor must be less than high_freq_factor"
    return ""


def rotate(x_BTHK: jax.Array, rope: Rope, positions_BT: jax.Array | None = None) -> jax.Array:
    """Turn pair (i, i + K/2) at position t by t times its frequency, as in Llama.

    positions_BT: the positions, the same for all examples if B is 1; None: 0 to T - 1.
    """
    half = x_BTHK.shape[-1] // 2
    if positions_BT is None:
        positions_BT = jnp.arange(x_BTHK.shape[1])[None, :]
    angles_BTK = positions_BT.astype(jnp.float32)[:, :, None] * rope.frequencies(half)[None, None, :]
    cos, sin = jnp.cos(angles_BTK)[:, :, None, :], jnp.sin(angles_BTK)[:, :, None, :]
    a, b = (x_BTHK[..., :half].astype(jnp.float32), x_BTHK[..., half:].astype(jnp.float32))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHK.dtype)
