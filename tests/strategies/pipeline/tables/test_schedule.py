"""Named schedules are compared with their definitions and closed forms. Tables are written to CSV and read back."""

import inspect
import itertools
from pathlib import Path

import numpy as np
import pytest

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
from tests.strategies.pipeline.named_tables import grid, make

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
def test_complete_valid_and_of_the_stated_peak(name: str) -> None:
    for table in grid(name):
        p, v, m, actions, *_ = table
        check_table(table)
        kinds = (F, B, W) if name.startswith("zb") else (F, BW)
        work = set(actions[["kind", "microbatch", "stage"]].tolist())
        assert work == set(itertools.product(kinds, range(m), range(p * v)))
        assert len(actions) == len(work)
        expected = [in_flight(name, p, m, v, d) for d in range(p)]
        assert peak_in_flight(table).tolist() == expected, (p, m, v)
        for d in range(p):  # both stashes use as few slots as possible
            on = actions[actions["device"] == d]
            assert set(on["slot"][on["kind"] != W]) == set(range(expected[d]))
            assert set(on["slot"][on["kind"] == W]) == set(range(peak_handed(table)[d]))


def test_stages_go_round_the_devices_or_down_and_up() -> None:
    assert make("interleaved_1f1b", 3, 3, 2).stages.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert make("zb_v", 3, 3).stages.tolist() == [[0, 5], [1, 4], [2, 3]]
    assert make("1f1b", 3, 3).stages.tolist() == [[0], [1], [2]]


def test_clocks() -> None:
    for p, m in itertools.product(range(1, 9), range(1, 17)):
        assert make("model_parallel", p, m).num_clocks == 2 * p * m
        assert make("gpipe", p, m).num_clocks == make("1f1b", p, m).num_clocks == 2 * (m + p - 1)
        assert make("zb_h1", p, m).num_clocks == 3 * m + (p - 1) * 2 - (min(m, p) - 1)
        eager = make("eager_1f1b", p, m)
        assert eager.num_clocks == m + 2 * (p - 1)
        for row in eager.actions:
            s, k = row["device"], row["microbatch"]
            assert row["clock"] == (k + s if row["kind"] == F else k + 2 * (p - 1) - s)
        if m % p == 0 and p != 2:  # on two devices, F and BW would share the route of distance 1
            for v in (2, 3):  # every clock of the steady state has an F and a BW
                clocks = make("interleaved_1f1b", p, m, v).num_clocks
                assert clocks == m * v + 2 * (p - 1) + p * (v - 1), (p, m, v)


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


def test_forward_only_fills_the_clocks() -> None:
    for p, m in itertools.product(range(1, 7), range(1, 9)):
        for v in (1, 2, 3):
            table = forward_only(p, m, loop_stages(p, v))
            check_table(table)
            assert set(table.actions["kind"]) == {F}
            assert (table.actions["slot"] == 0).all()
            assert peak_in_flight(table).tolist() == [0] * p
            last = (m - 1) // p * p * v + (m - 1) % p  # entry clock: groups of p microbatches follow without a gap
            assert table.num_clocks == last + p * v
        down_and_up = forward_only(p, m, v_stages(p))
        check_table(down_and_up)
        assert down_and_up.num_clocks == 2 * (m - 1) + 2 * p
        assert down_and_up.stages.tolist() == v_stages(p).tolist()


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


def test_orders_that_wait_for_each_other_are_refused() -> None:
    orders = [[Action(F, 0, 0), Action(BW, 0, 0)], [Action(BW, 0, 0), Action(F, 0, 0)]]
    with pytest.raises(ValueError, match="the orders deadlock: device 0 never reaches BW of microbatch 0, stage 0"):
        place_actions(orders, loop_stages(2, 1), 1)


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


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_round_trip(name: str, tmp_path: Path) -> None:
    table = make(name, 4, 8)
    write_table(table, tmp_path / "table.csv")
    assert_equal(read_table(tmp_path / "table.csv"), table)


def test_csv_without_what_may_be_left_out_and_in_any_order(tmp_path: Path) -> None:
    for name in ("1f1b", "interleaved_1f1b", "zb_h1"):  # stages are placed round-robin
        table = make(name, 3, 6)
        write_table(table, tmp_path / "full.csv")
        header, *lines = (tmp_path / "full.csv").read_text().splitlines()
        assert header == ",".join(FIELDS)
        rows = [",".join(line.split(",")[:5]) for line in lines]
        (tmp_path / "short.csv").write_text("\r\n".join(["\ufeffclock, device,kind,microbatch,chunk", *rows[::-1], ""]))
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
            "clock 0, device 999999999: F of .* needs the result of F .* the table lacks; .*",
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
