"""Dynamic batching: items of concurrent requests are computed together, by one thread.

While the devices compute one batch, the items of new requests wait; the next batch takes them all, up to its largest
size. So nothing waits if the devices are idle, and the batches grow with the load.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class QueueFull(Exception):
    """Raised for items that would make the queue longer than its limit."""


class _Waiting(NamedTuple, Generic[Item, Answer]):
    """An item that waits for its answer."""

    item: Item
    future: "asyncio.Future[Answer]"


class Batcher(Generic[Item, Answer]):
    """Computes items in batches. All methods must be called in the event loop."""

    def __init__(
        self,
        compute: Callable[[list[Item]], Sequence[Answer]],
        *,
        largest: int,
        most_waiting: int,
    ):
        """Prepare a batcher.

        Args:
          compute: function that returns one answer per item, in order. It is called in another thread.
          largest: the largest number of items that are computed together.
          most_waiting: the largest number of items that wait.
        """
        self._compute, self._largest, self._most_waiting = compute, largest, most_waiting
        self._waiting: deque[_Waiting[Item, Answer]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._worker: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Number of items that wait."""
        return len(self._waiting)

    async def __call__(self, items: Sequence[Item]) -> list[Answer]:
        """Return the answers for items, in order.

        Raises:
          QueueFull: too many items wait already; none of these is computed.
          Exception: what `compute` raised for a batch with one of the items.
        """
        if len(self._waiting) + len(items) > self._most_waiting:
            raise QueueFull
        loop = asyncio.get_running_loop()
        mine = [_Waiting(item, loop.create_future()) for item in items]
        self._waiting.extend(mine)
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        try:
            return [await one.future for one in mine]
        finally:
            for one in mine:
                one.future.cancel()  # if the client went away, or one of them failed; has no effect on a result

    async def _work(self) -> None:
        """Compute batches until nothing waits."""
        while batch := self._take():
            await self._answer(batch)
        self._worker = None

    async def _answer(self, batch: Sequence[_Waiting[Item, Answer]]) -> None:
        """Compute a batch, or, if that fails, its items one by one, so that only the faulty ones fail."""
        try:
            answers = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._compute, [one.item for one in batch]
            )
            pairs = list(zip(batch, answers, strict=True))
        except Exception as error:
            if len(batch) > 1:
                for one in batch:
                    if not one.future.done():  # done: its client has disconnected
                        await self._answer([one])
            elif not batch[0].future.done():
                batch[0].future.set_exception(error)
            return
        for one, answer in pairs:
            if not one.future.done():
                one.future.set_result(answer)

    def _take(self) -> list[_Waiting[Item, Answer]]:
        """Remove the items of the next batch, the oldest ones, from the queue."""
        batch: list[_Waiting[Item, Answer]] = []
        while self._waiting and len(batch) < self._largest:
            one = self._waiting.popleft()
            if not one.future.cancelled():
                batch.append(one)
        return batch


class Latencies:
    """The latencies of the last requests, in seconds."""

    def __init__(self, number: int = 10_000):
        """number: how many latencies to remember."""
        self.num_answered = 0
        self._seconds: deque[float] = deque(maxlen=number)

    def add(self, begin: float) -> None:
        """Record a request that began at time.perf_counter() == begin and ends now."""
        self.num_answered += 1
        self._seconds.append(time.perf_counter() - begin)

    def percentile(self, percent: float) -> float | None:
        """Return the smallest latency that at least `percent` % of them do not exceed; None without requests."""
        if not self._seconds:
            return None
        ordered = sorted(self._seconds)
        return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]
