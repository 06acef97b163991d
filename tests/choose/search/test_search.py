"""The search is compared with all possible orders, all named schedules that fit, and the published scheduler."""

import functools
import itertools
from collections.abc import Iterator

import pytest

from jaxpar.choose.search.search import search
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, schedule_obstacle
from jaxpar.strategies.pipeline.tables.simulate import Times, simulate_table
from jaxpar.strategies.pipeline.tables.table import B, F, Table
from jaxpar.strategies.pipeline.tables.validate import check_table, peak_stashed
from tests.selection import slow
from tests.strategies.pipeline.named_tables import make

TIMES = [(1, 1, 1), (4, 5, 3), (5, 4, 2), (2, 5, 7), (7, 2, 3), (1, 2, 1)]


def cost(table: Table, times: tuple[float, ...], communication: float) -> float:
    return float(simulate_table(table, Times(*times), communication).cost)


def all_orders(m: int, most_stashed: int) -> Iterator[str]:
    """Yield all orders of F, B and W of m microbatches, with at most `most_stashed` between F and W.

    Each kind runs in the order of the microbatches.
    """

    @functools.cache
    def tails(f: int, b: int, w: int) -> tuple[str, ...]:
        if w == m:
            return ("",)
        result: list[str] = []
        if f < m and f - w < most_stashed:
            result += ["F" + tail for tail in tails(f + 1, b, w)]
        if b < f:
            result += ["B" + tail for tail in tails(f, b + 1, w)]
        if w < b:
            result += ["W" + tail for tail in tails(f, b, w + 1)]
        return tuple(result)

    return iter(tails(0, 0, 0))


def span(orders: tuple[str, ...], times: tuple[float, ...], communication: float) -> float:
    """Return the longest span of devices that run these orders; infinity if they deadlock."""
    p, time = len(orders), dict(zip("FBW", times, strict=True))
    ends: dict[tuple[str, int, int], float] = {}
    now, first, done = [0.0] * p, [0.0] * p, [0] * p
    for _ in range(sum(map(len, orders))):
        for d in range(p):
            if done[d] == len(orders[d]):
                continue
            kind = orders[d][done[d]]
            k = orders[d][: done[d]].count(kind)
            needs = {"F": ("F", d - 1, k), "B": ("B", d + 1, k) if d < p - 1 else ("F", d, k), "W": ("B", d, k)}[kind]
            if needs[1] >= 0 and needs not in ends:
                continue
            arrival = ends[needs] + communication * (needs[1] != d) if needs[1] >= 0 else 0.0
            start = max(now[d], arrival)
            first[d] = first[d] if done[d] else start
            now[d] = ends[kind, d, k] = start + time[kind]
            done[d] += 1
    is_done = all(count == len(order) for count, order in zip(done, orders, strict=True))
    return max(end - start for start, end in zip(first, now, strict=True)) if is_done else float("inf")


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (2, 2), (2, 3), (3, 2)])
def test_best_of_all_orders(p: int, m: int) -> None:
    for times, communication, limit in itertools.product(TIMES, (0, 1), (1, 2, 3)):
        if limit > m:
            continue
        orders = list(all_orders(m, limit))
        best = min(span(choice, times, communication) for choice in itertools.product(orders, repeat=p))
        result = search(Times(*times), communication, limit, p, m)
        check_table(result.table)
        assert peak_stashed(result.table).max() <= limit
        assert cost(result.table, times, communication) == pytest.approx(best), (
            times,
            communication,
            limit,
            result.policy,
        )


