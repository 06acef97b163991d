"""Tables of updates: which gradient, computed from which weights, is applied when. NumPy only.

A table is data, made before a run (simulate.py) or recorded by a live run. From a table an engine reproduces
asynchronous training exactly, without threads.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from jaxpar.errors import UserError
from jaxpar.files import open_text, read_csv, unreadable, write_text

ROUNDING = 1e-9  # relative: by this much, two sums of the same seconds may differ
HEAD = "# num_workers="  # start of the first line of a file


class UpdateTable(NamedTuple):
    """G gradients, in the order in which they arrive.

    Version 0 of the weights is the initial one; update t is applied to version t and makes version t + 1. A table may
    be the beginning of a longer one, so its last update may lack some of its gradients.
    """

    num_workers: int  # number of workers of the run; some of them may have no row
    worker: np.ndarray  # [G] int32, the worker that computed the gradient
    read: np.ndarray  # [G] int32, the version that it was computed from
    update: np.ndarray  # [G] int32, the update that it belongs to, which is also the version that it is applied to
    chunk: np.ndarray  # [G] int32, the shard of the data. Each shard occurs once; the order is free
    step: np.ndarray  # [G] int32, the step of the training loop in which it is applied
    start: np.ndarray  # [G] float64, virtual seconds: when its worker began to read the weights
    finish: np.ndarray  # [G] float64, virtual seconds: when it was applied

    @property
    def staleness(self) -> np.ndarray:
        """[G] int32: number of updates between the version that a gradient was computed from and `update`."""
        return self.update - self.read

    @property
    def num_updates(self) -> int:
        """Number of updates, which is the version of the weights after the last row."""
        return int(self.update.max(initial=-1)) + 1

    @property
    def is_grouped(self) -> bool:
        """Whether some update combines several gradients."""
        return len(self.update) > self.num_updates

    @property
    def is_last(self) -> np.ndarray:
        """[G] bool: whether the row is the last one of its update."""
        return np.diff(self.update, append=self.num_updates) > 0

    @property
    def update_times(self) -> np.ndarray:
        """[num_updates] float64: time of each update, which is when its last gradient finished."""
        return self.finish[self.is_last]


def since(table: UpdateTable, step: int) -> UpdateTable | None:
    """Return the gradients from this step on, as the table of a run that begins there; None if there are none.

    The weights at that step become version 0, even for workers that have read older ones, and the time starts at 0.
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
    """Raise ValueError at the first rule that the table breaks, with the row and the column.

    Rules: shapes and dtypes; numbers in range; each shard once; `step` and `finish` never decrease, and `update` starts
    at 0 and increases by at most 1; a gradient finishes after it starts, and is applied to the version that it read or
    a later one. A worker computes one gradient at a time: see `_free`.
    """
    if rule := _broken_rule(table, lambda row: f"row {row}"):
        raise ValueError(rule)


class GradientRow(NamedTuple):
    """An arriving gradient, as engines take it."""

    worker: int  # the worker that computes it
    read: int  # the version of the weights that it is computed from
    update: int  # the version that it is applied to
    chunk: int  # number of its shard of the data
    staleness: int  # update - read
    is_first: bool  # whether it is the first gradient of its update
    is_last: bool  # whether it is the last one
    size: int  # number of gradients in its update
    mean_share: float  # mean of 1 / max(staleness, 1) over all gradients of its update


