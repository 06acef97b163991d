"""The kinds of Hugging Face models that have an equivalent here: how their config.json maps to config.model, and the
names of their tensors to parameters.

The names are those of the `transformers` classes with a head (see `Family.classes`). BertModel, GPT2Model and
LlamaModel use the same names without the prefix.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpar.models import bert
from jaxpar.models.rotary import Rope, scaling_problem


class Tensor(NamedTuple):
    """One tensor of a safetensors file."""

    name: str  # name in the file, without the prefix
    keys: tuple[str, ...]  # the corresponding parameters; the tensor is their concatenation along the last dim
    transposed: bool = False  # whether the file stores [out, in] for a parameter [in, out]
    prefixed: bool = True  # whether the name has the model's prefix in classes with a head
    head: bool = False  # whether the tensor belongs to a head, which the file can lack

    def to_ours(self, array: np.ndarray) -> list[np.ndarray]:
        """Return the parameters, one float32 array for each key. Values can be infinite or NaN."""
        with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite
            array = np.ascontiguousarray(array.T if self.transposed else array, np.float32)
        return np.split(array, len(self.keys), axis=-1)

    def from_ours(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the tensor as stored in the file."""
        array = np.concatenate(arrays, axis=-1) if len(arrays) > 1 else arrays[0]
        return np.ascontiguousarray(array.T if self.transposed else array)


class Family(NamedTuple):
    """The mapping between one model_type of config.json and config.model."""

    model: str  # value of config.model.name
    options: dict[str, str | bool]  # config.model keys with the value of each that gives this kind of model
    # further config.model keys -> config.json key, for values with a default here, which are not set then
    varied: dict[str, str]
    keys: dict[str, str]  # config.model key -> config.json key. Without dropout, the model has none.
    activations: dict[str, str]  # config.model.activation -> the activation in config.json
    defaults: Mapping[str, object]  # default values of config.json keys that can be absent
    rates: dict[str, float | None]  # other dropout rates of config.json with their defaults; None is the rate of `keys`
    unapplied: str  # the key of the dropout rate of the attention probabilities, which models here do not have
    fixed: Mapping[str, object]  # config.json keys with the only supported value of each
    prefix: str  # prefix of the tensor names in `transformers` classes with a head
    classes: dict[str, str]  # head of the task -> `transformers` class
    tensors: Callable[[int], Iterator[Tensor]]  # function from the number of layers to all tensors


def _bert_tensors(num_layers: int) -> Iterator[Tensor]:
    """Yield all tensors of BERT and its heads. The decoder of the masked-LM head is the token embedding."""
    for ours, theirs in (("tokens", "word"), ("positions", "position"), ("token_types", "token_type")):
        yield Tensor(f"embeddings.{theirs}_embeddings.weight", (f"embed.{ours}",))
    yield from _norm("embeddings.LayerNorm", "embed.norm")
    for i in range(num_layers):
        for name in ("query", "key", "value"):
            yield from _linear(f"encoder.layer.{i}.attention.self.{name}", f"block_{i}.attention.{name}")
        yield from _linear(f"encoder.layer.{i}.attention.output.dense", f"block_{i}.attention.out")
        yield from _norm(f"encoder.layer.{i}.attention.output.LayerNorm", f"block_{i}.attention_norm")
        yield from _linear(f"encoder.layer.{i}.intermediate.dense", f"block_{i}.mlp.up")
        yield from _linear(f"encoder.layer.{i}.output.dense", f"block_{i}.mlp.down")
        yield from _norm(f"encoder.layer.{i}.output.LayerNorm", f"block_{i}.mlp_norm")
    transform = "cls.predictions.transform"
    heads = [*_linear("pooler.dense", "head.pooler"), *_linear("classifier", "head.classifier")]
    heads += [*_linear(f"{transform}.dense", "head.transform"), *_norm(f"{transform}.LayerNorm", "head.norm")]
    for tensor in (*heads, Tensor("cls.predictions.bias", ("head.bias",))):
        yield tensor._replace(prefixed=tensor.name.startswith("pooler"), head=True)


