"""Adaptive rebalancing: which peers change their stage at the end of a period.

    paper     one move per period (Ryabinin et al., "SWARM Parallelism", 2023, section 3.3): each peer publishes the
              load of its queue, and the least loaded peer of the least loaded stage moves to the most loaded stage
    balance   the moves that make the slowest stage faster, by the measured speeds of the peers, until no move does;
              where none does, an exchange of two peers between two stages

A stage keeps at least one serving peer.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxpar.strategies.swarm.membership import ABSENT, Move, Swarm, best_move, best_swap, capacities, placed

# Relative increases of the throughput of the slowest stage. Below the first it is a rounding error. An exchange takes
# two peers out of service, and in large swarms there is always one that gains a little.
MOVE_GAIN = 1e-9
SWAP_GAIN = 0.01


def paper_rule(swarm: Swarm, loads: Sequence[float], now: float) -> list[Move]:
    """Return the paper's move, if there is one.

    Args:
      swarm: snapshot at the end of the period.
      loads: [P], the load that each peer has published; those of peers that do not serve are ignored.
      now: time, in seconds.
    """
    stage, load = np.array(swarm.stage), np.array(loads)
    serves = (stage != ABSENT) & (np.array(swarm.ready) <= now)
    counts = np.bincount(stage[serves], minlength=len(swarm.work))
    sums = np.bincount(stage[serves], load[serves], len(swarm.work))
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)
    target = int(np.argmax(means))
    source = int(np.argmin(np.where(counts > 1, means, np.inf)))
    if counts[source] < 2 or means[source] >= means[target]:
        return []
    peers = np.flatnonzero(serves & (stage == source))
    return [Move(int(peers[np.argmin(load[peers])]), source, target)]


def balance_rule(swarm: Swarm, _loads: Sequence[float], now: float) -> list[Move]:
    """Return moves and exchanges that each increase the throughput of the slowest stage.

    Peers that are downloading count as if they served.
    """
    moves: list[Move] = []
    while True:
        capacity = capacities(swarm)
        target = int(np.argmin(capacity))
        found, slower = best_move(swarm, target, now)
        if slower <= capacity[target] * (1 + MOVE_GAIN):
            found, slower = best_swap(swarm, target, now)
            if slower <= capacity[target] * (1 + SWAP_GAIN):
                return moves
        moves += found
        for move in found:
            swarm = placed(swarm, move.peer, move.target, math.inf)


RebalancingRule = Callable[[Swarm, Sequence[float], float], list[Move]]
REBALANCING_RULES: Mapping[str, RebalancingRule] = {"paper": paper_rule, "balance": balance_rule}


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
