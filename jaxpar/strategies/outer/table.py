"""The table of an outer run, `outer/contributions.csv` of worker 0: who contributed what when. It uses no JAX.

Rows are in the order in which the server decided. A column that does not apply to an event is empty.
"""

import os
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from jaxpar import files
from jaxpar.errors import UserError

NO_VALUE = -1  # of a column that does not apply


class OuterEvent(StrEnum):
    """An event of an outer run."""

    JOIN = "join"  # a run begins at the step and with the anchors of the others, in a row for each fragment
    RESUME = "resume"  # a run continues from its checkpoint of `step`, which the start in `read` has written
    COUNTED = "counted"  # a difference counts in round `counted`, and its worker gets the anchor of version `got`
    # A difference of a worker, step and fragment that has been counted comes again: the worker gets an anchor
    REPEATED = "repeated"
    SILENT = "silent"  # nobody waits any longer for a worker, because nothing was heard of it
    RETURN = "return"  # a silent worker contributes again
    LEAVE = "leave"  # a run has ended or was stopped


class Contribution(NamedTuple):
    """A row of the table. `start` counts the starts of a worker from 0, as its run can be started again."""

    seconds: float  # since the server started
    event: OuterEvent
    worker: int
    start: int
    step: int = NO_VALUE  # completed steps of the worker
    fragment: int = NO_VALUE
    read: int = NO_VALUE  # version of the anchor from which the difference was measured
    counted: int = NO_VALUE  # number of the round in which it counts
    got: int = NO_VALUE  # version of the anchor that the worker received
    nbytes: int = NO_VALUE  # size of the message with the difference


CONTRIBUTION_HEADER = ",".join(Contribution._fields)


def append_rows(path: Path, rows: Iterable[Contribution]) -> None:
    """Append rows to a table, with a header if it is new, and return when they are on the disk."""
    is_new = not path.exists()
    with files.naming(path), path.open("a") as file:
        file.writelines(f"{line}\n" for line in [*([CONTRIBUTION_HEADER] if is_new else []), *map(_line, rows)])
        file.flush()
        os.fsync(file.fileno())


def write_rows(path: Path, rows: Iterable[Contribution]) -> None:
    """Replace a table."""
    files.write_text(path, "".join(f"{line}\n" for line in [CONTRIBUTION_HEADER, *map(_line, rows)]))


def read_contributions(path: Path) -> list[Contribution]:
    """Read a table, without a last line that a crash has cut short. Raises UserError for an invalid file."""
    try:
        with files.open_text(path) as file:
            lines = file.read().split("\n")[:-1]
        found = list(files.read_csv(lines))
        if not found or found[0][1] != list(Contribution._fields):
            raise ValueError(f"line 1 must be the header {CONTRIBUTION_HEADER}")
        return [_row(values, number) for number, values in found[1:]]
    except (OSError, ValueError) as error:
        raise UserError(files.unreadable(path, error)) from error


def _line(row: Contribution) -> str:
    return ",".join([f"{row.seconds:.3f}", row.event, *("" if x == NO_VALUE else str(x) for x in row[2:])])


def _row(values: Sequence[str], number: int) -> Contribution:
    try:
        seconds, event, *integers = values
        row = Contribution(float(seconds), OuterEvent(event), *(int(one) if one else NO_VALUE for one in integers))
        if len(values) != len(row) or min(row[2:]) < NO_VALUE:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            f"line {number} is {','.join(values)[:80]!r}; it must be a row of {CONTRIBUTION_HEADER}"
        ) from None
    return row
