"""The context axis: devices that have different positions of each text, whose attention reads the keys of all.

A text is cut into 2c chunks for c devices, of which device r has number r and 2c - 1 - r. With causal attention, each
device then has the same work: its first chunk attends to r + 1 chunks, and its second one to 2c - r. Keys and values
are gathered, as in Llama 3 (Grattafiori et al., 2024, section 3.3.2).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.core.mesh import CONTEXT
from jaxpar.models.attention import attend_by_cudnn, attend_chunks
from jaxpar.models.options import AttentionKernel

MOST_KEYS = 1024  # of a chunk of keys, so that scores need little memory
LEAST_KEYS = 128  # of those into which a longer chunk is divided, so that products are not small
MOST_SCORES = 2**30  # of queries that cuDNN gets with one mask, in 16 bits


def order(number: int, context: int) -> np.ndarray:
    """Return the positions of a text of `number` positions in the order of the devices; a multiple of 2 x context."""
    chunks = np.arange(number).reshape(2 * context, -1)
    return np.concatenate([chunks[chunk] for r in range(context) for chunk in (r, 2 * context - 1 - r)])


def arranged(batch: Mapping[str, np.ndarray], context: int) -> dict[str, np.ndarray]:
    """Return texts that are padded with zeros to a multiple of 2 x context positions, in the order of the devices."""
    number = batch["inputs"].shape[1]
    padded = padded_length(number, context)
    columns = order(padded, context)

    def arrange(x: np.ndarray) -> np.ndarray:
        return np.pad(x, ((0, 0), (0, padded - number)))[:, columns]

    of_positions = with_positions(batch)
    return {name: arrange(x) if name in of_positions else x for name, x in batch.items()}


def part_shapes(batch: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Return the shapes of a device's part of texts that `arranged` returns. batch: the shapes of whole texts."""
    if context == 1:
        return dict(batch)
    number = padded_length(batch["inputs"].shape[1], context) // context
    parts = {
        name: jax.ShapeDtypeStruct((len(batch[name]), number), batch[name].dtype) for name in with_positions(batch)
    }
    return {**batch, **parts}


def padded_length(number: int, context: int) -> int:
    """Return the number of positions of a text after padding. Chunks have even numbers, which cuDNN needs."""
    multiple = 2 * context * (LEAST_KEYS if number > 2 * context * MOST_KEYS else 2)
    return -(-number // multiple) * multiple


def with_positions(batch: Mapping[str, Any]) -> set[str]:
    """Return the names of the arrays of a batch whose dim 1 has the positions of the texts."""
    by_position = {"labels", "weights"} if batch["weights"].ndim == 2 else set()
    return {"inputs", "mask", "segments", *by_position} & batch.keys()


def own_positions(number: int, context: int) -> jax.Array:
    """Return the positions of the `number` elements that this device has of a text, [T]."""
    r, half = jax.lax.axis_index(CONTEXT), number // 2
    starts = jnp.stack([r, 2 * context - 1 - r]) * half
    return (starts[:, None] + jnp.arange(half)[None, :]).reshape(-1)


def gathered_texts(x: jax.Array, context: int) -> jax.Array:
    """Return all positions in order, [B, T, ..] -> [B, T x context, ..]."""
    gathered, half = jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True), x.shape[1] // 2
    places = [2 * r for r in range(context)] + [2 * r + 1 for r in reversed(range(context))]
    return jnp.concatenate([gathered[:, place * half : (place + 1) * half] for place in places], axis=1)


