"""Residuals of functions are compared with those counted by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.measure.operations import Residuals, residuals
from jaxpar.models.attention import attend

N, D, H, V = 6, 5, 7, 64
X = jax.ShapeDtypeStruct((N, D), jnp.float32)
WEIGHTS = {"up": jax.ShapeDtypeStruct((D, H), jnp.float32), "down": jax.ShapeDtypeStruct((H, D), jnp.float32)}


def perceptron(weights: Any, x_ND: jax.Array, _others: Any) -> jax.Array:
    return jnp.tanh(x_ND @ weights["up"]) @ weights["down"]


def test_an_array_counts_once_and_weights_do_not() -> None:
    """The input and the hidden activations are saved; tanh needs nothing more, as its slope follows from its result."""
    found = residuals(perceptron, WEIGHTS, X, ())
    slope = 4 * N * H  # JAX saves 1 - tanh(x)^2 as well, which XLA computes again without a scan
    assert found == Residuals(4 * (N * D + N * H) + slope, 4 * (N * D + N * H), 0.0)


def test_casts_of_weights_do_not_count() -> None:
    def narrow(weights: Any, x_ND: jax.Array, _others: Any) -> jax.Array:
        return x_ND.astype(jnp.bfloat16) @ weights["up"].astype(jnp.bfloat16)

    assert residuals(narrow, WEIGHTS, X, ()) == Residuals(2 * N * D, 2 * N * D, 0.0)  # x in bfloat16


def test_integers_are_inputs_of_the_step() -> None:
    """A lookup of tokens saves nothing, because the batch is in memory anyway."""

    def lookup(table_VD: Any, tokens_N: jax.Array, _others: Any) -> jax.Array:
        return table_VD.at[tokens_N].get(mode="promise_in_bounds")

    tokens, table = jax.ShapeDtypeStruct((N,), jnp.int32), jax.ShapeDtypeStruct((V, D), jnp.float32)
    assert residuals(lookup, table, tokens, ()).saved <= 4 * N  # at most the indices in another shape


def test_rematerialization_saves_the_input() -> None:
    def again(weights: Any, x_ND: jax.Array, others: Any) -> jax.Array:
        return jax.checkpoint(lambda weights, x_ND: perceptron(weights, x_ND, others))(weights, x_ND)

    assert residuals(again, WEIGHTS, X, ()) == Residuals(4 * N * D, 4 * N * D, 0.0)


def test_elementwise_operations_are_repeated() -> None:
    """Sine needs the cosine, which is computed again from the product, in as much memory."""

    def sine(weights: Any, x_ND: jax.Array, _others: Any) -> jax.Array:
        return jnp.sin(2 * jnp.sin(x_ND @ weights["up"]))

    found = residuals(sine, WEIGHTS, X, ())
    assert found == Residuals(4 * (N * D + 2 * N * H), 4 * (N * D + N * H), 0.0)


@pytest.mark.parametrize(("dtype", "narrow"), [(jnp.float16, 2), (jnp.float32, 4)])
def test_attention_without_a_kernel(dtype: Any, narrow: int) -> None:
    """Probabilities are saved in the dtype of the products; their gradient is float32, that of the scores narrow."""

    def attention(_weights: Any, x_BTHK: jax.Array, _others: Any) -> jax.Array:
        return attend(x_BTHK, x_BTHK, x_BTHK, "xla", is_causal=True, lengths_B=None)

    B, T, heads, K = 2, 32, 3, 4
    found = residuals(attention, {}, jax.ShapeDtypeStruct((B, T, heads, K), dtype), ())
    scores = B * heads * T * T
    assert (found.probabilities, found.score_gradients) == (narrow * scores, (4 + narrow) * scores)
    assert found.fused == narrow * (scores + B * T * heads * K)  # and the input
    assert residuals(perceptron, WEIGHTS, X, ()).score_gradients == 0


def test_products_in_a_loop() -> None:
    """An iteration holds its logits, and what is computed from them for the second product, and its result."""

    def loss(table_VD: jax.Array, x_ND: jax.Array, _others: Any) -> jax.Array:
        def add(total: jax.Array, x_D: jax.Array) -> tuple[jax.Array, None]:
            logits_V = table_VD @ x_D
            return total + jnp.exp(logits_V) @ table_VD, None

        return jax.lax.scan(add, jnp.zeros(D), jax.lax.stop_gradient(x_ND))[0].sum()

    table = jax.ShapeDtypeStruct((V, D), jnp.float32)
    assert residuals(lambda _, x, table: loss(table, x, ()), {}, X, table).looped == 4 * (V + V + D)
