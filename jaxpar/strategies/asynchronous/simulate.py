"""Simulates a policy and returns its table: who computes which gradient from which weights, and when.

    sync           all workers read the same version; an update when all gradients have arrived
    async          an update for every gradient, on arrival (ASP)
    ssp            async, but no worker begins more than `bound` iterations ahead of the slowest (Ho et al., "More
                   Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013)
    softsync       an update for every floor(workers / `groups`) gradients (Zhang et al., "Staleness-aware Async-SGD for
                   Distributed Deep Learning", 2016: n-softsync)
    local_sgd      all workers read the same version, take `interval` local steps, and synchronize (Stich, 2019)
    diloco         the same table (Douillard et al., 2023)
    model_average  workers continue training while their weights are averaged (Bagua: Gan et al., 2021)

A gradient takes a pull (one message), computing, and a push (one message). Its version is the newest one on the server
when the pull begins, because a server sends the weights that it has when it is asked. Simultaneous events are processed
in the order of workers: all of one worker before those of the next. With equal workers, a worker therefore reads the
weights that its last gradient has just updated.
"""

import heapq
import math
from collections.abc import Iterator, Mapping

import numpy as np

from jaxpar.strategies.asynchronous import delays as durations
from jaxpar.strategies.asynchronous.delays import Delays
from jaxpar.strategies.asynchronous.table import ROUNDING, UpdateTable

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
    """Return the first rows of a policy's table. A longer run begins with the same rows.

    Args:
      policy: one of POLICIES.
      num_workers: number of workers.
      num_gradients: number of rows of the table.
      delays: durations of gradients and messages; None: one second per gradient.
      seed: seed of the random delays.
      bound: for ssp: how many iterations a worker may be ahead of the slowest; 0 is lockstep.
      groups: for softsync, 1 to the number of workers, which is async.
      interval: for local_sgd and diloco, the number of steps between synchronizations; for model_average, the time from
        the start of an averaging to the start of the next, in mean compute times.

    Raises ValueError for an invalid setting, unless the policy does not use it.
    """
    delays = Delays() if delays is None else delays
    settings = {"seed": seed, "bound": bound, "groups": groups, "interval": interval}
    sizes = {"num_workers": num_workers, "num_gradients": num_gradients}
    if reason := durations.delays_obstacle(delays) or simulation_obstacle(policy, sizes | settings):
        raise ValueError(reason)
    compute = durations.compute_times(delays, num_workers, seed)
    communication = durations.communication_times(delays, num_workers, seed)
    if policy == "model_average":
        made = _averagings(compute, communication, num_gradients, interval * durations.mean_compute_time(delays))
    elif policy in ("sync", "local_sgd", "diloco"):
        made = _rounds(compute, communication, num_gradients, 1 if policy == "sync" else interval)
    else:
        size = num_workers // groups if policy == "softsync" else 1
        made = _server(compute, communication, num_gradients, size, bound if policy == "ssp" else math.inf)
    return make_update_table(num_workers, num_gradients, made)


def make_update_table(num_workers: int, num_gradients: int, made: TableColumns) -> UpdateTable:
    """Return the first rows of a policy's columns as a table."""
    worker, read, update, start, finish = (column[:num_gradients] for column in made)
    worker, read, update = (column.astype("i4") for column in (worker, read, update))
    chunk = np.arange(num_gradients, dtype=np.int32)
    return UpdateTable(num_workers, worker, read, update, chunk, chunk // np.int32(num_workers), start, finish)


def simulation_obstacle(policy: str, settings: Mapping[str, int]) -> str | None:
    """Return in one line why these arguments of `simulate` are invalid; None if they are valid."""
    if policy not in POLICIES:
        return f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}"
    least = {"num_workers": 1, "num_gradients": 1, "seed": 0}
    least |= {"bound": 0} if policy == "ssp" else {}
    least |= {"interval": 1} if policy in ("local_sgd", "diloco", "model_average") else {}
    for name, value in settings.items():
        if name in least and value < least[name]:
            return f"{name} is {value}; it must be at least {least[name]}"
    num_workers, groups = settings["num_workers"], settings.get("groups", 1)
    if policy == "softsync" and not 1 <= groups <= num_workers:
        return f"groups is {groups}; it must be between 1 and {num_workers}, the number of workers"
    return None


