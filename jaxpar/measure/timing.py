"""Times calls of functions that compute with JAX."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax

Key = TypeVar("Key", bound=Hashable)


def seconds_in_turn(calls: Mapping[Key, Callable[[], Any]], rounds: int) -> dict[Key, float]:
    """Return the median seconds of each call, made in alternating rounds; the first one compiles and does not count."""
    times: dict[Key, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            if number:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}
