"""Simulations tick by tick, or round by round, in whole seconds: slow, and independent of the simulation under test."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxpar.strategies.asynchronous.delays import Delays
from jaxpar.strategies.asynchronous.table import COLUMNS, UpdateTable

TIMED = ("worker", "read", "update", "start", "finish")


def rows(table: UpdateTable, columns: Sequence[str] = COLUMNS) -> list[tuple[Any, ...]]:
    return list(zip(*(getattr(table, column).tolist() for column in columns), strict=True))


def whole_times(seed: int) -> Iterator[tuple[int, list[list[int]], int]]:
    """Yield (workers, times of their gradients, time of a message)."""
    rng = np.random.default_rng(seed)
    for n in (1, 2, 3, 5):
        for most in (2, 4, 9):
            for communication in (0, 1, 3):
                yield n, rng.integers(1, most, (n, 23)).tolist(), communication


def whole_delays(times: list[list[int]], communication: int) -> Delays:
    return Delays("trace", communication_time=communication, trace=tuple(tuple(map(float, row)) for row in times))


def server_by_ticks(
    times: list[list[int]], communication: int, num_gradients: int, size: int, bound: float
) -> list[tuple[int, ...]]:
    """Return rows (worker, read, update, start, finish). At each tick of a clock, workers move in order if they can."""
    n = len(times)
    phase, left = ["wait"] * n, [0] * n
    done, version, start = [0] * n, [0] * n, [0] * n
    arrived: list[tuple[int, int, int, int]] = []
    now = 0

    def move(worker: int) -> bool:
        if phase[worker] == "wait" and done[worker] - min(done) <= bound:
            phase[worker], left[worker], start[worker] = "pull", communication, now
            version[worker] = len(arrived) // size
        elif phase[worker] == "wait" or left[worker]:
            return False
        elif phase[worker] == "pull":
            phase[worker], left[worker] = "compute", times[worker][done[worker] % len(times[worker])]
        elif phase[worker] == "compute":
            phase[worker], left[worker] = "push", communication
        else:
            arrived.append((worker, version[worker], start[worker], now))
            done[worker] += 1
            phase[worker] = "wait"
        return True

    while len(arrived) < num_gradients + size:
        while any(move(worker) for worker in range(n)):
            pass
        now += 1
        left = [max(0, time - 1) for time in left]
    result: list[tuple[int, ...]] = []
    for i, (worker, read, begun, _) in enumerate(arrived[:num_gradients]):
        update = i // size
        result.append((worker, read, update, begun, arrived[update * size + size - 1][3]))
    return result


def rounds_one_by_one(
    times: list[list[int]], communication: int, num_gradients: int, interval: int
) -> list[tuple[int, ...]]:
    """Return rows (worker, read, update, start, finish) of local SGD."""
    result: list[tuple[int, ...]] = []
    begin = version = 0
    while len(result) < num_gradients:
        now = [begin + communication] * len(times)
        for step in range(version * interval, (version + 1) * interval):
            is_first, is_last = step == version * interval, step == (version + 1) * interval - 1
            starts = [begin] * len(times) if is_first else now
            now = [t + row[step % len(row)] for t, row in zip(now, times, strict=True)]
            finish = max(now) + communication * is_last
            result += [(worker, version, version, start, finish) for worker, start in enumerate(starts)]
        begin, version = max(now) + communication, version + 1
    return result[:num_gradients]


def averaging_by_ticks(
    times: list[list[int]], communication: int, num_gradients: int, period: float
) -> list[tuple[int, ...]]:
    """Return rows (worker, read, update, start, finish). Weights are sets of gradients; each worker has a local set.

    A second has 60 ticks. In a tick, gradients finish first. Then an averaging ends, and another may begin (and end, if
    there is no communication). Then gradients begin.
    """
    n = len(times)
    finished: list[list[int]] = [[] for _ in range(n)]  # by worker: the rows of its gradients
    started, read = [0] * n, [0] * n
    left = [60 * row[0] for row in times]
    made: list[tuple[int, int, int, int]] = []
    update: dict[int, int] = {}
    begun = ended = 0
    ends_at = -1
    now = 0
    while len(update) < num_gradients:
        ending = [worker for worker in range(n) if left[worker] == 0]
        for worker in ending:
            finished[worker].append(len(made))
            made.append((worker, read[worker], started[worker], now))
        if now == ends_at:
            ended += 1
        is_done = ended == begun
        fresh = [row for rows_of in finished for row in rows_of if row not in update]
        if now and now % round(60 * period) == 0 and is_done and fresh:
            update |= dict.fromkeys(fresh, begun)
            begun += 1
            ends_at = now + 2 * 60 * communication
            ended += ends_at == now
        for worker in ending:
            read[worker], started[worker] = ended, now
            left[worker] = 60 * times[worker][len(finished[worker]) % len(times[worker])]
        now += 1
        left = [time - 1 for time in left]
    result: list[tuple[int, ...]] = []
    for i, (worker, seen, start, end) in enumerate(made[:num_gradients]):
        result.append((worker, seen, update[i], start // 60, end // 60))
    return result
