"""One global batch of a live swarm: sends its passes to peers, checks what they send, and averages the gradients.

The trainer holds references to the messages between stages, which are in the object stores of the machines. So the
failure of a peer loses only what it has accumulated; the failure of a machine also loses its messages. The engine
(engine.py) knows what is missing, and lets it be computed again.

A value that is not finite may be honest: the training can diverge. Another peer of the stage therefore computes it
again. If the second value is finite, the first peer is banned when the step ends. If it is not, or if the stage has no
other peer, the step ends without an update, like a step of one device that is not finite.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jaxpar.strategies.swarm.live.calls import LOAD, Call
from jaxpar.strategies.swarm.live.events import EventKind, LiveEvent, emit
from jaxpar.strategies.swarm.live.members import HOSTILE, SUSPECTED, Members
from jaxpar.strategies.swarm.live.peer import MALFORMED, STALE, Arrays, PeerAnswer, StepShapes, find_fault, shard_sizes
from jaxpar.strategies.swarm.progress import BACKWARD_PASS, FORWARD_PASS, OUTPUT_GRADIENT, STAGE_INPUT, BatchProgress
from jaxpar.strategies.swarm.record import AssignedPass

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


class SentPass(NamedTuple):
    """A pass that was sent to its peer."""

    call: Call
    is_first: bool  # whether the peer has not computed a pass with this program before
    reads: dict[int, Message]  # the messages that it was sent, by STAGE_INPUT and OUTPUT_GRADIENT


class LiveStep:
    """A step, until the gradients of all stages are averaged."""

    def __init__(
        self,
        members: Members,
        number: int,
        shapes: StepShapes,
        microbatches: Sequence[Any],
        scalars: Arrays,
        compiled: set[Any],
    ) -> None:
        """Assign all microbatches.

        number: of the step in the engine; microbatches: references to the examples of each; scalars: from
        `SwarmPrograms.begin`; compiled: (peer, phase, stage, key of shapes) of programs that peers have run, which is
        added to.
        """
        self.members, self.engine, self.number, self.shapes = members, members.engine, number, shapes
        self._microbatches, self._scalars, self._compiled = microbatches, scalars, compiled
        self.sums: dict[int, Arrays] = {}  # leaves of the metric sums of each microbatch
        self.messages: dict[Value, Message] = {}  # those that the object stores hold
        self._sent: dict[AssignedPass, SentPass] = {}
        self._suspects: dict[Value, int] = {}
        members.batch = self
        self.engine.begin(number, len(microbatches))

    def end(self) -> None:
        """End the step: its gradients are totals, or it ends without an update."""
        self.members.batch = None
        self.engine.end(self.number)

    @property
    def progress(self) -> BatchProgress:
        """The progress of the batch."""
        return self.engine.batches[self.number].progress

    @property
    def averaging(self) -> "Averaging | None":
        """The averaging, if there is one that is not void."""
        return self.engine.batches[self.number].averaging

    @property
    def suspects(self) -> set[int]:
        """Peers that sent values that are not finite, while other peers did not."""
        return set(self._suspects.values())

    # ---- passes ---------------------------------------------------------------------------------------------------

    def start(self, one: AssignedPass) -> None:
        """Send a pass to its peer."""
        is_backward, place = one.phase == BACKWARD_PASS, (one.stage, one.microbatch)
        values = self.progress.holders(one.microbatch, one.phase, one.stage)
        reads = {value: self.messages[value, *place] for value in values}
        inputs = [reads[value].reference if value in reads else None for value in (STAGE_INPUT, OUTPUT_GRADIENT)]
        one.is_repeat = is_backward and self.progress.is_counted(one.microbatch, one.stage)
        is_counted = is_backward and not one.is_repeat  # whether its gradient is accumulated
        program = (one.peer, one.phase, one.stage, self.shapes.key)
        is_first = program not in self._compiled
        call = self.members.call(
            one.peer,
            "compute",
            *(one.phase, one.stage, self._microbatches[one.microbatch], self._scalars, is_counted),
            *inputs,
            label=LOAD if is_first else program[1:],
            num_arrays=1,
            done=lambda answer, arrays, _call: self._computed(one, answer, arrays[0]),
        )
        self._sent[one] = SentPass(call, is_first, reads)
        emit(LiveEvent(EventKind.SENT, one.peer, *place, phase=one.phase))

    def _computed(self, one: AssignedPass, answer: PeerAnswer, reference: Any) -> None:
        if not self.engine.is_active(one):
            return
        if answer.fault == STALE:
            self.members.restart(one.peer, STALE)
            return
        if answer.fault:
            self._blame(answer.source, one)
            return
        last = self.engine.num_stages - 1
        if one.phase == FORWARD_PASS and one.stage == last:
            if fault := find_fault(list(answer.sums), self.shapes.sums):
                self._accuse((LOSS, one.stage, one.microbatch), one.peer, fault)
                return
            self.sums[one.microbatch] = list(answer.sums)
        call, is_first, _ = self._sent[one]
        self._compiled.add((one.peer, one.phase, one.stage, self.shapes.key))
        self.engine.record.begin_pass(one, one.step, self.members.since(call.start))
        kind, target = (STAGE_INPUT, one.stage + 1) if one.phase == FORWARD_PASS else (OUTPUT_GRADIENT, one.stage - 1)
        if 0 <= target <= last:
            value = (kind, target, one.microbatch)
            self.messages[value] = Message(reference, one.peer)
            self._holders(value).add(STORE)
        place = one.peer, one.stage, one.microbatch
        emit(LiveEvent(EventKind.COMPUTED, *place, phase=one.phase, value=answer.seconds))
        self.engine.finish(one, self.members.since(call.ended), is_typical=not is_first)

    # ---- faults ---------------------------------------------------------------------------------------------------

    def _blame(self, source: int, receiver: AssignedPass) -> None:
        """Handle a message that its receiver refused: read it, to find out who is wrong."""
        message, value = self._sent[receiver].reads.get(source), (source, receiver.stage, receiver.microbatch)
        kind = message and find_fault(self.members.ray.get(message.reference), self.shapes.messages[value[:2]])
        if message is None or not kind:
            self._accuse(value, receiver.peer, MALFORMED)  # it refused what is as expected
            return
        if self.messages.get(value) is message:  # otherwise its sender has been found out already
            self._forget(value)
            self._accuse(value, message.peer, kind)
        if self.engine.is_active(receiver):
            self.engine.reroute([receiver])

    def blame_gradient(self, stage: int, peer: int, kind: str) -> None:
        """Handle a gradient that a peer accumulated, and that is malformed or not finite."""
        self.engine.batches[self.number].averaging = None
        self._accuse((GRADIENT, stage, -1), peer, kind)

    def _accuse(self, value: Value, peer: int, kind: str) -> None:
        """Ban a peer for good, with all that it sent; or let another one compute its value, which is not finite.

        Raises Diverged if none can, or one has agreed.
        """
        if kind == MALFORMED:
            for sent, message in [*self.messages.items()]:
                if message.peer == peer:
                    self._forget(sent)
            self.members.give_up(peer, HOSTILE, is_gone=True, is_hostile=True)
            return
        stage = value[1] + {STAGE_INPUT: -1, OUTPUT_GRADIENT: 1}.get(value[0], 0)
        others = [entry for entry in self.engine.queues[stage] if entry.peer != peer]
        if value in self._suspects or not others:
            raise Diverged
        self._suspects[value] = peer
        self.members.give_up(peer, SUSPECTED, is_gone=False)

    def _holders(self, value: Value) -> set[int]:
        kind, stage, microbatch = value
        return self.progress.holders(microbatch, BACKWARD_PASS, stage)[kind]

    def _forget(self, value: Value) -> None:
        """Remove a message, so that it is computed again."""
        self._holders(value).clear()
        del self.messages[value]

    # ---- what the members report ----------------------------------------------------------------------------------

    def interrupt(self, peer: int) -> None:
        """Record the pass that a peer was computing when it failed."""
        for one in self.engine.passes_of(peer):
            if one in self._sent and self._sent[one].call.start < math.inf:
                self.engine.record.begin_pass(one, one.step, self.members.since(self._sent[one].call.start))
                self.engine.record.end_pass(one, self.members.now)

    def value_lost(self, call: Call) -> bool:
        """Compute again what a call should have received: the messages of a pass, or the averaging.

        Returns whether the call belongs to the batch.
        """
        for one in self.engine.passes_of(call.peer):
            if one in self._sent and self._sent[one].call is call:
                for source, message in self._sent[one].reads.items():
                    value = (source, one.stage, one.microbatch)
                    if self.messages.get(value) is message:
                        self._forget(value)
                self.engine.reroute([one])
                return True
        is_averaging = self.averaging is not None and call in self.averaging.calls
        if is_averaging:
            self.average_again()
        return is_averaging

    def average(self) -> "Averaging":
        """Average the gradients of all stages."""
        return Averaging(self)

    def average_again(self) -> None:
        """Average again from what the peers have accumulated."""
        self.engine.batches[self.number].averaging = None
        self.engine.average()


class Averaging:
    """An averaging of the gradients of all stages among the peers that have accumulated some, by the object stores.

    Each of n contributors splits its gradient into n shards. Contributor j adds up shard j of all, in the order of the
    peers, and everybody reads the n totals: as in a ring all-reduce, a peer sends and receives 2 (n - 1) / n gradients.
    The loss is divided by the weight of the whole batch, so that the sum over the peers is the mean.
    """

    def __init__(self, step: LiveStep) -> None:
        """Ask the contributors of all stages for their shards."""
        self._step, self.calls = step, list[Call]()
        # by stage, the peers that have accumulated gradients, in order
        self.contributors = [sorted(step.progress.contributors(stage)) for stage in range(step.engine.num_stages)]
        self._shards: list[dict[int, list[Any]]] = [{} for _ in self.contributors]  # by stage and peer, references
        # by stage, references to the shards of the total gradient
        self.totals: list[list[Any]] = [[None] * len(peers) for peers in self.contributors]
        emit(LiveEvent(EventKind.AVERAGING))
        for stage, peers in enumerate(self.contributors):
            for peer in peers:
                published = partial(self._published, stage, peer)
                self._call(stage, peer, "publish", stage, len(peers), num_arrays=len(peers), done=published)

    @property
    def is_complete(self) -> bool:
        """Whether all totals are computed."""
        return all(total is not None for totals in self.totals for total in totals)

    def _published(self, stage: int, peer: int, shards: list[Any]) -> None:
        """Let the contributors of a stage add up their shards, once all shards are there."""
        peers, of_stage = self.contributors[stage], self._shards[stage]
        of_stage[peer] = shards
        if len(peers) == 1:
            self.totals[stage] = shards
        elif len(of_stage) == len(peers):
            sizes = shard_sizes(self._step.shapes.sizes[stage], len(peers))
            for index, (reducer, size) in enumerate(zip(peers, sizes, strict=True)):
                parts = [of_stage[one][index] for one in peers]
                reduced = partial(self._reduced, stage, index)
                self._call(stage, reducer, "reduce", size, *parts, num_arrays=1, done=reduced)

    def _reduced(self, stage: int, index: int, totals: list[Any]) -> None:
        [self.totals[stage][index]] = totals

    def _call(
        self, stage: int, peer: int, method: str, *arguments: Any, num_arrays: int, done: Callable[[list[Any]], None]
    ) -> None:
        """Call a contributor. done: receives the references to the arrays if the answer has no fault."""
        step = self._step

        def answered(answer: PeerAnswer, arrays: list[Any], _call: Call) -> None:
            if step.members.batch is not step or step.averaging is not self:
                return  # this averaging is void
            if answer.fault == STALE:
                step.members.restart(peer, STALE)
            elif answer.fault:
                step.blame_gradient(stage, self.contributors[stage][answer.source], answer.fault)
            else:
                done(arrays)

        label = (method, stage)
        call = step.members.call(peer, method, *arguments, label=label, num_arrays=num_arrays, done=answered)
        self.calls.append(call)
