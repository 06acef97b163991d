"""The peers of a live swarm: who is there, who serves which stage, who fails, joins and moves.

`Members` is the transport of the engine (engine.py), which decides on snapshots with measured speeds. It starts and
attaches peers, lets them load the state of a stage, and gives up those that fail. The status of a peer:

STARTING -> attached -> WAITING -> load a stage -> LOADING -> SERVING -> (move) LOADING -> ...
a peer that is silent or suspected is GIVEN_UP, and attached again when it answers or is cleared; if it does not for
join_seconds, its process is ended
a peer that died, raised an error or sent a malformed array is GONE
"""

import contextlib
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxpar.errors import TrainingError
from jaxpar.strategies.swarm.engine import SwarmEngine
from jaxpar.strategies.swarm.live import calls, cluster
from jaxpar.strategies.swarm.live.calls import Call, CallFailure, Label
from jaxpar.strategies.swarm.live.events import EventKind, LiveEvent, PeerStatus, emit
from jaxpar.strategies.swarm.live.peer import SUPERSEDED, Arrays, PeerAnswer, PeerPlace, Ticket
from jaxpar.strategies.swarm.membership import ABSENT, Move, Swarm
from jaxpar.strategies.swarm.record import AssignedPass

SUSPECTED, HOSTILE = "sent values that are not finite", "sent a malformed array"
MOST_FAILED_STARTS = 3  # per peer, before any peer has started
HEARTBEAT_SECONDS = 2.0  # period in which idle peers are asked whether they live
SENT_AHEAD = 2  # passes that are sent to a peer at a time: it receives the messages of one while it computes the other

Done = Callable[[PeerAnswer, list[Any], Call], object]  # (answer, references to the arrays, call)


@dataclass(eq=False)
class LivePeer:
    """A peer."""

    handle: Any  # Ray's handle of the actor
    node: str  # Ray's identifier of its machine; empty until it is attached, if an earlier trainer started it
    place: PeerPlace | None = None  # its place, once it is attached
    status: PeerStatus = PeerStatus.STARTING
    generation: int = 0  # number of times that it was given up
    is_hostile: bool = False  # whether it was banned for what it sent
    # when it was given up because it was silent, in seconds since the run began; inf if it was not
    silent_since: float = math.inf
    pace: float | None = None  # its last seconds per unit of work; None if unknown
    loading: Call | None = None  # its newest call to load a stage


class StateSource(NamedTuple):
    """The state that peers load."""

    tree: Callable[[int], Any]  # stage -> reference to its part of the canonical state
    microbatch: Any  # reference to a microbatch, to compile programs for its shapes
    scalars: Arrays  # data of a dropout key, and a divisor of the loss


