"""Checks routing, membership and rebalancing against bounds and hand counts, for random peers and random events."""

import itertools
import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.strategies.swarm import routing
from jaxpar.strategies.swarm.membership import (
    ABSENT,
    REBALANCING_RULES,
    Move,
    Swarm,
    balance_rule,
    capacities,
    make_swarm,
    neediest,
    optimal_throughput,
    paper_rule,
    placed,
    refills,
)
from jaxpar.strategies.swarm.routing import StageQueue


def members(swarm: Swarm, stage: int, now: float = math.inf) -> list[int]:
    """Return the peers that serve a stage at time `now`; by default also those that are still downloading."""
    both = zip(swarm.stage, swarm.ready, strict=True)
    return [peer for peer, (at, ready) in enumerate(both) if at == stage and ready <= now]


def assign(paces: list[float], number: int, rng: np.random.Generator) -> Counter[int]:
    """Route microbatches to peers that take `paces` seconds each, which the queue has to measure."""
    queue: StageQueue = ()
    for peer in range(len(paces)):
        queue = routing.announce(queue, peer, rng.random())
    counts: Counter[int] = Counter()
    for _ in range(number):
        peer, queue = routing.select(queue, 1.0, rng.random())
        queue = routing.observe(queue, peer, 1.0, paces[peer])
        counts[peer] += 1
    return counts


def test_interleaved_weighted_round_robin() -> None:
    """A peer that is twice as fast gets 2/3 of the microbatches; their assigned times stay within one microbatch."""
    queue = routing.announce(routing.announce((), 0, 0.1, 1.0), 1, 0.2, 2.0)
    order = []
    for step in range(12):
        peer, queue = routing.select(queue, 1.0, step % 7 / 7)
        order.append(peer)
    assert order.count(0) == 8
    assert all(abs(order[:n].count(0) - 2 * order[:n].count(1)) <= 2 for n in range(13))


@pytest.mark.parametrize("seed", range(10))
def test_load_is_within_5_percent_of_the_linear_program(seed: int) -> None:
    """The makespan of n microbatches is at least n / sum of speeds, however they are divided."""
    rng = np.random.default_rng(seed)
    paces = list(rng.lognormal(0, 1, rng.integers(2, 12)))
    number = 20_000
    bound = number / sum(1 / pace for pace in paces)
    counts = assign(paces, number, rng)
    assert max(counts[peer] * pace for peer, pace in enumerate(paces)) <= 1.05 * bound


def test_a_new_peer_enters_at_the_least_work() -> None:
    queue = routing.announce(routing.announce((), 0, 0.5, 1.0), 1, 0.5, 3.0)
    for _ in range(6):
        _, queue = routing.select(queue, 1.0, 0.5)
    queue = routing.announce(queue, 2, 0.1)
    entries = {entry.peer: entry for entry in queue}
    assert entries[2].assigned == min(entries[0].assigned, entries[1].assigned)
    assert entries[2].pace == 2.0  # the mean of the others
    assert routing.announce(queue, 2, 0.9) == queue


EVENTS = st.sampled_from(["announce", "withdraw", "select", "select", "observe"])


@given(st.lists(st.tuples(EVENTS, st.integers(0, 4), st.floats(0, 1), st.sampled_from([0.5, 1.0, 3.0])), max_size=50))
def test_any_sequence_of_joins_and_deaths(events: list[tuple[str, int, float, float]]) -> None:
    """A peer that failed gets nothing until it announces itself, and the next peer has the least assigned work."""
    queue: StageQueue = ()
    present: set[int] = set()
    for event, peer, tie, seconds in events:
        before = {entry.peer: entry for entry in queue}
        if event == "announce":
            queue, present = routing.announce(queue, peer, tie), present | {peer}
        elif event == "withdraw":
            queue, present = routing.withdraw(queue, peer), present - {peer}
        elif event == "observe":
            queue = routing.observe(queue, peer, 2.0, seconds)
        elif queue:
            peer, queue = routing.select(queue, 2.0, tie)
            assert before[peer].assigned == min(entry.assigned for entry in before.values())
        after = {entry.peer: entry for entry in queue}
        assert (set(after), len(queue)) == (present, len(present))
        assert all(after[other] == before[other] for other in present - {peer})
        if event == "select" and queue:
            assert after[peer].assigned == before[peer].assigned + 2 * before[peer].pace
        if event == "announce" and peer in before:
            assert after == before


