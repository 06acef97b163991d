"""A training step with cuDNN's attention / with XLA's, and how far their losses differ. Needs a GPU.

    scripts/python scripts/bench/attention.py [--config.KEY=VALUE ...]

BERT base in bfloat16 on synthetic texts of 512 tokens, half of them padding, unless overridden.
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

ROUNDS = 20
DEFAULTS = [
    "--config.model.size=base",
    "--config.model.dtype=bfloat16",
    "--config.data.source=synthetic",
    "--config.data.max_length=512",
    "--config.data.length_buckets=512",
    "--config.batch_size=32",
    "--config.mesh.data=1",
]


def main(arguments: list[str]) -> None:
    """Prints both differences."""
    running: dict[str, list[Any]] = {}
    times: dict[str, list[float]] = {"xla": [], "cudnn": []}
    losses: dict[str, float] = {}
    for kernel in times:
        config = configs.load("configs/default.py")
        configs.override(config, [*DEFAULTS, *arguments, f"--config.model.attention={kernel}"])
        mesh.start(config, data.cache_dir(config) / "xla")
        with tempfile.TemporaryDirectory() as folder:
            dataset = data.load(config, Path(folder))
        rows = data.Batches(dataset.train, batch_size=config.batch_size, seed=0, shuffle=True).batch(0)
        problem = Problem(models.build(config, dataset.info), optimizer.build(config, lambda step: 1e-4), 1)
        strategy = strategies.build(config, problem)
        running[kernel] = [strategy, strategy.init(jax.random.key(0)), strategy.place(rows)]
    for number in range(ROUNDS + 2):
        for kernel, item in running.items():
            strategy, state, batch = item
            start = time.perf_counter()
            item[1], metrics = strategy.step(state, batch)
            jax.block_until_ready((item[1], metrics))
            if number >= 2:  # the first ones compile
                times[kernel].append(time.perf_counter() - start)
            losses.setdefault(kernel, float(metrics.sums.loss / metrics.sums.weight))
    ratio = statistics.median(times["cudnn"]) / statistics.median(times["xla"])
    print(f"{jax.devices()[0].device_kind}: cudnn / xla step time {ratio:.3f}; first losses {losses}")


if __name__ == "__main__":
    main(sys.argv[1:])
