"""Attention by one of three kernels. Dims: B batch, T positions, H query heads, G key and value heads, K head size.

    xla      two products and a softmax, for any device
    batched  the same on contiguous matrices, one per head, which is faster on CPUs
    cudnn    the fused kernel of cuDNN, for NVIDIA GPUs of compute capability 8.0 or higher

JAX traces the call of cuDNN only where cuDNN is installed, but a model for GPUs can be planned anywhere: elsewhere, a
primitive with the same shapes and the same saved arrays is traced. Compiling it raises UserError.
"""

import functools
import math
from typing import Any, NoReturn

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
    example that can be attended to, at least 1; None: all.
    """
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    if kernel == "cudnn":
        return attend_by_cudnn(q_BTHK, k_BTGK, v_BTGK, is_causal=is_causal, lengths_B=lengths_B)
    is_seen = _is_seen(T, is_causal, lengths_B)
    if is_seen is not None:
        # Without the barrier, a scan over layers computes the mask before its loop, in the size of the scores.
        q_BTHK, is_seen = jax.lax.optimization_barrier((q_BTHK, is_seen))
    q_BTGRK = q_BTHK.reshape(B, T, G, H // G, K)
    if kernel == "xla":
        # einsum makes its second array the left operand. In this order, XLA for GPUs transposes no scores.
        q_BQGK = q_BTGRK.swapaxes(2, 3).reshape(B, T * H // G, G, K)  # all queries that share keys
        scores = float32_einsum("bsgk,bqgk->bgqs", k_BTGK, q_BQGK) / math.sqrt(K)
        if is_seen is not None and is_causal:
            is_seen = is_seen.repeat(H // G, axis=2)
        y_BQGK = jnp.einsum("bsgk,bgqs->bqgk", v_BTGK, _probabilities(scores, is_seen, v_BTGK.dtype))
        return y_BQGK.reshape(B, T, H // G, G, K).swapaxes(2, 3).reshape(B, T, H, K)
    # Transposed first, XLA on CPUs takes about three quarters of the time, forward and backward.
    q_BGRTK, k_BGSK, v_BGSK = q_BTGRK.transpose(0, 2, 3, 1, 4), k_BTGK.swapaxes(1, 2), v_BTGK.swapaxes(1, 2)
    scores = float32_einsum("bgrtk,bgsk->bgrts", q_BGRTK, k_BGSK) / math.sqrt(K)
    is_seen = None if is_seen is None else is_seen[:, :, None]
    y_BGRTK = jnp.einsum("bgrts,bgsk->bgrtk", _probabilities(scores, is_seen, v_BGSK.dtype), v_BGSK)
    return y_BGRTK.transpose(0, 3, 1, 2, 4).reshape(B, T, H, K)


def attend_by_cudnn(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    *,
    is_causal: bool,
    lengths_B: jax.Array | None,
    is_seen_TS: jax.Array | None = None,
) -> jax.Array:
    """Compute the attention of T positions to S others: [B, T, H, K]. is_seen_TS: which each attends to; None: all."""
    if not _is_cudnn_installed():
        return _abstract_cudnn(is_causal, q_BTHK, k_BSGK, v_BSGK, lengths_B, is_seen_TS)
    with jax.numpy_dtype_promotion("standard"):  # JAX's own code mixes bfloat16 and float32
        return jax.nn.dot_product_attention(
            q_BTHK,
            k_BSGK,
            v_BSGK,
            mask=None if is_seen_TS is None else is_seen_TS[None, None],
            is_causal=is_causal,
            key_value_seq_lengths=lengths_B,
            implementation="cudnn",
        )


def attend_chunks(
    q_NBCHK: jax.Array,
    k_MBCGK: jax.Array,
    v_MBCGK: jax.Array,
    pairs: tuple[jax.Array, jax.Array],
    starts: tuple[jax.Array, jax.Array],
    *,
    is_causal: bool,
    lengths_B: jax.Array,
) -> jax.Array:
    """Compute the attention of N chunks of positions to M chunks, without an array of all scores: [N, B, C, H, K].

    The softmax is computed as the chunks are read (Dao et al., "FlashAttention", 2022, section 3.1). The backward pass
    computes the scores again.

    Args:
      q_NBCHK: queries of N chunks of C positions.
      k_MBCGK: keys of M chunks of any number of positions.
      v_MBCGK: values.
      pairs: indices [P] of the chunks of queries and of keys in each pair that attends.
      starts: position in the text of the first element of each chunk, of queries [N] and of keys [M].
      is_causal: whether positions attend only to themselves and earlier positions.
      lengths_B: number of positions of each example that can be attended to.
    """
    return _attend_chunks(is_causal, q_NBCHK, k_MBCGK, v_MBCGK, pairs, starts, lengths_B)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_chunks(is_causal: bool, q: Any, k: Any, v: Any, pairs: Any, starts: Any, lengths_B: Any) -> Any:
    """Return the attention, and the logarithm of the sums of the softmax, [N, B, H, C]."""
    (N, B, C, H, K), G = q.shape, k.shape[3]
    empty = (
        jnp.zeros((N, B, G, H // G, C, K), jnp.float32),
        jnp.full((N, B, G, H // G, C), jnp.finfo(jnp.float32).min),
        jnp.zeros((N, B, G, H // G, C), jnp.float32),
    )

    def add(carry: Any, pair: Any) -> tuple[Any, None]:
        i, j = pair
        total, most, weight = (x[i] for x in carry)
        scores, _ = _scores(is_causal, q, k, pair, starts, lengths_B)
        higher = jnp.maximum(most, scores.max(-1))
        unnormalized = jnp.exp(scores - higher[..., None])
        scale = jnp.exp(most - higher)
        part = float32_einsum("bgrts,bsgk->bgrtk", unnormalized.astype(v.dtype), v[j])
        now = total * scale[..., None] + part, higher, weight * scale + unnormalized.sum(-1)
        return tuple(x.at[i].set(new) for x, new in zip(carry, now, strict=True)), None

    total, most, weight = jax.lax.scan(add, empty, pairs)[0]
    y = jnp.moveaxis(total / weight[..., None], 4, 2).reshape(q.shape).astype(q.dtype)
    return y, most + jnp.log(weight)


def _scores(is_causal: bool, q: Any, k: Any, pair: Any, starts: Any, lengths_B: Any) -> tuple[jax.Array, jax.Array]:
    """Return the scores of a pair of chunks [B, G, R, C, S], and the queries [B, C, G, R, K]."""
    (i, j), (_, B, C, H, K), (_, _, S, G, _) = pair, q.shape, k.shape
    q_BCGRK = q[i].reshape(B, C, G, H // G, K)
    scores = float32_einsum("btgrk,bsgk->bgrts", q_BCGRK, k[j]) / math.sqrt(K)
    keys_S = starts[1][j] + jnp.arange(S)
    is_seen = (keys_S[None, :] < lengths_B[:, None])[:, None, None, None, :]
    if is_causal:
        is_seen &= (keys_S[None, :] <= (starts[0][i] + jnp.arange(C))[:, None])[None, None, None]
    return jnp.where(is_seen, scores, 0.5 * jnp.finfo(jnp.float32).min), q_BCGRK


def _attend_chunks_forward(is_causal: bool, q: Any, k: Any, v: Any, pairs: Any, starts: Any, lengths_B: Any) -> Any:
    y, logs = _attend_chunks(is_causal, q, k, v, pairs, starts, lengths_B)
    return (y, logs), (q, k, v, pairs, starts, lengths_B, y, logs)


def _attend_chunks_backward(is_causal: bool, saved: Any, gradients: Any) -> Any:
    q, k, v, pairs, starts, lengths_B, y, logs = saved
    dy, G = gradients[0], k.shape[3]
    parts = (*q.shape[:3], G, -1, q.shape[-1])
    dy_NBCGRK = dy.reshape(parts)
    inner = (dy_NBCGRK.astype(jnp.float32) * y.reshape(parts).astype(jnp.float32)).sum(-1)  # [N, B, C, G, R]
    inner = jnp.moveaxis(inner, 2, -1)

    def add(carry: Any, pair: Any) -> tuple[Any, None]:
        (dq, dk, dv), (i, j) = carry, pair
        scores, q_BCGRK = _scores(is_causal, q, k, pair, starts, lengths_B)
        probabilities = jnp.exp(scores - logs[i][..., None])
        dprobabilities = float32_einsum("btgrk,bsgk->bgrts", dy_NBCGRK[i], v[j])
        dscores = probabilities * (dprobabilities - inner[i][..., None]) / math.sqrt(q.shape[-1])
        narrow, scores_dtype = probabilities.astype(v.dtype), dscores.astype(q.dtype)
        dv = dv.at[j].add(float32_einsum("bgrts,btgrk->bsgk", narrow, dy_NBCGRK[i]))
        dq = dq.at[i].add(float32_einsum("bgrts,bsgk->btgrk", scores_dtype, k[j]))
        return (dq, dk.at[j].add(float32_einsum("bgrts,btgrk->bsgk", scores_dtype, q_BCGRK)), dv), None

    zeros = jnp.zeros(dy_NBCGRK.shape), jnp.zeros(k.shape), jnp.zeros(v.shape)
    dq, dk, dv = jax.lax.scan(add, zeros, pairs)[0]
    return dq.reshape(q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


_attend_chunks.defvjp(_attend_chunks_forward, _attend_chunks_backward)


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


def _is_seen(T: int, is_causal: bool, lengths_B: jax.Array | None) -> jax.Array | None:
    """Return which positions are attended to, [B or 1, 1, T or 1, T]; None: all."""
    is_seen = jnp.tril(jnp.ones((1, 1, T, T), bool)) if is_causal else None
    if lengths_B is None:
        return is_seen
    is_real = (jnp.arange(T)[None, :] < lengths_B[:, None])[:, None, None, :]
    return is_real if is_seen is None else is_seen & is_real


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _probabilities(scores: jax.Array, is_seen: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """Return the attention probabilities, the softmax over the last dim of scores in float32.

    The backward pass reads nothing else; JAX's own would save them in float32, too.
    """
    if is_seen is not None:
        # In the size of the mask: a scan over layers would hold a constant in the size of the scores.
        lowest = jnp.where(is_seen, 0.0, 0.5 * jnp.finfo(scores.dtype).min)
        scores = jnp.where(is_seen, scores, lowest)
    return jax.nn.softmax(scores, axis=-1).astype(dtype)


def _probabilities_forward(scores: jax.Array, is_seen: jax.Array | None, dtype: DTypeLike) -> tuple[jax.Array, Any]:
    probabilities = _probabilities(scores, is_seen, dtype)
    return probabilities, probabilities


def _probabilities_backward(_dtype: DTypeLike, probabilities: jax.Array, dy: jax.Array) -> tuple[jax.Array, None]:
    wide = jax.lax.optimization_barrier(probabilities).astype(jnp.float32)  # else XLA keeps the scores for it
    dy = dy.astype(jnp.float32)
    # Rounded probabilities do not add up to 1. Without the quotient, the gradient of a confident row would be lost.
    mean = (wide * dy).sum(-1, keepdims=True) / wide.sum(-1, keepdims=True)
    return wide * (dy - mean), None


_probabilities.defvjp(_probabilities_forward, _probabilities_backward)


@functools.cache
def _is_cudnn_installed() -> bool:
    x = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)
    try:
        jax.eval_shape(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), x, x, x)
    except RuntimeError:
        return False
    return True


_forward = core.Primitive("cudnn_attention_forward")  # q, k, v, bias -> y, float32 statistics of the softmax [B, H, T]
_backward = core.Primitive("cudnn_attention_backward")  # q, k, v, y, statistics, dy, bias -> dq, dk, dv, dbias
_forward.multiple_results = _backward.multiple_results = True
_forward.def_abstract_eval(
    lambda q, *_arrays, **_options: [q, q.update(shape=(q.shape[0], q.shape[2], q.shape[1]), dtype=jnp.float32)]
)
_backward.def_abstract_eval(lambda q, k, v, _y, _statistics, _dy, *bias, **_options: [q, k, v, *bias])


def _refuse_to_lower(*_arguments: Any, **_parameters: Any) -> NoReturn:
    rule = "it must be 'xla', or install nvidia-cudnn-cu12"
    raise UserError(f"config.model.attention selects cuDNN attention, but cuDNN is not installed; {rule}")


mlir.register_lowering(_forward, _refuse_to_lower)
mlir.register_lowering(_backward, _refuse_to_lower)


_Arrays = tuple[jax.Array | None, ...]  # q, k, v, lengths_B and is_seen_TS, or what the backward pass reads


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _abstract_cudnn(is_causal: bool, *inputs: jax.Array | None) -> jax.Array:
    return _abstract_forward(is_causal, *inputs)[0]


def _abstract_forward(is_causal: bool, *inputs: jax.Array | None) -> tuple[jax.Array, _Arrays]:
    q, k, v, lengths_B, is_seen_TS = inputs
    arrays: tuple[Any, ...] = q, k, v
    bias = () if is_seen_TS is None else (jnp.where(is_seen_TS, 0.0, -jnp.inf).astype(arrays[0].dtype)[None, None],)
    y, statistics = _forward.bind(*arrays, *bias, is_causal=is_causal)
    return y, (*arrays, y, statistics, lengths_B, *bias)


def _abstract_backward(is_causal: bool, saved: _Arrays, dy: jax.Array) -> _Arrays:
    q, k, v, y, statistics, _lengths_B, *bias = saved
    gradients = _backward.bind(q, k, v, y, statistics, dy, *bias, is_causal=is_causal)
    return (*gradients[:3], None, None)


_abstract_cudnn.defvjp(_abstract_forward, _abstract_backward)


# Keys and values [B, S, G, K] of an attention layer. Those of positions that do not exist yet have any value.
KeyValues = tuple[jax.Array, jax.Array]
Stored = tuple[KeyValues, ...]  # of all attention layers; a layer that is applied several times counts each time


def empty(num_layers: int, shape: tuple[int, int, int, int], dtype: DTypeLike) -> Stored:
    """Return the keys and values of empty texts. shape: (B, S, G, K)."""
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers))


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
        keys, values = self._stored[len(self._extended)]
        extended = keys.at[where].set(k_BTGK, mode="drop"), values.at[where].set(v_BTGK, mode="drop")
        self._extended.append(extended)
        return extended

    def extended(self) -> Stored:
        """Return the keys and values after the last layer."""
        assert len(self._extended) == len(self._stored), "a layer did not use its cache"
        return tuple(self._extended)
