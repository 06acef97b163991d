"""Durations, in virtual seconds: of computing a gradient, and of a message in flight.

Every worker has two private streams of random numbers, one for computing and one for communication. So the k-th time
of a worker depends on the seed and on k alone: not on how many times are asked for, nor on other workers.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpar.asynchronous.table import read_rows
from jaxpar.errors import UserError
from jaxpar.files import unreadable

DISTRIBUTIONS = ("constant", "uniform", "lognormal", "pareto", "trace")
MAX_SIGMA = 10.0  # of lognormal: e**-MAX_SIGMA**2 is still a number
BLOCK = 1024  # numbers that are drawn at once
COMPUTE, COMMUNICATION = range(2)  # streams

MeasuredTimes = tuple[tuple[float, ...], ...]  # measured seconds, by worker


class Delays(NamedTuple):
    """Durations of gradients and messages. All times are in virtual seconds.

    Args:
      distribution: of a gradient's time; one of DISTRIBUTIONS.
      compute_time: its mean. A trace has its own.
      spread: of uniform, times are compute_time x (1 +- spread); of lognormal, the standard deviation of the logarithm;
        of pareto, its shape (more than 1: the mean is finite; more than 2: the variance).
      slowdown: of the last worker, whose gradients take so many times longer. Communication does not.
      communication_time: of a message without jitter, one way.
      jitter: a message takes communication_time x (1 + jitter x e), with e exponential of mean 1.
      trace: of distribution trace: the worker's measured times, in order and then from the start. Workers beyond those
        of the trace reuse them in turn.
    """

    distribution: str = "constant"
    compute_time: float = 1.0
    spread: float = 0.0
    slowdown: float = 1.0
    communication_time: float = 0.0
    jitter: float = 0.0
    trace: MeasuredTimes = ()


def check_delays(delays: Delays) -> None:
    """Raise ValueError, in one line, unless the settings can be."""
    if reason := delays_obstacle(delays):
        raise ValueError(reason)


def delays_obstacle(delays: Delays) -> str | None:
    """Return in one line why the settings cannot be; None where they can."""
    kind, spread = delays.distribution, delays.spread
    if kind not in DISTRIBUTIONS:
        return f"distribution is {kind!r}; it must be {', '.join(DISTRIBUTIONS)}"
    if not 0 < delays.compute_time < math.inf:
        return f"compute_time is {delays.compute_time}; it must be finite and more than 0"
    for name, least in (("slowdown", 1), ("communication_time", 0), ("jitter", 0)):
        if not least <= getattr(delays, name) < math.inf:
            return f"{name} is {getattr(delays, name)}; it must be finite and at least {least}"
    if delays.jitter > 0 and delays.communication_time == 0:
        return f"jitter is {delays.jitter}; it must be 0 where communication_time is"
    if kind in ("constant", "trace") and spread != 0:
        return f"spread is {spread}; of {kind} it must be 0"
    if kind == "trace" and delays.compute_time != 1:
        return f"compute_time is {delays.compute_time}; of a trace, which has its own times, it must be 1"
    if kind == "uniform" and not 0 <= spread < 1:
        return f"spread is {spread}; of uniform it must be at least 0 and less than 1"
    if kind == "lognormal" and not 0 <= spread <= MAX_SIGMA:
        return f"spread is {spread}; of lognormal it must be at least 0 and at most {MAX_SIGMA}"
    if kind == "pareto" and not 1 < spread < math.inf:
        return f"spread is {spread}; of pareto it must be finite and more than 1"
    if kind == "trace" and not (delays.trace and all(delays.trace)):
        return "trace has no times of some worker; it must have one or more of each"
    for seconds in itertools.chain(*delays.trace) if kind == "trace" else ():
        if not 0 < seconds < math.inf:
            return f"trace has a time of {seconds}; it must be finite and more than 0"
    return None


def mean_compute_time(delays: Delays) -> float:
    """Return the mean of a worker that is not slowed down."""
    if delays.distribution == "trace":
        return float(np.mean([np.mean(times) for times in delays.trace]))
    return delays.compute_time


def compute_times(delays: Delays, num_workers: int, seed: int) -> list[Iterator[float]]:
    """Return the times of each worker's gradients, one after another without end."""
    slowdowns = [1.0] * (num_workers - 1) + [delays.slowdown]
    return [_compute_times(delays, worker, seed, slowdown) for worker, slowdown in enumerate(slowdowns)]


def communication_times(delays: Delays, num_workers: int, seed: int) -> list[Iterator[float]]:
    """Return the times of each worker's messages, both ways, one after another without end."""
    seconds, jitter = delays.communication_time, delays.jitter
    if seconds == 0 or jitter == 0:
        return [itertools.repeat(seconds) for _ in range(num_workers)]

    def draw(generator: np.random.Generator) -> np.ndarray:
        return seconds * (1 + jitter * generator.standard_exponential(BLOCK))

    return [_drawn(draw, worker, COMMUNICATION, seed) for worker in range(num_workers)]


def _compute_times(delays: Delays, worker: int, seed: int, slowdown: float) -> Iterator[float]:
    kind, mean, spread = delays.distribution, slowdown * delays.compute_time, delays.spread
    if kind == "trace":
        return itertools.cycle([slowdown * seconds for seconds in delays.trace[worker % len(delays.trace)]])
    if kind == "constant":
        return itertools.repeat(mean)

    def draw(generator: np.random.Generator) -> np.ndarray:
        if kind == "uniform":
            return mean * generator.uniform(1 - spread, 1 + spread, BLOCK)
        if kind == "lognormal":
            return mean * np.exp(spread * generator.standard_normal(BLOCK) - spread**2 / 2)
        return mean * (1 - 1 / spread) * (1 + generator.pareto(spread, BLOCK))  # NumPy's is less by the smallest, 1

    return _drawn(draw, worker, COMPUTE, seed)


def _drawn(draw: Callable[[np.random.Generator], np.ndarray], worker: int, stream: int, seed: int) -> Iterator[float]:
    generator = np.random.default_rng((seed, worker, stream))
    while True:
        yield from draw(generator).tolist()


def read_trace(path: Path | str) -> MeasuredTimes:
    """Read measured times from CSV: columns worker and seconds, a row a gradient, workers from 0 without a gap.

    Raises:
      UserError: one line, with the file, and the line where there is one.
    """
    times: dict[int, list[float]] = {}
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            lines, rows = read_rows(file, ("worker", "seconds"))
        for line, (worker, seconds) in zip(lines, rows, strict=True):
            if seconds == 0:
                raise ValueError(f"line {line}: seconds is 0; it must be more than 0")
            times.setdefault(int(worker), []).append(seconds)
        for worker in range(len(times) or 1):
            if worker not in times:
                raise ValueError(f"no times of worker {worker}; workers are numbered from 0, without a gap")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {unreadable(error)}") from error
    return tuple(tuple(times[worker]) for worker in range(len(times)))
