"""Tables of updates: which gradient, computed from which weights, is applied when.

A table is data, made in NumPy before anything runs (simulate.py) or recorded by a live run. What reads it needs no
threads to do what asynchronous workers would do, and does it the same way every time.
"""

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from jaxpar.errors import UserError
from jaxpar.files import unreadable, write_text

ROUNDING = 1e-9  # of a time: two sums of the same seconds may differ by so much
HEAD = "# num_workers="  # of the first line of a file


class UpdateTable(NamedTuple):
    """G gradients, in the order in which they arrive.

    Version 0 of the weights is the initial one; update t is applied to version t and makes version t + 1. A table may
    be the beginning of a longer one, so that its last update has only a part of its gradients.

    Args:
      num_workers: of the run; the last of them may have no row.
      worker: [G] int32, whose the gradient is.
      read: [G] int32, the version that it was computed from.
      update: [G] int32, the update that it is a part of, which is also the version that it is applied to.
      chunk: [G] int32, which part of the data it is of. Each comes once, in any order.
      step: [G] int32, the step of the training loop in which it is applied.
      start: [G] float64, virtual seconds: when its worker began to read the weights.
      finish: [G] float64, virtual seconds: when it was applied.
    """

    num_workers: int
    worker: np.ndarray
    read: np.ndarray
    update: np.ndarray
    chunk: np.ndarray
    step: np.ndarray
    start: np.ndarray
    finish: np.ndarray

    @property
    def staleness(self) -> np.ndarray:
        """[G] int32: updates that were made between what a gradient was computed from and what it is applied to."""
        return self.update - self.read

    @property
    def num_updates(self) -> int:
        """Number of updates, which is the version of the weights after the last row."""
        return int(self.update.max(initial=-1)) + 1

    @property
    def update_times(self) -> np.ndarray:
        """[num_updates] float64: when update t was made, which is when its last gradient finished."""
        return self.finish[np.flatnonzero(_ends_update(self))]


def since(table: UpdateTable, step: int) -> UpdateTable | None:
    """The gradients from a step on, as a run that begins there has them; None where there are none.

    Its weights at that step are version 0, for workers that have read older ones too, and its time begins there.
    """
    first = int(np.searchsorted(table.step, step))
    if first == 0:
        return table
    if first == len(table.step):
        return None
    rows = {name: getattr(table, name)[first:] for name in COLUMNS}
    version, time = table.update[first], table.finish[first - 1]
    rows |= {name: np.maximum(rows[name] - version, 0) for name in ("read", "update")}
    rows |= {name: np.maximum(rows[name] - time, 0) for name in TIMES}
    return UpdateTable(table.num_workers, **rows)


COLUMNS = UpdateTable._fields[1:]
TIMES = ("start", "finish")


def validate(table: UpdateTable) -> None:
    """Raise ValueError, with the row and the column, at the first rule that the table breaks.

    Rules: shapes and dtypes; numbers in range; each chunk once; `step` and `finish` never decrease, and `update` goes
    up from 0 by ones; a gradient finishes after it starts, and is applied to the version that it read or a later one.
    As rows are in order, the gradients that made the version it read are then above it, and finished before it. A
    worker computes one gradient at a time: see `_free`.
    """
    if broken := _broken_rule(table):
        row, rule = broken
        raise ValueError(rule if row is None else f"row {row}: {rule}")


def staleness_summary(table: UpdateTable) -> dict[str, float | list[int]]:
    """`mean`, `max`, and `histogram`: how many gradients have staleness 0, 1, .. max."""
    histogram = np.bincount(table.staleness)
    return {"mean": float(table.staleness.mean()), "max": len(histogram) - 1, "histogram": histogram.tolist()}


def _ends_update(table: UpdateTable) -> np.ndarray:
    """[G] bool: whether the row is the last one of its update."""
    return np.diff(table.update, append=table.num_updates) > 0


def _free(table: UpdateTable) -> np.ndarray:
    """[G] float64: the earliest time at which the row's worker can have been done with its row before.

    A gradient that waits for others of its update is at the server before `finish`, and its worker may have gone on.
    But it came after the update before; and the last one of an update came at `finish`.
    """
    before = np.concatenate([[0.0], table.update_times])[table.update]
    done = np.maximum(table.start, np.where(_ends_update(table), table.finish, before))
    by_worker = np.argsort(table.worker, kind="stable")
    has_before = np.diff(table.worker[by_worker]) == 0
    free = np.zeros(len(done))
    free[by_worker[1:][has_before]] = done[by_worker[:-1][has_before]]
    return free


def _broken_rule(table: UpdateTable) -> tuple[int | None, str] | None:
    """The first rule that the table breaks, and in which row, or in none."""
    if shape_rule := _broken_shape_rule(table):
        return None, shape_rule
    for is_bad, column, rule in _rules(table):
        if is_bad.any():
            row = int(is_bad.argmax())
            return row, f"{column} is {getattr(table, column)[row].item()}; " + rule(row)
    return None


