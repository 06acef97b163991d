"""Throughput of a large swarm over hours: between two events, each stage computes at the total speed of its peers.

The peers are those of run.py without any batch, so that only what they decide between steps is left: where a peer
joins, who refills an empty stage, and who moves at the end of a period. The swarm computes at the rate of its slowest
stage.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.strategies.swarm.availability import LEAVE, SwarmPeer, Trace, events_before
from jaxpar.strategies.swarm.costs import SwarmSettings, Workload
from jaxpar.strategies.swarm.membership import ABSENT, Move, capacities, optimal_throughput
from jaxpar.strategies.swarm.run import VirtualPeers


class FluidRun(NamedTuple):
    """The state of a swarm between N consecutive events."""

    time: np.ndarray  # [N + 1], the times of the events, in seconds; the first is 0, the last the end of the run
    optimal: np.ndarray  # [N], the most microbatches per second that the present peers can compute
    capacity: np.ndarray  # [N, S], microbatches per second that the serving peers of each stage can compute
    num_present: np.ndarray  # [N], number of present peers
    failures: list[float]  # the times at which peers left
    moves: list[tuple[float, Move]]  # the time and the move of each peer that changed its stage

    @property
    def throughput(self) -> np.ndarray:
        """[N], microbatches per second: those of the slowest stage."""
        return self.capacity.min(axis=1)

    @property
    def efficiency(self) -> float:
        """Microbatches that were computed, divided by the most that the present peers could compute."""
        spans = np.diff(self.time)
        return float((self.throughput * spans).sum() / (self.optimal * spans).sum())


def run_fluid(
    peers: Sequence[SwarmPeer], workload: Workload, trace: Trace, seconds: float, settings: SwarmSettings
) -> FluidRun:
    """Return the run of a swarm. settings: those of rebalancing; the others have no effect."""
    fluid = _FluidPeers(peers, workload, trace, settings)
    engine = fluid.engine
    times, optima, rows, counts = [0.0], [], [], []
    while times[-1] < seconds or fluid.upcoming <= seconds:
        until = min(fluid.upcoming, seconds)
        if until > times[-1]:
            times.append(until)
            optima.append(optimal_throughput(engine.swarm))
            rows.append(capacities(engine.swarm, fluid.now))
            counts.append(sum(stage != ABSENT for stage in engine.swarm.stage))
        if fluid.upcoming <= seconds:
            fluid.advance()
    failures = [event.seconds for event in events_before(trace, seconds) if event.event == LEAVE]
    time, optimal, capacity, count = (np.array(values) for values in (times, optima, rows, counts))
    return FluidRun(time, optimal, capacity, count, failures, engine.record.moves)


class _FluidPeers(VirtualPeers):
    """Peers without passes. They publish the load that follows from the capacities of the stages."""

    def join(self, peer: int) -> None:
        """Let a peer join, after which another one can move."""
        super().join(peer)
        self.engine.refill()

    def serve(self, peer: int, epoch: int) -> None:
        """Do nothing: no pass waits for the peer, and its stage counts it from the end of its download."""

    def read_loads(self) -> list[float]:
        """Return [P]: the fraction of the time for which the slowest stage keeps the stage of a peer busy."""
        capacity = capacities(self.engine.swarm, self.now)
        busy = np.where(capacity > 0, capacity.min() / np.maximum(capacity, 1e-300), np.inf)
        return [0.0 if stage == ABSENT else float(busy[stage]) for stage in self.engine.swarm.stage]
