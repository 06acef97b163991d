"""The kinds of Hugging Face models that have an equivalent here, and how their config.json maps to config.model."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxpar.models import bert, gpt, hf_tensors
from jaxpar.models.layers import ROTARY_BASE


class Family(NamedTuple):
    """The mapping between one model_type of config.json and config.model.

    Attributes:
      model: value of config.model.name.
      options: config.model keys with the value of each that gives this kind of model.
      keys: config.model key -> config.json key. Without dropout, the model has none.
      activations: config.model.activation -> the activation in config.json.
      defaults: default values of config.json keys that can be absent.
      rates: other dropout rates of config.json with their defaults; None is the rate of `keys`.
      unapplied: the key of the dropout rate of the attention probabilities, which models here do not have.
      fixed: config.json keys with the only supported value of each.
      prefix: prefix of the tensor names in `transformers` classes with a head.
      classes: head of the task -> `transformers` class.
      tensors: function from the number of layers to all tensors.
    """

    model: str
    options: dict[str, str]
    keys: dict[str, str]
    activations: dict[str, str]
    defaults: dict[str, object]
    rates: dict[str, float | None]
    unapplied: str
    fixed: dict[str, object]
    prefix: str
    classes: dict[str, str]
    tensors: Callable[[int], Iterator[hf_tensors.Tensor]]


FAMILIES = {
    "bert": Family(
        model="bert",
        options={},
        keys={
            "num_layers": "num_hidden_layers",
            "hidden_size": "hidden_size",
            "num_heads": "num_attention_heads",
            "mlp_size": "intermediate_size",
            "vocab_size": "vocab_size",
            "max_length": "max_position_embeddings",
            "dropout": "hidden_dropout_prob",
            "activation": "hidden_act",
        },
        activations={"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"},
        defaults={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu"},
        rates={"classifier_dropout": None},
        unapplied="attention_probs_dropout_prob",
        fixed={
            "type_vocab_size": 2,
            "layer_norm_eps": bert.NORM_EPS,
            "position_embedding_type": "absolute",
            "is_decoder": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
        },
        prefix="bert.",
        classes={
            "example": "BertForSequenceClassification",
            "token": "BertForTokenClassification",
            "masked_lm": "BertForMaskedLM",
        },
        tensors=hf_tensors.bert,
    ),
    "gpt2": Family(
        model="gpt",
        options={"norm": "layernorm", "positions": "learned"},
        keys={
            "num_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_heads": "n_head",
            "mlp_size": "n_inner",
            "vocab_size": "vocab_size",
            "max_length": "n_positions",
            "dropout": "resid_pdrop",
            "activation": "activation_function",
        },
        activations={"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"},
        defaults={"n_inner": None, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "activation_function": "gelu_new"},
        rates={"embd_pdrop": 0.1},
        unapplied="attn_pdrop",
        fixed={
            "layer_norm_epsilon": gpt.NORM_EPS,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
        },
        prefix="transformer.",
        classes={"example": "GPT2ForSequenceClassification", "causal_lm": "GPT2LMHeadModel"},
        tensors=hf_tensors.gpt,
    ),
    "llama": Family(
        model="gpt",
        options={"norm": "rmsnorm", "positions": "rotary"},
        keys={
            "num_layers": "num_hidden_layers",
            "hidden_size": "hidden_size",
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "mlp_size": "intermediate_size",
            "vocab_size": "vocab_size",
            "activation": "hidden_act",
        },
        activations={"swiglu": "silu"},
        defaults={
            "num_key_value_heads": None,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
        rates={},
        unapplied="attention_dropout",
        fixed={
            "rms_norm_eps": gpt.NORM_EPS,
            "rope_theta": ROTARY_BASE,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},  # since transformers 5
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
        prefix="model.",
        classes={"example": "LlamaForSequenceClassification", "causal_lm": "LlamaForCausalLM"},
        tensors=hf_tensors.llama,
    ),
}
