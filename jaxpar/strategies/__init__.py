"""Strategies: the ways to train a problem on devices. Each has a folder here, and an entry in STRATEGIES (registry.py).

The functions of registry.py are imported on first use: schedules and the decisions of swarms need no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpar.strategies.registry import STRATEGIES as STRATEGIES
    from jaxpar.strategies.registry import build as build
    from jaxpar.strategies.registry import check_other_sections as check_other_sections
    from jaxpar.strategies.registry import decide as decide
    from jaxpar.strategies.registry import in_flight_bytes as in_flight_bytes
    from jaxpar.strategies.registry import make as make
    from jaxpar.strategies.registry import plan as plan
    from jaxpar.strategies.registry import possible as possible
    from jaxpar.strategies.strategy import Strategy as Strategy

_FUNCTIONS = ("build", "check_other_sections", "decide", "in_flight_bytes", "make", "plan", "possible")


def __getattr__(name: str) -> Any:
    """Import a function of registry.py on first use."""
    if name not in ("STRATEGIES", "Strategy", *_FUNCTIONS):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("jaxpar.strategies.registry"), name)
