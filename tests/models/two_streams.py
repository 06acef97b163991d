"""A model whose layers return two arrays of different shapes, and in bfloat16 of different dtypes.

It is used like a user-defined model: config.model.name is the name of this module. A language model of it has tied
embeddings.

Dims: B examples, T positions, D features, S features of the summary, C classes, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from jaxpar.data import DataInfo
from jaxpar.models import Context, Model
from jaxpar.models.layers import TIED_HEAD
from jaxpar.tasks.token_logits import TokenLogits

FEATURES, SUMMARY = 16, 6


class Streams(NamedTuple):
    """The activations between layers: tokens in float32, and summary["mean"] [B, S] in config.model.dtype."""

    tokens_BTD: jax.Array
    summary: dict[str, jax.Array]


class Embed(nnx.Module):
    """Layer that computes both streams from token ids."""

    def __init__(self, vocab_size: int, dtype: str, rngs: nnx.Rngs):
        self.dtype = jnp.dtype(dtype)
        self.tokens = nnx.Param(jax.random.normal(rngs.params(), (vocab_size, FEATURES)))

    def __call__(self, ids_BT: jax.Array, context: Context) -> Streams:
        x_BTD = self.tokens[...][ids_BT]
        return Streams(x_BTD, {"mean": x_BTD.mean(axis=1)[:, :SUMMARY].astype(self.dtype)})


class Mix(nnx.Module):
    """Layer that updates each stream from the other, with dropout on the tokens."""

    def __init__(self, dropout: float, rngs: nnx.Rngs):
        self.dropout = dropout
        self.inner = nnx.Linear(FEATURES + SUMMARY, FEATURES, rngs=rngs)
        self.outer = nnx.Linear(FEATURES, SUMMARY, rngs=rngs)

    def __call__(self, x: Streams, context: Context) -> Streams:
        mean_BS = x.summary["mean"].astype(jnp.float32)
        wide_BTS = jnp.broadcast_to(mean_BS[:, None], (*x.tokens_BTD.shape[:2], SUMMARY))
        change_BTD = jnp.tanh(self.inner(jnp.concatenate([x.tokens_BTD, wide_BTS], axis=-1)))
        if context.keys_B is not None:
            keep = partial(jax.random.bernoulli, p=1 - self.dropout, shape=change_BTD.shape[1:])
            keep_BTD = jax.vmap(keep)(context.keys_B)
            change_BTD = jnp.where(keep_BTD, change_BTD / (1 - self.dropout), 0)
        tokens_BTD = x.tokens_BTD + change_BTD
        mean_BS = mean_BS + self.outer(tokens_BTD.mean(axis=1))
        return Streams(tokens_BTD, {"mean": mean_BS.astype(x.summary["mean"].dtype)})


class Head(nnx.Module):
    """Layer that computes logits [B, C] from both streams."""

    def __init__(self, num_classes: int, rngs: nnx.Rngs):
        self.classify = nnx.Linear(FEATURES + SUMMARY, num_classes, rngs=rngs)

    def __call__(self, x: Streams, context: Context) -> jax.Array:
        both = [x.tokens_BTD.mean(axis=1), x.summary["mean"].astype(jnp.float32)]
        return self.classify(jnp.concatenate(both, axis=-1))


class TiedHead(nnx.Module):
    """Layer that computes logits [B, T, V] from both streams, with the array of the embedding."""

    def __init__(self, vocab_size: int, rngs: nnx.Rngs):
        self.widen = nnx.Linear(SUMMARY, FEATURES, rngs=rngs)
        self.tokens = nnx.Param(jax.random.normal(rngs.params(), (vocab_size, FEATURES)))

    def __call__(self, x: Streams, context: Context) -> TokenLogits:
        wide_BD = self.widen(x.summary["mean"].astype(jnp.float32))
        return TokenLogits(x.tokens_BTD + wide_BD[:, None], self.tokens[...])


def build(config: ConfigDict, info: DataInfo) -> Model:
    """Build the layers embed, mix_0 to mix_(num_layers - 1), head."""
    mix = partial(Mix, config.model.dropout)
    embed = partial(Embed, info.vocab_size, config.model.dtype)
    mixes = {f"mix_{i}": mix for i in range(config.model.num_layers)}
    is_tied = config.task == "causal_lm"
    head = partial(TiedHead, info.vocab_size) if is_tied else partial(Head, info.num_outputs)
    makers: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {"embed": embed, **mixes, "head": head}
    ties = TIED_HEAD if is_tied else ()
    return Model(makers, ties=ties, scan=config.model.scan_layers, remat=config.model.remat)
