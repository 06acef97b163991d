"""Tests of signals in real processes whose main thread is busy."""

import os
import pty
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
    assert not Ending.has_begun
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
ANSWER = "SIGINT: stopping after this step; a second signal exits at once, without saving\n"
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
    answer = "" if program == BEFORE_THE_LOOP else ANSWER
    before = "".join(process.stdout.readline() for _ in ("away\n" + answer).splitlines())
    assert "away" in before
    assert before.replace("away", "").split() == answer.split()  # from another thread, maybe in the middle of the line
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, f"{text}\n")


def test_an_answer_that_nobody_reads() -> None:
    """A full pipe blocks whoever prints, but a second signal still ends the process."""
    fill = (
        "import os, sys; os.set_blocking(1, False)\ntry:\n while True: os.write(1, b' ')\nexcept BlockingIOError: pass"
    )
    program = f"{fill}\nos.set_blocking(1, True); print('full', file=sys.stderr, flush=True)\n{IN_THE_LOOP}"
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            program.replace("print('away', flush=True)", "print('away', file=sys.stderr, flush=True)"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    assert [process.stderr.readline() for _ in range(2)] == ["full\n", "away\n"]
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    process.communicate()


def test_the_answer_stands_below_the_progress_bar() -> None:
    """A terminal echoes ^C behind the bar. The answer is a line of its own, and reaches a main thread that is busy."""
    program = f"import os, sys; os.login_tty(int(sys.argv[1])); print('bar', end='', flush=True)\n{IN_THE_LOOP}"
    terminal, own = pty.openpty()
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            program.replace("signal.raise_signal(signal.SIGINT)", "os.kill(os.getpid(), 2)"),
            str(own),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=[own],
    ) as process:
        os.close(own)
        shown = b""
        while not (b"away" in shown and b"saving" in shown):
            shown += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        assert process.wait(timeout=60) == 130
    assert b"bar" in shown.splitlines()[0]
    assert ANSWER.strip().encode() in shown.replace(b"away", b"").splitlines()
    os.close(terminal)


def test_a_second_signal_in_a_notebook_raises() -> None:
    """The process belongs to the notebook, so it must not end."""
    with Interrupt(ends_process=False) as interrupt:
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


ON_A_TERMINAL = """
import os, pathlib, sys, time
os.login_tty(int(sys.argv[1]))
from jaxpar.launch.signals import Ending, Interrupt
with Ending(nth=1, code=75, text=lambda: "stopped"), Interrupt() as interrupt:
    print("a step", flush=True)
    while not interrupt.requested:
        time.sleep(0.01)
    for _ in range(2):
        os.kill(os.getpid(), interrupt.requested)
    print("stopped", flush=True)
    pathlib.Path(sys.argv[2]).write_text(interrupt.requested.name)
"""


def test_a_terminal_that_is_closed(tmp_path: Path) -> None:
    """Is a request to stop, however often the signal arrives, and the lines that are printed go nowhere."""
    terminal, own = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, str(own), str(tmp_path / "saved")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=[own],
    )
    os.close(own)
    shown = b""
    while not shown.endswith(b"a step\r\n"):  # the whole line, as closing the terminal would end the printing
        shown += os.read(terminal, 100)
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "saved").read_text() == "SIGHUP"


def test_a_run_under_nohup_ignores_the_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert interrupt.requested is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


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
