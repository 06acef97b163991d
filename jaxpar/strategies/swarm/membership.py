"""The stages that peers serve: an immutable snapshot, where a peer is needed most, and adaptive rebalancing.

At the end of a period, a rule changes the stages of peers. A stage keeps at least one serving peer.

    paper     one move per period (Ryabinin et al., "SWARM Parallelism", 2023, section 3.3): each peer publishes the
              load of its queue, and the least loaded peer of the least loaded stage moves to the most loaded stage
    balance   the moves that make the slowest stage faster, by the measured speeds of the peers, until no move does;
              where none does, an exchange of two peers between two stages
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

ABSENT = -1  # stage of a peer that is not in the swarm
# Relative increases of the throughput of the slowest stage. Below the first it is a rounding error. An exchange takes
# two peers out of service, and in large swarms there is always one that gains a little.
MOVE_GAIN = 1e-9
SWAP_GAIN = 0.01


class Swarm(NamedTuple):
    """Snapshot of P peers and S stages."""

    speed: tuple[float, ...]  # [P], units of work per second
    # [S], units of work of one microbatch in each stage, forward and backward: its seconds on a peer of speed 1
    work: tuple[float, ...]
    # [P], the stage that a peer serves, or whose parameters and optimizer state it downloads; or ABSENT
    stage: tuple[int, ...]
    ready: tuple[float, ...]  # [P], when its download ends, in seconds; the peer is out of service until then


class Move(NamedTuple):
    """A peer that changes from stage `source` to stage `target`."""

    peer: int
    source: int
    target: int


def make_swarm(speed: tuple[float, ...], work: tuple[float, ...], present: frozenset[int]) -> Swarm:
    """Return a swarm whose present peers serve from time 0: the fastest first, each where it is needed most."""
    swarm = Swarm(speed, work, (ABSENT,) * len(speed), (0.0,) * len(speed))
    for peer in sorted(present, key=lambda peer: (-speed[peer], peer)):
        swarm = placed(swarm, peer, neediest(swarm), 0.0)
    return swarm


def placed(swarm: Swarm, peer: int, stage: int, ready: float) -> Swarm:
    """Return the swarm after a peer has joined a stage, or moved to it; or left, with stage ABSENT."""
    stages, times = list(swarm.stage), list(swarm.ready)
    stages[peer], times[peer] = stage, ready
    return swarm._replace(stage=tuple(stages), ready=tuple(times))


def _serving(swarm: Swarm, now: float) -> np.ndarray:
    """Return [P]: whether a peer serves its stage."""
    return (np.array(swarm.stage) != ABSENT) & (np.array(swarm.ready) <= now)


def _movable(swarm: Swarm, now: float) -> np.ndarray:
    """Return [P]: whether a peer serves, and is not the last serving peer of its stage."""
    stage, serves = np.array(swarm.stage), _serving(swarm, now)
    return serves & (np.bincount(stage[serves], minlength=len(swarm.work))[stage] > 1)


def capacities(swarm: Swarm, now: float = math.inf) -> np.ndarray:
    """Return [S]: the microbatches per second of each stage, by default with the peers that are still downloading."""
    serves = _serving(swarm, now)
    speeds = np.bincount(np.array(swarm.stage)[serves], np.array(swarm.speed)[serves], len(swarm.work))
    return speeds / np.array(swarm.work)


def optimal_throughput(swarm: Swarm) -> float:
    """Return the most microbatches per second that the present peers can compute.

    It is the bound of the linear program in which a peer divides its time over the stages as it likes: all stages get
    the same throughput t, and t times the work of all stages is the speed of all peers. No assignment of whole peers is
    faster.
    """
    speed = sum(speed for speed, stage in zip(swarm.speed, swarm.stage, strict=True) if stage != ABSENT)
    return speed / sum(swarm.work)


def neediest(swarm: Swarm) -> int:
    """Return the slowest stage, which a joining peer serves."""
    return int(np.argmin(capacities(swarm)))


def best_move(swarm: Swarm, target: int, now: float) -> tuple[list[Move], float]:
    """Return the move to stage `target` after which the slower one of its two stages is fastest, and that throughput.

    Only serving peers move, and none that is the last serving peer of its stage. If no peer can move, there is no move,
    and the throughput is 0.
    """
    stage, speed, work = np.array(swarm.stage), np.array(swarm.speed), np.array(swarm.work)
    peers = np.flatnonzero(_movable(swarm, now) & (stage != target))
    if not len(peers):
        return [], 0.0
    capacity, source = capacities(swarm), stage[peers]
    slower = np.minimum(capacity[source] - speed[peers] / work[source], capacity[target] + speed[peers] / work[target])
    best = int(np.argmax(slower))
    return [Move(int(peers[best]), int(source[best]), target)], float(slower[best])


def best_swap(swarm: Swarm, target: int, now: float) -> tuple[list[Move], float]:
    """Return the two moves that exchange a peer of stage `target` for one of another stage; otherwise as `best_move`.

    Each of the two stages keeps another serving peer while these two download.
    """
    stage, speed, work = np.array(swarm.stage), np.array(swarm.speed), np.array(swarm.work)
    movable = _movable(swarm, now)
    inside, outside = np.flatnonzero(movable & (stage == target)), np.flatnonzero(movable & (stage != target))
    if not len(inside) or not len(outside):
        return [], 0.0
    capacity, source = capacities(swarm), stage[outside]
    gained = speed[outside] - speed[inside][:, None]  # by the target
    slower = np.minimum(capacity[source] - gained / work[source], capacity[target] + gained / work[target])
    a, b = np.unravel_index(np.argmax(slower), slower.shape)
    comes, leaves, other = int(outside[b]), int(inside[a]), int(source[b])
    return [Move(comes, other, target), Move(leaves, target, other)], float(slower[a, b])


def refills(swarm: Swarm, now: float) -> list[Move]:
    """Return the moves that give each stage without any peer a new one, as far as other stages have peers to spare."""
    moves = []
    for stage in range(len(swarm.work)):
        if stage not in swarm.stage:
            for move in best_move(swarm, stage, now)[0]:
                moves.append(move)
                swarm = placed(swarm, move.peer, stage, math.inf)
    return moves


def paper_rule(swarm: Swarm, loads: Sequence[float], now: float) -> list[Move]:
    """Return the paper's move, if there is one. loads: [P], published by the peers; only those that serve count."""
    stage, load, serves = np.array(swarm.stage), np.array(loads), _serving(swarm, now)
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
