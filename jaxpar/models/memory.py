"""Keys and values that a causal transformer keeps, so that the next token needs no second pass over the earlier ones.

Array dims: B examples, S positions that can be remembered, T new positions, G key and value heads, K features of a
head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class KeyValues(NamedTuple):
    """Keys and values [B, S, G, K] of an attention layer. Those of positions that do not exist yet have any value."""

    keys: jax.Array
    values: jax.Array


Stored = tuple[KeyValues, ...]  # of all attention layers; a layer that is applied several times counts each time


def empty(num_layers: int, shape: tuple[int, int, int, int], dtype: DTypeLike) -> Stored:
    """Return the memory of empty texts. shape: (B, S, G, K)."""
    return tuple(KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers))


class Memory:
    """The memory while the layers of a model are traced: each attention layer extends its part, in order."""

    def __init__(self, stored: Stored, start_B: jax.Array):
        """Begin before the first layer.

        Args:
          stored: the keys and values of earlier positions.
          start_B: number of earlier positions of each example; the new ones follow them.
        """
        self._stored, self._start_B = stored, start_B
        self._extended: list[KeyValues] = []

    def positions(self, number: int) -> jax.Array:
        """Return the positions of `number` new tokens, [B, T]."""
        return self._start_B[:, None] + jnp.arange(number)[None, :]

    def extend(self, k_BTGK: jax.Array, v_BTGK: jax.Array) -> KeyValues:
        """Add the keys and values of the next layer at the new positions, and return all of them.

        Positions from S on are dropped.
        """
        B, T = k_BTGK.shape[:2]
        where = jnp.arange(B)[:, None], self.positions(T)
        stored = self._stored[len(self._extended)]
        self._extended.append(
            KeyValues(stored.keys.at[where].set(k_BTGK, mode="drop"), stored.values.at[where].set(v_BTGK, mode="drop"))
        )
        return self._extended[-1]

    def extended(self) -> Stored:
        """Return the memory after the last layer."""
        assert len(self._extended) == len(self._stored), "a layer did not use its memory"
        return tuple(self._extended)
