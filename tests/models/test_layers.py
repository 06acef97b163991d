"""Tests that the forms of computation that are fast on CPUs equal the usual forms, in values and gradients."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.cluster import named_cluster
from jaxpar.models import attention, bert, gpt, layers
from jaxpar.models.model import Context
from jaxpar.models.options import AttentionKernel, decide_computation
from jaxpar.tasks.token_logits import TokenLogits
from tests.models.small import TEXT, fast_jit, small_config

B, T, H, K = 3, 7, 4, 5


def draw(*shape: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def values_and_gradients(function: Any, *args: Any) -> Any:
    """Return the results, and the gradients for a random gradient of the result."""

    def both(*args: Any) -> Any:
        y, pullback = jax.vjp(function, *args)
        return y, pullback(draw(*y.shape, seed=9).astype(y.dtype))

    with jax.numpy_dtype_promotion("standard"):  # JAX's attention mixes bfloat16 and float32
        return fast_jit(both)(*args)


def check_equal(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    def check(a: Any, b: Any) -> None:
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(float(np.abs(b).max()), 1.0))

    jax.tree.map(check, actual, expected)


@pytest.mark.parametrize("kernel", ["xla", "batched"])
@pytest.mark.parametrize(("is_causal", "num_kv_heads", "lengths"), [(True, 2, None), (False, 4, (7, 1, 4))])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_attention(
    kernel: AttentionKernel,
    is_causal: bool,
    num_kv_heads: int,
    lengths: tuple[int, ...] | None,
    dtype: str,
    tolerance: float,
) -> None:
    """Both forms of attention are JAX's, with as many value heads or fewer.

    In bfloat16, the products of the gradient have operands in bfloat16. Its error is at most 1.5 times that of JAX's.
    """
    lengths_B = None if lengths is None else jnp.array(lengths)
    q, k, v = (draw(B, T, heads, K, seed=i).astype(dtype) for i, heads in enumerate((H, num_kv_heads, num_kv_heads)))

    def ours(q: Any, k: Any, v: Any) -> Any:
        return attention.attend(q, k, v, kernel, is_causal=is_causal, lengths_B=lengths_B)

    def of_jax(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=is_causal, key_value_seq_lengths=lengths_B, implementation="xla"
        )

    found, expected = (values_and_gradients(function, q, k, v) for function in (ours, of_jax))
    check_equal(found, expected, tolerance)
    if dtype == "bfloat16":
        exact = jax.tree.leaves(values_and_gradients(of_jax, *(x.astype(jnp.float32) for x in (q, k, v))))
        for actual, other, true in zip(*map(jax.tree.leaves, (found, expected)), exact, strict=True):
            error, of_other = (np.abs(np.float32(x) - true).mean() for x in (actual, other))
            # Or two units in the last place: JAX 0.11 rounds only the results on some processors.
            assert error <= max(1.5 * of_other, 2**-7 * np.abs(true).mean()) + 1e-6
    _, saved = jax.make_jaxpr(lambda *args: jax.vjp(ours, *args), return_shape=True)(q, k, v)
    of_scores = [x.dtype for x in jax.tree.leaves(saved) if x.size == B * H * T * T and x.dtype != bool]
    assert of_scores == [dtype]  # the probabilities
    gradient = jax.jit(jax.grad(lambda *args: ours(*args).sum(), argnums=(0, 1, 2))).lower(q, k, v).as_text()
    operands = re.findall(r"dot_general .*: \(tensor<\w+x(\w+)>, tensor<\w+x(\w+)>\)", gradient)
    assert operands == [({"float32": "f32", "bfloat16": "bf16"}[dtype],) * 2] * 5  # y is not needed


@pytest.mark.parametrize("kernel", ["xla", "batched"])
def test_gradients_of_confident_attention(kernel: AttentionKernel) -> None:
    """Their error is about that of JAX's, which saves float32 probabilities: in 16 bits, many of them are 0 or 1."""
    k, v = (draw(B, T, H, K, seed=i).astype("bfloat16") for i in range(2))

    def ours(q: Any, k: Any, v: Any) -> Any:
        return attention.attend(q, k, v, kernel, is_causal=False, lengths_B=None)

    def of_jax(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, implementation="xla")

    wide = tuple(x.astype(jnp.float32) for x in (4 * k, k, v))
    exact = values_and_gradients(of_jax, *wide)[1][0]
    error, of_other = (
        np.abs(np.float32(values_and_gradients(function, 4 * k, k, v)[1][0]) - exact).mean()
        for function in (ours, of_jax)
    )
    assert error <= 1.5 * of_other


