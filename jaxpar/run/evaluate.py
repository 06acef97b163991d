"""Loads this process's shard of the batches and evaluates a model on a whole split."""

from collections import deque
from collections.abc import Iterator

import jax
import numpy as np

from jaxpar import data
from jaxpar.launch import processes
from jaxpar.run.build import Run, StrategyState
from jaxpar.tasks import Sums, add_up

IN_FLIGHT = 2  # evaluation batches in flight, enough to keep the device from waiting for the host


def load_batches(
    run: Run, batches: data.Batches, start: int, stop: int, *, with_example_ids: bool = False
) -> Iterator[dict[str, np.ndarray]]:
    """Load this process's shard of the batches [start, stop) in the background, as `data.Batches.loader` does."""
    c = run.config.data
    shard = processes.local_shard(run.strategy.devices, run.plan.num_replicas, batches.padded_size)
    return batches.loader(
        start, stop, shard=shard, with_example_ids=with_example_ids, num_threads=c.num_threads, prefetch=c.prefetch
    )


def evaluate_split(run: Run, state: StrategyState, split: data.Split) -> Sums:
    """Return the task's evaluation sums over the whole split, on the host. state: the strategy's state."""
    size = run.config.eval.batch_size or run.config.batch_size
    padded = -(-size // run.plan.num_replicas) * run.plan.num_replicas
    batches = data.Batches(split, batch_size=size, seed=run.config.seed, shuffle=False, padded_size=padded)
    total: list[Sums] = []  # one, of the batches so far
    in_flight: deque[Sums] = deque()  # on the devices
    with run.phases("eval"):
        for batch in load_batches(run, batches, 0, batches.steps_per_epoch):
            in_flight.append(run.strategy.evaluate(state, run.strategy.place(batch)))
            if len(in_flight) > IN_FLIGHT:
                total = [add_up([*total, jax.device_get(in_flight.popleft())])]
            run.phases.alive()  # after waiting, so that this also shows progress of the devices
        return add_up([*total, *map(jax.device_get, in_flight)])
