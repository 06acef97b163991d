"""Reads the body of a request, and checks what all routes check: size, type, keys, and types of numbers."""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request

from jaxpar.errors import UserError
from jaxpar.files import parse_json

DISCARDED = 64 * 2**20  # bytes of too large a body that are read, so that its client can read the answer
VALUE_KINDS = {"an integer": int, "true or false": bool, "a string": str, "a list": list}  # what a value of JSON must be


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
