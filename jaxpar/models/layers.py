"""The transformer layers of BERT, GPT and Llama. This is single-device code without mesh or axis names.

Array dims: B examples, T and S positions, D features, F features inside the MLP, H query heads, G key
and value heads, R query heads per key and value head, K features of a head, V vocabulary.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from ml_collections import ConfigDict

from jaxpar.models.activations import activate, lifted, recomputed_mlp
from jaxpar.models.attention import attend, attend_earlier
from jaxpar.models.bottleneck import Maker, with_bottlenecks
from jaxpar.models.group import TRANSFORMER_DIMS, TensorSplit
from jaxpar.models.model import Context, Model, Tie
from jaxpar.models.options import Spec
from jaxpar.models.remat import LINEAR_MAP
from jaxpar.models.rotary import rotate
from jaxpar.tasks.token_logits import SplitWords, TokenLogits

INIT_SCALE = 0.02  # standard deviation of the initial weights in BERT and GPT-2


def dropout(x: jax.Array, rate: float, context: Context, site: int) -> jax.Array:
    """Apply dropout with probability `rate` to x [B, ...].

    The mask of an example depends only on its key and on `site`, the index of the dropout in the layer. JAX's random
    bits are partitionable: element i is a function of (key, i), so the mask does not depend on the padded length.
    """
    if context.keys_B is None or rate == 0:
        return x
    group = context.group if x.ndim == 3 else None  # of a group, each device has some of the positions

    def keep(key: jax.Array) -> jax.Array:
        if group is None:
            return jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, x.shape[1:])
        inputs = context.batch["inputs"]
        number = inputs.shape[1] if inputs.ndim == 2 else x.shape[1] * group.size  # without padding of the tensor axis
        shape = number * group.context, *x.shape[2:]
        kept = jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, shape)
        return group.own(kept[group.positions(number)], 0)

    return _masked(rate, x, jax.vmap(keep)(context.keys_B))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _masked(rate: float, x: jax.Array, kept: jax.Array) -> jax.Array:
    """Return x / (1 - rate) where `kept` is true, otherwise 0. The backward pass reads a bit per element."""
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def _backward_masked(rate: float, bits: jax.Array, slope: jax.Array) -> tuple[jax.Array, None]:
    kept = jnp.unpackbits(bits, axis=-1, count=slope.shape[-1])
    return _masked(rate, slope, kept.astype(bool)), None


_masked.defvjp(lambda rate, x, kept: (_masked(rate, x, kept), jnp.packbits(kept, axis=-1)), _backward_masked)


def classifier(spec: Spec, num_classes: int, rngs: nnx.Rngs, *, bias: bool = True) -> nnx.Linear:
    """Return the linear map to the classes; apply it with `class_logits`."""
    init = nnx.initializers.normal(INIT_SCALE)
    return nnx.Linear(spec.hidden_size, num_classes, use_bias=bias, dtype=spec.dtype, kernel_init=init, rngs=rngs)


def class_logits(classifier: nnx.Linear, x: jax.Array) -> jax.Array:
    """Return the logits of x, [..., C] in float32: a product of arrays in the dtype of the classifier, not rounded."""
    x_ND = x.astype(classifier.dtype).reshape(-1, x.shape[-1])
    logits_NC = _class_product(x_ND, classifier.kernel[...])
    logits = logits_NC.reshape(*x.shape[:-1], -1)
    return logits if classifier.bias is None else logits + jnp.broadcast_to(classifier.bias[...], logits.shape)


@jax.custom_vjp
def _class_product(x_ND: jax.Array, kernel_DC: jax.Array) -> jax.Array:
    """Return the float32 product with the kernel in the dtype of x. The gradient of the kernel is float32 too."""
    return jnp.einsum("nd,dc->nc", x_ND, _cast(kernel_DC, x_ND.dtype), preferred_element_type=jnp.float32)


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Return x in a dtype. XLA could otherwise cast shards of x before they are gathered, unlike the plan."""
    return jax.lax.optimization_barrier(x).astype(dtype)


