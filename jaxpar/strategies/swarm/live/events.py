"""Events of a live swarm, for a terminal view, a log or a test: who joined, computed, failed and moved."""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from jaxpar.errors import format_count


class EventKind(StrEnum):
    """The kinds of events."""

    STARTED = "started"
    ATTACHED = "attached"
    LOADING = "loading"
    SERVING = "serving"
    FAILED = "failed"
    GIVEN_UP = "given up"
    BANNED = "banned"
    MOVED = "moved"
    QUEUED = "queued"
    SENT = "sent"
    COMPUTED = "computed"
    LOST = "lost"
    AVERAGING = "averaging"
    UPDATED = "updated"


class PeerStatus(StrEnum):
    """The status of a peer (members.py)."""

    STARTING = "starting"
    WAITING = "waiting"
    LOADING = "loading"
    SERVING = "serving"
    GIVEN_UP = "given up"
    GONE = "gone"


class LiveEvent(NamedTuple):
    """An event."""

    kind: EventKind  # the kind
    peer: int = -1  # the peer; -1 if none
    stage: int = -1  # the stage; -1 if none
    # ATTACHED: the process; QUEUED: the number of passes that the peer has been assigned; LOST: the number of
    # gradients; UPDATED: the step; otherwise the microbatch, or -1
    number: int = -1
    text: str = ""  # ATTACHED: the machine; FAILED, GIVEN_UP, BANNED: the reason; MOVED: from where; otherwise empty
    phase: int = -1  # FORWARD_PASS or BACKWARD_PASS; -1 if none
    value: float = 0.0  # COMPUTED: the seconds that the peer measured for the pass; UPDATED: the mean loss; otherwise 0


listeners: list[Callable[[LiveEvent], None]] = []  # called in the trainer's thread, in order


def emit(event: LiveEvent) -> None:
    """Pass an event to all listeners."""
    for listener in listeners:
        listener(event)


def notable(event: LiveEvent) -> str:
    """Return a line for an event that changes who serves which stage; otherwise an empty one."""
    peer, stage = f"peer {event.peer}", f"stage {event.stage}"
    match event.kind:
        case EventKind.ATTACHED:
            return f"{peer} joined, process {event.number} on {event.text}"
        case EventKind.SERVING:
            return f"{peer} serves {stage}"
        case EventKind.FAILED:
            return f"{peer} of {stage} failed, {event.text}" if event.stage >= 0 else f"{peer} failed, {event.text}"
        case EventKind.GIVEN_UP:
            return f"{peer} of {stage} is given up until it answers, {event.text}"
        case EventKind.BANNED:
            return f"{peer} of {stage} was banned, it {event.text}"
        case EventKind.MOVED:
            return f"{peer} moves to {stage} {event.text}"
        case EventKind.LOST:
            return f"{format_count(event.number, 'gradient')} of {peer} computed again"
    return ""


class LinePrinter:
    """A listener that prints the notable events, as lines of a log.

    Peers that join and serve are printed after the first update only, because all do before it.
    """

    def __init__(self) -> None:
        self._has_updated = False

    def __call__(self, event: LiveEvent) -> None:
        """Take in an event."""
        self._has_updated |= event.kind == EventKind.UPDATED
        is_start = event.kind in (EventKind.ATTACHED, EventKind.SERVING) and not self._has_updated
        if not is_start and (line := notable(event)):
            print(f"swarm     {line}", flush=True)
