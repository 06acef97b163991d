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
    if not isinstance(sys.unraisablehook, _WithoutLateErrors):
        sys.unraisablehook = _WithoutLateErrors(sys.unraisablehook)
    if not isinstance(sys.excepthook, _WithoutErrorsOfThreads):
        sys.excepthook = _WithoutErrorsOfThreads(sys.excepthook)
    # These two have no effect the second time.
    logging.getLogger("asyncio").addFilter(_is_not_late)
    warnings.filterwarnings("ignore", r"coroutine '\w+Handler\.\w+' was never awaited", RuntimeWarning)


class _WithoutLateErrors:
    """Hook for errors outside any `try`, without those of pending files; all others go to the hook before it."""

    def __init__(self, others: Callable[[Any], Any]) -> None:
        self._others = others

    def __call__(self, unraisable: Any) -> None:
        if not _is_late(unraisable.exc_value):
            self._others(unraisable)


class _WithoutErrorsOfThreads:
    """The same for `sys.excepthook`, which tensorstore's threads call: their outermost Python frame is asyncio's."""

    def __init__(self, others: Callable[..., Any]) -> None:
        self._others = others

    def __call__(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not (_is_late(value) and trace and trace.tb_frame.f_globals.get("__name__", "").startswith("asyncio.")):
            self._others(kind, value, trace)


def _is_late(value: BaseException | None) -> bool:
    return "Event loop is closed" in str(value)


def _is_not_late(record: logging.LogRecord) -> bool:
    return "OCDBT" not in record.getMessage()
