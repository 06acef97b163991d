"""Checks requests: who sends them, and what all routes require of a body. Also serves the page to try a model in.

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
DISCARDED = 64 * 2**20  # bytes of too large a body that are read, so that its client can read the answer
VALUE_KINDS = {"an integer": int, "true or false": bool, "a string": str, "a list": list}  # of values of JSON


class Guard:
    """ASGI middleware that refuses requests for other hosts than its own, and those of pages of other sites."""

    def __init__(self, app: ASGIApp, host: str, allowed: Collection[str]):
        """Guard an application that is bound to `host`.

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
        local = ip_address(scope["server"][0])  # the address of this machine to which the client has connected
        local = (local.ipv4_mapped if isinstance(local, IPv6Address) else None) or local
        if host_name(host) not in {*self._hosts, str(local)}:
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


class Limits(NamedTuple):
    """The limits of a request, and of all requests together."""

    body_bytes: int = 2**20  # the largest body of a request
    seconds: float = 20  # the longest time in which the body of a request arrives
    characters: int = 100_000  # the longest text
    texts: int = 256  # the most texts of a request
    waiting: int = 1024  # the most texts that wait
    tokens: int = 1024  # the longest continuation


async def read_object(request: Request, limits: Limits) -> Mapping[str, Any]:
    """Return the JSON object in the body.

    Raises HTTPException if the body is too large, too slow, or of another type, and UserError if it is no JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind.lower() != "application/json":  # other sites' pages can send some other types without asking first
        raise HTTPException(415, f"the content type is {kind!r:.60}; it must be 'application/json'")
    chunks, size = [], 0
    try:
        async with asyncio.timeout(limits.seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limits.body_bytes:
                    chunks.append(chunk)
                elif size > DISCARDED:
                    break
    except TimeoutError:
        line = f"the body must arrive within {limits.seconds:g} seconds"
        raise HTTPException(408, line, {"Connection": "close"}) from None
    if size > limits.body_bytes:
        raise HTTPException(413, f"the body must have at most {limits.body_bytes:,} bytes")
    try:
        values = parse_json(b"".join(chunks).decode())
    except ValueError as error:  # of UTF-8 or JSON
        raise UserError(f"the body must be JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"the body is JSON of type {type(values).__name__}; it must be an object")
    return values


def check_keys(values: Mapping[str, Any], required: set[str], optional: set[str]) -> None:
    """Raise UserError if the object lacks a key or has one that is unknown."""
    for name in sorted(values.keys() - required - optional):
        raise UserError(f"{name!r:.60} is not a key; it must be one of {', '.join(sorted(required | optional))}")
    for name in sorted(required - values.keys()):
        raise UserError(f"{name} is missing; it must be set")


def take(values: Mapping[str, Any], name: str, kind: str, default: Any = None) -> Any:
    """Return a value of the object. Raises UserError if it is not of a kind of VALUE_KINDS."""
    value = values.get(name, default)
    if type(value) is not VALUE_KINDS[kind]:  # True is an instance of int
        raise UserError(f"{name} is {value!r:.60}; it must be {kind}")
    return value
