"""Data-parallel step time / single-device step time, on the same batch and the same cores.

    scripts/python scripts/bench/data_parallel.py [--config=configs/quickstart.py] [--config.KEY=VALUE ...]

One batch of each padded length that the data has. Every strategy steps in turn, many rounds over, so that a slow
moment of the machine hits all of them; the medians are compared, and their sum weighted by how often an epoch
has each length. Batches lie on the devices already.
"""

import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar import config as configs
from jaxpar import data, mesh, models, optimizer, strategies
from jaxpar.step import Problem

ROUNDS = 30
VARIANTS = {
    "single": ["--config.strategy=single"],
    "data_parallel, sharding": ["--config.strategy=data_parallel"],
    "data_parallel, pmap": ["--config.strategy=data_parallel", "--config.data_parallel.implementation=pmap"],
}


def main(arguments: list[str]) -> None:
    """Prints the ratios."""
    name = next((a.removeprefix("--config=") for a in arguments if a.startswith("--config=")), "configs/quickstart.py")
    overrides = [a for a in arguments if not a.startswith("--config=")]
    config = configs.load(name)
    configs.override(config, overrides)
    mesh.start(config, data.cache_dir(config) / "xla")
    with tempfile.TemporaryDirectory() as folder:
        dataset = data.load(config, Path(folder))
    batches = data.Batches(dataset.train, batch_size=config.batch_size, seed=0, shuffle=True)
    rows, counts = {}, Counter[int]()
    for step in range(batches.steps_per_epoch):
        batch = batches.batch(step)
        counts[batch["inputs"].shape[1]] += 1
        rows[batch["inputs"].shape[1]] = batch
    print(f"{name}: batches of {config.batch_size}, {jax.device_count()} {jax.devices()[0].device_kind} devices")
    totals = dict.fromkeys(VARIANTS, 0.0)
    for length in sorted(rows):
        medians = measure(name, overrides, dataset.info, rows[length])
        ratios = "  ".join(f"{variant}: {medians[variant] / medians['single']:.3f}" for variant in VARIANTS)
        print(f"length {length} ({counts[length] / batches.steps_per_epoch:.0%} of the steps)  {ratios}")
        totals = {variant: total + counts[length] * medians[variant] for variant, total in totals.items()}
    print("an epoch  " + "  ".join(f"{variant}: {totals[variant] / totals['single']:.3f}" for variant in VARIANTS))


def measure(name: str, overrides: list[str], info: data.DataInfo, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Median seconds of a step by variant."""
    running: dict[str, list[Any]] = {}
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for variant, more in VARIANTS.items():
        own = configs.load(name)
        configs.override(own, [*overrides, *more])
        problem = Problem(models.build(own, info), optimizer.build(own, lambda step: 1e-3), 1)
        strategy = strategies.build(own, problem)
        running[variant] = [strategy, strategy.init(jax.random.key(0)), strategy.place(rows)]
    for number in range(ROUNDS + 2):
        for variant, item in running.items():
            strategy, state, batch = item
            start = time.perf_counter()
            item[1], metrics = strategy.step(state, batch)
            jax.block_until_ready((item[1], metrics))
            if number >= 2:  # the first ones compile
                times[variant].append(time.perf_counter() - start)
    return {variant: statistics.median(seconds) for variant, seconds in times.items()}


if __name__ == "__main__":
    main(sys.argv[1:])
