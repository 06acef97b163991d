"""Tests the arithmetic of a step against softmax regression in NumPy, with hand-written gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpar.core import optimizer, state, step
from jaxpar.models import Context, Model
from jaxpar.tasks import Sums
from jaxpar.tasks.classification import TASK

ROWS, FEATURES, CLASSES = 8, 5, 3


class Line(nnx.Module):
    """A model that is a single linear layer, for softmax regression."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        return self.linear(x)


def batch(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    weights = rng.uniform(0.5, 2, ROWS).astype(np.float32)
    weights[-2:] = 0
    return {
        "inputs": rng.normal(size=(ROWS, FEATURES)).astype(np.float32),
        "labels": rng.integers(0, CLASSES, ROWS).astype(np.int32),
        "weights": weights,
        "index": np.arange(ROWS, dtype=np.int32),
    }


def train_step(
    problem: step.Problem, before: state.State, rows: dict[str, np.ndarray], *, last_apart: bool = False
) -> tuple[state.State, step.Metrics]:
    on_device = {name: jnp.asarray(value) for name, value in rows.items()}
    grads, sums = step.gradients(problem, before, on_device, on_device["weights"].sum(), last_apart=last_apart)
    return step.update(problem, before, grads, sums)


@pytest.mark.parametrize(("accumulation_steps", "last_apart"), [(1, False), (4, False), (2, True), (4, True)])
def test_steps_equal_numpy(accumulation_steps: int, last_apart: bool) -> None:
    problem = step.Problem(Model({"line": Line}), optax.sgd(0.3), accumulation_steps, {}, 3, TASK)
    current = state.init(problem.model, problem.optimizer, jax.random.key(0))
    linear = current.params["line"]["linear"]
    kernel, bias = np.asarray(linear["kernel"], np.float64), np.asarray(linear["bias"], np.float64)
    for number in range(3):
        rows = batch(number)
        current, metrics = train_step(problem, current, rows, last_apart=last_apart)
        x, weights = rows["inputs"].astype(np.float64), rows["weights"].astype(np.float64)
        scores = np.exp(x @ kernel + bias)
        probabilities = scores / scores.sum(1, keepdims=True)
        loss = -(weights * np.log(probabilities[np.arange(ROWS), rows["labels"]])).sum()
        error = (probabilities - np.eye(CLASSES)[rows["labels"]]) * (weights / weights.sum())[:, None]
        norm = np.sqrt(((x.T @ error) ** 2).sum() + (error.sum(0) ** 2).sum())
        kernel, bias = kernel - 0.3 * x.T @ error, bias - 0.3 * error.sum(0)
        np.testing.assert_allclose(metrics.sums.loss, loss, rtol=1e-5)
        np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-5)
        assert metrics.finite
    assert int(current.step) == 3
    linear = current.params["line"]["linear"]
    np.testing.assert_allclose(linear["kernel"], kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(linear["bias"], bias, rtol=1e-5, atol=1e-6)


def test_the_last_microbatch_is_not_in_the_loop() -> None:
    """Its backward pass can overlap with what follows. It waits for the loop, whose activations are then free."""
    problem = step.Problem(Model({"line": Line}), optax.sgd(0.3), 4, {}, 3, TASK)
    before = state.init(problem.model, problem.optimizer, jax.random.key(0))
    traced = jax.make_jaxpr(functools.partial(train_step, problem, last_apart=True))(before, batch(0))
    [loop] = [eqn for eqn in traced.eqns if eqn.primitive.name == "scan"]
    [barrier] = [eqn for eqn in traced.eqns if eqn.primitive.name == "optimization_barrier"]
    assert loop.params["length"] == 3
    assert set(loop.outvars) & set(barrier.invars)
    assert [
        eqn for eqn in traced.eqns if eqn.primitive.name == "dot_general" and set(eqn.invars) & set(barrier.outvars)
    ]


@pytest.mark.parametrize(("name", "finite"), [("inputs", False), ("weights", True)])
def test_a_step_without_an_update_changes_nothing(name: str, finite: bool) -> None:
    """Infinite inputs make the step not finite; example weights of 0 make the gradient zero."""
    problem = step.Problem(Model({"line": Line}), optax.sgd(0.3, momentum=0.9), 1, {}, 3, TASK)
    before = state.init(problem.model, problem.optimizer, jax.random.key(0))
    rows = batch(0)
    rows[name] = np.full_like(rows[name], np.inf if name == "inputs" else 0.0)
    after, metrics = train_step(problem, before, rows)
    assert bool(metrics.finite) == finite
    assert int(after.step) == 1
    for old, new in zip(jax.tree.leaves(before[2:]), jax.tree.leaves(after[2:]), strict=True):
        np.testing.assert_array_equal(new, old)


def test_the_update_has_a_scope() -> None:
    """An audit names a kernel by its last operation, which in that of the optimizer is a selection."""
    problem = step.Problem(Model({"line": Line}), optax.sgd(0.3), 1, {}, 3, TASK)
    before = state.init(problem.model, problem.optimizer, jax.random.key(0))
    text = jax.jit(functools.partial(train_step, problem)).lower(before, batch(0)).as_text(debug_info=True)
    assert "/optimizer/jit(_where)" in text


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_step_is_finite_if_loss_and_gradient_are(value: float) -> None:
    """A gradient can overflow although the loss is finite."""
    sums = Sums(jnp.float32(1), {}, jnp.float32(1))
    assert step.is_finite(jnp.float32(1), sums)
    assert not step.is_finite(jnp.float32(value), sums)
    assert not step.is_finite(jnp.float32(1), sums._replace(loss=jnp.float32(value)))


def test_dropout_keys_differ_by_step_and_run() -> None:
    problem = step.Problem(Model({"line": Line}), optax.sgd(0.1), 1, {}, 3, TASK)
    keys = [
        jax.random.key_data(step.dropout_key(state.init(problem.model, problem.optimizer, key).key, number))
        for key in (jax.random.key(0), jax.random.key(1))
        for number in (jnp.int32(0), jnp.int32(1))
    ]
    assert len({tuple(np.asarray(key).tolist()) for key in keys}) == 4


@pytest.mark.parametrize("rule", [optax.adamw(0.1), optax.lion(0.1), optax.sgd(0.1, 0.9)])
def test_a_state_keeps_its_dtypes(rule: optax.GradientTransformation) -> None:
    """Some parameters are bfloat16, and clipping by a float32 norm must not promote them."""
    clipped = optax.chain(optimizer.clip_by_norm(0.01), rule)
    problem = step.Problem(Model({"line": Line}), clipped, 1, {}, 3, TASK)
    fresh = state.init(problem.model, problem.optimizer, jax.random.key(0))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, fresh.params)
    before = fresh._replace(params=params, optimizer=clipped.init(params))
    after, _ = jax.eval_shape(functools.partial(train_step, problem), before, batch(0))
    assert step.abstract(after) == step.abstract(before)
