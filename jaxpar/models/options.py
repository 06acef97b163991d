"""Turns config.model into decided numbers, and refuses what cannot be built, before anything is compiled."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from ml_collections import ConfigDict

from jaxpar import tasks
from jaxpar.cluster import Cluster
from jaxpar.data import DataInfo
from jaxpar.errors import UserError, check_choice
from jaxpar.tasks import Head, Task

AttentionKernel = Literal["xla", "cudnn"]
# The keys of config.model that override a size; a model lists those that it takes.
OVERRIDES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "mlp_size",
    "vocab_size",
    "max_length",
    "dropout",
    "norm",
    "activation",
    "positions",
    "pooling",
    "patch_size",
)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A transformer in decided numbers.

    Attributes:
      vocab_size: rows of the token embedding.
      max_length: rows of the position embedding; 0 with rotary positions.
      token_types: rows of the segment embedding; 0: none.
      dropout: rate, of embeddings and of what each half of a block adds.
      norm: layernorm, rmsnorm. With rmsnorm the linear maps have no biases either, as in Llama.
      pre_norm: normalise what a half of a block reads and what the head reads (GPT-2), or what
        each half and the embedding give (BERT).
      causal: no position sees a later one.
      dtype: of the computation.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    mlp_size: int
    vocab_size: int
    max_length: int
    token_types: int
    dropout: float
    norm: str
    norm_eps: float
    pre_norm: bool
    activation: str
    positions: str
    causal: bool
    dtype: DTypeLike
    attention: AttentionKernel

    @property
    def head_dim(self) -> int:
        """Features of an attention head."""
        return self.hidden_size // self.num_heads


def check_task(config: ConfigDict, info: DataInfo, *, heads: Sequence[Head], kinds: Sequence[str]) -> Task:
    """Return the task. Raises UserError where the model lacks its head, or cannot read this kind of data."""
    name, task = config.model.name, tasks.find_task(config)
    if task.head not in heads:
        possible = [other for other, make in tasks.TASKS.items() if make(config).head in heads]
        raise UserError(
            f"config.task is {task.name!r}, which model {name!r} cannot learn; it must be {', '.join(possible)}, or "
            "another model (docs/tasks.md)"
        )
    if info.kind not in kinds:
        raise UserError(
            f"config.model.name is {name!r}, which reads {' and '.join(kinds)} data, "
            f"but config.data.source {config.data.source!r} gives {info.kind} data."
        )
    return task


def pick(config: ConfigDict, sizes: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The values of config.model.size, each overridden by the key of config.model that is set.

    sizes: size name -> values. defaults: values that all sizes share. The keys of the two are
    all that the model takes.

    Raises:
      UserError: an unknown size, a key that the model does not take, a number out of range.
    """
    check_choice("model.size", config.model.size, sizes)
    values = {**defaults, **sizes[config.model.size]}
    for key in OVERRIDES:
        value = config.model[key]
        if value is None:
            continue
        if key not in values:
            takes = ", ".join(key for key in OVERRIDES if key in values)
            raise UserError(
                f"config.model.{key} is {value!r}, but model {config.model.name!r} has no such option "
                f"for task {tasks.find_task(config).name!r}; it takes {takes}."
            )
        if isinstance(value, int) and not isinstance(value, bool) and key != "dropout" and value < 1:
            raise UserError(f"config.model.{key} is {value}; it must be at least 1.")
        values[key] = value
    if "num_heads" not in values and config.model.attention == "cudnn":
        raise UserError(f"config.model.attention is 'cudnn', but model {config.model.name!r} has no attention.")
    if not 0 <= values["dropout"] < 1:
        raise UserError(f"config.model.dropout is {values['dropout']}; it must be at least 0 and less than 1.")
    return values