def test_pace_is_a_moving_average() -> None:
    """The guess of 50 has no weight, the first ten observations equal weights, and later ones 0.1."""
    queue = routing.announce((), 0, 0.0, 50.0)
    for seconds in range(1, 11):
        queue = routing.observe(queue, 0, 2.0, seconds)
    assert queue[0].pace == pytest.approx(5.5 / 2)
    queue = routing.observe(queue, 0, 2.0, 100.0)
    assert queue[0].pace == pytest.approx(0.9 * 2.75 + 0.1 * 50)


def swarm(stages: list[list[float]], work: tuple[float, ...] | None = None) -> Swarm:
    """Return a swarm of serving peers from the speeds in each stage; indices are in order."""
    speed = tuple(itertools.chain(*stages))
    stage = tuple(number for number, speeds in enumerate(stages) for _ in speeds)
    return Swarm(speed, work or (1.0,) * len(stages), stage, (0.0,) * len(speed))


def test_capacities_and_the_bound() -> None:
    made = swarm([[1, 2], [3], [4, 4]], (1.0, 2.0, 4.0))
    assert capacities(made).tolist() == [3, 1.5, 2]
    assert neediest(made) == 1
    assert optimal_throughput(made) == 2  # speed 14 for work 7
    late = placed(made, 2, 1, 10.0)
    assert capacities(late, 9.0).tolist() == [3, 0, 2]
    assert capacities(late, 10.0).tolist() == [3, 1.5, 2]
    assert placed(made, 3, ABSENT, 0.0).stage == (0, 0, 1, ABSENT, 2)


def test_peers_are_assigned_the_fastest_first() -> None:
    """Speeds 5 | 4 | 3, then 2 and 1 where the least is."""
    made = make_swarm((1.0, 2.0, 3.0, 4.0, 5.0, 9.0), (1.0, 1.0, 1.0), frozenset(range(5)))
    assert capacities(made).tolist() == [5, 5, 5]
    assert made.stage[5] == ABSENT


def test_an_empty_stage_is_refilled_from_the_stage_that_can_spare_a_peer() -> None:
    assert refills(swarm([[1, 1, 1], [], [2]]), 0.0) == [Move(0, 0, 1)]
    assert refills(swarm([[1], [], [2]]), 0.0) == []  # nobody can move
    assert refills(swarm([[1, 1], [1]]), 0.0) == []
    assert len(refills(swarm([[1, 1, 1], [], []]), 0.0)) == 2
    downloading = placed(swarm([[1, 1], []]), 0, 0, 5.0)
    assert refills(downloading, 0.0) == []  # stage 0 keeps its only serving peer
    assert refills(downloading, 5.0) == [Move(0, 0, 1)]


def test_the_papers_rule() -> None:
    """The least loaded peer of the least loaded stage moves to the most loaded one, one in a period."""
    made = swarm([[1, 1], [1, 1, 1], [1]])
    assert paper_rule(made, [2, 4, 1, 0.5, 1, 7], 0.0) == [Move(3, 1, 2)]
    assert paper_rule(made, [1, 1, 1, 1, 1, 1], 0.0) == []
    assert paper_rule(swarm([[1], [1, 1]]), [0, 5, 9], 0.0) == []  # the last peer of stage 0 stays


def test_balancing_moves_until_no_move_helps() -> None:
    moves = balance_rule(swarm([[1] * 8, [1], [1] * 3]), [], 0.0)
    assert [(move.source, move.target) for move in moves] == [(0, 1), (0, 1), (0, 1), (0, 2)]
    assert balance_rule(swarm([[1] * 2, [1] * 3]), [], 0.0) == []
    assert balance_rule(swarm([[5, 1], [1]]), [], 0.0) == [Move(1, 0, 1)]  # the slow peer, not the fast one


