"""`async_data_parallel` as a strategy: bitwise the same wherever it runs, and wherever it was stopped."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests.asynchronous.test_engines import RANDOM, asynchronous
from tests.strategies.pipelines import (
    NUM_STEPS,
    Outcome,
    Task,
    advance,
    make,
    make_batch,
    named,
    outcome,
    start,
)

MLP, BERT = Task("mlp", "classification", layers=1), Task("bert", "classification", layers=1)
GPT = Task("gpt", "causal_lm", "sgd", layers=1)
SINGLE = ("--config.strategy=single",)
POLICIES = {
    "sync": ("policy=sync",),
    "async": ("policy=async",),
    "ssp": ("policy=ssp", "bound=1"),
    "softsync": ("policy=softsync", "groups=3"),  # of 8 workers: updates of 2 gradients
    "cures": ("policy=async", "cures=adaptive_dc_asgd,staleness_aware"),
    "local_sgd": ("policy=local_sgd", "interval=3"),
    "diloco": ("policy=diloco", "interval=3"),
    "model_average": ("policy=model_average", "interval=2"),
}


def assert_same(got: Outcome, expected: Outcome) -> None:
    assert (got.losses, got.norms) == (expected.losses, expected.norms)
    for name, x in named(expected.tree).items():
        np.testing.assert_array_equal(named(got.tree)[name], x, name)


@pytest.mark.parametrize("task", [MLP, BERT, GPT], ids=lambda task: task.model)
@pytest.mark.parametrize("settings", [("policy=async",), ("policy=sync",), ("policy=local_sgd", "interval=1")])
def test_one_worker_is_the_single_device(settings: tuple[str, ...], task: Task) -> None:
    assert_same(outcome(task, *asynchronous(*settings, workers=1, devices=1)), outcome(task, *SINGLE))


@functools.cache
def on(devices: int, name: str, task: Task = MLP) -> Outcome:
    return outcome(task, *asynchronous(*POLICIES[name], *RANDOM, workers=8, devices=devices))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("devices", [2, 8])
def test_the_same_on_any_number_of_devices(devices: int, name: str) -> None:
    assert_same(on(devices, name), on(1, name))


def test_a_transformer_is_the_same_on_any_number_of_devices() -> None:
    assert_same(on(4, "async", BERT), on(1, "async", BERT))


def test_another_seed_is_another_run() -> None:
    """Of delays: the start and the batches are the same."""
    overrides = asynchronous(*POLICIES["async"], *RANDOM, "delays.jitter=1", workers=8, devices=1)
    losses = [outcome(MLP, *overrides, f"--config.seed={seed}").losses for seed in (0, 1)]
    assert losses[0][0] == losses[1][0] and losses[0] != losses[1]


@pytest.mark.parametrize("name", POLICIES)
def test_stopped_and_resumed(name: str) -> None:
    """Bitwise, with the private state; without it, from the same weights, to other ones."""
    overrides = asynchronous(*POLICIES[name], *RANDOM, workers=8, devices=2)
    strategy = make(MLP, *overrides)
    state = strategy.from_canonical(start(MLP))
    for step in range(5):
        state, _ = strategy.step(state, strategy.place(make_batch(MLP, step)))
    tree, private = jax.device_get((strategy.to_canonical(state), strategy.to_private(state)))
    assert int(tree["step"]) == 5
    expected = named(on(2, name).tree)
    ends: list[dict[str, Any]] = []
    for given in (private, None):
        other = make(MLP, *overrides)
        state = other.from_canonical(tree, given)
        begun = named(other.to_canonical(state)["params"])
        for path, x in named(tree["params"]).items():
            np.testing.assert_allclose(begun[path], x, 1e-6, 1e-7)
        for step in range(5, NUM_STEPS):
            state, _ = other.step(state, other.place(make_batch(MLP, step)))
        # As `advance`, which goes to the canonical state and back.
        ends.append(named(jax.device_get(other.to_canonical(other.from_canonical(other.to_canonical(state))))))
    for path, x in expected.items():
        np.testing.assert_array_equal(ends[0][path], x, path)
    if name != "sync":  # where nothing is on its way
        assert any((ends[1][path] != x).any() for path, x in expected.items())


def test_another_strategy_goes_on_with_it_and_it_with_another() -> None:
    overrides = asynchronous(*POLICIES["async"], *RANDOM, workers=8, devices=2)
    first = advance(make(MLP, *overrides), MLP, start(MLP), 0, 5)
    then = advance(make(MLP, *SINGLE), MLP, first.tree, 5)
    back = advance(make(MLP, *overrides), MLP, advance(make(MLP, *SINGLE), MLP, start(MLP), 0, 5).tree, 5)
    for got in (then, back):
        assert int(got.tree["step"]) == NUM_STEPS and np.all(np.isfinite(got.losses))
        counts = [int(x) for path, x in named(got.tree["optimizer"]).items() if "count" in path]
        assert NUM_STEPS in counts or max(counts) > NUM_STEPS


def test_the_learning_rate_is_that_of_the_steps_of_the_run() -> None:
    """However many updates are made: the counter of the schedule is the step, not their number."""
    got = named(on(1, "async").tree["optimizer"])
    counts = sorted(int(x) for path, x in got.items() if path.endswith("['count']"))
    assert counts == [NUM_STEPS, 8 * NUM_STEPS]  # the schedule's, and Adam's


@pytest.mark.parametrize("cures", ["", "adaptive_dc_asgd,staleness_aware"])
def test_a_gradient_that_is_not_finite_changes_nothing(cures: str) -> None:
    strategy = make(MLP, *asynchronous("policy=async", f"cures={cures}", workers=8, devices=1))
    state = strategy.from_canonical(start(MLP))
    batch = make_batch(MLP, 0)
    batch["weights"] = np.where(np.arange(len(batch["weights"])) == 3, np.inf, batch["weights"]).astype(np.float32)
    state, metrics = strategy.step(state, strategy.place(batch))
    assert not bool(metrics.finite)
    for path, x in named(strategy.to_canonical(state)["params"]).items():
        np.testing.assert_array_equal(x, named(start(MLP)["params"])[path])
    _, metrics = strategy.step(state, strategy.place(make_batch(MLP, 1)))
    assert bool(metrics.finite)


def test_evaluation_is_that_of_the_single_device() -> None:
    tree, batch = start(MLP), make_batch(MLP, 3)
    sums = []
    for overrides in (SINGLE, asynchronous("policy=async", devices=2), asynchronous("policy=local_sgd", devices=2)):
        strategy = make(MLP, *overrides)
        sums.append(strategy.evaluate(strategy.from_canonical(tree), strategy.place(batch)))
    np.testing.assert_allclose(sums[1], sums[0], 1e-6)
    np.testing.assert_allclose(sums[2], sums[0], 1e-6)


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_said_of_it(name: str) -> None:
    strategy = make(MLP, *asynchronous(*POLICIES[name], workers=8, devices=2))
    on = strategy.describe()
    assert on.layout.startswith(f"{POLICIES[name][0].removeprefix('policy=')} of 8 workers") and on.num_replicas == 2
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(start(MLP)["params"]))
    assert [parts["parameters"] for parts in on.memory] == [4 * size if "interval" in str(POLICIES[name]) else size] * 2
    programs = strategy.compile()
    assert len(programs) == 2
