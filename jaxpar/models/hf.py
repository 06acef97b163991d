"""Reads and writes BERT and GPT-2 weights as Hugging Face `transformers` directories.

A directory contains config.json, model.safetensors (or several files with an index) and a tokenizer. The weights are
the same numbers in both formats, so the logits agree to float32 rounding.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from jaxpar.data import DataInfo
from jaxpar.data import tokenizer as tokenizers
from jaxpar.errors import UserError
from jaxpar.files import parse_json
from jaxpar.models import bert, gpt, hf_labels, hf_tensors
from jaxpar.models.model import Model, Params


class Family(NamedTuple):
    """The mapping between one model_type of config.json and config.model.

    Attributes:
      model: value of config.model.name.
      keys: config.model key -> config.json key.
      activations: config.model.activation -> the activation in config.json.
      defaults: default values of config.json keys that can be absent.
      rates: other dropout rates of config.json with their defaults; None is the rate of `keys`.
      unapplied: the dropout rate of the attention probabilities in config.json, which models here do not have.
      fixed: config.json keys with the only supported value of each.
      prefix: prefix of the tensor names in `transformers` classes with a head.
      classes: head of the task -> `transformers` class.
      tensors: function from the number of layers to all tensors.
    """

    model: str
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
        defaults={"hidden_dropout_prob": 0.1, "hidden_act": "gelu"},
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
        defaults={"n_inner": None, "resid_pdrop": 0.1, "activation_function": "gelu_new"},
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
}


# ---- import ------------------------------------------------------------------------------------------


def apply_directory(config: ConfigDict) -> None:
    """Set the sizes in config.model to the sizes of the model in directory config.model.init_from.

    A dropout rate set in the config has priority over the directory's.

    Raises:
      UserError: the directory does not exist, the kind of model is unsupported, or a size conflicts with the config.
    """
    path = Path(config.model.init_from).expanduser() / "config.json"
    _check_blocks(config)
    family, theirs = _read_config(path)
    if config.model.name != family.model:
        raise UserError(
            f"config.model.name is {config.model.name!r}, but {path} describes a {family.model!r} model; "
            f"set config.model.name={family.model}"
        )
    for key, name in family.keys.items():
        value = {**family.defaults, **theirs}[name]
        if key == "activation":
            value = {name: ours for ours, name in family.activations.items()}[value]
        if key == "dropout" and config.model.dropout is None:
            _check_other_rates(family, theirs, name, value, path)
        if config.model[key] is None:
            config.model[key] = value
        elif config.model[key] != value and key != "dropout":
            raise UserError(
                f"config.model.{key} is {config.model[key]!r}, but {path} has {name} {value!r}; "
                f"do not set config.model.{key}"
            )


def _check_blocks(config: ConfigDict) -> None:
    for key in ("num_applications", "bottlenecks"):
        if config.model[key] not in (None, 1):
            raise UserError(
                f"config.model.{key} is {config.model[key]!r}, which Hugging Face models do not have; it must be None"
            )


def _check_other_rates(family: Family, theirs: dict[str, Any], name: str, rate: float, path: Path) -> None:
    for other, default in family.rates.items():
        value = theirs.get(other, default)
        if value not in (None, rate):
            raise UserError(
                f"{path} has {name} {rate!r} and {other} {value!r}; they must be equal, because a model here "
                "has one dropout rate, or config.model.dropout must be set"
            )


def _read_config(path: Path) -> tuple[Family, dict[str, Any]]:
    """Return the family and the contents of a config.json. Raises UserError if the model is not supported exactly."""
    if not path.parent.is_dir():
        raise UserError(
            f"config.model.init_from is {str(path.parent)!r}, which does not exist; it must be a model directory"
        )
    if not path.is_file():
        raise UserError(
            f"config.model.init_from is {str(path.parent)!r}; it must be a directory that contains config.json"
        )
    try:
        theirs = parse_json(path.read_text())
        kind = theirs["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not the config.json of a model: {error!r}") from error
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"config.model.init_from is {str(path.parent)!r} with model_type {kind!r:.60}; it must be one of "
            f"{', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    for name in ("quantization_config", "pruned_heads"):
        if theirs.get(name):
            raise UserError(
                f"config.model.init_from is {str(path.parent)!r} with {name} in config.json; "
                f"it must be a model that is not {'quantized' if name == 'quantization_config' else 'pruned'}"
            )
    hf_labels.check_labels(theirs, path)
    missing = [name for name in family.keys.values() if name not in theirs and name not in family.defaults]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}; it must be the config.json of a {kind} model")
    for key, name in family.keys.items():
        value = {**family.defaults, **theirs}[name]
        is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if key == "dropout" and not (isinstance(value, int | float) and 0 <= value < 1):
            raise UserError(f"{path} has {name} {value!r}; it must be a number, at least 0 and less than 1")
        if key not in ("dropout", "activation") and not is_size and not (name in family.defaults and value is None):
            raise UserError(f"{path} has {name} {value!r}; it must be a positive integer")
    accepted = {name: [value] for name, value in family.fixed.items()}
    accepted[family.keys["activation"]] = list(family.activations.values())
    for name, values in accepted.items():
        if name in theirs and theirs[name] not in values:
            raise UserError(
                f"config.model.init_from is {str(path.parent)!r} with {name} {theirs[name]!r} in config.json; "
                f"it must be one of {', '.join(map(repr, values))}"
            )
    return family, theirs


def load_params(
    model: Model, params: Params, directory: Path, info: DataInfo, log: Callable[[str], None] = print
) -> Params:
    """Return `params` with the arrays in the directory in place of the initial ones, as NumPy arrays.

    Heads that the directory lacks, and a classifier of other classes, stay as in `params`. A classifier of the same
    classes in another order is reordered.

    Args:
      model: the model, built from a config processed by `apply_directory`.
      params: initial parameters, which fill in for arrays that the directory lacks, or only their shapes.
      directory: the directory that config.model.init_from named.
      info: properties of the data set.
      log: called with one line that lists the directory, the parameters that keep their initial values, and the dropout
        rate that is not applied.

    Raises:
      UserError: a file or tensor is missing, a file is damaged, or a tensor has the wrong shape or is not finite.
    """
    family, theirs = _read_config(directory / "config.json")
    order = hf_labels.output_order(theirs, info)
    sources = hf_tensors.find_tensors(directory)
    prefix = family.prefix if any(name.startswith(family.prefix) for name in sources) else ""
    flat = flatten_dict(params, sep=".")
    fresh = []
    for tensor in family.tensors(len(model.layers) - 2):
        if tensor.keys[0] not in flat:  # belongs to the head of another task
            continue
        name = prefix * tensor.prefixed + tensor.name
        if name not in sources and not tensor.head:
            raise UserError(f"{directory} has no tensor {name}; its files do not match its config.json")
        arrays = tensor.to_ours(hf_tensors.read_tensor(sources[name])) if name in sources else []
        shapes = [(key, np.shape(flat[key]), array.shape) for key, array in zip(tensor.keys, arrays, strict=False)]
        wrong = [f"{key} {there}, but the model has {here}" for key, here, there in shapes if here != there]
        is_classifier = tensor.keys[0].startswith("head.classifier")
        if not arrays or (is_classifier and (wrong or order is None)):
            fresh.append(tensor.keys[0])
        elif wrong:
            raise UserError(f"{sources[name].path}: tensor {name} has the wrong shape: {'; '.join(wrong)}")
        elif not all(np.isfinite(array).all() for array in arrays):
            raise UserError(
                f"{sources[name].path}: tensor {name} has values that are not finite in float32; they must be finite"
            )
        else:
            arrays = [array[..., order] for array in arrays] if is_classifier else arrays
            flat |= dict(zip(tensor.keys, arrays, strict=True))
    rate = theirs.get(family.unapplied, 0.1)
    notes = [f"newly initialized: {', '.join(fresh)}"] if fresh else []
    notes += [f"{family.unapplied} {rate!r:.60} is not applied"] if rate else []
    log("; ".join([f"init      from {directory}", *notes]))
    return unflatten_dict(flat, sep=".")


# ---- export ------------------------------------------------------------------------------------------


def save_directory(params: Params, config: ConfigDict, info: DataInfo, tokenizer: Path, directory: Path) -> None:
    """Write trained parameters to a directory that `transformers` can load with AutoModel... and AutoTokenizer.

    Args:
      params: canonical parameters.
      config: config of the run.
      info: properties of the data set of the run.
      tokenizer: path of a tokenizer.json.
      directory: a directory that does not exist or is empty.

    Raises:
      UserError: `transformers` has no equivalent model, the run has no tokenizer, or the directory is not empty or
        cannot be written.
    """
    settings, family = _their_config(config, info)
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty; choose a new directory")
    if not tokenizer.is_file():
        raise UserError(
            f"{tokenizer} does not exist; an export needs the tokenizer of the run (runs on synthetic data have none)"
        )
    flat = flatten_dict(params, sep=".")
    tensors, left = {}, set(flat)
    for tensor in family.tensors(settings[family.keys["num_layers"]]):
        if tensor.keys[0] in flat:
            arrays = [np.asarray(flat[key], np.float32) for key in tensor.keys]
            tensors[family.prefix * tensor.prefixed + tensor.name] = tensor.from_ours(arrays)
            left -= set(tensor.keys)
    assert not left, left
    special = _special_tokens(Tokenizer.from_str(tokenizers.read_tokenizer(tokenizer)))
    uses = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": info.input_shape[0]}
    ids = {f"{use}_id": index for use, (_, index) in special.items() if use in ("bos_token", "eos_token")}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tokenizer, directory / "tokenizer.json")
        names = {use: token for use, (token, _) in special.items()}
        _write_json(directory / "tokenizer_config.json", {**uses, **names})
        _write_json(directory / "config.json", {**settings, **ids})
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory} cannot be written: {error}") from error


def _their_config(config: ConfigDict, info: DataInfo) -> tuple[dict[str, Any], Family]:
    families = {family.model: (kind, family) for kind, family in FAMILIES.items()}
    if config.model.name not in families:
        raise UserError(
            f"config.model.name is {config.model.name!r}; for an export to Hugging Face it must be one of "
            f"{', '.join(families)}"
        )
    _check_blocks(config)
    kind, family = families[config.model.name]
    if kind == "bert":
        task, spec, pooling = bert.resolve(config, info)
        extras: dict[str, object] = {"attention_probs_dropout_prob": 0.0}
        differing = {"pooling": (pooling, "mean", repr("cls"))}
    else:
        task, spec = gpt.resolve(config, info)
        extras = {"attn_pdrop": 0.0, "embd_pdrop": spec.dropout, "bos_token_id": None, "eos_token_id": None}
        activations = " or ".join(map(repr, family.activations))
        differing = {
            "norm": (spec.norm, "rmsnorm", repr("layernorm")),
            "positions": (spec.positions, "rotary", repr("learned")),
            "activation": (spec.activation, "swiglu", activations),
        }
        if spec.num_kv_heads != spec.num_heads:
            raise UserError(
                f"config.model.num_kv_heads is {spec.num_kv_heads}; it must equal num_heads ({spec.num_heads}), "
                f"because Hugging Face {kind} has no grouped-query attention"
            )
    for key, (value, unknown, known) in differing.items():
        if value == unknown:
            raise UserError(
                f"config.model.{key} is {value!r}, which Hugging Face {kind} does not support; it must be {known}"
            )
    values = {theirs: getattr(spec, ours) for ours, theirs in family.keys.items()}
    values[family.keys["activation"]] = family.activations[spec.activation]
    settings = {"architectures": [family.classes[task.head]], "model_type": kind, **values, **family.fixed, **extras}
    if names := info.targets or info.class_names:
        settings["id2label"] = {str(index): name for index, name in enumerate(names)}
        settings["label2id"] = {name: index for index, name in enumerate(names)}
    if info.targets:
        settings["problem_type"] = "regression"
    # GPT-2's classifier uses the padding token to find the last token of a text.
    settings["pad_token_id"] = info.pad_id if task.head != "causal_lm" else None
    return settings, family


def _special_tokens(tokenizer: Tokenizer) -> dict[str, tuple[str, int]]:
    """Return the special tokens and their ids by use, such as pad_token, which tokenizer.json does not record."""
    end = tuple(token for token in tokenizers.END_OF_TEXT if token != "[SEP]")  # BERT has no end-of-text token
    names = {
        "pad_token": tokenizers.PADDING,
        "unk_token": ("[UNK]", "<unk>", "<|endoftext|>"),
        "cls_token": ("[CLS]",),
        "sep_token": ("[SEP]",),
        "mask_token": tokenizers.MASK,
        "bos_token": end,
        "eos_token": end,
    }
    vocabulary = tokenizer.get_vocab()
    present = {use: [name for name in choices if name in vocabulary] for use, choices in names.items()}
    return {use: (choices[0], vocabulary[choices[0]]) for use, choices in present.items() if choices}


def _write_json(path: Path, contents: Mapping[str, object]) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n")
