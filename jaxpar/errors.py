"""Mistakes of the user, in one line each. `main` prints them and exits with code 2.

What a planner asks about thousands of configs gives its reasons as values: a function that returns `Refusals` yields
them, and is called with `yield from` by others of its kind, with `accepted` or `outcome` by all else.
"""

import difflib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeVar


class UserError(Exception):
    """A mistake that the user must correct: which key or file, what it was, what it must be."""


T = TypeVar("T")
# Yields why something cannot be; returns it where nothing is against it. Nothing runs after the first reason.
Refusals = Generator[UserError, None, T]


def outcome(refusals: Refusals[T]) -> T | UserError:
    """Return the first reason against something; or the thing itself, where there is none."""
    results: list[T] = []

    def run() -> Iterator[UserError]:
        results.append((yield from refusals))

    return next(run(), None) or results[0]


def accepted(refusals: Refusals[T]) -> T:
    """Return what nothing is against. Raises the first reason, a UserError, where there is one."""
    result = outcome(refusals)
    if isinstance(result, UserError):
        raise result
    return result


class TrainingError(Exception):
    """Training itself failed, at a step that the message names. `main` prints it and exits with code 1."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the choice most like `name`, or nothing."""
    match = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else ""


def check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """Raise UserError unless `value`, the value of config key `key`, is one of `choices`."""
    accepted(refuse_choice(key, value, choices))


def refuse_choice(key: str, value: str, choices: Iterable[str]) -> Refusals[None]:
    """Refuse a `value` of config key `key` that is not one of `choices`."""
    choices = list(choices)
    if value not in choices:
        yield UserError(f"config.{key} is {value!r}; it must be {', '.join(choices)}.{nearest(str(value), choices)}")


def format_count(number: int, noun: str) -> str:
    """Return `1 replica`, `2 replicas`, `2 microbatches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


FAILED, USER_ERROR, HANGS = 1, 2, 3  # exit codes of a process
STOPPED_CODES = range(4, 126)  # exit codes that a run stopped by a signal may have instead of 0; shells have 126 and on


def is_failure(code: int) -> bool:
    """Whether a process of this exit code (-N: by signal N) has failed; else it has finished, or was stopped."""
    return code != 0 and code not in STOPPED_CODES


def exit_code(command: Callable[[], None]) -> int:
    """Run a script's `command` and return its exit code: 0; or 2, with one line on stderr, on UserError."""
    try:
        command()
    except UserError as error:
        print(f"jaxpar: {error}", file=sys.stderr)
        return USER_ERROR
    return 0
