"""Tests streamed continuations: order, batches, faults, clients that go away, and characters of several tokens."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest
from starlette.types import Message
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxpar.use.inference.generate import Completion, Request, Sampling, TextPiece, _Text
from jaxpar.use.serve.app import EventStream
from jaxpar.use.serve.batching import Continuations

FAULTY = 66  # a request with this token fails at its third piece


class Counter:
    """Continues [n] by n + 1, n + 2, ..., once `go` is set, and records its batches and the number of its steps."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.num_steps = 0
        self.go = threading.Event()
        self.steps = threading.Event()  # cleared: waits before the third step
        self.steps.set()

    def stream_requests(self, requests: Sequence[Request]) -> Iterator[TextPiece]:
        self.go.wait(10)
        self.batches.append([request.tokens[0] for request in requests])
        for step in range(1, max(request.max_tokens for request in requests) + 1):
            self.num_steps += 1
            if step == 3:
                self.steps.wait(10)
                if FAULTY in self.batches[-1]:
                    raise ValueError("66 cannot be continued")
            for number, request in enumerate(requests):
                if step <= request.max_tokens:
                    token = request.tokens[0] + step
                    yield TextPiece(number, token, f" {token}", "length" if step == request.max_tokens else "")


def asked(token: int, number: int) -> Request:
    return Request([token], number, Sampling(temperature=1.0, seed=token))


def run(test: Callable[[Counter, Continuations], Coroutine[Any, Any, None]]) -> Counter:
    """Run a test with a new Counter, and return it."""
    counter = Counter()

    async def limited() -> None:
        await asyncio.wait_for(test(counter, Continuations(counter, largest=4, most_waiting=9)), 20)  # type: ignore[arg-type]

    asyncio.run(limited())
    return counter


async def texts(pieces: AsyncGenerator[TextPiece, None]) -> list[str]:
    return [piece.text async for piece in pieces]


def test_texts_are_computed_together_and_the_shorter_one_ends_first() -> None:
    async def test(counter: Counter, continuations: Continuations) -> None:
        ended = []

        async def read(token: int, number: int) -> None:
            assert await texts(continuations(asked(token, number))) == [f" {token + i + 1}" for i in range(number)]
            ended.append(token)

        reading = [asyncio.create_task(read(0, 1))]
        await asyncio.sleep(0.05)  # its batch has started
        reading += [asyncio.create_task(read(token, number)) for token, number in ((10, 5), (20, 2))]
        await asyncio.sleep(0.05)
        assert continuations.num_waiting == 2
        counter.steps.clear()
        counter.go.set()
        await asyncio.gather(reading[0], reading[2])  # while the text of 10 still grows
        counter.steps.set()
        await reading[1]
        assert ended == [0, 20, 10]

    assert run(test).batches == [[0], [10, 20]]


def test_a_fault_ends_its_stream_alone_and_no_piece_is_repeated() -> None:
    async def test(counter: Counter, continuations: Continuations) -> None:
        first = asyncio.create_task(texts(continuations(asked(0, 1))))
        await asyncio.sleep(0.05)
        good = asyncio.create_task(texts(continuations(asked(10, 5))))
        bad = continuations(asked(FAULTY, 5))
        found: list[str] = []

        async def read_bad() -> None:
            async for piece in bad:
                found.append(piece.text)  # noqa: PERF401 - the pieces before the fault count

        reading = asyncio.create_task(read_bad())
        await asyncio.sleep(0.05)
        counter.go.set()
        with pytest.raises(ValueError, match="66 cannot be continued"):
            await reading
        assert found == [" 67", " 68"]
        assert await first == [" 1"]
        assert await good == [" 11", " 12", " 13", " 14", " 15"]

    assert run(test).batches == [[0], [10, FAULTY], [10], [FAULTY]]


def test_a_batch_ends_if_all_of_its_clients_have_gone_away() -> None:
    async def test(counter: Counter, continuations: Continuations) -> None:
        counter.steps.clear()
        counter.go.set()
        leaving = continuations(asked(0, 1_000_000))
        assert (await anext(leaving)).token == 1
        waiting = asyncio.create_task(texts(continuations(asked(10, 3))))
        await asyncio.sleep(0.05)
        await leaving.aclose()
        counter.steps.set()
        assert await waiting == [" 11", " 12", " 13"]

    assert run(test).num_steps <= 3 + 3, "the text that nobody reads has stopped"


def stream(pieces: AsyncGenerator[TextPiece, None], *, gone_after: int = 100) -> list[Any]:
    """Return the events of a stream, whose client goes away after some of them."""
    sent: list[bytes] = []

    async def send() -> None:
        gone = asyncio.Event()

        async def take(message: Message) -> None:
            if message.get("body"):
                sent.append(message["body"])
            if len(sent) == gone_after:
                gone.set()
                await asyncio.sleep(10)  # its socket takes no more

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        events = EventStream(Completion("0", "", [], "").extended(await anext(pieces)), pieces, 7)
        events.on_end = lambda: sent.append(b'data: "counted"\n\n')
        await asyncio.wait_for(events({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, take), 5)

    asyncio.run(send())
    assert all(one.startswith(b"data: ") and one.endswith(b"\n\n") and one.count(b"\n") == 2 for one in sent)
    return [json.loads(one[len(b"data: ") :]) for one in sent]


def test_events() -> None:
    async def pieces() -> AsyncGenerator[TextPiece, None]:
        for token, text, end in ((5, " ä", ""), (6, "", ""), (7, "\n日", ""), (None, "", "end of text")):
            yield TextPiece(0, token, text, end)

    assert stream(pieces()) == [
        {"piece": " ä"},
        {"piece": "\n日"},
        {"prompt": "0", "text": " ä\n日", "tokens": [5, 6, 7], "end": "end of text", "step": 7},
        "counted",
    ]


def test_a_fault_in_the_middle_is_the_last_event(capsys: pytest.CaptureFixture[str]) -> None:
    async def pieces() -> AsyncGenerator[TextPiece, None]:
        yield TextPiece(0, 5, "a", "")
        raise RuntimeError("out of memory")

    assert stream(pieces()) == [{"piece": "a"}, {"error": "the model failed: RuntimeError"}]
    assert "out of memory" in capsys.readouterr().err


def test_a_client_that_goes_away_closes_its_pieces() -> None:
    is_closed = []

    async def pieces() -> AsyncGenerator[TextPiece, None]:
        try:
            while True:
                yield TextPiece(0, 5, "a", "")
        finally:
            is_closed.append(True)

    assert stream(pieces(), gone_after=3) == [{"piece": "a"}] * 3
    assert is_closed == [True]


def test_characters_of_several_tokens_are_never_broken() -> None:
    """With one token per byte, a piece is a whole character, at its last byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: number for number, one in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    expected = "naïve 🐦 日本 e\u0301 👩‍👧"
    tokens = tokenizer.encode(expected).ids
    assert len(tokens) == len(expected.encode())
    text = _Text(tokenizer, None, len(tokens))
    pieces = [text.add(token)[1] for token in tokens]
    assert [piece for piece in pieces if piece] == list(expected)
