"""Tables of benchmarks: printed on the terminal, and recorded by results.py."""

import json
import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

COLUMNS = ("quantity", "result", "target")  # of benchmarks whose rows are different quantities
ROWS = "JAXPAR_BENCH_ROWS"  # environment variable: the file to which rows are added, an object of JSON on each line


def show(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, and add its rows to the file that the environment names.

    Args:
      columns: heads of the columns. The tables of one result have equal ones.
      rows: cells of each row. A generator's rows are printed as they come, and columns grow with them.
    """
    known = rows if isinstance(rows, Sequence) else [[" " * 48, *(" " * 12 for _ in columns[1:])]]
    widths = [max(map(len, cells)) for cells in zip(columns, *known, strict=True)]
    for number, row in enumerate(chain([columns], rows)):
        widths = [max(width, len(cell)) for width, cell in zip(widths, row, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]), flush=True)
        if number and (path := os.environ.get(ROWS)):
            with Path(path).open("a") as file:
                file.write(json.dumps(dict(zip(columns, row, strict=True))) + "\n")
