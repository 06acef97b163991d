"""Tables: each rule, with tables that break it and against an independent row-by-row validator; files of tables."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.errors import UserError
from jaxpar.strategies.asynchronous.delays import Delays
from jaxpar.strategies.asynchronous.simulate import POLICIES, simulate
from jaxpar.strategies.asynchronous.table import (
    COLUMNS,
    TIMES,
    UpdateTable,
    read_updates,
    validate,
    write_updates,
)

# Three workers and two gradients per update. Columns: worker, read, update, chunk, step, start, finish.
ROWS = [
    (0, 0, 0, 0, 0, 0.0, 2.0),
    (1, 0, 0, 2, 0, 0.0, 2.0),
    (0, 0, 1, 1, 0, 1.5, 4.0),
    (2, 0, 1, 3, 1, 0.0, 4.0),
    (1, 1, 2, 5, 1, 2.0, 4.5),
    (2, 2, 2, 4, 1, 4.0, 4.5),
]


def table_of(rows: list[Any], num_workers: int = 3) -> UpdateTable:
    columns = np.array(rows, dtype=[(name, "f8" if name in TIMES else "i4") for name in COLUMNS])
    return UpdateTable(num_workers, *(columns[name].copy() for name in COLUMNS))


def changed(column: str, row: int, value: float) -> UpdateTable:
    table = table_of(ROWS)
    getattr(table, column)[row] = value
    return table


def assert_equal(a: UpdateTable, b: UpdateTable) -> None:
    """Compare to the last bit, including dtypes."""
    assert a.num_workers == b.num_workers
    for column in COLUMNS:
        x, y = getattr(a, column), getattr(b, column)
        assert x.flags.c_contiguous, column
        assert x.dtype == y.dtype, column
        assert x.tobytes() == y.tobytes(), column


def test_properties_of_a_table() -> None:
    table = table_of(ROWS)
    validate(table)
    assert table.num_updates == 3
    assert table.staleness.tolist() == [0, 0, 1, 1, 1, 0]
    assert table.update_times.tolist() == [2, 4, 4.5]
    assert changed("read", 4, 0).staleness.tolist() == [0, 0, 1, 1, 2, 0]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (table_of(ROWS[:0]), "the table has no rows; it must have at least one"),
        (table_of(ROWS, num_workers=0), "num_workers is 0; it must be at least 1"),
        (
            table_of(ROWS)._replace(read=np.zeros(6, np.int64)),
            "read has dtype int64; it must be int32",
        ),
        (table_of(ROWS)._replace(start=np.zeros(6, np.float32)), "start has dtype float32; it must be float64"),
        (
            table_of(ROWS)._replace(step=np.zeros(5, np.int32)),
            r"step has shape \(5,\); it must be 1-D and as long as worker, which has shape \(6,\)",
        ),
        (
            table_of(ROWS)._replace(worker=np.zeros((6, 1), np.int32)),
            r"worker has shape \(6, 1\); it must be 1-D .*",
        ),
        (changed("worker", 3, -1), "row 3: worker is -1; it must be a non-negative number"),
        (changed("worker", 3, 3), "row 3: worker is 3; it must be less than 3, the number of workers"),
        (changed("read", 2, -1), "row 2: read is -1; it must be a non-negative number"),
        (changed("read", 2, 2), "row 2: read is 2; it must be at most update, 1, which is the newest version"),
        (changed("update", 0, 1), "row 0: update is 1; it must be 0 in the first row"),
        (changed("update", 3, 0), "row 3: update is 0; it must be 1, as in the row above, or 1 more"),
        (changed("update", 4, 3), "row 4: update is 3; it must be 1, as in the row above, or 1 more"),
        (changed("chunk", 1, -2), "row 1: chunk is -2; it must be a non-negative number"),
        (changed("chunk", 4, 1), "row 4: chunk is 1; it must not repeat a number of a row above"),
        (changed("step", 5, 0), "row 5: step is 0; it must be at least the value in the row above, 1"),
        (changed("start", 1, -0.5), "row 1: start is -0.5; it must be a non-negative number"),
        (changed("start", 1, np.nan), "row 1: start is nan; it must be a non-negative number"),
        (changed("finish", 5, np.inf), "row 5: finish is inf; it must be a non-negative number"),
        (changed("finish", 3, 3.9), "row 3: finish is 3.9; it must be at least the value in the row above, 4.0"),
        (changed("start", 3, 4.1), "row 3: finish is 4.0; it must be at least start, 4.1"),
        # Rows 1 and 3 are the last of their updates. Row 0 is not: worker 0 may continue before its update is made.
        (
            changed("start", 4, 1.9),
            "row 4: start is 1.9; it must be at least 2.0, when worker 1 finishes its previous gradient",
        ),
        (
            changed("start", 5, 3.9),
            "row 5: start is 3.9; it must be at least 4.0, when worker 2 finishes its previous gradient",
        ),
        (
            table_of([*ROWS[:2], (0, 0, 1, 1, 0, 2.5, 4.0), (0, 0, 1, 3, 1, 1.0, 4.0)]),
            "row 3: start is 1.0; it must be at least 2.5, when worker 0 finishes its previous gradient",
        ),
        (
            table_of([*ROWS, (0, 0, 3, 6, 2, 1.9, 5.0)]),  # its previous gradient arrived after update 0, at 2
            "row 6: start is 1.9; it must be at least 2.0, when worker 0 finishes its previous gradient",
        ),
    ],
)
def test_a_broken_rule_is_named_with_its_row_and_column(table: UpdateTable, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        validate(table)


def test_sums_of_the_same_seconds_may_differ() -> None:
    validate(changed("start", 5, 4 - 1e-10))
    validate(changed("start", 2, 1.5 - 1e-10))


def refusal(table: UpdateTable) -> str | None:
    """Return the message with which `validate` rejects a table; None if it accepts the table."""
    try:
        validate(table)
    except ValueError as error:
        return str(error)
    return None


def is_valid(table: UpdateTable) -> bool:
    """Check the rules again, row by row."""
    rows = list(zip(*(getattr(table, column).tolist() for column in COLUMNS), strict=True))
    made = 0  # the highest update so far
    for i, (worker, version, update, chunk, step, start, finish) in enumerate(rows):
        above = rows[:i]
        if not 0 <= worker < table.num_workers or min(rows[i]) < 0:
            return False
        if update not in ((0,) if i == 0 else (made, made + 1)) or version > update:
            return False
        made = update
        if any(row[3] == chunk or row[4] > step or row[6] > finish for row in above) or start > finish:
            return False
        for j, row in enumerate(above):
            if row[0] != worker:
                continue
            last = j + 1 == len(rows) or rows[j + 1][2] > row[2]
            came = row[6] if last else max([0, *(other[6] for other in rows if other[2] < row[2])])
            free = max(came, row[5])
            if start < free - 1e-9 * max(free, 1):
                return False
    return True


TABLES = st.builds(
    simulate,
    st.sampled_from(POLICIES),
    num_workers=st.integers(2, 5),
    num_gradients=st.integers(1, 12),
    delays=st.sampled_from(
        [Delays("lognormal", mean, 0.7, slowdown=3, communication_time=0.2, jitter=1) for mean in (1e-9, 1 / 3, 1e9)]
    ),
    seed=st.integers(0, 99),
    bound=st.integers(0, 2),
    groups=st.integers(1, 2),
    interval=st.integers(1, 3),
)
ROW = st.integers(0, 11)  # modulo the length of the table
CHANGE = st.tuples(st.sampled_from(COLUMNS), ROW, ROW, st.sampled_from([None, 0.5, 0.9, 1.1, 2.0]))


@given(TABLES, st.lists(CHANGE, min_size=25, max_size=25))
def test_changes_are_refused_exactly_where_a_rule_is_broken(table: UpdateTable, changes: list[Any]) -> None:
    """Changes copy a value from another row, multiply a time, or add or subtract 1."""
    validate(table)
    for column, a, b, factor in changes:
        wrong = UpdateTable(table.num_workers, *(values.copy() for values in table[1:]))
        values = getattr(wrong, column)
        size = len(values)
        if factor is None:
            values[a % size] = values[b % size]
        elif column in TIMES:
            values[a % size] *= factor
        else:
            values[a % size] += 1 if factor > 1 else -1
        error = refusal(wrong)
        assert error is None or error.startswith("row ")
        assert (error is None) == is_valid(wrong), (column, a, b, factor)


@given(table=TABLES, random=st.randoms(use_true_random=False))
def test_a_written_table_reads_back_exactly(table: UpdateTable, random: Random, tmp_path: Path) -> None:
    order = random.sample(range(2**31), len(table.chunk))
    table = table._replace(chunk=np.array(order, np.int32), num_workers=7)  # workers 5 and 6 have no row
    write_updates(tmp_path / "table.csv", table)
    assert_equal(read_updates(tmp_path / "table.csv"), table)


def test_a_file_is_text_to_read(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_updates(path, table_of(ROWS[:3]))
    assert path.read_text().splitlines() == [
        "# num_workers=3",
        "worker,read,update,chunk,step,start,finish",
        "0,0,0,0,0,0.0,2.0",
        "1,0,0,2,0,0.0,2.0",
        "0,0,1,1,0,1.5,4.0",
    ]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n").replace(b",2.0", b", 2") + b"\r\n")
    assert_equal(read_updates(path), table_of(ROWS[:3]))  # as saved by a spreadsheet


def test_a_broken_table_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 2: read is 2"):
        write_updates(tmp_path / "table.csv", changed("read", 2, 2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (1, "worker,read", "line 1 is 'worker,read'; it must be '# num_workers=N' for N workers"),
        (1, "# num_workers=0", "line 1 is '# num_workers=0'; it must be .*"),
        (1, "# num_workers=2", "line 6: worker is 2; it must be less than 2, the number of workers"),
        (2, "worker,read", "line 2 must be the header worker,read,update,chunk,step,start,finish"),
        (4, "1,0,0", "line 4 has 3 values; it must have 7, one per column"),
        (4, "1,x,0,2,0,0.0,2.0", "line 4: read is 'x'; it must be an integer between 0 and 2147483647"),
        (4, "1,-1,0,2,0,0.0,2.0", "line 4: read is '-1'; it must be an integer between 0 and 2147483647"),
        (4, "1,0,0,2147483648,0,0.0,2.0", "line 4: chunk is '2147483648'; it must be an integer .*"),
        (4, f"1,0,{'1' * 5000},2,0,0,2", f"line 4: update is '{'1' * 40}'; it must be an integer .*"),
        (4, "1,0,0,2,0,0.0,1_0", "line 4: finish is '1_0'; it must be a non-negative number of seconds"),
        (4, "1,0,0,2,0,nan,2.0", "line 4: start is 'nan'; it must be a non-negative number of seconds"),
        (4, '1,0,0,2,0,0.0,"2', "line 8: unexpected end of data; quotes must be closed, .*"),
        (5, "\n0,2,1,1,0,1.5,4.0", "line 6: read is 2; it must be at most update, 1, which is the newest version"),
    ],
)
def test_a_bad_file_is_one_line_with_the_place(line: int, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_updates(path, table_of(ROWS))
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=f"^'{path}': {message}$"):
        read_updates(path)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    for content, message in (
        (None, "which does not exist; it must be the path of a CSV file"),
        (b"", "line 1 is ''; it must be '# num_workers=N' for N workers"),
        (b"# num_workers=1\n", "line 2 must be the header .*"),
        (b"# num_workers=1\nworker,read,update,chunk,step,start,finish\n", "the table has no rows; it must .*"),
        (b"\xff\xfe", "byte 0xff is not UTF-8; the file must be CSV in UTF-8"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=f"^'{path}'{':' if content is not None else ','} {message}$"):
            read_updates(path)
