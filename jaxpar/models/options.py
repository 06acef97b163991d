"""Resolves the options of config.model, and rejects invalid ones before compilation."""

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
from jaxpar.models.rotary import Rope, rope_of
from jaxpar.tasks import Head, Task

AttentionKernel = Literal["xla", "batched", "cudnn"]
MAX_LAYERS, MAX_SIZE = 10_000, 10_000_000  # of the keys in DEPTHS, and of the other numbers in config.model
DEPTHS = ("num_layers", "num_applications")
# The keys of config.model that override a size. Each model supports some of them.
_OF_BLOCKS = ("num_applications", "bottlenecks", "bottleneck", "bottleneck_factor")
ROTARY = ("rope_base", "rope_scaling")  # keys of config.model that only rotary positions have
OVERRIDES = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "mlp_size", "vocab_size", "max_length", "dropout"),
    *("norm", "activation", "positions", "head_dim", "norm_eps", "qkv_bias", *ROTARY, "tied_embeddings"),
    *("pooling", "patch_size", *_OF_BLOCKS),
)
BLOCK_DEFAULTS = dict.fromkeys(_OF_BLOCKS)  # of every model with blocks. None: the default in configs/default.py.


@dataclasses.dataclass(frozen=True)
class Spec:
    """The resolved options of a transformer."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    mlp_size: int
    vocab_size: int  # rows of the token embedding
    max_length: int  # rows of the position embedding; 0 with rotary positions
    token_types: int  # rows of the segment embedding; 0 for none
    dropout: float  # dropout rate of the embeddings and of both residual branches of a block
    norm: str  # layernorm or rmsnorm. With rmsnorm, the linear maps have no biases, as in Llama.
    norm_eps: float
    # whether to normalize the inputs of both residual branches and of the head (GPT-2), rather than the outputs of the
    # embedding and after both residual branches (BERT)
    pre_norm: bool
    activation: str
    positions: str
    causal: bool  # whether positions attend only to themselves and earlier positions
    dtype: DTypeLike  # dtype of the computation
    attention: AttentionKernel
    flatten_positions: bool  # whether linear maps multiply one matrix [B x T, D] rather than an array [B, T, D]
    recompute_activations: bool  # whether the backward pass of an MLP computes its activations again
    num_applications: int  # number of times that each block is applied, one after another
    head_dim: int  # number of features of an attention head
    qkv_bias: bool = False  # whether queries, keys and values have biases also with rmsnorm, as in Qwen 2
    rope: Rope = dataclasses.field(default_factory=Rope)  # frequencies of rotary positions


def check_task(config: ConfigDict, info: DataInfo, *, heads: Sequence[Head], kinds: Sequence[str]) -> Task:
    """Return the task. Raises UserError if the model lacks the head of the task or cannot process this kind of data."""
    name, task = config.model.name, tasks.find_task(config)
    if task.head not in heads:
        possible = ", ".join(other for other, make in tasks.TASKS.items() if make(config).head in heads)
        for_model = f"for model {name!r}"
        raise UserError(
            f"config.task is {task.name!r}; {for_model} it must be one of {possible} "
            "(other models: docs/howto/tasks.md)"
        )
    if info.kind not in kinds:
        what, needed = f"{config.data.source!r}, which provides {info.kind} data", " or ".join(kinds)
        raise UserError(f"config.data.source is {what}; it must provide {needed} data for config.model.name={name!r}")
    return task


def pick(config: ConfigDict, sizes: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of config.model.size, overridden by the keys that are set in config.model.

    The model supports the keys of `sizes`, by name of the size, and those of `defaults`, which all sizes share. Raises
    UserError if the size is unknown, the model does not support a key that is set, or a number is out of range.
    """
    check_choice("model.size", config.model.size, sizes)
    values = {**defaults, **sizes[config.model.size]}
    for key in OVERRIDES:
        value = config.model[key]
        if value is None:
            continue
        if key not in values:
            case = f"model {config.model.name!r} for task {tasks.find_task(config).name!r}"
            takes = ", ".join(key for key in OVERRIDES if key in values)
            raise UserError(f"config.model.{key} is {value!r}; it must be None with {case}, whose options are {takes}")
        if isinstance(value, int) and not isinstance(value, bool) and key != "dropout" and value < 1:
            raise UserError(f"config.model.{key} is {value}; it must be at least 1")
        if isinstance(value, int) and value > (most := MAX_LAYERS if key in DEPTHS else MAX_SIZE):
            raise UserError(f"config.model.{key} is {value}; it must be at most {most:,}")
        values[key] = value
    if "num_heads" not in values and config.model.attention == "cudnn":
        why = f"because model {config.model.name!r} has no attention"
        raise UserError(f"config.model.attention is 'cudnn'; it must be 'auto' or 'xla', {why}")
    if not 0 <= values.get("dropout", 0.0) < 1:
        raise UserError(f"config.model.dropout is {values['dropout']}; it must be at least 0 and less than 1")
    return values


