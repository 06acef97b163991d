"""Data-parallel step time / single-device step time, on the same batch and the same cores.

    scripts/python scripts/bench/data_parallel.py [--config=configs/quickstart.py] [--config.KEY=VALUE ...]

Every strategy steps in turn, many rounds over, so that a slow moment of the machine hits all of
them; the medians are compared. Batches lie on the devices already.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from jaxpar import config as configs
from jaxpar import data, mesh, models, optimizer, strategies
from jaxpar.step import Problem

ROUNDS = 40
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
    rows = data.Batches(dataset.train, batch_size=config.batch_size, seed=0, shuffle=True).batch(0)
    running: dict[str, list[Any]] = {}
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for variant, more in VARIANTS.items():
        own = configs.load(name)
        configs.override(own, [*overrides, *more])
        problem = Problem(models.build(own, dataset.info), optimizer.build(own, lambda step: 1e-3), 1)
        strategy = strategies.build(own, problem)
        running[variant] = [strategy, strategy.init(jax.random.key(0)), strategy.place(rows)]
    for _ in range(ROUNDS):
        for variant, item in running.items():
            strategy, state, batch = item
            start = time.perf_counter()
            item[1], metrics = strategy.step(state, batch)
            jax.block_until_ready((item[1], metrics))
            times[variant].append(time.perf_counter() - start)
    base = statistics.median(times["single"])
    print(f"{name}: batch {rows['inputs'].shape}, {jax.device_count()} {jax.devices()[0].device_kind} devices")
    for variant, seconds in times.items():
        print(f"{variant:26} {statistics.median(seconds) / base:.3f} of single's step time")


if __name__ == "__main__":
    main(sys.argv[1:])
