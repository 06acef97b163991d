"""Compressors, which encode a vector in fewer bytes and decode it. `error_feedback` and `momentum` wrap another one.

A nonfinite value makes decoded values nonfinite, too (with `topk` and `randomk`: as soon as it is sent).

Dims: L elements of a vector.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.layout import Tree

Payload = tuple[jax.Array, ...]  # the arrays that are sent for a vector
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


class Compressor(NamedTuple):
    """A lossy compressor of float32 vectors."""

    # (L, key, sender) -> private state of the sender. key: the same for all senders of this vector. sender: with n
    # replicas, 0 to n - 1 for a replica that encodes its local vector, and n for the server of a shard (the replica
    # that averages the shard), which encodes the mean.
    init: Callable[[int, jax.Array, jax.Array | int], Tree]
    encode: Callable[[jax.Array, Tree], tuple[Payload, Tree]]  # ([L], state) -> (payload, state)
    decode: Callable[[Payload, int], jax.Array]  # (payload, L) -> [L]

    def payload(self, length: int) -> Payload:
        """Return the shapes and dtypes of the payload of a vector of this length."""

        def encode(x: jax.Array) -> Payload:
            return self.encode(x, self.init(length, jax.random.key(0), 0))[0]

        return jax.eval_shape(encode, jax.ShapeDtypeStruct((length,), jnp.float32))

    def nbytes(self, length: int) -> int:
        """Return the size of the payload of a vector of this length, in bytes."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.payload(length))

    def decode_bytes(self, sent: jax.Array, length: int) -> jax.Array:
        """Return the vector of this length whose payload was sent as bytes."""
        return self.decode(from_bytes(sent, self.payload(length)), length)


def _no_state(_length: int, _key: jax.Array, _sender: jax.Array | int) -> Tree:
    return ()


