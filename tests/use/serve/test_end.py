"""Tests the end of `jaxpar serve` by SIGTERM: no connection that was established before it is reset."""

import asyncio
import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.use.inference.conftest import classifier as classifier
from tests.use.serve.service import Service, receive, request, send, start, stop

NUM_CONNECTIONS = 400


@pytest.fixture
def service(classifier: Path) -> Iterator[Service]:
    made = start(classifier)
    yield made
    if made.process.poll() is None:
        stop(made)


def body(text: str, number: int = 1) -> bytes:
    return json.dumps({"texts": [text] * number}).encode()


def check_end(service: Service, num_answers: int) -> None:
    output = service.process.communicate(timeout=60)[0]
    assert service.process.returncode == 0
    assert output.splitlines()[-1] == f"stopped   after {num_answers} answers"


def test_sigterm_answers_what_was_accepted(service: Service) -> None:
    async def ask_and_stop() -> None:
        tasks = [asyncio.create_task(request(service.port, "POST", "/predict", body("red", 200))) for _ in range(4)]
        while (await request(service.port, "GET", "/health"))[1]["answered"] == 0:
            pass
        service.process.send_signal(signal.SIGTERM)
        for status, answer in await asyncio.gather(*tasks):
            assert status == 200
            assert len(answer["predictions"]) == 200

    asyncio.run(ask_and_stop())
    check_end(service, 4)


def test_sigterm_answers_what_the_kernel_has_queued(service: Service) -> None:
    """The process is paused, so that no connection is accepted before the signal. A third sends its request later."""

    async def ask_and_stop() -> None:
        service.process.send_signal(signal.SIGSTOP)
        opened = await asyncio.gather(
            *(asyncio.open_connection("127.0.0.1", service.port) for _ in range(NUM_CONNECTIONS))
        )
        for number, (_, writer) in enumerate(opened):
            if number % 3:
                await send(writer, "POST", "/predict", body("red cat"))
        service.process.send_signal(signal.SIGTERM)
        service.process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.5)
        for _, writer in opened[::3]:
            await send(writer, "POST", "/predict", body("red cat"))
        answers = await asyncio.gather(*(receive(reader) for reader, _ in opened))
        assert [status for status, _ in answers] == [200] * NUM_CONNECTIONS
        assert all(len(answer["predictions"]) == 1 for _, answer in answers)
        for _, writer in opened:
            writer.close()

    asyncio.run(ask_and_stop())
    check_end(service, NUM_CONNECTIONS)


def test_more_connections_than_file_descriptors_wait(service: Service) -> None:
    resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (200, 200))

    async def ask_all() -> None:
        asked = (request(service.port, "POST", "/predict", body("red cat")) for _ in range(NUM_CONNECTIONS))
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}

    asyncio.run(ask_all())
    assert stop(service) == (0, f"stopped   after {NUM_CONNECTIONS} answers")


def test_sigterm_closes_open_connections_after_their_next_answer(service: Service) -> None:
    """One of two idle connections sends another request, and the other one is closed. New ones are refused."""

    async def ask_and_stop() -> None:
        opened = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(2)]
        for reader, writer in opened:
            await send(writer, "GET", "/health", close=False)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"connection: close" not in head.lower()
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        service.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", service.port)
        (reader, writer), (idle, _) = opened
        await send(writer, "POST", "/predict", body("red cat"), close=False)
        answer = await reader.read()  # until the service closes the connection
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer.lower()
        assert await idle.read() == b""
        for _, one in opened:
            one.close()

    asyncio.run(ask_and_stop())
    check_end(service, 1)