def _server(
    compute: WorkerTimes, communication: WorkerTimes, num_gradients: int, size: int, bound: float
) -> TableColumns:
    """Simulate async, ssp and softsync: the server makes an update of every `size` gradients.

    `bound` limits how far a worker runs ahead of the slowest. A gradient that waits for others of its update finishes
    with the update; its worker continues when the gradient arrives.
    """
    n = len(compute)
    events = [(0.0, worker) for worker in range(n)]  # when a worker's next pull begins, or its next push ends
    heapq.heapify(events)
    is_pulling, versions, starts = [True] * n, [0] * n, [0.0] * n
    done, least, num_least = [0] * n, 0, n  # gradients by worker; the minimum; workers at the minimum
    waiting: list[int] = []
    rows: list[tuple[int, int, float, float]] = []
    while len(rows) < num_gradients or len(rows) % size:
        now, worker = events[0]
        if is_pulling[worker]:
            is_pulling[worker], versions[worker] = False, len(rows) // size
            duration = next(communication[worker]) + next(compute[worker]) + next(communication[worker])
            heapq.heapreplace(events, (now + duration, worker))
            continue
        heapq.heappop(events)
        rows.append((worker, versions[worker], starts[worker], now))
        done[worker] += 1
        waiting.append(worker)
        may_begin = [worker]
        if done[worker] == least + 1:
            num_least -= 1
            if num_least == 0:  # the minimum has increased: check all waiting workers
                least += 1
                num_least = done.count(least)
                may_begin = waiting.copy()
        for other in may_begin:
            if done[other] - least <= bound:
                waiting.remove(other)
                is_pulling[other], starts[other] = True, now
                heapq.heappush(events, (now, other))
    workers, read, start, arrival = map(np.array, zip(*rows, strict=True))
    return workers, read, np.arange(len(rows)) // size, start, np.repeat(arrival[size - 1 :: size], size)


def _rounds(compute: WorkerTimes, communication: WorkerTimes, num_gradients: int, interval: int) -> TableColumns:
    """Simulate sync, local_sgd and diloco. In a round each worker makes a pull, `interval` steps and a push.

    The round ends when the last push arrives. Its rows are in the order of steps, then of workers. The gradients of a
    step finish when all workers have made that step, and those of the last step when all pushes have arrived, so that
    `finish` never decreases. `start` is each worker's own time.
    """

    def taken(times: WorkerTimes, per_round: int) -> np.ndarray:
        """Return the times of all rounds, [round, time, worker]."""
        by_worker = [np.fromiter(worker, float, num_rounds * per_round) for worker in times]
        return np.stack(by_worker, axis=1).reshape(num_rounds, per_round, n)

    n = len(compute)
    num_steps = -(-num_gradients // n)
    interval = min(interval, num_steps + 1)  # limits the steps of a first round that the table cuts off
    num_rounds = -(-num_steps // interval)
    messages = taken(communication, 2)
    times = np.concatenate([messages[:, :1], taken(compute, interval)], 1)
    ends = np.cumsum(times, axis=1)  # [round, pull and steps, worker], since the start of the round
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


def _averagings(compute: WorkerTimes, communication: WorkerTimes, num_gradients: int, period: float) -> TableColumns:
    """Simulate model_average: workers never wait, and at most one averaging begins per period.

    An averaging begins at a multiple of `period` if the last one has ended and some gradient has finished since the
    last one began. It reads the workers' weights at that time, which lack the gradients in flight but include every
    earlier averaging, even if the worker has not applied it yet. It ends when both messages of the slowest worker have
    arrived, and each worker applies it before its next gradient.

    `read` counts the averagings that the worker has applied, `update` those that began before the gradient finished.
    """
    n = len(compute)
    events = [(next(compute[worker]), worker, 0.0) for worker in range(n)]
    heapq.heapify(events)
    rows: list[tuple[int, float, float]] = []
    while len(rows) < num_gradients:
        now, worker, started = events[0]
        rows.append((worker, started, now))
        heapq.heapreplace(events, (now + next(compute[worker]), worker, now))
    workers, start, finish = map(np.array, zip(*rows, strict=True))
    late = 1 + ROUNDING  # sums of compute times may equal multiples of the period
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
    read = np.minimum(read, update)  # in case a gradient is shorter than the rounding
    return workers, read, update, start, finish
