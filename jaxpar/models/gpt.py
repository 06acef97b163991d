"""GPT-2 (Radford et al. 2019), with options for Llama blocks, for causal language modelling and classification.

norm=rmsnorm, activation=swiglu, positions=rotary and num_kv_heads < num_heads give the blocks of Llama (Touvron et al.
2023), and tied_embeddings=False its head.

Array dims: B examples, T positions, D features, V vocabulary, C classes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from jaxpar.data import DataInfo
from jaxpar.errors import UserError, check_choice
from jaxpar.models import layers
from jaxpar.models.activations import ACTIVATIONS
from jaxpar.models.model import Context, Model
from jaxpar.models.options import BLOCK_DEFAULTS, ROTARY, Spec, check_task, pick, transformer_spec
from jaxpar.tasks import Task
from jaxpar.tasks.token_logits import TokenLogits

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "dropout": 0.0, "num_kv_heads": 8}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"num_layers": 2, "hidden_size": 128, "num_heads": 2},
    "gpt2": {"num_layers": 12, "hidden_size": 768, "num_heads": 12},
    "gpt2_medium": {"num_layers": 24, "hidden_size": 1024, "num_heads": 16},
    "gpt2_large": {"num_layers": 36, "hidden_size": 1280, "num_heads": 20},
    "gpt2_xl": {"num_layers": 48, "hidden_size": 1600, "num_heads": 25},
    "llama_1b": {"num_layers": 16, "hidden_size": 2048, "num_heads": 32, "mlp_size": 8192, **LLAMA},  # of Llama 3.2
    "llama_8b": {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "mlp_size": 14336, **LLAMA},  # of Llama 3
}
DEFAULTS: dict[str, Any] = dict.fromkeys(("num_kv_heads", "mlp_size", "vocab_size", "max_length", "head_dim", *ROTARY))
DEFAULTS |= {"norm": "layernorm", "norm_eps": 1e-5, "activation": "gelu_tanh", "positions": "learned"}
DEFAULTS |= {"dropout": 0.1, "qkv_bias": False, **BLOCK_DEFAULTS}
LM_DEFAULTS = {**DEFAULTS, "tied_embeddings": True}  # of causal language models


def build(config: ConfigDict, info: DataInfo) -> Model:
    """Build the layers of `layers.transformer`. Outputs logits [B, T, V] or [B, C], float32."""
    task, spec = resolve(config, info)
    embed = partial(layers.Embed, spec)
    if task.head == "causal_lm":
        ties = () if config.model.tied_embeddings is False else layers.TIED_HEAD
        return layers.transformer(config, spec, embed, partial(CausalLMHead, spec), ties)
    return layers.transformer(config, spec, embed, partial(LastTokenHead, spec, info.num_outputs))


def resolve(config: ConfigDict, info: DataInfo) -> tuple[Task, Spec]:
    """Return the task and the decoder's Spec."""
    task = check_task(config, info, heads=("causal_lm", "example"), kinds=("text",))
    values = pick(config, SIZES, LM_DEFAULTS if task.head == "causal_lm" else DEFAULTS)
    check_choice("model.norm", values["norm"], ("layernorm", "rmsnorm"))
    check_choice("model.activation", values["activation"], ACTIVATIONS)
    check_choice("model.positions", values["positions"], ("learned", "rotary"))
    if not 0 < values["norm_eps"] < 1:
        raise UserError(f"config.model.norm_eps is {values['norm_eps']}; it must be greater than 0 and less than 1")
    return task, transformer_spec(config, info, values, norm_eps=values["norm_eps"], causal=True)


class CausalLMHead(nnx.Module):
    """Language-model head: the final norm, then logits by a matrix [V, D], that of the embedding if they are tied."""

    def __init__(self, spec: Spec, rngs: nnx.Rngs):
        self.spec = spec
        self.norm = layers.norm(spec, rngs)
        self.tokens = layers.embeddings(spec.vocab_size, spec, rngs)

    def __call__(self, x_BTD: jax.Array, context: Context) -> TokenLogits:
        x_BTD = layers.all_positions(layers.normalize(self.norm, x_BTD), self.spec, context)
        return layers.token_logits(x_BTD, self.tokens[...], None, self.spec, context)


class LastTokenHead(nnx.Module):
    """Classification head: the final norm, then a linear map without bias of the last real token, to [B, C].

    The last token is the only one that attends to all others.
    """

    def __init__(self, spec: Spec, num_classes: int, rngs: nnx.Rngs):
        self.spec = spec
        self.norm = layers.norm(spec, rngs)
        self.classifier = layers.classifier(spec, num_classes, rngs, bias=False)

    def __call__(self, x_BTD: jax.Array, context: Context) -> jax.Array:
        x_BTD = layers.whole_texts(layers.all_positions(x_BTD, self.spec, context), context)
        if "mask" in context.batch:
            last_B = layers.real_lengths(layers.whole_texts(context.batch["mask"], context)) - 1
            x_BD = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)[:, 0]
        else:
            x_BD = x_BTD[:, -1]
        x_BD = layers.dropout(layers.normalize(self.norm, x_BD), self.spec.dropout, context, 0)
        return layers.class_logits(self.classifier, x_BD)
