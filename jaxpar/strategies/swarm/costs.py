"""Costs of training with a swarm: work and bytes of a model, settings of a run, and times of messages.

The square-cube law: the work of a transformer layer grows with the cube of its width, what it sends with the square. A
pipeline over slow links therefore uses its devices better, the wider the model is (Ryabinin et al., "SWARM
Parallelism", 2023, section 3.1).
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpar.core.ring import RING_PASSES, ring_sends
from jaxpar.strategies.swarm.availability import SwarmPeer
from jaxpar.strategies.swarm.membership import Swarm


class Workload(NamedTuple):
    """Costs of a model of S stages.

    Attributes:
      forward: [S], units of work of a forward pass of a microbatch: its seconds on a peer of speed 1.
      backward: [S], units of work of a backward pass, which also computes the inside of the stage again.
      activation_bytes: bytes of the activation, and of its gradient, that a microbatch sends from a stage to the next.
      gradient_bytes: bytes of the gradient of a stage, which its peers average.
      state_bytes: bytes of the parameters and the optimizer state of a stage, which a peer downloads.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    activation_bytes: float = 0.0
    gradient_bytes: float = 0.0
    state_bytes: float = 0.0


class SwarmSettings(NamedTuple):
    """Settings of a run.

    Attributes:
      num_steps: number of steps.
      num_microbatches: number of microbatches in a global batch.
      in_flight: number of microbatches of a batch that are in the stages at a time; 0: all.
      delayed: whether a batch starts before the update of the one before.
      rebalance_seconds: the period of rebalancing; 0: none.
      rule: key of REBALANCING_RULES.
      seed: seed of the ties in routing.
    """

    num_steps: int
    num_microbatches: int
    in_flight: int = 0
    delayed: bool = False
    rebalance_seconds: float = 0.0
    rule: str = "paper"
    seed: int = 0


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


class TransformerLayer(NamedTuple):
    """A transformer layer with a feed-forward network of 4 times its width, and its microbatch.

    Attributes:
      width: size of the hidden state.
      tokens: number of tokens in a microbatch, all of one sequence.
      value_bytes: bytes of each value that is sent: 2 for float16, about 1 with 8-bit compression.
    """

    width: int
    tokens: int = 512
    value_bytes: float = 2.0

    @property
    def flops(self) -> float:
        """FLOPs of a forward and a backward pass: 24 T d^2 + 4 T^2 d forward, and twice that backward."""
        return 3.0 * (24 * self.tokens * self.width**2 + 4 * self.tokens**2 * self.width)

    @property
    def nbytes(self) -> float:
        """Bytes of the hidden states of a microbatch, which a pass sends."""
        return self.value_bytes * self.tokens * self.width


def device_utilization(layer: TransformerLayer, *, flops: float, bandwidth: float, latency: float) -> float:
    """Return the fraction of the time in which a device computes, if its stage is one layer and nothing overlaps.

    Each of the two passes waits for one message and one round trip.

    Args:
      layer: the layer of the stage.
      flops: FLOP/s of the device.
      bandwidth: bytes per second.
      latency: round-trip time in seconds.
    """
    compute = layer.flops / flops
    return compute / (compute + 2 * (layer.nbytes / bandwidth + latency))
