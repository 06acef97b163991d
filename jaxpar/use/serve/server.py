"""Ends the service without losing a request: uvicorn alone resets connections that it has not accepted, or not read."""

import asyncio
import resource
import socket
import sys
import time
from typing import Any

import uvicorn
from starlette.types import ASGIApp

BACKLOG = 2048  # connections that wait to be accepted
PAUSE = 0.1  # seconds until connections are accepted again if there are too many
RESERVED = 128  # file descriptors that are not for connections: JAX fails without one for random numbers and files
GRACE = 100  # turns of 20 ms without a request, after which connections that sent none are closed


class DrainingServer(uvicorn.Server):
    """A server that, after a signal, answers the requests of all connections that were established before it.

        accept what the kernel has queued, stop listening -> answer with `Connection: close` -> close idle connections

    An open connection can send another request while others are answered, and for 2 seconds after that. This time is
    counted in turns of the event loop, each of which reads what has arrived, because the loop can be late under load.

    The server accepts connections itself, because asyncio drops those that it has accepted, but that have no protocol
    yet, when it stops listening.
    """

    def __init__(self, app: ASGIApp, listening: socket.socket, headers: list[tuple[str, str]], seconds: float):
        """Serve an application on a socket that listens. headers: of all answers.

        seconds: the longest time in which a client sends the head of a request, after which it is disconnected.
        """
        self._listening, self._seconds = listening, seconds
        self._since: dict[tuple[Any, Any], float] = {}  # when a connection began to wait for a request after that one
        self._connecting: set[asyncio.Task[object]] = set()
        self._is_draining = False
        options = {"http": "h11", "ws": "none", "lifespan": "off", "log_level": "warning", "access_log": False}
        super().__init__(uvicorn.Config(app, headers=headers, **options))  # type: ignore[arg-type]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets or [])
        self._listening.setblocking(False)
        self._watch()

    async def on_tick(self, counter: int) -> bool:
        """Close connections whose clients have sent no request, or read nothing of an answer, for too long.

        For a first request, and for a client that reads, uvicorn would wait for ever.
        """
        now = time.monotonic()
        connections: set[Any] = self.server_state.connections
        waiting = [(one, one.cycle) for one in connections if one.cycle is None or one.cycle.response_complete]
        unread = [(one, one.transport.get_write_buffer_size()) for one in connections]
        unread = [(one, size) for one, size in unread if size > 0]  # whose size changes as the client reads
        self._since = {key: self._since.get(key, now) for key in (*waiting, *unread)}
        for (connection, state), since in self._since.items():
            if now - since > self._seconds:
                if isinstance(state, int):
                    connection.transport.abort()  # a close would first wait for the client to read
                else:
                    connection.transport.close()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what was sent before the signal, and close all connections."""
        self._is_draining = True
        asyncio.get_running_loop().remove_reader(self._listening)
        closing = [*self.server_state.default_headers, (b"connection", b"close")]
        self.server_state.default_headers = closing
        connections: set[Any] = self.server_state.connections
        for cycle in (one.cycle for one in connections if one.cycle is not None):
            cycle.default_headers = closing  # of the answer that it has not started
        idle = 0
        while idle < GRACE and not self.force_exit:
            if self._listening.fileno() >= 0 and self._accept_all():
                self._listening.close()
            if self._listening.fileno() < 0 and not (self._connecting or self.server_state.connections):
                break
            await asyncio.sleep(0.02)
            idle = 0 if self.server_state.tasks else idle + 1
        self._listening.close()
        await super().shutdown(sockets)

    def _watch(self) -> None:
        """Accept connections from now on."""
        if not self._is_draining:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        """Accept connections, or pause if there are too many."""
        if not self._accept_all():
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listening)
            loop.call_later(PAUSE, self._watch)

    def _accept_all(self) -> bool:
        """Accept all connections that the kernel has queued. Return False if there are too many."""
        loop = asyncio.get_running_loop()
        while len(self._connecting) + len(self.server_state.connections) < _most_connections():
            try:
                connection, _ = self._listening.accept()
            except ConnectionAbortedError:  # its client has disconnected
                continue
            except BlockingIOError:
                return True
            except OSError:  # the system has no more memory or file descriptors
                return False
            task = loop.create_task(loop.connect_accepted_socket(self._protocol, connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        return False

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


def _most_connections() -> int:
    """Return the number of connections for which the process has file descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(limit - RESERVED, 1) if limit != resource.RLIM_INFINITY else sys.maxsize
