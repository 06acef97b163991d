"""Events of a live swarm, for a terminal view, a log or a test: who joined, computed, failed and moved."""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple


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
    ASSIGNED = "assigned"
    SENT = "sent"
    COMPUTED = "computed"
    LOST = "lost"
    AVERAGING = "averaging"
    UPDATED = "updated"
    NONFINITE = "nonfinite"


class LiveEvent(NamedTuple):
    """An event.

    Attributes:
      kind: the kind.
      peer: the peer; -1 if none.
      stage: the stage; -1 if none.
      number: ATTACHED: the process; QUEUED: the number of passes that the peer has been assigned; LOST: the number of
        gradients; UPDATED: the step; otherwise the microbatch, or -1.
      text: ATTACHED: the machine; FAILED, GIVEN_UP, BANNED: the reason; MOVED: from where; otherwise empty.
      phase: FORWARD_PASS or BACKWARD_PASS; -1 if none.
      value: COMPUTED: the seconds that the peer measured for the pass; UPDATED: the mean loss; otherwise 0.
    """

    kind: EventKind
    peer: int = -1
    stage: int = -1
    number: int = -1
    text: str = ""
    phase: int = -1
    value: float = 0.0


listeners: list[Callable[[LiveEvent], None]] = []  # called in the trainer's thread, in order


def emit(event: LiveEvent) -> None:
    """Pass an event to all listeners."""
    for listener in listeners:
        listener(event)
