"""Code shared by benchmarks of training steps: the command line, and timing steps in alternating rounds."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar import data, models, strategies, tasks
from jaxpar.cluster import find_cluster
from jaxpar.command_line import Parser
from jaxpar.core import optimizer
from jaxpar.core.step import Metrics, Problem, abstract
from jaxpar.tasks import mean_loss


class Contender(Protocol):
    """A `Strategy` to time, or the part of one that timing needs."""

    @property
    def init(self) -> Callable[[jax.Array], Any]:
        """Function from a key to a state."""

    @property
    def place(self) -> Callable[[Mapping[str, np.ndarray]], Any]:
        """Function from a batch to the batch on devices."""

    @property
    def step(self) -> Callable[[Any, Any], tuple[Any, Metrics]]:
        """Function from (state, batch) to (state, metrics)."""


class Timing(NamedTuple):
    """The step times of one contender."""

    seconds: float  # median
    cpu_seconds: float  # median CPU time of all threads of this process; meaningful on CPUs only
    first_loss: float


def arguments_of(description: str | None) -> tuple[str, list[str]]:
    """Return the name of the config (--config, by default the quickstart) and the overrides of the command line."""
    parser = Parser(description)
    parser.add_argument("--config", default="configs/quickstart.py", help="config file as PATH[:PRESET]")
    arguments, overrides = parser.parse_with_overrides()
    return arguments.config, overrides


def make_problem(
    config: ConfigDict, info: data.DataInfo, batch: Mapping[str, np.ndarray], *, lr: float = 1e-3
) -> Problem:
    """Return the problem of a config, with a constant learning rate."""
    transform = optimizer.make_optimizer(config, lambda _step: lr)
    model, shapes = models.build(config, info, find_cluster()), abstract(dict(batch))
    return Problem(model, transform, config.optimizer.accumulation_steps, shapes, 1000, tasks.find_task(config))


def measure(
    configs: Mapping[str, ConfigDict], info: data.DataInfo, batch: Mapping[str, np.ndarray], *, rounds: int
) -> dict[str, Timing]:
    """Time a step of each config on the same batch, in alternating rounds."""
    contenders = {name: strategies.make(config, make_problem(config, info, batch)) for name, config in configs.items()}
    return race(contenders, batch, rounds=rounds)


def race(
    contenders: Mapping[str, Contender],
    batch: Mapping[str, np.ndarray],
    *,
    rounds: int,
    warm_up: int = 2,
    steps: int = 1,
) -> dict[str, Timing]:
    """Time a step of each contender on the same batch.

    A round is a number of steps, of which the host enqueues each before the last one is complete.

    Rounds alternate between contenders, so that a slow phase of the machine affects all of them. The batch is on the
    devices before the timing starts. The first `warm_up` rounds do not count; the first round compiles.
    """
    running: dict[str, list[Any]] = {
        name: [contender, contender.init(jax.random.key(0)), contender.place(batch)]
        for name, contender in contenders.items()
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    for number in range(rounds + warm_up):
        for name, item in running.items():
            contender, state, placed = item
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(steps):
                state, metrics = contender.step(state, placed)
            jax.block_until_ready((state, metrics))
            item[1] = state
            if number >= warm_up:
                seconds = time.perf_counter() - start, time.process_time() - cpu_start
                times[name].append((seconds[0] / steps, seconds[1] / steps))
            losses.setdefault(name, float(mean_loss(metrics.sums.loss, metrics.sums.weight)))
    medians = {name: [statistics.median(values) for values in zip(*times[name], strict=True)] for name in contenders}
    return {name: Timing(seconds, cpu, losses[name]) for name, (seconds, cpu) in medians.items()}
