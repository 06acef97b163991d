"""Periodic tables: the versions that their actions read, and their bubble."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from jaxpar.strategies.pipeline.tables.periodic import (
    CONTINUOUS,
    continuous_obstacle,
    fewest_microbatches,
    num_in_flight,
    periodic_table,
    unroll,
    versions_kept,
)
from jaxpar.strategies.pipeline.tables.schedule import make_table
from jaxpar.strategies.pipeline.tables.simulate import Times, simulate_table, steady_bubble_rate
from jaxpar.strategies.pipeline.tables.table import BW, F, U
from jaxpar.strategies.pipeline.tables.validate import TableError, check_table, peak_in_flight

SIZES = range(2, 9)


def cases() -> list[tuple[str, int, int]]:
    """Return schedules, numbers of stages, and numbers of microbatches per batch."""
    return [
        (name, p, m)
        for name, p in itertools.product(CONTINUOUS, SIZES)
        for m in sorted({fewest_microbatches(name, [1] * p), p, p + 1, 2 * p})
    ]


@pytest.mark.parametrize(("name", "p", "m"), cases())
def test_an_unrolled_table_is_valid(name: str, p: int, m: int) -> None:
    table = periodic_table(name, [1] * p, m)
    num_batches = num_in_flight(table) + 3
    finite = unroll(table, num_batches)
    check_table(finite)
    assert finite.num_microbatches == m * num_batches
    assert peak_in_flight(finite).tolist() == [min(p - stage, m * num_batches) for stage in range(p)]


@pytest.mark.parametrize("n", SIZES)
def test_versions_are_those_of_the_papers(n: int) -> None:
    """The formulas of PipeDream, section 3.3, for batches of one microbatch, and of PipeDream-2BW, section 3.1."""
    formulas: dict[str, Callable[[int, int], int]] = {
        "pipedream": lambda t, s: max(t - n + 1 + s, 0),
        "pipedream_vertical_sync": lambda t, _s: max(t - n + 1, 0),
        "pipedream_2bw": lambda k, _s: max(k // n - 1, 0),  # k + 1 is the number of the microbatch in the paper
    }
    for name, formula in formulas.items():
        per_batch = fewest_microbatches(name, [1] * n)
        table = unroll(periodic_table(name, [1] * n, per_batch), 4 * n)
        for _, _, kind, k, _, stage, version, _ in table.actions.tolist():
            assert version == (k // per_batch + 1 if kind == U else formula(k, stage)), (name, kind, k, stage)


@pytest.mark.parametrize("n", SIZES)
def test_versions_kept(n: int) -> None:
    kept = {
        name: versions_kept(periodic_table(name, [1] * n, fewest_microbatches(name, [1] * n))) for name in CONTINUOUS
    }
    assert kept == {
        "pipedream": [n - stage for stage in range(n)],
        "pipedream_vertical_sync": [n] * n,
        "pipedream_2bw": [2] * n,
        "pipedream_without_stashing": [1] * n,
    }
    assert max(versions_kept(periodic_table("pipedream", [1] * n, n))) == 2  # as many microbatches as stages


@pytest.mark.parametrize(("name", "p", "m"), [("pipedream", 4, 1), ("pipedream_2bw", 4, 4), ("pipedream", 3, 2)])
def test_there_is_no_bubble_in_the_steady_state(name: str, p: int, m: int) -> None:
    table = periodic_table(name, [1] * p, m)
    for times in (Times(1, 1, 1), Times(1, 2, 0.5), Times(1.5, 1, 1)):
        assert steady_bubble_rate(table, times) == pytest.approx(0, abs=1e-12)
    assert steady_bubble_rate(table, Times(1, 1, 1), communication=1) > 0.1
    # A slow device delays all others, but does not wait itself.
    slow = Times([1, 1, 2][:p] + [1] * (p - 3), 1, 1)
    assert steady_bubble_rate(table, slow) == pytest.approx(0, abs=1e-12)


def test_the_same_order_as_1f1b() -> None:
    """Without its updates, an unrolled table is 1F1B, which drains only at the end."""
    table, flush = (make_table(name, num_devices=4, num_microbatches=8, num_chunks=1) for name in ("pipedream", "1f1b"))
    fields = ["device", "kind", "microbatch"]
    for device in range(4):
        orders = [
            of.actions[(of.actions["device"] == device) & (of.actions["kind"] != U)][fields].tolist()
            for of in (table, flush)
        ]
        assert orders[0] == orders[1]
    assert simulate_table(table, Times(1, 1, 1)).cost == simulate_table(flush, Times(1, 1, 1)).cost


@pytest.mark.parametrize("replicas", [(2, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1), (2, 2), (4, 2, 1), (15, 1)])
def test_replicas_take_turns_without_a_bubble(replicas: tuple[int, ...]) -> None:
    """Stages whose actions take as many times as long as they have replicas are balanced, and no device waits."""
    for name in CONTINUOUS:
        table = periodic_table(name, replicas, fewest_microbatches(name, replicas))
        check_table(unroll(table, num_in_flight(table) + 2))
        times = [number for number in replicas for _ in range(number)]
        assert steady_bubble_rate(table, Times(times, times, times)) == pytest.approx(0, abs=1e-12)
        in_flight = max(peak_in_flight(unroll(table, 3 * num_in_flight(table))))
        assert in_flight <= -(-(sum(replicas) + len(replicas) - 1) // replicas[0]) + 1


def test_a_version_that_does_not_exist() -> None:
    table = unroll(periodic_table("pipedream", [1] * 2, 1), 4)
    for kind, version, message in (
        (F, 4, r"reads version 4; it must be a version that a U wrote in an earlier clock"),
        (BW, 4, r"reads version 4"),
        (U, 1, r"U of microbatch 3, stage 1 writes version 1; it must write version 4"),
    ):
        actions = table.actions.copy()
        wrong = np.flatnonzero((actions["kind"] == kind) & (actions["stage"] == 1))[-1]
        actions["version"][wrong] = version
        with pytest.raises(TableError, match=message):
            check_table(table._replace(actions=actions))


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("pipedream", (1, 4, 1), r"num_devices is 1; it must be at least 2 for schedule pipedream"),
        ("pipedream", (2, 4, 2), r"num_chunks is 2; it must be 1 for schedule pipedream"),
        ("pipedream_2bw", (4, 3, 1), r"num_microbatches is 3; it must be at least 4 for schedule pipedream_2bw"),
        ("pipedream_2bw", (4, 6, 1), r"num_microbatches is 6; it must be a multiple of 4, the microbatches of a batch"),
        ("pipedream", (2, 0, 1), r"num_microbatches is 0; it must be at least 1"),
    ],
)
def test_impossible_sizes(name: str, sizes: tuple[int, int, int], message: str) -> None:
    p, m, v = sizes
    with pytest.raises(ValueError, match=message):
        make_table(name, num_devices=p, num_microbatches=m, num_chunks=v)
    assert continuous_obstacle(name, [1] * 4, num_microbatches=8, num_chunks=1) is None
