"""Connections between the processes of a run, over which they send lines of JSON, and bytes to measure their rate."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from jaxpar.launch.place import in_address, own_address

SENT = 2**25  # bytes that a process sends to another


class Peer:
    """A connection to another process, over which lines of JSON go."""

    def __init__(self, connection: socket.socket):
        self._connection, self._lines = connection, connection.makefile("rb")

    def send(self, message: Any) -> None:
        """Send a message."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Any:
        """Return the next message. Raises OSError if none comes in time, or the process has ended."""
        line = self._lines.readline()
        if not line:
            raise ConnectionResetError("it ended")
        return json.loads(line)

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()
        self._connection.close()


def connect_to(address: str, seconds: float) -> socket.socket:
    """Return a connection to HOST:PORT, on which each operation takes at most `seconds`. Tries for as long."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
        else:
            connection.settimeout(seconds)
            return connection


def listen(address: str) -> socket.socket:
    """Return a socket that listens on HOST:PORT; with an empty host, on all addresses."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    return socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


@contextlib.contextmanager
def receiving(coordinator_address: str) -> Iterator[str]:
    """Within `with`, read what other processes send, and answer with a byte once all has arrived. Yield the HOST:PORT.

    coordinator_address: of process 0; the host is the one from which this machine reaches it.
    """

    def drain(connection: socket.socket) -> None:
        with connection:
            left = SENT
            while left and (read := len(connection.recv(min(left, 2**20)))):
                left -= read
            if not left:
                connection.sendall(b"1")

    def accept() -> None:
        with contextlib.suppress(OSError):  # the server is shut down
            while True:
                connection, _ = server.accept()
                threading.Thread(target=drain, args=(connection,), daemon=True).start()

    shown = in_address(own_address(coordinator_address))
    with listen(f"{shown}:0") as server:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"{shown}:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def rate_to(address: str, seconds: float) -> float:
    """Return the bytes per second at which SENT bytes arrive at the sink of an address."""
    with connect_to(address, seconds) as connection:
        payload, begin = bytes(SENT), time.monotonic()
        connection.sendall(payload)
        if connection.recv(1) != b"1":
            raise ConnectionResetError("it ended")
        return SENT / (time.monotonic() - begin)
