"""The state machine of a swarm: which peer computes which pass, and what follows if peers fail, join and move.

A global batch of m microbatches passes through the S stages, forward and back. Gradients accumulate on the peers until
each microbatch is counted exactly once in each stage (progress.py). Then the peers of each stage average their
gradients and take the optimizer step.

The engine decides by pure functions (routing.py, membership.py). A transport carries out what it decides, in virtual
time (run.py) or on Ray (live/members.py), and reports what happens, so that all swarms share their decisions:

    the engine calls                    the transport calls, later or at once
    send(one)                           receive(one)          what a pass reads is with its peer
    start(one)                          finish(one)           it has been computed, and its output can be read
    load(move)                          serve(peer)           the peer has the state of its stage
    average(step)                       end(step)             the update is complete

    and, at any time, `begin`, `feed`, `join`, `leave`, `rebalance` and `reroute`
"""

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxpar.strategies.swarm import routing
from jaxpar.strategies.swarm.membership import ABSENT, REBALANCING_RULES, Move, Swarm, neediest, placed, refills
from jaxpar.strategies.swarm.progress import BatchProgress
from jaxpar.strategies.swarm.record import AssignedPass, RunRecord


@dataclass(eq=False)
class GlobalBatch:
    """A global batch without its update."""

    progress: BatchProgress  # which peers hold and have accumulated what
    waiting: deque[int]  # the microbatches that have not started
    finished: set[int] = field(default_factory=set)  # the microbatches that have passed through all stages and back
    # what the transport has returned for its averaging; None if there is none, or if it is void because a peer has
    # failed since
    averaging: Any = None


class SwarmTransport(Protocol):
    """The interface of an engine to the peers.

    It also calls, at any time, `begin`, `feed`, `join`, `leave`, `rebalance` and `reroute`.
    """

    @property
    def now(self) -> float:
        """The time, in seconds."""

    def send(self, one: AssignedPass) -> None:
        """Let a peer receive what a pass reads. Then, or at once, call `receive`."""

    def is_free(self, peer: int) -> bool:
        """Return whether a peer takes another pass."""

    def start(self, one: AssignedPass) -> None:
        """Let a peer compute a pass. When its output can be read, call `finish`, if the pass is still active."""

    def load(self, move: Move) -> float:
        """Let a peer load the state of stage `target`, and return when it will have it; inf if unknown.

        Then call `serve`, unless the peer has moved on. `source` is the stage that it has left, or ABSENT.
        """

    def average(self, step: int) -> Any:
        """Average the gradients of a batch, and return the averaging. Then call `end`, unless it is void."""

    def all_started(self, step: int) -> None:
        """Take note that all microbatches of a batch have started."""


