"""Continuations of concurrent requests: computed together by one thread, and read piece by piece in the event loop.

A client gets the pieces as server-sent events.
"""

import asyncio
import json
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxpar.use.inference.generate import Completion, Generator, Request, TextPiece
from jaxpar.use.serve.batching import Batcher


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


class EventStream(StreamingResponse):
    """Server-sent events: one per piece of text, and then one with the whole continuation."""

    on_end: Callable[[], None]  # function that is called after the last event

    def __init__(self, completion: Completion, pieces: AsyncGenerator[TextPiece, None], step: int):
        """Continue a continuation, which has its first piece, with the other pieces."""
        self._pieces = pieces
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # proxies send each event at once
        super().__init__(self._events(completion, step), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, and stop if the client goes away."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._pieces.aclose()

    async def _events(self, completion: Completion, step: int) -> AsyncGenerator[str, None]:
        try:
            if completion.text:
                yield _event({"piece": completion.text})
            async for piece in self._pieces:
                completion = completion.extended(piece)
                if piece.text:
                    yield _event({"piece": piece.text})
        except Exception as error:  # a fault of the service; it continues
            yield _event({"error": failure(error)})
            return
        yield _event(completion._asdict() | {"step": step})
        self.on_end()


def _event(values: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(values, ensure_ascii=False)}\n\n"


def failure(error: Exception) -> str:
    """Print the traceback of a fault of the service, and return the line for the client."""
    traceback.print_exception(error, file=sys.stderr)
    return f"the model failed: {type(error).__name__}"
