"""The global batch at step t as a function of (seed, t) alone, and a loader that prefetches batches in threads.

The order of an epoch is int64 [S,B]: the index of example b of batch s, or -1 for a padding example. Every example
occurs exactly once, and S = ceil(examples / B). Examples of similar length share a batch, so that short examples are
not padded to the length of long ones:

    shuffle all  ->  windows of 64 batches  ->  sort each by length  ->  cut into batches  ->  shuffle the batches

The shuffles depend on (seed, epoch) alone. They use the raw bits of Philox, which stay the same across NumPy versions.
Dims: N examples, S batches of an epoch, B examples of a batch, R examples of a shard.
"""

import threading
from collections.abc import Iterator
from functools import partial

import numpy as np

from jaxpar.data.examples import Arrays, Split

WINDOW = 64  # in batches: large enough for nearly equal lengths in a batch, small enough for random batches
_MAX_ORDERS = 2  # in epochs: at an epoch boundary, loader threads work on the epochs before and after it


class Batches:
    """The batches of a split, step by step, epoch after epoch."""

    def __init__(self, split: Split, *, batch_size: int, seed: int, shuffle: bool, padded_size: int = 0):
        """Create batches for training if `shuffle` (random order, augmented), otherwise for evaluation, by length.

        padded_size: number of examples of a batch with padding examples at its end; 0: batch_size, without them.
        """
        self._split = split
        self.batch_size = batch_size  # includes the padding examples of the batch with the remainder of an epoch
        self.padded_size = padded_size or batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()
        self._lengths_N = split.lengths_N
        self.examples_per_epoch = len(split)  # each occurs exactly once per epoch
        # One batch of an epoch holds the remainder and is filled up with padding examples, which have weight 0.
        self.steps_per_epoch = -(-len(split) // batch_size)

    def batch(self, step: int, shard: slice = slice(None), *, with_example_ids: bool = False) -> Arrays:
        """Return the batch of step `step` >= 0, or the given shard of it. See jaxpar.data for the keys.

        shard: a slice of the padded batch.

        with_example_ids: also return `example_ids`, int64 [R], each example's index in the split, or -1 for padding.
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        examples_B = self._order(epoch)[place]
        is_real_B = examples_B >= 0
        examples_B = np.where(is_real_B, examples_B, examples_B[0])  # padding: the first example, with weight 0
        positions_R = np.arange(self.padded_size)[shard]
        first_R = np.minimum(positions_R, self.batch_size - 1)  # padding: the last example, with weight 0
        gathered = slice(first_R[0], first_R[-1] + 1)
        batch = self._gather(examples_B, gathered, drawn_at=step if self._shuffle else place)
        if len(positions_R) > gathered.stop - gathered.start:
            batch = {name: x[first_R - gathered.start] for name, x in batch.items()}
        is_real_R = is_real_B[first_R] & (positions_R < self.batch_size)
        batch["weights"] *= is_real_R.reshape(-1, *[1] * (batch["weights"].ndim - 1))
        if with_example_ids:
            batch["example_ids"] = np.where(is_real_R, examples_B[first_R], -1)
        return batch

    def longest(self) -> Arrays:
        """Return a batch of the largest shape: read-only views of the longest example, which take its memory alone."""
        longest = 0 if self._lengths_N is None else int(self._lengths_N.argmax())
        example = self._gather(np.array([longest]), slice(None), drawn_at=0)
        return {name: np.broadcast_to(x, (self.padded_size, *x.shape[1:])) for name, x in example.items()}

    def examples_before(self, step: int) -> int:
        """Return the number of examples in the batches of steps [0, step), without padding examples."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return epoch * self.examples_per_epoch + int((self._order(epoch)[:place] >= 0).sum())

    def planned(self, start: int, stop: int) -> np.ndarray:
        """Return the indices of the examples in the batches of steps [start, stop) of one epoch, without padding."""
        epoch, place = divmod(start, self.steps_per_epoch)
        examples_SB = self._order(epoch)[place : place + stop - start]
        return examples_SB[examples_SB >= 0]

    def loader(
        self,
        start: int,
        stop: int,
        *,
        shard: slice = slice(None),
        with_example_ids: bool = False,
        num_threads: int = 1,
        prefetch: int = 8,
    ) -> Iterator[Arrays]:
        """Return an iterator over the batches of steps [start, stop), in order.

        `num_threads` threads prefetch up to `prefetch` batches; with 0 threads, nothing is prefetched.
        """
        import grain  # imported lazily: it takes half a second

        if stop <= start:
            return iter(())
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch)
        batch = partial(self.batch, shard=shard, with_example_ids=with_example_ids)
        return iter(grain.MapDataset.range(start, stop).map(batch).to_iter_dataset(options))

    def _gather(self, examples_B: np.ndarray, shard: slice, *, drawn_at: int) -> Arrays:
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, drawn_at, 1))))
        batch = self._split.gather(examples_B, shard, random, training=self._shuffle)
        return {**batch, "index": np.arange(len(examples_B), dtype=np.int32)[shard]}

    def _order(self, epoch: int) -> np.ndarray:
        with self._lock:
            key = epoch if self._shuffle else 0
            if key not in self._orders:
                lengths_N, size = self._lengths_N, self.batch_size
                if self._shuffle:
                    order = shuffled(lengths_N, self.examples_per_epoch, size, self._seed, epoch)
                else:
                    order = in_order(lengths_N, self.examples_per_epoch, size)
                self._orders[key] = order
                for old in sorted(self._orders, key=lambda made: abs(made - key))[_MAX_ORDERS:]:
                    del self._orders[old]
            return self._orders[key]


def shuffled(lengths_N: np.ndarray | None, num_examples: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of one training epoch. If lengths_N is None, all examples have the same length."""
    bits = np.random.Philox(np.random.SeedSequence((seed, epoch, 0)))
    order_N = _permutation(bits, num_examples)
    if lengths_N is not None:
        window_N = np.arange(num_examples) // (WINDOW * batch_size)
        order_N = order_N[np.lexsort((lengths_N[order_N], window_N))]
    order_SB = _cut(order_N, batch_size)
    return order_SB[_permutation(bits, len(order_SB))]


def in_order(lengths_N: np.ndarray | None, num_examples: int, batch_size: int) -> np.ndarray:
    """Return the order of an evaluation: all examples, stably sorted by length."""
    order_N = np.arange(num_examples) if lengths_N is None else np.argsort(lengths_N, kind="stable")
    return _cut(order_N, batch_size)


def _permutation(bits: np.random.Philox, count: int) -> np.ndarray:
    return np.argsort(bits.random_raw(count), kind="stable")


def _cut(order_N: np.ndarray, batch_size: int) -> np.ndarray:
    num_batches = -(-len(order_N) // batch_size)
    order = np.full(num_batches * batch_size, -1, np.int64)
    order[: len(order_N)] = order_N
    return order.reshape(num_batches, batch_size)
