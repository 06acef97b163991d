"""Tests that pages of other sites can't use the service, and that silent connections don't keep others out."""

import contextlib
import http.client
import json
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.testclient import TestClient

from jaxpar.commands import serve
from jaxpar.errors import UserError
from jaxpar.use.serve.guard import Guard
from tests.use.inference.conftest import classifier as classifier
from tests.use.serve.service import Service, ask, start, stop

OPEN = 170  # file descriptors, of which the service keeps 128 free


@pytest.fixture(scope="module")
def service(classifier: Path) -> Iterator[Service]:
    made = start(classifier, "--max_seconds=1", "--allowed_hosts=models.example")
    yield made
    assert stop(made)[0] == 0


def answer(service: Service, text: str) -> tuple[int, str, Any]:
    """Send a request, with LF for CRLF, and return the status, the head and the content of the answer."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(text.replace("\n", "\r\n").replace("PORT", str(service.port)).encode())
        received = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    head, _, content = received.partition("\r\n\r\n")
    return int(head.split()[1]), head.lower(), content


HEALTH = "GET /health HTTP/1.1\nConnection: close\n"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Host: 127.0.0.1:PORT", 200),
        ("Host: localhost", 200),
        ("Host: LocalHost.:PORT", 200),
        ("Host: [::1]:PORT", 200),
        ("Host: models.example", 200),
        ("Host: rebound.example:PORT", 400),
        ("Host: 127.0.0.1.rebound.example", 400),
        ("Host: [::1", 400),
        ("Host: 0.0.0.0", 400),
        ("Host: 127.0.0.1\nHost: localhost", 400),
        ("Host:", 400),
        ("A: b", 400),
        ("Host: 127.0.0.1:PORT\nOrigin: http://127.0.0.1:PORT", 200),
        ("Host: 127.0.0.1:PORT\nOrigin: https://models.example", 200),
        ("Host: 127.0.0.1:PORT\nOrigin: http://127.0.0.1:1", 403),
        ("Host: 127.0.0.1:PORT\nOrigin: http://other.example", 403),
        ("Host: 127.0.0.1:PORT\nOrigin: http://models.example.other", 403),
        ("Host: 127.0.0.1:PORT\nOrigin: null", 403),
        ("Host: 127.0.0.1:PORT\nOrigin:", 403),
    ],
)
def test_hosts_and_origins(service: Service, headers: str, status: int) -> None:
    assert answer(service, f"{HEALTH}{headers}\n\n")[0] == status


def test_addresses_of_the_machine_are_allowed() -> None:
    """Bound to all addresses, the service answers for the one to which the client has connected."""
    app = Starlette(middleware=[Middleware(Guard, host="::", allowed=())])

    def status(address: str, host: str) -> int:
        async def connected(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "server": (address, 8000)}, receive, send)

        return TestClient(connected).get("/", headers={"host": host}).status_code

    assert status("10.0.0.5", "10.0.0.5:8000") == 404  # there is no route
    assert status("::ffff:10.0.0.5", "10.0.0.5:8000") == 404
    assert status("fd00::2", "[fd00::2]:8000") == 404
    assert status("10.0.0.5", "10.0.0.6:8000") == 400


BODY = json.dumps({"texts": ["red"]})
CHUNKED = f"Transfer-Encoding: chunked\n\n{len(BODY):x}\n{BODY}\n0\n\n"
WHOLE = f"Content-Length: {len(BODY)}\n\n{BODY}"


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        ("POST /predict", f"Content-Type: application/json\n{WHOLE}", 200),
        ("POST /predict", f"Content-Type: Application/JSON; charset=utf-8\n{CHUNKED}", 200),
        ("POST /predict", WHOLE, 415),
        ("POST /predict", f"Content-Type: text/plain;application/json\n{CHUNKED}", 415),
        ("POST /predict", f"Content-Type: application/x-www-form-urlencoded\n{WHOLE}", 415),
        ("POST /predict", f"Content-Type: application/json\nOrigin: null\n{WHOLE}", 403),
        ("OPTIONS /predict", "Origin: http://other.example\nAccess-Control-Request-Method: POST\n\n", 403),
        ("OPTIONS /predict", "\n", 405),
        ("HEAD /", "\n", 200),
        ("GET /", "\n", 200),
        ("GET /nothing", "\n", 404),
    ],
)
def test_all_answers_protect_the_browser(service: Service, request_line: str, headers: str, status: int) -> None:
    found, head, content = answer(service, f"{request_line} HTTP/1.1\nHost: localhost\nConnection: close\n{headers}")
    assert found == status
    assert "x-content-type-options: nosniff\r\n" in head
    assert "x-frame-options: deny" in head
    assert "content-security-policy: default-src 'none'; script-src 'sha256-" in head
    assert "access-control-allow" not in head
    assert (content == "") == request_line.startswith("HEAD")


SILENT = [
    "",
    "GET /hea",
    "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nA: ",
    "POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
    "POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n",  # refused before its body arrives
    "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /hea",
]


def test_silent_connections_do_not_keep_others_out(service: Service) -> None:
    """50 connections that send no whole request leave no room for others, until their time is over."""
    before = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (OPEN, before[1]))
    with contextlib.ExitStack() as stack:
        for number in range(50):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", service.port)))
            silent.sendall(SILENT[number % len(SILENT)].encode())
        for _ in range(5):
            assert ask(service.port, "/predict", {"texts": ["red"]})[0] == 200
    resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, before)


def test_a_client_that_reads_no_answer_is_disconnected(service: Service) -> None:
    """The answers that it asks for are more than the buffers of the system can hold."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(0.5)
    client.connect(("127.0.0.1", service.port))
    requests = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50_000

    def send() -> None:
        for _ in range(40):  # 20 s; the service allows 1
            with contextlib.suppress(TimeoutError):
                client.sendall(requests)

    with pytest.raises(ConnectionError):
        send()
    client.close()


def test_a_connection_that_sends_requests_stays_open(service: Service) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    connection.connect()
    first = connection.sock
    for _ in range(10):
        connection.request("GET", "/health")
        assert connection.getresponse().read().startswith(b"{")
        assert connection.sock is first
        time.sleep(0.25)
    connection.close()


@pytest.mark.parametrize("host", ["http://a.example", "a.example:80", "*.example", "a b", "u@a"])
def test_hosts_that_are_none(host: str) -> None:
    with pytest.raises(UserError, match=r"^--allowed_hosts contains .*; it must be the name of a host, without scheme"):
        serve.main(["--workdir=x", f"--allowed_hosts=b.example,{host}"])
