"""Training of a swarm in virtual time: an event simulation that returns the table of all passes.

A global batch of m microbatches passes through the S stages, forward and back. Gradients accumulate on the peers until
each microbatch is counted exactly once in each stage (ledger.py). Then the peers of each stage average their gradients
and take the optimizer step, and the next batch starts. With delayed parameter updates, it starts as soon as all
microbatches of the batch before have started, with weights that are one step older (Ren et al., "ZeRO-Offload", 2021).

Assumptions:

  - A message takes the latency of both peers, and its bytes at the lower of their bandwidths. Peers send and receive
    while they compute, and several messages at a time do not slow each other down.
  - A peer computes the older batch first, and in a batch backward passes before forward passes.
  - A failure is noticed at once. Whoever was waiting for the peer routes its microbatch to the next one.
  - A peer that moves finishes the pass that it is computing. It holds what it held and what it has accumulated until
    the update, and takes part in that averaging.
  - A peer that downloads the state of a stage gets the updates that are made meanwhile with it.
  - If a peer that has accumulated gradients fails during the averaging, they are computed again, and the averaging
    starts over.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from jaxpar.errors import UserError
from jaxpar.swarm import routing
from jaxpar.swarm.actions import FAILURE, RECEIVE, SwarmAction
from jaxpar.swarm.batch import AssignedPass, GlobalBatch
from jaxpar.swarm.costs import SwarmSettings, Workload, averaging_seconds, download_seconds, message_seconds
from jaxpar.swarm.failures import RandomTrace, Trace, first_present
from jaxpar.swarm.ledger import COUNTED, LOST, GradientLedger, next_phase
from jaxpar.swarm.membership import ABSENT, Move, make_swarm, neediest, placed, refills, removed
from jaxpar.swarm.rebalancing import REBALANCING_RULES
from jaxpar.swarm.record import RunRecord, SwarmRun
from jaxpar.swarm.trace import JOIN, PeerEvent, SwarmPeer
from jaxpar.swarm.virtual_time import LoadMeter, VirtualClock

MOST_EVENTS = 300_000  # of a step, and 10 more per event of a list; more mean that failures prevent the step


def run_swarm(peers: Sequence[SwarmPeer], workload: Workload, trace: Trace, settings: SwarmSettings) -> SwarmRun:
    """Return a run. The same arguments return the same run, to the last bit; a longer run begins with the same rows.

    Raises:
      UserError: a stage has no peer for the rest of the trace, so training cannot continue; or peers fail so often that
        a step never ends.
    """
    return _Simulation(peers, workload, trace, settings).run()


class _Simulation:
    def __init__(self, peers: Sequence[SwarmPeer], workload: Workload, trace: Trace, settings: SwarmSettings) -> None:
        self.peers, self.workload, self.settings = peers, workload, settings
        self.num_stages = len(workload.forward)
        self.work = (workload.forward, workload.backward)
        self.rng = np.random.default_rng(settings.seed)
        self.clock, self.record = VirtualClock(), RunRecord()
        self.loads = LoadMeter(len(peers), self.clock)
        present = first_present(len(peers), trace)
        totals = tuple(f + b for f, b in zip(*self.work, strict=True))
        self.swarm = make_swarm(tuple(peer.speed for peer in peers), totals, present)
        self.queues = [routing.StageQueue()] * self.num_stages
        self.serving = [ABSENT] * len(peers)  # the stage that a peer serves now
        self.since = [0.0] * len(peers)
        self.epoch = [0] * len(peers)  # counts changes of stage, so that an older download is void
        self.moving: dict[int, int] = {}  # peers that move when their pass ends -> stage
        self.inbox: list[list[tuple[int, int, int, AssignedPass]]] = [[] for _ in peers]
        self.running: list[AssignedPass | None] = [None] * len(peers)
        self.active: dict[tuple[int, int], AssignedPass] = {}
        self.parked: set[tuple[int, int]] = set()  # microbatches for whose stage there is no peer
        self.batches: dict[int, GlobalBatch] = {}  # without update
        self.num_started = 0
        self.most_events = MOST_EVENTS + (0 if isinstance(trace, RandomTrace) else 10 * len(trace))
        self.trace = iter(trace)
        self.follow_trace()
        for peer in sorted(present):
            self.serve(peer, 0)

    def run(self) -> SwarmRun:
        """Process all events until the last update. With delayed updates, the next batch has started by then."""
        clock, record, settings = self.clock, self.record, self.settings
        if settings.rebalance_seconds:
            clock.at(settings.rebalance_seconds, self.rebalance)
        self.start_batches()
        while not clock.is_idle and len(record.update_times) < settings.num_steps:
            step, limit = len(record.update_times), clock.num_advances + self.most_events
            while not clock.is_idle and len(record.update_times) == step:
                if clock.num_advances == limit:
                    raise UserError(f"step {step} does not end within {self.most_events:,} events")
                clock.advance()
        if len(record.update_times) < settings.num_steps:
            empty = [stage for stage, queue in enumerate(self.queues) if not queue.peers]
            raise UserError(
                f"stage {empty[0]} has no peer from second {clock.now:g} on, and no other peer can move there or joins"
            )
        for peer in range(len(self.peers)):
            self.end_service(peer)
        return record.run(self.num_stages, settings.num_microbatches, int(settings.delayed), settings.num_steps)

    # ---- batches --------------------------------------------------------------------------------------------------

    def start_batches(self) -> None:
        """Start the next batch if the weights that it reads exist, and all microbatches of the one before started."""
        before = self.batches.get(self.num_started - 1)
        has_weights = self.num_started <= len(self.record.update_times) + self.settings.delayed
        if has_weights and not (before and before.waiting):
            number = self.settings.num_microbatches
            step, self.num_started = self.num_started, self.num_started + 1
            self.batches[step] = GlobalBatch(GradientLedger(self.num_stages, number), deque(range(number)))
            self.record.actions.append([])
            for _ in range(self.settings.in_flight or number):
                self.admit(step)

    def admit(self, step: int) -> None:
        waiting = self.batches[step].waiting
        if waiting:
            self.dispatch((step, waiting.popleft()))
            if not waiting:
                self.start_batches()

    def average(self) -> None:
        """Begin the averaging of the oldest batch if it is complete."""
        step = len(self.record.update_times)
        batch = self.batches.get(step)
        if batch and batch.ledger.is_complete and not batch.is_averaging:
            batch.is_averaging = True
            batch.groups = [self.averaging_group(batch, stage) for stage in range(self.num_stages)]
            seconds = max(
                averaging_seconds([self.peers[peer] for peer in group], self.workload.gradient_bytes)
                for group in batch.groups
            )
            self.clock.at(self.clock.now + seconds, self.update, step, batch.num_failures)

    def averaging_group(self, batch: GlobalBatch, stage: int) -> list[int]:
        """Return the peers that have accumulated gradients of a stage, and those that serve it and need the update."""
        return sorted(batch.ledger.contributors(stage) | {p for p, at in enumerate(self.serving) if at == stage})

    def update(self, step: int, num_failures: int) -> None:
        batch = self.batches.get(step)
        if batch is None or batch.num_failures != num_failures:
            return  # the averaging has started over
        del self.batches[step]
        self.record.update_times.append(self.clock.now)
        self.record.groups.append(batch.groups)
        self.start_batches()
        self.average()

    # ---- passes ---------------------------------------------------------------------------------------------------

    def dispatch(self, key: tuple[int, int]) -> None:
        """Send a microbatch to a peer of its next stage."""
        step, microbatch = key
        self.parked.discard(key)
        batch = self.batches[step]
        found = next_phase(batch.ledger.progress(microbatch), self.num_stages)
        if found is None:
            if microbatch not in batch.finished:
                batch.finished.add(microbatch)
                self.admit(step)
            self.average()
            return
        phase, stage = found
        if not self.queues[stage].peers:
            self.parked.add(key)
            return
        peer, self.queues[stage] = routing.select(self.queues[stage], self.work[phase][stage], self.rng.random())
        sources = {
            value: min(holders, key=lambda one: (-self.peers[one].bandwidth, one))
            for value, holders in batch.ledger.holders(microbatch, phase, stage).items()
            if peer not in holders
        }
        one = AssignedPass(step, microbatch, phase, stage, peer, sources)
        self.active[key] = one
        self.loads.count(peer, 1)
        froms = [self.peers[source] for source in sources.values()]
        seconds = message_seconds(froms, self.peers[peer], self.workload.activation_bytes)
        self.clock.at(self.clock.now + seconds, self.arrive, one)

    def arrive(self, one: AssignedPass) -> None:
        if self.active.get(one.key) is not one:
            return
        for value, holders in self.batches[one.step].ledger.holders(one.microbatch, one.phase, one.stage).items():
            holders.add(one.peer)
            if value in one.sources:
                place = one.microbatch, one.stage, one.peer
                self.record.actions[one.step].append(SwarmAction(RECEIVE[value], *place, source=one.sources[value]))
        one.sources = {}
        heapq.heappush(self.inbox[one.peer], (one.step, -one.phase, self.clock.next_number(), one))
        self.start_pass(one.peer)

    def start_pass(self, peer: int) -> None:
        while self.running[peer] is None and self.inbox[peer]:
            one = heapq.heappop(self.inbox[peer])[-1]
            if self.active.get(one.key) is not one:
                continue  # routed to another peer
            version = max(one.step - self.settings.delayed, 0)
            one.row, self.running[peer] = self.record.begin_pass(one, version, self.clock.now), one
            work = self.work[one.phase][one.stage]
            self.clock.at(self.clock.now + work / self.peers[peer].speed, self.finish, one)

    def finish(self, one: AssignedPass) -> None:
        if self.active.get(one.key) is not one:
            return
        peer, ledger = one.peer, self.batches[one.step].ledger
        outcome = ledger.finish(one.microbatch, one.phase, one.stage, peer, one.row)
        seconds = self.record.end_pass(one.row, self.clock.now, outcome)
        place = one.microbatch, one.stage, peer
        self.record.actions[one.step].append(SwarmAction(one.phase, *place, is_counted=outcome == COUNTED))
        self.queues[one.stage] = routing.observe(self.queues[one.stage], peer, self.work[one.phase][one.stage], seconds)
        self.running[peer] = None
        self.drop(one)
        if peer in self.moving:
            self.download(peer, self.moving.pop(peer))
        self.start_pass(peer)
        self.dispatch(one.key)

    def drop(self, one: AssignedPass) -> None:
        """Forget an assigned pass, which has finished or which another peer computes."""
        del self.active[one.key]
        self.loads.count(one.peer, -1)

    def reroute(self, passes: Iterable[AssignedPass], lost: Iterable[tuple[int, int]] = ()) -> None:
        """Route these passes again, and microbatches that are not in any queue but have lost a gradient."""
        keys = []
        for one in passes:
            self.drop(one)
            keys.append(one.key)
        for key in dict.fromkeys([*keys, *lost, *sorted(self.parked)]):
            if key not in self.active:
                self.dispatch(key)

    # ---- peers ----------------------------------------------------------------------------------------------------

    def serve(self, peer: int, epoch: int) -> None:
        """Begin to serve the stage whose state a peer has downloaded."""
        if epoch != self.epoch[peer]:
            return
        stage = self.swarm.stage[peer]
        self.serving[peer], self.since[peer] = stage, self.clock.now
        self.queues[stage] = routing.announce(self.queues[stage], peer, self.rng.random())
        self.apply(refills(self.swarm, self.clock.now))
        self.reroute(())

    def end_service(self, peer: int) -> None:
        if self.serving[peer] != ABSENT:
            self.record.service.append((peer, self.serving[peer], self.since[peer], self.clock.now))
            self.serving[peer] = ABSENT

    def download(self, peer: int, stage: int) -> None:
        self.end_service(peer)
        self.epoch[peer] += 1
        seconds = download_seconds(self.peers, self.swarm, peer, stage, self.clock.now, self.workload.state_bytes)
        self.swarm = placed(self.swarm, peer, stage, self.clock.now + seconds)
        self.clock.at(self.clock.now + seconds, self.serve, peer, self.epoch[peer])

    def follow_trace(self, event: PeerEvent | None = None) -> None:
        """Let a peer join or leave. The next event of the trace comes before anything else at the same time."""
        if event is not None:
            (self.join if event.event == JOIN else self.leave)(event.peer)
        upcoming = next(self.trace, None)
        if upcoming is not None:
            self.clock.at(upcoming.seconds, self.follow_trace, upcoming, is_first=True)

    def join(self, peer: int) -> None:
        self.download(peer, neediest(self.swarm))

    def leave(self, peer: int) -> None:
        """Remove a peer with all that it held, ban it, and route its microbatches to others."""
        if self.serving[peer] != ABSENT:
            self.queues[self.serving[peer]] = routing.ban(self.queues[self.serving[peer]], peer)
        self.end_service(peer)
        self.epoch[peer] += 1
        self.moving.pop(peer, None)
        self.swarm = removed(self.swarm, peer)
        running, self.running[peer], self.inbox[peer] = self.running[peer], None, []
        if running:
            self.record.end_pass(running.row, self.clock.now, LOST)
        lost: list[tuple[int, int]] = []
        for step, batch in self.batches.items():
            self.record.actions[step].append(SwarmAction(FAILURE, peer=peer))
            gradients = batch.ledger.lose(peer)
            if gradients:
                batch.is_averaging, batch.num_failures = False, batch.num_failures + 1
            for microbatch, row in gradients:
                self.record.lose_pass(row)
                lost.append((step, microbatch))
        self.apply(refills(self.swarm, self.clock.now))
        self.reroute([one for one in self.active.values() if one.peer == peer or peer in one.sources.values()], lost)

    def rebalance(self) -> None:
        """Apply the rule of rebalancing to the mean number of passes that each peer had in the period."""
        if self.clock.is_idle:
            return  # nothing can happen any more
        loads = self.loads.read(self.settings.rebalance_seconds)
        self.apply(REBALANCING_RULES[self.settings.rule](self.swarm, loads, self.clock.now))
        self.clock.at(self.clock.now + self.settings.rebalance_seconds, self.rebalance)

    def apply(self, moves: Iterable[Move]) -> None:
        """Move peers. A peer that is computing a pass moves when it ends; its other microbatches go to other peers."""
        for move in moves:
            self.record.moves.append((self.clock.now, move))
            self.swarm = placed(self.swarm, move.peer, move.target, math.inf)
            self.queues[move.source] = routing.withdraw(self.queues[move.source], move.peer)
            running = self.running[move.peer]
            if running:
                self.moving[move.peer] = move.target
            else:
                self.download(move.peer, move.target)
            self.reroute([one for one in self.active.values() if one.peer == move.peer and one is not running])
