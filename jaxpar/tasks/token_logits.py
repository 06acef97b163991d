"""Logits over a vocabulary that are never whole in training: the product of hidden states and the token embedding.

The logits of 32 x 1,024 tokens with a vocabulary of 50,304 take 6.6 GB in float32, several times over in the backward
pass. So the last layer returns the factors, and the loss computes the product for some positions at a time, together
with its gradient. That needs no more products (Hsu et al., "Liger Kernel", arXiv 2410.10989, section 3.2).

Where the loss is differentiated, logits are rounded to the dtype of the factors, as autocast of PyTorch does: in 16
bits, that is half the traffic of the largest arrays of a step. The loss computes in float32, and logits for evaluation
and predictions are float32. So are those of F in a pipeline with full rematerialization, which has no gradient.

Dims: B examples, T positions, D features, V vocabulary; t positions of a chunk.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.tasks.einsum import float32_einsum

CHUNK_BYTES = 2**28  # logits of at most this size, rounded as in training, are whole
MOST_CHUNKS = 32  # with more, a matrix product would be too small
LossAndCorrect = tuple[Any, Any]  # scalars
ZEROS = (np.float32(0), np.float32(0))
SLOPE_SCALE = 2.0**10  # of the derivatives by float16 logits, -1 to 1 times a weight


class Devices(Protocol):
    """A group of devices, each of which has some words of the vocabulary, in order."""

    @property
    def size(self) -> int:
        """Number of devices."""

    def index(self) -> jax.Array:
        """Return the index of this device in the group."""

    def total(self, x: jax.Array) -> jax.Array:
        """Return the sum over the group."""

    def maximum(self, x: jax.Array) -> jax.Array:
        """Return the maximum over the group, as a constant of the gradient."""

    def columns(self, x: jax.Array) -> jax.Array:
        """Return the columns of all devices, along the last dim."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SplitWords:
    """The words of a vocabulary that is split over devices. Each has as many, of which those at the end are padding."""

    devices: Devices
    number: int  # words of the vocabulary


