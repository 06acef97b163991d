"""Compares engines with the plain loop of reference.py on the same tables, up to rounding."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from jaxpar.strategies.asynchronous import options
from jaxpar.strategies.asynchronous.layouts import DeviceNumbers, history_peaks
from jaxpar.strategies.asynchronous.mitigations import corrected_momentum, momentum_left, staleness_aware
from jaxpar.strategies.asynchronous.table import UpdateTable
from tests.strategies.asynchronous import reference
from tests.strategies.asynchronous.reference import Rule, Weights
from tests.strategies.pipelines import NUM_STEPS, Task, make, make_batch, make_config, make_problem, named, start

TASKS = {name: Task("mlp", "classification", name, layers=1) for name in ("sgd", "adamw")}
RATE = ("--config.optimizer.schedule=linear", "--config.optimizer.warmup=0.3", "--config.optimizer.lr=0.05")
PLAIN = ("--config.model.dropout=0", "--config.optimizer.clip_norm=0", "--config.optimizer.weight_decay=0", *RATE)
# 3 steps of warm-up, then linear decay to 0.
RATES = [0.05 * (t / 3 if t < 3 else 1 - (t - 3) / 7) for t in range(NUM_STEPS)]
RULES: dict[str, tuple[str, tuple[str, ...], Rule]] = {
    "sgd": ("sgd", ("--config.optimizer.momentum=0",), reference.sgd()),
    "momentum": ("sgd", ("--config.optimizer.momentum=0.8",), reference.sgd(0.8)),
    "adam": ("adamw", (), reference.adam(0.9, 0.999, 1e-8)),
}


def asynchronous(*settings: str, devices: int = 2, workers: int = 4) -> tuple[str, ...]:
    """Return the overrides of the strategy, without mitigations unless `settings` contain some."""
    chosen = (f"--config.asynchronous.{setting}" for setting in ("mitigations=", *settings))
    base = ("--config.strategy=async_data_parallel", f"--config.mesh.data={devices}")
    return (*base, f"--config.asynchronous.num_workers={workers}", *chosen)


def table_of(config: ConfigDict, num_steps: int = NUM_STEPS) -> UpdateTable:
    """Return the table of an emulated run."""
    return options.build_table(config, options.decide_updates(config), num_steps)


RANDOM = ("delays.distribution=lognormal", "delays.spread=0.8", "delays.slowdown=2.5", "delays.communication_time=0.2")


def trained(rule: str, *overrides: str) -> tuple[Weights, UpdateTable, Weights]:
    """Return the weights after the run, its table, and its initial weights."""
    name, chosen, _ = RULES[rule]
    task, overrides = TASKS[name], (*PLAIN, *chosen, *overrides)
    strategy = make(task, *overrides)
    initial = start(task, *PLAIN, *chosen)
    state = strategy.from_canonical(initial)
    for step in range(NUM_STEPS):
        state, _ = strategy.step(state, strategy.place(make_batch(task, step)))
    table = table_of(make_config(task, *overrides))
    return named(strategy.to_canonical(state)["params"]), table, named(initial["params"])


def assert_close(got: Weights, expected: Weights, initial: Weights) -> None:
    """Compare weights, relative to the distance that they moved."""
    for key, x in expected.items():
        way = np.linalg.norm(x - initial[key])
        assert way > 1e-4, key
        assert np.linalg.norm(got[key] - x) <= 2e-5 * way + 1e-6 * np.linalg.norm(x), key


BATCHES = [make_batch(TASKS["sgd"], step) for step in range(NUM_STEPS)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "settings",
    [("policy=sync",), ("policy=async",), ("policy=ssp", "bound=1"), ("policy=softsync", "groups=2")],
    ids=lambda settings: settings[0].split("=")[1],
)
def test_gradients_to_a_server(settings: tuple[str, ...], rule: str) -> None:
    got, table, initial = trained(rule, *asynchronous(*settings, *RANDOM))
    assert_close(got, reference.to_server(table, initial, BATCHES, RULES[rule][2], RATES), initial)
    assert table.staleness.max() == 0 if settings == ("policy=sync",) else table.staleness.max() >= 2


# jaxpar/strategies/asynchronous/mitigations.py in NumPy: (gradient, weights, weights that it was computed from,
# staleness).


def dc_asgd(g: Weights, w: Weights, read: Weights, _staleness: int) -> Weights:
    return {key: x + 0.5 * x * x * (w[key] - read[key]) for key, x in g.items()}


def clip(g: Weights, _w: Weights, _read: Weights, staleness: int) -> Weights:
    factor = min(1.0, 0.6 / max(staleness, 1) / reference.norm(g))
    return {key: x * factor for key, x in g.items()}


def adaptive() -> Callable[..., Weights]:
    squares: dict[str, Any] = {}

    def mitigation(g: Weights, w: Weights, read: Weights, _staleness: int) -> Weights:
        squares.update({key: 0.95 * squares.get(key, 0) + 0.05 * x * x for key, x in g.items()})
        return {key: x + 0.5 / np.sqrt(squares[key] + 1e-7) * x * x * (w[key] - read[key]) for key, x in g.items()}

    return mitigation


MITIGATIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "dc_asgd": (("dc_strength=0.5",), {"mitigations": (dc_asgd,)}),
    "adaptive_dc_asgd": (("dc_strength=0.5",), {"mitigations": (adaptive(),)}),
    "clip_by_staleness": (("max_norm=0.6",), {"mitigations": (clip,)}),
    "staleness_aware": ((), {"staleness_aware": True}),
    "clip_by_staleness,dc_asgd,staleness_aware": (
        ("max_norm=0.6", "dc_strength=0.5"),
        {"mitigations": (clip, dc_asgd), "staleness_aware": True},
    ),
    "dc_asgd,clip_by_staleness": (("max_norm=0.6", "dc_strength=0.5"), {"mitigations": (dc_asgd, clip)}),
}


@pytest.mark.parametrize("policy", ["async", "softsync"])
@pytest.mark.parametrize("name", MITIGATIONS)
def test_mitigations(name: str, policy: str) -> None:
    if name == "adaptive_dc_asgd" and policy == "softsync":
        pytest.skip("the reference remembers squares between runs")
    settings, arguments = MITIGATIONS[name]
    got, table, initial = trained(
        "momentum", *asynchronous(f"policy={policy}", f"mitigations={name}", *settings, *RANDOM)
    )
    rule = RULES["momentum"][2]
    expected = reference.to_server(table, initial, BATCHES, rule, RATES, **arguments)
    assert_close(got, expected, initial)
    without = reference.to_server(table, initial, BATCHES, rule, RATES)
    assert (
        max(np.linalg.norm(without[key] - x) / np.linalg.norm(x - initial[key]) for key, x in expected.items()) > 1e-3
    )


@pytest.mark.parametrize(("rule", "before"), [("momentum", 0.8), ("adam", 0.9)])
def test_corrected_momentum(rule: str, before: float) -> None:
    assert momentum_left(0.9, 0) == pytest.approx(0.9)
    assert momentum_left(0.9, 3) == pytest.approx(0.6)  # 1 - 0.6 = 4 (1 - 0.9)
    assert momentum_left(0.9, 30) == 0
    got, table, initial = trained(rule, *asynchronous("policy=async", "mitigations=corrected_momentum"))
    after = max(1 - (1 - before) * (1 + table.staleness.mean()), 1e-6)
    corrected = reference.sgd(after) if rule == "momentum" else reference.adam(after)
    assert_close(got, reference.to_server(table, initial, BATCHES, corrected, RATES), initial)


def test_corrected_momentum_corrects_both_halves_of_muon() -> None:
    """Muon has the momentum `momentum` for kernels, and AdamW's `b1` for the rest."""
    task, mitigation = TASKS["adamw"], asynchronous("policy=async", "mitigations=corrected_momentum")
    muon = ("--config.optimizer.name=muon", "--config.optimizer.momentum=0.8", "--config.optimizer.b1=0.9")
    config = make_config(task, *PLAIN, *mitigation, *muon)
    problem, table = make_problem(config, task), table_of(config)
    staleness = table.staleness.mean()
    assert staleness > 1
    left = [f"--config.optimizer.{key}={1 - rest * (1 + staleness)}" for key, rest in (("momentum", 0.2), ("b1", 0.1))]
    params = start(task)["params"]

    def two_steps(optimizer: optax.GradientTransformation) -> Weights:
        state = optimizer.init(params)
        _, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
        updates, _ = optimizer.update(params, state, params)
        return named(updates)

    got = two_steps(options.build_mitigations(config, problem, table)[0].optimizer)
    expected = two_steps(make_problem(make_config(task, *PLAIN, *muon, *left), task).optimizer)
    for key, x in expected.items():
        np.testing.assert_allclose(got[key], x, rtol=1e-5, err_msg=key)


