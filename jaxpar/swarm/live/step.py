"""One global batch of a live swarm: routes its passes, and averages the gradients, until the batch is complete.

The trainer holds references to the messages between stages, which are in the object stores of the machines. So the
failure of a peer loses only what it has accumulated; the failure of a machine also loses its messages. The ledger
(ledger.py) knows what is missing, and it is computed again.

A value that is not finite may be honest: the training can diverge. Another peer of the stage therefore computes it
again. If the second value is finite, the first peer is banned when the step ends. If it is not, or if the stage has no
other peer, the step ends without an update, like a step of one device that is not finite.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpar.swarm import routing
from jaxpar.swarm.costs import Workload
from jaxpar.swarm.ledger import (
    BACKWARD_PASS,
    FORWARD_PASS,
    LOST,
    OUTPUT_GRADIENT,
    STAGE_INPUT,
    GradientLedger,
    next_phase,
)
from jaxpar.swarm.live.averaging import Averaging
from jaxpar.swarm.live.calls import Call
from jaxpar.swarm.live.events import EventKind, LiveEvent, emit
from jaxpar.swarm.live.members import HOSTILE, SUSPECTED, Members
from jaxpar.swarm.live.patience import LOAD
from jaxpar.swarm.live.received import MALFORMED, NONFINITE_VALUES, find_fault
from jaxpar.swarm.live.shapes import StepShapes
from jaxpar.swarm.live.tickets import Arrays, PeerAnswer

SENT_AHEAD = 2  # passes that are sent to a peer at a time: it receives the messages of one while it computes the other
STORE = -1  # holder of messages: the object stores, which hold them even if the peer that sent them fails
Value = tuple[int, int, int]  # STAGE_INPUT, OUTPUT_GRADIENT, LOSS or GRADIENT; stage; microbatch, or -1
LOSS, GRADIENT = 2, 3


class Diverged(Exception):
    """Raised if peers agree that a value is not finite."""


@dataclass(eq=False)
class Message:
    """A value that a peer computed: a reference to it, and the peer."""

    reference: Any
    peer: int


@dataclass(eq=False)
class LivePass:
    """A pass that a peer was assigned.

    Attributes:
      microbatch: index in the batch.
      phase: FORWARD_PASS or BACKWARD_PASS.
      stage: the stage.
      peer: the peer.
      is_counted: whether the gradient of a backward pass is accumulated.
      call: the call, once it is sent.
      is_first: whether the peer has not computed a pass with this program before.
      reads: the messages that it was sent, by STAGE_INPUT and OUTPUT_GRADIENT.
    """

    microbatch: int
    phase: int
    stage: int
    peer: int
    is_counted: bool
    call: Call | None = None
    is_first: bool = False
    reads: dict[int, Message] = field(default_factory=dict)


class LiveStep:
    """A step, until the gradients of all stages are averaged."""

    def __init__(
        self,
        members: Members,
        workload: Workload,
        shapes: StepShapes,
        microbatches: Sequence[Any],
        scalars: Arrays,
        compiled: set[Any],
    ) -> None:
        """Assign all microbatches.

        Args:
          members: the peers.
          workload: units of work of the passes.
          shapes: expected shapes.
          microbatches: references to the examples of each.
          scalars: data of the step's dropout key, and the divisor of the loss.
          compiled: (peer, phase, stage, key of shapes) of programs that peers have run; is added to.
        """
        self.members, self.shapes = members, shapes
        self.num_stages = len(workload.forward)
        self._work = (workload.forward, workload.backward)
        self._microbatches, self._scalars, self._compiled = microbatches, scalars, compiled
        self.ledger = GradientLedger(self.num_stages, len(microbatches))
        self.sums: dict[int, Arrays] = {}
        self.rows: list[list[float]] = []  # of the routing table, without step and version
        self.messages: dict[Value, Message] = {}
        self._active: dict[int, LivePass] = {}
        self._inbox: dict[int, list[tuple[int, int, LivePass]]] = {}
        self._numbers = itertools.count()
        self._parked: set[int] = set()
        self._suspects: dict[Value, int] = {}
        self.averaging: Averaging | None = None
        members.batch = self
        for microbatch in range(len(microbatches)):
            self._dispatch(microbatch)

    @property
    def is_averaged(self) -> bool:
        """Whether the total gradients of all stages are in the object stores."""
        return self.averaging is not None and self.averaging.is_complete

    @property
    def is_current(self) -> bool:
        """Whether the members still compute this batch."""
        return self.members.batch is self

    @property
    def suspects(self) -> set[int]:
        """Peers that sent values that are not finite, while other peers did not."""
        return set(self._suspects.values())

    # ---- passes ---------------------------------------------------------------------------------------------------

    def _dispatch(self, microbatch: int) -> None:
        """Assign the next pass of a microbatch to a peer of its stage."""
        self._parked.discard(microbatch)
        found = next_phase(self.ledger.progress(microbatch), self.num_stages)
        if found is None:
            if self.ledger.is_complete and self.averaging is None:
                self.averaging = Averaging(self)
            return
        phase, stage = found
        queues, work = self.members.queues, self._work[phase][stage]
        if not queues[stage].peers:
            self._parked.add(microbatch)
            return
        peer, queues[stage] = routing.select(queues[stage], work, self.members.rng.random())
        is_counted = phase == BACKWARD_PASS and stage not in self.ledger.progress(microbatch).counted
        one = LivePass(microbatch, phase, stage, peer, is_counted)
        self._active[microbatch] = one
        self.members.count(peer, 1)
        heapq.heappush(self._inbox.setdefault(peer, []), (-phase, next(self._numbers), one))
        emit(LiveEvent(EventKind.ASSIGNED, peer, stage, microbatch, phase=phase))
        self._feed(peer)

    def feed(self) -> None:
        """Send peers what they were assigned, as far as they have answered earlier calls."""
        for peer in [*self._inbox]:
            self._feed(peer)
        is_waiting = any(one.call is None for one in self._active.values())
        assert not (is_waiting and self.members.calls.is_idle), "a pass was assigned, but never sent"

    def _feed(self, peer: int) -> None:
        """Send a peer the passes that it was assigned, backward passes first."""
        inbox = self._inbox.get(peer, [])
        while inbox and self.members.calls.number(peer) < SENT_AHEAD:
            one = heapq.heappop(inbox)[-1]
            if self._active.get(one.microbatch) is not one:
                continue  # routed to another peer
            holders = self.ledger.holders(one.microbatch, one.phase, one.stage)
            if all(holders.values()):
                self._send(one, [*holders])
            else:  # a message was removed meanwhile
                self._drop(one)
                self._dispatch(one.microbatch)

    def _send(self, one: LivePass, reads: Sequence[int]) -> None:
        """Send a pass to its peer. reads: STAGE_INPUT and OUTPUT_GRADIENT, as far as it reads them."""
        one.reads = {value: self.messages[value, one.stage, one.microbatch] for value in reads}
        inputs = [
            one.reads[value].reference if value in one.reads else None
            for value in (STAGE_INPUT, OUTPUT_GRADIENT)[: 1 + one.phase]
        ]
        program = (one.peer, one.phase, one.stage, self.shapes.key)
        one.is_first = program not in self._compiled
        is_counted = (one.is_counted,) if one.phase == BACKWARD_PASS else ()
        one.call = self.members.call(
            one.peer,
            "backward" if one.phase == BACKWARD_PASS else "forward",
            *(self.members.ticket(one.peer), one.stage, self._microbatches[one.microbatch], self._scalars),
            *is_counted,
            *inputs,
            label=LOAD if one.is_first else program[1:],
            num_arrays=1,
            done=lambda answer, arrays, call: self._computed(one, answer, arrays[0], call),
        )
        emit(LiveEvent(EventKind.SENT, one.peer, one.stage, one.microbatch, phase=one.phase))

    def _computed(self, one: LivePass, answer: PeerAnswer, reference: Any, call: Call) -> None:
        if not self.is_current or self._active.get(one.microbatch) is not one:
            return  # this step has ended without an update, or another peer computes the pass
        if not self._is_sound(one, answer):
            return
        self._compiled.add((one.peer, one.phase, one.stage, self.shapes.key))
        start, now = self.members.since(call.start), self.members.since(call.ended)
        outcome = self.ledger.finish(one.microbatch, one.phase, one.stage, one.peer, len(self.rows))
        self.rows.append([one.microbatch, one.stage, one.phase, one.peer, start, now, outcome])
        target = one.stage + 1 if one.phase == FORWARD_PASS else one.stage - 1
        if 0 <= target < self.num_stages:
            value = (STAGE_INPUT if one.phase == FORWARD_PASS else OUTPUT_GRADIENT, target, one.microbatch)
            self.messages[value] = Message(reference, one.peer)
            self._holders(value).add(STORE)
        if not one.is_first:
            queues, work = self.members.queues, self._work[one.phase][one.stage]
            queues[one.stage] = routing.observe(queues[one.stage], one.peer, work, now - start)
        self._drop(one)
        place = one.peer, one.stage, one.microbatch
        emit(LiveEvent(EventKind.COMPUTED, *place, phase=one.phase, value=answer.seconds))
        self._feed(one.peer)
        self._dispatch(one.microbatch)

    def _is_sound(self, one: LivePass, answer: PeerAnswer) -> bool:
        """Handle the fault of a pass, and return whether there is none."""
        if answer.fault is not None:
            if answer.fault.kind in (MALFORMED, NONFINITE_VALUES):
                self._blame(answer.fault.source, one)
            else:
                self.members.fault(one.peer, answer)
            return False
        if one.phase == FORWARD_PASS and one.stage == self.num_stages - 1:
            kind = find_fault(list(answer.sums), self.shapes.sums)
            if kind == MALFORMED:
                self._ban(one.peer)
                return False
            if kind:
                self._suspect((LOSS, one.stage, one.microbatch), one.peer)
                return False
            self.sums[one.microbatch] = list(answer.sums)
        return True

    def _drop(self, one: LivePass) -> None:
        """Forget an assigned pass, which was computed, or which another peer computes."""
        del self._active[one.microbatch]
        self.members.count(one.peer, -1)

    # ---- faults ---------------------------------------------------------------------------------------------------

    def _blame(self, source: int, receiver: LivePass) -> None:
        """Handle a message that its receiver refused: read it, to find out who is wrong."""
        message, value = receiver.reads.get(source), (source, receiver.stage, receiver.microbatch)
        kind = self._examine(message.reference, self.shapes.messages[value[:2]]) if message else ""
        if message is None or not kind:
            self._ban(receiver.peer)  # it refused what is as expected
            return
        if self.messages.get(value) is message:  # otherwise its sender has been found out already
            self._forget(value)
            if kind == MALFORMED:
                self._ban(message.peer)
            else:
                self._suspect(value, message.peer)
        if self._active.get(receiver.microbatch) is receiver:
            self._drop(receiver)
            self._feed(receiver.peer)
            self._dispatch(receiver.microbatch)

    def _examine(self, reference: Any, like: Sequence[Any]) -> str:
        return find_fault(self.members.ray.get(reference), like)

    def _suspect(self, value: Value, peer: int) -> None:
        """Let another peer compute a value that is not finite. Raises Diverged if none can, or one has agreed."""
        stage = value[1] - 1 if value[0] == STAGE_INPUT else value[1] + 1 if value[0] == OUTPUT_GRADIENT else value[1]
        others = [entry for entry in self.members.queues[stage].peers if entry.peer != peer]
        emit(LiveEvent(EventKind.NONFINITE, peer, stage, value[2]))
        if value in self._suspects or not others:
            raise Diverged
        self._suspects[value] = peer
        self.members.give_up(peer, SUSPECTED, is_gone=False)

    def blame_gradient(self, stage: int, peer: int, kind: str) -> None:
        """Handle a gradient that a peer accumulated, and that is malformed or not finite."""
        self._stop_averaging()
        if kind == MALFORMED:
            self._ban(peer)
        else:
            self._suspect((GRADIENT, stage, -1), peer)

    def _ban(self, peer: int) -> None:
        """Ban a peer for good, with all that it sent."""
        for value, message in [*self.messages.items()]:
            if message.peer == peer:
                self._forget(value)
        self.members.give_up(peer, HOSTILE, is_gone=True, is_hostile=True)

    def _holders(self, value: Value) -> set[int]:
        kind, stage, microbatch = value
        return self.ledger.holders(microbatch, BACKWARD_PASS, stage)[kind]

    def _forget(self, value: Value) -> None:
        """Remove a message, so that it is computed again."""
        self._holders(value).clear()
        del self.messages[value]

    # ---- what the members report ----------------------------------------------------------------------------------

    def lose(self, peer: int) -> None:
        """Route again what a peer was assigned and had accumulated."""
        now = self.members.now
        lost = self.ledger.lose(peer)
        for _, row in lost:
            self.rows[row][-1] = LOST
        if lost:
            self._stop_averaging()
            emit(LiveEvent(EventKind.LOST, peer, number=len(lost)))
        again = [microbatch for microbatch, _ in lost]
        self._inbox.pop(peer, None)
        for one in [*self._active.values()]:
            counted = self.ledger.progress(one.microbatch).counted
            is_void = one.phase == BACKWARD_PASS and not one.is_counted and one.stage not in counted
            if one.peer == peer or is_void:
                if one.peer == peer:
                    self._interrupted(one, now)
                    del self._active[one.microbatch]
                else:
                    self._drop(one)
                again.append(one.microbatch)
        self._route(again)

    def _interrupted(self, one: LivePass, now: float) -> None:
        if one.call is not None and one.call.is_first:
            start = self.members.since(one.call.start)
            self.rows.append([one.microbatch, one.stage, one.phase, one.peer, start, now, LOST])

    def release(self, peer: int) -> None:
        """Route again what a peer was assigned but was not sent, because it moves."""
        waiting = [one for one in self._active.values() if one.peer == peer and one.call is None]
        self._inbox.pop(peer, None)
        for one in waiting:
            self._drop(one)
        self._route([one.microbatch for one in waiting])

    def resume(self) -> None:
        """Route microbatches that wait for a peer of their stage."""
        self._route(sorted(self._parked))

    def value_lost(self, call: Call) -> bool:
        """Compute again the messages of a pass that were lost with a machine, or average again."""
        for one in [*self._active.values()]:
            if one.call is call:
                for source, message in one.reads.items():
                    value = (source, one.stage, one.microbatch)
                    if self.messages.get(value) is message:
                        self._forget(value)
                self._drop(one)
                self._feed(one.peer)
                self._dispatch(one.microbatch)
                return True
        is_averaging = self.averaging is not None and self.averaging.has(call)
        if is_averaging:
            self.average_again()
        return is_averaging

    def average_again(self) -> None:
        """Average again from what the peers have accumulated."""
        self._stop_averaging()
        self.averaging = Averaging(self)

    def _stop_averaging(self) -> None:
        if self.averaging is not None:
            self.averaging.is_void = True
            self.averaging = None

    def _route(self, microbatches: Sequence[int]) -> None:
        for microbatch in dict.fromkeys(microbatches):
            if microbatch not in self._active:
                self._dispatch(microbatch)
