"""Compares attention by cuDNN on a context axis with attention to whole texts, on one GPU: results and gradients.

    scripts/python scripts/bench/attention_chunks.py [--length=2048] [--context=4]

Computes the positions of each device of the axis one after the other, with the keys that it gathers.
Prints the largest differences relative to XLA's attention in float32, of cuDNN on the axis and of cuDNN on whole texts,
and exits with 1 if those on the axis are more than twice as large.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.command_line import Parser, integer
from jaxpar.core.context import attend_to_texts, order
from jaxpar.errors import TrainingError, exit_code
from jaxpar.models.attention import attend
from scripts.bench.tables import show

BATCH, HEADS, GROUPS, SIZE = 2, 8, 4, 64


def main() -> None:
    """Print the differences."""
    parser = Parser(__doc__)
    parser.add_argument("--length", type=integer(1), default=2048, help="tokens of a text")
    parser.add_argument("--context", type=integer(2), default=4, help="devices of the axis")
    arguments = parser.parse()
    length, context = arguments.length, arguments.context
    places = order(length, context)
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    q, k, v, dy = (
        jax.random.normal(key, (BATCH, length, number, SIZE), jnp.bfloat16)
        for key, number in zip(keys, heads, strict=True)
    )
    lengths = jnp.array([length, length // 2 + 3])

    def whole(kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, kernel, is_causal=True, lengths_B=lengths)

    def on_axis(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        parts = [attend_to_texts(q[:, own], k, v, jnp.array(own), lengths) for own in np.split(places, context)]
        return jnp.zeros_like(q).at[:, places].set(jnp.concatenate(parts, axis=1))

    def results(attention: Callable[..., jax.Array], *inputs: jax.Array) -> list[jax.Array]:
        is_text = (jnp.arange(length)[None, :] < lengths[:, None])[:, :, None, None]  # padding has any result
        y, pull = jax.vjp(attention, *inputs)
        return [jnp.where(is_text, x, 0) for x in (y, *pull(jnp.where(is_text, dy, 0).astype(y.dtype)))]

    exact = jax.jit(lambda *x: results(lambda *a: whole("xla", *a), *x))(*(x.astype(jnp.float32) for x in (q, k, v)))
    found = {
        "whole texts": jax.jit(lambda *x: results(lambda *a: whole("cudnn", *a), *x))(q, k, v),
        f"context of {context}": jax.jit(lambda *x: results(on_axis, *x))(q, k, v),
    }
    errors = {
        name: [float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in zip(values, exact, strict=True)]
        for name, values in found.items()
    }
    rows = [[name, *(f"{one:.2e}" for one in each)] for name, each in errors.items()]
    show([f"attention, {length} tokens", "output", "dq", "dk", "dv"], rows)
    if not all(own <= 2 * one for one, own in zip(*errors.values(), strict=True)):
        raise TrainingError("the differences on the axis are more than twice those of whole texts")


if __name__ == "__main__":
    sys.exit(exit_code(main))
