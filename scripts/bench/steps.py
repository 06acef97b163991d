"""The common part of benchmarks of training steps: their command line, and the timing of steps in turn."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar import data, models, optimizer, strategies, tasks
from jaxpar.cluster import find_cluster
from jaxpar.step import Metrics, Problem, abstract
from jaxpar.tasks import mean_loss


class Contender(Protocol):
    """A `Strategy` that is timed, or the part of one that the timing needs."""

    @property
    def init(self) -> Callable[[jax.Array], Any]:
        """Key -> state."""

    @property
    def place(self) -> Callable[[Mapping[str, np.ndarray]], Any]:
        """Batch -> batch on devices."""

    @property
    def step(self) -> Callable[[Any, Any], tuple[Any, Metrics]]:
        """(state, batch) -> (state, metrics)."""


class Timing(NamedTuple):
    """The times of one contender's steps."""

    seconds: float  # median
    cpu_seconds: float  # of all threads of this process, median: where it is not a GPU that computes
    first_loss: float


def arguments_of(arguments: list[str]) -> tuple[str, list[str]]:
    """The config's name, the quickstart's unless --config= gives another, and the overrides."""
    name = next((a.removeprefix("--config=") for a in arguments if a.startswith("--config=")), "configs/quickstart.py")
    return name, [a for a in arguments if not a.startswith("--config=")]


def make_problem(config: ConfigDict, info: data.DataInfo, batch: Mapping[str, np.ndarray]) -> Problem:
    """The problem of a config, at a constant learning rate."""
    transform = optimizer.make_optimizer(config, lambda _step: 1e-3)
    model, shapes = models.build(config, info, find_cluster()), abstract(dict(batch))
    return Problem(model, transform, config.optimizer.accumulation_steps, shapes, 1000, tasks.find_task(config))


def measure(
    configs: Mapping[str, ConfigDict], info: data.DataInfo, batch: Mapping[str, np.ndarray], *, rounds: int
) -> dict[str, Timing]:
    """Times a step of each config on the same batch, in turn."""
    contenders = {name: strategies.make(config, make_problem(config, info, batch)) for name, config in configs.items()}
    return race(contenders, batch, rounds=rounds)


def race(
    contenders: Mapping[str, Contender], batch: Mapping[str, np.ndarray], *, rounds: int, warm_up: int = 2
) -> dict[str, Timing]:
    """Times a step of each on the same batch, in turn, so that a slow moment of the machine hits all of them.

    The batch lies on the devices already. The first `warm_up` rounds, the first of which compiles, do not count.
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
            item[1], metrics = contender.step(state, placed)
            jax.block_until_ready((item[1], metrics))
            if number >= warm_up:
                times[name].append((time.perf_counter() - start, time.process_time() - cpu_start))
            losses.setdefault(name, float(mean_loss(metrics.sums.loss, metrics.sums.weight)))
    medians = {name: [statistics.median(values) for values in zip(*times[name], strict=True)] for name in contenders}
    return {name: Timing(seconds, cpu, losses[name]) for name, (seconds, cpu) in medians.items()}