@pytest.mark.parametrize("kernel", ["xla", "batched"])
@pytest.mark.parametrize("lengths", [None, (7, 1)])
def test_a_scan_holds_no_mask_in_the_size_of_the_scores(
    kernel: AttentionKernel, lengths: tuple[int, ...] | None
) -> None:
    """JAX moves what does not depend on the layer out of a loop, which would fill the memory."""
    lengths_B = None if lengths is None else jnp.array(lengths)

    def layer(x: Any, _: None) -> tuple[Any, None]:
        return attention.attend(x, x, x, kernel, is_causal=lengths is None, lengths_B=lengths_B), None

    def loss(x: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(layer), x, None, length=3)[0].sum()

    x = draw(2, 64, 2, 8, seed=0)
    outside = [one for one in jax.make_jaxpr(jax.grad(loss))(x).eqns if one.primitive.name != "scan"]
    assert outside
    assert max(variable.aval.size for one in outside for variable in one.outvars) < 2 * 2 * 64 * 64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [nnx.LayerNorm, nnx.RMSNorm])
def test_norms(make: Any, dtype: str) -> None:
    """Values and gradients of Flax. The backward pass reads x in its own dtype, and the statistics of each position."""
    module = make(K, rngs=nnx.Rngs(0), epsilon=1e-3) if make is nnx.RMSNorm else make(K, rngs=nnx.Rngs(0))
    if make is nnx.LayerNorm:
        module.use_fast_variance = False
    graphdef, weights = nnx.split(module)
    weights = jax.tree.map(lambda w: w + draw(*w.shape, seed=3), weights)
    x = (5 + 3 * draw(B, T, K, seed=0)).astype(dtype)

    def ours(weights: Any, x: Any) -> Any:
        return layers.normalize(nnx.merge(graphdef, weights), x)

    def usual(weights: Any, x: Any) -> Any:
        return nnx.merge(graphdef, weights)(x.astype(jnp.float32)).astype(x.dtype)

    found, expected = (values_and_gradients(function, weights, x) for function in (ours, usual))
    check_equal(found, expected, 1e-5 if dtype == "float32" else 1e-2)
    saved = jax.eval_shape(lambda *args: jax.vjp(ours, *args)[1], weights, x)
    sizes = [(leaf.size, leaf.dtype) for leaf in jax.tree.leaves(saved) if leaf.size > K]
    assert sorted(sizes, key=str) == sorted(
        [(B * T * K, x.dtype), *[(B * T, jnp.dtype("float32"))] * (1 + (make is nnx.LayerNorm))], key=str
    )


def test_the_bias_of_a_split_layer_is_summed_in_float32() -> None:
    """XLA sums gradients in the dtype of the program where it does not fuse the sum."""
    graphdef, weights = nnx.split(nnx.Linear(2, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    context: Any = SimpleNamespace(group=SimpleNamespace(summed=lambda y: y))

    def total(weights: Any, x: jax.Array) -> jax.Array:
        return layers.product_of_rows(nnx.merge(graphdef, weights), x, 10, context).sum()

    program = str(jax.make_jaxpr(jax.grad(total))(weights, jnp.ones((40, 2), "bfloat16")))
    assert re.findall(r":(\w+)\[(?:1,)*3\] = reduce_sum", program) == ["f32"]


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_products_of_all_tokens(norm: str) -> None:
    """With flatten_positions, an MLP and a decoder on [B x T, D] equal products with a dim for B and one for T."""
    config = small_config("gpt", "causal_lm", norm=norm, flatten_positions=True)
    spec = gpt.resolve(config, TEXT)[1]
    graphdef, params = nnx.split(layers.MLP(spec, nnx.Rngs(params=0), out_scale=0.02))
    arguments = params, draw(B, T, spec.hidden_size, seed=0), draw(11, spec.hidden_size, seed=1)

    def ours(params: Any, x_BTD: Any, tokens_VD: Any) -> Any:
        return TokenLogits(nnx.merge(graphdef, params)(x_BTD, Context({}, None)), tokens_VD).whole()

    def usual(params: Any, x_BTD: Any, tokens_VD: Any) -> Any:
        module = nnx.merge(graphdef, params)
        return jnp.einsum("btd,vd->btv", module.down(jax.nn.gelu(module.up(x_BTD))), tokens_VD)

    check_equal(values_and_gradients(ours, *arguments), values_and_gradients(usual, *arguments))


@pytest.mark.parametrize(("num_in", "num_out"), [(4, 12), (12, 4)])
def test_kernel_gradients_of_matrices(num_in: int, num_out: int) -> None:
    """With flatten_positions, products sum over the second dim of one matrix and the first of the other."""
    spec = gpt.resolve(small_config("gpt", "causal_lm", flatten_positions=True), TEXT)[1]
    graphdef, params = nnx.split(layers.linear(num_in, num_out, spec, nnx.Rngs(params=0)))
    arguments = params, draw(20, num_in, seed=0)

    def ours(params: Any, x_NF: Any) -> Any:
        return nnx.merge(graphdef, params)(x_NF)

    def usual(params: Any, x_NF: Any) -> Any:
        return jnp.einsum("nf,fg->ng", x_NF, params.kernel[...]) + jnp.broadcast_to(params.bias[...], (20, num_out))

    check_equal(values_and_gradients(ours, *arguments), values_and_gradients(usual, *arguments))
    program = f"{jax.jit(jax.grad(lambda *of: ours(*of).sum() ** 2)).lower(*arguments).compile().as_text()}"
    assert re.findall(r"rhs_contracting_dims={(\d)}", program) == ["0", "0"]  # of the kernel, and its gradient
    assert "lhs_contracting_dims={0}" not in program


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize(
    ("activation", "norm"), [("gelu_tanh", "layernorm"), ("swiglu", "layernorm"), ("relu", "rmsnorm")]
)
def test_mlp_with_recomputed_activations(activation: str, norm: str, flatten: bool) -> None:
    """Values and gradients are those of the usual MLP. Of the wide arrays, only the first products are saved."""
    values = {"activation": activation, "norm": norm, "flatten_positions": flatten}
    config = small_config("gpt", "causal_lm", **values, dtype="bfloat16", mlp_size=24)
    found, wide = [], []
    for recompute in (True, False):
        config.model.recompute_activations = recompute
        spec = gpt.resolve(config, TEXT)[1]
        graphdef, params = nnx.split(layers.MLP(spec, nnx.Rngs(params=0), out_scale=0.02))
        params = jax.tree.map(lambda x: x + draw(*x.shape, seed=2), params)  # biases too
        arguments = params, draw(B, T, spec.hidden_size, seed=0).astype(jnp.bfloat16)

        def mlp(params: Any, x_BTD: Any, graphdef: Any = graphdef) -> Any:
            return nnx.merge(graphdef, params)(x_BTD, Context({}, None))

        found.append(values_and_gradients(mlp, *arguments))
        saved = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(mlp, *args)[1], *arguments))
        wide.append(sum(x.size == B * T * spec.mlp_size for x in saved))
    check_equal(found[0], found[1], 2e-2)
    assert wide[0] == (2 if activation == "swiglu" else 1) < wide[1]


