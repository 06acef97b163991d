"""Loads this process's shard of the batches and evaluates a model on a whole split."""

from collections.abc import Iterator

import jax
import numpy as np

from jaxpar import data
from jaxpar.launch import processes
from jaxpar.run.build import Run, StrategyState
from jaxpar.tasks import add_up

IN_FLIGHT = 2  # evaluation batches in flight, enough to keep the device from waiting for the host


def load_batches(
    run: Run, batches: data.Batches, start: int, stop: int, *, with_example_ids: bool = False
) -> Iterator[dict[str, np.ndarray]]:
    """Load this process's shard of the batches [start, stop) in the background, as `data.Batches.loader` does."""
    c = run.config.data
    shard = processes.local_shard(run.strategy.devices, run.plan.num_replicas, batches.batch_size)
    return batches.loader(
        start, stop, shard=shard, with_example_ids=with_example_ids, num_threads=c.num_threads, prefetch=c.prefetch
    )


def evaluate_split(run: Run, state: StrategyState, split: data.Split) -> dict[str, float]:
    """Return the metrics of the whole split. state: the strategy's state."""
    size = run.config.eval.batch_size or run.config.batch_size
    batches = data.Batches(split, batch_size=size, seed=run.config.seed, shuffle=False)
    with run.phases("eval"):
        sums = []
        for number, batch in enumerate(load_batches(run, batches, 0, batches.steps_per_epoch)):
            sums.append(run.strategy.evaluate(state, run.strategy.place(batch)))
            if number >= IN_FLIGHT:
                jax.block_until_ready(sums[number - IN_FLIGHT])
            run.phases.alive()  # after waiting, so that this also shows progress of the devices
        total = add_up(jax.device_get(sums))
    return run.problem.task.all_metrics(total)
