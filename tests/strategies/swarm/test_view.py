"""The terminal view shows the events of a live swarm, and the demonstration kills peers while it trains."""

import io
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jaxpar.commands import swarm
from jaxpar.errors import UserError
from jaxpar.strategies.swarm.live.events import EventKind, LinePrinter, LiveEvent, notable
from jaxpar.strategies.swarm.live.view import Screen, SwarmView
from jaxpar.strategies.swarm.progress import BACKWARD_PASS, FORWARD_PASS

ROOT = Path(__file__).parents[3]
HISTORY = [
    *(LiveEvent(EventKind.STARTED, peer) for peer in range(4)),
    *(LiveEvent(EventKind.ATTACHED, peer, number=100 + peer, text="host") for peer in range(4)),
    *(LiveEvent(EventKind.SERVING, peer, peer % 2) for peer in range(4)),
    LiveEvent(EventKind.QUEUED, 0, number=2),
    LiveEvent(EventKind.COMPUTED, 0, 0, 5, phase=FORWARD_PASS, value=0.25),
    LiveEvent(EventKind.COMPUTED, 0, 0, 5, phase=BACKWARD_PASS, value=0.75),
    LiveEvent(EventKind.COMPUTED, 1, 1, 6, phase=BACKWARD_PASS, value=0.5),
    LiveEvent(EventKind.FAILED, 2, 0, text="died: its process ended"),
    LiveEvent(EventKind.GIVEN_UP, 3, 1, text="silent: no answer for 3 s"),
    LiveEvent(EventKind.LOST, 2, number=3),
    LiveEvent(EventKind.MOVED, 1, 0, text="from stage 1"),
    LiveEvent(EventKind.LOADING, 1, 0),
    LiveEvent(EventKind.UPDATED, number=6, value=2.5),
]


def drawn(view: SwarmView) -> list[list[str]]:
    """Return the words of the lines of the picture."""
    console = Console(file=io.StringIO(), width=120)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_view() -> None:
    seconds = 0.0
    view = SwarmView(2, now=lambda: seconds)
    for event in HISTORY:
        view.listen(event)
    assert view.summary == "7 steps, 2 failures, 1 move, 3 lost gradients"
    _, head, _, *rows = drawn(view)
    assert " ".join(head) == f"{view.summary} loss 2.5000 0.1 microbatches/s"
    assert rows == [
        ["0", "0", "host", "100", "serving", "0.350", "2", "■■", "2"],  # 0.25, then a fifth of the way to 0.75
        ["1", "host", "101", "loading", "0.500", "1", "0"],
        ["1", "no", "peer"],
        ["none", "3", "host", "103", "given", "up", "0", "0"],
    ]
    seconds = 60.0
    assert view.rate == 0


def test_lines_of_events() -> None:
    assert [line for event in HISTORY if (line := notable(event))][4:] == [
        *("peer 0 serves stage 0", "peer 1 serves stage 1", "peer 2 serves stage 0", "peer 3 serves stage 1"),
        "peer 2 of stage 0 failed, died: its process ended",
        "peer 3 of stage 1 is given up until it answers, silent: no answer for 3 s",
        "3 gradients of peer 2 computed again",
        "peer 1 moves to stage 0 from stage 1",
    ]


def test_lines_of_a_training_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Peers that join and serve are printed after the first update only."""
    listen = LinePrinter()
    for event in (*HISTORY, LiveEvent(EventKind.UPDATED), LiveEvent(EventKind.SERVING, 4, 1)):
        listen(event)
    assert capsys.readouterr().out.splitlines() == [
        "swarm     peer 2 of stage 0 failed, died: its process ended",
        "swarm     peer 3 of stage 1 is given up until it answers, silent: no answer for 3 s",
        "swarm     3 gradients of peer 2 computed again",
        "swarm     peer 1 moves to stage 0 from stage 1",
        "swarm     peer 4 serves stage 1",
    ]


def test_screen_of_a_terminal() -> None:
    """The lines stay, above a picture that is removed at the end."""
    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True)
    with Screen(console, SwarmView(2)) as screen:
        for event in HISTORY:
            screen.listen(event)
        screen.write("step 7/9  [bold]")
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.index("peer 2 of stage 0 failed") < text.index("step 7/9  [bold]")
    assert "microbatches/s" in text
    assert "\x1b[2K" in text  # erases the picture


@pytest.mark.parametrize(("text", "seconds"), [("20s", 20.0), ("20", 20.0), ("1.5m", 90.0), ("1h", 3600.0), ("0", 0.0)])
def test_durations(text: str, seconds: float) -> None:
    assert swarm.duration(text) == seconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    {
        "": "--config is missing",
        "-- --config=c.py": "--workdir is missing",
        "--kill_every=soon -- --config=c.py --workdir=w": "--kill_every is 'soon'; it must be a time such as 20s",
        "--kill_every=-1s -- --config=c.py --workdir=w": "--kill_every is '-1s'; it must be a time such as 20s",
        "--kill_every=inf -- --config=c.py --workdir=w": "--kill_every is 'inf'; it must be a time such as 20s",
        "--peers=0 -- --config=c.py --workdir=w": "--peers is 0; it must be at least 1",
        "--peers=2 -- --config=c.py --workdir=w": "--peers is 2; it must be at least 3, as --stages",
        "-- --config=c.py --workdir=w --config.swarm.mode=live": "--config.swarm.mode is set by `jaxpar swarm`",
        "--config=c.py": "or follow --, as the arguments of `jaxpar train` do",
    }.items(),
)
def test_mistakes(arguments: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        swarm.main(arguments.split())


def test_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(UserError, match=r"rich.console is not installed; `jaxpar swarm` needs it: install the extra"):
        swarm.main(["--", "--config=c.py", "--workdir=w"])


@pytest.mark.parametrize("is_complete", [True, False])
def test_killer_kills_one_process_per_period(is_complete: bool) -> None:
    """The first update at which all peers are present begins it: not one while a peer is being replaced."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        lines: list[str] = []
        killer, host = swarm.PeerKiller(0.0, 2, random.Random(0), lines.append), socket.gethostname()
        here, other = ((4, process.pid, host), (5, 1, f"not-{host}"))
        for peer, pid, at in (here, other) if is_complete else (here,):
            killer(LiveEvent(EventKind.ATTACHED, peer, number=pid, text=at))
        assert lines == []  # not before the first update
        for _ in range(2):
            killer(LiveEvent(EventKind.UPDATED))
        if not is_complete:
            assert (lines, process.poll()) == ([], None)  # one of two peers
            killer(LiveEvent(EventKind.ATTACHED, other[0], number=other[1], text=other[2]))
        assert process.wait(10) == -9
    assert lines == [f"swarm     kill -9 {process.pid}, peer 4"]


@pytest.mark.slow
def test_demonstration(tmp_path: Path) -> None:
    """Peers are killed, and the run ends like one whose peers live."""
    train = ["--config=configs/quickstart.py", "--config.num_steps=12", "--config.swarm.join_seconds=1"]
    own = ["--peers=4", "--stages=2", "--kill_every=5s"]
    command = ["scripts/jaxpar", "swarm", *own, "--", *train, f"--workdir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "kill -9" in done.stdout
    assert re.search(r"swarm     12 steps, [1-9]\d* failures?, ", done.stdout)
