"""Seconds by phase of a run, and its last sign of life."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator


class Phases:
    """Seconds by phase of the run, and its last sign of life. Phases do not nest.

    Attributes:
      seconds: by phase.
      name: of the phase that the run is in, or `after` and the last one.
      step: that the run is at.
      alive_at: when there was a sign of life, in seconds of time.monotonic; jaxpar/launch/watchdog.py looks at it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.name, self.step = "setup", 0
        self.alive()

    def alive(self) -> None:
        """Give a sign of life."""
        self.alive_at = time.monotonic()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time inside the `with` towards phase `name`."""
        start = time.perf_counter()
        self.name = name
        self.alive()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start
            self.name = f"after {name}"
            self.alive()

    def clock(self, *names: str) -> Callable[[], float]:
        """Return a function that returns the seconds spent in phases `names` since it was last called."""
        before = sum(self.seconds[name] for name in names)

        def read() -> float:
            nonlocal before
            now = sum(self.seconds[name] for name in names)
            seconds, before = now - before, now
            return seconds

        return read
