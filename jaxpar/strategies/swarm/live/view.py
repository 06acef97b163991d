"""The terminal view of a live swarm: its stages and peers, their queues, the throughput, and what happens to them."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jaxpar.errors import format_count
from jaxpar.strategies.swarm.live.events import EventKind, LiveEvent, PeerStatus, notable
from jaxpar.strategies.swarm.progress import BACKWARD_PASS

REDRAW_SECONDS = 0.1
RATE_SECONDS = 10.0  # throughput is that of the last seconds
PACE_SHARE = 0.2  # of the newest pass in the moving average of a peer's times
WIDEST_QUEUE = 16  # passes that are drawn
STATUS = {
    EventKind.STARTED: PeerStatus.STARTING,
    EventKind.ATTACHED: PeerStatus.WAITING,
    EventKind.LOADING: PeerStatus.LOADING,
    EventKind.SERVING: PeerStatus.SERVING,
    EventKind.FAILED: PeerStatus.GONE,
    EventKind.GIVEN_UP: PeerStatus.GIVEN_UP,
    EventKind.BANNED: PeerStatus.GONE,
}
STYLES = {PeerStatus.SERVING: "green", PeerStatus.GIVEN_UP: "red", PeerStatus.GONE: "red"}


@dataclass
class PeerRow:
    """A peer on the screen."""

    status: PeerStatus = PeerStatus.STARTING
    stage: int = -1  # -1 if none
    process: str = ""
    num_queued: int = 0
    num_computed: int = 0
    pace: float = 0.0  # seconds per pass, 0 if unknown


class SwarmView:
    """Mutable picture of a swarm, made from its events."""

    def __init__(self, num_stages: int, now: Callable[[], float] = time.monotonic) -> None:
        """now: a clock in seconds."""
        self.peers: dict[int, PeerRow] = {}
        self.counts = {"failure": 0, "move": 0, "lost gradient": 0}
        self.step, self.loss = 0, 0.0
        self._num_stages, self._now = num_stages, now
        self._finished = deque[float]()  # times at which the last microbatches were finished

    def listen(self, event: LiveEvent) -> None:
        """Take in an event."""
        row = self.peers.setdefault(event.peer, PeerRow()) if event.peer >= 0 else PeerRow()
        row.status = STATUS.get(event.kind, row.status)
        match event.kind:
            case EventKind.ATTACHED:
                row.process = f"{event.text} {event.number}"
            case EventKind.LOADING | EventKind.SERVING:
                row.stage = event.stage
            case EventKind.QUEUED:
                row.num_queued = event.number
            case EventKind.COMPUTED:
                row.num_computed += 1
                row.pace += (event.value - row.pace) * (PACE_SHARE if row.pace else 1)
                if (event.phase, event.stage) == (BACKWARD_PASS, 0):
                    self._finished.append(self._now())
            case EventKind.FAILED | EventKind.GIVEN_UP | EventKind.BANNED:
                row.stage = -1
                self.counts["failure"] += 1
            case EventKind.MOVED:
                self.counts["move"] += 1
            case EventKind.LOST:
                self.counts["lost gradient"] += event.number
            case EventKind.UPDATED:
                self.step, self.loss = event.number + 1, event.value

    @property
    def rate(self) -> float:
        """Microbatches per second, lately."""
        since = self._now() - RATE_SECONDS
        while self._finished and self._finished[0] < since:
            self._finished.popleft()
        return len(self._finished) / RATE_SECONDS

    @property
    def summary(self) -> str:
        """The counts so far, in a line."""
        return ", ".join([format_count(self.step, "step"), *(format_count(n, of) for of, n in self.counts.items())])

    def __rich__(self) -> RenderableType:
        """Return the picture of this moment."""
        table = Table(box=None, pad_edge=False)
        for name in ("stage", "peer", "process", "status", "s/pass", "passes", "queue"):
            table.add_column(name, justify="right" if name in ("stage", "peer", "s/pass", "passes") else "left")
        for stage in [*range(self._num_stages), -1]:
            rows = [(number, row) for number, row in self.peers.items() if row.stage == stage]
            present = [(number, row) for number, row in rows if stage >= 0 or row.status != PeerStatus.GONE]
            for number, row in present:
                name = "" if number != present[0][0] else str(stage) if stage >= 0 else "none"
                pace = f"{row.pace:.3f}" if row.pace else ""
                queue = "■" * min(row.num_queued, WIDEST_QUEUE) + f" {row.num_queued}"
                status = Text(row.status, STYLES.get(row.status, "yellow"))
                table.add_row(name, str(number), row.process, status, pace, str(row.num_computed), queue)
            if stage >= 0 and not rows:
                table.add_row(str(stage), "", "", Text("no peer", "red"), "", "", "")
        loss = f"  loss {self.loss:.4f}" if self.step else ""
        head = Text(f"{self.summary}{loss}  {self.rate:.1f} microbatches/s", "bold")
        return Group(Text(), head, table)


class Screen:
    """The view at the bottom of a terminal, below the lines that are printed. Used in a `with` statement.

    The output of a console that is not a terminal has only the lines.
    """

    def __init__(self, console: Console, view: SwarmView) -> None:
        self._console, self._view, self._drawn = console, view, 0.0
        self._live = Live(view, console=console, auto_refresh=False, transient=True, redirect_stdout=False)

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def write(self, text: str) -> None:
        """Print lines above the view."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def listen(self, event: LiveEvent) -> None:
        """Take in an event, print it if it is notable, and draw the view from time to time."""
        self._view.listen(event)
        if line := notable(event):
            self.write(f"swarm     {line}")
        if self._console.is_terminal and time.monotonic() - self._drawn > REDRAW_SECONDS:
            if not self._live.is_started:
                self._live.start()
                self._console.show_cursor(True)  # it would stay hidden if the process is killed
            self._drawn = time.monotonic()
            self._live.refresh()
