"""The learning rate of an update is that of its step of the run, which is the one that is logged.

Optax counts updates instead. After steps without an update, or with several, this count is not the number of steps.
"""

from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.core.state import Canonical
from jaxpar.strategies import Strategy
from tests.strategies.pipelines import NUM_STEPS, Task, make, make_batch, named, shared, start
from tests.strategies.test_exchanges import option, replicated

TASK = Task("mlp", "classification", "sgd", layers=2)
RATES = "--config.optimizer.schedule=linear", "--config.optimizer.lr=0.5", "--config.optimizer.warmup=0"
PLAIN = "--config.optimizer.momentum=0", "--config.optimizer.clip_norm=0", "--config.model.dropout=0"
SINGLE = (*RATES, *PLAIN, "--config.optimizer.nonfinite=skip")
PIPEDREAM = "--config.strategy=pipeline", "--config.pipeline.schedule=pipedream", "--config.mesh.stage=3"
ASYNC = "--config.strategy=async_data_parallel", "--config.asynchronous.num_workers=4"


def scheduled(step: int) -> float:
    """Return the learning rate of a step, counted from 0, worked out by hand."""
    return 0.5 * (1 - step / NUM_STEPS)


def take(strategy: Strategy[Any], state: Any, *batches: dict[str, np.ndarray]) -> Any:
    for batch in batches:
        state, _ = strategy.step(state, strategy.place(batch))
    return state


def moved(before: Canonical, after: Canonical) -> np.ndarray:
    """Return the update of all parameters, as a vector."""
    old, new = named(before["params"]), named(after["params"])
    return np.concatenate([(new[name].astype(np.float64) - old[name]).reshape(-1) for name in old])


def rate_of(strategy: Strategy[Any], tree: Canonical, step: int) -> float:
    """Return the learning rate with which SGD applies the gradient of the batch of this step, from this state."""
    like = shared(TASK, *PLAIN, "--config.optimizer.schedule=constant", "--config.optimizer.lr=1", *RATES[2:])
    batch = make_batch(TASK, step)
    got, gradient = (
        moved(tree, jax.device_get(one.to_canonical(take(one, one.from_canonical(tree), batch))))
        for one in (strategy, like)
    )
    np.testing.assert_allclose(got, gradient * (gradient @ got) / (gradient @ gradient), rtol=1e-3, atol=1e-6)
    return float(gradient @ got / (gradient @ gradient))


@pytest.mark.parametrize("others", [PIPEDREAM, ASYNC], ids=["discarded batches", "several updates in a step"])
def test_after_another_strategy(others: tuple[str, ...]) -> None:
    before = make(TASK, *others, *RATES, *PLAIN)
    state = take(before, before.from_canonical(start(TASK, *PLAIN)), *(make_batch(TASK, step) for step in range(5)))
    tree = jax.device_get(before.to_canonical(state))
    assert rate_of(shared(TASK, *SINGLE), tree, 5) == pytest.approx(scheduled(5), rel=1e-4)


def test_after_a_skipped_step() -> None:
    strategy, bad = shared(TASK, *SINGLE), make_batch(TASK, 1)
    bad["weights"] = np.full_like(bad["weights"], np.inf)
    state = take(strategy, strategy.from_canonical(start(TASK, *PLAIN)), make_batch(TASK, 0), bad)
    assert rate_of(strategy, jax.device_get(strategy.to_canonical(state)), 2) == pytest.approx(scheduled(2), rel=1e-4)


def test_of_several_passes() -> None:
    """Two passes of one batch, from the same weights, have twice its gradient; the second pass applies it."""
    strategy = make(TASK, *replicated("horovod", option("backward_passes_per_step", 2), n=2), *RATES, *PLAIN)
    state, trees = strategy.from_canonical(start(TASK, *PLAIN)), [start(TASK)]
    for step in range(4):
        state = take(strategy, state, make_batch(TASK, step // 2))
        trees.append(jax.device_get(strategy.to_canonical(state)))
    one = shared(TASK, *PLAIN, "--config.optimizer.schedule=constant", "--config.optimizer.lr=1", *RATES[2:])
    gradient = moved(trees[2], one.to_canonical(take(one, one.from_canonical(trees[2]), make_batch(TASK, 1))))
    np.testing.assert_allclose(moved(trees[2], trees[4]), 2 * gradient * scheduled(3), rtol=1e-3, atol=1e-6)
    assert not moved(trees[2], trees[3]).any()