def transformer_spec(
    config: ConfigDict, info: DataInfo, values: Mapping[str, Any], *, norm_eps: float, causal: bool
) -> Spec:
    """The Spec of the picked values: a causal model is pre-norm without token types, as GPT-2; the other BERT.

    Raises:
      UserError: numbers that do not fit together, or to the data.
    """
    positions, activation, norm = (values["positions"], values["activation"], values["norm"])
    hidden, heads = values["hidden_size"], values["num_heads"]
    if hidden % heads:
        raise UserError(
            f"config.model.hidden_size is {hidden}; it must be a multiple of config.model.num_heads, {heads}."
        )
    kv_heads = values["num_kv_heads"] or heads
    if heads % kv_heads:
        raise UserError(
            f"config.model.num_heads is {heads}; it must be a multiple of config.model.num_kv_heads, {kv_heads}."
        )
    if positions == "rotary" and hidden // heads % 2:
        raise UserError(
            f"config.model.positions is 'rotary', which turns pairs of numbers: hidden_size / num_heads "
            f"must be even, but is {hidden} / {heads} = {hidden // heads}."
        )
    dtype = jnp.dtype(config.model.dtype)
    return Spec(
        num_layers=values["num_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_size=values["mlp_size"] or _mlp_size(hidden, activation),
        vocab_size=_vocab_size(values["vocab_size"], info),
        max_length=_max_length(values["max_length"], positions, info),
        token_types=0 if causal else 2,
        dropout=values["dropout"],
        norm=norm,
        norm_eps=norm_eps,
        pre_norm=causal,
        activation=activation,
        positions=positions,
        causal=causal,
        dtype=dtype,
        attention=attention_kernel(config.model.attention, dtype, hidden // heads),
    )


def _mlp_size(hidden: int, activation: str) -> int:
    """4 D; a SwiGLU has three matrices for two, so 8/3 D, rounded up to a multiple of 64 (Shazeer 2020)."""
    return -(-hidden * 8 // (3 * 64)) * 64 if activation == "swiglu" else 4 * hidden


def _vocab_size(rows: int | None, info: DataInfo) -> int:
    if rows is not None and rows < info.vocab_size:
        raise UserError(f"config.model.vocab_size is {rows}, but the tokenizer has {info.vocab_size} tokens.")
    return rows or info.vocab_size


def _max_length(rows: int | None, positions: str, info: DataInfo) -> int:
    longest = info.input_shape[0]
    if positions == "rotary":
        if rows is not None:
            raise UserError(f"config.model.max_length is {rows}, but rotary positions have no greatest length.")
        return 0
    if rows is not None and rows < longest:
        raise UserError(
            f"config.model.max_length is {rows}, but texts are padded up to {longest} tokens: "
            "lower config.data.max_length and config.data.length_buckets, or raise config.model.max_length."
        )
    return rows or longest


def with_attention_of(config: ConfigDict, cluster: Cluster) -> ConfigDict:
    """Return the config with an attention kernel in the place of `auto`: xla where the cluster has no other."""
    if config.model.attention != "auto" or _has_cudnn_attention(cluster):
        return config
    config = config.copy_and_resolve_references()
    config.model.attention = "xla"
    return config


def check_attention(config: ConfigDict, cluster: Cluster) -> None:
    """Raise UserError where config.model.attention is cudnn, which the cluster's devices lack."""
    if config.model.attention == "cudnn" and not _has_cudnn_attention(cluster):
        raise UserError(
            "config.model.attention is 'cudnn', which needs an NVIDIA GPU of compute capability 8.0 or more, not "
            f"{cluster.device_kind}."
        )


def _has_cudnn_attention(cluster: Cluster) -> bool:
    major = cluster.compute_capability.split(".")[0]  # gfx90a: AMD; empty: not a GPU
    return major.isdigit() and int(major) >= 8


def attention_kernel(choice: str, dtype: DTypeLike, head_dim: int) -> AttentionKernel:
    """Return the kernel, xla or cudnn, that config.model.attention comes to where devices have cuDNN's.

    The limits are those of cuDNN's flash attention as `jax.nn.dot_product_attention` calls it.

    Raises:
      UserError: cudnn was asked for where it cannot serve.
    """
    if choice == "xla":
        return "xla"
    problems = []
    if dtype not in (jnp.bfloat16, jnp.float16):
        problems.append(f"needs config.model.dtype bfloat16, not {dtype}")
    if head_dim > 128 or head_dim % 8:
        problems.append(f"needs hidden_size / num_heads at most 128 and a multiple of 8, not {head_dim}")
    if choice == "cudnn" and problems:
        raise UserError(f"config.model.attention is 'cudnn', which {'; '.join(problems)}.")
    return "xla" if problems else "cudnn"
