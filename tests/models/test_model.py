"""Tests for all models: partitioning, scanning and rematerialization do not change the outputs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.core.state import nbytes
from jaxpar.exchange.fetch import Fetch, fetched
from jaxpar.measure.operations import operations
from jaxpar.models import MODELS, Context, Model, Tie
from jaxpar.models.model import read_dtypes
from jaxpar.tasks.token_logits import whole as whole_logits
from tests.models.small import BATCH, CLASSES, LENGTH, LLAMA, VOCAB, dropout_keys, fast_jit, small

EVERY: list[tuple[str, str, dict[str, Any]]] = [
    ("bert", "classification", {}),
    ("bert", "classification", {"pooling": "mean"}),
    ("bert", "masked_lm", {}),
    ("gpt", "causal_lm", {}),
    ("gpt", "causal_lm", LLAMA),
    ("gpt", "classification", {}),
    ("resnet", "classification", {"size": "18"}),
    ("resnet", "classification", {"size": "50"}),
    ("mlp", "classification", {"dropout": 0.3}),
    ("vit", "classification", {}),
    ("gpt", "causal_lm", {"num_applications": 2, "bottlenecks": "block_2"}),
]
every = pytest.mark.parametrize(("name", "task", "overrides"), EVERY)


def test_every_model_is_here() -> None:
    assert {name for name, *_ in EVERY} == set(MODELS)


@every
def test_output_is_float32_logits(name: str, task: str, overrides: dict[str, Any]) -> None:
    model, params, batch = small(name, task, dtype="bfloat16", **overrides)
    output = jax.eval_shape(model.apply, params, batch, dropout_keys())
    expected = (BATCH, CLASSES) if task == "classification" else (BATCH, LENGTH, VOCAB)
    assert (output.shape, output.dtype) == (expected, jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


@every
def test_products_in_the_dtype_of_the_model(name: str, task: str, overrides: dict[str, Any]) -> None:
    """All products of both passes have factors in bfloat16, those of the head too."""
    model, params, batch = small(name, task, dtype="bfloat16", **overrides)

    def loss(params: Any) -> jax.Array:
        return model.apply(params, batch, dropout_keys()).sum()

    products = [one for one in operations(jax.grad(loss), params) if one.kind == "product"]
    assert {one.dtype for one in products} == {"bfloat16"}


def test_dtypes_in_which_arrays_are_read() -> None:
    """Narrower only if the one use of an array is a cast to a float dtype of 16 bits."""

    def function(w: dict[str, jax.Array], x: jax.Array) -> Any:
        half = jnp.float16
        twice = w["twice"].astype(half) + w["twice"].astype(half)
        inside = jax.jit(lambda y: y.astype(half))(w["inside"])
        wide = w["wide"].astype(jnp.float32)
        narrower = w["byte"].astype(jnp.float8_e4m3fn), w["bool"].astype(bool)
        both = w["both"].astype(half), w["both"].sum()
        return w["once"].astype(half) @ x, twice, both, inside, wide, w["returned"], narrower

    names = ("once", "twice", "both", "inside", "wide", "returned", "unused", "byte", "bool")
    weights = {name: jax.ShapeDtypeStruct((2, 2), jnp.float16 if name == "wide" else jnp.float32) for name in names}
    got = read_dtypes(function, weights, jax.ShapeDtypeStruct((2,), jnp.float16))
    assert got == {name: jnp.float16 if name in ("once", "wide") else jnp.float32 for name in names}


def test_layers_that_read_differently_in_training() -> None:
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))

        def __call__(self, x: jax.Array, context: Context) -> jax.Array:
            kernel = self.kernel[...]
            return x @ (kernel.astype(jnp.bfloat16).astype(jnp.float32) if context.keys_B is None else kernel)

    seen: list[Any] = []

    def fetch(shapes: Any, weights: Any) -> Any:
        seen.append(shapes["kernel"].dtype)
        return weights

    model = Model({"first": Layer, "second": Layer})
    params = model.init(jax.random.key(0))
    batch = {"inputs": jnp.ones((2, 4))}
    for keys in (None, jax.random.split(jax.random.key(0), 2), None):
        fetched(model, Fetch(fetch)).outputs(params, batch, keys)
    assert seen == [jnp.bfloat16] * 2 + [jnp.float32] * 2 + [jnp.bfloat16] * 2
    read = model.read_shapes(jax.eval_shape(lambda: batch))
    assert {leaf.dtype for leaf in jax.tree.leaves(read)} == {np.dtype(np.float32)}


def test_shared_arrays_are_not_narrowed() -> None:
    """Their gradients are added up, and those of layers that are applied several times, too."""

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.own, self.tied = (nnx.Param(jax.random.normal(rngs.params(), (4, 4))) for _ in range(2))

        def __call__(self, x: jax.Array, context: Context) -> jax.Array:
            own = self.own[...] if context.keys_B is None else self.own[...].astype(jnp.bfloat16)
            return x @ own.astype(jnp.float32) @ self.tied[...].astype(jnp.bfloat16).astype(jnp.float32)

    makers: Any = {"first": Layer, "last": Layer, "repeated": Layer}
    model = Model(makers, ties=(Tie("last", "tied", "first", "tied"),), applications={"repeated": 2})
    batch = jax.eval_shape(lambda: {"inputs": jnp.ones((2, 4))})
    dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, model.narrowed_shapes(batch))
    repeated = {"own": "float32", "tied": "float32"}
    assert dtypes == {"first": repeated | {"own": "bfloat16"}, "last": {"own": "bfloat16"}, "repeated": repeated}
    evaluated = jax.tree.map(lambda leaf: leaf.dtype.name, model.narrowed_shapes(batch, in_training=False))
    assert evaluated == {"first": repeated, "last": {"own": "float32"}, "repeated": repeated}
    assert jax.tree.all(jax.tree.map(lambda x: x.dtype == jnp.float32, model.as_stored(model.init(jax.random.key(0)))))


@every
def test_dtypes_of_all_models(name: str, task: str, overrides: dict[str, Any]) -> None:
    """All but a repeated layer read some arrays in bfloat16."""
    model, _, batch = small(name, task, dtype="bfloat16", **overrides)
    read = model.read_shapes(jax.eval_shape(lambda: batch))
    for layer in model.layers:
        jax.tree.map(
            lambda leaf, as_read: np.testing.assert_equal(leaf.shape, as_read.shape), layer.shapes, read[layer.name]
        )
    assert np.dtype(jnp.bfloat16) in {leaf.dtype for leaf in jax.tree.leaves(read)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_are_read_in_the_dtype_of_the_computation(dtype: str) -> None:
    model, _, batch = small("gpt", "causal_lm", dtype=dtype)
    read = model.read_shapes(jax.eval_shape(lambda: batch))
    block = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree.leaves_with_path(read["block_0"])}
    assert {read_as for name, read_as in block.items() if "norm" not in name} == {np.dtype(dtype)}
    assert {read_as for name, read_as in block.items() if "norm" in name} == {np.dtype(np.float32)}
    assert {leaf.dtype for leaf in jax.tree.leaves(read["embed"])} == {np.dtype(np.float32)}  # added up in float32
    assert read["head"]["tokens"].dtype == dtype  # which it shares with embed
    repeated, _, batch = small("gpt", "causal_lm", dtype=dtype, num_applications=2)
    read = repeated.read_shapes(jax.eval_shape(lambda: batch))  # gradients are added up over the applications
    assert {leaf.dtype for leaf in jax.tree.leaves(read["block_0"])} == {np.dtype(np.float32)}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(("name", "task", "overrides"), [EVERY[0], EVERY[3], EVERY[4], EVERY[9]])
def test_fetched_arrays_are_not_saved(name: str, task: str, overrides: dict[str, Any], *, scan: bool) -> None:
    """With `fetch`, the backward pass reads no more than without it, and the parameters as they are stored."""
    model, params, batch = small(name, task, dtype="bfloat16", scan_layers=scan, **overrides)
    stored = jax.eval_shape(lambda: jax.tree.map(lambda x: x.reshape(-1), params))

    def fetch(shapes: Any, local: Any) -> Any:
        return jax.tree.map(lambda like, x: x.astype(like.dtype).reshape(like.shape), shapes, local)

    def saved(model: Model, params: Any) -> dict[int, int]:
        """Return the bytes of the arrays that the backward pass reads, by the width of their elements."""
        pullback = jax.eval_shape(lambda p: jax.vjp(lambda p: model.apply(p, batch), p)[1], params)
        leaves = jax.tree.leaves(pullback)
        return {width: nbytes([leaf for leaf in leaves if leaf.dtype.itemsize == width]) for width in (2, 4)}

    held, whole = saved(fetched(model, Fetch(fetch)), stored), saved(model, params)
    assert held[4] - nbytes(stored) <= whole[4]  # no float32 activations besides the stored parameters
    assert held[2] <= whole[2]


def test_a_scan_over_packed_layers_equals_the_whole() -> None:
    """A layer is packed once, before the scan, and unpacked when it is computed; so are its gradients, in reverse."""
    model, params, batch = small("gpt", "causal_lm", scan_layers=True)

    def pack(_shapes: Any, stored: Any) -> jax.Array:
        return jnp.concatenate([2 * x.reshape(-1) for x in jax.tree.leaves(stored)])

    def unpack(shapes: Any, packed: jax.Array) -> Any:
        leaves = jax.tree.leaves(shapes)
        pieces = jnp.split(packed / 2, np.cumsum([leaf.size for leaf in leaves])[:-1])
        arrays = [x.reshape(leaf.shape) for x, leaf in zip(pieces, leaves, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(shapes), arrays)

    def slopes(model: Model, params: Any) -> Any:
        return jax.grad(lambda params: jnp.sum(model.apply(params, batch) ** 2))(params)

    packed = fetched(model, Fetch(unpack, pack))
    got, expected = (jax.jit(partial(slopes, one))(params) for one in (packed, model))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, expected)
    size = sum(leaf.size for leaf in jax.tree.leaves(model.shapes["block_0"]))
    run = next(run for run in model.runs if run.stop - run.start > 1)
    stacks = [x.aval.shape for x in _outputs_of_scans(jax.make_jaxpr(partial(slopes, packed))(params).jaxpr)]
    assert (run.stop - run.start, size) in stacks


def _outputs_of_scans(jaxpr: Any) -> list[Any]:
    return [x for equation in jaxpr.eqns if equation.primitive.name == "scan" for x in equation.outvars]


@pytest.mark.parametrize(("name", "task", "overrides"), [EVERY[2], EVERY[4], EVERY[6], EVERY[8], EVERY[9]])
def test_partitions_equal_the_whole(name: str, task: str, overrides: dict[str, Any]) -> None:
    model, params, batch = small(name, task, **overrides)
    count = len(model.layers)

    @fast_jit
    def outputs(params: Any, keys_B: jax.Array) -> list[jax.Array]:
        results = [model.apply(params, batch, keys_B)]
        for cut in (1, count // 2):
            x = model.apply_layers(params, batch["inputs"], batch, keys_B, 0, cut)
            results.append(whole_logits(model.apply_layers(params, x, batch, keys_B, cut, count)))
        return results

    whole, *parts = outputs(params, dropout_keys())
    for part in parts:
        np.testing.assert_allclose(part, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "task", "overrides"), [EVERY[2], EVERY[4]])
def test_scan_and_remat_change_nothing(name: str, task: str, overrides: dict[str, Any]) -> None:
    results = []
    for scan, remat in ((False, "none"), (True, "full"), (True, "dots")):
        model, params, batch = small(name, task, scan_layers=scan, remat=remat, **overrides)

        def loss(params: Any, keys_B: jax.Array, model: Model = model, batch: Any = batch) -> jax.Array:
            return (model.apply(params, batch, keys_B) ** 2).mean()

        results.append(fast_jit(jax.value_and_grad(loss))(params, dropout_keys()))
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), other, results[0])


def test_scan_compiles_a_run_once() -> None:
    for scan, count in ((True, 1), (False, 3)):
        model, params, batch = small("bert", "classification", scan_layers=scan)
        # Attention has the only softmax, so every traced block contains one reduce_max.
        assert str(jax.make_jaxpr(model.apply)(params, batch)).count("reduce_max") == count


def test_runs() -> None:
    model, _, _ = small("bert", "masked_lm")
    assert [layer.name for layer in model.layers] == ["embed", "block_0", "block_1", "block_2", "head"]
    assert model.runs == (range(0, 1), range(1, 4), range(4, 5))
    # Stages have 3, 4, 6 and 3 blocks. The first block of a stage has a projection, so it differs from the others.
    model, _, _ = small("resnet", "classification", size="50")
    assert [run.stop - run.start for run in model.runs] == [1, 1, 2, 1, 3, 1, 5, 1, 2, 1]
    model, _, _ = small("resnet", "classification", size="18")
    assert [run.stop - run.start for run in model.runs] == [1, 2, 1, 1, 1, 1, 1, 1, 1]


def test_tied_arrays_are_stored_once_and_get_both_gradients() -> None:
    model, params, batch = small("gpt", "causal_lm")
    assert "tokens" in params["embed"]
    assert "tokens" not in params["head"]
    gradient = fast_jit(jax.grad(lambda params: model.apply(params, batch)[..., 0].sum()))(params)["embed"]["tokens"]
    unseen = np.setdiff1d(np.arange(1, VOCAB), batch["inputs"])
    assert np.abs(gradient[0]).max() > 0  # token 0 is in no text, so its gradient comes from the head alone
    assert np.abs(gradient[unseen]).max() == 0
    assert np.abs(gradient[batch["inputs"][0, 0]]).max() > 0  # from the embedding alone


class Scale(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jax.random.normal(rngs.params(), (3,)))

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        return x * self.scale[...]


def test_equal_layers_that_are_tied_are_no_run() -> None:
    makers = dict.fromkeys("abcd", Scale)
    assert Model(makers).runs == (range(0, 4),)
    model = Model(makers, ties=(Tie("b", "scale", "a", "scale"),), scan=True)
    assert model.runs == (range(0, 1), range(1, 2), range(2, 4))
    params = model.init(jax.random.key(0))
    a, c, d = (np.asarray(params[name]["scale"]) for name in "acd")
    np.testing.assert_allclose(model.apply(params, {"inputs": jnp.ones(3)}), a * a * c * d, rtol=1e-6)


def test_fresh_layers_depend_on_place_alone() -> None:
    key = jax.random.key(0)
    expected = [np.asarray(Scale(nnx.Rngs(params=jax.random.fold_in(key, i))).scale[...]) for i in range(4)]
    assert not np.allclose(expected[0], expected[1])
    # One shared maker and one maker per layer give the same values.
    for makers in (dict.fromkeys("abcd", Scale), {name: partial(Scale) for name in "abcd"}):
        params = Model(makers).init(key)
        np.testing.assert_array_equal([params[name]["scale"] for name in "abcd"], expected)


@pytest.mark.parametrize(
    ("name", "task", "overrides"), [EVERY[0], EVERY[2], EVERY[4], ("resnet", "classification", {"dropout": 0.2})]
)
def test_bfloat16_is_close_to_float32(name: str, task: str, overrides: dict[str, Any]) -> None:
    full, params, batch = small(name, task, **overrides)
    half, _, _ = small(name, task, dtype="bfloat16", **overrides)
    exact = np.asarray(fast_jit(full.apply)(params, batch, dropout_keys()))
    rounded = np.asarray(fast_jit(half.apply)(params, batch, dropout_keys()))
    difference = np.abs(rounded - exact).max() / np.abs(exact).max()
    assert 1e-6 < difference < 0.05


def test_padding_examples_give_finite_numbers() -> None:
    for task, overrides in (("classification", {"pooling": "mean"}), ("masked_lm", {})):
        model, params, batch = small("bert", task, **overrides)
        batch["mask"] = np.zeros_like(batch["mask"])
        loss = fast_jit(jax.value_and_grad(lambda params, m=model, b=batch: m.apply(params, b).sum()))
        value, gradient = loss(params)
        assert np.isfinite(value)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
