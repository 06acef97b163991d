"""Random traces: peers fail one by one and in groups, and join again."""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.strategies.swarm.availability import JOIN, LEAVE, PeerEvent, present_at_start


@dataclass(frozen=True)
class RandomTrace:
    """An endless random trace in which all peers are present at second 0. Each iteration yields the same events.

    All times are exponentially distributed, and in the same unit as those of the events.

    Attributes:
      num_peers: number of peers.
      lifetime: mean time that a peer stays.
      rejoin: mean time until a peer that left joins again.
      groups: number of groups of peers, such as those of a zone, that are preempted together. Peer p is in group
        p % groups.
      group_lifetime: mean time between the preemptions of a group.
      group_share: the fraction of the present peers of its group that a preemption stops, each independently.
      seed: seed of all random numbers.
    """

    num_peers: int
    lifetime: float
    rejoin: float
    groups: int = 1
    group_lifetime: float = math.inf
    group_share: float = 0.5
    seed: int = 0

    def __iter__(self) -> Iterator[PeerEvent]:
        """Yield the events in order of time."""
        rng = np.random.default_rng(self.seed)
        present = np.ones(self.num_peers, bool)
        # (time, number, peer or -1, group or -1): a peer changes between present and absent, or a group is preempted.
        numbers = itertools.count()
        heap = [(rng.exponential(self.lifetime), next(numbers), peer, -1) for peer in range(self.num_peers)]
        if self.group_lifetime < math.inf:
            heap += [(rng.exponential(self.group_lifetime), next(numbers), -1, group) for group in range(self.groups)]
        heapq.heapify(heap)
        newest = {peer: number for _, number, peer, _ in heap}  # an older event of a peer is void
        while heap[0][0] < math.inf:
            now, number, peer, group = heapq.heappop(heap)
            if group >= 0:
                members = range(group, self.num_peers, self.groups)
                changing = (one for one in members if present[one] and rng.random() < self.group_share)
            else:
                changing = (one for one in (peer,) if newest[one] == number)
            for one in changing:
                present[one] = not present[one]
                yield PeerEvent(now, one, JOIN if present[one] else LEAVE)
                newest[one] = next(numbers)
                after = now + rng.exponential(self.lifetime if present[one] else self.rejoin)
                heapq.heappush(heap, (after, newest[one], one, -1))
            if group >= 0:
                heapq.heappush(heap, (now + rng.exponential(self.group_lifetime), next(numbers), -1, group))


Trace = Sequence[PeerEvent] | RandomTrace


def first_present(num_peers: int, trace: Trace) -> frozenset[int]:
    """Return the peers that are present at second 0."""
    return present_at_start(num_peers, () if isinstance(trace, RandomTrace) else trace)


def events_before(trace: Trace, seconds: float) -> list[PeerEvent]:
    """Return the events of a trace before this time."""
    return list(itertools.takewhile(lambda event: event.seconds < seconds, trace))
