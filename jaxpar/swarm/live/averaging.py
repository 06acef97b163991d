"""Averages the gradients of each stage among the peers that have accumulated some, through the object stores.

Each of n contributors splits its gradient into n shards. Contributor j adds up shard j of all, in the order of the
peers, and everybody reads the n totals: as in a ring all-reduce, a peer sends and receives 2 (n - 1) / n gradients.
The loss is divided by the weight of the whole batch, so that the sum over the peers is the mean.
"""

from typing import Any, Protocol

from jaxpar.swarm.ledger import GradientLedger
from jaxpar.swarm.live.calls import Call
from jaxpar.swarm.live.events import EventKind, LiveEvent, emit
from jaxpar.swarm.live.members import Members
from jaxpar.swarm.live.peer import shard_sizes
from jaxpar.swarm.live.received import MALFORMED, NONFINITE_VALUES
from jaxpar.swarm.live.shapes import StepShapes
from jaxpar.swarm.live.tickets import PeerAnswer


class AveragedStep(Protocol):
    """The global batch whose gradients are averaged."""

    members: Members
    shapes: StepShapes
    ledger: GradientLedger
    num_stages: int

    @property
    def is_current(self) -> bool:
        """Whether the members still compute this batch."""

    def blame_gradient(self, stage: int, peer: int, kind: str) -> None:
        """Handle a gradient that a peer accumulated, and that is malformed or not finite."""


class Averaging:
    """An averaging of the gradients of all stages. It is void once a contributor has been lost.

    Attributes:
      contributors: by stage, the peers that have accumulated gradients, in order.
      is_void: whether it has been given up.
      totals: by stage, references to the shards of the total gradient.
    """

    def __init__(self, step: AveragedStep) -> None:
        """Ask the contributors of all stages for their shards."""
        self._step, self._calls = step, list[Call]()
        self.is_void = False
        stages = range(step.num_stages)
        self.contributors = [sorted(step.ledger.contributors(stage)) for stage in stages]
        self._shards: list[dict[int, list[Any]]] = [{} for _ in stages]
        self.totals: list[dict[int, Any]] = [{} for _ in stages]
        emit(LiveEvent(EventKind.AVERAGING))
        for stage, peers in enumerate(self.contributors):
            for peer in peers:
                self._publish(stage, peer)

    @property
    def is_complete(self) -> bool:
        """Whether all totals are computed."""
        return all(len(totals) == len(peers) for totals, peers in zip(self.totals, self.contributors, strict=True))

    def has(self, call: Call) -> bool:
        """Return whether a call belongs to this averaging."""
        return call in self._calls

    def _publish(self, stage: int, peer: int) -> None:
        number = len(self.contributors[stage])

        def published(answer: PeerAnswer, shards: list[Any], _call: Call) -> None:
            if not self._is_sound(stage, peer, answer):
                return
            if number == 1:
                self.totals[stage][0] = shards[0]
                return
            self._shards[stage][peer] = shards
            if len(self._shards[stage]) == number:
                for index, reducer in enumerate(self.contributors[stage]):
                    self._reduce(stage, reducer, index)

        members = self._step.members
        arguments = (members.ticket(peer), stage, number)
        self._calls.append(
            members.call(peer, "publish", *arguments, label=("publish", stage), num_arrays=number, done=published)
        )

    def _reduce(self, stage: int, peer: int, index: int) -> None:
        def reduced(answer: PeerAnswer, totals: list[Any], _call: Call) -> None:
            if self._is_sound(stage, peer, answer):
                self.totals[stage][index] = totals[0]

        members, number = self._step.members, len(self.contributors[stage])
        size = shard_sizes(self._step.shapes.sizes[stage], number)[index]
        shards = [self._shards[stage][one][index] for one in self.contributors[stage]]
        arguments = (members.ticket(peer), size, *shards)
        self._calls.append(
            members.call(peer, "reduce", *arguments, label=("reduce", stage), num_arrays=1, done=reduced)
        )

    def _is_sound(self, stage: int, peer: int, answer: PeerAnswer) -> bool:
        """Handle the fault of a call, and return whether there is none and this averaging is not void."""
        if self.is_void or not self._step.is_current:
            return False
        if answer.fault is None:
            return True
        if answer.fault.kind in (MALFORMED, NONFINITE_VALUES):
            sender = self.contributors[stage][answer.fault.source]
            self._step.blame_gradient(stage, sender, answer.fault.kind)
        else:
            self._step.members.fault(peer, answer)
        return False
