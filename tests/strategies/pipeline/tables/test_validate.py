"""Every rule is tested with tables that break it, and with a second, independent validator on random tables."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.strategies.pipeline.tables.schedule import forward_only
from jaxpar.strategies.pipeline.tables.table import ACTION, ACTION_KINDS, BW, B, F, Table, W, loop_stages, with_slots
from jaxpar.strategies.pipeline.tables.validate import (
    TableError,
    check_table,
    peak_handed,
    peak_in_flight,
    peak_stashed,
)
from tests.strategies.pipeline.named_tables import any_tables, make
from tests.strategies.pipeline.tables.reference import is_valid, most


def find(table: Table, device: int, kind: int, microbatch: int, chunk: int = 0) -> int:
    """Return the row number of an action."""
    rows = table.actions[["device", "kind", "microbatch", "chunk"]].tolist()
    return rows.index((device, kind, microbatch, chunk))


def changed(table: Table, *row: int, **fields: int) -> Table:
    """Return the table with fields of one row changed and the rows sorted again."""
    actions = table.actions.copy()
    for field, value in fields.items():
        actions[field][find(table, *row)] = value
    return table._replace(actions=ordered(actions))


def dropped(table: Table, *row: int) -> Table:
    return table._replace(actions=np.delete(table.actions, find(table, *row)))


def ordered(actions: np.ndarray) -> np.ndarray:
    in_clock = np.array([kind.phase for kind in ACTION_KINDS])[np.clip(actions["kind"], 0, 4)]
    return actions[np.lexsort((in_clock, actions["device"], actions["clock"]))]


F1B, H1, V = make("1f1b", 3, 4), make("zb_h1", 3, 4), make("zb_v", 2, 3)
EAGER, SPLIT = make("eager_1f1b", 3, 4), make("zb_h1", 1, 2)
NOWHERE = Table(1, 1, 1, np.zeros(0, ACTION))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (NOWHERE, "the table has no actions; it must have at least one"),
        # ranges and order
        (changed(F1B, 1, F, 0, device=3), "clock 1, device 3: device is 3; it must be at least 0 and less than 3"),
        (changed(F1B, 1, F, 0, kind=5), "clock 1, device 1: kind is 5; it must be at least 0 and less than 5"),
        (changed(F1B, 0, F, 3, microbatch=4), "clock 6, device 0: microbatch is 4; .* less than 4"),
        (changed(F1B, 1, F, 0, chunk=1), "clock 1, device 1: chunk is 1; .* less than 1"),
        (changed(F1B, 1, F, 0, stage=-1), "clock 1, device 1: stage is -1; .* less than 3"),
        (changed(F1B, 1, F, 0, version=-1), "clock 1, device 1: version is -1; it must be at least 0"),
        (changed(F1B, 0, F, 0, clock=-1), "clock -1, device 0: clock is -1; it must be at least 0"),
        (
            F1B._replace(actions=F1B.actions[[0, 2, 1, *range(3, 24)]]),
            "clock 1, device 0: rows must be sorted by clock, device and order within the clock .*",
        ),
        # stages
        (
            changed(F1B, 1, F, 0, device=2),
            "clock 2, device 1: stage 1 is also on device 2; a stage must be on one device",
        ),
        (
            changed(V, 0, F, 1, chunk=1),
            "clock 1, device 0: chunk 1 is stage 0; a chunk must be one stage, and a stage must be one chunk",
        ),
        (changed(V, 1, F, 1, stage=2), "clock 3, device 1: chunk 0 is stage 2; a chunk .*"),
        # no repetition, and one F, one B or BW, and one W in a clock
        (
            changed(F1B, 0, F, 1, clock=0),
            "clock 0, device 0: F of microbatch 1, stage 0 and F of microbatch 0, stage 0 are in one clock; "
            "it must have at most one F, one B or BW, and one W of a device",
        ),
        (
            changed(H1, 2, B, 1, kind=BW, clock=3),
            "clock 3, device 2: BW of microbatch 1, stage 2 and B of microbatch 0, stage 2 are in one clock; .*",
        ),
        (
            changed(F1B, 0, F, 1, microbatch=0),
            "clock 1, device 0: F of microbatch 0, stage 0 repeats F of microbatch 0, stage 0 at clock 0; "
            "it must run once",
        ),
        (
            changed(H1, 2, B, 0, kind=BW),
            "clock 8, device 2: W of microbatch 0, stage 2 repeats a part of BW of microbatch 0, stage 2 at clock 3; "
            "there must be either BW, or B and W",
        ),
        # inputs
        (
            changed(F1B, 1, F, 0, clock=0),
            "clock 0, device 1: F of microbatch 0, stage 1 needs the result of F of microbatch 0, stage 0, "
            "which runs at clock 0; it must run earlier",
        ),
        (
            changed(F1B, 1, BW, 0, clock=3),
            "clock 3, device 1: BW of microbatch 0, stage 1 needs the result of BW of microbatch 0, stage 2, "
            "which runs at clock 3; it must run earlier",
        ),
        (
            changed(EAGER, 2, F, 3, clock=6),
            "clock 5, device 2: BW of microbatch 3, stage 2 needs the result of F of microbatch 3, stage 2, "
            "which runs at clock 6; it must run no later",
        ),
        (
            changed(H1, 0, W, 0, clock=4),
            "clock 4, device 0: W of microbatch 0, stage 0 needs the result of B .* at clock 5; it must run no later",
        ),
        # completeness
        (
            dropped(F1B, 0, F, 2),
            "clock 5, device 1: F of microbatch 2, stage 1 needs the result of F of microbatch 2, stage 0, "
            "which the table lacks; it must have it",
        ),
        (
            dropped(H1, 1, B, 3),
            r"clock \d+, device 1: F of microbatch 3, stage 1 has no backward; it must have BW, or B and W",
        ),
        (
            dropped(F1B, 0, BW, 1),
            "clock 1, device 0: F of microbatch 1, stage 0 has no backward; it must have BW, or B and W",
        ),
        (dropped(H1, 1, W, 2), "clock 9, device 1: B of microbatch 2, stage 1 has no W; it must have one"),
        (
            F1B._replace(num_microbatches=5),
            "clock 11, device 0: the table ends without F of microbatch 4, stage 0; it must have it",
        ),
        (
            F1B._replace(num_devices=4),
            "clock 3, device 2: BW of microbatch 0, stage 2 needs .* B or BW of .* 0, stage 3, .* must have it",
        ),
        # slots
        (
            changed(F1B, 0, F, 1, slot=0),
            "clock 1, device 0: F of microbatch 1, stage 0 writes slot 0 of the stash of F, which .*; it must be free",
        ),
        (
            changed(F1B, 0, BW, 1, slot=2),
            "clock 7, device 0: BW of microbatch 1, stage 0 has slot 2; it must have the slot of its F, 1",
        ),
        (
            changed(H1, 2, W, 1, slot=0),
            "clock 5, device 2: B of microbatch 1, stage 2 writes slot 0 of the stash of B, which .*; it must be free",
        ),
    ],
)
def test_a_broken_rule_is_named_with_its_clock_and_device(table: Table, message: str) -> None:
    with pytest.raises(TableError, match=f"^{message}$"):
        check_table(table)


def test_one_transfer_a_clock_over_a_distance() -> None:
    """On two devices, F and BW both send to the other device."""
    table = make("interleaved_1f1b", 2, 2, 2)
    late = changed(table, 0, F, 1, 1, clock=find_clock(table, 0, BW, 0, 1))
    with pytest.raises(
        TableError,
        match=r"^clock 4, device 0: F .* and BW .* send to device 1; there must be at most one transfer per clock$",
    ):
        check_table(late)
    # In a V whose devices are in reverse order, F of the first chunk and B of the second one have distance 2.
    actions = make("zb_v", 3, 4).actions.copy()
    actions["device"] = 2 - actions["device"]
    reverse = Table(3, 2, 4, ordered(actions))
    check_table(reverse)
    with pytest.raises(TableError, match=r"^clock 7, device 1: F .* 3, stage 1 and B .* 0, stage 4 send to device 0; "):
        check_table(changed(reverse, 1, F, 3, clock=7))


def find_clock(table: Table, *row: int) -> int:
    return int(table.actions["clock"][find(table, *row)])


def refusal(table: Table) -> str | None:
    """Return the error of `check_table`; None if the table is valid."""
    try:
        check_table(table)
    except TableError as error:
        return str(error)
    return None


# A change of one row (its number is taken modulo the length of the table), with the numbers that the change needs.
ROW, FEW = st.integers(0, 99), st.integers(0, 2)
DAMAGE = st.one_of(
    st.tuples(st.just("move"), ROW, st.sampled_from([-2, -1, 1, 2, 30])),
    st.tuples(st.just("swap"), ROW, ROW),
    st.tuples(st.just("delete"), ROW, st.none()),
    st.tuples(st.just("repeat"), ROW, FEW),  # in the same clock or later
    st.tuples(st.sampled_from(["device", "stage", "chunk", "microbatch", "kind"]), ROW, ROW),
    st.tuples(st.just("slot"), ROW, FEW),
)


def damaged(table: Table, *changes: tuple[str, int, Any]) -> Table:
    actions = table.actions.copy()
    for change, row, other in changes:
        a = row % len(actions)
        if change == "move":
            actions["clock"][a] = max(0, actions["clock"][a] + other)
        elif change == "swap":
            b = other % len(actions)
            actions["clock"][[a, b]] = actions["clock"][[b, a]]
        elif change == "delete":
            actions = np.delete(actions, a)
        elif change == "repeat":
            actions = np.append(actions, actions[a])
            actions["clock"][-1] += other
        elif change == "slot":
            actions["slot"][a] = other
        else:
            actions[change][a] = actions[change][other % len(actions)]
    return table._replace(actions=ordered(actions))


SMALL = st.sampled_from([F1B, H1, V, EAGER, SPLIT, make("interleaved_1f1b", 2, 4, 2), make("gpipe", 2, 3)])


@given(SMALL | any_tables(3, 2, 3), st.lists(st.lists(DAMAGE, min_size=1, max_size=2), min_size=12, max_size=12))
def test_changes_are_refused_exactly_where_a_rule_is_broken(table: Table, drawn: list[Any]) -> None:
    moves = [[("move", row, clocks)] for row in range(len(table.actions)) for clocks in (-2, -1, 1)]
    for changes in (*moves, *drawn):
        wrong = damaged(table, *changes)
        error = refusal(wrong)
        assert error is None or ", device " in error or not len(wrong.actions)
        assert (error is None) == is_valid(wrong), changes


def test_within_a_clock() -> None:
    """The backward of the last stage may share the clock of its F, and W that of its B. No other action may."""
    rows = [(0, 0, F, 0), (0, 0, B, 0), (0, 0, W, 0)]
    actions = np.zeros(3, ACTION)
    for i, values in enumerate(rows):
        for field, value in zip(("clock", "device", "kind", "microbatch"), values, strict=True):
            actions[field][i] = value
    check_table(with_slots(Table(1, 1, 1, actions)))
    turn = make("zb_v", 1, 1)  # stages 0 and 1 on one device: results are available in the next clock
    with pytest.raises(
        TableError, match="clock 0, device 0: F of microbatch 0, stage 1 and F of microbatch 0, stage 0"
    ):
        check_table(changed(turn, 0, F, 0, 1, clock=0))
    with pytest.raises(
        TableError, match=r"clock 1, device 0: B .* stage 0 and B of microbatch 0, stage 1 are in one clock"
    ):
        check_table(changed(changed(turn, 0, B, 0, 1, clock=1), 0, B, 0, 0, clock=1))


def test_a_forward_pass_alone_is_complete() -> None:
    table = forward_only(2, 3, loop_stages(2, 1))
    check_table(table)
    with pytest.raises(TableError, match="clock 3, device 1: the table ends without F of microbatch 1, stage 1"):
        check_table(dropped(table, 1, F, 1))


@given(any_tables(), st.integers(0, 4))
def test_peaks_against_a_count_at_every_action(table: Table, quarters: int) -> None:
    part = quarters / 4  # exact
    assert peak_in_flight(table).tolist() == most(table, {F: 1}, {B: 1, BW: 1})
    assert peak_handed(table).tolist() == most(table, {B: 1}, {W: 1})
    assert peak_stashed(table, part).tolist() == most(table, {F: 1}, {B: 1 - part, W: part, BW: 1})
    assert peak_stashed(table).tolist() == most(table, {F: 1}, {W: 1, BW: 1})


def test_peaks_of_a_light_weight_pass() -> None:
    light = peak_stashed(make("zb_h2", 4, 8), 0.25)  # device 3: 1 in flight, and up to 7 that wait for W
    assert light.tolist() == [7, 5 + 0.25 * 2, 3 + 0.25 * 4, 1 + 0.25 * 6]
