"""Ctrl-C and SIGTERM as a request that the training loop heeds between two steps."""

import os
import signal
from types import FrameType
from typing import Any


class Interrupt:
    """Within `with`, the first SIGINT or SIGTERM sets `requested`; a second one ends the process with code 130."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._request) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        self._restore()
        if kind is KeyboardInterrupt:
            print("stopped at once; the steps since the last checkpoint are lost", flush=True)
            os._exit(130)  # not by way of threads that may be in the middle of a step or a checkpoint

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
