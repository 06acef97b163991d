"""Selects the cases of a test that every run of the suite has. `scripts/test -m slow` runs the others."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_except(fast: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the parameters of a test, those that are not in `fast` marked as slow. A plain tuple is several ones."""
    return [case if case in fast else slow(case) for case in cases]


def slow(case: Any) -> Any:
    """Mark one case as slow."""
    values = case if type(case) is tuple else (case,)  # a NamedTuple is one parameter
    return pytest.param(*values, marks=pytest.mark.slow)
