"""Named schedules are compared with their definitions and closed forms. Tables are written to CSV and read back."""

import inspect
import itertools
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxpar.strategies.pipeline.tables import table as tables
from jaxpar.strategies.pipeline.tables.draw import format_table
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, forward_only, make_table
from jaxpar.strategies.pipeline.tables.table import (
    BW,
    FIELDS,
    Action,
    B,
    F,
    Table,
    W,
    loop_stages,
    place_actions,
    v_stages,
)
from jaxpar.strategies.pipeline.tables.table_file import read_table, write_table
from jaxpar.strategies.pipeline.tables.validate import TableError, check_table, peak_handed, peak_in_flight
from tests.strategies.pipeline.named_tables import any_tables, make, named_tables
from tests.strategies.pipeline.tables.reference import is_valid

DIAGRAMS = {
    "model_parallel": (4, 2),
    "gpipe": (4, 4),
    "1f1b": (4, 4),
    "eager_1f1b": (4, 4),
    "interleaved_1f1b": (2, 4),
    "zb_h1": (4, 4),
    "zb_h2": (4, 7),
    "zb_v": (2, 3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_docstring_shows_the_table(name: str) -> None:
    diagram = format_table(make(name, *DIAGRAMS[name]))
    documentation = inspect.cleandoc(SCHEDULES[name].order.__doc__ or "")
    assert f"\n{diagram}" in documentation, diagram


def in_flight(name: str, p: int, m: int, v: int, d: int) -> int:
    """Return the peak number of microbatches between F and B on device d, counted per chunk."""
    return {
        "model_parallel": 1,
        "gpipe": m,
        "1f1b": min(m, p - d),
        "eager_1f1b": min(m, 2 * (p - 1 - d) + 1),
        "interleaved_1f1b": min(
            m * v, 2 * (p - 1 - d) + (v - 1) * p + 1
        ),  # on device 0: p + (p - 1) / v of a whole device
        "zb_h1": min(m, p - d),
        "zb_h2": min(m, 2 * (p - d) - 1),
        "zb_v": min(2 * m, 2 * p, m + 1 + d),  # p microbatches as soon as m >= 2p - 1
    }[name]


@pytest.mark.parametrize("name", SCHEDULES)
@given(data=st.data())
def test_complete_valid_and_of_the_stated_peak(name: str, data: st.DataObject) -> None:
    table = data.draw(named_tables(name))
    p, v, m, actions, *_ = table
    check_table(table)
    assert is_valid(table)
    kinds = (F, B, W) if name.startswith("zb") else (F, BW)
    work = set(actions[["kind", "microbatch", "stage"]].tolist())
    assert work == set(itertools.product(kinds, range(m), range(p * v)))
    assert len(actions) == len(work)
    expected = [in_flight(name, p, m, v, d) for d in range(p)]
    assert peak_in_flight(table).tolist() == expected
    assert table.num_clocks == num_clocks(name, p, m, v) or name in ("zb_h2", "zb_v") or (v > 1 and p == 2)
    for d in range(p):  # both stashes use as few slots as possible
        on = actions[actions["device"] == d]
        assert set(on["slot"][on["kind"] != W]) == set(range(expected[d]))
        assert set(on["slot"][on["kind"] == W]) == set(range(peak_handed(table)[d]))


def num_clocks(name: str, p: int, m: int, v: int) -> int:
    return {
        "model_parallel": 2 * p * m,
        "gpipe": 2 * (m + p - 1),
        "1f1b": 2 * (m + p - 1),
        "zb_h1": 3 * m + (p - 1) * 2 - (min(m, p) - 1),
        "eager_1f1b": m + 2 * (p - 1),
        # Every clock of the steady state has an F and a BW. On two devices, they would share the route of distance 1.
        "interleaved_1f1b": m * v + 2 * (p - 1) + p * (v - 1),
    }.get(name, 0)


@given(named_tables("eager_1f1b"))
def test_clocks_of_eager_1f1b(table: Table) -> None:
    for clock, device, kind, microbatch, *_ in table.actions.tolist():
        assert clock == (microbatch + device if kind == F else microbatch + 2 * (table.num_devices - 1) - device)


def test_stages_go_round_the_devices_or_down_and_up() -> None:
    assert make("interleaved_1f1b", 3, 3, 2).stages.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert make("zb_v", 3, 3).stages.tolist() == [[0, 5], [1, 4], [2, 3]]
    assert make("1f1b", 3, 3).stages.tolist() == [[0], [1], [2]]


def test_warm_up_and_order_of_weight_gradients() -> None:
    """zb_h1 starts with p - d forwards, and W starts after 1 + d B. zb_h2: 2(p - d) - 1 forwards and 1 + 2d B."""
    for name, slope in (("zb_h1", 1), ("zb_h2", 2)):
        table = make(name, 4, 12)
        for d in range(4):
            kinds = table.actions["kind"][table.actions["device"] == d].tolist()
            assert kinds.index(B) == slope * (4 - d) - (slope - 1)
            assert kinds[: kinds.index(W)].count(B) == 1 + slope * d


def test_gpipe_runs_backwards_in_the_order_of_a_single_device() -> None:
    actions = make("gpipe", 3, 4).actions
    for d in range(3):
        on = actions[actions["device"] == d]
        assert on["microbatch"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
        assert on["kind"].tolist() == [F] * 4 + [BW] * 4


def test_few_microbatches_in_a_v_are_those_of_the_full_pattern() -> None:
    few, full = make("zb_v", 4, 3), make("zb_v", 4, 7)
    for d in range(4):
        orders = [
            list(table.actions[["kind", "microbatch", "chunk"]][table.actions["device"] == d].tolist())
            for table in (few, full)
        ]
        assert orders[0] == [row for row in orders[1] if row[1] < 3]


@given(p=st.integers(1, 8), m=st.integers(1, 12), v=st.integers(1, 3))
def test_forward_only_fills_the_clocks(p: int, m: int, v: int) -> None:
    last = (m - 1) // p * p * v + (m - 1) % p  # entry clock: groups of p microbatches follow without a gap
    for stages, clocks in ((loop_stages(p, v), last + p * v), (v_stages(p), 2 * (m - 1) + 2 * p)):
        table = forward_only(p, m, stages)
        check_table(table)
        assert set(table.actions["kind"]) == {F}
        assert (table.actions["slot"] == 0).all()
        assert peak_in_flight(table).tolist() == [0] * p
        assert table.num_clocks == clocks
        assert table.stages.tolist() == stages.tolist()


def test_work_grows_with_the_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device is considered only when something has changed for it, and not in each clock."""
    considered, action_inputs = list[int](), tables.action_inputs

    def counted(kind: int, *place: int) -> list[tuple[int, int, int]]:
        considered.append(kind)
        return action_inputs(kind, *place)

    monkeypatch.setattr(tables, "action_inputs", counted)
    table = make("1f1b", 200, 4)
    assert len(table.actions) == 200 * 4 * 2
    assert len(considered) < 3 * len(table.actions)


ON_0 = "the orders deadlock: device 0 waits at BW of microbatch 0 for B or BW of device 1, device 1 "


@pytest.mark.parametrize(
    ("on_1", "message"),
    [
        ([Action(BW, 0, 0), Action(F, 0, 0)], f"{ON_0}waits at BW of microbatch 0 for F of device 1"),
        ([Action(BW, 0, 0)], f"{ON_0}waits at BW of microbatch 0 for F of device 1, whose order lacks it"),
        ([Action(F, 0, 0)], ON_0.removesuffix(", device 1 ") + ", whose order lacks it"),
        ([Action(F, 0, 1)], "an action of device 1 has chunk 1; it must be less than 1"),
    ],
)
def test_orders_that_wait_for_each_other_are_refused(on_1: list[Action], message: str) -> None:
    """The message names the action that the others wait for."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        place_actions([[Action(F, 0, 0), Action(BW, 0, 0)], on_1], loop_stages(2, 1), 1)


def test_a_deadlock_of_several_chunks_names_the_stages() -> None:
    orders = [[Action(F, 0, 0), Action(F, 0, 1), Action(BW, 0, 1)], [Action(F, 0, 1), Action(F, 0, 0)]]
    message = "device 0 waits at F of microbatch 0 in stage 2 for F of device 1 in stage 1, device 1 waits at F of "
    with pytest.raises(ValueError, match=f"{message}microbatch 0 in stage 3 for F of device 0 in stage 2$"):
        place_actions(orders, loop_stages(2, 2), 1)


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "message"),
    [
        (
            "zbh1",
            2,
            2,
            1,
            r"schedule is 'zbh1'; it must be one of model_parallel, .*zb_v, .*, or the path of a CSV table. Did you "
            r"mean 'zb_h1'\?",
        ),
        ("gpipe", 0, 2, 1, "num_devices is 0; it must be at least 1"),
        ("gpipe", 2, 0, 1, "num_microbatches is 0; it must be at least 1"),
        ("gpipe", 2, 2, 2, "num_chunks is 2; it must be 1 for schedule gpipe"),
        ("zb_v", 2, 2, 1, "num_chunks is 1; it must be 2 for schedule zb_v"),
        (
            "interleaved_1f1b",
            4,
            6,
            2,
            "num_microbatches is 6; it must be a multiple of 4, the number of devices, for .*",
        ),
    ],
)
def test_sizes_that_a_schedule_cannot_have(name: str, p: int, m: int, v: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        make_table(name, num_devices=p, num_microbatches=m, num_chunks=v)


ANY_SCHEDULE = st.sampled_from([*SCHEDULES]).flatmap(named_tables)


@given(table=any_tables() | ANY_SCHEDULE)
def test_csv_round_trip(table: Table, tmp_path: Path) -> None:
    write_table(table, tmp_path / "table.csv")
    assert_equal(read_table(tmp_path / "table.csv"), table)


def test_slots_that_would_not_be_assigned_are_written(tmp_path: Path) -> None:
    table = make("gpipe", 2, 4)
    table.actions["slot"] = table.actions["slot"].max() - table.actions["slot"]
    write_table(table, tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text().startswith("clock,device,kind,microbatch,chunk,slot\n")
    assert_equal(read_table(tmp_path / "table.csv"), table)


LOOPS = st.sampled_from(["1f1b", "interleaved_1f1b", "zb_h1"]).flatmap(named_tables)  # whose stages are the default


@given(table=LOOPS | named_tables("zb_v"), random=st.randoms(use_true_random=False))
@example(table=make("interleaved_1f1b", 3, 6), random=Random(0))
def test_csv_without_what_may_be_left_out_and_in_any_order(table: Table, random: Random, tmp_path: Path) -> None:
    write_table(table, tmp_path / "full.csv")
    header, *lines = (tmp_path / "full.csv").read_text().splitlines()
    is_loop = np.array_equal(table.stages, loop_stages(table.num_devices, table.num_chunks))  # the default
    needed = FIELDS[:5] if is_loop else FIELDS[:6]
    assert header == ",".join(needed)
    columns = random.sample(needed, len(needed))
    rows = [", ".join(line.split(",")[FIELDS.index(column)] for column in columns) for line in lines]
    random.shuffle(rows)
    (tmp_path / "short.csv").write_text("\r\n".join(["\ufeff" + ", ".join(columns), *rows, ""]))
    assert_equal(read_table(tmp_path / "short.csv"), table)


def assert_equal(a: Table, b: Table) -> None:
    assert a[:3] == b[:3]
    np.testing.assert_array_equal(a.actions, b.actions)
    assert a.actions.dtype == b.actions.dtype


HEADER = "clock,device,kind,microbatch,chunk\n"
COLUMNS = "clock, device, kind, microbatch, chunk"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", f"line 1 lacks {COLUMNS}; it must name the columns {COLUMNS}"),
        ("clock,device,kind,microbatch\n0,0,F,0\n", f"line 1 lacks chunk; it must name the columns {COLUMNS}"),
        (
            "clock,devise,kind\n",
            "line 1: column 'devise' is unknown; it must be one of clock, .*slot. Did you mean 'device'?",
        ),
        ("clock,clock\n", "line 1: column 'clock' occurs twice; it must occur once"),
        (HEADER, "the table has no actions; it must have at least one"),
        (f"{HEADER}0,0,F,0,0\n1,2,F,0,0\n", "device 1 has no action, but device 2 has; every device must have some"),
        (HEADER + "0,0,F,0,0\n1,0,X,0,0\n", "line 3: kind is 'X'; it must be one of F, B, W, BW, U"),
        (HEADER + "0,0,F,0,0\n\n1.5,0,BW,0,0\n", "line 4: clock is '1.5'; it must be an integer .*"),
        (HEADER + "0,-1,F,0,0\n", "line 2: device is '-1'; it must be an integer between 0 and 999999999"),
        (HEADER + "0,0,F,9999999999,0\n", "line 2: microbatch is '9999999999'; it must be an integer .*"),
        (HEADER + "0,0,F,0\n", "line 2 has 4 values; it must have 5, one per column"),
        (HEADER + '0,0,"F,0,0\n', "line 2: unexpected end of data; quotes must be closed, .*"),
        (HEADER + f"0,0,{'F' * 140_000},0,0\n", "line 2: field larger .*; quotes .*, .* at most 131,072 characters"),
        (HEADER + "0,0,F,0,0\n0,0,F,1,0\n", "clock 0, device 0: F of microbatch 1, stage 0 and F of microbatch 0.*"),
        (
            HEADER + "0,999999999,F,0,0\n",
            "device 0 has no action, but device 999999999 has; every device must have some",
        ),
        (HEADER + "0,0,F,999999999,0\n", "clock 0, device 0: the table ends without F of microbatch 0, stage 0; .*"),
    ],
)
def test_a_wrong_file_is_named_with_the_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(content)
    pattern = message.replace("?", r"\?")
    with pytest.raises(ValueError, match=f"^'{path}': {pattern}$") as caught:
        read_table(path)
    assert isinstance(caught.value, TableError) == message.startswith("clock ")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"^'{tmp_path}/none.csv', which does not exist; it must be the path of a CSV file$"
    ):
        read_table(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(
        ValueError, match=rf"^'{tmp_path}/binary.csv': byte 0xff is not UTF-8; the file must be CSV in UTF-8$"
    ):
        read_table(tmp_path / "binary.csv")
