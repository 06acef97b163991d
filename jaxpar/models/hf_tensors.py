"""The tensors of a Hugging Face directory: how their names map to jaxpar's parameters, and how to read their files.

The names are from the `transformers` classes BertForMaskedLM, BertForSequenceClassification,
BertForTokenClassification, GPT2LMHeadModel, GPT2ForSequenceClassification, LlamaForCausalLM and
LlamaForSequenceClassification; those of Mistral and Qwen 2 are the names of Llama. BertModel, GPT2Model and LlamaModel
use the same names without the prefix.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpar.errors import UserError
from jaxpar.files import file_of, parse_json

FLOATS = ("F16", "BF16", "F32", "F64")  # dtypes of safetensors that hold weights as they are
Value = TypeVar("Value")


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


def bert(num_layers: int) -> Iterator[Tensor]:
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
    heads = [
        *_linear("pooler.dense", "head.pooler"),
        *_linear("classifier", "head.classifier"),
        *_linear("cls.predictions.transform.dense", "head.transform"),
        *_norm("cls.predictions.transform.LayerNorm", "head.norm"),
        Tensor("cls.predictions.bias", ("head.bias",)),
    ]
    for tensor in heads:
        yield tensor._replace(prefixed=tensor.name.startswith("pooler"), head=True)


def gpt(num_layers: int) -> Iterator[Tensor]:
    """Yield all tensors of GPT-2 and its classifier. Its linear maps are "Conv1D" and stored as [in, out]."""
    yield Tensor("wte.weight", ("embed.tokens",))
    yield Tensor("wpe.weight", ("embed.positions",))
    for i in range(num_layers):
        for part, suffix in (("weight", "kernel"), ("bias", "bias")):
            block = f"block_{i}"
            attention = tuple(f"{block}.attention.{name}.{suffix}" for name in ("query", "key", "value"))
            yield Tensor(f"h.{i}.attn.c_attn.{part}", attention)
            yield Tensor(f"h.{i}.attn.c_proj.{part}", (f"{block}.attention.out.{suffix}",))
            yield Tensor(f"h.{i}.mlp.c_fc.{part}", (f"{block}.mlp.up.{suffix}",))
            yield Tensor(f"h.{i}.mlp.c_proj.{part}", (f"{block}.mlp.down.{suffix}",))
        yield from _norm(f"h.{i}.ln_1", f"block_{i}.attention_norm")
        yield from _norm(f"h.{i}.ln_2", f"block_{i}.mlp_norm")
    yield from _norm("ln_f", "head.norm")
    yield Tensor("score.weight", ("head.classifier.kernel",), transposed=True, prefixed=False, head=True)


def llama(num_layers: int) -> Iterator[Tensor]:
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


# ---- files -----------------------------------------------------------------------------------------


class TensorSource(NamedTuple):
    """The location of a tensor: the file, and the name in the file."""

    path: Path
    name: str


def find_tensors(directory: Path) -> dict[str, TensorSource]:
    """Return the tensors of a directory by their current names.

    Files from before 2019 use gamma and beta for the weight and bias of LayerNorm.

    Raises:
      UserError: a file is missing or damaged.
    """
    single, index = (file_of(directory, name) for name in ("model.safetensors", "model.safetensors.index.json"))
    if single.is_file():
        paths = [single]
    elif index.is_file():
        try:
            names = sorted(set(parse_json(index.read_text())["weight_map"].values()))
            paths = [file_of(directory, name) for name in names]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index} is not an index of safetensors files: {error!r}") from error
    else:
        pickled = (directory / "pytorch_model.bin").is_file()
        hint = (
            "; convert pytorch_model.bin by loading it in transformers and calling save_pretrained" if pickled else ""
        )
        raise UserError(f"config.model.init_from is {str(directory)!r}; it must contain model.safetensors{hint}")
    sources = {}
    for path in paths:
        for name in _reading(path, lambda file: list(file.keys())):
            today = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
            sources[today] = TensorSource(path, name)
    return sources


def read_tensor(source: TensorSource) -> np.ndarray:
    """Return the array of a tensor. Raises UserError if the file is truncated, or the tensor is quantized."""
    dtype = _reading(source.path, lambda file: str(file.get_slice(source.name).get_dtype()))
    if dtype not in FLOATS:
        raise UserError(
            f"{source.path}: tensor {source.name} has dtype {dtype!r}; it must be one of {', '.join(FLOATS)}"
        )
    return _reading(source.path, lambda file: file.get_tensor(source.name))


def _reading(path: Path, function: Callable[[Any], Value]) -> Value:
    try:
        with safe_open(path, framework="numpy") as file:
            return function(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is missing, truncated or not a safetensors file: {error}") from error
