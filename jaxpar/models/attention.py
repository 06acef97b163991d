"""Attention by one of three kernels. Dims: B batch, T positions, H query heads, G key and value heads, K head size.

    xla      two products and a softmax, for any device
    batched  the same on contiguous matrices, one per head, which is faster on CPUs
    cudnn    the fused kernel of cuDNN, for NVIDIA GPUs of compute capability 8.0 or higher

JAX traces the call of cuDNN only where cuDNN is installed, but a model for GPUs can be planned anywhere: elsewhere, a
primitive with the same shapes and the same saved arrays is traced. Compiling it raises UserError.
"""

import functools
import math
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir
from jax.typing import DTypeLike

from jaxpar.errors import UserError
from jaxpar.models.options import AttentionKernel
from jaxpar.tasks.einsum import float32_einsum


def attend(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    kernel: AttentionKernel,
    *,
    is_causal: bool,
    lengths_B: jax.Array | None,
) -> jax.Array:
    """Compute `jax.nn.dot_product_attention` of queries, keys and values: [B, T, H, K].

    is_causal: whether positions attend only to themselves and earlier positions. lengths_B: number of positions of each
    example that can be attended to; None: all.
    """
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    if kernel == "cudnn" and not _is_cudnn_installed():
        return _abstract_cudnn(is_causal, q_BTHK, k_BTGK, v_BTGK, lengths_B)
    if kernel == "cudnn":
        with jax.numpy_dtype_promotion("standard"):  # JAX's own code mixes bfloat16 and float32
            return jax.nn.dot_product_attention(
                q_BTHK, k_BTGK, v_BTGK, is_causal=is_causal, key_value_seq_lengths=lengths_B, implementation="cudnn"
            )
    q_BTGRK = q_BTHK.reshape(B, T, G, H // G, K)
    if kernel == "xla":
        # einsum makes its second array the left operand. In this order, XLA for GPUs transposes nothing.
        scores = float32_einsum("bsgk,btgrk->bgrts", k_BTGK, q_BTGRK) / math.sqrt(K)
        probabilities = _probabilities(scores, v_BTGK.dtype, is_causal, lengths_B)
        return jnp.einsum("bsgk,bgrts->btgrk", v_BTGK, probabilities).reshape(B, T, H, K)
    # Transposed first, XLA on CPUs takes about three quarters of the time, forward and backward.
    q_BGRTK, k_BGSK, v_BGSK = q_BTGRK.transpose(0, 2, 3, 1, 4), k_BTGK.swapaxes(1, 2), v_BTGK.swapaxes(1, 2)
    scores = float32_einsum("bgrtk,bgsk->bgrts", q_BGRTK, k_BGSK) / math.sqrt(K)
    y_BGRTK = jnp.einsum("bgrts,bgsk->bgrtk", _probabilities(scores, v_BGSK.dtype, is_causal, lengths_B), v_BGSK)
    return y_BGRTK.transpose(0, 3, 1, 2, 4).reshape(B, T, H, K)


def attend_earlier(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """Compute the attention of new positions of a text to all positions up to their own: [B, T, H, K].

    The keys and values are those of positions 0 to S - 1, including the positions of the queries, `positions_BT`.
    """
    (B, T, H, K), (_, S, G, _) = q_BTHK.shape, k_BSGK.shape
    q_BTGRK = q_BTHK.reshape(B, T, G, H // G, K)
    scores = float32_einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BSGK) / math.sqrt(K)
    is_seen_BTS = jnp.arange(S)[None, None, :] <= positions_BT[:, :, None]
    scores = jnp.where(is_seen_BTS[:, None, None, :, :], scores, jnp.finfo(scores.dtype).min)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v_BSGK.dtype)
    return jnp.einsum("bgrts,bsgk->btgrk", probabilities, v_BSGK).reshape(B, T, H, K)


def _probabilities(scores: jax.Array, dtype: DTypeLike, is_causal: bool, lengths_B: jax.Array | None) -> jax.Array:
    """Return the attention probabilities, [B, G, R, T, S], for scores in float32."""
    T = scores.shape[-1]
    lowest = 0.5 * jnp.finfo(scores.dtype).min  # finite, so that a row without any position to attend to is not NaN
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones((1, 1, 1, T, T), bool)), scores, lowest)
    if lengths_B is not None:
        is_real_BT = jnp.arange(T)[None, :] < lengths_B[:, None]
        scores = jnp.where(is_real_BT[:, None, None, None, :], scores, lowest)
    return jax.nn.softmax(scores, axis=-1).astype(dtype)


