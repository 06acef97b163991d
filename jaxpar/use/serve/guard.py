"""Refuses requests that a web page of another site makes a browser send, and serves the page to try a model in.

A browser lets every page send requests to every address, this machine included. The page can read the answers if its
own name resolves to that address (DNS rebinding). Both are visible: the header Host contains the name in the address of
the request, and Origin the site of the page.
"""

import base64
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from importlib.resources import files
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


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
