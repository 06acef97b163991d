"""References for compressors in NumPy: vectors after compression and decompression, in their own dtype."""

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np

Lossy = Callable[[np.ndarray], np.ndarray]


def min_max_uint8(x: np.ndarray) -> np.ndarray:
    """Apply Bagua's formula: s = 255 / (max - min + 1e-7), u = rint(max s), l = u - 255, q = min(rint(x s), u) - l."""
    s = x.dtype.type(255) / (x.max() - x.min() + x.dtype.type(1e-7))
    upper = np.rint(x.max() * s)
    lower = upper - 255
    q = np.clip(np.minimum(np.rint(x * s), upper) - lower, 0, 255)
    return (q + lower) / s


def in_blocks(block: int, lossy: Lossy, dtype: type[np.floating] = np.float32) -> Lossy:
    """Return the function that applies `lossy` to blocks of this many elements (0: all), in this dtype."""

    def lossy_blocks(x: np.ndarray) -> np.ndarray:
        size = block or len(x)
        parts = [lossy(x[start : start + size].astype(dtype)) for start in range(0, len(x), size)]
        return np.concatenate(parts).astype(x.dtype)

    return lossy_blocks


def scale_of(part: np.ndarray, top: float) -> np.floating:
    """Return s = max |x| / top, but no denormal number."""
    return max(np.abs(part).max() / np.float32(top), np.finfo(np.float32).tiny)


def absmax_int8(block: int) -> Lossy:
    """Return the rounding of x / s to the integers from -127 to 127, times s = max |x| / 127, in blocks."""
    return in_blocks(block, lambda part: np.rint(part / scale_of(part, 127)) * scale_of(part, 127))


def float8(dtype: str, block: int) -> Lossy:
    """Return the rounding of x / s to float8, times s = max |x| / the largest float8, in blocks."""

    def lossy(part: np.ndarray) -> np.ndarray:
        scale = scale_of(part, float(ml_dtypes.finfo(dtype).max))
        return (part / scale).astype(dtype).astype(np.float32) * scale

    return in_blocks(block, lossy)


def onebit(norm: str, block: int) -> Lossy:
    def lossy(part: np.ndarray) -> np.ndarray:
        scale = np.abs(part).mean() if norm == "mean" else np.linalg.norm(part) / math.sqrt(len(part))
        return np.where(part >= 0, scale, -scale)

    return in_blocks(block, lossy, np.float64)


def topk(number: int) -> Lossy:
    """Return a lossy top-k; of equal values, the first ones are sent."""

    def lossy(x: np.ndarray) -> np.ndarray:
        largest = sorted(range(len(x)), key=lambda i: -abs(x[i]))[:number]
        result = np.zeros_like(x)
        result[largest] = x[largest]
        return result

    return lossy


class Feedback:
    """A sender with error feedback: it adds the residual of previous vectors to the next one."""

    def __init__(self, lossy: Lossy, on: bool = True):
        self.lossy, self.on, self.residual = lossy, on, np.zeros(())

    def __call__(self, x: np.ndarray) -> np.ndarray:
        x = x + self.residual.astype(x.dtype)
        sent = self.lossy(x)
        self.residual = (x - sent if self.on else np.zeros_like(x)).astype(x.dtype)
        return sent


class Servers:
    """`scatter_gather` among n workers, each of which is the server of one shard."""

    def __init__(self, n: int, length: int, worker: Lossy, server: Lossy, feedback: bool):
        self.n, self.length = n, length
        self.workers = [[Feedback(worker, feedback) for _ in range(n)] for _ in range(n)]  # by worker, shard
        self.servers = [Feedback(server, feedback) for _ in range(n)]

    def mean(self, x_NL: np.ndarray) -> np.ndarray:
        shards = np.pad(x_NL, ((0, 0), (0, -self.length % self.n))).reshape(self.n, self.n, -1)
        result = []
        for shard, server in enumerate(self.servers):
            sent = [self.workers[worker][shard](shards[worker, shard]) for worker in range(self.n)]
            result.append(server(np.mean(sent, axis=0)))
        return np.concatenate(result)[: self.length]
