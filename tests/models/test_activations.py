"""Tests of activation functions against float64, and of what they save."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from jaxpar.models.activations import ACTIVATIONS, activate
from tests.models.small import fast_jit

Function = Callable[[np.ndarray], np.ndarray]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * special.ndtr(x)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def slope_of_gelu(x: np.ndarray) -> np.ndarray:
    return special.ndtr(x) + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def slope_of_gelu_tanh(x: np.ndarray) -> np.ndarray:
    tanh = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * math.sqrt(2 / math.pi) * (1 + 0.134145 * x**2)


FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "gelu": (gelu, slope_of_gelu),
    "gelu_tanh": (gelu_tanh, slope_of_gelu_tanh),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(x.dtype)),
    "swiglu": (
        lambda x: x * special.expit(x),
        lambda x: special.expit(x) * (1 + x * (1 - special.expit(x))),
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, dtype: str) -> None:
    """Values and derivatives are those in float64, rounded to the dtype once; the JVP and the VJP agree."""
    x = jnp.concatenate([jnp.linspace(-14, 14, 20_001), jnp.array([-1e38, -6e4, -148, 148, 6e4, 1e38])]).astype(dtype)
    x = x[(x != 0) & jnp.isfinite(x)]
    y, pullback = fast_jit(lambda x: jax.vjp(lambda x: activate(name, x), x))(x)
    [slope] = pullback(jnp.ones_like(x))
    forward = fast_jit(lambda x: jax.jvp(ACTIVATIONS[name], (x,), (jnp.ones_like(x),)))(x)
    wide = np.asarray(x, np.float64)
    of_rounding = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-10}[dtype]
    # That of swiglu is JAX's own, which rounds several times.
    absolute = 8 * of_rounding if name == "swiglu" else 1e-6 if dtype != "float32" or name == "gelu" else 3e-6
    for found, function in zip((y, slope), FUNCTIONS[name], strict=True):
        assert found.dtype == x.dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), function(wide), rtol=of_rounding, atol=absolute)
    for one, other in zip(forward, (y, slope), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_derivative_is_saved(name: str) -> None:
    x = jnp.ones((3, 7), "bfloat16")
    saved = jax.eval_shape(lambda x: jax.vjp(lambda x: activate(name, x), x)[1], x)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(saved)] == [((3, 7), jnp.bfloat16)]
