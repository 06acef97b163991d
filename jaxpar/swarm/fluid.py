"""Throughput of a large swarm over hours: between two events, each stage computes at the total speed of its peers.

This leaves out what happens within a step (run.py), but uses the same decisions: where a peer joins, who refills an
empty stage, and who moves at the end of a period. The swarm computes at the rate of its slowest stage.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.swarm.costs import download_seconds
from jaxpar.swarm.failures import Trace, events_before, first_present
from jaxpar.swarm.membership import (
    ABSENT,
    Move,
    Swarm,
    capacities,
    make_swarm,
    neediest,
    optimal_throughput,
    placed,
    refills,
    removed,
)
from jaxpar.swarm.rebalancing import REBALANCING_RULES
from jaxpar.swarm.trace import JOIN, SwarmPeer


class FluidRun(NamedTuple):
    """The state of a swarm between N consecutive events.

    Attributes:
      time: [N + 1], the times of the events, in seconds; the first is 0, the last the end of the run.
      throughput: [N], microbatches per second.
      optimal: [N], the most microbatches per second that the present peers can compute.
      capacity: [N, S], microbatches per second that the serving peers of each stage can compute.
      num_present: [N], number of present peers.
      failures: the times at which peers left.
      moves: the time and the move of each peer that changed its stage.
    """

    time: np.ndarray
    throughput: np.ndarray
    optimal: np.ndarray
    capacity: np.ndarray
    num_present: np.ndarray
    failures: list[float]
    moves: list[tuple[float, Move]]

    @property
    def efficiency(self) -> float:
        """Microbatches that were computed, divided by the most that the present peers could compute."""
        spans = np.diff(self.time)
        return float((self.throughput * spans).sum() / (self.optimal * spans).sum())


def run_fluid(
    peers: Sequence[SwarmPeer],
    work: Sequence[float],
    trace: Trace,
    seconds: float,
    *,
    state_bytes: float = 0.0,
    rebalance_seconds: float = 0.0,
    rule: str = "paper",
) -> FluidRun:
    """Return the run of a swarm.

    Args:
      peers: all peers.
      work: [S], units of work of a microbatch in each stage.
      trace: when peers join and leave.
      seconds: length of the run.
      state_bytes: parameters and optimizer state of a stage, which a peer downloads before it serves.
      rebalance_seconds: the period of rebalancing; 0: none.
      rule: key of REBALANCING_RULES.
    """
    swarm = make_swarm(tuple(peer.speed for peer in peers), tuple(work), first_present(len(peers), trace))
    events = events_before(trace, seconds)
    period = rebalance_seconds or math.inf
    tick, next_event, now = period, 0, 0.0
    times, rates, optima, rows, counts = [0.0], [], [], [], []
    failures: list[float] = []
    moves: list[tuple[float, Move]] = []

    def move(found: list[Move]) -> None:
        nonlocal swarm
        for one in found:
            swarm = placed(
                swarm,
                one.peer,
                one.target,
                now + download_seconds(peers, swarm, one.peer, one.target, now, state_bytes),
            )
            moves.append((now, one))

    while now < seconds:
        upcoming = [ready for ready in swarm.ready if ready > now]
        trace_time = events[next_event].seconds if next_event < len(events) else math.inf
        until = min(seconds, tick, trace_time, *upcoming)
        capacity = capacities(swarm, now)
        if until > now:
            times.append(until)
            rates.append(float(capacity.min()))
            optima.append(optimal_throughput(swarm))
            rows.append(capacity)
            counts.append(sum(stage != ABSENT for stage in swarm.stage))
        now = until
        while next_event < len(events) and events[next_event].seconds <= now:
            _, peer, kind = events[next_event]
            next_event += 1
            if kind == JOIN:
                stage = neediest(swarm)
                swarm = placed(swarm, peer, stage, now + download_seconds(peers, swarm, peer, stage, now, state_bytes))
            else:
                swarm = removed(swarm, peer)
                failures.append(now)
            move(refills(swarm, now))
        if now >= tick:
            tick += period
            move(REBALANCING_RULES[rule](swarm, published_loads(swarm, now), now))
    return FluidRun(
        np.array(times), np.array(rates), np.array(optima), np.array(rows), np.array(counts), failures, moves
    )


def published_loads(swarm: Swarm, now: float) -> list[float]:
    """Return [P]: the load of each peer: the fraction of the time for which the slowest stage keeps its stage busy."""
    capacity = capacities(swarm, now)
    busy = np.where(capacity > 0, capacity.min() / np.maximum(capacity, 1e-300), np.inf)
    return [0.0 if stage == ABSENT else float(busy[stage]) for stage in swarm.stage]
