"""Helpers that run and inspect the cuts of jaxpar.strategies.pipeline.executor.split_backward."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from jaxpar.measure.flops import forward_flops
from jaxpar.strategies.pipeline.executor.split_backward import Cut, Origin


def given(sources: Sequence[Origin], leaves: Sequence[Any], action: int) -> list[Any]:
    """Return the inputs that a phase receives, with None in place of the others."""
    return [
        leaf if isinstance(source, str) or source == action else None
        for source, leaf in zip(sources, leaves, strict=True)
    ]


def readable(saved: dict[tuple[int, int], Any], action: int) -> dict[tuple[int, int], Any]:
    """Return the saved values that a phase may read."""
    return {key: values for key, values in saved.items() if key[0] < action <= key[1]}


def run_actions(cut: Cut, sources: Sequence[Origin], leaves: Sequence[Any]) -> list[list[jax.Array]]:
    """Return the outputs of each phase. A phase receives only the values that the engine would pass to it."""
    saved: dict[tuple[int, int], Any] = {}
    results = []
    for action, run in enumerate(cut.run):
        outputs, made = run(given(sources, leaves, action), readable(saved, action))
        assert all(key[0] == action for key in made)
        saved |= made
        results.append(outputs)
    described = {key: [(value.shape, value.dtype) for value in values] for key, values in saved.items()}
    assert described == {key: [(value.shape, value.dtype) for value in values] for key, values in cut.saved.items()}
    return results


def flops_of(cut: Cut, sources: Sequence[Origin], leaves: Sequence[Any]) -> list[int]:
    """Return the FLOPs of each phase."""
    return [
        forward_flops(run, given(sources, leaves, action), readable(cut.saved, action))
        for action, run in enumerate(cut.run)
    ]


def primitives(cut: Cut, sources: Sequence[Origin], leaves: Sequence[Any], action: int) -> Counter[str]:
    """Count the operations of a phase by name, including nested ones."""
    arguments = given(sources, leaves, action), readable(cut.saved, action)
    return Counter(_names(jax.make_jaxpr(cut.run[action])(*arguments).jaxpr))


def _names(jaxpr: core.Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
                if isinstance(inner, core.Jaxpr):
                    yield from _names(inner)
