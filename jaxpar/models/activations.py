"""The activation functions of the models, and MLPs that save little for the backward pass.

Array dims: D features, F features inside the MLP.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def _with_derivative(function: Callable[[jax.Array], tuple[jax.Array, jax.Array]]) -> Callable[[jax.Array], jax.Array]:
    """Return a function of x, given one that returns the value and the derivative. In 16 bits, it gets x in float32."""

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, derivative = function(x.astype(jnp.float32) if x.dtype.itemsize == 2 else x)
        return value.astype(x.dtype), derivative.astype(x.dtype)

    value = jax.custom_jvp(lambda x: both(x)[0])

    @value.defjvp
    def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        # With two casts of x, which XLA merges, a pipeline that cuts between the two saves x, not its cast.
        return both(*primals)[0], both(*primals)[1] * tangents[0]

    return value


def _of_gelu_tanh(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return GELU with an approximation of erf (Hendrycks & Gimpel 2016), as in GPT-2, and the derivative.

    (1 + tanh(a)) / 2 is sigmoid(2 a), which takes GPUs half as many instructions. Beyond 12 it is 0 or 1.
    """
    z, of_1, of_3 = jnp.clip(x, -12, 12), math.sqrt(8 / math.pi), 0.044715 * math.sqrt(8 / math.pi)
    share = jax.nn.sigmoid(z * (of_1 + of_3 * z * z))
    return x * share, share + x * share * (1 - share) * (of_1 + 3 * of_3 * z * z)


def _of_gelu(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return GELU (Hendrycks & Gimpel 2016) and its derivative, with absolute errors below 1e-6.

    erf(|x| / sqrt(2)) is 1 - exp(-x^2 / 2) P(t) with t = 1 / (1 + 0.3275911 |x| / sqrt(2)) and a polynomial P, up to
    1.5e-7 (Abramowitz & Stegun, "Handbook of Mathematical Functions", 7.1.26). The derivative has the same exponential.
    """
    t, bell = 1 / (1 + 0.3275911 / math.sqrt(2) * jnp.abs(x)), jnp.exp(-0.5 * x * x)
    polynomial = jnp.zeros_like(x)
    for coefficient in OF_ERF:
        polynomial = (polynomial + coefficient) * t
    tail = 0.5 * bell * polynomial  # the probability that a normal variable exceeds |x|
    share = jnp.where(x < 0, tail, 1 - tail)
    return x * share, share + x * bell * (1 / math.sqrt(2 * math.pi))


OF_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)  # of t^5 to t
_IN_16_BITS = _with_derivative(_of_gelu)  # with a faster erf than that of XLA
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: _IN_16_BITS(x) if x.dtype.itemsize == 2 else jax.nn.gelu(x, approximate=False),
    "gelu_tanh": _with_derivative(_of_gelu_tanh),
    "relu": jax.nn.relu,
    "swiglu": jax.nn.silu,  # applied to the gate
}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def activate(name: str, x: jax.Array) -> jax.Array:
    """Apply a function of ACTIVATIONS, and save its derivative instead of x, because reading takes less time."""
    return ACTIVATIONS[name](x)


def _activate_and_save(name: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(ACTIVATIONS[name], (x,), (jnp.ones_like(x),))


def _gradient_of_activation(name: str, derivative: jax.Array, slope: jax.Array) -> tuple[jax.Array]:
    # Without a barrier, XLA on GPUs saves x and a part of the derivative, which only with swiglu takes less memory.
    return ((derivative if name == "swiglu" else jax.lax.optimization_barrier(derivative)) * slope,)


activate.defvjp(_activate_and_save, _gradient_of_activation)


# The first kernels of an MLP, [D, F], each with its bias or None. SwiGLU has two, first that of the gate.
_Inner = tuple[tuple[jax.Array, jax.Array | None], ...]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def recomputed_mlp(
    activation: str, kernels_first: bool, x: jax.Array, inner: _Inner, kernel_FD: jax.Array
) -> jax.Array:
    """Return an MLP of x [..., D] without the last bias. The backward pass reads x and its products with the kernels.

    It computes the activations again. kernels_first: whether it also computes the gradients of the kernels before
    earlier layers can use that of x; XLA would hold what it computes them from until the end of the backward pass.
    """
    return _mlp_and_products(activation, kernels_first, x, inner, kernel_FD)[0]


def _mlp_and_products(
    activation: str, _kernels_first: bool, x: jax.Array, inner: _Inner, kernel_FD: jax.Array
) -> tuple[jax.Array, Any]:
    products = [x @ kernel for kernel, _ in inner]
    return _activated(activation, products, inner) @ kernel_FD, (x, products, inner, kernel_FD)


def _activated(activation: str, products: Sequence[jax.Array], inner: _Inner) -> jax.Array:
    sums = (x if bias is None else x + lifted(bias, x) for x, (_, bias) in zip(products, inner, strict=True))
    first, *rest = sums
    y = ACTIVATIONS[activation](first)
    return y * rest[0] if rest else y


def _gradients_of_mlp(
    activation: str, kernels_first: bool, saved: Any, slope: jax.Array
) -> tuple[jax.Array, _Inner, jax.Array]:
    x, products, inner, kernel_FD = saved
    # Without this barrier, XLA would keep the activations of the forward pass.
    products, slope = jax.lax.optimization_barrier((products, slope))
    y, pullback = jax.vjp(lambda products: _activated(activation, products, inner), products)
    # Used twice each: without the barrier, XLA computes them in two kernels, and stores the tanh for the second.
    y, (slopes,) = jax.lax.optimization_barrier((y, pullback(slope @ kernel_FD.T)))
    examples = tuple(range(x.ndim - 1))

    def of_kernel(x: jax.Array, slope: jax.Array) -> jax.Array:
        return jnp.tensordot(x, slope, (examples, examples))

    of_x = sum(slope @ kernel.T for slope, (kernel, _) in zip(slopes, inner, strict=True))
    kernels = [of_kernel(x, slope) for slope in slopes]
    of_last = of_kernel(y, slope)
    if kernels_first:
        of_x, kernels, of_last = jax.lax.optimization_barrier((of_x, kernels, of_last))
    biases = (
        None if bias is None else slope.sum(examples, dtype=jnp.float32).astype(bias.dtype)
        for slope, (_, bias) in zip(slopes, inner, strict=True)
    )
    return of_x, tuple(zip(kernels, biases, strict=True)), of_last


recomputed_mlp.defvjp(_mlp_and_products, _gradients_of_mlp)


def lifted(x_D: jax.Array, like: jax.Array) -> jax.Array:
    """Return x [D] with as many dims as another array."""
    return jnp.expand_dims(x_D, tuple(range(like.ndim - 1)))
