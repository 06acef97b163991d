"""Tests what the service does with slow and large bodies, and with clients that go away before the answer."""

import asyncio
import json
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message

from jaxpar.use.serve.app import _unless_gone
from jaxpar.use.serve.guard import DISCARDED, Limits, read_object


class Client:
    """Sends the parts of a body, then ends it, stays silent (`silent`), or goes away (`gone`)."""

    def __init__(self, *parts: bytes, then: str = ""):
        self._parts, self._then = list(parts), then
        self.num_sent = 0

    async def receive(self) -> Message:
        if self._parts:
            self.num_sent += len(self._parts[0])
            return {"type": "http.request", "body": self._parts.pop(0), "more_body": bool(self._parts or self._then)}
        if self._then == "silent":
            await asyncio.sleep(10)
        return {"type": "http.disconnect"}

    @property
    def request(self) -> Request:
        return Request(
            {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}, self.receive
        )


def read(client: Client, **limits: Any) -> Any:
    return asyncio.run(asyncio.wait_for(read_object(client.request, Limits(**limits)), 5))


def refused(client: Client, **limits: Any) -> tuple[int, str]:
    with pytest.raises(HTTPException) as caught:
        read(client, **limits)
    return caught.value.status_code, caught.value.detail


def test_bodies_in_parts() -> None:
    body = json.dumps({"text": "日本"}, ensure_ascii=False).encode()
    assert read(Client(*(body[i : i + 1] for i in range(len(body)))), body_bytes=len(body)) == {"text": "日本"}


def test_too_slow_and_too_large_bodies() -> None:
    assert refused(Client(b"{", then="silent"), seconds=0.05) == (408, "the body must arrive within 0.05 seconds")
    large = Client(*[b"x" * 10] * 5)
    assert refused(large, body_bytes=20) == (413, "the body must have at most 20 bytes")
    assert large.num_sent == 50, "it is read to its end, so that the client reads the answer"
    endless = Client(*[b"x" * 2**20] * 100)
    assert refused(endless, body_bytes=20)[0] == 413
    assert endless.num_sent == DISCARDED + 2**20
    with pytest.raises(ClientDisconnect):
        read(Client(b"{", then="gone"))


def test_an_answer_is_cancelled_if_its_client_goes_away() -> None:
    is_cancelled = []

    async def answer() -> Response:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            is_cancelled.append(True)
            raise
        return Response()

    async def test() -> None:
        with pytest.raises(ClientDisconnect):
            await _unless_gone(Client(then="gone").request, answer())
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(test(), 5))
    assert is_cancelled == [True]