class LoadMeter:
    """Mean number of passes that each peer has been assigned since the last reading: the load of its queue."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.depth = defaultdict[int, int](int)  # the number of passes that each peer has been assigned now
        self._area, self._changed = defaultdict[int, float](float), defaultdict[int, float](float)

    def count(self, peer: int, change: int) -> None:
        """Change the number of passes that a peer has been assigned, and integrate it over time."""
        now = self._now()
        self._area[peer] += self.depth[peer] * (now - self._changed[peer])
        self.depth[peer] += change
        self._changed[peer] = now

    def read(self, num_peers: int, seconds: float) -> list[float]:
        """Return the load of each peer in the last `seconds`, since the last reading."""
        for peer in range(num_peers):
            self.count(peer, 0)
        loads = [self._area[peer] / seconds for peer in range(num_peers)]
        self._area.clear()
        return loads


class SwarmEngine:
    """The mutable state of a swarm."""

    def __init__(
        self, transport: SwarmTransport, work: tuple[Sequence[float], Sequence[float]], swarm: Swarm, seed: int
    ) -> None:
        """work: by FORWARD_PASS and BACKWARD_PASS, units of work in each stage; seed: of the ties in routing."""
        self._transport, self._work = transport, work
        self.num_stages = len(swarm.work)
        self.swarm, self.record = swarm, RunRecord()
        self.queues: list[routing.StageQueue] = [()] * self.num_stages  # of each stage
        self.batches: dict[int, GlobalBatch] = {}  # the batches without their update, by step
        self.loads = LoadMeter(lambda: transport.now)
        self._rng = np.random.default_rng(seed)
        self._active: dict[tuple[int, int], AssignedPass] = {}  # by step and microbatch
        self._parked: set[tuple[int, int]] = set()  # microbatches for whose stage there is no peer
        self._inboxes: defaultdict[int, list[tuple[int, int, int, AssignedPass]]] = defaultdict(list)
        self._numbers = itertools.count()

    # ---- batches --------------------------------------------------------------------------------------------------

    def begin(self, step: int, num_microbatches: int, in_flight: int = 0) -> None:
        """Begin a batch. in_flight: number of its microbatches that are in the stages at a time; 0: all."""
        progress = BatchProgress(self.num_stages, num_microbatches)
        self.batches[step] = GlobalBatch(progress, deque(range(num_microbatches)))
        for _ in range(in_flight or num_microbatches):
            self._admit(step)

    def _admit(self, step: int) -> None:
        waiting = self.batches[step].waiting
        if waiting:
            self._dispatch((step, waiting.popleft()))
            if not waiting:
                self._transport.all_started(step)

    def average(self) -> None:
        """Begin the averaging of the oldest batch if it is complete."""
        for step, batch in itertools.islice(self.batches.items(), 1):
            if batch.averaging is None and batch.progress.is_complete:
                batch.averaging = self._transport.average(step)

    def end(self, step: int) -> None:
        """End a batch, which has its update or is given up."""
        for one in [one for one in self._active.values() if one.step == step]:
            self._drop(one)
        self._parked = {key for key in self._parked if key[0] != step}
        del self.batches[step]

    # ---- passes ---------------------------------------------------------------------------------------------------

    def _dispatch(self, key: tuple[int, int]) -> None:
        """Assign the next pass of a microbatch to a peer of its stage."""
        step, microbatch = key
        self._parked.discard(key)
        batch = self.batches[step]
        found = batch.progress.next_phase(microbatch)
        if found is None:
            if microbatch not in batch.finished:
                batch.finished.add(microbatch)
                self._admit(step)
            self.average()
            return
        phase, stage = found
        queue = self.queues[stage]
        if not queue:
            self._parked.add(key)
            return
        peer, self.queues[stage] = routing.select(queue, self._work[phase][stage], self._rng.random())
        one = self._active[key] = AssignedPass(step, microbatch, phase, stage, peer)
        self.loads.count(peer, 1)
        self._transport.send(one)

    def receive(self, one: AssignedPass) -> None:
        """Put a pass into the inbox of its peer, which computes older batches first, then backward passes."""
        heapq.heappush(self._inboxes[one.peer], (one.step, -one.phase, next(self._numbers), one))
        self.feed(one.peer)

    def feed(self, peer: int) -> None:
        """Let a peer start the passes of its inbox, as far as it takes them."""
        inbox = self._inboxes[peer]
        while inbox and self._transport.is_free(peer):
            one = heapq.heappop(inbox)[-1]
            if not self.is_active(one):
                continue  # another peer computes it
            if all(self.batches[one.step].progress.holders(one.microbatch, one.phase, one.stage).values()):
                one.is_started = True
                self._transport.start(one)
            else:  # what it reads was lost meanwhile
                self.reroute([one])

    def is_active(self, one: AssignedPass) -> bool:
        """Return whether a pass has not ended, and no other peer computes it."""
        return self._active.get(one.key) is one

    def passes_of(self, peer: int) -> list[AssignedPass]:
        """Return the active passes of a peer."""
        return [one for one in self._active.values() if one.peer == peer]

    def finish(self, one: AssignedPass, now: float, *, is_typical: bool = True) -> int:
        """Count a pass that was computed until `now`, assign the next one of its microbatch, and return its outcome.

        is_typical: whether its time predicts that of later passes of its peer.
        """
        outcome = self.batches[one.step].progress.finish(one.microbatch, one.phase, one.stage, one.peer, one.row)
        seconds = self.record.end_pass(one, now, outcome)
        if is_typical:
            work = self._work[one.phase][one.stage]
            self.queues[one.stage] = routing.observe(self.queues[one.stage], one.peer, work, seconds)
        self._drop(one)
        self.feed(one.peer)
        self._dispatch(one.key)
        return outcome

    def _drop(self, one: AssignedPass) -> None:
        del self._active[one.key]
        self.loads.count(one.peer, -1)

    def reroute(self, passes: Iterable[AssignedPass], lost: Iterable[tuple[int, int]] = ()) -> None:
        """Assign passes again, and microbatches that are not assigned but have lost a gradient or wait for a peer."""
        keys = []
        for one in passes:
            self._drop(one)
            keys.append(one.key)
        for key in dict.fromkeys([*keys, *lost, *sorted(self._parked)]):
            if key not in self._active:
                self._dispatch(key)

    # ---- peers ----------------------------------------------------------------------------------------------------

    def join(self, peer: int) -> None:
        """Let a peer serve the stage where it is needed most."""
        self.load(Move(peer, ABSENT, neediest(self.swarm)))

    def load(self, move: Move) -> None:
        """Let a peer load the state of a stage, which it serves then."""
        self.swarm = placed(self.swarm, move.peer, move.target, math.inf)
        self.swarm = placed(self.swarm, move.peer, move.target, self._transport.load(move))

    def serve(self, peer: int, pace: float | None = None) -> None:
        """Route passes to a peer that has the state of its stage. pace: its seconds per unit of work, if known."""
        stage = self.swarm.stage[peer]
        self.swarm = placed(self.swarm, peer, stage, self._transport.now)
        self.queues[stage] = routing.announce(self.queues[stage], peer, self._rng.random(), pace)
        self.refill()
        self.reroute(())

    def leave(self, peer: int) -> int:
        """Remove a peer with all that it held, and return the number of its gradients that are computed again."""
        stage = self.swarm.stage[peer]
        if stage != ABSENT:
            self.queues[stage] = routing.withdraw(self.queues[stage], peer)
        self.swarm = placed(self.swarm, peer, ABSENT, 0.0)
        self._inboxes.pop(peer, None)
        lost: list[tuple[int, int]] = []
        for step, batch in self.batches.items():
            gradients = batch.progress.lose(peer)
            if gradients:
                batch.averaging = None
            for microbatch, row in gradients:
                self.record.lose_pass(row)
                lost.append((step, microbatch))
        self.refill()

        def needs(one: AssignedPass) -> bool:
            progress = self.batches[one.step].progress
            is_void = one.is_repeat and not progress.is_counted(one.microbatch, one.stage)
            return peer == one.peer or peer in one.sources.values() or is_void

        self.reroute([one for one in self._active.values() if needs(one)], lost)
        return len(lost)

    def refill(self) -> None:
        """Move a peer to each stage that has lost its last one."""
        self._move(refills(self.swarm, self._transport.now))

    def rebalance(self, rule: str, loads: Sequence[float]) -> None:
        """Move peers by a rule. loads: of each peer, as `self.loads` measures it."""
        self._move(REBALANCING_RULES[rule](self.swarm, loads, self._transport.now))

    def _move(self, moves: Iterable[Move]) -> None:
        """Move peers. A peer ends the passes that it has started first; its others go to other peers."""
        for move in moves:
            self.record.moves.append((self._transport.now, move))
            self.load(move)
            self.queues[move.source] = routing.withdraw(self.queues[move.source], move.peer)
            self.reroute([one for one in self.passes_of(move.peer) if not one.is_started])
