"""Streams a continuation to a client as server-sent events."""

import json
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxpar.inference.generate import Completion, TextPiece


class EventStream(StreamingResponse):
    """Server-sent events: one per piece of text, and then one with the whole continuation.

    Attributes:
      on_end: function that is called after the last event.
    """

    on_end: Callable[[], None]

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
