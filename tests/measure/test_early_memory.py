"""The arrays that programs for CPUs hold: by hand for each rule, and against the compiled program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxpar.measure.early_memory import PassMemory, pass_memory

N = 64
UNIT = 4 * N * N  # bytes of a matrix
X = jax.ShapeDtypeStruct((N, N), jnp.float32)
KEYS = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), N))


def units(memory: PassMemory) -> tuple[float, float]:
    """Return the matrices that are held, and those at the peak."""
    return tuple(round(nbytes / UNIT, 1) for nbytes in memory)  # type: ignore[return-value]


def after(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a late argument, with which it multiplies its result."""
    return lambda x, slope: slope @ function(x)


@pytest.mark.parametrize(
    ("function", "held"),
    [
        (lambda x: x * 2 + 1, 1),  # an operand of a product is an array, which has been computed
        (lambda x: (x @ x) * 2, 1),  # written over the product
        (lambda x: jnp.exp(x) @ jnp.tanh(x), 1),
        (lambda x: jax.random.uniform(jax.random.key(0), (N, N)) + x, 1),
    ],
)
def test_what_can_be_computed_is_computed(function: Callable[..., Any], held: int) -> None:
    assert units(pass_memory(after(function), (X, X), resident=1, late=1))[0] == held


@pytest.mark.parametrize(
    ("function", "held"),
    [
        (lambda x, slope: slope * (x > 0), 0),  # cheap: the argument is read again, and it is in memory
        (lambda x, slope: slope * jnp.exp(x), 0),  # expensive, but computed once
        (lambda x, slope: (slope * jnp.exp(x), slope + jnp.exp(x)), 1),  # would be computed twice
        (lambda x, slope: slope * ((x @ x) > 0), 1),  # the product instead of the comparison
        (lambda x, slope: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), slope, 0), 2),  # two halves
        (lambda x, slope: jnp.sum(slope * x[:, :1], axis=1), 1),  # the operands of a sum are arrays, also broadcast
        (lambda _x, slope: jnp.sum(slope * 2, axis=1), 0),
        (lambda _x, slope: jnp.zeros((N, N)).at[jnp.zeros(N, int)].add(slope), 1),  # zeros to which it adds
    ],
)
def test_what_is_held_for_later(function: Callable[..., Any], held: int) -> None:
    assert units(pass_memory(function, (X, X), resident=1, late=1))[0] == held


def test_reuse() -> None:
    """Three products of a chain: at most two are in memory, or one if what follows writes over it."""
    assert units(pass_memory(lambda x: ((x @ x) @ x) @ x, (X,), resident=1))[1] == 2
    assert units(pass_memory(lambda x: jnp.exp(jnp.sin(x @ x)), (X,), resident=1))[1] == 1


def test_loops() -> None:
    """A loop writes over what it starts with; an iteration needs a product in addition."""

    def function(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda total, _: (total + x @ x, None), jnp.zeros_like(x), length=3)[0]

    assert units(pass_memory(function, (X,), resident=1))[1] == 2


def test_uncounted_results() -> None:
    def function(x: jax.Array) -> dict[str, jax.Array]:
        return {"here": x @ x, "elsewhere": x @ x.T}

    assert units(pass_memory(function, (X,), resident=1)) == (2, 2)
    assert units(pass_memory(function, (X,), resident=1, elsewhere=lambda results: results["elsewhere"])) == (1, 1)


def test_what_is_computed_again_waits() -> None:
    """Without `early`, the second exponential is the first one, which is held."""

    def early(x: jax.Array, _slope: jax.Array) -> jax.Array:
        return jnp.exp(x) @ x

    def function(x: jax.Array, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
        return early(x, slope), slope * jnp.exp(x) + jnp.exp(x) @ slope

    assert units(pass_memory(function, (X, X), resident=1, late=1))[0] == 2
    assert units(pass_memory(function, (X, X), resident=1, late=1, early=early))[0] == 1


class Net(nnx.Module):
    """Layers of an MLP with the operations of a transformer."""

    def __init__(self, activation: Callable[[jax.Array], jax.Array], rngs: nnx.Rngs):
        self.activation = activation
        self.ups = nnx.List([nnx.Linear(N, 4 * N, rngs=rngs) for _ in range(3)])
        self.downs = nnx.List([nnx.Linear(4 * N, N, rngs=rngs) for _ in range(3)])
        self.norms = nnx.List([nnx.LayerNorm(N, rngs=rngs) for _ in range(3)])

    def __call__(self, x: jax.Array, keys: jax.Array) -> jax.Array:
        for up, down, norm in zip(self.ups, self.downs, self.norms, strict=True):
            y = down(self.activation(up(norm(x))))
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (16, N)))(keys)
            x = x + jnp.where(kept.reshape(x.shape), y, 0)
        return x


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.silu, lambda x: jax.nn.gelu(x, approximate=False)])
def test_equals_the_compiled_program(activation: Callable[[jax.Array], jax.Array]) -> None:
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Net(activation, nnx.Rngs(0))))

    def loss(params: Any, x: jax.Array, keys: jax.Array) -> jax.Array:
        return jnp.mean(nnx.merge(graphdef, params)(x, keys) ** 2)

    arguments = params, jax.ShapeDtypeStruct((16 * N, N), jnp.float32), KEYS
    step = jax.grad(loss)
    analysis = jax.jit(step).lower(*arguments).compile().memory_analysis()
    assert analysis is not None
    needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    assert pass_memory(step, arguments, resident=3).peak == pytest.approx(needed, rel=0.12)
