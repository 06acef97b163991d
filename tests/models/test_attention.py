"""Tests that cuDNN attention can be traced where cuDNN is not installed: shapes, saved arrays, FLOPs, no programs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.core.state import nbytes
from jaxpar.errors import UserError
from jaxpar.measure.flops import forward_flops
from jaxpar.models.attention import attend
from jaxpar.models.options import AttentionKernel

B, T, H, G, K = 3, 7, 4, 2, 8
Q, KV = (jax.ShapeDtypeStruct((B, T, heads, K), jnp.bfloat16) for heads in (H, G))
LENGTHS = jax.ShapeDtypeStruct((B,), jnp.int32)


def attention(kernel: AttentionKernel) -> Any:
    return lambda q, k, v, lengths_B: attend(q, k, v, kernel, is_causal=False, lengths_B=lengths_B)


@pytest.fixture(scope="module", autouse=True)
def without_cudnn() -> None:
    with pytest.raises(RuntimeError, match="cuDNN"):
        jax.eval_shape(lambda x: jax.nn.dot_product_attention(x, x, x, implementation="cudnn"), Q)


def test_shapes_and_flops() -> None:
    """Shapes and FLOPs are those of JAX's own attention, forward and backward."""
    arguments = Q, KV, KV, LENGTHS

    def gradients(kernel: AttentionKernel) -> Any:
        both = jax.value_and_grad(lambda *args: attention(kernel)(*args).sum(), argnums=(0, 1, 2))
        return jax.eval_shape(both, *arguments)

    assert jax.eval_shape(attention("cudnn"), *arguments) == Q
    assert gradients("cudnn") == gradients("xla")
    assert forward_flops(attention("cudnn"), *arguments) == forward_flops(attention("xla"), *arguments)


def test_saved_arrays() -> None:
    """As in the FlashAttention-2 paper, section 3.1: inputs, output and one float32 per row of the scores."""

    def saved(*args: Any) -> Any:
        return jax.vjp(attention("cudnn"), *args)[1]

    arrays = jax.tree.leaves(jax.eval_shape(saved, Q, KV, KV, LENGTHS))
    assert nbytes(arrays) == 2 * (2 * B * T * H * K + 2 * B * T * G * K) + 4 * B * H * T + 4 * B


def test_no_program() -> None:
    with pytest.raises(UserError, match=r"model\.attention selects cuDNN attention, but cuDNN is not installed"):
        jax.jit(attention("cudnn")).lower(Q, KV, KV, LENGTHS)
