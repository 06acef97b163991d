"""The BERT encoder (Devlin et al. 2018) for text and token classification, regression and masked language modelling.

Array dims: B examples, T positions, D features, V vocabulary, C classes.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from jaxpar.data import DataInfo
from jaxpar.errors import check_choice
from jaxpar.models import layers
from jaxpar.models.activations import activate
from jaxpar.models.model import Context, Model
from jaxpar.models.options import BLOCK_DEFAULTS, Spec, check_task, pick, transformer_spec
from jaxpar.tasks import Task
from jaxpar.tasks.einsum import float32_einsum
from jaxpar.tasks.token_logits import TokenLogits

# Sizes from https://github.com/google-research/bert
SIZES = {
    "tiny": {"num_layers": 2, "hidden_size": 128, "num_heads": 2},
    "mini": {"num_layers": 4, "hidden_size": 256, "num_heads": 4},
    "small": {"num_layers": 4, "hidden_size": 512, "num_heads": 8},
    "base": {"num_layers": 12, "hidden_size": 768, "num_heads": 12},
    "large": {"num_layers": 24, "hidden_size": 1024, "num_heads": 16},
}
DEFAULTS = {"mlp_size": None, "vocab_size": None, "max_length": None, "dropout": 0.1, "activation": "gelu"}
DEFAULTS |= BLOCK_DEFAULTS
NORM_EPS = 1e-12


def build(config: ConfigDict, info: DataInfo) -> Model:
    """Build the layers of `layers.transformer`. The output is [B, C], [B, T, C] or [B, T, V], float32."""
    task, spec, pooling = resolve(config, info)
    embed = partial(layers.Embed, spec)
    if task.head == "masked_lm":
        return layers.transformer(config, spec, embed, partial(MaskedLMHead, spec), layers.TIED_HEAD)
    if task.head == "token":
        return layers.transformer(config, spec, embed, partial(TokenHead, spec, info.num_outputs))
    return layers.transformer(config, spec, embed, partial(PoolingHead, spec, pooling, info.num_outputs))


def resolve(config: ConfigDict, info: DataInfo) -> tuple[Task, Spec, str]:
    """Return the task, the encoder's Spec, and the pooling of the head ('' if the head does not pool)."""
    task = check_task(config, info, heads=("example", "token", "masked_lm"), kinds=("text",))
    pooling = {"pooling": "cls"} if task.head == "example" else {}
    values = {"pooling": "", **pick(config, SIZES, {**DEFAULTS, **pooling})}
    check_choice("model.activation", values["activation"], ("gelu", "gelu_tanh", "relu"))
    if task.head == "example":
        check_choice("model.pooling", values["pooling"], ("cls", "mean"))
    spec = transformer_spec(config, info, values, norm_eps=NORM_EPS, causal=False)
    return task, spec, values["pooling"]


class PoolingHead(nnx.Module):
    """Head that pools a text into one vector and classifies it: [B, T, D] -> [B, C].

    With pooling 'cls', the vector is BERT's pooler output: tanh of a linear map of the first token. With 'mean', it is
    the mean over the real tokens, without the pooler.
    """

    def __init__(self, spec: Spec, pooling: str, num_classes: int, rngs: nnx.Rngs):
        self.spec = spec
        self.pooling = pooling
        if pooling == "cls":
            self.pooler = layers.linear(spec.hidden_size, spec.hidden_size, spec, rngs)
        self.classifier = layers.classifier(spec, num_classes, rngs)

    def __call__(self, x_BTD: jax.Array, context: Context) -> jax.Array:
        x_BTD = layers.whole_texts(layers.all_positions(x_BTD, self.spec, context), context)
        if self.pooling == "cls":
            x_BD = jnp.tanh(self.pooler(x_BTD[:, 0]))
        else:
            mask_BT = layers.whole_texts(context.batch["mask"], context)
            total_BD = float32_einsum("btd,bt->bd", x_BTD, mask_BT.astype(x_BTD.dtype))
            number_B1 = jnp.maximum(mask_BT.sum(axis=1, keepdims=True, dtype=jnp.float32), 1)  # 1 for padding examples
            x_BD = (total_BD / number_B1).astype(x_BTD.dtype)
        return layers.class_logits(self.classifier, layers.dropout(x_BD, self.spec.dropout, context, 0))


class TokenHead(nnx.Module):
    """Head that classifies each token: [B, T, D] -> [B, T, C]."""

    def __init__(self, spec: Spec, num_classes: int, rngs: nnx.Rngs):
        self.spec = spec
        self.classifier = layers.classifier(spec, num_classes, rngs)

    def __call__(self, x_BTD: jax.Array, context: Context) -> jax.Array:
        x_BTD = layers.all_positions(layers.dropout(x_BTD, self.spec.dropout, context, 0), self.spec, context)
        return layers.class_logits(self.classifier, x_BTD)


class MaskedLMHead(nnx.Module):
    """BERT's masked-LM head: a transform, then the token embedding as the decoder, with a separate bias."""

    def __init__(self, spec: Spec, rngs: nnx.Rngs):
        self.spec = spec
        self.transform = layers.linear(spec.hidden_size, spec.hidden_size, spec, rngs)
        self.norm = layers.norm(spec, rngs)
        self.tokens = layers.embeddings(spec.vocab_size, spec, rngs)
        self.bias = nnx.Param(jnp.zeros(spec.vocab_size))

    def __call__(self, x_BTD: jax.Array, context: Context) -> TokenLogits:
        x_BTD = layers.normalize(self.norm, activate(self.spec.activation, self.transform(x_BTD)))
        x_BTD = layers.all_positions(x_BTD, self.spec, context)
        return layers.token_logits(x_BTD, self.tokens[...], self.bias[...], self.spec, context)
