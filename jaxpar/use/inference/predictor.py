"""Computes predictions and metrics of a trained model on all its devices, in batches of similar lengths.

Each replica holds all parameters and computes a shard of the batch. Programs are compiled once for each shape of a
batch: the length buckets of the run, and the few `Predictor.sizes`.

Dims: B examples of a batch.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxpar import data
from jaxpar.core import mesh as meshes
from jaxpar.core.mesh import DATA
from jaxpar.errors import UserError
from jaxpar.exchange.reduce import psum_small
from jaxpar.models import Batch, Params
from jaxpar.strategies.placement import batch_placer
from jaxpar.tasks import Prediction, Sums, add_up
from jaxpar.use.inference.load import Trained

BATCHES_AHEAD = 2  # batches in flight, enough to keep the devices from waiting for the host
Item = TypeVar("Item")
Source = TypeVar("Source")  # what the caller knows about a split, such as its rows


class Predictor:
    """The compiled programs of a trained model."""

    def __init__(self, trained: Trained, batch_size: int | None = None):
        """Define the programs. batch_size: is rounded up to a multiple of the replicas; None: that of evaluations."""
        mesh, model, task = trained.mesh, trained.local_model, trained.task
        self.trained = trained
        size = batch_size or trained.config.eval.batch_size or trained.config.batch_size
        self._num_replicas = mesh.shape[DATA]
        self.batch_size = -(-size // self._num_replicas) * self._num_replicas  # the most examples of a batch
        self._place, of_batch = batch_placer(mesh), PartitionSpec(DATA)

        def readout(params: Params, batch: Batch, top_k: int) -> dict[str, jax.Array]:
            def of_replica(params: Params, batch: Batch) -> dict[str, jax.Array]:
                return task.readout(model.outputs(params, batch), batch, top_k)

            read: dict[str, jax.Array] = trained.program(of_replica, (of_batch,), of_batch)(params, batch)
            return read

        def sums(params: Params, batch: Batch) -> Sums:
            total: Sums = psum_small(task.evaluation_sums(model.outputs(params, batch), batch), DATA)
            return total

        self._readout = meshes.one_at_a_time(jax.jit(readout, static_argnums=2), mesh)
        self._sums = meshes.one_at_a_time(jax.jit(trained.program(sums, (of_batch,), PartitionSpec())), mesh)

    @property
    def sizes(self) -> list[int]:
        """The sizes of batches, for each of which a program is compiled: a power of four a replica, or the largest."""
        n = self._num_replicas
        powers = itertools.takewhile(lambda size: size < self.batch_size, (n * 4**e for e in itertools.count()))
        return [*powers, self.batch_size]

    def _size(self, num_examples: int) -> int:
        """Return the size of the batches for a split: the smallest one if a batch of it is enough."""
        return next((size for size in self.sizes if size >= num_examples), self.batch_size)

    def check_top_k(self, name: str, top_k: int) -> None:
        """Raise UserError if the task cannot list that many choices. name: of the option, for the message."""
        task = self.trained.task
        if not isinstance(top_k, int) or top_k < 1 or (top_k > 1 and not task.ranks_choices):
            rule = "an integer of at least 1" if task.ranks_choices else f"1, because the task is {task.name!r}"
            raise UserError(f"{name} is {top_k}; it must be {rule}")

    def stream(
        self, splits: Iterable[tuple[Source, data.Split]], top_k: int = 1
    ) -> Iterator[tuple[Source, list[Prediction]]]:
        """Yield the source of each split, and the predictions for its examples, in order.

        The devices compute the next batches, also those of the next split, while the caller uses the predictions.
        top_k: number of choices that a prediction lists.
        """
        trained = self.trained

        def compute() -> Iterator[tuple[Source, bool, np.ndarray, dict[str, Any], dict[str, jax.Array]]]:
            """Start to compute the readout of each batch."""
            for source, split in splits:
                size, seed = self._size(len(split)), trained.config.seed
                batches = data.Batches(split, batch_size=size, seed=seed, shuffle=False)
                for step in range(batches.steps_per_epoch):
                    batch = batches.batch(step, with_example_ids=True)
                    ids_B = batch.pop("example_ids")  # index of each example in the split, or -1 for padding examples
                    if trained.task.positions:
                        batch["positions"] = trained.task.positions(batch)
                    readout = self._readout(trained.params, self._place(batch), top_k)
                    yield source, step == batches.steps_per_epoch - 1, ids_B, batch, readout

        found: dict[int, Prediction] = {}
        for source, is_last, ids_B, batch, readout in _ahead(compute(), BATCHES_AHEAD):
            predictions = trained.task.predictions(jax.device_get(readout), batch, trained.names)
            found.update(zip(ids_B.tolist(), predictions, strict=True))
            if is_last:
                found.pop(-1, None)
                yield source, [found[number] for number in range(len(found))]
                found = {}

    def metrics(self, split: data.Split) -> dict[str, float]:
        """Return the loss and the metrics of a split with labels, as the evaluations of a run compute them."""
        trained = self.trained
        batches = data.Batches(split, batch_size=self.batch_size, seed=trained.config.seed, shuffle=False)
        steps = (batches.batch(step) for step in range(batches.steps_per_epoch))
        sums = _ahead((self._sums(trained.params, self._place(batch)) for batch in steps), BATCHES_AHEAD)
        return trained.task.all_metrics(add_up([jax.device_get(one) for one in sums]))


def _ahead(items: Iterable[Item], number: int) -> Iterator[Item]:
    """Yield the items, each one when `number` later items have been made, or there are no more."""
    made: deque[Item] = deque()
    for item in items:
        made.append(item)
        if len(made) > number:
            yield made.popleft()
    yield from made