def _broken_shape_rule(table: UpdateTable) -> str | None:
    if table.num_workers < 1:
        return f"num_workers is {table.num_workers}; it must be at least 1"
    size = np.shape(table.worker)
    for column in COLUMNS:
        values, dtype = getattr(table, column), np.float64 if column in TIMES else np.int32
        if not isinstance(values, np.ndarray) or values.dtype != dtype:
            return f"{column} has dtype {getattr(values, 'dtype', type(values).__name__)}; it must be {dtype.__name__}"
        if values.ndim != 1 or values.shape != size:
            return f"{column} has shape {values.shape}; it must be one number a row, as many as worker, {size}"
    return None if size[0] else "the table has no rows"


def _rules(table: UpdateTable) -> Iterator[tuple[np.ndarray, str, Callable[[int], str]]]:
    """(where it is broken, the column, the rule for a row). Each may count on those before it."""
    n, worker, read, update, chunk, step, start, finish = table
    for column in COLUMNS:
        values = getattr(table, column)
        yield ~np.isfinite(values) | (values < 0), column, lambda _row: "it must be a number, at least 0"
    yield worker >= n, "worker", lambda _row: f"it must be less than {n}, the number of workers"
    is_first = np.arange(len(update)) == 0
    yield is_first & (update > 0), "update", lambda _row: "the first one must be 0"
    up = np.diff(update, prepend=0)
    yield (up < 0) | (up > 1), "update", lambda row: f"it must be that of the row above, {update[row - 1]}, or the next"
    yield read > update, "read", lambda row: f"it must be at most update, {update[row]}: it is not made yet"
    again = np.ones(len(chunk), bool)
    again[np.unique(chunk, return_index=True)[1]] = False
    yield again, "chunk", lambda _row: "a row above has it; each comes once"
    fell = "it must be at least that of the row above, "
    yield np.diff(step, prepend=0) < 0, "step", lambda row: f"{fell}{step[row - 1]}"
    yield np.diff(finish, prepend=0) < 0, "finish", lambda row: f"{fell}{finish[row - 1]}"
    yield finish < start, "finish", lambda row: f"it must be at least start, {start[row]}"
    free = _free(table)
    yield (
        start < free - ROUNDING * np.maximum(free, 1),
        "start",
        lambda row: f"worker {worker[row]} is busy with its gradient before until {free[row]}",
    )


def write_updates(path: Path | str, table: UpdateTable) -> None:
    """Write a valid table as CSV: the number of workers, the names of the columns, a row a gradient."""
    validate(table)
    text = io.StringIO()
    text.write(f"{HEAD}{table.num_workers}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(zip(*(getattr(table, column).tolist() for column in COLUMNS), strict=True))
    write_text(Path(path), text.getvalue())


def read_updates(path: Path | str) -> UpdateTable:
    """Read a file of `write_updates`, and validate the table: the same table, to the last bit.

    Raises:
      UserError: one line, with the file, and the line where there is one.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            num_workers = _num_workers(file.readline().strip())
            lines, rows = read_rows(file, COLUMNS, line=2)
        columns = np.array(rows, dtype=[(name, "f8" if name in TIMES else "i4") for name in COLUMNS])
        table = UpdateTable(num_workers, *(columns[name].copy() for name in COLUMNS))
        if broken := _broken_rule(table):
            raise ValueError(broken[1] if broken[0] is None else f"line {lines[broken[0]]}: {broken[1]}")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {unreadable(error)}") from error
    return table


def read_rows(file: TextIO, columns: Sequence[str], line: int = 1) -> tuple[list[int], list[tuple[int | float, ...]]]:
    """(lines, numbers) of the rows of a CSV file that begins, at `line`, with the names of its columns.

    Columns start, finish and seconds are seconds, the others whole numbers. Raises ValueError with the line.
    """
    lines, rows = [], []
    reader = csv.reader(file, strict=True)
    try:
        if tuple(map(str.strip, next(reader, []))) != tuple(columns):
            raise ValueError(f"line {line}: it must name the columns: {','.join(columns)}")
        for row in filter(None, reader):
            lines.append(reader.line_num + line - 1)
            if len(row) != len(columns):
                raise ValueError(f"line {lines[-1]}: {len(row)} values in {len(columns)} columns")
            values = zip(columns, map(str.strip, row), strict=True)
            rows.append(tuple(_number(column, value, lines[-1]) for column, value in values))
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num + line - 1}: {error}") from error
    return lines, rows


def _num_workers(text: str) -> int:
    number = text.removeprefix(HEAD)
    if not (text.startswith(HEAD) and _is_whole(number) and int(number) > 0):
        raise ValueError(f"line 1: {text[:40]!r}; it must be '{HEAD}N', the number of workers")
    return int(number)


def _is_whole(text: str) -> bool:
    """Whether it is a whole number that int32 has, at least 0."""
    return text.isascii() and text.isdigit() and len(text) < 11 and int(text) < 2**31


def _number(column: str, text: str, line: int) -> int | float:
    if column in (*TIMES, "seconds"):
        try:
            seconds = float(text.replace("_", "?"))  # Python's own 1_000 is no number elsewhere
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise ValueError(f"line {line}: {column} is {text[:40]!r}; it must be a number of seconds, at least 0")
        return seconds
    if not _is_whole(text):
        raise ValueError(f"line {line}: {column} is {text[:40]!r}; it must be a whole number, at least 0")
    return int(text)
