"""The table of a policy and of delays: who computes which gradient from which weights, and when.

    sync           all workers read the same version; an update when all have arrived
    async          an update for every gradient, on arrival (ASP)
    ssp            async, but no worker begins more than `bound` iterations ahead of the slowest (Ho et al., "More
                   Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013)
    softsync       an update for every floor(workers / `groups`) gradients (Zhang et al., "Staleness-aware Async-SGD for
                   Distributed Deep Learning", 2016: n-softsync)
    local_sgd      all read the same version, make `interval` steps of their own, and meet (Stich, 2019)
    diloco         the same table (Douillard et al., 2023)
    model_average  workers train on while an averaging of their weights is under way (Bagua: Gan et al., 2021)

A gradient costs a pull (one message), computing, and a push (one message). Its version is the one that the server has
when the pull ends. What happens at the same time happens in the order of workers, and a worker does all it can before
the next one moves: with equal workers and no communication, each reads the weights that its own gradient has made.
"""

import heapq
import math
from collections.abc import Iterator

import numpy as np

from jaxpar.asynchronous.delays import Delays, check_delays, communication_times, compute_times, mean_compute_time
from jaxpar.asynchronous.table import ROUNDING, UpdateTable

POLICIES = ("sync", "async", "ssp", "softsync", "local_sgd", "diloco", "model_average")

WorkerTimes = list[Iterator[float]]  # by worker
TableColumns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # worker, read, update, start, finish


def simulate(
    policy: str,
    *,
    num_workers: int,
    num_gradients: int,
    delays: Delays | None = None,
    seed: int = 0,
    bound: int = 0,
    groups: int = 1,
    interval: int = 1,
) -> UpdateTable:
    """The first rows of the endless run of a policy: a longer run begins with the same rows.

    Args:
      policy: one of POLICIES.
      num_workers: n of them.
      num_gradients: rows of the table.
      delays: how long things take; one second a gradient where None.
      seed: of the random delays.
      bound: of ssp: 0 is lock step.
      groups: of softsync, 1 to n; n is async.
      interval: of local_sgd and diloco, steps from one meeting to the next; of model_average, from the beginning of an
        averaging to that of the next, in mean compute times.

    Raises:
      ValueError: one line: a setting that cannot be. Those that the policy does not use are not looked at.
    """
    delays = Delays() if delays is None else delays
    check_delays(delays)
    settings = {"seed": seed, "bound": bound, "groups": groups, "interval": interval}
    if reason := simulation_obstacle(policy, num_workers=num_workers, num_gradients=num_gradients, **settings):
        raise ValueError(reason)
    compute = compute_times(delays, num_workers, seed)
    communication = communication_times(delays, num_workers, seed)
    if policy == "model_average":
        made = _averagings(compute, communication, num_gradients, interval * mean_compute_time(delays))
    elif policy in ("sync", "local_sgd", "diloco"):
        made = _rounds(compute, communication, num_gradients, 1 if policy == "sync" else interval)
    else:
        size = num_workers // groups if policy == "softsync" else 1
        made = _server(compute, communication, num_gradients, size, bound if policy == "ssp" else math.inf)
    return _table(num_workers, num_gradients, made)


def _table(num_workers: int, num_gradients: int, made: TableColumns) -> UpdateTable:
    """The first rows of what a policy made."""
    worker, read, update, start, finish = (column[:num_gradients] for column in made)
    chunk = np.arange(num_gradients, dtype=np.int32)
    step = chunk // np.int32(num_workers)
    return UpdateTable(
        num_workers, worker.astype("i4"), read.astype("i4"), update.astype("i4"), chunk, step, start, finish
    )


def simulation_obstacle(
    policy: str,
    *,
    num_workers: int,
    num_gradients: int,
    seed: int = 0,
    bound: int = 0,
    groups: int = 1,
    interval: int = 1,
) -> str | None:
    """Return in one line why a policy cannot be of these settings, as in `simulate`; None where it can."""
    if policy not in POLICIES:
        return f"policy is {policy!r}; it must be {', '.join(POLICIES)}"
    for name, value, least in (("num_workers", num_workers, 1), ("num_gradients", num_gradients, 1), ("seed", seed, 0)):
        if value < least:
            return f"{name} is {value}; it must be at least {least}"
    if policy == "ssp" and bound < 0:
        return f"bound is {bound}; it must be at least 0"
    if policy == "softsync" and not 1 <= groups <= num_workers:
        return f"groups is {groups}; it must be at least 1 and at most {num_workers}, the number of workers"
    if policy in ("local_sgd", "diloco", "model_average") and interval < 1:
        return f"interval is {interval}; it must be at least 1"
    return None


