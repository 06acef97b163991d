"""Compares runs: a table of their results and of the config keys in which they differ, and a page with their curves.

    jaxpar compare runs runs/a runs/b [runs/c ...] [--output=comparison.html]

The runs can be of any tasks, models and strategies, and need not be finished. With --output, it also writes a
self-contained HTML page. To train a config with every strategy and compare them, use `jaxpar compare strategies`.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxpar import files
from jaxpar.command_line import Parser, check_absent, format_rows, output_path, writing
from jaxpar.errors import UserError, printable
from jaxpar.use.pages.html import Row
from jaxpar.use.pages.recorded import RecordedRun, read_run
from jaxpar.use.pages.runs_page import comparison_page, comparison_rows, different_keys


def _read_runs(workdirs: list[Path]) -> list[RecordedRun]:
    """Return the runs. Raises UserError for fewer than two, for one that occurs twice, and for one without metrics."""
    if len(workdirs) < 2:
        raise UserError(f"the argument RUNS is {workdirs[0]}; it must be at least two workdirs, as in runs/a runs/b")
    for place, workdir in enumerate(workdirs):
        if workdir.resolve() in [other.resolve() for other in workdirs[:place]]:
            raise UserError(f"the argument RUNS contains {workdir} twice; each workdir must be another one")
    return [read_run(workdir) for workdir in workdirs]


def cell_texts(row: Row) -> list[str]:
    """Return the texts of the cells of a row."""
    return [cell if isinstance(cell, str) else cell.text for cell in row]


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    parser = Parser(__doc__, "jaxpar compare runs")
    parser.require("runs", "runs/a runs/b", nargs="+", type=Path, help="workdirs of runs")
    parser.add_argument("--output", type=output_path, help="new HTML file")
    arguments = parser.parse(argv)
    if arguments.output:
        with writing("--output", arguments.output):
            check_absent("--output", arguments.output)
    runs = _read_runs(arguments.runs)
    names = ["", *(printable(str(run.workdir)) for run in runs)]
    print(format_rows([names, *map(cell_texts, comparison_rows(runs))]))
    if rows := different_keys(runs):
        print("\n" + format_rows([["config key", *names[1:]], *map(cell_texts, rows)]))
    if arguments.output:
        with writing("--output", arguments.output):
            files.write_text(arguments.output, comparison_page(runs))
        print(f"\npage  {arguments.output}")
