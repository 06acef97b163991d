"""What the benchmarks of training steps share: their command line, and the timing of steps in turn."""

import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar import data, models, optimizer, strategies
from jaxpar.step import Problem, abstract


class Timing(NamedTuple):
    """Of one config's steps."""

    seconds: float  # median
    first_loss: float


def arguments_of(arguments: list[str]) -> tuple[str, list[str]]:
    """The config's name, the quickstart's unless --config= gives another, and the overrides."""
    name = next((a.removeprefix("--config=") for a in arguments if a.startswith("--config=")), "configs/quickstart.py")
    return name, [a for a in arguments if not a.startswith("--config=")]


def measure(
    configs: Mapping[str, ConfigDict], info: data.DataInfo, rows: Mapping[str, np.ndarray], *, rounds: int
) -> dict[str, Timing]:
    """Times a step of each config on the same rows, in turn, so that a slow moment of the machine hits all of them.

    The rows lie on the devices already. The first two rounds, which compile, do not count.
    """
    running: dict[str, list[Any]] = {}
    for name, config in configs.items():
        transform = optimizer.build(config, lambda step: 1e-3)
        accumulation = config.optimizer.accumulation_steps
        problem = Problem(models.build(config, info), transform, accumulation, abstract(dict(rows)))
        strategy = strategies.build(config, problem)
        running[name] = [strategy, strategy.init(jax.random.key(0)), strategy.place(rows)]
    times: dict[str, list[float]] = {name: [] for name in configs}
    losses: dict[str, float] = {}
    for number in range(rounds + 2):
        for name, item in running.items():
            strategy, state, batch = item
            start = time.perf_counter()
            item[1], metrics = strategy.step(state, batch)
            jax.block_until_ready((item[1], metrics))
            if number >= 2:
                times[name].append(time.perf_counter() - start)
            losses.setdefault(name, float(metrics.sums.loss / metrics.sums.weight))
    return {name: Timing(statistics.median(times[name]), losses[name]) for name in configs}