def _gpt_tensors(num_layers: int) -> Iterator[Tensor]:
    """Yield all tensors of GPT-2 and its classifier. Its linear maps are "Conv1D" and stored as [in, out]."""
    yield Tensor("wte.weight", ("embed.tokens",))
    yield Tensor("wpe.weight", ("embed.positions",))
    for i in range(num_layers):
        for part, suffix in (("weight", "kernel"), ("bias", "bias")):
            attention = tuple(f"block_{i}.attention.{name}.{suffix}" for name in ("query", "key", "value"))
            yield Tensor(f"h.{i}.attn.c_attn.{part}", attention)
            yield Tensor(f"h.{i}.attn.c_proj.{part}", (f"block_{i}.attention.out.{suffix}",))
            yield Tensor(f"h.{i}.mlp.c_fc.{part}", (f"block_{i}.mlp.up.{suffix}",))
            yield Tensor(f"h.{i}.mlp.c_proj.{part}", (f"block_{i}.mlp.down.{suffix}",))
        yield from _norm(f"h.{i}.ln_1", f"block_{i}.attention_norm")
        yield from _norm(f"h.{i}.ln_2", f"block_{i}.mlp_norm")
    yield from _norm("ln_f", "head.norm")
    yield Tensor("score.weight", ("head.classifier.kernel",), transposed=True, prefixed=False, head=True)


def _llama_tensors(num_layers: int) -> Iterator[Tensor]:
    """Yield all tensors of Llama and its heads. Only Qwen 2 has biases.

    Queries and keys need no permutation: both sides rotate feature i of a head together with feature i + K/2.
    """
    yield Tensor("embed_tokens.weight", ("embed.tokens",))
    for i in range(num_layers):
        for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
            kernel = f"block_{i}.attention.{ours}.kernel"
            yield Tensor(f"layers.{i}.self_attn.{theirs}_proj.weight", (kernel,), transposed=True)
            yield Tensor(f"layers.{i}.self_attn.{theirs}_proj.bias", (f"block_{i}.attention.{ours}.bias",))
        for name in ("gate", "up", "down"):
            yield Tensor(f"layers.{i}.mlp.{name}_proj.weight", (f"block_{i}.mlp.{name}.kernel",), transposed=True)
        yield Tensor(f"layers.{i}.input_layernorm.weight", (f"block_{i}.attention_norm.scale",))
        yield Tensor(f"layers.{i}.post_attention_layernorm.weight", (f"block_{i}.mlp_norm.scale",))
    yield Tensor("norm.weight", ("head.norm.scale",))
    yield Tensor("lm_head.weight", ("head.tokens",), prefixed=False, head=True)
    yield Tensor("score.weight", ("head.classifier.kernel",), transposed=True, prefixed=False, head=True)


def _linear(theirs: str, ours: str) -> Iterator[Tensor]:
    yield Tensor(f"{theirs}.weight", (f"{ours}.kernel",), transposed=True)
    yield Tensor(f"{theirs}.bias", (f"{ours}.bias",))


def _norm(theirs: str, ours: str) -> Iterator[Tensor]:
    yield Tensor(f"{theirs}.weight", (f"{ours}.scale",))
    yield Tensor(f"{theirs}.bias", (f"{ours}.bias",))


