"""A peer of a live swarm as its trainer sees it, the settings of a swarm, and the contract of a batch with its peers.

STARTING -> attached -> WAITING -> load a stage -> LOADING -> SERVING -> (move) LOADING -> ...
a peer that is silent or suspected is GIVEN_UP, and attached again when it answers or is cleared; if it does not for
join_seconds, its process is ended
a peer that died, raised an error or sent a malformed array is GONE
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from jaxpar.swarm.live.calls import Call
from jaxpar.swarm.live.cluster import PeerResources
from jaxpar.swarm.live.tickets import Arrays, PeerPlace, PeerSettings


class PeerStatus(StrEnum):
    """The status of a peer."""

    STARTING = "starting"
    WAITING = "waiting"
    LOADING = "loading"
    SERVING = "serving"
    GIVEN_UP = "given up"
    GONE = "gone"


class LiveSettings(NamedTuple):
    """Settings of a live swarm, from config.swarm.

    Attributes:
      most: the most peers at a time.
      resources: resources that a peer takes on its machine.
      peer: settings of the process of a peer.
      namespace: name under which peers outlive their trainer; empty: they end with it.
      rebalance_seconds: period of rebalancing; 0: never.
      rule: key of REBALANCING_RULES.
      join_seconds: period in which peers are started on machines that have joined, and in place of peers that are gone;
        0: never.
      patience: factor on the time of comparable calls, after which a peer is silent.
      seed: seed of the ties in routing.
    """

    most: int
    resources: PeerResources
    peer: PeerSettings
    namespace: str = ""
    rebalance_seconds: float = 0.0
    rule: str = "balance"
    join_seconds: float = 0.0
    patience: float = 20.0
    seed: int = 0


@dataclass(eq=False)
class LivePeer:
    """A peer.

    Attributes:
      handle: Ray's handle of the actor.
      node: Ray's identifier of its machine; empty until it is attached, if an earlier trainer started it.
      place: its place, once it is attached.
      status: its status.
      generation: number of times that it was given up.
      is_hostile: whether it was banned for what it sent.
      silent_since: when it was given up because it was silent, in seconds since the run began; inf if it was not.
      pace: its last seconds per unit of work; None if unknown.
      area: integral over time of its number of assigned passes, since the last rebalancing.
      changed: the time up to which `area` has been integrated.
      depth: its number of assigned passes.
    """

    handle: Any
    node: str
    place: PeerPlace | None = None
    status: PeerStatus = PeerStatus.STARTING
    generation: int = 0
    is_hostile: bool = False
    silent_since: float = math.inf
    pace: float | None = None
    area: float = 0.0
    changed: float = 0.0
    depth: int = 0


class StateSource(NamedTuple):
    """The state that peers load.

    Attributes:
      tree: stage -> reference to its part of the canonical state.
      microbatch: reference to a microbatch, to compile programs for its shapes.
      scalars: data of a dropout key, and a divisor of the loss.
    """

    tree: Callable[[int], Any]
    microbatch: Any
    scalars: Arrays


class StepInProgress(Protocol):
    """The global batch that the peers compute."""

    def lose(self, peer: int) -> None:
        """Route again what a peer was assigned and had accumulated. The peer has been given up."""

    def release(self, peer: int) -> None:
        """Route again what a peer was assigned but has not started, because it moves."""

    def resume(self) -> None:
        """Route microbatches that wait for a peer of their stage."""

    def feed(self) -> None:
        """Send peers what they were assigned, as far as they have answered earlier calls."""

    def value_lost(self, call: Call) -> bool:
        """Compute again what a call should have received. Returns whether the call belongs to the batch."""
