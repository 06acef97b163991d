"""Stochastic wiring: which peer of a stage computes the next microbatch.

Each stage has a queue of its peers, ordered by the work that each has been assigned, in seconds. A microbatch goes to
the first peer of the queue, which returns to it with the time that it is expected to take added: interleaved weighted
round robin (Ryabinin et al., "SWARM Parallelism", 2023, section 3.2). Each peer therefore gets a share of the
microbatches in proportion to its measured speed. The forward and the backward pass of a microbatch are assigned
separately, so they can use different peers.

All functions return a new queue. A peer that fails is withdrawn, and gets no microbatch until it announces itself
again. `work` is the seconds of a microbatch on a peer of speed 1. `tie` is a random number that the caller draws; it
orders peers with equal work.
"""

from typing import NamedTuple

SMOOTHING = 0.1  # weight of the newest observation in the moving average


class QueuedPeer(NamedTuple):
    """A peer in the queue of its stage; queues are ordered by the fields in this order."""

    # the expected time of all work that it was assigned, in seconds, from that of the queue when it entered
    assigned: float
    tie: float  # a random number
    peer: int  # its index
    pace: float  # the moving average of its seconds per unit of work
    num_observed: int  # the number of observations in `pace`; without any, `pace` is a guess


StageQueue = tuple[QueuedPeer, ...]  # the peers that serve a stage


def announce(queue: StageQueue, peer: int, tie: float, pace: float | None = None) -> StageQueue:
    """Add a peer at the least assigned work in the queue, so that it is tried soon.

    A peer that is in the queue already stays where it is. pace: its seconds per unit of work, if known; by default the
    mean of the other peers.
    """
    if any(entry.peer == peer for entry in queue):
        return queue
    if pace is None:
        pace = sum(entry.pace for entry in queue) / len(queue) if queue else 1.0
    least = min((entry.assigned for entry in queue), default=0.0)
    return (*queue, QueuedPeer(least, tie, peer, pace, 0))


def withdraw(queue: StageQueue, peer: int) -> StageQueue:
    """Remove a peer that leaves the stage, or whose call failed."""
    return tuple(entry for entry in queue if entry.peer != peer)


def select(queue: StageQueue, work: float, tie: float) -> tuple[int, StageQueue]:
    """Return the peer of a queue that is not empty that computes the next microbatch, and the queue after it."""
    first = min(queue)
    after = first._replace(assigned=first.assigned + work * first.pace, tie=tie)
    return first.peer, tuple(after if entry is first else entry for entry in queue)


def observe(queue: StageQueue, peer: int, work: float, seconds: float) -> StageQueue:
    """Update the pace of a peer with the time that a microbatch took. A peer that has left is ignored.

    The average is the plain mean until it contains 1 / SMOOTHING observations, so the guess has no weight.
    """

    def observed(entry: QueuedPeer) -> QueuedPeer:
        number = entry.num_observed + 1
        pace = entry.pace + max(SMOOTHING, 1 / number) * (seconds / work - entry.pace)
        return entry._replace(pace=pace, num_observed=number)

    return tuple(observed(entry) if entry.peer == peer else entry for entry in queue)