_LLAMA = Family(
    model="gpt",
    options={"norm": "rmsnorm", "positions": "rotary", "qkv_bias": False},
    varied={"norm_eps": "rms_norm_eps", "tied_embeddings": "tie_word_embeddings", "head_dim": "head_dim"},
    keys={"num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_heads": "num_attention_heads"}
    | {"num_kv_heads": "num_key_value_heads", "mlp_size": "intermediate_size", "vocab_size": "vocab_size"}
    | {"activation": "hidden_act"},
    activations={"swiglu": "silu"},
    defaults={"num_key_value_heads": None, "hidden_act": "silu", "attention_dropout": 0.0}
    | {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": None},
    rates={},
    unapplied="attention_dropout",
    fixed={"attention_bias": False, "mlp_bias": False},
    prefix="model.",
    classes={"example": "LlamaForSequenceClassification", "causal_lm": "LlamaForCausalLM"},
    tensors=_llama_tensors,
)
FAMILIES = {
    "bert": Family(
        model="bert",
        options={},
        varied={},
        keys={"num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_heads": "num_attention_heads"}
        | {"mlp_size": "intermediate_size", "vocab_size": "vocab_size", "max_length": "max_position_embeddings"}
        | {"dropout": "hidden_dropout_prob", "activation": "hidden_act"},
        activations={"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"},
        defaults={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu"},
        rates={"classifier_dropout": None},
        unapplied="attention_probs_dropout_prob",
        fixed={"type_vocab_size": 2, "layer_norm_eps": bert.NORM_EPS, "position_embedding_type": "absolute"}
        | {"is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True},
        prefix="bert.",
        classes={"example": "BertForSequenceClassification", "token": "BertForTokenClassification"}
        | {"masked_lm": "BertForMaskedLM"},
        tensors=_bert_tensors,
    ),
    "gpt2": Family(
        model="gpt",
        options={"norm": "layernorm", "positions": "learned"},
        varied={"norm_eps": "layer_norm_epsilon"},
        keys={"num_layers": "n_layer", "hidden_size": "n_embd", "num_heads": "n_head", "mlp_size": "n_inner"}
        | {"vocab_size": "vocab_size", "max_length": "n_positions", "dropout": "resid_pdrop"}
        | {"activation": "activation_function"},
        activations={"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"},
        defaults={"n_inner": None, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "activation_function": "gelu_new"},
        rates={"embd_pdrop": 0.1},
        unapplied="attn_pdrop",
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
        | {"add_cross_attention": False, "tie_word_embeddings": True},
        prefix="transformer.",
        classes={"example": "GPT2ForSequenceClassification", "causal_lm": "GPT2LMHeadModel"},
        tensors=_gpt_tensors,
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA._replace(
        defaults={**_LLAMA.defaults, "num_key_value_heads": 8, "sliding_window": 4096},
        fixed={},
        classes={"example": "MistralForSequenceClassification", "causal_lm": "MistralForCausalLM"},
    ),
    "qwen2": _LLAMA._replace(
        options={**_LLAMA.options, "qkv_bias": True},
        defaults={**_LLAMA.defaults, "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096},
        fixed={},
        classes={"example": "Qwen2ForSequenceClassification", "causal_lm": "Qwen2ForCausalLM"},
    ),
}


def sliding_window(settings: Mapping[str, Any]) -> int | None:
    """Return the number of positions that a position attends to; None: all. settings: config.json with its defaults."""
    return settings.get("sliding_window") if settings.get("use_sliding_window", True) else None


def rope_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_base and rope_scaling of config.model for a config.json; None: the default.

    Raises ValueError for a base or a scaling that models here do not have.
    """
    name = "rope_parameters" if settings.get("rope_parameters") else "rope_scaling"  # the first: transformers 5
    if not isinstance(settings.get(name), dict | None):
        raise ValueError(f"{name} {settings[name]!r:.60}, which must be an object,")
    values = dict(settings.get(name) or {})
    base = values.pop("rope_theta", settings.get("rope_theta", Rope().base))
    kind = values.pop("type", "default")
    values.setdefault("rope_type", kind)
    if type(base) not in (int, float) or not 1 < base < float("inf"):
        raise ValueError(f"rope_theta {base!r:.60}, which must be a number greater than 1,")
    scaling = None
    if values != {"rope_type": "default"}:
        if problem := scaling_problem(values):
            raise ValueError(f"the scaling {values!r:.200} ({problem})")
        scaling = json.dumps(values, sort_keys=True)
    return {"rope_base": None if base == Rope().base else float(base), "rope_scaling": scaling}


def rope_settings(base: float, scaling: str | None) -> dict[str, Any]:
    """Return the keys of config.json for rotary positions: those of transformers 5, and those of earlier versions."""
    values = json.loads(scaling) if scaling else None
    parameters = {**(values or {"rope_type": "default"}), "rope_theta": base}
    return {"rope_theta": base, "rope_scaling": values, "rope_parameters": parameters}
