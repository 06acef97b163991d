"""Measures seconds: of the phases of a run, which also record its last progress, and of functions that use JAX."""

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

import jax

Key = TypeVar("Key", bound=Hashable)


class Phases:
    """A timer of the phases of a run. Phases do not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)  # time spent in each phase
        self.counts: dict[str, int] = defaultdict(int)  # how many times each phase was completed
        self.name, self.step = "setup", 0  # the current phase, or `after PHASE` between two phases; the current step
        self.began_at = time.monotonic()  # of the current phase
        self.alive()

    def alive(self) -> None:
        """Record that the run is making progress."""
        self.alive_at = time.monotonic()  # for jaxpar/launch/watchdog.py

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time inside the `with` block to phase `name`."""
        start = time.perf_counter()
        self.began_at = time.monotonic()
        self.name = name
        self.alive()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start
            self.counts[name] += 1
            self.name = f"after {name}"
            self.alive()

    def clock(self, *names: str) -> Callable[[], float]:
        """Return a function that returns the seconds spent in phases `names` since its last call."""
        before = sum(self.seconds[name] for name in names)

        def read() -> float:
            nonlocal before
            now = sum(self.seconds[name] for name in names)
            seconds, before = now - before, now
            return seconds

        return read


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