class Members:
    """Mutable set of the peers of a run."""

    def __init__(
        self, ray: Any, spec: Any, work: tuple[Sequence[float], Sequence[float]], settings: ConfigDict, seed: int
    ) -> None:
        """Start no peers yet. spec: reference to the SwarmSpec; work: see SwarmEngine; settings: config.swarm."""
        self.ray, self.settings, self._spec = ray, settings, spec
        self._most = int(settings.peers)  # peers at a time
        self.trainer = secrets.token_hex(8)
        self.peers: list[LivePeer] = []
        self.calls = calls.Calls(ray, settings.patience)
        self._begin = time.monotonic()
        totals = tuple(f + b for f, b in zip(*work, strict=True))
        self.engine = SwarmEngine(self, work, Swarm((), totals, (), ()), seed)  # decides what they do
        self.step_number = -1
        self.source: StateSource | None = None  # the state that peers load; None before the first step
        self.batch: Any = None  # the LiveStep (step.py) that they compute; None between steps
        self.counts: dict[str, int] = {"failures": 0, "moves": 0, "peers": 0}  # what the results of the run contain
        self._next_rebalancing = self._next_join = math.inf
        self._next_heartbeat = 0.0
        self._failed_starts, self._reason = 0, ""
        self._shown: dict[int, int] = {}  # lengths of queues in the events so far

    # ---- time -----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self.since(time.monotonic())

    def since(self, monotonic: float) -> float:
        """Return a time of `time.monotonic` as seconds since the run began."""
        return monotonic - self._begin

    def turn(self) -> None:
        """Handle what happens next: an answer, a failure, or the end of a period.

        Raises TrainingError if a stage has no peer and nothing can change that, or another trainer has the peers.
        """
        wake = min(self._next_rebalancing, self._next_join) - self.now
        if self.calls.is_idle and wake == math.inf:
            empty = [stage for stage, queue in enumerate(self.engine.queues) if not queue]
            where = f"stage {empty[0]} has no peer" if empty else "no peer answers"
            last = f"; the last failure: {self._reason}" if self._reason else ""
            raise TrainingError(
                f"{where}, and no other peer can move there or join (config.swarm.join_seconds=0){last}"
            )
        for failure in self.calls.wait(max(min(wake, 1.0), 0.0)):
            if self.peers[failure.call.peer].status != PeerStatus.GONE:  # otherwise another call of it has failed, too
                self._handle(failure)
        for number in range(len(self.peers)):
            self.engine.feed(number)
        if self.now >= self._next_rebalancing:
            self._rebalance()
        if self.now >= self._next_join:
            self._start_peers()
        if self.now >= self._next_heartbeat:
            self._next_heartbeat = self.now + HEARTBEAT_SECONDS
            for number, peer in enumerate(self.peers):
                if peer.status in (PeerStatus.WAITING, PeerStatus.SERVING) and not self.calls.number(number):
                    self.call(number, "answer", label=calls.HEARTBEAT)
        for number, depth in self.engine.loads.depth.items():
            if depth != self._shown.get(number, 0):
                self._shown[number] = depth
                emit(LiveEvent(EventKind.QUEUED, number, number=depth))

    def begin_periods(self) -> None:
        """Start the periods of rebalancing and joining."""
        s = self.settings
        self._next_rebalancing = self.now + s.rebalance_seconds if s.rebalance_seconds else math.inf
        self._next_join = self.now + s.join_seconds if s.join_seconds else math.inf
        self.engine.loads.read(len(self.peers), 1.0)

    # ---- calls ----------------------------------------------------------------------------------------------------

    def call(
        self,
        peer: int,
        method: str,
        *arguments: Any,
        label: Label | None,
        num_arrays: int = 0,
        done: Done | None = None,
    ) -> Call:
        """Call a method of a peer in the present step.

        done: receives the answer, and the references to its `num_arrays` other results; None: only a fault counts.
        """
        ticket = Ticket(self.trainer, self.peers[peer].generation, self.step_number)
        remote = getattr(self.peers[peer].handle, method).options(num_returns=1 + num_arrays).remote
        result = remote(ticket, *arguments)
        answer, *arrays = result if num_arrays else [result]

        def received(got: PeerAnswer, call: Call) -> None:
            if got.fault == SUPERSEDED:
                name = self.settings.namespace
                raise TrainingError(f"another trainer has taken the peers of config.swarm.namespace={name!r}")
            if done is not None:
                done(got, arrays, call)
            elif got.fault:
                self.restart(peer, got.fault)

        return self.calls.add(peer, answer, label, received)

    # ---- joining --------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Attach the peers of an earlier trainer, and start new ones where the cluster has room."""
        for handle in cluster.named_peers(self.ray, self.settings.namespace):
            self._add(LivePeer(handle, ""), calls.ATTACH)
        self._start_peers()

    def _start_peers(self) -> None:
        """Start peers on machines with room for them."""
        if self.settings.join_seconds:
            self._next_join = self.now + self.settings.join_seconds
        if any(peer.node == "" and peer.status == PeerStatus.STARTING for peer in self.peers):
            return  # peers of an earlier trainer, whose machines are not known yet
        for number, peer in enumerate(self.peers):
            if self.now - peer.silent_since >= self.settings.join_seconds > 0:
                self._end(number, f"no answer for {self.now - peer.silent_since:.3g} s more")
        free = self._most - sum(peer.status != PeerStatus.GONE for peer in self.peers)
        for node, room in cluster.rooms(self.ray, self.settings):
            taken = sum(
                peer.node == node and (peer.status != PeerStatus.GONE or peer.is_hostile) for peer in self.peers
            )
            number = max(min(room - taken, free), 0)
            free -= number
            for _ in range(number):
                self._add(LivePeer(cluster.start_peer(self.ray, node, self.settings), node), calls.START)

    def _add(self, peer: LivePeer, label: Label) -> None:
        number = len(self.peers)
        self.peers.append(peer)
        paces = [entry.pace for queue in self.engine.queues for entry in queue]
        speed = 1 / (sum(paces) / len(paces)) if paces else 1.0
        s = self.engine.swarm
        self.engine.swarm = s._replace(speed=(*s.speed, speed), stage=(*s.stage, ABSENT), ready=(*s.ready, 0.0))
        emit(LiveEvent(EventKind.STARTED, number))
        self._attach(number, label)

    def _attach(self, peer: int, label: Label | None = calls.ATTACH) -> None:
        result = self.peers[peer].handle.attach.remote(self.trainer, self._spec)
        self.calls.add(peer, result, label, lambda place, _call: self._attached(peer, place))

    def _attached(self, peer: int, place: PeerPlace) -> None:
        one = self.peers[peer]
        one.place, one.node, one.status, one.silent_since = place, place.node, PeerStatus.WAITING, math.inf
        self.counts["peers"] += 1
        self._failed_starts = -MOST_FAILED_STARTS * self._most
        emit(LiveEvent(EventKind.ATTACHED, peer, number=place.pid, text=place.host))
        if self.source is not None:
            self.engine.join(peer)

    def distribute(self, source: StateSource) -> None:
        """Let all peers load a state: each that of its stage, or of the stage where it is needed most."""
        self.source = source
        self.engine.queues[:] = [()] * self.engine.num_stages
        for number, peer in enumerate(self.peers):
            if peer.status in (PeerStatus.WAITING, PeerStatus.LOADING, PeerStatus.SERVING):
                stage = self.engine.swarm.stage[number]
                if stage == ABSENT:
                    self.engine.join(number)
                else:
                    self.engine.load(Move(number, ABSENT, stage))

    def load(self, move: Move) -> float:
        """Let a peer load the state of a stage, after the passes that it has started."""
        assert self.source is not None
        peer, source, stage = move
        one = self.peers[peer]
        if source != ABSENT:
            self.counts["moves"] += 1
            emit(LiveEvent(EventKind.MOVED, peer, stage, text=f"from stage {source}"))
            self._remember_pace(peer, source)
        one.status = PeerStatus.LOADING
        emit(LiveEvent(EventKind.LOADING, peer, stage))
        arguments = (stage, self.source.tree(stage), self.source.microbatch, self.source.scalars)
        self.calls.patience.forget(peer)
        one.loading = self.call(peer, "serve", *arguments, label=calls.LOAD, done=self._served)
        return math.inf

    def _served(self, answer: PeerAnswer, _arrays: list[Any], call: Call) -> None:
        peer, one = call.peer, self.peers[call.peer]
        if one.loading is not call:
            return  # it loads another stage
        if answer.fault:
            self.restart(peer, answer.fault)
            return
        one.status = PeerStatus.SERVING
        emit(LiveEvent(EventKind.SERVING, peer, self.engine.swarm.stage[peer]))
        self.engine.serve(peer, one.pace)

    def _rebalance(self) -> None:
        """Apply the rule of rebalancing to measured speeds and loads."""
        s, swarm = self.settings, self.engine.swarm
        self._next_rebalancing = self.now + s.rebalance_seconds
        paces = {entry.peer: entry.pace for queue in self.engine.queues for entry in queue if entry.num_observed}
        speed = tuple(1 / paces[peer] if peer in paces else old for peer, old in enumerate(swarm.speed))
        self.engine.swarm = swarm._replace(speed=speed)
        self.engine.rebalance(s.rule, self.engine.loads.read(len(self.peers), s.rebalance_seconds))

    def _remember_pace(self, peer: int, stage: int) -> None:
        for entry in self.engine.queues[stage]:
            if entry.peer == peer and entry.num_observed:
                self.peers[peer].pace = entry.pace

    # ---- passes ---------------------------------------------------------------------------------------------------

    def send(self, one: AssignedPass) -> None:
        """Put a pass into the inbox of its peer at once: what it reads is in the object stores."""
        self.engine.receive(one)

    def is_free(self, peer: int) -> bool:
        """Return whether a peer has answered earlier calls."""
        return self.calls.number(peer) < SENT_AHEAD

    def start(self, one: AssignedPass) -> None:
        """Send a pass to its peer."""
        self.batch.start(one)

    def average(self, _step: int) -> Any:
        """Average the gradients of all stages, and return the averaging."""
        return self.batch.average()

    def all_started(self, _step: int) -> None:
        """Do nothing: the trainer begins the next batch after the update."""

    # ---- failures -------------------------------------------------------------------------------------------------

    def _handle(self, failure: CallFailure) -> None:
        call, kind, text = failure
        if kind == calls.VALUE_LOST:
            if self.batch is None or not self.batch.value_lost(call):
                # It was in an update or a state: the peer loads the newest one.
                self.restart(call.peer, "lost what it should have received")
            return
        self.give_up(call.peer, f"{kind}: {text}", is_gone=kind != calls.SILENT)
        if kind == calls.SILENT:
            if self.peers[call.peer].place is not None:  # otherwise its process still starts
                self.peers[call.peer].silent_since = self.now
            self._attach(call.peer, label=None)

    def restart(self, peer: int, reason: str) -> None:
        """Give up a peer, and attach it again."""
        self.give_up(peer, reason, is_gone=False)
        self._attach(peer)

    def give_up(self, peer: int, reason: str, *, is_gone: bool, is_hostile: bool = False) -> None:
        """Ban a peer. What it was assigned and has accumulated goes to others; what it answers later is ignored.

        is_gone: whether it never returns; its process is ended. is_hostile: whether its place stays empty, too.
        """
        one, stage = self.peers[peer], self.engine.swarm.stage[peer]
        if one.status == PeerStatus.STARTING:
            self._failed_starts += 1
        one.status, one.is_hostile = (PeerStatus.GONE if is_gone else PeerStatus.GIVEN_UP), is_hostile
        one.generation += 1
        self.calls.drop(peer)
        if stage != ABSENT:
            self._remember_pace(peer, stage)
        self.counts["failures"] += 1
        self._reason = reason
        kind = EventKind.BANNED if is_hostile else EventKind.FAILED if is_gone else EventKind.GIVEN_UP
        emit(LiveEvent(kind, peer, stage, text=reason))
        if is_gone:
            self.ray.kill(one.handle)
        if self._failed_starts >= MOST_FAILED_STARTS * self._most:
            raise TrainingError(f"no peer could start; the last failure: {reason}")
        if self.batch:
            self.batch.interrupt(peer)
        if num_lost := self.engine.leave(peer):
            emit(LiveEvent(EventKind.LOST, peer, number=num_lost))

    def _end(self, peer: int, reason: str) -> None:
        """End the process of a peer that was given up, so that another one can take its place."""
        one = self.peers[peer]
        one.status, one.silent_since = PeerStatus.GONE, math.inf
        self.calls.drop(peer)
        emit(LiveEvent(EventKind.FAILED, peer, text=f"{calls.SILENT}: {reason}"))
        self.ray.kill(one.handle)
        if one.place and one.place.host == socket.gethostname():  # a stopped process does not see Ray's request
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.place.pid, signal.SIGKILL)

    def clear(self, peer: int) -> None:
        """Let a peer return that was suspected without reason."""
        if self.peers[peer].status == PeerStatus.GIVEN_UP:
            self._attach(peer)

    def end_all(self) -> None:
        """End all peers."""
        for peer in self.peers if self.ray.is_initialized() else ():
            if peer.status != PeerStatus.GONE:
                self.ray.kill(peer.handle)
