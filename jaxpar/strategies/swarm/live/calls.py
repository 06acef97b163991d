"""Calls to peers that have not been answered: answers, failures, and peers that are silent for too long.

A peer answers its calls in order. The time of a call begins when it is the first one that its peer has not answered. A
call may take `factor` times as long as a comparable one, and SLACK_SECONDS more. An ordinary call is compared with the
calls of the same peer that have the same label: its kind, the stage and the shapes. A rare one, which starts a process,
loads or compiles, is compared with those of all peers; so is the first ordinary call of a kind, with loading. Until any
peer has loaded, there is no limit.
"""

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxpar.strategies.swarm.routing import SMOOTHING

Label = Hashable
RARE = START, ATTACH, LOAD = "start", "attach", "load"
HEARTBEAT = "heartbeat"  # label of the calls that only find out whether an idle peer lives
DIED, SILENT, RAISED = "died", "silent", "raised"  # ways in which a peer fails
VALUE_LOST = "value lost"  # the call could not start, because an argument is lost with the machine that held it
SLACK_SECONDS = 2.0


class Patience:
    """Mutable record of the times of calls."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._rare: dict[Label, float] = {}  # longest time of all peers
        self._ordinary: dict[int, dict[Label, float]] = {}  # peer -> label -> longest time

    def observe(self, peer: int, label: Label, seconds: float) -> None:
        """Record a call that was answered after `seconds`."""
        if label in RARE:
            self._rare[label] = max(seconds, self._rare.get(label, 0.0))
        else:
            own = self._ordinary.setdefault(peer, {})
            before = own.get(label, 0.0)  # decays, so that one slow call does not raise the limit for good
            own[label] = max(seconds, before + SMOOTHING * (seconds - before))

    def forget(self, peer: int) -> None:
        """Forget the ordinary calls of a peer: it serves another stage, or was too slow for its limits."""
        self._ordinary.pop(peer, None)

    def limit(self, peer: int, label: Label) -> float:
        """Return the seconds after which a peer that has not answered is silent; inf if nothing is comparable yet."""
        if label in RARE:
            longest = self._rare.get(label)
        else:
            longest = self._ordinary.get(peer, {}).get(label, self._rare.get(LOAD))
        return math.inf if longest is None else SLACK_SECONDS + self._factor * longest


@dataclass(eq=False)
class Call:
    """A call that has not been answered. Times are those of `time.monotonic`."""

    peer: int  # the peer
    answer: Any  # reference to the `PeerAnswer`, or to the only result
    label: Label | None  # calls with the same label take comparable times; None: the call has no limit
    done: Callable[[Any, "Call"], object]  # receives the answer and the call
    start: float = math.inf  # since when it is the first call that its peer has not answered; inf if it is not yet
    ended: float = math.inf  # when it was answered


class CallFailure(NamedTuple):
    """A call that failed: its peer, by DIED, SILENT or RAISED, or VALUE_LOST; and a description."""

    call: Call
    kind: str
    text: str = ""


class Calls:
    """Mutable queues of calls, by peer."""

    def __init__(self, ray: Any, patience: float) -> None:
        self._ray, self.patience = ray, Patience(patience)
        self._queues: dict[int, list[Call]] = {}

    def add(self, peer: int, answer: Any, label: Label | None, done: Callable[[Any, Call], object]) -> Call:
        """Add a call that was just made."""
        queue = self._queues.setdefault(peer, [])
        call = Call(peer, answer, label, done, math.inf if queue else time.monotonic())
        queue.append(call)
        return call

    @property
    def is_idle(self) -> bool:
        """Whether no answer is expected from any peer, except that it lives."""
        return all(call.label == HEARTBEAT for queue in self._queues.values() for call in queue)

    def number(self, peer: int) -> int:
        """Return the number of calls that a peer has not answered."""
        return len(self._queues.get(peer, ()))

    def drop(self, peer: int) -> None:
        """Forget the calls of a peer."""
        self._queues.pop(peer, None)

    def restart(self) -> None:
        """Begin the times of all calls again, because nobody has waited for their answers since the last step."""
        for queue in self._queues.values():
            for call in queue[:1]:
                call.start = time.monotonic()

    def wait(self, most: float) -> list[CallFailure]:
        """Wait up to `most` seconds for an answer or the end of a limit, handle answers, and return failures."""
        pending = {call.answer: call for queue in self._queues.values() for call in queue}
        if not pending:
            time.sleep(min(most, 0.01))
            return []
        deadline = min(map(self._deadline, self._queues))
        timeout = max(min(most, deadline - time.monotonic()), 0.0)
        ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=timeout)
        if ready:  # and all others that are ready by now, so that no peer is silent whose answer is there
            ready, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=0)
            answered = set(ready)
            in_order = [call for answer, call in pending.items() if answer in answered]
            return [failure for call in in_order if (failure := self._receive(call))]
        now = time.monotonic()
        silent = [queue[0] for peer, queue in self._queues.items() if now > self._deadline(peer)]
        return [CallFailure(call, SILENT, f"no answer for {now - call.start:.3g} s") for call in silent]

    def _receive(self, call: Call) -> CallFailure | None:
        queue = self._queues.get(call.peer, [])
        if not queue or queue[0] is not call:  # dropped by the handler of another answer, or an earlier one is unread
            return None
        exceptions = self._ray.exceptions
        try:
            answer = self._ray.get(call.answer)
        except exceptions.RayActorError as error:
            lines = str(error).strip().splitlines()
            return CallFailure(call, DIED, lines[-1] if error.actor_init_failed else "its process ended")
        except exceptions.RayError as error:
            cause = error.cause if isinstance(error, exceptions.RayTaskError) else error
            if not isinstance(cause, exceptions.ObjectLostError):
                lines = str(cause).strip().splitlines()
                text = f"{type(cause).__name__}: {lines[0] if lines else ''}"[:200]
                return CallFailure(call, DIED if cause is error else RAISED, text)
            answer = None
        queue.remove(call)
        call.ended = time.monotonic()
        if call.label is not None:
            self.patience.observe(call.peer, call.label, call.ended - call.start)
        if queue:
            queue[0].start = call.ended
        if answer is None:
            return CallFailure(call, VALUE_LOST)
        call.done(answer, call)
        return None

    def _deadline(self, peer: int) -> float:
        queue = self._queues[peer]
        if not queue or queue[0].label is None:
            return math.inf
        return queue[0].start + self.patience.limit(peer, queue[0].label)