def test_balancing_exchanges_peers_where_no_move_helps() -> None:
    """Two moves of 2 | 4 to 3 | 3. A stage keeps a serving peer, and an exchange must gain more than 1%."""
    assert balance_rule(swarm([[1, 1], [2, 2]]), [], 0.0) == [Move(2, 1, 0), Move(0, 0, 1)]
    assert balance_rule(swarm([[1], [2]]), [], 0.0) == []
    assert balance_rule(placed(swarm([[1, 1], [2, 2]]), 1, 0, 5.0), [], 0.0) == []
    assert balance_rule(swarm([[1, 1], [1.02, 1]]), [], 0.0) == []
    assert balance_rule(swarm([[1, 1], [1.05, 1.05]]), [], 0.0) == [Move(2, 1, 0), Move(0, 0, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_balancing_is_within_5_percent_of_the_bound(seed: int) -> None:
    """Unequal peers, from wherever they are, with at least four times as many peers as stages."""
    rng = np.random.default_rng(seed)
    num_stages = int(rng.integers(2, 5))
    num_peers = int(rng.integers(4 * num_stages, 40))
    stages = (*range(num_stages), *range(num_stages), *rng.integers(0, num_stages, num_peers - 2 * num_stages).tolist())
    speed, work = (tuple(rng.uniform(low, 1, size)) for low, size in ((0.2, num_peers), (0.5, num_stages)))
    made = Swarm(speed, work, stages, (0.0,) * num_peers)
    for move in balance_rule(made, [], 0.0):
        made = placed(made, move.peer, move.target, 0.0)
    assert capacities(made).min() > 0.95 * optimal_throughput(made)


@pytest.mark.parametrize("rule", REBALANCING_RULES)
@pytest.mark.parametrize("seed", range(10))
def test_no_stage_is_empty_while_peers_can_move(rule: str, seed: int) -> None:
    """Random joins, deaths and periods: an empty stage means that no stage has two serving peers."""
    rng = np.random.default_rng(seed)
    num_stages, num_peers, now = int(rng.integers(2, 5)), int(rng.integers(5, 12)), 0.0
    made = make_swarm(tuple(rng.lognormal(0, 0.5, num_peers)), (1.0,) * num_stages, frozenset(range(num_peers)))
    for _ in range(150):
        now += rng.exponential(1.0)
        peer = int(rng.integers(num_peers))
        moves = []
        if rng.random() < 0.2:
            before = [len(members(made, stage, now)) for stage in range(num_stages)]
            moves = REBALANCING_RULES[rule](made, list(rng.random(num_peers)), now)
            for stage in range(num_stages):
                assert before[stage] - sum(move.source == stage for move in moves) >= min(before[stage], 1)
        elif made.stage[peer] == ABSENT:
            made = placed(made, peer, neediest(made), now + rng.exponential(1.0))
        else:
            made = placed(made, peer, ABSENT, 0.0)
        for move in moves:
            made = placed(made, move.peer, move.target, now + 1.0)
        for move in refills(made, now):
            made = placed(made, move.peer, move.target, now + 1.0)
        if any(not members(made, stage) for stage in range(num_stages)):
            assert all(len(members(made, stage, now)) < 2 for stage in range(num_stages))


@pytest.mark.parametrize("seed", range(5))
def test_balancing_reaches_what_moves_can_reach(seed: int) -> None:
    """With equal peers, every stage ends with at least floor(peers / stages) of them."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 20, 5)
    made = swarm([[1.0] * count for count in counts])
    for move in balance_rule(made, [], 0.0):
        made = placed(made, move.peer, move.target, 0.0)
    assert capacities(made).min() == counts.sum() // 5


def test_decisions_need_no_jax() -> None:
    code = "import sys, jaxpar.strategies.swarm.run; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
