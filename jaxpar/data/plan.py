"""The plan of an epoch: which examples its batches hold, a table made ahead in plain NumPy.

A plan is int64 [S,B]: example b of batch s of the epoch, -1 at fillers. Every example
is in it exactly once and S = ceil(examples / B). Examples of like length share a batch, so that
short ones are not padded to the length of long ones:

    shuffle all  ->  windows of 64 batches  ->  sort each by length  ->  cut into batches  ->  shuffle the batches

The shuffles draw from (seed, epoch) alone, raw bits of Philox, which NumPy keeps stable.
Dims: N examples, S batches of an epoch, B examples of a batch.
"""

import numpy as np

WINDOW = 64  # batches: enough that a batch's lengths are nearly equal, few enough that batches stay random


def shuffled(lengths_N: np.ndarray | None, num_examples: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """The plan of one epoch of training. lengths_N None: all are of one length."""
    bits = np.random.Philox(np.random.SeedSequence((seed, epoch, 0)))
    order_N = _permutation(bits, num_examples)
    if lengths_N is not None:
        window_N = np.arange(num_examples) // (WINDOW * batch_size)
        order_N = order_N[np.lexsort((lengths_N[order_N], window_N))]
    plan_SB = _cut(order_N, batch_size)
    return plan_SB[_permutation(bits, len(plan_SB))]


def in_order(lengths_N: np.ndarray | None, num_examples: int, batch_size: int) -> np.ndarray:
    """The plan of an evaluation: all examples by length (equal ones as they stand)."""
    order_N = np.arange(num_examples) if lengths_N is None else np.argsort(lengths_N, kind="stable")
    return _cut(order_N, batch_size)


def bucket(length: int, buckets: tuple[int, ...]) -> int:
    """The least of the ascending `buckets` that holds `length`."""
    return next(size for size in buckets if size >= length)


def _permutation(bits: np.random.Philox, count: int) -> np.ndarray:
    return np.argsort(bits.random_raw(count), kind="stable")


def _cut(order_N: np.ndarray, batch_size: int) -> np.ndarray:
    num_batches = -(-len(order_N) // batch_size)
    plan = np.full(num_batches * batch_size, -1, np.int64)
    plan[: len(order_N)] = order_N
    return plan.reshape(num_batches, batch_size)
