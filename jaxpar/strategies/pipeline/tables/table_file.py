"""Reads and writes tables as CSV files with one row per action, so that users can provide their own schedules."""

import csv
from pathlib import Path

import numpy as np

from jaxpar.errors import nearest
from jaxpar.files import open_text, read_csv, unreadable
from jaxpar.strategies.pipeline.tables.periodic import CONTINUOUS
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES
from jaxpar.strategies.pipeline.tables.table import ACTION, ACTION_KINDS, FIELDS, Table, with_slots
from jaxpar.strategies.pipeline.tables.validate import TableError, check_table

KIND_NAMES = [kind.name for kind in ACTION_KINDS]
MAX_CLOCKS = 10  # per action, in a table read from a file


def write_table(table: Table, path: Path | str) -> None:
    """Write the table as CSV with one row per action, without the columns that `read_table` computes anyway."""
    actions = table.actions
    computed = {"stage": actions["chunk"] * table.num_devices + actions["device"], "version": 0}
    computed["slot"] = with_slots(table).actions["slot"]
    columns = [name for name in FIELDS if name not in computed or (actions[name] != computed[name]).any()]
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        kinds = [KIND_NAMES[kind] for kind in actions["kind"]]
        writer.writerows(zip(*(kinds if name == "kind" else actions[name].tolist() for name in columns), strict=True))


def is_table_file(name: str) -> bool:
    """Return whether the name of a schedule is the path of a table. A named schedule never is."""
    return name not in {*SCHEDULES, *CONTINUOUS} and (name.endswith(".csv") or Path(name).is_file())


def read_table(path: Path | str) -> Table:
    """Read a table from CSV and validate it.

    The first line names the columns: clock, device, kind, microbatch, chunk, and optionally stage, version and slot.
    By default stages are assigned to devices round-robin, versions are 0, and slots are assigned by `with_slots`. Rows
    may be in any order. The numbers of devices, chunks and microbatches follow from the largest ones in the rows.
    Raises ValueError with one line, which names the path and the line, or the clock, the device and the rule.
    """
    try:
        with open_text(path) as file:
            lines = read_csv(file)
            columns = _columns(next(lines, (1, []))[1])
            rows = [_row(columns, row, f"line {line}") for line, row in lines if row]
        if not rows:
            raise ValueError("the table has no actions; it must have at least one")
        rows.sort(key=lambda row: (row["clock"], row["device"], ACTION_KINDS[row["kind"]].phase))
        devices, chunks, microbatches = (max(row[of] for row in rows) + 1 for of in ("device", "chunk", "microbatch"))
        numbers = {row["device"] for row in rows}
        if len(numbers) < devices:
            idle = next(number for number in range(devices) if number not in numbers)
            raise ValueError(f"device {idle} has no action, but device {devices - 1} has; every device must have some")
        for row in rows:
            row.setdefault("stage", row["chunk"] * devices + row["device"])
        actions = np.array([tuple(row.get(field, 0) for field in FIELDS) for row in rows], dtype=ACTION)
        table = Table(devices, chunks, microbatches, actions)
        table = table if "slot" in columns else with_slots(table)
        check_table(table)
        if table.num_clocks > MAX_CLOCKS * len(rows):
            raise ValueError(
                f"the table has {table.num_clocks} clocks for {len(rows)} actions; it must have at most {MAX_CLOCKS} "
                "clocks per action"
            )
        # Remove unused slots, because the engine allocates all slots up to the last one.
        table.actions["slot"] = np.unique(table.actions["slot"], return_inverse=True)[1]
    except (OSError, ValueError) as error:
        raise (TableError if isinstance(error, TableError) else ValueError)(unreadable(path, error)) from error
    return table


def _columns(header: list[str]) -> list[str]:
    names = [name.strip() for name in header]
    for name in names:
        if name not in FIELDS:
            hint = nearest(name, FIELDS)
            raise ValueError(
                f"line 1: column {name!r} is unknown; it must be one of {', '.join(FIELDS)}{hint and '.' + hint}"
            )
        if names.count(name) > 1:
            raise ValueError(f"line 1: column {name!r} occurs twice; it must occur once")
    if missing := [name for name in FIELDS[:5] if name not in names]:
        raise ValueError(f"line 1 lacks {', '.join(missing)}; it must name the columns {', '.join(FIELDS[:5])}")
    return names


def _row(columns: list[str], row: list[str], line: str) -> dict[str, int]:
    if len(row) != len(columns):
        raise ValueError(f"{line} has {len(row)} values; it must have {len(columns)}, one per column")
    result = {}
    for column, value in zip(columns, map(str.strip, row), strict=True):
        if column == "kind":
            if value not in KIND_NAMES:
                raise ValueError(f"{line}: kind is {value!r}; it must be one of {', '.join(KIND_NAMES)}")
            result[column] = KIND_NAMES.index(value)
        else:
            if not (value.isascii() and value.isdigit() and len(value) < 10):
                raise ValueError(f"{line}: {column} is {value!r}; it must be an integer between 0 and 999999999")
            result[column] = int(value)
    return result