def min_max_uint8(block: int = 0) -> Compressor:
    """Return Bagua's MinMaxUInt8: a byte for each element, on a scale from the minimum to the maximum of its block.

    Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021, section 3.2. If all values are
    equal, or adjacent floats differ by more than a step of the byte, a quotient may be one step out of range: it is
    clipped to 0 .. 255. block: elements that share a range; 0: all.
    """

    def scale(ranges: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return s = 255 / (high - low + 1e-7) of ranges [blocks, 2], and the smallest quotient, [blocks, 1]."""
        low, high = ranges[:, :1], ranges[:, 1:]
        largest = jnp.maximum(jnp.abs(low), jnp.abs(high))
        s = 127.5 / (high / 2 - low / 2 + 0.5e-7)  # halves: the range of the largest floats overflows
        s = jnp.minimum(s, 1e38 / jnp.maximum(largest, 1))  # so that high * s is finite
        return s, jnp.rint(high * s) - 255

    def encode(x: jax.Array, state: Tree) -> tuple[Payload, Tree]:
        blocks = _in_blocks(x, block, mode="edge")
        ranges = jnp.stack([jnp.min(blocks, axis=1), jnp.max(blocks, axis=1)], axis=1)
        s, least = scale(ranges)
        q = jnp.clip(jnp.rint(blocks * s) - least, 0, 255).astype(jnp.uint8)
        return (q.reshape(-1)[: len(x)], ranges), state

    def decode(payload: Payload, length: int) -> jax.Array:
        q, ranges = payload
        s, least = scale(ranges)
        blocks = _in_blocks(q, block).astype(jnp.float32)
        largest = jnp.finfo(jnp.float32).max
        return jnp.clip((blocks + least) / s, -largest, largest).reshape(-1)[:length]

    return Compressor(_no_state, encode, decode)


def absmax_int8(block: int = 0) -> Compressor:
    """Return a compressor that sends a signed byte for each element, on a scale of its block's largest magnitude.

    Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, section 2.1, with evenly spaced levels. The
    error of an element is at most 1 / 254 of the largest magnitude. block: elements that share a scale; 0: all.
    """
    return _scaled(127, lambda x: jnp.clip(jnp.rint(x), -127, 127).astype(jnp.int8), block)


def float8(dtype: str, block: int = 0) -> Compressor:
    """Return a compressor that scales the largest magnitude of a block to the largest float8, and rounds to float8.

    Micikevicius et al., "FP8 Formats for Deep Learning", 2022. With E4M3 the relative rounding error is at most 1/16,
    and elements 2^19 times smaller than the largest become zero; with E5M2 it is 1/8, and 2^33. dtype: one of FLOAT8.
    block: elements that share a scale; 0: all.
    """
    return _scaled(float(jnp.finfo(dtype).max), lambda x: x.astype(dtype), block)


def _scaled(top: float, rounded: Callable[[jax.Array], jax.Array], block: int) -> Compressor:
    """Return a compressor that scales the largest magnitude of a block to `top`, and rounds."""

    def encode(x: jax.Array, state: Tree) -> tuple[Payload, Tree]:
        blocks = _in_blocks(x, block)
        scales = jnp.maximum(jnp.max(jnp.abs(blocks), axis=1) / top, float(jnp.finfo(jnp.float32).tiny))
        return (rounded(blocks / scales[:, None]).reshape(-1)[: len(x)], scales), state

    def decode(payload: Payload, length: int) -> jax.Array:
        values, scales = payload
        return values.astype(jnp.float32) * _repeat(scales, block, length)

    return Compressor(_no_state, encode, decode)


def onebit(norm: str = "mean", block: int = 0) -> Compressor:
    """Return a compressor that sends the sign of each element as one bit, and a scale.

    Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Tang et al., "1-bit Adam", 2021, section 4.
    norm: the scale: "mean" of |x| (BytePS), or "l2": |x|_2 / sqrt(L) (DeepSpeed). block: elements that share a scale;
    0: all.
    """

    def scale(blocks: jax.Array, count: jax.Array) -> jax.Array:
        """Return the scales, [blocks, 1]. They do not overflow if the values are finite."""
        largest = jnp.clip(jnp.max(jnp.abs(blocks), axis=1, keepdims=True), 1e-30, 1e37)  # the inverse is not denormal
        scaled = jnp.abs(blocks) / largest
        sums = jnp.sum(scaled if norm == "mean" else scaled**2, axis=1, keepdims=True) / count
        scales = largest * (sums if norm == "mean" else jnp.sqrt(sums))
        # Rounding can exceed the largest float; what is not finite stays so.
        return jnp.where(sums < jnp.inf, jnp.minimum(scales, jnp.finfo(jnp.float32).max), scales)

    def encode(x: jax.Array, state: Tree) -> tuple[Payload, Tree]:
        blocks = _in_blocks(x, block)
        number, size = blocks.shape
        count = jnp.minimum(size, len(x) - size * jnp.arange(number))[:, None]
        return (jnp.packbits(x >= 0), scale(blocks, count)[:, 0]), state

    def decode(payload: Payload, length: int) -> jax.Array:
        bits, scales = payload
        signs = 2 * jnp.unpackbits(bits, count=length).astype(jnp.float32) - 1
        return signs * _repeat(scales, block, length)

    return Compressor(_no_state, encode, decode)


def topk(ratio: float) -> Compressor:
    """Return a compressor that sends the ceil(ratio L) largest elements (Aji and Heafield, 2017), and their indices."""

    def encode(x: jax.Array, state: Tree) -> tuple[Payload, Tree]:
        indices = jax.lax.top_k(jnp.abs(x), _share(ratio, len(x)))[1].astype(jnp.int32)
        return (x[indices], indices), state

    return Compressor(_no_state, encode, _scatter)


def randomk(ratio: float) -> Compressor:
    """Return a compressor that sends ceil(ratio L) random elements, different ones each time, and their indices.

    Stich et al., "Sparsified SGD", 2018. All senders of a vector draw the same indices, so that a server receives the
    same elements from every worker and can send their mean without a further loss.
    """

    def encode(x: jax.Array, state: Tree) -> tuple[Payload, Tree]:
        now, state = _next_key(state)
        first, within = jax.random.split(now)
        number = _share(ratio, len(x))
        # From a random offset on, draw one of every `size` consecutive elements: all are equally likely, and none is
        # drawn twice.
        size = len(x) // number
        starts = jax.random.randint(first, (), 0, len(x)) + size * jnp.arange(number)
        indices = (starts + jax.random.randint(within, (number,), 0, size)) % len(x)
        return (x[indices], indices), state

    return Compressor(lambda _length, key, _sender: jax.random.key_data(key), encode, _scatter)


def dithering(levels: int) -> Compressor:
    """Return a compressor that rounds each element randomly to one of its two nearest levels, without bias.

    Alistarh et al., "QSGD", 2017, section 3.1, with the largest magnitude in place of the norm. There are `levels`
    levels up to the largest magnitude; a level is a signed byte, so there can be at most 127.
    """

    def encode(x: jax.Array, state: Tree) -> tuple[Payload, Tree]:
        now, state = _next_key(state)
        largest = jnp.max(jnp.abs(x))
        unit = jnp.where(largest > 1, 1 / 16, 1.0)  # because the inverse of the largest floats is denormal
        exact = x * unit / jnp.where(largest > 0, largest * unit, 1) * levels
        q = jnp.floor(exact + jax.random.uniform(now, x.shape))
        return (jnp.clip(q, -levels, levels).astype(jnp.int8), largest[None]), state

    def decode(payload: Payload, _length: int) -> jax.Array:
        q, largest = payload
        return q.astype(jnp.float32) / levels * largest

    return Compressor(lambda _, key, sender: jax.random.key_data(jax.random.fold_in(key, sender)), encode, decode)


def error_feedback(compressor: Compressor) -> Compressor:
    """Add error feedback: the residual that compression loses is added to the next vector.

    The vectors sent and the residual always add up to the sum of all vectors given. Karimireddy et al., "Error Feedback
    Fixes SignSGD", 2019, algorithm 1.
    """

    def init(length: int, key: jax.Array, sender: jax.Array | int) -> Tree:
        return {"residual": jnp.zeros(length), "code": compressor.init(length, key, sender)}

    def encode(x: jax.Array, state: Tree) -> tuple[Payload, Tree]:
        x = x + state["residual"]
        payload, inner = compressor.encode(x, state["code"])
        return payload, {"residual": x - compressor.decode(payload, len(x)), "code": inner}

    return Compressor(init, encode, compressor.decode)


def momentum(compressor: Compressor, mu: float) -> Compressor:
    """Add Nesterov momentum before compression: m = mu m + x, and x + mu m is compressed.

    Zheng et al., "Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback", 2019.
    """

    def init(length: int, key: jax.Array, sender: jax.Array | int) -> Tree:
        return {"momentum": jnp.zeros(length), "code": compressor.init(length, key, sender)}

    def encode(x: jax.Array, state: Tree) -> tuple[Payload, Tree]:
        m = mu * state["momentum"] + x
        payload, inner = compressor.encode(x + mu * m, state["code"])
        return payload, {"momentum": m, "code": inner}

    return Compressor(init, encode, compressor.decode)


def to_bytes(payload: Payload) -> jax.Array:
    """Return the payload as one vector of bytes, which is what replicas send."""
    return jnp.concatenate([x.reshape(-1).view(jnp.uint8) for x in payload])


def from_bytes(vector: jax.Array, like: Payload) -> Payload:
    """Return the payload that `to_bytes` packed. like: the shapes and dtypes of the payload."""
    payload, offset = [], 0
    for leaf in like:
        end = offset + math.prod(leaf.shape) * leaf.dtype.itemsize
        payload.append(vector[offset:end].view(leaf.dtype).reshape(leaf.shape))
        offset = end
    return tuple(payload)


def _scatter(payload: Payload, length: int) -> jax.Array:
    values, indices = payload
    return jnp.zeros(length).at[indices].set(values)


def _blocks(block: int, length: int) -> tuple[int, int]:
    """Return the number of blocks of a vector, and their size."""
    size = max(1, min(block or length, length))
    return max(1, -(-length // size)), size


def _in_blocks(x: jax.Array, block: int, mode: str = "constant") -> jax.Array:
    """Return a vector as [blocks, elements], padded with zeros, or with its last element if mode is "edge"."""
    number, size = _blocks(block, len(x))
    return jnp.pad(x, (0, number * size - len(x)), mode=mode).reshape(number, size)


def _repeat(scales: jax.Array, block: int, length: int) -> jax.Array:
    """Return the scale of each element of a vector, [length], from those of its blocks."""
    return jnp.broadcast_to(scales[:, None], _blocks(block, length)).reshape(-1)[:length]


def _share(ratio: float, length: int) -> int:
    return math.ceil(round(ratio * length, 6))  # 0.07 * 100 is slightly more than 7


def _next_key(data: jax.Array) -> tuple[jax.Array, jax.Array]:
    now, later = jax.random.split(jax.random.wrap_key_data(data))
    return now, jax.random.key_data(later)
