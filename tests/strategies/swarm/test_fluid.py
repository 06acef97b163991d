"""Checks the simulation of large swarms against hand counts."""

import numpy as np
import pytest

from jaxpar.strategies.swarm.availability import JOIN, LEAVE, PeerEvent, SwarmPeer
from jaxpar.strategies.swarm.costs import SwarmSettings, Workload
from jaxpar.strategies.swarm.fluid import run_fluid
from jaxpar.strategies.swarm.membership import Move


def test_a_hand_count() -> None:
    """Four peers on two stages: 2 microbatches/s; 1 without peer 0; 2 again when it returns and has downloaded 5 s."""
    peers = [SwarmPeer(name, bandwidth=2.0) for name in "abcd"]
    trace = [PeerEvent(10, 0, LEAVE), PeerEvent(20, 0, JOIN)]
    run = run_fluid(peers, Workload((1, 1), (0, 0), state_bytes=10), trace, 40, SwarmSettings(0, 0))
    assert run.time.tolist() == [0, 10, 20, 25, 40]
    assert run.throughput.tolist() == [2, 1, 1, 2]
    assert run.optimal.tolist() == [2, 1.5, 2, 2]
    assert run.num_present.tolist() == [4, 3, 4, 4]
    assert run.efficiency == pytest.approx((20 + 10 + 5 + 30) / (20 + 15 + 10 + 30))
    assert (run.failures, run.moves) == ([10], [])


def test_an_empty_stage_gets_a_peer_at_once() -> None:
    """Stages {a, c, e} and {b, d}: when b and d fail, a moves and downloads for 4 s, at its own bandwidth."""
    peers = [SwarmPeer(name, bandwidth=2.0) for name in "abcde"]
    trace = [PeerEvent(6, 1, LEAVE), PeerEvent(6, 3, LEAVE)]
    run = run_fluid(peers, Workload((1, 1), (0, 0), state_bytes=8), trace, 20, SwarmSettings(0, 0))
    assert run.moves == [(6, Move(0, 0, 1))]
    assert run.time.tolist() == [0, 6, 10, 20]
    assert run.throughput.tolist() == [2, 0, 1]


@pytest.mark.parametrize("rule", ["paper", "balance"])
def test_rebalancing_at_the_end_of_a_period(rule: str) -> None:
    """Two of the three peers of a stage fail. At second 10 one peer moves there, and serves 1 s later."""
    peers = [SwarmPeer(str(n), bandwidth=1.0) for n in range(9)]
    trace = [PeerEvent(4, 0, LEAVE), PeerEvent(4, 3, LEAVE)]
    settings = SwarmSettings(0, 0, rebalance_seconds=10, rule=rule)
    run = run_fluid(peers, Workload((1, 1, 1), (0, 0, 0), state_bytes=1), trace, 19, settings)
    assert [time for time, _ in run.moves] == [10]
    assert run.moves[0][1].target == 0
    assert run.time.tolist() == [0, 4, 10, 11, 19]
    assert run.throughput.tolist() == [3, 1, 1, 2]
    np.testing.assert_array_equal(run.capacity[0], [3, 3, 3])
