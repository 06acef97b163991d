"""Refuses requests: of web pages of other sites, which a browser sends, and those whose body is not as the routes read
it.

A browser lets every page send requests to every address, this machine included. The page can read the answers if its
own name resolves to that address (DNS rebinding). Both are visible: the header Host contains the name in the address of
the request, and Origin the site of the page.
"""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from importlib.resources import files
from ipaddress import IPv6Address, ip_address
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxpar.errors import UserError
from jaxpar.files import parse_json

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


class Guard:
    """ASGI middleware that refuses requests for other hosts than its own, and those of pages of other sites."""

    def __init__(self, app: ASGIApp, host: str, allowed: Collection[str]):
        """Guard an application.

        Args:
          app: the application.
          host: name or address that it was bound to.
          allowed: other names, such as that of a proxy. Pages of these hosts may send requests, too.
        """
        self._app, self._allowed = app, {name.lower() for name in allowed}
        self._hosts = {*THIS_MACHINE, host.lower(), *self._allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await (self._refusal(scope) or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if host_name(host) not in {*self._hosts, _local_address(scope)}:
            rule = f"one of {', '.join(sorted(self._hosts))}, or of --allowed_hosts of `jaxpar serve`"
            return refusal(400, f"the host is {host!r:.60}; it must be {rule}")
        if origin is not None:
            site = origin.partition("://")[2].lower()
            if site != host.lower() and host_name(site) not in self._allowed:
                return refusal(403, f"the origin is {origin!r:.60}; it must be that of the page of this service")
        return None


def refusal(status: int, line: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the answer to a mistake."""
    return JSONResponse({"error": line}, status, headers)


def host_name(host: str) -> str:
    """Return the name or address in HOST or HOST:PORT, in lower case and without brackets; '' if it has none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:  # of brackets
        return ""


def _local_address(scope: Scope) -> str:
    """Return the address of this machine to which the client has connected."""
    address = ip_address(scope["server"][0])
    return str((address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address)


def render_page(facts: Mapping[str, Any]) -> str:
    """Return the page for a model. facts: the constant `facts` of its script."""
    page = files("jaxpar.use.serve").joinpath("page.html").read_text("utf-8")
    return page.replace("{{facts}}", json.dumps(facts).replace("<", "\\u003c"))


def security_headers(page: str) -> list[tuple[str, str]]:
    """Return headers for all answers: a browser runs no script but that of the page, and shows it in no frame."""

    def hashes(tag: str) -> str:
        texts = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in texts)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return [("Content-Security-Policy", policy), ("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY")]


DISCARDED = 64 * 2**20  # bytes of too large a body that are read, so that its client can read the answer


class Limits(NamedTuple):
    """The limits of a request, and of all requests together.

    Attributes:
      body_bytes: the largest body of a request.
      seconds: the longest time in which the body of a request arrives.
      characters: the longest text.
      texts: the most texts of a request.
      waiting: the most texts that wait.
      tokens: the longest continuation.
    """

    body_bytes: int = 2**20
    seconds: float = 20
    characters: int = 100_000
    texts: int = 256
    waiting: int = 1024
    tokens: int = 1024


async def read_object(request: Request, limits: Limits) -> Mapping[str, Any]:
    """Return the JSON object in the body.

    Raises:
      HTTPException: the body is too large, too slow, or of another type.
      UserError: it is not a JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind.lower() != "application/json":  # other sites' pages can send some other types without asking first
        raise HTTPException(415, f"the content type is {kind!r:.60}; it must be 'application/json'")
    try:
        async with asyncio.timeout(limits.seconds):
            body = await _read(request, limits.body_bytes)
    except TimeoutError:
        line = f"the body must arrive within {limits.seconds:g} seconds"
        raise HTTPException(408, line, {"Connection": "close"}) from None
    try:
        values = parse_json(body.decode())
    except ValueError as error:  # of UTF-8 or JSON
        raise UserError(f"the body must be JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"the body is JSON of type {type(values).__name__}; it must be an object")
    return values


async def _read(request: Request, largest: int) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= largest:
            chunks.append(chunk)
        elif size > DISCARDED:
            break
    if size > largest:
        raise HTTPException(413, f"the body must have at most {largest:,} bytes")
    return b"".join(chunks)


def check_keys(values: Mapping[str, Any], required: set[str], optional: set[str]) -> None:
    """Raise UserError if the object lacks a key or has one that is unknown."""
    for name in sorted(values.keys() - required - optional):
        raise UserError(f"{name!r:.60} is not a key; it must be one of {', '.join(sorted(required | optional))}")
    for name in sorted(required - values.keys()):
        raise UserError(f"{name} is missing; it must be set")


def take_number(values: Mapping[str, Any], name: str, default: Any, kind: type) -> Any:
    """Return a number of the object. Raises UserError if it is of another type."""
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise UserError(f"{name} is {value!r:.60}; it must be {'an integer' if kind is int else 'a number'}")
    return value


def take_flag(values: Mapping[str, Any], name: str) -> bool:
    """Return a boolean of the object, by default False. Raises UserError if it is of another type."""
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise UserError(f"{name} is {value!r:.60}; it must be true or false")
    return value
