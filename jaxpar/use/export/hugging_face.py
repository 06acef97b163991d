"""Writes a trained model as a directory for Hugging Face `transformers` or `sentence-transformers`.

A BERT classifier that pools by the mean has no class in `transformers`. It is written for `sentence-transformers`, as
the encoder, the pooling and the classifier as a linear map, whose output is the logits.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from jaxpar.data import DataInfo
from jaxpar.data import tokenizer as tokenizers
from jaxpar.errors import UserError
from jaxpar.models import bert, gpt
from jaxpar.models.hf import check_blocks
from jaxpar.models.hf_families import FAMILIES, Family, rope_settings
from jaxpar.models.model import Params
from jaxpar.models.options import Spec
from jaxpar.tasks import Task

MODULES = ("Transformer", "Pooling", "Dense")  # the modules of `sentence_transformers.models`, in order
SHARD_BYTES = 5 * 10**9  # of a file with tensors; more of them are several files with an index
LINEAR = "torch.nn.modules.linear.Identity"  # activation of a Dense module


class Equivalent(NamedTuple):
    """The Hugging Face model that computes the same as a model here."""

    kind: str  # its model_type, a key of FAMILIES
    family: Family  # the entry of FAMILIES
    spec: Spec  # the resolved options of the model
    task: Task
    is_mean: bool  # whether it pools by the mean, which needs `sentence-transformers`
    is_tied: bool = True  # whether the head of a language model is the token embedding
    rope_scaling: str | None = None  # config.model.rope_scaling


def save_directory(params: Params, config: ConfigDict, info: DataInfo, tokenizer: Path, directory: Path) -> None:
    """Write canonical parameters and the tokenizer.json to an empty directory that Hugging Face libraries can load.

    Raises UserError if no library has an equivalent model, or the run has no tokenizer.
    """
    model = find_equivalent(config, info)
    if not tokenizer.is_file():
        raise UserError(
            f"{tokenizer} does not exist; an export needs the tokenizer of the run (runs on synthetic data have none)"
        )
    special = _special_tokens(Tokenizer.from_str(tokenizers.read_tokenizer(tokenizer)))
    ids = {f"{use}_id": index for use, (_, index) in special.items() if use in ("bos_token", "eos_token")}
    names = {use: token for use, (token, _) in special.items()}
    uses = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": info.input_shape[0]}
    shutil.copyfile(tokenizer, directory / "tokenizer.json")
    _write_json(directory / "tokenizer_config.json", {**uses, **names})
    _write_json(directory / "config.json", {**_settings(model, info), **ids})
    tensors = _tensors(params, model)
    if model.is_mean:
        tensors = iter(_save_modules(dict(tensors), info, directory).items())
    _save_shards(tensors, directory)


def find_equivalent(config: ConfigDict, info: DataInfo) -> Equivalent:
    """Return the Hugging Face model that computes the same. Raises UserError if there is none."""
    name, known = config.model.name, dict.fromkeys(family.model for family in FAMILIES.values())
    if name not in known:
        one_of = f"one of {', '.join(known)}"
        raise UserError(f"config.model.name is {name!r}; for an export to Hugging Face it must be {one_of}")
    check_blocks(config)
    if config.model.name == "bert":
        task, spec, pooling = bert.resolve(config, info)
        return Equivalent("bert", FAMILIES["bert"], spec, task, pooling == "mean")
    task, spec = gpt.resolve(config, info)
    kind = "gpt2" if spec.norm == "layernorm" else "qwen2" if spec.qkv_bias else "llama"
    is_tied = config.model.tied_embeddings is not False
    model = Equivalent(kind, FAMILIES[kind], spec, task, False, is_tied, config.model.rope_scaling)
    _check_options(model)
    return model


def _check_options(model: Equivalent) -> None:
    """Raise UserError if the model mixes options of GPT-2, Llama and Qwen 2."""
    kind, family, spec = model.kind, model.family, model.spec
    accepted = {key: [value] for key, value in family.options.items()} | {"activation": list(family.activations)}
    for key, values in accepted.items():
        if getattr(spec, key) not in values:
            raise UserError(
                f"config.model.{key} is {getattr(spec, key)!r}, which Hugging Face {kind} (norm {spec.norm!r}) does "
                f"not support; it must be {' or '.join(map(repr, values))}"
            )
    if spec.num_kv_heads != spec.num_heads and "num_kv_heads" not in family.keys:
        raise UserError(
            f"config.model.num_kv_heads is {spec.num_kv_heads}; it must equal num_heads ({spec.num_heads}), "
            f"because Hugging Face {kind} has no grouped-query attention"
        )
    if spec.head_dim * spec.num_heads != spec.hidden_size and "head_dim" not in family.varied:
        raise UserError(
            f"config.model.head_dim is {spec.head_dim}; it must be hidden_size / num_heads, as in Hugging Face {kind}"
        )
    if not model.is_tied and "tied_embeddings" not in family.varied:
        raise UserError(
            f"config.model.tied_embeddings is False; it must be None, because the head of Hugging Face {kind} is tied"
        )


def _settings(model: Equivalent, info: DataInfo) -> dict[str, Any]:
    """Return the contents of config.json, without the ids of special tokens."""
    family, spec = model.family, model.spec
    values = {**dataclasses.asdict(spec), "tied_embeddings": model.is_tied}
    settings = {theirs: values[ours] for ours, theirs in (family.keys | family.varied).items()}
    settings[family.keys["activation"]] = family.activations[spec.activation]
    rates = {rate: spec.dropout for rate, default in family.rates.items() if default is not None}
    settings |= {**family.fixed, **rates, family.unapplied: 0.0}
    architecture = "BertModel" if model.is_mean else family.classes[model.task.head]
    settings |= {"model_type": model.kind, "architectures": [architecture]}
    if model.kind != "bert":
        settings |= {"bos_token_id": None, "eos_token_id": None}
    if spec.positions == "rotary":
        settings["max_position_embeddings"] = info.input_shape[0]
        settings |= {"sliding_window": None} if "sliding_window" in family.defaults else {}
        settings |= rope_settings(spec.rope.base, model.rope_scaling)
    if names := info.targets or info.class_names:
        settings["id2label"] = {str(index): name for index, name in enumerate(names)}
        settings["label2id"] = {name: index for index, name in enumerate(names)}
    if info.targets:
        settings["problem_type"] = "regression"
    # The classifiers of GPT-2 and Llama use the padding token to find the last token of a text.
    settings["pad_token_id"] = info.pad_id if model.task.head != "causal_lm" else None
    return settings


def _tensors(params: Params, model: Equivalent) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names and tensors. A class without a head has no prefix."""
    flat = flatten_dict(params, sep=".")
    prefix = "" if model.is_mean else model.family.prefix
    left = set(flat)
    for tensor in model.family.tensors(model.spec.num_layers):
        if tensor.keys[0] in flat:
            arrays = [np.asarray(flat[key], np.float32) for key in tensor.keys]
            left -= set(tensor.keys)
            yield prefix * tensor.prefixed + tensor.name, tensor.from_ours(arrays)
    assert not left, left


