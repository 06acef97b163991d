"""Strategies: the ways to train a problem on devices. Each has a folder here, and an entry in STRATEGIES (registry.py).

The functions of registry.py are imported on first use: schedules and the decisions of swarms need no JAX.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpar.strategies.registry import STRATEGIES as STRATEGIES
    from jaxpar.strategies.registry import build as build
    from jaxpar.strategies.registry import check_elastic as check_elastic
    from jaxpar.strategies.registry import check_other_sections as check_other_sections
    from jaxpar.strategies.registry import decide as decide
    from jaxpar.strategies.registry import in_flight_bytes as in_flight_bytes
    from jaxpar.strategies.registry import make as make
    from jaxpar.strategies.registry import padded_batch_size as padded_batch_size
    from jaxpar.strategies.registry import plan as plan
    from jaxpar.strategies.registry import possible as possible
    from jaxpar.strategies.strategy import Strategy as Strategy


def __getattr__(name: str) -> Any:
    """Import a name of registry.py. Python asks for a module of this folder here before it imports it."""
    if name.startswith("_") or find_spec(f"{__name__}.{name}"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("jaxpar.strategies.registry"), name)
