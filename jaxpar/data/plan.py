"""The plan of an epoch: a NumPy table of the examples in each of its batches.

A plan is int64 [S,B]: the index of example b of batch s of the epoch, or -1 for a padding example. Every example occurs
exactly once, and S = ceil(examples / B). Examples of similar length share a batch, so that short examples are not
padded to the length of long ones:

    shuffle all  ->  windows of 64 batches  ->  sort each by length  ->  cut into batches  ->  shuffle the batches

The shuffles depend on (seed, epoch) alone. They use the raw bits of Philox, which stay the same across NumPy versions.
Dims: N examples, S batches of an epoch, B examples of a batch.
"""

import numpy as np

WINDOW = 64  # in batches: large enough for nearly equal lengths in a batch, small enough for random batches


def shuffled(lengths_N: np.ndarray | None, num_examples: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the plan of one training epoch. If lengths_N is None, all examples have the same length."""
    bits = np.random.Philox(np.random.SeedSequence((seed, epoch, 0)))
    order_N = _permutation(bits, num_examples)
    if lengths_N is not None:
        window_N = np.arange(num_examples) // (WINDOW * batch_size)
        order_N = order_N[np.lexsort((lengths_N[order_N], window_N))]
    plan_SB = _cut(order_N, batch_size)
    return plan_SB[_permutation(bits, len(plan_SB))]


def in_order(lengths_N: np.ndarray | None, num_examples: int, batch_size: int) -> np.ndarray:
    """Return the plan of an evaluation: all examples, stably sorted by length."""
    order_N = np.arange(num_examples) if lengths_N is None else np.argsort(lengths_N, kind="stable")
    return _cut(order_N, batch_size)


def bucket(length: int, buckets: tuple[int, ...]) -> int:
    """Return the smallest of the ascending `buckets` that is at least `length`."""
    return next(size for size in buckets if size >= length)


def _permutation(bits: np.random.Philox, count: int) -> np.ndarray:
    return np.argsort(bits.random_raw(count), kind="stable")


def _cut(order_N: np.ndarray, batch_size: int) -> np.ndarray:
    num_batches = -(-len(order_N) // batch_size)
    plan = np.full(num_batches * batch_size, -1, np.int64)
    plan[: len(order_N)] = order_N
    return plan.reshape(num_batches, batch_size)
