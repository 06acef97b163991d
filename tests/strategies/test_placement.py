"""Compiler options of the programs with the products of a model."""

import jax
import numpy as np
import pytest

from jaxpar import strategies
from jaxpar.strategies import placement
from jaxpar.strategies.placement import OWN_PRODUCTS, first_known, product_options
from tests.strategies.pipelines import Task, make_config, make_problem

UNKNOWN = {"xla_no_such_option": True}


def test_only_large_models_change_the_library_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task("mlp", "classification", layers=2)
    model = make_problem(make_config(task), task).model
    assert product_options(model) == {}
    monkeypatch.setattr(placement, "LARGE_MODEL", 10)
    assert product_options(model) == OWN_PRODUCTS


@pytest.mark.parametrize("strategy", ["async_data_parallel", "swarm"])
def test_live_and_emulated_workers_compile_with_the_options(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an option that XLA does not know, their first step fails."""
    task = Task("mlp", "classification", layers=2)
    config = make_config(task)
    config.strategy = strategy
    problem = make_problem(config, task)
    monkeypatch.setattr(placement, "LARGE_MODEL", 10)
    monkeypatch.setattr(placement, "_own_products", lambda: UNKNOWN)
    made = strategies.make(config, problem)
    batch = {name: np.zeros(x.shape, x.dtype) for name, x in problem.batch.items()}
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        made.step(made.init(jax.random.key(0)), made.place(batch))


def test_an_option_that_xla_does_not_know_is_left_out() -> None:
    assert first_known(UNKNOWN, {}) == {}
    with pytest.raises(RuntimeError, match="XLA knows none of the options xla_no_such_option"):
        first_known(UNKNOWN)