@pytest.mark.parametrize(
    ("model", "cluster", "overrides", "recomputes"),
    [
        ("gpt", "cpu", {}, False),
        ("gpt", "H100", {}, True),
        ("gpt", "H100", {"activation": "gelu"}, False),
        ("gpt", "H100", {"recompute_activations": False}, False),
        ("bert", "H100", {}, False),
        ("bert", "cpu", {"recompute_activations": True}, True),
    ],
)
def test_recomputation_of_auto(model: str, cluster: str, overrides: dict[str, Any], recomputes: bool) -> None:
    """GPUs recompute activations, except exact GELUs."""
    task = {"gpt": "causal_lm", "bert": "classification"}[model]
    config = decide_computation(small_config(model, task, **overrides), named_cluster(cluster, 1))
    assert {"gpt": gpt, "bert": bert}[model].resolve(config, TEXT)[1].recompute_activations is recomputes


@pytest.mark.parametrize(
    ("cluster", "overrides", "scan"),
    [
        ("cpu", {}, False),
        ("cpu", {"remat": "dots"}, True),
        ("cpu", {"scan_layers": True}, True),
        ("H100", {}, False),
        ("H100", {"remat": "full"}, True),
        ("H100", {"scan_layers": False, "remat": "full"}, False),
    ],
)
def test_scan_of_auto(cluster: str, overrides: dict[str, Any], scan: bool) -> None:
    """Layers are unrolled without remat. The config of the user does not change."""
    config = small_config("bert", "classification", **overrides)
    assert decide_computation(config, named_cluster(cluster, 1)).model.scan_layers is scan
    assert config.model.scan_layers == overrides.get("scan_layers", "auto")
    resolved = config.copy_and_resolve_references()
    assert decide_computation(resolved, named_cluster(cluster, 1)).model.scan_layers is scan


@pytest.mark.parametrize(
    ("cluster", "overrides", "dims"),
    [
        ("cpu", {}, 2),
        ("cpu", {"attention": "xla"}, 2),
        ("cpu", {"flatten_positions": False}, 3),
        ("V100", {}, 3),
        ("V100", {"attention": "batched"}, 3),
        ("V100", {"flatten_positions": True}, 2),
    ],
)
def test_linear_maps_of_auto(cluster: str, overrides: dict[str, Any], dims: int) -> None:
    """Only CPUs flatten positions, whatever the attention kernel is."""
    config = decide_computation(small_config("gpt", "causal_lm", **overrides), named_cluster(cluster, 1))
    spec = gpt.resolve(config, TEXT)[1]
    assert layers.as_matrix(jnp.zeros((B, T, spec.hidden_size)), spec).ndim == dims


@pytest.mark.parametrize(
    ("cluster", "dtype", "kernel"),
    [
        ("cpu", "float32", "batched"),
        ("V100", "bfloat16", "xla"),
        ("H100", "float32", "xla"),
        ("H100", "bfloat16", "cudnn"),
    ],
)
def test_kernel_of_auto(cluster: str, dtype: str, kernel: str) -> None:
    """Only CPUs use batched attention; GPUs without cuDNN's use JAX's own."""
    config = small_config("gpt", "causal_lm", dtype=dtype, hidden_size=32)
    config = decide_computation(config, named_cluster(cluster, 1))
    assert gpt.resolve(config, TEXT)[1].attention == kernel
