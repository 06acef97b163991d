"""Tables as CSV files: a row an action."""

import csv
from pathlib import Path

import numpy as np

from jaxpar.errors import nearest
from jaxpar.files import unreadable
from jaxpar.pipeline.tables.schedule import SCHEDULES
from jaxpar.pipeline.tables.table import ACTION, ACTION_KINDS, FIELDS, PHASE_OF_KIND, Table, with_slots
from jaxpar.pipeline.tables.validate import TableError, check_table

MAX_CLOCKS = 10  # of a table that is loaded: times the number of its actions


def write_table(table: Table, path: Path | str) -> None:
    """Write the table as CSV, a row an action, kinds by name."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for row in table.actions.tolist():
            writer.writerow(
                ACTION_KINDS[value] if field == "kind" else value for field, value in zip(FIELDS, row, strict=True)
            )


def is_table_file(name: str) -> bool:
    """Return whether a schedule's name is the path of a table. A name in SCHEDULES never is."""
    return name not in SCHEDULES and (name.endswith(".csv") or Path(name).is_file())


def read_table(path: Path | str) -> Table:
    """Read a table from CSV and validate it.

    The first line names the columns: clock, device, kind, microbatch, chunk, and stage, version, slot, of which the
    last three may be left out (stages then go round the devices, versions are 0, slots the least). Rows come in any
    order; the numbers of devices, chunks and microbatches are the least that they fit in. Slots that no row has are
    left out.

    Raises:
      ValueError: one line, with the file and the line, or the clock, device and rule that the table breaks.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            columns = _columns(next(reader, []))
            rows = [_row(columns, row, f"line {reader.line_num}") for row in reader if row]
        if not rows:
            raise ValueError("no actions")
        table = _table(columns, rows)
        check_table(table)
        if table.num_clocks > MAX_CLOCKS * len(rows):
            raise ValueError(
                f"{table.num_clocks} clocks for {len(rows)} actions; there must be at most {MAX_CLOCKS} times as many"
            )
        # The engine allocates all slots up to the last.
        table.actions["slot"] = np.unique(table.actions["slot"], return_inverse=True)[1]
    except (OSError, ValueError, csv.Error) as error:
        raise (TableError if isinstance(error, TableError) else ValueError)(f"{path}: {unreadable(error)}") from error
    return table


def _columns(header: list[str]) -> list[str]:
    names = [name.strip() for name in header]
    for name in names:
        if name not in FIELDS:
            raise ValueError(
                f"line 1: column {name!r} is unknown; it must be one of {', '.join(FIELDS)}.{nearest(name, FIELDS)}"
            )
        if names.count(name) > 1:
            raise ValueError(f"line 1: column {name!r} comes twice")
    if missing := [name for name in FIELDS[:5] if name not in names]:
        raise ValueError(f"line 1: no column {', '.join(missing)}; the first line names the columns")
    return names


def _row(columns: list[str], row: list[str], line: str) -> dict[str, int]:
    if len(row) != len(columns):
        raise ValueError(f"{line}: {len(row)} values in {len(columns)} columns")
    result = {}
    for column, value in zip(columns, map(str.strip, row), strict=True):
        if column == "kind":
            if value not in ACTION_KINDS:
                raise ValueError(f"{line}: kind is {value!r}; it must be one of {', '.join(ACTION_KINDS)}")
            result[column] = ACTION_KINDS.index(value)
        else:
            if not (value.isascii() and value.isdigit() and len(value) < 10):
                raise ValueError(f"{line}: {column} is {value!r}; it must be a whole number, at least 0")
            result[column] = int(value)
    return result


def _table(columns: list[str], rows: list[dict[str, int]]) -> Table:
    rows.sort(key=lambda row: (row["clock"], row["device"], PHASE_OF_KIND[row["kind"]]))
    devices, chunks, microbatches = (max(row[size] for row in rows) + 1 for size in ("device", "chunk", "microbatch"))
    for row in rows:
        row.setdefault("stage", row["chunk"] * devices + row["device"])
    actions = np.array([tuple(row.get(field, 0) for field in FIELDS) for row in rows], dtype=ACTION)
    table = Table(devices, chunks, microbatches, actions)
    return table if "slot" in columns else with_slots(table)