def transformer_spec(
    config: ConfigDict, info: DataInfo, values: Mapping[str, Any], *, norm_eps: float, causal: bool
) -> Spec:
    """Return the Spec for the values from `pick`.

    Causal models are pre-norm without token types, like GPT-2; others are post-norm with two token types, like BERT.
    Raises UserError if values are incompatible with each other or with the data.
    """
    values = {"norm": "layernorm", "positions": "learned", **values}  # of models without these options
    hidden, heads, positions = values["hidden_size"], values["num_heads"], values["positions"]
    head_dim, kv_heads = values.get("head_dim") or hidden // heads, values.get("num_kv_heads") or heads
    if hidden % heads and not values.get("head_dim"):
        what = f"config.model.num_heads ({heads})"
        raise UserError(f"config.model.hidden_size is {hidden}; it must be a multiple of {what}")
    if heads % kv_heads:
        what = f"config.model.num_kv_heads ({kv_heads})"
        raise UserError(f"config.model.num_heads is {heads}; it must be a multiple of {what}")
    why = f"because config.model.positions is {positions!r}"
    if positions == "rotary" and head_dim % 2:
        key = "head_dim is" if values["head_dim"] else f"hidden_size / num_heads is {hidden} / {heads} ="
        raise UserError(f"config.model.{key} {head_dim}; it must be even, {why}")
    for key in ROTARY:
        if positions != "rotary" and values.get(key) is not None:
            raise UserError(f"config.model.{key} is {values[key]!r}; it must be None, {why}")
    if values["norm"] == "layernorm" and values.get("qkv_bias"):
        case = "config.model.norm='layernorm', where all linear maps have biases"
        raise UserError(f"config.model.qkv_bias is True; it must be None with {case}")
    mlp_size = 4 * hidden
    if values["activation"] == "swiglu":  # has three matrices (Shazeer 2020): 8/3 D, a multiple of 64
        mlp_size = -(-hidden * 8 // (3 * 64)) * 64
    tokens, rows, longest = values.get("vocab_size"), values.get("max_length"), info.input_shape[0]
    if tokens is not None and tokens < info.vocab_size:
        least = f"{info.vocab_size}, the number of tokens of the tokenizer"
        raise UserError(f"config.model.vocab_size is {tokens}; it must be at least {least}")
    if positions == "rotary" and rows is not None:
        raise UserError(
            f"config.model.max_length is {rows}; it must not be set when config.model.positions is 'rotary'"
        )
    if rows is not None and rows < longest:
        least = f"{longest}, the longest padded length of the texts (or lower config.data.max_length)"
        raise UserError(f"config.model.max_length is {rows}; it must be at least {least}")
    dtype, recomputes = jnp.dtype(config.model.dtype), config.model.recompute_activations
    if recomputes == "auto":  # compiled for H100s, BERT base would take 3% more time
        recomputes = values["activation"] != "gelu"
    return Spec(
        num_layers=values["num_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_size=values["mlp_size"] or mlp_size,
        vocab_size=tokens or info.vocab_size,
        max_length=0 if positions == "rotary" else rows or longest,
        token_types=0 if causal else 2,
        dropout=values["dropout"],
        norm=values["norm"],
        norm_eps=norm_eps,
        pre_norm=causal,
        activation=values["activation"],
        positions=positions,
        causal=causal,
        dtype=dtype,
        attention=attention_kernel(config.model.attention, dtype, head_dim),
        flatten_positions=config.model.flatten_positions,
        recompute_activations=recomputes,
        num_applications=values["num_applications"] or 1,
        head_dim=head_dim,
        qkv_bias=values.get("qkv_bias", False),
        rope=rope_of(values.get("rope_base"), values.get("rope_scaling")),
    )


def decide_computation(config: ConfigDict, cluster: Cluster) -> ConfigDict:
    """Return a copy of the config in which `auto` in config.model is replaced by the choice for the cluster.

    Layers are scanned only with remat, which XLA for CPUs undoes in unrolled layers; without remat, a scan copies what
    it saves into stacks. On CPUs, linear maps multiply one matrix, activations are not recomputed, and the attention is
    `batched`. If another cluster does not support cuDNN attention, the attention is `xla`. Otherwise, the last two stay
    `auto`, because the choice also depends on the model.
    """
    config, on_cpu = config.copy_and_resolve_references(), cluster.platform == "cpu"
    with config.ignore_type():  # a resolved reference has the type of its value
        config.model.scan_layers = scans_layers(config.model.scan_layers, config.model.remat)
        if config.model.flatten_positions == "auto":
            config.model.flatten_positions = on_cpu
        if on_cpu and config.model.recompute_activations == "auto":
            config.model.recompute_activations = False
    if config.model.attention == "auto" and not _has_cudnn_attention(cluster):
        config.model.attention = "batched" if on_cpu else "xla"
    return config


def scans_layers(scan_layers: bool | str, remat: str) -> bool:
    """Return whether layers are scanned with these values of config.model."""
    return remat != "none" if scan_layers == "auto" else bool(scan_layers)


def check_attention(config: ConfigDict, cluster: Cluster) -> None:
    """Raise UserError if config.model.attention is cudnn and the cluster does not support it."""
    if config.model.attention == "cudnn" and not _has_cudnn_attention(cluster):
        here, why = cluster.device_kind, "cuDNN attention needs an NVIDIA GPU of compute capability 8.0 or higher"
        raise UserError(f"config.model.attention is 'cudnn'; on {here} it must be 'auto' or 'xla', because {why}")


def _has_cudnn_attention(cluster: Cluster) -> bool:
    major = cluster.compute_capability.split(".")[0]  # gfx90a is an AMD GPU; empty is not a GPU
    return major.isdigit() and int(major) >= 8


def attention_kernel(choice: str, dtype: DTypeLike, head_dim: int) -> AttentionKernel:
    """Return the attention kernel for a config.model.attention, on devices that support cuDNN attention.

    The restrictions are those of cuDNN flash attention as called by `jax.nn.dot_product_attention`. Raises UserError if
    the choice is cudnn, but the dtype or head size is not supported.
    """
    if choice in ("xla", "batched"):
        return "batched" if choice == "batched" else "xla"
    problems = []
    if dtype not in (jnp.bfloat16, jnp.float16):
        problems.append(f"config.model.dtype is {dtype}, not bfloat16 or float16")
    if head_dim > 128 or head_dim % 8:
        problems.append(f"hidden_size / num_heads is {head_dim}, not a multiple of 8 of at most 128")
    if choice == "cudnn" and problems:
        why = " and ".join(problems)
        raise UserError(f"config.model.attention is 'cudnn'; it must be 'auto' or 'xla', because {why}")
    return "xla" if problems else "cudnn"
