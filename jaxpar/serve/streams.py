"""Continuations of concurrent requests: computed together by one thread, read piece by piece in the event loop."""

import asyncio
from collections.abc import AsyncGenerator

from jaxpar.inference.generate import Generator, Request, TextPiece
from jaxpar.serve.batching import Batcher


class _Stream:
    """The continuation of one request while it is computed.

    Attributes:
      request: the request.
      pieces: the pieces that were computed and not read yet; last, the exception if computing failed.
      is_left: whether the stream has no reader left, because it has ended or the client has disconnected.
    """

    def __init__(self, request: Request):
        self.request = request
        self.pieces: asyncio.Queue[TextPiece | BaseException] = asyncio.Queue()
        self.is_left = False
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
        """Yield the pieces of a continuation; the last one has an `end`.

        If the reader closes the generator, the text is no longer computed, unless it shares its batch with others.

        Raises:
          QueueFull: too many texts wait already.
          Exception: what the model raised.
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
