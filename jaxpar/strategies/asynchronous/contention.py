"""Simulates workers that share devices, the links of the server and the cores of a machine, and returns their table.

In simulate.py, messages have times of their own. Here, each program and each message takes its turn:

    worker on the server's device      [compute w][update s]
    another worker               [pull][compute w][push][update s]

`compute w` is a program of the worker's device, `update s` one of the server's device. All pulls share the outgoing
link of the server, and all pushes its incoming link. Devices and links do one thing at a time, in the order of
requests. If devices share cores, everything that happens at the same time slows down together.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from jaxpar.strategies.asynchronous.layouts import DeviceNumbers
from jaxpar.strategies.asynchronous.simulate import TableColumns, WorkerTimes, make_update_table
from jaxpar.strategies.asynchronous.table import UpdateTable

OUT, IN = "outgoing link", "incoming link"


class ServerTimes(NamedTuple):
    """Seconds of what workers and a server do, each if nothing else happens at the same time."""

    compute: WorkerTimes  # for each worker, an endless iterator over the times of its gradients
    # for each worker, a factor of at least 1: it waits (slowdown - 1) times as long as it has computed
    slowdowns: tuple[float, ...]
    pull: float = 0.0  # time in which weights leave the server
    push: float = 0.0  # time in which a gradient arrives at the server
    update: float = 0.0  # time of an update on the server's device


_Turn = tuple[float, str]  # something that takes seconds, and the place that it occupies; "": it only waits


def simulate_contention(
    numbers: DeviceNumbers,
    times: ServerTimes,
    num_gradients: int,
    *,
    bound: float,
    crowding: Callable[[int], float] = lambda _: 1.0,
) -> UpdateTable:
    """Return the first rows of the table of async, or of ssp if `bound` is finite.

    crowding: how many times as long everything takes if this many things happen at the same time.
    """
    run = _Contention(numbers, times, bound, crowding)
    while len(run.rows) < num_gradients:
        run.advance()
    worker, read, start, finish = map(np.array, zip(*run.rows, strict=True))
    columns: TableColumns = worker, read, np.arange(len(run.rows)), start, finish
    return make_update_table(numbers.num_workers, num_gradients, columns)


class _Contention:
    """Event simulation. All that happens progresses at the same rate, so `work` orders it by the work done so far."""

    def __init__(
        self, numbers: DeviceNumbers, times: ServerTimes, bound: float, crowding: Callable[[int], float]
    ) -> None:
        self.numbers, self.times, self.bound, self.crowding = numbers, times, bound, crowding
        self.rows: list[tuple[int, int, float, float]] = []  # worker, read, start, finish
        self.now, self.done_work = 0.0, 0.0  # seconds, and seconds of an uncrowded machine
        self.work: list[tuple[float, int, str]] = []  # heap of: done_work at its end, worker, what it occupies
        self.waits: list[tuple[float, int]] = []  # heap of: time of its end, worker
        self.queues: dict[str, deque[tuple[int, float]]] = {}  # of all that is occupied: worker, seconds
        self.completed = [0] * numbers.num_workers
        self.ahead: list[int] = []  # workers that the bound stops
        self.turns = [self.gradients(worker) for worker in range(numbers.num_workers)]
        for worker in range(numbers.num_workers):
            self.proceed(worker)

    def advance(self) -> None:
        """Go to the next end of a turn."""
        factor = self.crowding(len(self.work)) if self.work else 1.0
        until_work = (self.work[0][0] - self.done_work) * factor if self.work else math.inf
        until_wait = self.waits[0][0] - self.now if self.waits else math.inf
        if until_wait < until_work:
            self.done_work += until_wait / factor
            self.now, worker = heapq.heappop(self.waits)
        else:
            self.now += until_work
            self.done_work, worker, place = heapq.heappop(self.work)
            queue = self.queues[place]
            if queue:
                self.begin(place, *queue.popleft())
            else:
                del self.queues[place]
        self.proceed(worker)

    def begin(self, place: str, worker: int, seconds: float) -> None:
        heapq.heappush(self.work, (self.done_work + seconds, worker, place))

    def proceed(self, worker: int) -> None:
        """Take the next turns of a worker, until one takes time."""
        for seconds, place in self.turns[worker]:
            if seconds == 0:
                continue
            if worker in self.ahead:
                pass  # `gradients` of another worker calls this again
            elif not place:
                heapq.heappush(self.waits, (self.now + seconds, worker))
            elif place in self.queues:
                self.queues[place].append((worker, seconds))
            else:
                self.queues[place] = deque()
                self.begin(place, worker, seconds)
            return

    def gradients(self, worker: int) -> Iterator[_Turn]:
        """Yield the turns of a worker, and add a row for each gradient."""
        times, device = self.times, self.numbers.of_worker(worker)
        is_remote = device != self.numbers.server
        while True:
            version, start = len(self.rows), self.now
            if is_remote:
                yield times.pull, OUT
            computing = self.now
            yield next(times.compute[worker]), f"device {device}"
            yield (times.slowdowns[worker] - 1) * (self.now - computing), ""
            if is_remote:
                yield times.push, IN
            yield times.update, f"device {self.numbers.server}"
            self.rows.append((worker, version, start, self.now))
            self.completed[worker] += 1
            self.ahead.append(worker)
            for other in [one for one in self.ahead if self.completed[one] - min(self.completed) <= self.bound]:
                self.ahead.remove(other)
                if other != worker:
                    self.proceed(other)
            if worker in self.ahead:
                yield math.inf, ""