def test_corrected_momentum_composes_as_optimizers_do() -> None:
    """The corrected optimizer works behind a clip, as part of a chain."""
    grads, params = {"w": jnp.asarray([3.0, -4.0])}, {"w": jnp.zeros(2)}

    def two_steps(optimizer: optax.GradientTransformation) -> np.ndarray:
        state, updates = optimizer.init(params), grads
        for _ in range(2):
            updates, state = optimizer.update(grads, state, params)
        return np.asarray(updates["w"])

    clip = optax.clip_by_global_norm(1.0)
    corrected = corrected_momentum(functools.partial(optax.sgd, 0.1), {"momentum": 0.9}, 3)
    got, expected = two_steps(optax.chain(clip, corrected)), two_steps(optax.chain(clip, optax.sgd(0.1, 0.6)))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("rule", ["momentum", "adam"])
@pytest.mark.parametrize(
    "settings", [("policy=local_sgd", "interval=3"), ("policy=diloco", "interval=2", "outer_lr=0.6")]
)
def test_workers_that_meet(settings: tuple[str, ...], rule: str) -> None:
    got, table, initial = trained(rule, *asynchronous(*settings, *RANDOM))
    outer = (0.6, 0.9) if settings[0] == "policy=diloco" else None
    rounds = -(-NUM_STEPS // (3 if outer is None else 2))
    assert table.num_updates == rounds
    assert table.staleness.max() == 0
    assert_close(got, reference.meeting(table, initial, BATCHES, RULES[rule][2], RATES, outer=outer), initial)


@pytest.mark.parametrize("slowdown", [2.0, 8.0])
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
def test_workers_whose_weights_are_averaged_meanwhile(rule: str, slowdown: float) -> None:
    """An averaging that begins while a worker computes a gradient does not repeat the averagings before it."""
    delays = ("delays.distribution=lognormal", "delays.spread=0.6", f"delays.slowdown={slowdown}")
    messages = ("delays.communication_time=0.2",) if rule == "momentum" else ()
    got, table, initial = trained(rule, *asynchronous("policy=model_average", "interval=2", *delays, *messages))
    assert table.staleness.max() >= (1 if slowdown == 2 else 2)
    assert table.num_updates >= 3
    assert_close(got, reference.averaging(table, initial, BATCHES, RULES[rule][2], RATES), initial)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("settings", [("policy=async",), ("policy=ssp",), ("policy=softsync",), ("policy=sync",)])
def test_versions_that_are_stashed(settings: tuple[str, ...], devices: int) -> None:
    """The peaks equal a count row by row: the versions that later gradients on the device were computed from."""
    config = make_config(TASKS["sgd"], *asynchronous(*settings, *RANDOM, devices=devices, workers=6))
    table = table_of(config, 30)
    for device, expected in enumerate(history_peaks(table, DeviceNumbers(6, devices, server=0))):
        mine = table.worker % devices == device
        peak = 0
        for version in range(1, table.num_updates + 1):
            later = mine & (table.update >= version) & (table.read < version)
            peak = max(peak, len(set(table.read[later].tolist())))
        assert peak == expected


def test_only_versions_that_are_needed_are_there() -> None:
    overrides = asynchronous("policy=async", *RANDOM, devices=2, workers=6)
    strategy, task = make(TASKS["sgd"], *PLAIN, *overrides, "--config.batch_size=24"), TASKS["sgd"]
    config = make_config(task, *PLAIN, *overrides, "--config.batch_size=24")
    table, peaks = table_of(config), []
    state = strategy.from_canonical(start(task, *PLAIN))
    for step in range(NUM_STEPS):
        state, _ = strategy.step(state, make_batch(task, step, 24))
        needed = {
            (int(read), int(worker) % 2)
            for worker, read, of in zip(table.worker, table.read, table.step, strict=True)
            if of > step and read < table.update[table.step == step].max() + 1
        }
        assert state.transport.history.keys() == needed
        peaks.append(max(sum(place == device for _, place in needed) for device in range(2)))
    most = history_peaks(table, DeviceNumbers(table.num_workers, 2, server=0))
    assert max(peaks) <= max(most)
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(state.params))
    assert [parts["history"] for parts in strategy.plan.memory] == [number * size for number in most]


def test_staleness_aware_weighs_each_gradient() -> None:
    """Gradients of +1 and -1 at staleness 1 and 7 make an update of (1 - 1/7) / 2 with SGD (Zhang et al.)."""
    (weighted, scaled), mean_share = staleness_aware(), jnp.float32((1 + 1 / 7) / 2)
    total = jnp.float32(0)
    for g, staleness in ((1.0, 1.0), (-1.0, 7.0)):
        details = {"staleness": jnp.float32(staleness), "mean_share": mean_share, "read": None}
        total += weighted.update({"w": jnp.float32(g)}, optax.EmptyState(), None, **details)[0]["w"]
    update = scaled.update({"w": -total / 2}, optax.EmptyState(), None, mean_share=mean_share)[0]["w"]
    np.testing.assert_allclose(update, -(1 - 1 / 7) / 2, rtol=1e-6)
