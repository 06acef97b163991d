"""The global batch at step t as a function of (seed, t) alone, and the loader that makes batches ahead."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np

from jaxpar.data import plan
from jaxpar.data.examples import Arrays, Split

_EPOCHS_KEPT = 2  # at the turn of an epoch, loader threads work on both sides


class Batches:
    """The batches of a split, step by step, epoch after epoch.

    Attributes:
      batch_size: rows of a batch.
      steps_per_epoch: ceil(examples / batch_size); what is left over makes one of them, its missing rows at weight 0.
      examples_per_epoch: each comes exactly once an epoch.
    """

    def __init__(self, split: Split, *, batch_size: int, seed: int, shuffle: bool):
        """shuffle: for training, in random order, augmented; or else for evaluation, by length, every epoch alike."""
        self._split = split
        self.batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._plans: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()
        self._lengths_N = split.lengths_N
        self.examples_per_epoch = len(split)
        self.steps_per_epoch = -(-len(split) // batch_size)

    def batch(self, step: int, rows: slice = slice(None), *, numbered: bool = False) -> Arrays:
        """The batch of step `step` >= 0, or only these rows of it: a host's share. See jaxpar.data for the keys.

        numbered: also `examples`, int64 [R]: the number of the example in each row, -1 in a filler row.
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        examples_B = self._plan(epoch)[place]
        is_real_B = examples_B >= 0
        examples_B = np.where(is_real_B, examples_B, examples_B[0])  # a filler row repeats the first, at weight 0
        batch = self._gather(examples_B, rows, drawn_at=step if self._shuffle else place)
        is_real_R = is_real_B[rows]
        batch["weights"] *= is_real_R.reshape(-1, *[1] * (batch["weights"].ndim - 1))
        if numbered:
            batch["examples"] = np.where(is_real_R, examples_B[rows], -1)
        return batch

    def longest(self) -> Arrays:
        """A batch of the longest example alone: no other has a larger shape."""
        longest = 0 if self._lengths_N is None else int(self._lengths_N.argmax())
        return self._gather(np.full(self.batch_size, longest), slice(None), drawn_at=0)

    def examples_before(self, step: int) -> int:
        """The number of examples in the batches of steps [0, step); filler rows do not count."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return epoch * self.examples_per_epoch + int((self._plan(epoch)[:place] >= 0).sum())

    def planned(self, start: int, stop: int) -> np.ndarray:
        """The examples of the batches [start, stop), of one epoch, filler rows left out."""
        epoch, place = divmod(start, self.steps_per_epoch)
        examples_SB = self._plan(epoch)[place : place + stop - start]
        return examples_SB[examples_SB >= 0]

    def loader(
        self,
        start: int,
        stop: int,
        *,
        rows: slice = slice(None),
        numbered: bool = False,
        num_threads: int = 1,
        prefetch: int = 8,
    ) -> Iterator[Arrays]:
        """The batches of steps [start, stop), in order, made ahead by `num_threads` threads (0: none)."""
        import grain  # here: it takes half a second to import

        if stop <= start:
            return iter(())
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch)
        return iter(grain.MapDataset.source(_Steps(self, start, stop, rows, numbered)).to_iter_dataset(options))

    def _gather(self, examples_B: np.ndarray, rows: slice, *, drawn_at: int) -> Arrays:
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, drawn_at, 1))))
        batch = self._split.gather(examples_B, rows, random, training=self._shuffle)
        return {**batch, "index": np.arange(self.batch_size, dtype=np.int32)[rows]}

    def _plan(self, epoch: int) -> np.ndarray:
        with self._lock:
            key = epoch if self._shuffle else 0
            if key not in self._plans:
                self._plans[key] = self._make_plan(key)
                for old in sorted(self._plans, key=lambda made: abs(made - key))[_EPOCHS_KEPT:]:
                    del self._plans[old]
            return self._plans[key]

    def _make_plan(self, epoch: int) -> np.ndarray:
        if self._shuffle:
            return plan.shuffled(self._lengths_N, self.examples_per_epoch, self.batch_size, self._seed, epoch)
        return plan.in_order(self._lengths_N, self.examples_per_epoch, self.batch_size)


@dataclass(frozen=True)
class _Steps:
    """A random-access source for grain: item i is the batch of step start + i."""

    batches: Batches
    start: int
    stop: int
    rows: slice
    numbered: bool

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: SupportsIndex) -> Arrays:
        return self.batches.batch(self.start + int(index), self.rows, numbered=self.numbered)
