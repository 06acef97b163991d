"""The scale of the loss in float16: against a recurrence written here, in every implementation of data parallelism."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpar.core import loss_scale, state, step
from jaxpar.core.loss_scale import FIRST_SCALE, LEAST_SCALE, MOST_SCALE, LossScale, find_scale, with_loss_scale
from jaxpar.errors import UserError
from jaxpar.models import Context, Model
from jaxpar.tasks.classification import TASK
from tests.strategies.pipelines import Task, make, make_batch, named, plan_of, start

ROWS, FEATURES, CLASSES, STEPS = 8, 5, 3, 24
LARGE = 1000.0  # of inputs, with which products of scaled gradients are too large for float16


class Line(nnx.Module):
    """A linear layer in float16."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(FEATURES, CLASSES, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        return self.linear(x).astype(jnp.float32)


def batch(number: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(number)
    return {
        "inputs": jnp.asarray(LARGE * rng.normal(size=(ROWS, FEATURES)), jnp.float32),
        "labels": jnp.asarray(rng.integers(0, CLASSES, ROWS), jnp.int32),
        "weights": jnp.ones(ROWS),
        "index": jnp.arange(ROWS),
    }


def test_steps_equal_a_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale falls until gradients are finite, and is doubled after three updates in a row."""
    monkeypatch.setattr(loss_scale, "UPDATES_AT_A_SCALE", 3)
    optimizer = with_loss_scale(optax.with_extra_args_support(optax.sgd(1e-7, 0.9)))
    problem = step.Problem(Model({"line": Line}), optimizer, 1, {}, STEPS, TASK)
    current = state.init(problem.model, optimizer, jax.random.key(0))
    weights: dict[str, Any] = current.params["line"]["linear"]
    trace: dict[str, Any] = {"kernel": 0.0, "bias": 0.0}
    scale, updates, finite = FIRST_SCALE, 0, []

    def scaled_loss(weights: Any, rows: Any, scale: float) -> jax.Array:
        narrow = {name: x.astype(jnp.float16) for name, x in weights.items()}
        logits = (rows["inputs"].astype(jnp.float16) @ narrow["kernel"] + narrow["bias"][None]).astype(jnp.float32)
        return scale * optax.softmax_cross_entropy_with_integer_labels(logits, rows["labels"]).mean()

    for number in range(STEPS):
        rows = batch(number)
        grads, sums = step.gradients(problem, current, rows, rows["weights"].sum())
        current, metrics = step.update(problem, current, grads, sums)
        assert metrics.loss_scale == scale
        own = {name: np.asarray(g) / scale for name, g in jax.grad(scaled_loss)(weights, rows, scale).items()}
        finite.append(all(np.isfinite(g).all() for g in own.values()))
        assert metrics.finite == finite[-1]
        if finite[-1]:
            trace = {name: own[name] + 0.9 * trace[name] for name in own}
            weights = {name: weights[name] - np.float32(1e-7) * trace[name] for name in own}
        updates = updates + 1 if finite[-1] else 0
        scale = scale / 2 if not finite[-1] else 2 * scale if updates == 3 else scale
        updates %= 3
        for name, leaf in current.params["line"]["linear"].items():
            np.testing.assert_allclose(leaf, weights[name], rtol=1e-5)
    assert not finite[0]
    assert 8 < sum(finite) < STEPS - 4  # it was too large again later
    last: Any = find_scale(current.optimizer)
    assert tuple(last) == (scale, updates)


@pytest.mark.parametrize(
    ("scale", "is_finite", "after"),
    [(LEAST_SCALE, False, LEAST_SCALE), (MOST_SCALE, True, MOST_SCALE), (4.0, True, 8.0)],
)
def test_limits(scale: float, is_finite: bool, after: float) -> None:
    before = {
        "moments": jnp.ones(2),
        "scale": LossScale(jnp.float32(scale), jnp.int32(loss_scale.UPDATES_AT_A_SCALE - 1)),
    }
    changed = loss_scale.after_step(before, jnp.asarray(is_finite))
    assert changed["scale"] == (after, 0)
    np.testing.assert_array_equal(changed["moments"], before["moments"])


MLP = Task("mlp", "classification", "adamw", layers=2, dtype="float16")
REPLICAS = ("strategy=data_parallel", "mesh.data=2")
DDP, PMAP = "exchange=ddp", "data_parallel.implementation=pmap"
# Each way, and one that divides the loss by the same weight before it is scaled: of a replica's shard, or of the batch.
WAYS = {
    **{f"exchange={name}": DDP for name in ("zero1", "zero2", "zero3", "horovod", "byteps")},
    "exchange=dp": PMAP,
}


@functools.cache
def after_steps(*overrides: str) -> tuple[list[bool], dict[str, np.ndarray]]:
    """Return which of four steps were finite, and the state after them, from a scale with which the first is not."""
    strategy = make(MLP, *(f"--config.{one}" for one in overrides))
    tree, finite = jax.tree.map(np.asarray, start(MLP)), []
    tree["optimizer"]["0"]["scale"] = np.float32(2.0**21)
    now = strategy.from_canonical(tree)
    for number in range(4):
        now, metrics = strategy.step(now, strategy.place(make_batch(MLP, number)))
        finite.append(bool(metrics.finite))
    return finite, named(strategy.to_canonical(now))


@pytest.mark.parametrize("way", WAYS)
def test_exchanges(way: str) -> None:
    """Each skips the steps of the other way, and has the same state, with the scale."""
    (finite, tree), (expected, of_other) = after_steps(*REPLICAS, way), after_steps(*REPLICAS, WAYS[way])
    assert finite == expected
    assert (finite[0], finite[-1]) == (False, True)
    for name, leaf in tree.items():
        np.testing.assert_allclose(leaf, of_other[name], rtol=1e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("overrides", "owner"),
    [
        (("strategy=pipeline", "mesh.stage=2"), "config.strategy='pipeline'"),
        ((*REPLICAS, "exchange=onebit_adam"), "config.exchange='onebit_adam'"),
    ],
)
def test_others_refuse_float16(overrides: tuple[str, ...], owner: str) -> None:
    with pytest.raises(UserError, match=f"config.model.dtype is 'float16'; it must be one of .* with {owner}"):
        plan_of(MLP, *(f"--config.{one}" for one in overrides))
