"""Starts jaxpar serve in another process, and talks to it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]


class Service(NamedTuple):
    """A service and its port."""

    process: "subprocess.Popen[str]"
    port: int


def start(workdir: Path, *flags: str) -> Service:
    """Start the service and return it when it serves."""
    command = [sys.executable, "-P", "-m", "jaxpar", "serve", f"--workdir={workdir}", "--port=0", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"serving   http://127.0.0.1:(\d+)", line):
            return Service(process, int(found[1]))
    raise AssertionError("".join(lines))


def stop(service: Service) -> tuple[int, str]:
    """Send SIGTERM, and return the exit code and the last line."""
    service.process.send_signal(signal.SIGTERM)
    output = service.process.communicate(timeout=60)[0]
    return service.process.returncode, output.splitlines()[-1] if output else ""


async def send(
    writer: asyncio.StreamWriter,
    method: str,
    path: str,
    body: bytes = b"",
    kind: str = "application/json",
    *,
    close: bool = True,
) -> None:
    """Send a request. close: whether it asks the service to close the connection after the answer."""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}{'Connection: close' if close else 'A: b'}\r\n\r\n".encode() + body)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Return the status of an answer, and its JSON value, or the list of its events, or its text."""
    answer = (await reader.read()).decode()
    first, _, content = answer.partition("\r\n\r\n")
    status = int(first.split()[1])
    if "application/json" in first:
        return status, json.loads(content)
    if "text/event-stream" in first:
        assert content.endswith("\n\n\r\n0\r\n\r\n"), "the stream is complete"
        return status, [json.loads(one) for one in re.findall(r"data: (.*)\n\n", content)]
    return status, content


async def request(
    port: int, method: str, path: str, body: bytes = b"", kind: str = "application/json"
) -> tuple[int, Any]:
    """Send a request over a connection of its own, and return what `receive` does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await send(writer, method, path, body, kind)
    answer = await receive(reader)
    writer.close()
    return answer


def ask(port: int, path: str, values: Any = None) -> tuple[int, Any]:
    """Send one request: POST with JSON values, or GET without."""
    if values is None:
        return asyncio.run(request(port, "GET", path))
    return asyncio.run(request(port, "POST", path, json.dumps(values).encode()))
