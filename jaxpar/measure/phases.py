"""Measures the seconds spent in each phase of a run and records when it last made progress."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator


class Phases:
    """A timer of the phases of a run. Phases do not nest.

    Attributes:
      seconds: time spent in each phase.
      counts: how many times each phase was completed.
      name: the current phase, or `after PHASE` between two phases.
      step: the current step.
      began_at: time at which the current phase began, in seconds of time.monotonic.
      alive_at: time of the last progress, in seconds of time.monotonic, for jaxpar/launch/watchdog.py.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self.name, self.step = "setup", 0
        self.began_at = time.monotonic()
        self.alive()

    def alive(self) -> None:
        """Record that the run is making progress."""
        self.alive_at = time.monotonic()

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
