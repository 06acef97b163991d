"""Reads the body of a request, and checks what all routes check: size, type, keys, and types of numbers."""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request

from jaxpar.errors import UserError
from jaxpar.files import parse_json

DISCARDED = 64 * 2**20  # bytes of too large a body that are read, so that its client can read the answer


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
