"""Trains a live swarm on this machine, draws it in the terminal, and kills a random peer from time to time.

    jaxpar swarm --peers=6 --stages=3 [--kill_every=20s] -- --config=configs/quickstart.py --workdir=DIR [...]

Arguments after -- are passed to `jaxpar train`. The training is as without kills, to the rounding of float32. Without
a terminal, only lines are printed. Needs the extra `swarm`.

Exit codes: those of `jaxpar train`.
"""

import argparse
import contextlib
import io
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from jaxpar.command_line import BEHIND, Parser, integer
from jaxpar.commands import train
from jaxpar.errors import UserError
from jaxpar.strategies.swarm.live import events
from jaxpar.strategies.swarm.live.events import EventKind, LiveEvent

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def main(argv: Sequence[str]) -> int:
    parser = Parser(__doc__, "jaxpar swarm", BEHIND)
    parser.add_argument("--peers", type=integer(1), default=6, help="number of peers (default: 6)")
    parser.add_argument("--stages", type=integer(1), default=3, help="number of stages (default: 3)")
    period = "kill a random peer after this time, such as 20s, once all are present (default: 0)"
    parser.add_argument("--kill_every", type=duration, default=0.0, help=period)
    parser.add_argument("--seed", type=integer(0), help="seed of the random kills (default: a different one each time)")
    reserved = [f"config.{key}" for key in ("strategy", "swarm.mode", "swarm.peers", "swarm.stages")]
    arguments, rest = parser.parse_before_training(argv, "--peers=6 --stages=3", reserved)
    if arguments.peers < arguments.stages:
        raise UserError(f"--peers is {arguments.peers}; it must be at least {arguments.stages}, as --stages")
    try:
        from rich.console import Console

        from jaxpar.strategies.swarm.live.view import Screen, SwarmView
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed; `jaxpar swarm` needs it: install the extra swarm (scripts/setup swarm, "
            "or pip install 'jaxpar[swarm]')"
        ) from None
    view = SwarmView(arguments.stages)
    with Screen(Console(file=sys.stdout), view) as screen, contextlib.redirect_stdout(Lines(screen.write)):
        events.listeners.append(screen.listen)
        rng = random.Random(arguments.seed)
        if arguments.kill_every:
            events.listeners.append(PeerKiller(arguments.kill_every, arguments.peers, rng, screen.write))
        settings = {"mode": "live", "peers": arguments.peers, "stages": arguments.stages}
        overrides = [f"--config.swarm.{key}={value}" for key, value in settings.items()]
        code = train.main([sys.argv[0], "train", "--config.strategy=swarm", *overrides, *rest])
        if view.step:
            screen.write(f"swarm     {view.summary}")
    return code


def duration(text: str) -> float:
    """Return the seconds of a duration, such as 20, 20s, 1.5m or 1h; the type of a flag."""
    number, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}; it must be a time such as 20s or 1.5m, or 0")
    return seconds


class Lines(io.TextIOBase):
    """A text stream that is not a terminal and passes on whole lines."""

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self._write_line, self._rest = write_line, ""

    def write(self, text: str) -> int:
        """Pass on the lines that the text completes."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._write_line(line)
        return len(text)


class PeerKiller:
    """A listener that kills (-9) a random peer of this machine once a period, from the first update on.

    It waits until the peer that it killed before is replaced, so that a slow machine does not lose all peers.
    """

    def __init__(self, period: float, num_peers: int, rng: random.Random, write_line: Callable[[str], None]) -> None:
        """Kill nothing yet. period: seconds. num_peers: that must be present. write_line: reports each kill."""
        self._period, self._num_peers, self._rng, self._write_line = period, num_peers, rng, write_line
        self._processes: dict[int, int] = {}  # of this machine, by peer
        self._present = set[int]()  # peers, on all machines
        self._next: float | None = None

    def __call__(self, event: LiveEvent) -> None:
        """Take in an event, and kill a peer if it is time."""
        now = time.monotonic()
        if event.kind == EventKind.ATTACHED:
            self._present.add(event.peer)
            if event.text == socket.gethostname():
                self._processes[event.peer] = event.number
        elif event.kind in (EventKind.FAILED, EventKind.BANNED):
            self._forget(event.peer)
        elif event.kind == EventKind.UPDATED and self._next is None:
            self._next = now + self._period
        is_due = self._next is not None and now >= self._next
        if is_due and self._processes and len(self._present) >= self._num_peers:
            self._next = now + self._period
            peer = self._rng.choice(sorted(self._processes))
            self._write_line(f"swarm     kill -9 {self._processes[peer]}, peer {peer}")
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self._processes[peer], signal.SIGKILL)
            self._forget(peer)

    def _forget(self, peer: int) -> None:
        self._present.discard(peer)
        self._processes.pop(peer, None)
