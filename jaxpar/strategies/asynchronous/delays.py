"""Durations in virtual seconds: the time to compute a gradient, and the time of a message in flight.

Every worker has two random streams of its own, one for computing and one for communication. The k-th time of a worker
therefore depends only on the seed, the worker and k: not on how many times are drawn, nor on other workers.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpar.errors import UserError
from jaxpar.files import open_text, unreadable
from jaxpar.strategies.asynchronous.table import read_rows

DISTRIBUTIONS = ("constant", "uniform", "lognormal", "pareto", "trace")
LARGEST_DELAY = 1e9  # of times and factors; the least time is its reciprocal
MAX_SIGMA = 10.0  # of lognormal: e**-MAX_SIGMA**2 does not underflow
DRAW_SIZE = 1024  # random numbers per draw
COMPUTE, COMMUNICATION = range(2)  # random streams

MeasuredTimes = tuple[tuple[float, ...], ...]  # measured seconds, by worker


class Delays(NamedTuple):
    """Durations of gradients and messages. All times are in virtual seconds."""

    distribution: str = "constant"  # distribution of the time to compute a gradient; one of DISTRIBUTIONS
    compute_time: float = 1.0  # its mean. It must be 1 for a trace, which has its own times
    # uniform: times are compute_time x (1 +- spread); lognormal: the standard deviation of the logarithm;
    # pareto: the shape (if it is more than 1, the mean is finite; if more than 2, also the variance)
    spread: float = 0.0
    slowdown: float = 1.0  # the last worker takes this many times as long to compute, but not to send messages
    communication_time: float = 0.0  # time of a one-way message without jitter
    jitter: float = 0.0  # a message takes communication_time x (1 + jitter x e), e an exponential variable of mean 1
    trace: MeasuredTimes = ()  # for 'trace': each worker's measured times, repeated endlessly; workers cycle through it


def delays_obstacle(delays: Delays) -> str | None:
    """Return in one line why the settings are invalid; None if they are valid."""
    kind, spread = delays.distribution, delays.spread
    if kind not in DISTRIBUTIONS:
        return f"distribution is {kind!r}; it must be one of {', '.join(DISTRIBUTIONS)}"
    for name, least in (("compute_time", 1 / LARGEST_DELAY), ("slowdown", 1), ("communication_time", 0), ("jitter", 0)):
        if not least <= getattr(delays, name) <= LARGEST_DELAY:
            return f"{name} is {getattr(delays, name)}; it must be between {least:g} and {LARGEST_DELAY:g}"
    if delays.jitter > 0 and delays.communication_time == 0:
        return f"jitter is {delays.jitter}; it must be 0 if communication_time is 0"
    if kind in ("constant", "trace") and spread != 0:
        return f"spread is {spread}; it must be 0 with distribution {kind!r}"
    if kind == "trace" and delays.compute_time != 1:
        return f"compute_time is {delays.compute_time}; it must be 1 with distribution 'trace', which has its own times"
    if kind == "uniform" and not 0 <= spread < 1:
        return f"spread is {spread}; it must be at least 0 and less than 1 with distribution 'uniform'"
    if kind == "lognormal" and not 0 <= spread <= MAX_SIGMA:
        return f"spread is {spread}; it must be between 0 and {MAX_SIGMA} with distribution 'lognormal'"
    if kind == "pareto" and not 1 < spread < math.inf:
        return f"spread is {spread}; it must be finite and greater than 1 with distribution 'pareto'"
    if kind == "trace" and not (delays.trace and all(delays.trace)):
        return "trace has no times for some worker; it must have at least one for each worker"
    for seconds in itertools.chain(*delays.trace) if kind == "trace" else ():
        if not 0 < seconds < math.inf:
            return f"trace has a time of {seconds}; every time must be finite and greater than 0"
    return None


def mean_compute_time(delays: Delays) -> float:
    """Return the mean time to compute a gradient, for a worker without slowdown."""
    if delays.distribution == "trace":
        return float(np.mean([np.mean(times) for times in delays.trace]))
    return delays.compute_time


def compute_times(delays: Delays, num_workers: int, seed: int) -> list[Iterator[float]]:
    """Return, for each worker, an endless iterator over the times of its gradients."""
    slowdowns = [1.0] * (num_workers - 1) + [delays.slowdown]
    return [_compute_times(delays, worker, seed, slowdown) for worker, slowdown in enumerate(slowdowns)]


def communication_times(delays: Delays, num_workers: int, seed: int) -> list[Iterator[float]]:
    """Return, for each worker, an endless iterator over the times of its messages in both directions."""
    seconds, jitter = delays.communication_time, delays.jitter
    if seconds == 0 or jitter == 0:
        return [itertools.repeat(seconds) for _ in range(num_workers)]

    def draw(generator: np.random.Generator) -> np.ndarray:
        return seconds * (1 + jitter * generator.standard_exponential(DRAW_SIZE))

    return [_drawn(draw, worker, COMMUNICATION, seed) for worker in range(num_workers)]


def _compute_times(delays: Delays, worker: int, seed: int, slowdown: float) -> Iterator[float]:
    kind, mean, spread = delays.distribution, slowdown * delays.compute_time, delays.spread
    if kind == "trace":
        return itertools.cycle([slowdown * seconds for seconds in delays.trace[worker % len(delays.trace)]])
    if kind == "constant":
        return itertools.repeat(mean)

    def draw(generator: np.random.Generator) -> np.ndarray:
        if kind == "uniform":
            return mean * generator.uniform(1 - spread, 1 + spread, DRAW_SIZE)
        if kind == "lognormal":
            return mean * np.exp(spread * generator.standard_normal(DRAW_SIZE) - spread**2 / 2)
        return mean * (1 - 1 / spread) * (1 + generator.pareto(spread, DRAW_SIZE))  # NumPy's starts at 0, not at 1

    return _drawn(draw, worker, COMPUTE, seed)


def _drawn(draw: Callable[[np.random.Generator], np.ndarray], worker: int, stream: int, seed: int) -> Iterator[float]:
    generator = np.random.default_rng((seed, worker, stream))
    while True:
        yield from draw(generator).tolist()


def read_trace(path: Path | str, start: str = "") -> MeasuredTimes:
    """Read measured times from a CSV file with the columns worker and seconds, and one row per gradient.

    Raises UserError for an invalid file. start: of the message.
    """
    times: dict[int, list[float]] = {}
    try:
        with open_text(path) as file:
            lines, rows = read_rows(file, ("worker", "seconds"))
        for line, (worker, seconds) in zip(lines, rows, strict=True):
            if seconds == 0:
                raise ValueError(f"line {line}: seconds is 0; it must be greater than 0")
            times.setdefault(int(worker), []).append(seconds)
        for worker in range(len(times) or 1):
            if worker not in times:
                raise ValueError(f"no times for worker {worker}; workers must be numbered from 0 without gaps")
    except (OSError, ValueError) as error:
        raise UserError(start + unreadable(path, error)) from error
    return tuple(tuple(times[worker]) for worker in range(len(times)))