def attend_in_context(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    kernel: AttentionKernel,
    *,
    context: int,
    is_causal: bool,
    lengths_B: jax.Array | None,
) -> jax.Array:
    """Return the attention of the positions of this device to all positions of the texts: [B, T, H, K]."""
    (B, T, H, K), r = q_BTHK.shape, jax.lax.axis_index(CONTEXT)
    half, number = T // 2, T * context
    lengths_B = jnp.full(B, number, jnp.int32) if lengths_B is None else lengths_B
    if kernel == "cudnn":
        k_BSGK, v_BSGK = (gathered_texts(x, context) for x in (k_BTGK, v_BTGK))
        positions_T = own_positions(T, context) if is_causal else None
        return attend_to_texts(q_BTHK, k_BSGK, v_BSGK, positions_T, lengths_B)
    size = next(n for n in range(min(half, MOST_KEYS), 0, -1) if half % n == 0)
    parts = half // size  # of a chunk of keys
    q_NBCHK = q_BTHK.reshape(B, 2, half, H, K).swapaxes(0, 1)
    k, v = (gathered_texts(x, context).reshape(B, -1, size, *x.shape[2:]).swapaxes(0, 1) for x in (k_BTGK, v_BTGK))
    if is_causal:  # chunk r attends to chunks 0 to r, and chunk 2c - 1 - r to the others up to itself
        steps = jnp.arange(2 * context + 1)
        queries, keys = (steps > r).astype(jnp.int32), jnp.where(steps > r, steps - r - 1, steps)
    else:
        queries, keys = (x.reshape(-1) for x in jnp.meshgrid(jnp.arange(2), jnp.arange(2 * context), indexing="ij"))
    each = keys[:, None] * parts + jnp.arange(parts)[None, :]
    pairs = jnp.repeat(queries, parts), each.reshape(-1)
    starts = jnp.stack([r, 2 * context - 1 - r]) * half, jnp.arange(len(k)) * size
    y = attend_chunks(q_NBCHK, k, v, pairs, starts, is_causal=is_causal, lengths_B=lengths_B)
    return y.swapaxes(0, 1).reshape(B, T, H, K)


def attend_to_texts(
    q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, positions_T: jax.Array | None, lengths_B: jax.Array
) -> jax.Array:
    """Return the attention by cuDNN to whole texts. positions_T: of the queries, which attend up to them; None: to all.

    The results of cuDNN for several chunks of keys cannot be joined, because `jax.nn.dot_product_attention` rounds the
    logarithms of the sums of the softmax to 16 bits. It takes lengths by example, beyond which it computes nothing.
    """
    if positions_T is None:
        return attend_by_cudnn(q_BTHK, k_BSGK, v_BSGK, is_causal=False, lengths_B=lengths_B)
    (T, S), half = (q_BTHK.shape[1], k_BSGK.shape[1]), q_BTHK.shape[1] // 2
    # Pieces have consecutive positions, the last of which attends to most. cuDNN needs even numbers of them.
    size = next(n for n in range(half, 0, -2) if half % n == 0 and (n * S <= MOST_SCORES or n == 2))
    queries, positions_NR = jnp.split(q_BTHK, T // size, axis=1), positions_T.reshape(-1, size)
    if size == half:
        pieces = zip(queries, positions_NR, strict=True)
        return jnp.concatenate([_attend_piece(q, k_BSGK, v_BSGK, own, lengths_B) for q, own in pieces], axis=1)
    y_NBRHK = jax.lax.map(
        lambda piece: _attend_again(piece[0], k_BSGK, v_BSGK, piece[1], lengths_B), (jnp.stack(queries), positions_NR)
    )
    return jnp.concatenate(y_NBRHK, axis=1)


def _attend_piece(
    q_BRHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, positions_R: jax.Array, lengths_B: jax.Array
) -> jax.Array:
    is_seen_RS = jnp.arange(k_BSGK.shape[1])[None, :] <= positions_R[:, None]
    seen_B = jnp.minimum(lengths_B, positions_R[-1] + 1)
    return attend_by_cudnn(q_BRHK, k_BSGK, v_BSGK, is_causal=False, lengths_B=seen_B, is_seen_TS=is_seen_RS)


@jax.custom_vjp
def _attend_again(q: Any, k: Any, v: Any, positions_R: jax.Array, lengths_B: jax.Array) -> Any:
    """Return the same, computed once more in the backward pass, so that only one piece has a mask at a time.

    The barriers keep the masks of all pieces from being computed before the loops over pieces and layers.
    """
    q, positions_R = jax.lax.optimization_barrier((q, positions_R))
    return _attend_piece(q, k, v, positions_R, lengths_B)


def _backward(saved: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array | None, ...]:
    q, k, v, positions_R, lengths_B = saved
    positions_R, dy = jax.lax.optimization_barrier((positions_R, dy))
    return (*jax.vjp(lambda q, k, v: _attend_piece(q, k, v, positions_R, lengths_B), q, k, v)[1](dy), None, None)


_attend_again.defvjp(lambda *inputs: (_attend_again(*inputs), inputs), _backward)
