"""The peers of a live swarm: who serves which stage, who fails, joins and moves.

All decisions are those of routing.py, membership.py and rebalancing.py, on snapshots with measured speeds. This file
carries them out: it starts and attaches peers, lets them load the state of a stage, and gives up those that fail.
"""

import contextlib
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxpar.errors import TrainingError
from jaxpar.swarm import routing
from jaxpar.swarm.live import cluster
from jaxpar.swarm.live.calls import HEARTBEAT, SILENT, Call, CallFailure, Calls, ValueLost
from jaxpar.swarm.live.events import EventKind, LiveEvent, emit
from jaxpar.swarm.live.patience import ATTACH, LOAD, START, Label, Patience
from jaxpar.swarm.live.roster import LivePeer, LiveSettings, PeerStatus, StateSource, StepInProgress
from jaxpar.swarm.live.tickets import SUPERSEDED, PeerAnswer, PeerPlace, Ticket
from jaxpar.swarm.membership import ABSENT, Move, Swarm, neediest, placed, refills, removed
from jaxpar.swarm.rebalancing import REBALANCING_RULES

SUSPECTED, HOSTILE = "sent values that are not finite", "sent a malformed array"
MOST_FAILED_STARTS = 3  # per peer, before any peer has started
HEARTBEAT_SECONDS = 2.0  # period in which idle peers are asked whether they live

Done = Callable[[PeerAnswer, list[Any], Call], None]  # (answer, references to the arrays, call)