class TokenLogits(NamedTuple):
    """The logits x @ tokens.T + bias, [B, T, V], as their factors."""

    x: jax.Array  # [B, T, D] hidden states
    tokens: jax.Array  # [V, D] token embedding, in the dtype of x; of split words, those of this device
    bias: jax.Array | None = None  # [V], float32; or None
    words: SplitWords | None = None  # None: this device has all words

    def whole(self) -> jax.Array:
        """Return the logits, [B, T, V], in float32."""
        if self.words is None:
            return self.own()
        return self.words.devices.columns(self.own())[..., : self.words.number]

    def own(self, *, is_rounded: bool = False) -> jax.Array:
        """Return the logits of the words of this device, in float32. is_rounded: in the dtype of x instead."""
        einsum = jnp.einsum if is_rounded else float32_einsum
        logits_NV = einsum("nd,vd->nv", self.x.reshape(-1, self.x.shape[-1]), self.tokens)
        logits_BTV = logits_NV.reshape(*self.x.shape[:-1], len(self.tokens))
        if self.bias is None:
            return logits_BTV
        return logits_BTV + jnp.broadcast_to(self.bias, logits_BTV.shape).astype(logits_BTV.dtype)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of positions in which the loss is computed.

        It divides the positions, unless that takes more than twice as many chunks; then the last one is padded.
        """
        examples, positions, _ = self.x.shape
        nbytes, most = self.x.dtype.itemsize * examples * positions * len(self.tokens), min(positions, MOST_CHUNKS)
        least = max(min(-(-nbytes // CHUNK_BYTES), most), 1)
        return next((n for n in range(least, min(2 * least, most) + 1) if positions % n == 0), least)


def whole(outputs: Any) -> jax.Array:
    """Return the outputs of a model as one array."""
    return outputs.whole() if isinstance(outputs, TokenLogits) else outputs


@jax.custom_vjp
def weighted_sums(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, words: SplitWords | None = None
) -> LossAndCorrect:
    """Return the sums of the cross entropy in nats and of correct answers, for logits [..., V].

    For the backward pass, it saves the logits and nothing else as large. words: if they are split, the logits are those
    of this device, and each device of the group differentiates the same sums.
    """
    return _sums_and_softmax(logits, labels, weights, words)[0]


class _Softmax(NamedTuple):
    """The softmax of logits [..., V], exp(logits - top) / total, and what follows from it."""

    top: jax.Array  # [..., 1], the largest logit
    total: jax.Array  # [..., 1]
    losses: jax.Array  # [...], the cross entropy
    correct: jax.Array  # [...], 1.0 if the best logit is that of the label, otherwise 0.0

    def derivative(
        self, logits: jax.Array, labels: jax.Array, weights: jax.Array, words: SplitWords | None
    ) -> jax.Array:
        """Return the derivative of the weighted cross entropy by the logits, [..., V], in float32.

        If words are split, it is that of the sum of what all devices of the group return.
        """
        logits, places = _with_places(logits, words)
        slopes = jnp.exp(logits - self.top) / self.total - (places == labels[..., None]).astype(jnp.float32)
        return slopes * (weights if words is None else weights * words.devices.size)[..., None]


def _sums_and_softmax(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, words: SplitWords | None
) -> tuple[LossAndCorrect, _Softmax]:
    """Return `weighted_sums` and the softmax. With its derivative, that reads the logits three times."""
    logits, places = _with_places(logits, words)
    top = logits.max(axis=-1, keepdims=True)
    if words is not None:
        top = words.devices.maximum(top)
    total = jnp.exp(logits - top).sum(axis=-1, keepdims=True)
    # The best of equal logits is the first, as in argmax, whose pairs of a logit and a place take longer to reduce.
    is_beaten = ((logits == top) & (places < labels[..., None])).any(axis=-1)
    if words is None:
        of_label = jnp.take_along_axis(logits, labels[..., None], axis=-1)
    else:
        of_label = words.devices.total(jnp.where(places == labels[..., None], logits, 0).sum(axis=-1, keepdims=True))
        total = words.devices.total(total)
        is_beaten = words.devices.maximum(is_beaten.astype(jnp.int32)) > 0
    losses = (jnp.log(total) - (of_label - top))[..., 0]
    correct = ((of_label == top)[..., 0] & ~is_beaten).astype(jnp.float32)
    return (jnp.sum(losses * weights), jnp.sum(correct * weights)), _Softmax(top, total, losses, correct)


def _with_places(logits: jax.Array, words: SplitWords | None) -> tuple[jax.Array, jax.Array]:
    """Return logits in float32, and the places of their words in the vocabulary. Padding gets the least logit."""
    logits, places = logits.astype(jnp.float32), jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    if words is None:
        return logits, places
    places += words.devices.index() * logits.shape[-1]
    return jnp.where(places < words.number, logits, jnp.finfo(logits.dtype).min), places


def _forward(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, words: SplitWords | None
) -> tuple[LossAndCorrect, tuple[Any, ...]]:
    sums, softmax = _sums_and_softmax(logits, labels, weights, words)
    return sums, (softmax, logits, labels, weights, words)


def _backward(saved: tuple[Any, ...], cotangents: LossAndCorrect) -> tuple[Any, ...]:
    softmax, logits, labels, weights, words = saved
    of_loss, of_correct = cotangents
    by_weights = (softmax.losses * of_loss + softmax.correct * of_correct).astype(weights.dtype)
    dlogits = softmax.derivative(logits, labels, weights, words) * of_loss
    return dlogits.astype(logits.dtype), None, by_weights, None


weighted_sums.defvjp(_forward, _backward)


@jax.custom_vjp
def unchunked_sums(logits: TokenLogits, labels_BT: jax.Array, weights_BT: jax.Array) -> LossAndCorrect:
    """Return the weighted sums of the cross entropy and of correct answers. With a gradient, logits are rounded."""
    return weighted_sums(logits.own(), labels_BT, weights_BT, logits.words)


def _rounded_sums(logits: TokenLogits, labels_BT: jax.Array, weights_BT: jax.Array) -> tuple[LossAndCorrect, Any]:
    """Return `unchunked_sums` of rounded logits, and the function that computes the gradient."""

    def sums(logits: TokenLogits, weights_BT: jax.Array) -> LossAndCorrect:
        return weighted_sums(logits.own(is_rounded=True), labels_BT, weights_BT, logits.words)

    return jax.vjp(sums, logits, weights_BT)


def _gradient_of_rounded(pullback: Any, cotangents: LossAndCorrect) -> tuple[Any, ...]:
    dlogits, dweights_BT = pullback(cotangents)
    return dlogits, None, dweights_BT


unchunked_sums.defvjp(_rounded_sums, _gradient_of_rounded)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_sums(num_chunks: int, logits: TokenLogits, labels_BT: jax.Array, weights_BT: jax.Array) -> LossAndCorrect:
    """Return `unchunked_sums` without whole logits. num_chunks: at most T.

    The positions are divided, not the examples, because these can be sharded. Only the loss can be differentiated, by
    the logits. The factors of the gradient are in their own dtype, and its sums in float32.
    """

    def add(sums: LossAndCorrect, chunk: Any) -> tuple[LossAndCorrect, None]:
        x_BtD, labels_Bt, weights_Bt = chunk
        more = weighted_sums(logits._replace(x=x_BtD).own(), labels_Bt, weights_Bt, logits.words)
        return jax.tree.map(jnp.add, sums, more), None

    return jax.lax.scan(add, ZEROS, _chunks(num_chunks, (logits.x, labels_BT, weights_BT)))[0]


def _sums_and_gradient(
    num_chunks: int, logits: TokenLogits, labels_BT: jax.Array, weights_BT: jax.Array
) -> tuple[LossAndCorrect, tuple[TokenLogits, jax.Array]]:
    """Return `chunked_sums`, the gradient of the loss, and an empty array in the dtype of the factors.

    The gradient is not yet multiplied by the scale of a float16 loss. So float16 slopes, most of which are about 1 / V,
    are multiplied by a constant, and the sums stay in float32.
    """
    is_float16 = logits.x.dtype == jnp.float16
    dtype = jnp.float32 if is_float16 else logits.x.dtype

    def times(x: jax.Array, factor: float) -> jax.Array:
        return x * factor if is_float16 else x

    def add(carry: tuple[LossAndCorrect, TokenLogits], chunk: Any) -> tuple[Any, jax.Array]:
        (sums, gradient), (x_BtD, labels_Bt, weights_Bt) = carry, chunk
        logits_BtV = logits._replace(x=x_BtD).own(is_rounded=True)
        more, softmax = _sums_and_softmax(logits_BtV, labels_Bt, weights_Bt, logits.words)
        dlogits_BtV = softmax.derivative(logits_BtV, labels_Bt, weights_Bt, logits.words)
        dlogits_NV = times(dlogits_BtV, SLOPE_SCALE).reshape(-1, len(logits.tokens)).astype(x_BtD.dtype)
        x_ND = x_BtD.reshape(len(dlogits_NV), -1)
        dtokens_VD = jnp.einsum("nv,nd->vd", dlogits_NV, x_ND, preferred_element_type=jnp.float32)
        dbias_V = None if gradient.bias is None else gradient.bias + dlogits_BtV.sum((0, 1))
        dx_ND = jnp.einsum("nv,vd->nd", dlogits_NV, logits.tokens, preferred_element_type=jnp.float32)
        total = gradient._replace(tokens=gradient.tokens + times(dtokens_VD, 1 / SLOPE_SCALE), bias=dbias_V)
        sums = jax.tree.map(jnp.add, sums, more)
        return (sums, total), times(dx_ND, 1 / SLOPE_SCALE).astype(dtype)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), logits._replace(x=jnp.zeros(())))
    chunks = _chunks(num_chunks, (logits.x, labels_BT, weights_BT))
    (sums, gradient), dx = jax.lax.scan(add, (ZEROS, zeros), chunks)
    B, T, D = logits.x.shape
    dx_BTD = jnp.moveaxis(dx.reshape(num_chunks, B, -1, D), 0, 1).reshape(B, -1, D)[:, :T]
    return sums, (gradient._replace(x=dx_BTD), jnp.zeros(0, logits.x.dtype))


def _gradient(_num_chunks: int, saved: tuple[TokenLogits, jax.Array], cotangents: LossAndCorrect) -> tuple[Any, ...]:
    gradient, empty = saved
    scaled = jax.tree.map(lambda x: x.astype(jnp.float32) * cotangents[0], gradient)
    dtype = empty.dtype
    return scaled._replace(x=scaled.x.astype(dtype), tokens=scaled.tokens.astype(dtype)), None, None


chunked_sums.defvjp(_sums_and_gradient, _gradient)


def _chunks(num_chunks: int, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Split the positions of arrays [B, T, ..], padded with zeros: [num_chunks, B, t, ..]."""

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, -x.shape[1] % num_chunks if dim == 1 else 0) for dim in range(x.ndim)])
        return jnp.moveaxis(padded.reshape(len(x), num_chunks, -1, *x.shape[2:]), 1, 0)

    return tuple(map(split, arrays))
