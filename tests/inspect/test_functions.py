"""Tests of certificates of a user's own functions: a plain Flax step on two devices, correct and with mistakes."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.errors import UserError
from jaxpar.inspect import functions

MESH = Mesh(np.array(jax.devices()[:2]), ("data",))
HALVES, WHOLE = P("data"), P()
Step = Callable[[Any, Any], Any]


class Net(nn.Module):
    """A small network with a scan over two layers, whose products are in `dtype`."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(8, (3, 3), dtype=self.dtype)(x.reshape(-1, 6, 6, 1))).mean((1, 2))
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = layers(self.dtype)(x, None)
        return nn.Dense(4, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)).astype(jnp.float32)


class Layer(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.gelu(nn.Dense(8, dtype=self.dtype)(x)), None


def batch_of(seed: int) -> Any:
    """Return a batch whose second half has two padding examples."""
    x_BD = np.random.default_rng(seed).normal(size=(32, 36)).astype(np.float32)
    weights_B = np.ones(32, np.float32)
    weights_B[-2:] = 0
    return {"x": x_BD, "labels": np.argmax(x_BD[:, :4], axis=1), "weights": weights_B}


@functools.cache
def problem(dtype: str) -> tuple[Step, Any]:
    """Return the reference, and the parameters."""
    model = Net(jnp.dtype(dtype))

    def loss(params: Any, batch: Any) -> jax.Array:
        logits_BC = model.apply(params, batch["x"])
        losses_B = optax.softmax_cross_entropy_with_integer_labels(logits_BC, batch["labels"])
        return (losses_B * batch["weights"]).sum() / batch.get("divisor", batch["weights"].sum())

    return jax.value_and_grad(loss), model.init(jax.random.key(0), batch_of(0)["x"])


def on_two_devices(exchange: Callable[[Any], Any], *, own_weight: bool = False) -> Callable[[Step], Step]:
    """Return the step that sums losses and gradients of both halves of a batch with `exchange`."""

    def make(one_device: Step) -> Step:
        def half(params: Any, batch: Any) -> Any:
            weight = batch["weights"].sum()
            divisor = weight * 2 if own_weight else jax.lax.psum(weight, "data")
            return exchange(one_device(params, batch | {"divisor": divisor}))

        return jax.jit(jax.shard_map(half, mesh=MESH, in_specs=(WHOLE, HALVES), out_specs=WHOLE, check_vma=False))

    return make


def total(tree: Any) -> Any:
    return jax.lax.psum(tree, "data")


def by_partitioner(one_device: Step) -> Step:
    return jax.jit(one_device, in_shardings=(NamedSharding(MESH, WHOLE), NamedSharding(MESH, HALVES)))


def in_pmap(one_device: Step) -> Step:
    def half(params: Any, batch: Any) -> Any:
        return total(one_device(params, batch | {"divisor": total(batch["weights"].sum())}))

    mapped = jax.pmap(half, axis_name="data", in_axes=(None, 0), devices=jax.devices()[:2])

    def step(params: Any, batch: Any) -> Any:
        halves = {name: x.reshape(2, -1, *x.shape[1:]) for name, x in batch.items()}
        return jax.tree.map(lambda x: x[0], mapped(params, halves))

    return step


def one_leaf_of(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `total`, changed for one leaf: the kernel of the last layer."""

    def exchange(tree: Any) -> Any:
        loss, grads = total(tree)
        _, own = tree
        last = {**grads["params"]["Dense_0"], "kernel": change(own["params"]["Dense_0"]["kernel"])}
        return loss, {"params": {**grads["params"], "Dense_0": last}}

    return exchange


KERNEL = "[1]['params']['Dense_0']['kernel']"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [on_two_devices(total), by_partitioner, in_pmap], ids=["shard_map", "jit", "pmap"])
def test_correct_steps_pass(make: Callable[[Step], Step], dtype: str) -> None:
    one_device, params = problem(dtype)
    found = jaxpar.certify_functions(one_device, make(one_device), params, *map(batch_of, range(3)))
    assert found.passed, str(found)
    assert found.results.keys() == {"[0]", *(f"[1]{name}" for name in functions._by_path(params))}
    tolerances = {name: one.tolerance for name, one in found.results.items()}
    assert all(of is not None and of < (1e-5 if dtype == "float32" else 0.6) for of in tolerances.values()), str(found)
    assert f"passed: all {3 * len(found.results)} differences are within" in str(found)


ONE_LEAF = "scaled by a wrong factor, of some arrays only"
MISTAKES: dict[str, tuple[Callable[[Step], Step], bool, str]] = {
    "sum of means": (
        on_two_devices(lambda tree: jax.tree.map(lambda x: 2 * x, total(tree))),
        True,
        "a sum over 2 devices instead of their mean",
    ),
    "mean of sums": (
        on_two_devices(lambda tree: jax.tree.map(lambda x: x / 2, total(tree))),
        True,
        "divided by the number of 2 devices twice",
    ),
    "no psum": (
        on_two_devices(lambda tree: tree),
        True,
        "a missing sum over replicas: the gradient is that of replica 0",
    ),
    "mean of means": (on_two_devices(total, own_weight=True), True, "replicas or microbatches have wrong weights"),
    "one leaf without psum": (on_two_devices(one_leaf_of(lambda own: own)), False, "a missing sum over replicas"),
    "one leaf larger by 1e-4": (on_two_devices(one_leaf_of(lambda own: total(own) * (1 + 1e-4))), False, ONE_LEAF),
    "one leaf clipped": (
        on_two_devices(one_leaf_of(lambda own: jnp.clip(total(own), -1e-2, 1e-2))),
        False,
        "unknown: none of",
    ),
    "not a number": (on_two_devices(one_leaf_of(lambda own: own * jnp.nan)), False, "a result is not finite"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found_and_named(name: str) -> None:
    make, of_all, cause = MISTAKES[name]
    one_device, params = problem("float32")
    found = jaxpar.certify_functions(one_device, make(one_device), params, batch_of(0))
    named = [line.partition(":")[0] for line in found.outside]
    assert not found.passed
    assert named == ([*found.results] if of_all else [KERNEL])
    assert f"verdict    failed, outside the tolerance\noutside    {named[0]}: " in str(found)
    assert found.cause is not None
    assert found.cause.where == f"batch 0, {len(named)} of {len(found.results)} arrays, {named[0]} first"
    assert f"\ncause      {cause}" in str(found)


def test_a_missing_sum_is_found_in_bfloat16() -> None:
    one_device, params = problem("bfloat16")
    make = on_two_devices(one_leaf_of(lambda own: own))
    found = jaxpar.certify_functions(one_device, make(one_device), params, batch_of(0))
    assert [line.partition(":")[0] for line in found.outside] == [KERNEL]


X = np.ones((4, 2), np.float32)


def mean(_params: Any, batch: Any) -> Any:
    return {"mean": batch["x"].mean()}


@pytest.mark.parametrize(
    ("reference", "parallel", "batches", "message"),
    [
        (mean, mean, [], "batches is empty; certify_functions must be given at least one batch"),
        (
            mean,
            mean,
            [{"x": X, "weights": X[:3, 0]}],
            "a batch has ['weights']: (3,), ['x']: (4, 2); its arrays must have the same number of examples",
        ),
        (mean, mean, [{"x": X[:0]}], "a batch has ['x']: (0, 2); its arrays must have the same number of examples"),
        (mean, mean, [{"x": X, "key": jax.random.key(0)}], "a batch has a typed key at ['key']; it must be"),
        (
            mean,
            lambda params, batch: jax.tree.map(lambda x: x.astype(jnp.bfloat16), mean(params, batch)),
            [{"x": X}],
            "parallel returns bfloat16 at ['mean']; it must return float32, as reference does",
        ),
        (lambda _params, _batch: {}, mean, [{"x": X}], "reference returns no arrays; it must return those to compare"),
        (
            mean,
            lambda params, _batch: params,
            [{"x": X}],
            "parallel returns nothing at ['mean']; it must return an array (), as reference does",
        ),
        (
            mean,
            lambda params, batch: mean(params, batch) | {"more": np.ones(3)},
            [{"x": X}],
            "parallel returns an array (3,) at ['more']; it must return nothing, as reference does",
        ),
        (mean, mean, [{"x": X * np.inf}], "reference returns a number that is not finite at ['mean']; all must be"),
    ],
)
def test_functions_that_cannot_be_compared(reference: Step, parallel: Step, batches: list[Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        jaxpar.certify_functions(reference, parallel, {}, *batches)
    assert str(error.value).startswith(message)


def test_errors_of_the_functions_are_raised() -> None:
    def fails(_params: Any, _batch: Any) -> Any:
        raise KeyError("mine")

    for pair in ((fails, mean), (mean, fails)):
        with pytest.raises(KeyError, match="mine"):
            jaxpar.certify_functions(*pair, {}, {"x": X})


def test_results_that_cannot_be_compared() -> None:
    """Results that follow the order of the examples would make any tolerance large."""

    def imaginary(params: Any, x: Any) -> Any:
        return 1j * (x @ params["w"]).sum()

    params, batch = {"w": np.ones(3, np.float32)}, np.arange(24, dtype=np.float32).reshape(8, 3)
    with pytest.raises(UserError, match="reference depends on the order of the examples"):
        jaxpar.certify_functions(lambda p, x: x @ p["w"], lambda p, x: 2 * x @ p["w"], params, batch)
    with pytest.raises(UserError, match="reference returns complex numbers"):
        jaxpar.certify_functions(imaginary, imaginary, params, batch)
