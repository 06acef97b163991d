"""Products of arrays in a dtype such as bfloat16 whose results, and only these, are in float32."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def float32_einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the einsum of two arrays of the same dtype in float32.

    The gradient of the result is rounded to the dtype of the arrays, so that its two products with them run at the rate
    of that dtype. Those of `jnp.einsum` with preferred_element_type would have a float32 operand.
    """
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _backward(subscripts: str, saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = saved
    rounded = gradient.astype(a.dtype)
    [da] = jax.linear_transpose(lambda a: jnp.einsum(subscripts, a, b), a)(rounded)
    [db] = jax.linear_transpose(lambda b: jnp.einsum(subscripts, a, b), b)(rounded)
    return da, db


float32_einsum.defvjp(lambda subscripts, a, b: (float32_einsum(subscripts, a, b), (a, b)), _backward)
