"""Compiler options of the programs with the products of a model."""

import pytest

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


def test_an_option_that_xla_does_not_know_is_left_out() -> None:
    assert first_known(UNKNOWN, {}) == {}
    with pytest.raises(RuntimeError, match="XLA knows none of the options xla_no_such_option"):
        first_known(UNKNOWN)