def rows_by_step(table: UpdateTable) -> list[list[GradientRow]]:
    """Return the rows of each step."""
    sizes = np.bincount(table.update)
    means = np.bincount(table.update, 1 / np.maximum(table.staleness, 1)) / sizes
    is_first = np.diff(table.update, prepend=-1) != 0
    columns = table.worker, table.read, table.update, table.chunk, table.staleness, is_first, table.is_last
    of_update = sizes[table.update], means[table.update]
    rows = [GradientRow(*values) for values in zip(*(x.tolist() for x in (*columns, *of_update)), strict=True)]
    ends = np.searchsorted(table.step, np.arange(1, table.step[-1] + 2)).tolist()
    return [rows[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def needs_earlier_batches(table: UpdateTable, step: int) -> bool:
    """Return whether gradients from that step on use batches of earlier steps, as in the tables of live runs."""
    return bool((table.chunk[table.step >= step] < step * table.num_workers).any())


def batches_in_flight(table: UpdateTable, step: int) -> int:
    """Return the number of the last batches before a step with a gradient that is not in the server's weights yet."""
    applied = table.step[np.searchsorted(table.update, table.update, side="right") - 1]
    late = table.chunk[(applied >= step) & (table.chunk < step * table.num_workers)]
    return step - int(late.min()) // table.num_workers if len(late) else 0


def _free(table: UpdateTable) -> np.ndarray:
    """Return [G] float64: the earliest time at which the row's worker can have finished its previous row.

    A gradient that waits for the rest of its update is on the server before `finish`; its worker may have continued.
    But it arrived after the previous update, and the last gradient of an update arrived at `finish`.
    """
    before = np.concatenate([[0.0], table.update_times])[table.update]
    done = np.maximum(table.start, np.where(table.is_last, table.finish, before))
    by_worker = np.argsort(table.worker, kind="stable")
    has_before = np.diff(table.worker[by_worker]) == 0
    free = np.zeros(len(done))
    free[by_worker[1:][has_before]] = done[by_worker[:-1][has_before]]
    return free


def _broken_rule(table: UpdateTable, name_row: Callable[[int], str]) -> str | None:
    """Return the first broken rule, after the name of its row if it concerns one; None if none is broken."""
    if table.num_workers < 1:
        return f"num_workers is {table.num_workers}; it must be at least 1"
    size = np.shape(table.worker)
    for column in COLUMNS:
        values, dtype = getattr(table, column), np.float64 if column in TIMES else np.int32
        if not isinstance(values, np.ndarray) or values.dtype != dtype:
            return f"{column} has dtype {getattr(values, 'dtype', type(values).__name__)}; it must be {dtype.__name__}"
        if values.ndim != 1 or values.shape != size:
            return f"{column} has shape {values.shape}; it must be 1-D and as long as worker, which has shape {size}"
    if not size[0]:
        return "the table has no rows; it must have at least one"
    for is_bad, column, rule in _rules(table):
        if is_bad.any():
            row = int(is_bad.argmax())
            return f"{name_row(row)}: {column} is {getattr(table, column)[row].item()}; {rule(row)}"
    return None


def _rules(table: UpdateTable) -> Iterator[tuple[np.ndarray, str, Callable[[int], str]]]:
    """Yield (rows that break the rule, the column, row -> message). A rule may assume that the previous ones hold."""
    n, worker, read, update, chunk, step, start, finish = table
    for column in COLUMNS:
        values = getattr(table, column)
        yield ~np.isfinite(values) | (values < 0), column, lambda _row: "it must be a non-negative number"
    yield worker >= n, "worker", lambda _row: f"it must be less than {n}, the number of workers"
    is_first = np.arange(len(update)) == 0
    yield is_first & (update > 0), "update", lambda _row: "it must be 0 in the first row"
    up = np.diff(update, prepend=0)
    yield (up < 0) | (up > 1), "update", lambda row: f"it must be {update[row - 1]}, as in the row above, or 1 more"
    yield read > update, "read", lambda row: f"it must be at most update, {update[row]}, which is the newest version"
    again = np.ones(len(chunk), bool)
    again[np.unique(chunk, return_index=True)[1]] = False
    yield again, "chunk", lambda _row: "it must not repeat a number of a row above"
    fell = "it must be at least the value in the row above, "
    yield np.diff(step, prepend=0) < 0, "step", lambda row: f"{fell}{step[row - 1]}"
    yield np.diff(finish, prepend=0) < 0, "finish", lambda row: f"{fell}{finish[row - 1]}"
    yield finish < start, "finish", lambda row: f"it must be at least start, {start[row]}"
    free = _free(table)
    yield (
        start < free - ROUNDING * np.maximum(free, 1),
        "start",
        lambda row: f"it must be at least {free[row]}, when worker {worker[row]} finishes its previous gradient",
    )


def write_updates(path: Path | str, table: UpdateTable) -> None:
    """Write a valid table as CSV: the number of workers, the names of the columns, and one row per gradient."""
    validate(table)
    rows = zip(*(getattr(table, column).tolist() for column in COLUMNS), strict=True)
    lines = [f"{HEAD}{table.num_workers}", *(",".join(map(str, row)) for row in (COLUMNS, *rows))]
    write_text(Path(path), "\n".join(lines) + "\n")


def read_updates(path: Path | str, start: str = "") -> UpdateTable:
    """Read and validate a table that `write_updates` wrote. The result is the same to the last bit.

    Raises UserError for an invalid file: `start`, with the file and, if there is one, the line.
    """
    try:
        with open_text(path) as file:
            head = file.readline().strip()
            number = head.removeprefix(HEAD)
            if not (head.startswith(HEAD) and _is_whole(number) and int(number) > 0):
                raise ValueError(f"line 1 is {head[:40]!r}; it must be '{HEAD}N' for N workers")
            lines, rows = read_rows(file, COLUMNS, line=2)
        columns = np.array(rows, dtype=[(name, "f8" if name in TIMES else "i4") for name in COLUMNS])
        table = UpdateTable(int(number), *(columns[name].copy() for name in COLUMNS))
        if rule := _broken_rule(table, lambda row: f"line {lines[row]}"):
            raise ValueError(rule)
    except (OSError, ValueError) as error:
        raise UserError(start + unreadable(path, error)) from error
    return table


def read_rows(file: TextIO, columns: Sequence[str], line: int = 1) -> tuple[list[int], list[tuple[int | float, ...]]]:
    """Return the line numbers and values of the rows of a CSV file, integers except for seconds. Raises ValueError.

    line: number of the line of the header.
    """
    lines, rows, found = [], [], read_csv(file, line)
    if tuple(map(str.strip, next(found, (line, []))[1])) != tuple(columns):
        raise ValueError(f"line {line} must be the header {','.join(columns)}")
    for number, row in found:
        if row and len(row) != len(columns):
            raise ValueError(f"line {number} has {len(row)} values; it must have {len(columns)}, one per column")
        if row:
            lines.append(number)
            values = zip(columns, map(str.strip, row), strict=True)
            rows.append(tuple(_number(column, value, number) for column, value in values))
    return lines, rows


def _is_whole(text: str) -> bool:
    """Return whether the text is a non-negative integer that fits in int32."""
    return text.isascii() and text.isdigit() and len(text) < 11 and int(text) < 2**31


def _number(column: str, text: str, line: int) -> int | float:
    if column in (*TIMES, "seconds"):
        try:
            seconds = float(text.replace("_", "?"))  # reject 1_000, which only Python accepts
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise ValueError(f"line {line}: {column} is {text[:40]!r}; it must be a non-negative number of seconds")
        return seconds
    if not _is_whole(text):
        raise ValueError(f"line {line}: {column} is {text[:40]!r}; it must be an integer between 0 and {2**31 - 1}")
    return int(text)
