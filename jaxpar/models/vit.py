"""ViT (Dosovitskiy et al. 2020): pre-norm transformer blocks on the patches of an image.

Array dims: B examples, H height, W width, C channels, T positions (patches, after the class token), D features.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from jaxpar.data import DataInfo
from jaxpar.errors import UserError, check_choice
from jaxpar.models.layers import (
    all_positions,
    class_logits,
    classifier,
    dropout,
    embeddings,
    norm,
    normalize,
    transformer,
)
from jaxpar.models.mlp import unit_range
from jaxpar.models.model import Context, Model
from jaxpar.models.options import BLOCK_DEFAULTS, Spec, check_task, pick, transformer_spec

# Sizes: base and large from table 1 of the paper; tiny and small from table 1 of DeiT (Touvron et al. 2020).
SIZES = {
    "tiny": {"num_layers": 12, "hidden_size": 192, "num_heads": 3},
    "small": {"num_layers": 12, "hidden_size": 384, "num_heads": 6},
    "base": {"num_layers": 12, "hidden_size": 768, "num_heads": 12},
    "large": {"num_layers": 24, "hidden_size": 1024, "num_heads": 16},
}
DEFAULTS = {"mlp_size": None, "dropout": 0.1, "activation": "gelu", "pooling": "cls", "patch_size": 16}
DEFAULTS |= BLOCK_DEFAULTS
NORM_EPS = 1e-6


def build(config: ConfigDict, info: DataInfo) -> Model:
    """Build the layers of `layers.transformer`. Outputs [B, DataInfo.num_outputs], float32."""
    check_task(config, info, heads=("example",), kinds=("image",))
    values = pick(config, SIZES, DEFAULTS)
    check_choice("model.activation", values["activation"], ("gelu", "gelu_tanh", "relu"))
    check_choice("model.pooling", values["pooling"], ("cls", "mean"))
    pooling, patch, (height, width, channels) = values["pooling"], values["patch_size"], info.input_shape
    spec = transformer_spec(config, info, values, norm_eps=NORM_EPS, causal=True)  # so it is pre-norm
    if height % patch or width % patch:
        raise UserError(f"config.model.patch_size is {patch}; it must divide the image size ({height} x {width})")
    num_positions = (height // patch) * (width // patch) + (pooling == "cls")
    spec = dataclasses.replace(spec, causal=False, max_length=num_positions)
    embed = partial(PatchEmbed, spec, pooling, patch, channels)
    return transformer(config, spec, embed, partial(ImageHead, spec, pooling, info.num_outputs))


class PatchEmbed(nnx.Module):
    """A linear map of each patch, plus learned positions: uint8 [B, H, W, C] -> [B, T, D].

    With pooling 'cls', the class token is the first position.
    """

    def __init__(self, spec: Spec, pooling: str, patch: int, channels: int, rngs: nnx.Rngs):
        self.spec = spec
        width, init = spec.hidden_size, nnx.initializers.lecun_normal()
        self.patches = nnx.Conv(
            channels, width, (patch, patch), patch, padding="VALID", dtype=spec.dtype, kernel_init=init, rngs=rngs
        )
        self.has_class_token = pooling == "cls"
        if self.has_class_token:
            self.class_token = nnx.Param(jnp.zeros(spec.hidden_size))
        self.positions = embeddings(spec.max_length, spec, rngs)

    def __call__(self, pixels_BHWC: jax.Array, context: Context) -> jax.Array:
        spec = self.spec
        x_BHWD = self.patches(unit_range(pixels_BHWC, spec.dtype))
        x_BTD = x_BHWD.reshape(x_BHWD.shape[0], -1, spec.hidden_size).astype(jnp.float32)
        if self.has_class_token:
            class_B1D = jnp.broadcast_to(self.class_token[...], (x_BTD.shape[0], 1, spec.hidden_size))
            x_BTD = jnp.concatenate([class_B1D, x_BTD], axis=1)
        x_BTD += self.positions[...][None]
        x_BTD = x_BTD if context.group is None else context.group.own(x_BTD, 1)
        return dropout(x_BTD.astype(spec.dtype), spec.dropout, context, 0)


class ImageHead(nnx.Module):
    """The final norm, then a linear map of the class token or of the mean over patches: [B, T, D] -> [B, classes]."""

    def __init__(self, spec: Spec, pooling: str, num_classes: int, rngs: nnx.Rngs):
        self.spec, self.pooling = spec, pooling
        self.norm = norm(spec, rngs)
        self.classifier = classifier(spec, num_classes, rngs)

    def __call__(self, x_BTD: jax.Array, context: Context) -> jax.Array:
        x_BTD = all_positions(normalize(self.norm, x_BTD), self.spec, context).astype(jnp.float32)
        return class_logits(self.classifier, x_BTD[:, 0] if self.pooling == "cls" else x_BTD.mean(axis=1))
