"""Compares runs: a table of their results and of the config keys in which they differ, and a page with their curves.

    scripts/compare_runs runs/a runs/b [runs/c ...] [--output=comparison.html]

The runs can be of any tasks, models and strategies, and need not be finished. With --output, the script also writes an
self-contained HTML page. To train a config with every strategy and compare them, use scripts/compare.py.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxpar import files
from jaxpar.command_line import Parser, output_path
from jaxpar.errors import UserError, exit_code, printable
from jaxpar.pages.recorded import RecordedRun, read_run
from jaxpar.pages.runs_page import comparison_page, comparison_rows, different_keys, format_rows


def read_runs(workdirs: list[Path]) -> list[RecordedRun]:
    """Return the runs. Raises UserError for fewer than two, for one that occurs twice, and for one without metrics."""
    if len(workdirs) < 2:
        raise UserError(f"the argument RUNS is {workdirs[0]}; it must be at least two workdirs, as in runs/a runs/b")
    for place, workdir in enumerate(workdirs):
        if workdir.resolve() in [other.resolve() for other in workdirs[:place]]:
            raise UserError(f"the argument RUNS contains {workdir} twice; each workdir must be another one")
    return [read_run(workdir) for workdir in workdirs]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within `with`, raise UserError instead of an OSError of the file `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--output is {str(path)!r}; it must be {files.unwritable(path, error)}") from error


def check_output(path: Path) -> None:
    """Raise UserError unless `path` is a new file in a directory."""
    if path.exists() or path.is_symlink():
        raise UserError(f"--output is {str(path)!r}, which exists; it must be a new file")
    if not path.parent.is_dir():
        raise UserError(
            f"--output is {str(path)!r}; it must be in an existing directory, and '{path.parent}' is not one"
        )


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__, prog="compare_runs")
    parser.require("runs", "runs/a runs/b", nargs="+", type=Path, help="workdirs of runs")
    parser.add_argument("--output", type=output_path, help="new HTML file")
    arguments = parser.parse()
    if arguments.output:
        with writing(arguments.output):
            check_output(arguments.output)
    runs = read_runs(arguments.runs)
    names = ["", *(printable(str(run.workdir)) for run in runs)]
    print(format_rows([names, *comparison_rows(runs)]))
    if rows := different_keys(runs):
        print("\n" + format_rows([["config key", *names[1:]], *rows]))
    if arguments.output:
        with writing(arguments.output):
            files.write_text(arguments.output, comparison_page(runs))
        print(f"\npage  {arguments.output}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
