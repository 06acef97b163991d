"""Periodic tables: the versions that their actions read, and their bubble."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from tests.strategies.pipeline.tables.reference import is_valid, most

SIZES = range(2, 9)


NAMES = st.sampled_from([*CONTINUOUS])
REPLICAS = st.lists(st.integers(1, 3), min_size=2, max_size=6) | st.integers(2, 8).map(lambda p: [1] * p)


@given(NAMES, REPLICAS, st.integers(0, 3))
def test_any_unrolled_table_is_valid_and_reads_what_its_rule_states(name: str, replicas: list[int], more: int) -> None:
    m = fewest_microbatches(name, replicas) + more * math.lcm(*replicas)
    table = periodic_table(name, replicas, m)
    num_batches = num_in_flight(table) + 3
    finite = unroll(table, num_batches)
    check_table(finite)
    assert is_valid(finite)
    assert finite.num_microbatches == m * num_batches
    assert peak_in_flight(finite).tolist() == most(finite, {F: 1}, {BW: 1})
    if max(replicas) == 1:
        assert peak_in_flight(finite).tolist() == [
            min(len(replicas) - stage, m * num_batches) for stage in range(len(replicas))
        ]
    # Replay the clocks: every device counts its updates, and reads the version that the rule of the schedule states.
    at_entry: dict[int, int] = {}
    at_forward: dict[tuple[int, int], int] = {}
    newest, made = [0] * table.num_devices, [0] * table.num_devices
    for _, group in itertools.groupby(finite.actions.tolist(), key=lambda row: row[0]):
        made = newest.copy()
        for _, device, kind, k, _, stage, version, _ in group:
            if kind == U:
                newest[device] += 1
                assert (version, k) == (newest[device], version * m - 1)
                continue
            if kind == F:
                at_forward[k, stage] = made[device]
                if stage == 0:
                    at_entry[k] = made[device]
            rules = {
                "pipedream": at_forward[k, stage],
                "pipedream_vertical_sync": at_entry[k],
                "pipedream_2bw": max(k // m - 1, 0),
                "pipedream_without_stashing": made[device],
            }
            assert version == rules[name]
    assert newest == [num_batches] * table.num_devices


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


@given(NAMES, st.integers(2, 5), st.integers(0, 2), st.tuples(*[st.integers(1, 4)] * 3), st.integers(0, 4))
def test_there_is_no_bubble_in_the_steady_state(
    name: str, p: int, more: int, times: tuple[int, int, int], slow: int
) -> None:
    """A slow device delays all others, but does not wait itself."""
    f, b, w = times
    table = periodic_table(name, [1] * p, fewest_microbatches(name, [1] * p) + more)
    forward = [f + 2 * (device == slow) for device in range(p)]
    assert steady_bubble_rate(table, Times(forward, b, w)) == pytest.approx(0, abs=1e-12)
    assert steady_bubble_rate(table, Times(1, 1, 1), communication=1) > 0.1


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
