"""Serves the trained model of a run over HTTP, with a page to try it in.

    jaxpar serve --workdir=runs/quickstart [--host=127.0.0.1 --port=8000]
    curl localhost:8000/predict --json '{"texts": ["a small dog"]}'

docs/howto/serve.md describes the routes. Texts of concurrent requests are computed together, in batches of similar
lengths. The model is that of the best checkpoint. SIGTERM and Ctrl-C end the service after the requests of all
connections that were established are answered.
"""

import contextlib
import importlib.util
import re
import signal
import socket
import time
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from jaxpar.command_line import Parser, integer, number
from jaxpar.errors import UserError
from jaxpar.use.inference.api import InferenceModel
from jaxpar.use.inference.load import load_trained, prepare


def _log(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket with an address. Raises UserError if that is not possible."""
    with _free_port(host, port):
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    return bound


@contextlib.contextmanager
def _free_port(host: str, port: int) -> Iterator[None]:
    """Raise UserError for errors of the address."""
    try:
        yield
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that is too long
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"--host is {host!r:.80} and --port is {port}; they must be a free port of this machine: {reason}"
        ) from None


def main(argv: Sequence[str]) -> None:
    parser = Parser(__doc__, "jaxpar serve")
    parser.require("--workdir", "--workdir=runs/quickstart", rule="the workdir of a run", type=Path, help="of a run")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    add("--port", type=integer(0, 65535), default=8000, help="port to listen on; 0: any (default: 8000)")
    add("--allowed_hosts", default="", help="other names by which browsers reach it: a.example,b.example")
    add("--tensor", type=integer(1), default=1, help="devices that compute each layer together (default: 1)")
    add("--step", type=integer(0), help="step of the checkpoint (default: the best one)")
    add("--max_body", type=integer(1), default=2**20, help="bytes of a request (default: 1,048,576)")
    add("--max_length", type=integer(1), default=100_000, help="characters of a text (default: 100,000)")
    add("--max_queue", type=integer(1), default=1024, help="texts that can wait (default: 1,024)")
    add("--max_tokens", type=integer(1), default=1024, help="longest continuation (default: 1,024)")
    seconds = "seconds in which the head of a request arrives, and then its body (default: 20)"
    add("--max_seconds", type=number("at least 0.1", 0.1), default=20, help=seconds)
    arguments = parser.parse(argv)
    allowed = [host.strip().strip("[]") for host in arguments.allowed_hosts.split(",") if host.strip()]
    for host in allowed:
        if re.search(r"[/@*\s]|^[^:]*:[^:]*$", host):
            raise UserError(
                f"--allowed_hosts contains {host!r}; it must be the name of a host, without scheme and port"
            )
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"the package {name} is not installed; install the extra serve (scripts/setup serve, or pip install "
                "'jaxpar[serve]')"
            )
    serve(arguments, allowed)


def serve(arguments: Namespace, allowed_hosts: Collection[str]) -> None:
    """Serve until a signal ends the service."""
    from jaxpar.use.serve.app import Service
    from jaxpar.use.serve.guard import Limits
    from jaxpar.use.serve.server import BACKLOG, DrainingServer

    workdir, host, port, seconds = arguments.workdir, arguments.host, arguments.port, arguments.max_seconds
    prepare(workdir)
    trained = load_trained(workdir, arguments.step, tensor=arguments.tensor, log=_log)
    limits = Limits(
        body_bytes=arguments.max_body,
        seconds=seconds,
        characters=arguments.max_length,
        waiting=arguments.max_queue,
        tokens=arguments.max_tokens,
    )
    service = Service(InferenceModel(trained), limits)
    with bind(host, port) as bound:
        _log(f"model     step {trained.step:,} of {workdir}")
        begin = time.perf_counter()
        service.warm_up()
        _log(f"compiled  all usual programs in {time.perf_counter() - begin:.1f} s")
        server = DrainingServer(service.app(host, allowed_hosts), bound, service.headers, seconds)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, server.handle_exit)
        with _free_port(host, port):
            bound.listen(BACKLOG)
        host_name = f"[{host}]" if ":" in host else host
        _log(f"serving   http://{host_name}:{bound.getsockname()[1]}")
        server.run()
    _log(f"stopped   after {service.latencies.num_answered:,} answers")