def _server(
    compute: WorkerTimes, communication: WorkerTimes, num_gradients: int, size: int, bound: float
) -> TableColumns:
    """async, ssp, softsync: a server makes an update of every `size` gradients, and workers go on as `bound` lets them.

    A gradient that waits for others of its update finishes with the update; its worker goes on from its arrival.
    """
    n = len(compute)
    events = [(next(communication[worker]), worker) for worker in range(n)]  # a worker's next: a pull or a push ends
    heapq.heapify(events)
    is_pulling, versions, starts = [True] * n, [0] * n, [0.0] * n
    done, least, num_least = [0] * n, 0, n  # gradients by worker; their minimum; how many workers have no more
    waiting: list[int] = []
    rows: list[tuple[int, int, float, float]] = []
    while len(rows) < num_gradients or len(rows) % size:
        now, worker = events[0]
        if is_pulling[worker]:
            is_pulling[worker], versions[worker] = False, len(rows) // size
            heapq.heapreplace(events, (now + next(compute[worker]) + next(communication[worker]), worker))
            continue
        heapq.heappop(events)
        rows.append((worker, versions[worker], starts[worker], now))
        done[worker] += 1
        waiting.append(worker)
        may_begin = [worker]
        if done[worker] == least + 1:
            num_least -= 1
            if num_least == 0:  # the slowest has moved: look at all who wait
                least += 1
                num_least = done.count(least)
                may_begin = waiting.copy()
        for other in may_begin:
            if done[other] - least <= bound:
                waiting.remove(other)
                is_pulling[other], starts[other] = True, now
                heapq.heappush(events, (now + next(communication[other]), other))
    workers, read, start, arrival = map(np.array, zip(*rows, strict=True))
    return workers, read, np.arange(len(rows)) // size, start, np.repeat(arrival[size - 1 :: size], size)


def _rounds(compute: WorkerTimes, communication: WorkerTimes, num_gradients: int, interval: int) -> TableColumns:
    """sync, local_sgd, diloco: a round is a pull, `interval` steps and a push of every worker; the last one ends it.

    Rows of a round are in the order of steps, then of workers. Gradients of a step finish when all workers have made
    it, and those of the last step when all have arrived, so that `finish` never decreases; `start` is the worker's own.
    """
    n = len(compute)
    num_steps = -(-num_gradients // n)
    interval = min(interval, num_steps + 1)  # of a first round that is cut off, no more steps than rows
    num_rounds = -(-num_steps // interval)
    messages = _taken(communication, 2 * num_rounds).reshape(num_rounds, 2, n)
    times = np.concatenate(
        [messages[:, :1], _taken(compute, num_rounds * interval).reshape(num_rounds, interval, n)], 1
    )
    ends = np.cumsum(times, axis=1)  # [round, pull and steps, worker], from the round's beginning
    begins = np.concatenate([np.zeros((num_rounds, 1, n)), ends[:, 1:-1]], 1)
    ends[:, -1] += messages[:, 1]
    finish = ends[:, 1:].max(axis=2)
    round_ends = np.cumsum(finish[:, -1])
    round_begins = np.concatenate([[0.0], round_ends[:-1]])[:, None]
    version = np.repeat(np.arange(num_rounds), interval * n)
    return (
        np.tile(np.arange(n), num_rounds * interval),
        version,
        version,
        (round_begins[:, None] + begins).reshape(-1),
        np.repeat((round_begins + finish).reshape(-1), n),
    )


def _taken(times: WorkerTimes, count: int) -> np.ndarray:
    """[count, worker]: the next times of every worker."""
    return np.stack([np.fromiter(worker, float, count) for worker in times], axis=1)


def _averagings(compute: WorkerTimes, communication: WorkerTimes, num_gradients: int, period: float) -> TableColumns:
    """model_average: workers never wait, and an averaging begins with every period, at the earliest.

    One begins at a multiple of `period` if the last one has ended and some gradient has finished since it began. It
    takes the weights that workers have then: a gradient that is under way is not in them. It lasts until the slowest
    worker's two messages are through, and each worker takes it in before its next gradient.

    `read` counts averagings that the worker has taken in, `update` those that begin before the gradient finishes.
    """
    n = len(compute)
    events = [(next(compute[worker]), worker, 0.0) for worker in range(n)]
    heapq.heapify(events)
    rows: list[tuple[int, float, float]] = []
    while len(rows) < num_gradients:
        now, worker, begun = events[0]
        rows.append((worker, begun, now))
        heapq.heapreplace(events, (now + next(compute[worker]), worker, now))
    workers, start, finish = map(np.array, zip(*rows, strict=True))
    late = 1 + ROUNDING  # sums of compute times meet multiples of the period
    begins, ends = [0.0], [0.0]
    while begins[-1] * late < finish[-1]:
        ready = max(ends[-1], finish[np.searchsorted(finish, begins[-1] * late, side="right")])
        tick = math.floor(ready / late / period)
        while tick * period * late < ready:
            tick += 1
        begins.append(tick * period)
        ends.append(begins[-1] + max(next(worker) + next(worker) for worker in communication))
    update = np.searchsorted(np.array(begins[1:]) * late, finish)
    read = np.searchsorted(np.array(ends[1:]), start * late)
    read = np.minimum(read, update)  # where a gradient is shorter than the rounding
    return workers, read, update, start, finish
