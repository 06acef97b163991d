"""A multilayer perceptron on vectors or small images: the smallest model that trains.

Array dims: B examples, D features, C classes.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from ml_collections import ConfigDict

from jaxpar.data import DataInfo
from jaxpar.errors import check_choice
from jaxpar.models.activations import ACTIVATIONS
from jaxpar.models.bottleneck import Maker, with_bottlenecks
from jaxpar.models.layers import class_logits, dropout
from jaxpar.models.model import Context, Model
from jaxpar.models.options import BLOCK_DEFAULTS, check_task, pick

SIZES = {"tiny": {"num_layers": 2, "hidden_size": 128}}
DEFAULTS = {"dropout": 0.0, "activation": "relu", **BLOCK_DEFAULTS}


def build(config: ConfigDict, info: DataInfo) -> Model:
    """Build the layers embed, block_0 to block_(num_layers - 1), head. Outputs logits [B, C], float32."""
    check_task(config, info, heads=("example",), kinds=("vector", "image"))
    values = pick(config, SIZES, DEFAULTS)
    check_choice("model.activation", values["activation"], ("gelu", "gelu_tanh", "relu"))
    width, dtype = values["hidden_size"], jnp.dtype(config.model.dtype)
    hidden = partial(Hidden, width=width, activation=values["activation"], dropout=values["dropout"], dtype=dtype)
    blocks = dict.fromkeys((f"block_{i}" for i in range(values["num_layers"])), partial(hidden, width))
    makers: dict[str, Maker] = {
        "embed": partial(hidden, int(np.prod(info.input_shape))),
        **with_bottlenecks(config, blocks, width),
        "head": partial(MLPHead, width, info.num_outputs, dtype),
    }
    applications = dict.fromkeys(blocks, values["num_applications"] or 1)
    return Model(makers, applications=applications, scan=config.model.scan_layers, remat=config.model.remat)


def unit_range(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Scale uint8 images from 0..255 to -1..1 and leave vectors unscaled. Returns `dtype`."""
    if x.dtype == jnp.uint8:
        return (x.astype(jnp.float32) / 127.5 - 1).astype(dtype)
    return x.astype(dtype)


class Hidden(nnx.Module):
    """A linear map and an activation: [B, ...] -> [B, D]. The first layer also flattens its input."""

    def __init__(self, num_in: int, rngs: nnx.Rngs, *, width: int, activation: str, dropout: float, dtype: DTypeLike):
        self.activation, self.rate, self.dtype = activation, dropout, dtype
        self.linear = nnx.Linear(num_in, width, dtype=dtype, kernel_init=nnx.initializers.he_normal(), rngs=rngs)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        x_BD = unit_range(x, self.dtype).reshape(x.shape[0], -1)
        return dropout(ACTIVATIONS[self.activation](self.linear(x_BD)), self.rate, context, 0)


class MLPHead(nnx.Module):
    """A linear map to the classes: [B, D] -> [B, C], float32."""

    def __init__(self, num_in: int, num_classes: int, dtype: DTypeLike, rngs: nnx.Rngs):
        self.classifier = nnx.Linear(num_in, num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, x_BD: jax.Array, context: Context) -> jax.Array:
        return class_logits(self.classifier, x_BD)