@functools.cache
def _is_cudnn_installed() -> bool:
    x = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)
    try:
        jax.eval_shape(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), x, x, x)
    except RuntimeError:
        return False
    return True


_forward = core.Primitive("cudnn_attention_forward")  # q, k, v -> y, float32 statistics of the softmax [B, H, T]
_backward = core.Primitive("cudnn_attention_backward")  # q, k, v, y, statistics, dy -> dq, dk, dv
_forward.multiple_results = _backward.multiple_results = True
_forward.def_abstract_eval(
    lambda q, *_arrays, **_options: [q, q.update(shape=(q.shape[0], q.shape[2], q.shape[1]), dtype=jnp.float32)]
)
_backward.def_abstract_eval(lambda q, k, v, *_arrays, **_options: [q, k, v])


def _refuse_to_lower(*_arguments: Any, **_parameters: Any) -> NoReturn:
    rule = "it must be 'xla', or install nvidia-cudnn-cu12"
    raise UserError(f"config.model.attention selects cuDNN attention, but cuDNN is not installed; {rule}")


mlir.register_lowering(_forward, _refuse_to_lower)
mlir.register_lowering(_backward, _refuse_to_lower)


_Arrays = tuple[jax.Array | None, ...]  # q, k, v and lengths_B, or what the backward pass reads


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _abstract_cudnn(is_causal: bool, *inputs: jax.Array | None) -> jax.Array:
    return _abstract_forward(is_causal, *inputs)[0]


def _abstract_forward(is_causal: bool, *inputs: jax.Array | None) -> tuple[jax.Array, _Arrays]:
    *arrays, lengths_B = inputs
    y, statistics = _forward.bind(*arrays, is_causal=is_causal)
    return y, (*arrays, y, statistics, lengths_B)


def _abstract_backward(is_causal: bool, saved: _Arrays, dy: jax.Array) -> _Arrays:
    *arrays, _lengths_B = saved
    return (*_backward.bind(*arrays, dy, is_causal=is_causal), None)


_abstract_cudnn.defvjp(_abstract_forward, _abstract_backward)


class KeyValues(NamedTuple):
    """Keys and values [B, S, G, K] of an attention layer. Those of positions that do not exist yet have any value."""

    keys: jax.Array
    values: jax.Array


Stored = tuple[KeyValues, ...]  # of all attention layers; a layer that is applied several times counts each time


def empty(num_layers: int, shape: tuple[int, int, int, int], dtype: DTypeLike) -> Stored:
    """Return the keys and values of empty texts. shape: (B, S, G, K)."""
    return tuple(KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers))


class KeyValueCache:
    """The keys and values of earlier positions while the layers of a model are traced: each attention layer extends its
    part, in order.
    """

    def __init__(self, stored: Stored, start_B: jax.Array):
        """Begin before the first layer. start_B: number of earlier positions of each example, which `stored` holds."""
        self._stored, self._start_B = stored, start_B
        self._extended: list[KeyValues] = []

    def positions(self, number: int) -> jax.Array:
        """Return the positions of `number` new tokens, [B, T]."""
        return self._start_B[:, None] + jnp.arange(number)[None, :]

    def extend(self, k_BTGK: jax.Array, v_BTGK: jax.Array) -> KeyValues:
        """Add the keys and values of the next layer at the new positions, up to S, and return all of them."""
        B, T = k_BTGK.shape[:2]
        where = jnp.arange(B)[:, None], self.positions(T)
        stored = self._stored[len(self._extended)]
        self._extended.append(
            KeyValues(stored.keys.at[where].set(k_BTGK, mode="drop"), stored.values.at[where].set(v_BTGK, mode="drop"))
        )
        return self._extended[-1]

    def extended(self) -> Stored:
        """Return the keys and values after the last layer."""
        assert len(self._extended) == len(self._stored), "a layer did not use its cache"
        return tuple(self._extended)
