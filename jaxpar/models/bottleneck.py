"""Bottlenecks between blocks: fewer features cross a cut of a pipeline (Ryabinin et al., "SWARM Parallelism", 2023).

A bottleneck is two layers of the model, like any other: one that compresses the hidden states, and one that expands
them. A pipeline that is cut between the two sends only the compressed features, and their gradients back. There is no
residual connection around them. The structure is that of the authors' code (github.com/yandex-research/swarm, the
module transformer_layer.py of the folder bottleneck).

Array dims: B examples, D features, C compressed features; other dims in between.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from ml_collections import ConfigDict

from jaxpar.errors import UserError, check_choice, nearest
from jaxpar.models.model import Context

Maker = Callable[[nnx.Rngs], nnx.Module]
BOTTLENECKS = ("linear", "maxout")
DEFAULT_FACTOR = 2


class Compress(nnx.Module):
    """A norm, a reduction of the features, [B, ..., D] -> [B, ..., C], and a norm. It is linear, or maxout.

    Maxout (Goodfellow et al. 2013) takes the maximum over `factor` consecutive features, without parameters.
    """

    def __init__(self, kind: str, width: int, factor: int, dtype: DTypeLike, rngs: nnx.Rngs):
        self.kind, self.factor = kind, factor
        self.norm = _norm(width, rngs)
        if kind == "linear":
            self.linear = nnx.Linear(width, width // factor, dtype=dtype, rngs=rngs)
        self.compressed_norm = _norm(width // factor, rngs)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        normal = _normalize(self.norm, x)
        if self.kind == "linear":
            y = self.linear(normal)
        else:
            y = normal.reshape(*x.shape[:-1], -1, self.factor).max(axis=-1)
        return _normalize(self.compressed_norm, y)


class Expand(nnx.Module):
    """A linear map from the compressed features to the hidden states, [B, ..., C] -> [B, ..., D]."""

    def __init__(self, width: int, factor: int, dtype: DTypeLike, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width // factor, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        return self.linear(x)


def with_bottlenecks(config: ConfigDict, blocks: Mapping[str, Maker], width: int) -> dict[str, Maker]:
    """Return the blocks with the bottlenecks of config.model before those that config.model.bottlenecks lists.

    The bottleneck before `block_2` is the layers `compress_2` and `expand_2`. width: number of features of the hidden
    states. Raises UserError if the keys of the bottlenecks are invalid.
    """
    kind, factor, text = config.model.bottleneck, config.model.bottleneck_factor, config.model.bottlenecks
    if text is None:
        for key, value in (("bottleneck", kind), ("bottleneck_factor", factor)):
            if value is not None:
                raise UserError(f"config.model.{key} is {value!r}; it must be None without config.model.bottlenecks")
        return dict(blocks)
    kind, factor = kind or BOTTLENECKS[0], factor or DEFAULT_FACTOR
    check_choice("model.bottleneck", kind, BOTTLENECKS)
    if factor < 2 or width % factor:
        what = f"the number of features, {width}"
        raise UserError(f"config.model.bottleneck_factor is {factor}; it must be at least 2 and divide {what}")
    chosen, names = [name.strip() for name in text.split(",")], list(blocks)
    if unknown := [name for name in chosen if name not in names]:
        what, hint = f"blocks, from {names[0]} to {names[-1]}, separated by commas", nearest(unknown[0], names)
        is_none = f"{unknown[0]!r} is not one{hint and '.' + hint}"
        raise UserError(f"config.model.bottlenecks is {text!r}; it must list {what}; {is_none}")
    if len(set(chosen)) < len(chosen):
        raise UserError(f"config.model.bottlenecks is {text!r}; it must list each block once")
    dtype = jnp.dtype(config.model.dtype)
    compress, expand = partial(Compress, kind, width, factor, dtype), partial(Expand, width, factor, dtype)
    makers: dict[str, Maker] = {}
    for name, make in blocks.items():
        if name in chosen:
            number = name.rpartition("_")[2]
            makers |= {f"compress_{number}": compress, f"expand_{number}": expand}
        makers[name] = make
    return makers


def _norm(width: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(width, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


def _normalize(norm: nnx.LayerNorm, x: jax.Array) -> jax.Array:
    """Apply a norm in float32 and return the result in the dtype of x."""
    return norm(x.astype(jnp.float32)).astype(x.dtype)
