"""Dynamic batching: items of concurrent requests are computed together, by one thread.

While the devices compute one batch, the items of new requests wait; the next batch takes them all, up to its largest
size. So nothing waits if the devices are idle, and the batches grow with the load.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class QueueFull(Exception):
    """Raised for items that would make the queue longer than its limit."""


class Batcher(Generic[Item, Answer]):
    """Computes items in batches. All methods must be called in the event loop."""

    def __init__(self, compute: Callable[[list[Item]], Sequence[Answer]], *, largest: int, most_waiting: int):
        """Prepare a batcher for at most `largest` items together, while at most `most_waiting` items wait.

        compute: returns one answer per item, in order. It is called in another thread.
        """
        self._compute, self._largest, self._most_waiting = compute, largest, most_waiting
        self._waiting: deque[tuple[Item, asyncio.Future[Answer]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._worker: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Number of items that wait."""
        return len(self._waiting)

    async def __call__(self, items: Sequence[Item]) -> list[Answer]:
        """Return the answers for items, in order. Raises what `compute` raised for one of them alone.

        Raises QueueFull if too many items wait already; none of these is computed.
        """
        if len(self._waiting) + len(items) > self._most_waiting:
            raise QueueFull
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in items]
        self._waiting.extend(zip(items, answers, strict=True))
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        try:
            return [await answer for answer in answers]
        finally:
            for answer in answers:
                answer.cancel()  # if the client went away, or one of them failed; has no effect on a result

    async def _work(self) -> None:
        """Compute batches of the oldest items until nothing waits."""
        while self._waiting:
            batch: list[tuple[Item, asyncio.Future[Answer]]] = []
            while self._waiting and len(batch) < self._largest:
                item, answer = self._waiting.popleft()
                if not answer.cancelled():
                    batch.append((item, answer))
            if batch:
                await self._answer(batch)
        self._worker = None

    async def _answer(self, batch: "Sequence[tuple[Item, asyncio.Future[Answer]]]") -> None:
        """Compute a batch, or, if that fails, its items one by one, so that only the faulty ones fail."""
        loop, items = asyncio.get_running_loop(), [item for item, _ in batch]
        try:
            answers = await loop.run_in_executor(self._thread, self._compute, items)
            pairs = list(zip(batch, answers, strict=True))
        except Exception as error:
            for item, future in batch:
                if future.done():  # its client has disconnected
                    continue
                if len(batch) > 1:
                    await self._answer([(item, future)])
                else:
                    future.set_exception(error)
            return
        for (_, future), answer in pairs:
            if not future.done():
                future.set_result(answer)


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
        return float(np.percentile(self._seconds, percent, method="inverted_cdf"))
