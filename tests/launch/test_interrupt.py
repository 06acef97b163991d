"""Tests of signals in real processes whose main thread is busy."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.launch.signals import Interrupt, StoppedEarly

ROOT = Path(__file__).parents[2]
# Like a compilation or a wait for other processes, this keeps Python from running signal handlers.
AWAY = "print('away', flush=True); ctypes.CDLL(None).sleep(1000)"
BEFORE_THE_LOOP = f"""
import ctypes
from jaxpar.launch.signals import Ending
with Ending(nth=1, code=75, text=lambda: "stopped"):
    {AWAY}
"""
IN_THE_LOOP = f"""
import ctypes, signal
from jaxpar.launch.signals import Ending, Interrupt
with Ending(nth=1, code=75, text=lambda: "stopped"), Interrupt() as interrupt:
    signal.raise_signal(signal.SIGINT)
    assert interrupt.requested == signal.SIGINT
    {AWAY}
"""
AFTER_THE_LOOP = f"""
import ctypes, signal
from jaxpar.launch.signals import Ending, Interrupt
with Ending(nth=1, code=75, text=lambda: "stopped"):
    with Interrupt():
        signal.raise_signal(signal.SIGINT)
    {AWAY}
"""
STOPPED_IMMEDIATELY = "stopped immediately; the steps since the last checkpoint are lost"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("program", "code", "text"),
    [(BEFORE_THE_LOOP, 75, "stopped"), (IN_THE_LOOP, 130, STOPPED_IMMEDIATELY), (AFTER_THE_LOOP, 75, "stopped")],
)
def test_a_signal_while_the_main_thread_is_busy(program: str, code: int, text: str, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "away\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, f"{text}\n")


def test_a_failure_after_a_signal_before_the_first_step() -> None:
    """The failure is expected, because this process may have waited for another one that stopped.

    After a step, it is an error.
    """

    def fail(*, is_stopped: bool, looks: bool = False) -> None:
        with Interrupt() as interrupt:
            if is_stopped:
                signal.raise_signal(signal.SIGTERM)
            assert not looks or interrupt.requested == signal.SIGTERM
            raise ValueError("broken")

    with pytest.raises(StoppedEarly):
        fail(is_stopped=True)
    with pytest.raises(ValueError, match="broken"):
        fail(is_stopped=True, looks=True)
    with pytest.raises(ValueError, match="broken"):
        fail(is_stopped=False)


def test_handlers_and_threads_are_restored() -> None:
    """Signal handlers, file descriptors and threads are restored."""
    program = """
import os, signal, threading
from jaxpar.launch.signals import Interrupt
def there():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return handlers, os.listdir("/proc/self/fd"), threading.active_count()
before = there()
with Interrupt():
    assert there() != before
assert there() == before
"""
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
