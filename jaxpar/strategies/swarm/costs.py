"""Costs of training with a swarm: work and bytes of a model, settings of a run, and times of messages."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpar.core.ring import RING_PASSES, ring_sends
from jaxpar.strategies.swarm.availability import SwarmPeer
from jaxpar.strategies.swarm.membership import Swarm


class Workload(NamedTuple):
    """Costs of a model of S stages."""

    forward: tuple[float, ...]  # [S], units of work of a forward pass of a microbatch: seconds on a peer of speed 1
    backward: tuple[float, ...]  # [S], units of work of a backward pass, which also computes the stage again
    activation_bytes: float = 0.0  # of the activation, and of its gradient, that a microbatch sends to the next stage
    gradient_bytes: float = 0.0  # of the gradient of a stage, which its peers average
    state_bytes: float = 0.0  # of the parameters and the optimizer state of a stage, which a peer downloads


class SwarmSettings(NamedTuple):
    """Settings of a run."""

    num_steps: int
    num_microbatches: int  # in a global batch
    in_flight: int = 0  # number of microbatches of a batch that are in the stages at a time; 0: all
    delayed: bool = False  # whether a batch starts before the update of the one before
    rebalance_seconds: float = 0.0  # the period of rebalancing; 0: none
    rule: str = "paper"  # key of REBALANCING_RULES
    seed: int = 0  # of the ties in routing


def message_seconds(sources: Sequence[SwarmPeer], to: SwarmPeer, nbytes: float) -> float:
    """Return the time in which a peer receives `nbytes` from each of the sources; without sources, only the data."""
    latency = max((source.latency + to.latency for source in sources), default=to.latency)
    return latency + sum(nbytes / min(source.bandwidth, to.bandwidth) for source in sources)


def averaging_seconds(group: Sequence[SwarmPeer], nbytes: float) -> float:
    """Return the time of a ring all-reduce: 2 (n - 1) messages of 1 / n of the bytes, as slow as the slowest peer."""
    bandwidth, latency = min(peer.bandwidth for peer in group), 2 * max(peer.latency for peer in group)
    sent, num_messages = ring_sends(RING_PASSES["all-reduce"], len(group), nbytes)
    return sent / bandwidth + num_messages * latency


def download_seconds(
    peers: Sequence[SwarmPeer], swarm: Swarm, peer: int, stage: int, now: float, state_bytes: float
) -> float:
    """Return the time in which a peer downloads the state of a stage: from its fastest serving peer, if it has one.

    A stage without a serving peer has a copy of its state outside the swarm, such as a checkpoint, which can be read at
    the full bandwidth of the peer.
    """
    donors = [p for p in range(len(peers)) if swarm.stage[p] == stage and swarm.ready[p] <= now and p != peer]
    donor = max((peers[p] for p in donors), key=lambda one: one.bandwidth, default=SwarmPeer(""))
    return state_bytes / min(peers[peer].bandwidth, donor.bandwidth) + peers[peer].latency + donor.latency
