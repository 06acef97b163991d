"""Refuses requests that a web page of another site makes a browser send.

A browser lets every page send requests to every address, this machine included. The page can read the answers if its
own name resolves to that address (DNS rebinding). Both are visible: the header Host contains the name in the address of
the request, and Origin the site of the page.
"""

from collections.abc import Collection, Mapping
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

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