def _class_gradient(saved: tuple[jax.Array, jax.Array], slope_NC: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_ND, kernel_DC = saved
    rounded_NC = slope_NC.astype(x_ND.dtype)
    dkernel_DC = jnp.einsum("nd,nc->dc", x_ND, rounded_NC, preferred_element_type=kernel_DC.dtype)
    return jnp.einsum("nc,dc->nd", rounded_NC, _cast(kernel_DC, x_ND.dtype)), dkernel_DC


_class_product.defvjp(lambda x_ND, kernel_DC: (_class_product(x_ND, kernel_DC), (x_ND, kernel_DC)), _class_gradient)


def linear(
    num_in: int, num_out: int, spec: Spec, rngs: nnx.Rngs, *, scale: float = INIT_SCALE, bias: bool = False
) -> nnx.Linear:
    """Return a linear map of a transformer: kernel [in, out] drawn from a normal distribution, bias zero.

    With norm layernorm, it always has a bias.
    """
    bias, init = bias or spec.norm == "layernorm", nnx.initializers.normal(scale)
    product = _linear_map if spec.flatten_positions else jax.lax.dot_general
    return nnx.Linear(
        num_in, num_out, use_bias=bias, dtype=spec.dtype, kernel_init=init, dot_general=product, rngs=rngs
    )


def _linear_map(x: jax.Array, kernel_FG: jax.Array, dims: Any, **options: Any) -> jax.Array:
    """Return the same as `jax.lax.dot_general`; for a float32 matrix x, with the gradient of `_product_of_matrices`."""
    if x.ndim != 2 or x.dtype != jnp.float32:
        return jax.lax.dot_general(x, kernel_FG, dims, **options)
    return checkpoint_name(_product_of_matrices(x, kernel_FG), LINEAR_MAP)


@jax.custom_vjp
def _product_of_matrices(x_NF: jax.Array, kernel_FG: jax.Array) -> jax.Array:
    return x_NF @ kernel_FG


def _gradients_of_product(saved: tuple[jax.Array, jax.Array], slope_NG: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_NF, kernel_FG = saved
    return slope_NG @ kernel_FG.T, kernel_gradient(x_NF, slope_NG)


_product_of_matrices.defvjp(
    lambda x_NF, kernel_FG: (_product_of_matrices(x_NF, kernel_FG), (x_NF, kernel_FG)), _gradients_of_product
)


def kernel_gradient(x_NF: jax.Array, slope_NG: jax.Array) -> jax.Array:
    """Return x_NF.T @ slope_NG. The narrower matrix is transposed first.

    XLA on CPUs would otherwise use its slower products: YNNPACK's do not sum over the first dim of both operands.
    """
    is_wide = x_NF.shape[1] > slope_NG.shape[1]
    narrow_NM, wide_NM = (slope_NG, x_NF) if is_wide else (x_NF, slope_NG)
    product = jax.lax.optimization_barrier(narrow_NM.T) @ wide_NM
    return jax.lax.optimization_barrier(product).T if is_wide else product


def embeddings(rows: int, spec: Spec, rngs: nnx.Rngs) -> nnx.Param[jax.Array]:
    """Return the embeddings of tokens, positions or segments, [rows, D]."""
    return nnx.Param(INIT_SCALE * jax.random.normal(rngs.params(), (rows, spec.hidden_size)))


def norm(spec: Spec, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """Return a LayerNorm or RMSNorm over the features; apply it with `normalize`."""
    if spec.norm == "rmsnorm":
        return nnx.RMSNorm(spec.hidden_size, epsilon=spec.norm_eps, rngs=rngs)
    return nnx.LayerNorm(spec.hidden_size, epsilon=spec.norm_eps, use_fast_variance=False, rngs=rngs)


def normalize(norm: nnx.LayerNorm | nnx.RMSNorm, x: jax.Array) -> jax.Array:
    """Apply a norm to x [..., D] in float32, and return the result in the dtype of x."""
    weights: Any = nnx.state(norm)
    bias = weights["bias"][...] if "bias" in weights else None
    return _normalized(norm.epsilon, x, weights["scale"][...], bias)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalized(epsilon: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None) -> jax.Array:
    """Return LayerNorm of x [..., D], or RMSNorm if there is no bias. The backward pass reads x and its statistics.

    Were the statistics computed again, XLA would store the terms of the gradient of the scale in float32.
    """
    return _normalize_and_save(epsilon, x, scale_D, bias_D)[0]


def _normalize_and_save(
    epsilon: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None
) -> tuple[jax.Array, tuple[Any, ...]]:
    wide = x.astype(jnp.float32)
    mean = None if bias_D is None else wide.mean(axis=-1, keepdims=True)
    centered = wide if mean is None else wide - mean
    rate = jax.lax.rsqrt(jnp.square(centered).mean(axis=-1, keepdims=True) + epsilon)
    y = centered * (rate * lifted(scale_D, x))
    y = y if bias_D is None else y + lifted(bias_D, x)
    return y.astype(x.dtype), (x, mean, rate, scale_D)


def _gradients_of_norm(_epsilon: float, saved: tuple[Any, ...], slope: jax.Array) -> tuple[Any, ...]:
    x, mean, rate, scale_D = saved
    wide = jax.lax.optimization_barrier(x).astype(jnp.float32)  # else XLA may keep it from the forward pass
    normal = (wide if mean is None else wide - mean) * rate
    slope = slope.astype(jnp.float32)
    of_normal, examples = slope * lifted(scale_D, x), tuple(range(x.ndim - 1))
    rest = of_normal - normal * (of_normal * normal).mean(axis=-1, keepdims=True)
    if mean is not None:
        rest -= of_normal.mean(axis=-1, keepdims=True)
    bias_gradient = None if mean is None else slope.sum(examples)
    return (rate * rest).astype(x.dtype), (slope * normal).sum(examples), bias_gradient


_normalized.defvjp(_normalize_and_save, _gradients_of_norm)


class Embed(nnx.Module):
    """Token, position and segment embeddings: [B, T] -> [B, T, D]. Heads can be tied to the arrays."""

    def __init__(self, spec: Spec, rngs: nnx.Rngs):
        self.spec = spec
        self.tokens = embeddings(spec.vocab_size, spec, rngs)
        if spec.positions == "learned":
            self.positions = embeddings(spec.max_length, spec, rngs)
        if spec.token_types:
            self.token_types = embeddings(spec.token_types, spec, rngs)
        if not spec.pre_norm:
            self.norm = norm(spec, rngs)

    def __call__(self, tokens_BT: jax.Array, context: Context) -> jax.Array:
        spec, number, group = self.spec, tokens_BT.shape[1], context.group
        rows = self.tokens[...]
        x_BTD = rows[tokens_BT] if group is None else group.rows(rows, tokens_BT)
        if spec.positions == "learned":
            rows = self.positions[...]
            if context.cache is not None:
                positions = context.cache.positions(number)
            else:
                positions = jnp.arange(number) if group is None else group.positions(number)
            # Looked up for each example: with a sum over examples as the gradient, XLA for GPUs stores the arrays of
            # all layers with the examples contiguous, and transposes them for norms and products.
            rows_BTD = rows[jnp.broadcast_to(positions, (tokens_BT.shape[0], positions.shape[-1]))]
            x_BTD += rows_BTD if group is None else group.own(rows_BTD, 1)
        if spec.token_types:
            segments_BT = context.batch["segments"] if "segments" in context.batch else jnp.zeros_like(tokens_BT)
            x_BTD += self.token_types[...][segments_BT if group is None else group.own(segments_BT, 1)]
        if not spec.pre_norm:
            x_BTD = normalize(self.norm, x_BTD)
        return dropout(x_BTD.astype(spec.dtype), spec.dropout, context, 0)


def as_matrix(x_BTD: jax.Array, spec: Spec) -> jax.Array:
    """Return the input of a linear map: with flatten_positions, [B x T, D], otherwise x itself.

    The weight gradient of a product with x itself sums over two dims, for which XLA on CPUs copies activations.
    """
    return x_BTD.reshape(-1, x_BTD.shape[-1]) if spec.flatten_positions else x_BTD


def all_positions(x_BTD: jax.Array, spec: Spec, context: Context) -> jax.Array:
    """Return an array with all positions of the texts or images, of which a device of a group has some."""
    if context.group is None:
        return x_BTD
    inputs = context.batch["inputs"]
    return context.group.whole(x_BTD, inputs.shape[1] if inputs.ndim == 2 else spec.max_length)


def whole_texts(x: jax.Array, context: Context) -> jax.Array:
    """Return an array with all positions of the texts, in order, of which a device of a group has some."""
    return x if context.group is None else context.group.texts(x)


def product_of_rows(linear: nnx.Linear, x: jax.Array, number: int, context: Context) -> jax.Array:
    """Return [B, T, D], a linear map of x, [B, T, F] or [B x T, F], where T is `number`.

    The devices of a group have rows of the kernel and columns of x.
    """
    if context.group is None:
        y = linear(x)
        return y.reshape(-1, number, y.shape[-1])
    return with_bias(linear, x @ narrow(linear.kernel, x), number, context)


def with_bias(linear: nnx.Linear, y: jax.Array, number: int, context: Context) -> jax.Array:
    """Return `product_of_rows` from the product of a device without the bias, [B, T, D] or [B x T, D]."""
    y_BTD = y.reshape(-1, number, y.shape[-1])
    if context.group is not None:
        y_BTD = context.group.summed(y_BTD)
    if linear.bias is None:
        return y_BTD
    # Broadcast before the cast, so that the gradient of the bias is summed over tokens in float32.
    return y_BTD + jnp.broadcast_to(linear.bias[...], y_BTD.shape).astype(y.dtype)


def token_logits(
    x_BTD: jax.Array, rows_VD: jax.Array, bias_V: jax.Array | None, spec: Spec, context: Context
) -> TokenLogits:
    """Return the logits of a language model. The devices of a group have some of the rows and biases."""
    words = None if context.group is None else SplitWords(context.group, spec.vocab_size)
    return TokenLogits(x_BTD, rows_VD.astype(x_BTD.dtype), bias_V, words)


def narrow(param: nnx.Param[jax.Array], x: jax.Array) -> jax.Array:
    """Return a parameter in the dtype of x."""
    return param[...].astype(x.dtype)


class Attention(nnx.Module):
    """Self-attention with H query heads that share G key and value heads (Ainslie et al. 2023), [B, T, D] -> [B, T, D].

    G = H is ordinary multi-head attention. There is no dropout on the attention probabilities: the fused kernels do not
    support it, and most recent models do without it.
    """

    def __init__(self, spec: Spec, rngs: nnx.Rngs, *, out_scale: float):
        self.spec = spec
        width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.query = linear(spec.hidden_size, width, spec, rngs, bias=spec.qkv_bias)
        self.key = linear(spec.hidden_size, kv_width, spec, rngs, bias=spec.qkv_bias)
        self.value = linear(spec.hidden_size, kv_width, spec, rngs, bias=spec.qkv_bias)
        self.out = linear(width, spec.hidden_size, spec, rngs, scale=out_scale)

    def __call__(self, x_BTD: jax.Array, context: Context) -> jax.Array:
        x_BTD, spec = all_positions(x_BTD, self.spec, context), self.spec
        B, T, _ = x_BTD.shape
        x = as_matrix(x_BTD, spec)
        q_BTHK = self.query(x).reshape(B, T, -1, spec.head_dim)
        k_BTGK = self.key(x).reshape(B, T, -1, spec.head_dim)
        v_BTGK = self.value(x).reshape(B, T, -1, spec.head_dim)
        group = context.group
        if spec.positions == "rotary":
            positions_BT = None if group is None else group.positions(T)[None]
            if context.cache is not None:
                positions_BT = context.cache.positions(T)
            q_BTHK, k_BTGK = (rotate(x, spec.rope, positions_BT) for x in (q_BTHK, k_BTGK))
        if context.cache is not None:
            y_BTHK = attend_earlier(q_BTHK, *context.cache.extend(k_BTGK, v_BTGK), context.cache.positions(T))
        else:
            # Padding is on the right, so with causal attention no real position attends to it.
            is_masked = "mask" in context.batch and not spec.causal
            lengths_B = real_lengths(whole_texts(context.batch["mask"], context)) if is_masked else None
            attention = group.attend if group is not None and group.context > 1 else attend
            y_BTHK = attention(q_BTHK, k_BTGK, v_BTGK, spec.attention, is_causal=spec.causal, lengths_B=lengths_B)
        return product_of_rows(self.out, y_BTHK.reshape(*x.shape[:-1], -1), T, context)


def real_lengths(mask_BT: jax.Array) -> jax.Array:
    """Return the number of real tokens of each example, int32 [B]; at least 1, so that padding gives finite outputs."""
    return jnp.maximum(mask_BT.sum(axis=1, dtype=jnp.int32), 1)


class MLP(nnx.Module):
    """The MLP D -> F -> D of a block. SwiGLU (Shazeer 2020) has a third matrix and computes silu(gate) * up inside."""

    def __init__(self, spec: Spec, rngs: nnx.Rngs, *, out_scale: float):
        self.spec = spec
        self.up = linear(spec.hidden_size, spec.mlp_size, spec, rngs)
        if spec.activation == "swiglu":
            self.gate = linear(spec.hidden_size, spec.mlp_size, spec, rngs)
        self.down = linear(spec.mlp_size, spec.hidden_size, spec, rngs, scale=out_scale)

    def __call__(self, x_BTD: jax.Array, context: Context) -> jax.Array:
        x_BTD = all_positions(x_BTD, self.spec, context)
        name, x, number = self.spec.activation, as_matrix(x_BTD, self.spec), x_BTD.shape[1]
        if self.spec.recompute_activations:
            maps = [self.gate, self.up] if name == "swiglu" else [self.up]
            inner = tuple((narrow(one.kernel, x), None if one.bias is None else narrow(one.bias, x)) for one in maps)
            # The devices of a group add up the gradient of x; meanwhile they can compute those of the kernels. With
            # SwiGLU, this order saves 1% of the memory, but exposes the exchange of gradients.
            kernels_first = context.group is None and name != "swiglu"
            y = recomputed_mlp(name, kernels_first, x, inner, narrow(self.down.kernel, x))
            return with_bias(self.down, y, number, context)
        y = activate(name, self.gate(x)) * self.up(x) if name == "swiglu" else activate(name, self.up(x))
        return product_of_rows(self.down, y, number, context)


class Block(nnx.Module):
    """A transformer block: attention, then an MLP, each with a residual connection and a norm."""

    def __init__(self, spec: Spec, rngs: nnx.Rngs):
        self.spec = spec
        # GPT-2 (Radford et al. 2019, section 2.3) scales the initial weights of residual branches down with depth.
        depth = spec.num_layers * spec.num_applications
        out_scale = INIT_SCALE / math.sqrt(2 * depth) if spec.pre_norm else INIT_SCALE
        self.attention = Attention(spec, rngs, out_scale=out_scale)
        self.attention_norm = norm(spec, rngs)
        self.mlp = MLP(spec, rngs, out_scale=out_scale)
        self.mlp_norm = norm(spec, rngs)

    def __call__(self, x_BTD: jax.Array, context: Context) -> jax.Array:
        rate = self.spec.dropout
        if self.spec.pre_norm:
            x_BTD += dropout(self.attention(normalize(self.attention_norm, x_BTD), context), rate, context, 0)
            return x_BTD + dropout(self.mlp(normalize(self.mlp_norm, x_BTD), context), rate, context, 1)
        x_BTD = normalize(self.attention_norm, x_BTD + dropout(self.attention(x_BTD, context), rate, context, 0))
        return normalize(self.mlp_norm, x_BTD + dropout(self.mlp(x_BTD, context), rate, context, 1))


def transformer(config: ConfigDict, spec: Spec, embed: Maker, head: Maker, ties: tuple[Tie, ...] = ()) -> Model:
    """Return the model with layers embed, block_0 to block_(num_layers - 1), head, and bottlenecks of the config."""
    blocks = dict.fromkeys((f"block_{i}" for i in range(spec.num_layers)), partial(Block, spec))
    makers = {"embed": embed, **with_bottlenecks(config, blocks, spec.hidden_size), "head": head}
    applications = dict.fromkeys(blocks, spec.num_applications)
    scan, remat = config.model.scan_layers, config.model.remat
    # A compressor would change the padding of an MLP, which then changes the outputs. That of a vocabulary is masked.
    counts = {key: getattr(spec, key) for key in ("num_heads", "num_kv_heads", "mlp_size")}
    tensor = TensorSplit(TRANSFORMER_DIMS, counts)
    return Model(makers, ties=ties, applications=applications, scan=scan, remat=remat, tensor=tensor)


TIED_HEAD = (Tie("head", "tokens", "embed", "tokens"),)
