"""Hides what reads and writes of checkpoints print and log after another one has failed.

Orbax closes its event loop when a file cannot be read or written. Other threads whose files end later, some after orbax
has raised its error, print errors with tracebacks, and asyncio logs those that nobody has looked at.
"""

import logging
import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any


def hide_late_errors() -> None:
    """Hide these errors from now on."""
    if not isinstance(sys.unraisablehook, _Filtered):
        sys.unraisablehook = _Filtered(sys.unraisablehook, lambda unraisable: _is_late(unraisable.exc_value))
    if not isinstance(sys.excepthook, _Filtered):
        sys.excepthook = _Filtered(sys.excepthook, _is_late_in_a_thread)
    # These two have no effect the second time.
    logging.getLogger("asyncio").addFilter(_is_not_late)
    warnings.filterwarnings("ignore", r"coroutine '\w+Handler\.\w+' was never awaited", RuntimeWarning)


class _Filtered:
    """A hook for errors outside any `try`, which passes all errors but the late ones to the hook before it."""

    def __init__(self, others: Callable[..., Any], is_late: Callable[..., bool]) -> None:
        self._others, self._is_late = others, is_late

    def __call__(self, *error: Any) -> None:
        if not self._is_late(*error):
            self._others(*error)


def _is_late(value: BaseException | None) -> bool:
    return "Event loop is closed" in str(value)


def _is_late_in_a_thread(_kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> bool:
    """Return whether the error is from a thread of tensorstore: their outermost Python frame is asyncio's."""
    return _is_late(value) and trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("asyncio.")


def _is_not_late(record: logging.LogRecord) -> bool:
    return "OCDBT" not in record.getMessage()