def _save_shards(tensors: Iterator[tuple[str, np.ndarray]], directory: Path) -> None:
    """Write model.safetensors, or files of at most SHARD_BYTES with their index, holding one of them in memory."""
    shards: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}
    total = 0

    def write() -> None:
        shards.append(list(shard))
        save_file(shard, directory / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shard.clear()

    for name, array in tensors:
        if shard and sum(one.nbytes for one in shard.values()) + array.nbytes > SHARD_BYTES:
            write()
        shard[name] = array
        total += array.nbytes
    write()
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_json(directory / "model.safetensors.index.json", index)
    for number, file in enumerate(files, start=1):
        (directory / f"{number}.safetensors").rename(directory / file)


def _save_modules(tensors: dict[str, np.ndarray], info: DataInfo, directory: Path) -> dict[str, np.ndarray]:
    """Write the files that `sentence-transformers` reads besides those of BERT, and return the tensors of BERT."""
    kernel_CD, bias_C = tensors.pop("classifier.weight"), tensors.pop("classifier.bias")
    C, D = kernel_CD.shape
    paths = [f"{index}_{name}" * (index > 0) for index, name in enumerate(MODULES)]
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(zip(MODULES, paths, strict=True))
    ]
    _write_json(directory / "modules.json", entries)
    loading = {"max_seq_length": info.input_shape[0], "model_args": {"add_pooling_layer": False}}
    _write_json(directory / "sentence_bert_config.json", {**loading, "do_lower_case": False})
    _, pooling, dense = (directory / path for path in paths)
    pooling.mkdir()
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    is_on = {f"pooling_mode_{mode}": mode == "mean_tokens" for mode in modes}
    _write_json(pooling / "config.json", {"word_embedding_dimension": D, **is_on})
    dense.mkdir()
    shape = {"in_features": D, "out_features": C, "bias": True}
    _write_json(dense / "config.json", {**shape, "activation_function": LINEAR})
    save_file({"linear.weight": kernel_CD, "linear.bias": bias_C}, dense / "model.safetensors", {"format": "pt"})
    return tensors


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


def _write_json(path: Path, contents: object) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n")
