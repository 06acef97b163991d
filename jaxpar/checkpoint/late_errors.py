"""Hides what reads and writes of checkpoints print and log after another one has failed.

Orbax closes its event loop when a file cannot be read or written. Other threads whose files end later, some after orbax
has raised its error, print errors with tracebacks, and asyncio logs those that nobody has looked at.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any


def hide_late_errors() -> None:
    """Hide these errors from now on."""
    if not isinstance(sys.unraisablehook, _WithoutLateErrors):
        sys.unraisablehook = _WithoutLateErrors(sys.unraisablehook)
    logging.getLogger("asyncio").addFilter(_is_not_late)  # has no effect the second time


class _WithoutLateErrors:
    """Hook for errors outside any `try`, without those of pending files; all others go to the hook before it."""

    def __init__(self, others: Callable[[Any], Any]) -> None:
        self._others = others

    def __call__(self, unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            self._others(unraisable)


def _is_not_late(record: logging.LogRecord) -> bool:
    return "OCDBT" not in record.getMessage()
