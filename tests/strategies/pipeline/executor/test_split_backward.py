"""Functions are cut into F, B and W and compared with jax.grad: equal values, no product twice, no weight saved.

test_programs.py tests the stages of models. Dims: B examples, D and E features.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jaxpar.measure.flops import forward_flops
from jaxpar.models.activations import recomputed_mlp
from jaxpar.strategies.pipeline.executor.split_backward import Cut, Origin, cut_phases, flatten
from tests.models.small import fast_jit
from tests.strategies.pipeline.cuts import flops_of, primitives, run_actions

B, D, E = 7, 4, 6  # 7 divides no weight size, so a multiple of 7 indicates activations
Weights = dict[str, jax.Array]
Function = Callable[[Weights, jax.Array], jax.Array]


def make_weights() -> Weights:
    rng = np.random.default_rng(0)
    shapes = {"bias": (E,), "down": (E, D), "square": (D, D), "up": (D, E)}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def x_and_dy() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.normal(size=(B, D)), jnp.float32), jnp.asarray(rng.normal(size=(B, D)), jnp.float32)


def plain(w: Weights, x_BD: jax.Array) -> jax.Array:
    return jnp.tanh(x_BD @ w["up"] + w["bias"][None]) @ w["down"]


def in_jit(w: Weights, x_BD: jax.Array) -> jax.Array:
    """Nested calls, a function that is called twice, and an argument that is returned unchanged."""
    layer = jax.jit(lambda w, x: (jax.jit(plain)(w, x), x))
    y_BD, x_BD = layer(w, x_BD)
    return layer(w, y_BD)[0] + x_BD


def in_checkpoint(w: Weights, x_BD: jax.Array) -> jax.Array:
    return jax.checkpoint(in_jit)(w, jax.checkpoint(plain)(w, x_BD))


def with_constant(w: Weights, x_BD: jax.Array) -> jax.Array:
    """The inner function closes over an array."""
    table_DD = np.arange(D * D, dtype=np.float32).reshape(D, D)
    return jax.jit(lambda w, x_BD: plain(w, x_BD @ jnp.asarray(table_DD)))(w, x_BD)


def in_scan(w: Weights, x_BD: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (x + plain(w, x), None), x_BD, length=3)[0]


def of_weights(w: Weights, x_BD: jax.Array) -> jax.Array:
    """Half of the computation depends on the weights alone."""
    return jax.nn.relu(x_BD) @ jnp.tanh(w["up"] @ w["down"]).T + x_BD


def in_bfloat16(w: Weights, x_BD: jax.Array) -> jax.Array:
    cast = {name: leaf.astype(jnp.bfloat16) for name, leaf in w.items()}
    return plain(cast, x_BD.astype(jnp.bfloat16)).astype(jnp.float32)


def gelu(w: Weights, x_BD: jax.Array) -> jax.Array:
    return jax.nn.gelu(x_BD @ w["up"] + w["bias"][None]) @ w["down"]


def recomputed(w: Weights, x_BD: jax.Array) -> jax.Array:
    """Its backward pass has barriers between what B and what W computes."""
    return recomputed_mlp("gelu_tanh", True, x_BD, ((w["up"], w["bias"]),), w["down"])


def softmax(w: Weights, x_BD: jax.Array) -> jax.Array:
    return jax.nn.softmax(x_BD @ w["up"]) @ w["down"]


def identity(_w: Weights, x_BD: jax.Array) -> jax.Array:
    return x_BD


def without_input(w: Weights, _x_BD: jax.Array) -> jax.Array:
    return jnp.ones((B, E)) @ w["down"]


FUNCTIONS = [
    plain,
    in_jit,
    in_checkpoint,
    with_constant,
    in_scan,
    of_weights,
    in_bfloat16,
    identity,
    without_input,
    gelu,
    recomputed,
    softmax,
]
SOURCES: list[Origin] = ["free", "free", "free", "free", 0, 1]


def split(function: Function, *, fused: bool = False) -> Cut:
    """Cut a stage that computes the function into phases. fused: B and W are one phase."""

    def actions(w: Weights, x_BD: jax.Array, dy_BD: jax.Array) -> list[Any]:
        y_BD, pullback = jax.vjp(function, w, x_BD)
        dw, dx_BD = pullback(dy_BD)
        return [y_BD, dx_BD, *jax.tree.leaves(dw)]

    closed = flatten(jax.make_jaxpr(actions)(make_weights(), *x_and_dy()), remat=True)
    return cut_phases(closed, [1, 5] if fused else [1, 1, 4], SOURCES)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_actions_give_the_gradients(function: Function) -> None:
    (x_BD, dy_BD), w = x_and_dy(), make_weights()

    def target(w: Weights, x_BD: jax.Array) -> tuple[jax.Array, jax.Array]:
        y_BD = function(w, x_BD)
        return jnp.sum(y_BD * dy_BD), y_BD

    (dw, dx_BD), y_BD = fast_jit(jax.grad(target, (0, 1), has_aux=True))(w, x_BD)
    tolerance = 1e-2 if function is in_bfloat16 else 1e-6
    for fused in (False, True):
        run = fast_jit(partial(run_actions, split(function, fused=fused), SOURCES))
        outputs = run([*jax.tree.leaves(w), x_BD, dy_BD])
        assert [len(of_action) for of_action in outputs] == ([1, 5] if fused else [1, 1, 4])
        for got, wanted in zip(jax.tree.leaves(outputs), [y_BD, dx_BD, *jax.tree.leaves(dw)], strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_allclose(got, wanted, atol=tolerance * float(1e-9 + jnp.abs(wanted).max()))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_product_is_computed_twice(function: Function) -> None:
    """The FLOPs equal those of jax.grad, except that products of weights alone are recomputed in each phase."""
    (x_BD, dy_BD), w = x_and_dy(), make_weights()
    grad = jax.value_and_grad(lambda w, x_BD: jnp.sum(function(w, x_BD) * dy_BD), (0, 1))
    counts = flops_of(split(function), SOURCES, [*jax.tree.leaves(w), x_BD, dy_BD])
    again = 4 * D * E * D if function is of_weights else 0  # up @ down in B and in W
    assert sum(counts) == forward_flops(grad, w, x_BD) + again
    if function in (plain, recomputed):
        assert counts == [4 * B * D * E] * 3


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_weight_is_saved(function: Function) -> None:
    """No cast, transpose or product of weights is saved either. Sizes of activations are multiples of 7."""
    for key, values in split(function).saved.items():
        if function is not in_scan or key != (1, 2):  # a backward scan computes dX and dW together, so B saves dW for W
            assert all(value.size % B == 0 for value in values)


def test_what_is_saved_of_a_linear_map() -> None:
    """W needs the input, and dy, which only B receives. B needs no saved value."""
    pieces = split(lambda w, x_BD: x_BD @ w["square"])
    saved = {key: [value.shape for value in values] for key, values in pieces.saved.items()}
    assert saved == {(0, 2): [(B, D)], (1, 2): [(B, D)]}


def test_elementwise_functions_are_recomputed() -> None:
    """A GELU saves its input. W would need it for longer than B, so there the result is saved too."""

    def saved(function: Function, *, fused: bool) -> dict[tuple[int, int], list[Any]]:
        return {key: [value.shape for value in values] for key, values in split(function, fused=fused).saved.items()}

    assert saved(gelu, fused=True) == {(0, 1): [(B, D), (B, E)]}
    assert {key: len(of) for key, of in saved(gelu, fused=False).items()} == {(0, 1): 1, (0, 2): 2, (1, 2): 2}
    assert saved(softmax, fused=True) == {(0, 1): [(B, D), (B, 1), (B, E)]}  # x, the sum of the exponentials, these


def test_custom_rules_survive() -> None:
    """A custom_vjp inside a jit, which returns three times the true gradient, is preserved."""

    @jax.custom_vjp
    def product(w: jax.Array, x_BD: jax.Array) -> jax.Array:
        return x_BD @ w

    def forward(w: jax.Array, x_BD: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return product(w, x_BD), (w, x_BD)

    def backward(kept: tuple[jax.Array, jax.Array], dy_BD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return 3 * kept[1].T @ dy_BD, 3 * dy_BD @ kept[0].T

    product.defvjp(forward, backward)
    (x_BD, dy_BD), w = x_and_dy(), make_weights()
    leaves = [*jax.tree.leaves(w), x_BD, dy_BD]
    pieces = split(lambda w, x_BD: jax.jit(product)(w["square"], x_BD))
    (y_BD,), (dx_BD,), dw = fast_jit(partial(run_actions, pieces, SOURCES))(leaves)
    np.testing.assert_allclose(y_BD, x_BD @ w["square"], rtol=1e-5)
    np.testing.assert_allclose(dx_BD, 3 * dy_BD @ w["square"].T, rtol=1e-5)
    np.testing.assert_allclose(dw[2], 3 * x_BD.T @ dy_BD, rtol=1e-5)
    assert flops_of(pieces, SOURCES, leaves) == [2 * B * D * D] * 3


def test_random_numbers_are_drawn_once() -> None:
    """Random numbers are saved and not drawn again. Keys and values that depend on free inputs alone are not saved."""
    key, (x_BD, dy_BD), scale_B = jax.random.key(3), x_and_dy(), jnp.arange(1.0, 1 + B)
    sources: list[Origin] = ["saved", "free", 0, 1]

    def function(x_BD: jax.Array, key: jax.Array, scale_B: jax.Array) -> jax.Array:
        keep_BD = jax.random.bernoulli(jax.random.fold_in(key, 5), 0.5, x_BD.shape)
        return jnp.tanh(jnp.where(keep_BD, x_BD, 0)) * jnp.sqrt(scale_B)[:, None]

    def actions(key: jax.Array, scale_B: jax.Array, x_BD: jax.Array, dy_BD: jax.Array) -> list[Any]:
        y_BD, pullback = jax.vjp(lambda x_BD: function(x_BD, key, scale_B), x_BD)
        return [y_BD, *pullback(dy_BD)]

    leaves = [key, scale_B, x_BD, dy_BD]
    pieces = cut_phases(flatten(jax.make_jaxpr(actions)(*leaves), remat=True), [1, 1], sources)
    (y_BD,), (dx_BD,) = fast_jit(partial(run_actions, pieces, sources))(leaves)
    grad = jax.grad(lambda x_BD: jnp.sum(function(x_BD, key, scale_B) * dy_BD))
    np.testing.assert_allclose(y_BD, fast_jit(function)(x_BD, key, scale_B), rtol=1e-6)
    np.testing.assert_allclose(dx_BD, fast_jit(grad)(x_BD), rtol=1e-5, atol=1e-6)
    assert all(value.shape == (B, D) for value in pieces.saved[0, 1])
    assert [value.dtype for value in pieces.saved[0, 1]].count(bool) == 1
    drawn = [primitives(pieces, sources, leaves, action)["random_bits"] for action in (0, 1)]
    assert drawn == [1, 0]


def test_flatten_sees_through_calls() -> None:
    """Calls are inlined. Calls of jax.checkpoint are inlined only with `remat`."""
    w, (x_BD, _) = make_weights(), x_and_dy()
    closed = jax.make_jaxpr(in_checkpoint)(w, x_BD)
    whole, flat = (flatten(closed, remat=remat) for remat in (False, True))
    calls = {"jit", "pjit", "checkpoint", "remat2"}
    assert len({equation.primitive.name for equation in whole.jaxpr.eqns} & calls) == 1  # checkpoint, under either name
    names = {equation.primitive.name for equation in flat.jaxpr.eqns}
    assert {"tanh", "dot_general"} <= names
    assert not names & calls
    for other in (whole, flat):
        (got_BD,) = fast_jit(core.jaxpr_as_fun(other))(*jax.tree.leaves(w), x_BD)
        np.testing.assert_allclose(got_BD, fast_jit(in_checkpoint)(w, x_BD), rtol=1e-5, atol=1e-6)
