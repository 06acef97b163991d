"""Training of a swarm in virtual time: an event simulation that returns the table of all passes.

The decisions are those of engine.py. The next batch starts after the update, or, with delayed parameter updates, as
soon as all microbatches of the batch before have started, with weights that are one step older (Ren et al.,
"ZeRO-Offload", 2021).

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
import itertools
import math
from collections.abc import Callable, Sequence

from jaxpar.errors import UserError
from jaxpar.strategies.swarm.availability import JOIN, PeerEvent, RandomTrace, SwarmPeer, Trace, present_at_start
from jaxpar.strategies.swarm.costs import SwarmSettings, Workload, averaging_seconds, download_seconds, message_seconds
from jaxpar.strategies.swarm.engine import SwarmEngine
from jaxpar.strategies.swarm.membership import ABSENT, Move, make_swarm
from jaxpar.strategies.swarm.progress import COUNTED
from jaxpar.strategies.swarm.record import FAILURE, RECEIVE, AssignedPass, SwarmAction, SwarmRun

MOST_EVENTS = 300_000  # of a step, and 10 more per event of a list; more mean that failures prevent the step


def run_swarm(peers: Sequence[SwarmPeer], workload: Workload, trace: Trace, settings: SwarmSettings) -> SwarmRun:
    """Return a run. The same arguments return the same run, to the last bit; a longer run begins with the same rows.

    Raises UserError if a stage has no peer for the rest of the trace, or peers fail so often that a step never ends.
    """
    return VirtualPeers(peers, workload, trace, settings).run()


class VirtualPeers:
    """The peers in virtual time: a `SwarmTransport`."""

    def __init__(self, peers: Sequence[SwarmPeer], workload: Workload, trace: Trace, settings: SwarmSettings) -> None:
        self.peers, self.workload, self.settings = peers, workload, settings
        self.now, self.num_events = 0.0, 0  # seconds; events so far
        self.numbers = itertools.count(1)
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []  # a heap of future ones
        self.work = (workload.forward, workload.backward)
        present = present_at_start(len(peers), trace)
        totals = tuple(f + b for f, b in zip(*self.work, strict=True))
        swarm = make_swarm(tuple(peer.speed for peer in peers), totals, present)
        self.engine = SwarmEngine(self, self.work, swarm, settings.seed)
        self.record = self.engine.record
        self.serving = [ABSENT] * len(peers)  # the stage that a peer serves now
        self.since = [0.0] * len(peers)
        self.epoch = [0] * len(peers)  # counts changes of stage, so that an older download is void
        self.moving: dict[int, Move] = {}  # of peers that move when their pass ends
        self.running: list[AssignedPass | None] = [None] * len(peers)
        self.num_started = 0  # batches
        self.most_events = MOST_EVENTS + (0 if isinstance(trace, RandomTrace) else 10 * len(trace))
        self.trace = iter(trace)
        self.follow_trace()
        for peer in sorted(present):
            self.serve(peer, 0)
        if settings.rebalance_seconds:
            self.after(settings.rebalance_seconds, self.rebalance)

    def run(self) -> SwarmRun:
        """Process all events until the last update. With delayed updates, the next batch has started by then."""
        record, settings = self.record, self.settings
        self.start_batches()
        for step in range(settings.num_steps):
            limit = self.num_events + self.most_events
            while len(record.update_times) == step:
                if not self.events:
                    empty = [stage for stage, queue in enumerate(self.engine.queues) if not queue]
                    raise UserError(
                        f"stage {empty[0]} has no peer from second {self.now:g} on, and no other peer can move there "
                        "or joins"
                    )
                if self.num_events == limit:
                    raise UserError(f"step {step} does not end within {self.most_events:,} events")
                self.advance()
        for peer in range(len(self.peers)):
            self.end_service(peer)
        sizes = self.engine.num_stages, settings.num_microbatches
        return record.run(record.table(*sizes, int(settings.delayed), settings.num_steps))

    # ---- time -----------------------------------------------------------------------------------------------------

    @property
    def upcoming(self) -> float:
        """The time of the next event; inf if none is left."""
        return self.events[0][0] if self.events else math.inf

    def after(self, seconds: float, event: Callable[..., None], *arguments: object) -> None:
        """Call `event` with the arguments after this time, behind earlier calls at the same time."""
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), event, arguments))

    def advance(self) -> None:
        """Go to the next event, and call it."""
        self.now, _, event, arguments = heapq.heappop(self.events)
        self.num_events += 1
        event(*arguments)

    # ---- batches --------------------------------------------------------------------------------------------------

    def start_batches(self) -> None:
        """Start the next batch if the weights that it reads exist, and all microbatches of the one before started."""
        before = self.engine.batches.get(self.num_started - 1)
        has_weights = self.num_started <= len(self.record.update_times) + self.settings.delayed
        if has_weights and not (before and before.waiting):
            self.num_started += 1
            self.record.actions.append([])
            self.engine.begin(self.num_started - 1, self.settings.num_microbatches, self.settings.in_flight)

    def all_started(self, _step: int) -> None:
        """Start the next batch if it does not need the update."""
        self.start_batches()

    def average(self, step: int) -> list[list[int]]:
        """Return the peers of each stage that have accumulated gradients of it, or serve it and need the update."""
        groups = []
        for stage in range(self.engine.num_stages):
            serving = {peer for peer, at in enumerate(self.serving) if at == stage}
            groups.append(sorted(self.engine.batches[step].progress.contributors(stage) | serving))
        nbytes = self.workload.gradient_bytes
        times = [averaging_seconds([self.peers[peer] for peer in group], nbytes) for group in groups]
        self.after(max(times), self.update, step, groups)
        return groups

    def update(self, step: int, groups: list[list[int]]) -> None:
        """End a batch whose averaging ends now."""
        batch = self.engine.batches.get(step)
        if batch is None or batch.averaging is not groups:
            return  # the averaging has started over
        self.engine.end(step)
        self.record.update_times.append(self.now)
        self.record.groups.append(groups)
        self.start_batches()
        self.engine.average()

    # ---- passes ---------------------------------------------------------------------------------------------------

    def send(self, one: AssignedPass) -> None:
        """Send a peer what a pass reads and it does not hold, from the peers with the most bandwidth."""
        holders = self.engine.batches[one.step].progress.holders(one.microbatch, one.phase, one.stage)
        one.sources = {
            value: min(of_value, key=lambda peer: (-self.peers[peer].bandwidth, peer))
            for value, of_value in holders.items()
            if one.peer not in of_value
        }
        sources = [self.peers[source] for source in one.sources.values()]
        seconds = message_seconds(sources, self.peers[one.peer], self.workload.activation_bytes)
        self.after(seconds, self.arrive, one)

    def arrive(self, one: AssignedPass) -> None:
        """Let a peer hold what it was sent for a pass."""
        if not self.engine.is_active(one):
            return
        holders = self.engine.batches[one.step].progress.holders(one.microbatch, one.phase, one.stage)
        for value, of_value in holders.items():
            of_value.add(one.peer)
            if value in one.sources:
                place = one.microbatch, one.stage, one.peer
                self.record.actions[one.step].append(SwarmAction(RECEIVE[value], *place, source=one.sources[value]))
        one.sources = {}
        self.engine.receive(one)

    def is_free(self, peer: int) -> bool:
        """Return whether a peer computes nothing."""
        return self.running[peer] is None

    def start(self, one: AssignedPass) -> None:
        """Let a peer compute a pass."""
        self.running[one.peer] = one
        self.record.begin_pass(one, max(one.step - self.settings.delayed, 0), self.now)
        self.after(self.work[one.phase][one.stage] / self.peers[one.peer].speed, self.finish, one)

    def finish(self, one: AssignedPass) -> None:
        """End a pass, and move its peer if that was waiting for it."""
        if not self.engine.is_active(one):
            return
        self.running[one.peer] = None
        if one.peer in self.moving:
            self.engine.load(self.moving.pop(one.peer))
        outcome = self.engine.finish(one, self.now)
        action = SwarmAction(one.phase, one.microbatch, one.stage, one.peer, is_counted=outcome == COUNTED)
        self.record.actions[one.step].append(action)

    # ---- peers ----------------------------------------------------------------------------------------------------

    def load(self, move: Move) -> float:
        """Download the state of a stage, once the pass that the peer is computing ends."""
        peer = move.peer
        if self.running[peer]:
            self.moving[peer] = move
            return math.inf
        self.end_service(peer)
        self.epoch[peer] += 1
        state_bytes = self.workload.state_bytes
        seconds = download_seconds(self.peers, self.engine.swarm, peer, move.target, self.now, state_bytes)
        self.after(seconds, self.serve, peer, self.epoch[peer])
        return self.now + seconds

    def serve(self, peer: int, epoch: int) -> None:
        """Begin to serve the stage whose state a peer has downloaded."""
        if epoch == self.epoch[peer]:
            self.serving[peer], self.since[peer] = self.engine.swarm.stage[peer], self.now
            self.engine.serve(peer)

    def end_service(self, peer: int) -> None:
        """Record until when a peer has served its stage."""
        if self.serving[peer] != ABSENT:
            self.record.service.append((peer, self.serving[peer], self.since[peer], self.now))
            self.serving[peer] = ABSENT

    def follow_trace(self, event: PeerEvent | None = None) -> None:
        """Let a peer join or leave. The next event of the trace comes before anything else at the same time."""
        if event is not None:
            (self.join if event.event == JOIN else self.leave)(event.peer)
        upcoming = next(self.trace, None)
        if upcoming is not None:
            heapq.heappush(self.events, (upcoming.seconds, 0, self.follow_trace, (upcoming,)))

    def join(self, peer: int) -> None:
        """Let a peer download the state of a stage."""
        self.engine.join(peer)

    def leave(self, peer: int) -> None:
        """Let a peer fail."""
        self.end_service(peer)
        self.epoch[peer] += 1
        self.moving.pop(peer, None)
        running, self.running[peer] = self.running[peer], None
        if running:
            self.record.end_pass(running, self.now)
        for step in self.engine.batches:
            self.record.actions[step].append(SwarmAction(FAILURE, peer=peer))
        self.engine.leave(peer)

    def rebalance(self) -> None:
        """End a period."""
        if not self.events and self.engine.batches:
            return  # nothing can happen any more that ends the step
        self.engine.rebalance(self.settings.rule, self.read_loads())
        self.after(self.settings.rebalance_seconds, self.rebalance)

    def read_loads(self) -> list[float]:
        """Return the mean number of passes that each peer had been assigned in the period."""
        return self.engine.loads.read(len(self.peers), self.settings.rebalance_seconds)
