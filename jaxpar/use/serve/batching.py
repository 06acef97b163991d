"""Dynamic batching: items of concurrent requests are computed together, by one thread.

While the devices compute one batch, the items of new requests wait; the next batch takes them all, up to its largest
size. So nothing waits if the devices are idle, and the batches grow with the load. Continuations of texts are batched,
too, and read piece by piece.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np

from jaxpar.use.inference.generate import Generator, Request, TextPiece

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


class _Stream:
    """The continuation of one request while it is computed."""

    def __init__(self, request: Request):
        self.request = request
        # the pieces that were computed and not read yet; last, the exception if computing failed
        self.pieces: asyncio.Queue[TextPiece | BaseException] = asyncio.Queue()
        self.is_left = False  # whether it has no reader left: it has ended, or its client has disconnected
        self._loop = asyncio.get_running_loop()
        self._num_added = 0

    def add(self, number: int, piece: TextPiece) -> None:
        """Add a piece, from the computing thread.

        number: its place in the text. If a batch fails and its texts are computed again, the first pieces are ignored.
        """
        if number == self._num_added:
            self._num_added += 1
            self._loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    def end(self, computing: "asyncio.Task[list[None]]") -> None:
        """Add the exception of the computation, if it failed, after all pieces."""
        if not computing.cancelled() and (error := computing.exception()) is not None:
            self.pieces.put_nowait(error)


class Continuations:
    """Computes continuations in batches. All methods must be called in the event loop."""

    def __init__(self, generator: Generator, *, largest: int, most_waiting: int):
        """Use a generator for at most `largest` texts at the same time, for which at most `most_waiting` texts wait."""
        self._generator = generator
        self._batcher = Batcher(self._compute, largest=largest, most_waiting=most_waiting)

    @property
    def num_waiting(self) -> int:
        """Number of texts that wait."""
        return self._batcher.num_waiting

    async def __call__(self, request: Request) -> AsyncGenerator[TextPiece, None]:
        """Yield the pieces of a continuation; the last one has an `end`. Raises QueueFull, and what the model raises.

        If the reader closes the generator, the text is no longer computed, unless it shares its batch with others.
        """
        stream = _Stream(request)
        computing = asyncio.create_task(self._batcher([stream]))
        computing.add_done_callback(stream.end)
        try:
            while True:
                piece = await stream.pieces.get()
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
                if piece.end:
                    return
        finally:
            stream.is_left = True
            computing.cancel()

    def _compute(self, streams: list[_Stream]) -> list[None]:
        """Compute the texts of a batch until all of them have ended or were left."""
        counts = [0] * len(streams)
        for piece in self._generator.stream_requests([stream.request for stream in streams]):
            streams[piece.number].add(counts[piece.number], piece)
            counts[piece.number] += 1
            if all(stream.is_left for stream in streams):
                break
        return [None] * len(streams)


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
