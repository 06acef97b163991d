"""User errors, one line each, which `main` prints before it exits with code 2, and the exit codes of a process."""

import argparse
import contextlib
import difflib
import errno
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn, TextIO


def printable(text: str, keep: str = "") -> str:
    """Return the text with control characters escaped, because part of it can be from a file.

    They could move the cursor or hide text. keep: those that stay, such as the line ends of a text of several lines.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class _PrintedError(Exception):
    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(_PrintedError):
    """A mistake that the user must correct. The message names the key or file, its value and what it must be."""


def is_refused(function: Callable[..., object], *arguments: Any) -> bool:
    """Return whether a function, such as a check, raises UserError with these arguments."""
    try:
        function(*arguments)
    except UserError:
        return True
    return False


class TrainingError(_PrintedError):
    """A failure of the training itself. `main` prints the message and exits with code 1."""


SIMILAR = 0.6  # ratio of equal characters in two names, one of which the user probably meant


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the choice most similar to `name`, or an empty string if none is similar."""
    match = most_similar(name, choices)
    return f" Did you mean {match!r}?" if match else ""


def most_similar(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice most similar to `name`, or None if none is similar.

    Sections, folders and an extension that both have do not count: `configs/a.py` is not similar to `configs/b.py`.
    """
    best, ratio = None, SIMILAR
    for choice in choices:
        match = difflib.SequenceMatcher(None, *_without_common_parts(name, choice))
        if match.real_quick_ratio() >= ratio and match.quick_ratio() >= ratio and match.ratio() >= ratio:
            best, ratio = choice, match.ratio()
    return best


def _without_common_parts(a: str, b: str) -> tuple[str, str]:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(a.rfind(".", 0, same), a.rfind("/", 0, same)) + 1
    (stem_a, dot_a, end_a), (stem_b, dot_b, end_b) = (name[start:].rpartition(".") for name in (a, b))
    return (stem_a, stem_b) if dot_a and dot_b and end_a == end_b else (a[start:], b[start:])


def check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """Raise UserError unless `value`, the value of config key `key`, is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        one_of = "one of " if len(choices) > 1 else ""
        hint = nearest(str(value), choices)
        stop = "." if hint else ""
        raise UserError(f"config.{key} is {value!r}; it must be {one_of}{', '.join(choices)}{stop}{hint}")


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural: `1 replica`, `2 microbatches`, `2,000 epochs`."""
    plural = "es" if noun.endswith(("tch", "ss")) else "s"
    return f"{number:,} {noun}{plural if number != 1 else ''}"


_BYTES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}


def format_bytes(nbytes: float, digits: int = 3) -> str:
    """Format a number of bytes with at most three significant digits, or more: `12.3 kB`, `80 GB`, `1.54 TB`."""
    unit = next((unit for unit, size in _BYTES.items() if nbytes < 999.5 * size), "PB")
    return f"{nbytes / _BYTES[unit]:.{digits}g} {unit}"


FAILED, USER_ERROR, HANGS, AT_ONCE = 1, 2, 3, 130  # exit codes of a process; AT_ONCE: interrupted without saving
STOPPED_CODES = range(4, 126)  # codes that --stopped_exit_code accepts besides 0; shells reserve 126 and above


def is_failure(code: int) -> bool:
    """Return whether a process with this exit code (-N: killed by signal N) failed, and did not finish or stop."""
    return code != 0 and code not in STOPPED_CODES


def is_closed_output(error: OSError) -> bool:
    """Return whether the reader of the standard output has closed its pipe."""
    return error.errno == errno.EPIPE and error.filename is None


def unwritten_output(error: OSError) -> str | None:
    """Return the error message if the standard output is on a full disk. The errors of all other writes have names."""
    is_full = error.errno == errno.ENOSPC and error.filename is None
    return f"the standard output cannot be written: {error.strerror}" if is_full else None


def discard(stream: TextIO) -> None:
    """Send the standard output or error nowhere: also the rest of it, which Python writes when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


CLOSED = "the standard output is closed; it must be open, such as with >/dev/null"


def exit_code(command: Callable[[], int | None]) -> int:
    """Run a command, and return its exit code.

    It is 2 for a UserError and 1 for a TrainingError, which are printed in one line, and 130 for a Ctrl-C. It is also 1
    if the reader of the output has closed its pipe, and 2 if the output cannot be written or a file may not be read.
    SIGTERM ends the command as sys.exit does, so that it removes what it has half written.
    """
    if sys.stdout is None:
        return fail(CLOSED)
    try:
        with _exit_on_sigterm():
            # scripts/python and `jaxpar.__main__` block them during the imports.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
            code = command() or 0
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return AT_ONCE
    except SystemExit as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename in (argparse.__file__, __file__):  # --help, SIGTERM
            raise
        return fail(message_of_exit(error))
    except OSError as error:
        reason = unwritten_output(error)
        if reason or is_closed_output(error):
            discard(sys.stdout)
            return fail(reason) if reason else FAILED
        if reason := too_long(error, sys.argv):
            return fail(reason)
        if not isinstance(error, PermissionError) or error.filename is None:
            raise
        return fail(f"{error.filename} may not be read or written: {error.strerror}")
    except (UserError, TrainingError) as error:
        return fail(str(error), USER_ERROR if isinstance(error, UserError) else FAILED)


def message_of_exit(error: BaseException) -> str:
    """Return the error message for code of a user, such as a config or a model, that ended the process."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "_sitebuiltins" not in frame.filename]
    return f"{frames[-1].filename}, line {frames[-1].lineno}, raised {error!r}; it must not end the run"


def too_long(error: OSError, argv: Sequence[str]) -> str | None:
    """Return the error message for a path that is too long, with its flag in `argv`, or None for another error."""
    if error.errno != errno.ENAMETOOLONG:
        return None
    key, path = "the path", str(error.filename)
    for before, argument in itertools.pairwise(argv):
        flag, equals, value = argument.partition("=")
        flag, value = (flag, value) if equals else (before, argument)
        if value and flag.startswith("--") and value in path:
            key = flag.removeprefix("--") if flag.startswith("--config.") else flag
    return f"{key} is {path!r:.60}...; each name in a path must have at most 255 bytes"


LONGEST_LINE = 800  # characters of an error


def fail(message: str, code: int = USER_ERROR) -> int:
    """Print the one line of an error, without the middle of a long one, and return the exit code."""
    text = printable(message)
    if len(text) > LONGEST_LINE:
        text = f"{text[: LONGEST_LINE // 2]} ... {text[-LONGEST_LINE // 2 :]}"
    try:
        if sys.stderr is not None:
            print(f"jaxpar: {text}", file=sys.stderr, flush=True)
    except OSError:  # its reader has closed it
        discard(sys.stderr)
    return code


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, unless this is another thread, or the signal is ignored or handled already."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        print("jaxpar: terminated", file=sys.stderr)
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