@pytest.mark.parametrize(
    ("v", "share"),
    [(1, 0.45), slow((2, 0.75)), slow((3, 1))],
)
def test_never_worse_than_a_named_schedule_that_fits(v: int, share: float) -> None:
    better = []
    for (p, m), times, communication in itertools.product([(2, 4), (4, 6)], TIMES[1::2], (0, 0.5)):
        named = {
            name: make(name, p, m, v)
            for name in SCHEDULES
            if schedule_obstacle(name, num_devices=p, num_microbatches=m, num_chunks=v) is None
        }
        for limit in (1, 1.5 * p / 2, p, 2 * p - 1):
            result = search(Times(*times), communication, limit, p, m, v, evaluations=100)
            check_table(result.table)
            assert peak_stashed(result.table).max() <= limit * v
            fitting = [table for table in named.values() if peak_stashed(table).max() <= limit * v]
            best = min((cost(table, times, communication) for table in fitting), default=float("inf"))
            of_result = cost(result.table, times, communication)
            assert of_result <= best
            assert of_result < best or result.policy in SCHEDULES  # a tie goes to the named schedule
            better.append(of_result < best)
    assert sum(better) >= share * len(better)


# As in test_simulate.py, with the bubble rates of ZB-1p and ZB-2p in the paper, the hidden size h and the number a of
# heads. F stashes 34h + 5as bytes per token for s = 1024 tokens, of which 32h remain stashed for W.
PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337), 0.601, 0.1585, 0.0433, (2304, 24)),
    (8, 24, (29.718, 29.444, 19.927), 0.527, 0.1323, 0.0029, (4096, 32)),
    slow((16, 48, (11.347, 11.248, 8.132), 0.377, 0.1397, 0.0066, (5120, 40))),
]


@pytest.mark.parametrize(("p", "m", "times", "communication", "zb_1p", "zb_2p", "sizes"), PUBLISHED)
def test_published_rates_of_the_automatic_scheduler(
    p: int,
    m: int,
    times: tuple[float, float, float],
    communication: float,
    zb_1p: float,
    zb_2p: float,
    sizes: tuple[int, int],
) -> None:
    hidden, heads = sizes
    weight_memory = 32 * hidden / (34 * hidden + 5 * heads * 1024)
    for limit, rate in ((p, zb_1p), (2 * p, zb_2p)):
        result = search(Times(*times), communication, limit, p, m, weight_memory=weight_memory, evaluations=300)
        assert peak_stashed(result.table, weight_memory).max() <= limit + 1e-6
        assert simulate_table(result.table, Times(*times), communication).bubble_rate <= rate + 0.0005


def test_more_memory_and_more_chunks_never_cost_more() -> None:
    times = PUBLISHED[0][2]
    costs = {
        (v, limit): cost(search(Times(*times), 0.6, limit, 4, 8, v).table, times, 0.6)
        for v in (1, 2)
        for limit in (2, 4, 6, 8)
    }
    for v in (1, 2):
        of_chunks = [costs[v, limit] for limit in (2, 4, 6, 8)]
        assert of_chunks == sorted(of_chunks, reverse=True)
    assert costs[2, 4] < 0.95 * costs[1, 4]


def test_devices_of_unequal_times() -> None:
    """The slowest device never waits, and needs half of the memory that zb_h1 needs for the same cost."""
    times, slowest = Times(*[[1.0, 1, 3, 1]] * 3), 2
    simulation = simulate_table(search(times, 0.1, 2, 4, 8).table, times, 0.1)
    assert simulation.idle_in_span[slowest] == pytest.approx(0)
    assert simulation.cost == pytest.approx(8 * 9)
    assert max(simulation.peak_stashed) == 2
    assert simulate_table(make("zb_h1", 4, 8), times, 0.1).cost == pytest.approx(8 * 9)


def test_the_same_twice() -> None:
    twice = [search(Times(4, 5, 3), 1, 6, 4, 8, 2, seed=3) for _ in range(2)]
    assert twice[0].policy == twice[1].policy
    assert (twice[0].table.actions == twice[1].table.actions).all()
    assert set(twice[0].table.actions["kind"][:2]) <= {F, B}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.5, 2, 2), "memory_limit is 0.5; it must be at least 1"),
        ((float("nan"), 2, 2), "memory_limit is nan; it must be at least 1"),
        ((2, 0, 2), "num_devices is 0; it must be at least 1"),
        ((2, 2, 0), "num_microbatches is 0; it must be at least 1"),
        ((2, 2, 2, 0), "num_chunks is 0; it must be at least 1"),
    ],
)
def test_mistakes(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        search(Times(1, 1, 1), 0, *arguments)  # type: ignore[arg-type]