class Members:
    """Mutable set of the peers of a run."""

    def __init__(self, ray: Any, spec: Any, work: tuple[float, ...], settings: LiveSettings) -> None:
        """Start no peers yet. spec: reference to the SwarmSpec; work: by stage, units of work of a microbatch."""
        self.ray, self.settings, self._spec = ray, settings, spec
        self.trainer = secrets.token_hex(8)
        self.peers: list[LivePeer] = []
        self.swarm = Swarm((), work, (), ())
        self.queues = [routing.StageQueue()] * len(work)
        self.calls = Calls(ray, Patience(settings.patience))
        self.rng = np.random.default_rng(settings.seed)
        self.step_number = -1
        self.source: StateSource | None = None
        self.batch: StepInProgress | None = None
        self.counts: dict[str, int] = {"failures": 0, "moves": 0, "peers": 0}
        self._begin = time.monotonic()
        self._next_rebalancing = self._next_join = math.inf
        self._next_heartbeat = 0.0
        self._failed_starts, self._reason = 0, ""
        self._loads: dict[int, Call] = {}  # the newest call of each peer to load a stage

    # ---- time -----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._begin

    def turn(self) -> None:
        """Handle what happens next: an answer, a failure, or the end of a period.

        Raises:
          TrainingError: a stage has no peer, and nothing can change that; or another trainer has taken the peers.
        """
        wake = min(self._next_rebalancing, self._next_join) - self.now
        if self.calls.is_idle and wake == math.inf:
            self._stuck()
        for failure in self.calls.wait(max(min(wake, 1.0), 0.0)):
            if self.peers[failure.call.peer].status == PeerStatus.GONE:
                continue  # another call of this peer has failed, too
            if isinstance(failure, ValueLost):
                self._lose_value(failure.call)
            else:
                self._fail_call(failure)
        if self.batch:
            self.batch.feed()
        if self.now >= self._next_rebalancing:
            self.rebalance()
        if self.now >= self._next_join:
            self.join()
        if self.now >= self._next_heartbeat:
            self._next_heartbeat = self.now + HEARTBEAT_SECONDS
            for number, peer in enumerate(self.peers):
                if peer.status in (PeerStatus.WAITING, PeerStatus.SERVING) and not self.calls.number(number):
                    ticket = self.ticket(number)
                    self.call(number, "answer", ticket, label=HEARTBEAT, num_arrays=0, done=self.acknowledge)

    def since(self, monotonic: float) -> float:
        """Return a time of `time.monotonic` as seconds since the run began."""
        return monotonic - self._begin

    def begin_periods(self) -> None:
        """Start the periods of rebalancing and joining."""
        s = self.settings
        self._next_rebalancing = self.now + s.rebalance_seconds if s.rebalance_seconds else math.inf
        self._next_join = self.now + s.join_seconds if s.join_seconds else math.inf
        for peer in self.peers:
            peer.area, peer.changed = 0.0, self.now

    def _stuck(self) -> None:
        empty = [stage for stage, queue in enumerate(self.queues) if not queue.peers]
        where = f"stage {empty[0]} has no peer" if empty else "no peer answers"
        reason = f"; the last failure: {self._reason}" if self._reason else ""
        raise TrainingError(f"{where}, and no other peer can move there or join (config.swarm.join_seconds=0){reason}")

    # ---- calls ----------------------------------------------------------------------------------------------------

    def ticket(self, peer: int) -> Ticket:
        """Return the ticket of a call to a peer in the present step."""
        return Ticket(self.trainer, self.peers[peer].generation, self.step_number)

    def call(self, peer: int, method: str, *arguments: Any, label: Label | None, num_arrays: int, done: Done) -> Call:
        """Call a method of a peer. done: receives the answer, the references to its `num_arrays` other results."""
        remote = getattr(self.peers[peer].handle, method).options(num_returns=1 + num_arrays).remote
        result = remote(*arguments)
        answer, *arrays = result if num_arrays else [result]
        return self.calls.add(peer, answer, label, lambda got, call: done(got, arrays, call))

    def acknowledge(self, answer: PeerAnswer, _arrays: list[Any], call: Call) -> None:
        """Handle the answer to a call that has no other result."""
        if answer.fault is not None:
            self.fault(call.peer, answer)

    # ---- joining --------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Attach the peers of an earlier trainer, and start new ones where the cluster has room."""
        for handle in cluster.named_peers(self.ray, self.settings.namespace):
            self._add(LivePeer(handle, ""), ATTACH)
        self.join()

    def join(self) -> None:
        """Start peers on machines with room for them."""
        if self.settings.join_seconds:
            self._next_join = self.now + self.settings.join_seconds
        if any(peer.node == "" and peer.status == PeerStatus.STARTING for peer in self.peers):
            return  # peers of an earlier trainer, whose machines are not known yet
        for number, peer in enumerate(self.peers):
            if self.now - peer.silent_since >= self.settings.join_seconds > 0:
                self._end(number, f"no answer for {self.now - peer.silent_since:.3g} s more")
        present = [peer for peer in self.peers if peer.status != PeerStatus.GONE]
        for room in cluster.rooms(self.ray, self.settings.resources):
            taken = sum(
                peer.node == room.node and (peer.status != PeerStatus.GONE or peer.is_hostile) for peer in self.peers
            )
            for _ in range(min(room.number - taken, self.settings.most - len(present))):
                s = self.settings
                handle = cluster.start_peer(self.ray, room.node, s.namespace, s.resources, s.peer)
                present.append(self._add(LivePeer(handle, room.node), START))

    def _add(self, peer: LivePeer, label: Label) -> LivePeer:
        number = len(self.peers)
        self.peers.append(peer)
        paces = [entry.pace for queue in self.queues for entry in queue.peers]
        speed = 1 / (sum(paces) / len(paces)) if paces else 1.0
        s = self.swarm
        self.swarm = s._replace(speed=(*s.speed, speed), stage=(*s.stage, ABSENT), ready=(*s.ready, 0.0))
        emit(LiveEvent(EventKind.STARTED, number))
        self._attach(number, label)
        return peer

    def _attach(self, peer: int, label: Label | None = ATTACH) -> None:
        result = self.peers[peer].handle.attach.remote(self.trainer, self._spec)
        self.calls.add(peer, result, label, lambda place, _call: self._attached(peer, place))

    def _attached(self, peer: int, place: PeerPlace) -> None:
        one = self.peers[peer]
        one.place, one.node, one.status, one.silent_since = place, place.node, PeerStatus.WAITING, math.inf
        self.counts["peers"] += 1
        self._failed_starts = -MOST_FAILED_STARTS * self.settings.most
        emit(LiveEvent(EventKind.ATTACHED, peer, number=place.pid, text=place.host))
        if self.source is not None:
            self.load(peer, neediest(self.swarm))

    def distribute(self, source: StateSource) -> None:
        """Let all peers load a state: each that of its stage, or of the stage where it is needed most."""
        self.source = source
        for stage, queue in enumerate(self.queues):
            for entry in queue.peers:
                self.queues[stage] = routing.withdraw(self.queues[stage], entry.peer)
        for number, peer in enumerate(self.peers):
            if peer.status in (PeerStatus.WAITING, PeerStatus.LOADING, PeerStatus.SERVING):
                stage = self.swarm.stage[number]
                self.load(number, neediest(self.swarm) if stage == ABSENT else stage)

    def load(self, peer: int, stage: int) -> None:
        """Let a peer load the state of a stage, after the passes that it has started. It serves the stage then."""
        assert self.source is not None
        self.peers[peer].status = PeerStatus.LOADING
        self.swarm = placed(self.swarm, peer, stage, math.inf)
        emit(LiveEvent(EventKind.LOADING, peer, stage))
        arguments = (self.ticket(peer), stage, self.source.tree(stage), self.source.microbatch, self.source.scalars)
        self.calls.patience.forget(peer)
        self._loads[peer] = self.call(peer, "serve", *arguments, label=LOAD, num_arrays=0, done=self._served)

    def _served(self, answer: PeerAnswer, _arrays: list[Any], call: Call) -> None:
        peer = call.peer
        if self._loads.get(peer) is not call:
            return  # it loads another stage
        if answer.fault:
            self.fault(peer, answer)
            return
        stage, one = self.swarm.stage[peer], self.peers[peer]
        one.status = PeerStatus.SERVING
        self.swarm = placed(self.swarm, peer, stage, self.now)
        self.queues[stage] = routing.announce(self.queues[stage], peer, self.rng.random(), one.pace)
        emit(LiveEvent(EventKind.SERVING, peer, stage))
        self.refill()
        if self.batch:
            self.batch.resume()

    # ---- failures -------------------------------------------------------------------------------------------------

    def _lose_value(self, call: Call) -> None:
        if not (self.batch and self.batch.value_lost(call)):  # an update or a state: the peer loads the newest one
            self.give_up(call.peer, "lost what it should have received", is_gone=False)
            self._attach(call.peer)

    def _fail_call(self, failure: CallFailure) -> None:
        peer = failure.call.peer
        self.give_up(peer, f"{failure.kind}: {failure.text}", is_gone=failure.kind != SILENT)
        if failure.kind == SILENT:
            if self.peers[peer].place is not None:  # otherwise its process still starts
                self.peers[peer].silent_since = self.now
            self._attach(peer, label=None)

    def fault(self, peer: int, answer: PeerAnswer) -> None:
        """Handle a call that a peer refused because of its ticket."""
        assert answer.fault is not None
        if answer.fault.kind == SUPERSEDED:
            raise TrainingError(
                f"another trainer has taken the peers of config.swarm.namespace={self.settings.namespace!r}"
            )
        self.give_up(peer, answer.fault.kind, is_gone=False)
        self._attach(peer)

    def give_up(self, peer: int, reason: str, *, is_gone: bool, is_hostile: bool = False) -> None:
        """Ban a peer. What it was assigned and has accumulated goes to others; what it answers later is ignored.

        Args:
          peer: the peer.
          reason: for the log.
          is_gone: whether it never returns; its process is ended.
          is_hostile: whether its place stays empty, too.
        """
        one, stage = self.peers[peer], self.swarm.stage[peer]
        if one.status == PeerStatus.STARTING:
            self._failed_starts += 1
        one.status, one.is_hostile = (PeerStatus.GONE if is_gone else PeerStatus.GIVEN_UP), is_hostile
        one.generation += 1
        self.count(peer, -one.depth)
        self.calls.drop(peer)
        if stage != ABSENT:
            self._remember_pace(peer, stage)
            self.queues[stage] = routing.ban(self.queues[stage], peer)
        self.swarm = removed(self.swarm, peer)
        self.counts["failures"] += 1
        self._reason = reason
        kind = EventKind.BANNED if is_hostile else EventKind.FAILED if is_gone else EventKind.GIVEN_UP
        emit(LiveEvent(kind, peer, stage, text=reason))
        if is_gone:
            self.ray.kill(one.handle)
        if self._failed_starts >= MOST_FAILED_STARTS * self.settings.most:
            raise TrainingError(f"no peer could start; the last failure: {reason}")
        self.refill()
        if self.batch:
            self.batch.lose(peer)

    def _end(self, peer: int, reason: str) -> None:
        """End the process of a peer that was given up, so that another one can take its place."""
        one = self.peers[peer]
        one.status, one.silent_since = PeerStatus.GONE, math.inf
        self.calls.drop(peer)
        emit(LiveEvent(EventKind.FAILED, peer, text=f"{SILENT}: {reason}"))
        self.ray.kill(one.handle)
        if one.place and one.place.host == socket.gethostname():  # a stopped process does not see Ray's request
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.place.pid, signal.SIGKILL)

    def clear(self, peer: int) -> None:
        """Let a peer return that was suspected without reason."""
        if self.peers[peer].status == PeerStatus.GIVEN_UP:
            self._attach(peer)

    # ---- moving ---------------------------------------------------------------------------------------------------

    def refill(self) -> None:
        """Move a peer to each stage that has lost its last one."""
        if self.source is not None:
            self.apply(refills(self.swarm, self.now))

    def rebalance(self) -> None:
        """Apply the rule of rebalancing to measured speeds and loads."""
        self._next_rebalancing = self.now + self.settings.rebalance_seconds
        speed = list(self.swarm.speed)
        for queue in self.queues:
            for entry in queue.peers:
                if entry.num_observed:
                    speed[entry.peer] = 1 / entry.pace
        self.swarm = self.swarm._replace(speed=tuple(speed))
        loads = []
        for number, peer in enumerate(self.peers):
            self.count(number, 0)
            loads.append(peer.area / self.settings.rebalance_seconds)
            peer.area = 0.0
        self.apply(REBALANCING_RULES[self.settings.rule](self.swarm, loads, self.now))

    def apply(self, moves: Iterable[Move]) -> None:
        """Move peers. Each finishes the passes that it has started; the others go to other peers."""
        for move in moves:
            self.counts["moves"] += 1
            emit(LiveEvent(EventKind.MOVED, move.peer, move.target, text=f"from stage {move.source}"))
            self._remember_pace(move.peer, move.source)
            self.queues[move.source] = routing.withdraw(self.queues[move.source], move.peer)
            self.load(move.peer, move.target)
            if self.batch:
                self.batch.release(move.peer)

    def count(self, peer: int, change: int) -> None:
        """Change the number of passes that a peer has been assigned, and integrate it over time."""
        one = self.peers[peer]
        one.area += one.depth * (self.now - one.changed)
        one.depth += change
        one.changed = self.now
        if change:
            emit(LiveEvent(EventKind.QUEUED, peer, number=one.depth))

    def _remember_pace(self, peer: int, stage: int) -> None:
        for entry in self.queues[stage].peers:
            if entry.peer == peer and entry.num_observed:
                self.peers[peer].pace = entry.pace
