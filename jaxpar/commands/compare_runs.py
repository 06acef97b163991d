"""Compares runs: a table of their results and of the config keys in which they differ, and a page with their curves.

    jaxpar compare runs runs/a runs/b [runs/c ...] [--output=comparison.html]

The runs can be of any tasks, models and strategies, and need not be finished. With --output, it also writes a
self-contained HTML page. To train a config with every strategy and compare them, use `jaxpar compare strategies`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpar import config as configs
from jaxpar import files
from jaxpar.command_line import Parser, check_absent, format_rows, output_path, writing
from jaxpar.errors import UserError, printable
from jaxpar.run import report
from jaxpar.use.pages.charts import Series, line_chart
from jaxpar.use.pages.html import Cell, Row, document, number_cell, paragraph, pictures, section, table
from jaxpar.use.pages.recorded import RecordedRun, read_run
from jaxpar.use.pages.run_page import (
    LABELS,
    advice_of_result,
    as_sentence,
    as_title,
    certificate,
    headline,
    loss_unit,
    metric_label,
)

CURVES = ("examples_per_second", "mfu")  # curves of the log intervals in the page
ENVIRONMENT = ("host", "processor", "command", "commit")


def main(argv: Sequence[str]) -> None:
    parser = Parser(__doc__, "jaxpar compare runs")
    parser.require("runs", "runs/a runs/b", nargs="+", type=Path, help="workdirs of runs")
    parser.add_argument("--output", type=output_path, help="new HTML file")
    arguments = parser.parse(argv)
    if arguments.output:
        with writing("--output", arguments.output):
            check_absent("--output", arguments.output)
    workdirs = arguments.runs
    if len(workdirs) < 2:
        raise UserError(f"the argument RUNS is {workdirs[0]}; it must be at least two workdirs, as in runs/a runs/b")
    for place, workdir in enumerate(workdirs):
        if workdir.resolve() in [other.resolve() for other in workdirs[:place]]:
            raise UserError(f"the argument RUNS contains {workdir} twice; each workdir must be another one")
    runs = [read_run(workdir) for workdir in workdirs]
    names = ["", *(printable(str(run.workdir)) for run in runs)]
    shown = [*result_rows(runs), *time_rows(runs), *certificate_rows(runs)]
    results = [[cell if isinstance(cell, str) else cell.text for cell in row] for row in shown]
    print(format_rows([names, *results]))
    if rows := different_keys(runs):
        print("\n" + format_rows([["config key", *names[1:]], *rows]))
    if arguments.output:
        with writing("--output", arguments.output):
            files.write_text(arguments.output, comparison_page(runs))
        print(f"\npage  {arguments.output}")


def result_rows(runs: Sequence[RecordedRun]) -> list[Row]:
    """Return a row for each property: its name, and its value for each run; empty if a run lacks it."""
    tested, results = [run.tested() for run in runs], [run.result for run in runs]
    devices = [f"{len(result['devices'])} x {result['device_kind']}" if result else "" for result in results]
    states = [
        "unfinished" if not result else "stopped early" if "stopped_early" in result else "finished"
        for result in results
    ]
    rows: list[Row] = [
        ["strategy", *(run.config.strategy for run in runs)],
        ["devices", *devices],
        ["state", *states],
        ["steps", *(number_cell(run.steps) for run in runs)],
    ]
    names = dict.fromkeys(name for of_run in tested for name in of_run)
    rows += [[metric_label(name), *_numbers(tested, name)] for name in names]
    of_result = {"train_loss": "training loss", "skipped_steps": "skipped steps"}
    of_result |= {name: LABELS[name] for name in report.RATES if any(name in result for result in results)}
    rows += [[heading, *_numbers(results, name)] for name, heading in of_result.items()]
    rows.append(["parameters", *_numbers(results, "parameters")])
    sizes = [result.get("splits", {}) for result in results]
    splits = dict.fromkeys(name for of_run in sizes for name in of_run)
    return rows + [[f"{name} split, examples", *_numbers(sizes, name)] for name in splits]


def time_rows(runs: Sequence[RecordedRun]) -> list[Row]:
    """Return a row for each phase of the last starts: its name, and its seconds in each run."""
    phases = [run.result.get("seconds", {}) for run in runs]
    spent = dict.fromkeys(name for of_run in phases for name, value in of_run.items() if value)
    return [[f"seconds of the last start, {name}", *_numbers(phases, name)] for name in spent]


def certificate_rows(runs: Sequence[RecordedRun]) -> list[Row]:
    """Return a row with the verdict of each run, or none if no run was certified."""
    verdicts = [certificate(run) for run in runs]
    return [["certificate", *verdicts]] if any(verdicts) else []


def _numbers(results: Sequence[Mapping[str, Any]], name: str) -> list[str | Cell]:
    return [number_cell(result[name]) if name in result else "" for result in results]


def different_keys(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return a row for each config key in which the runs differ: its name, and its value for each run."""
    values = [configs.keys(run.config) for run in runs]
    return [
        [key, *(repr(of_run[key]) for of_run in values)]
        for key in values[0]
        if len({json.dumps(of_run[key]) for of_run in values}) > 1
    ]


def comparison_page(runs: Sequence[RecordedRun]) -> str:
    """Return the page. Losses in different units, and metrics of different tasks, have charts of their own."""
    names = [str(run.workdir) for run in runs]
    losses = {loss_unit(run.task): "loss" for run in runs}
    metrics = {as_title(metric_label(run.task.curve)): run.task.curve for run in runs}
    charts = [
        _chart(f"{title}, {split}", runs, split, metric)
        for title, metric in {**losses, **metrics}.items()
        for split in ("train", "validation")
    ]
    charts += [_chart(as_title(LABELS[name]), runs, "train", name) for name in CURVES]
    rows, environments = different_keys(runs), [run.result.get("environment", {}) for run in runs]
    shown: list[Row] = [[name, *(of_run.get(name) or "" for of_run in environments)] for name in ENVIRONMENT]
    reached = [f"`{run.workdir}` reached {headline(run)}" for run in _best_first(runs)]
    times = time_rows(runs)
    advice = [f"`{run.workdir}`: {as_sentence(text)}" for run in runs if run.result for text in advice_of_result(run)]
    return document(
        f"Comparison of {len(runs)} runs",
        [
            paragraph("; ".join(reached) + "." if reached else "No run has finished."),
            section("Curves", pictures(charts)),
            section("Time", table(times, ["", *names]) if times else ""),
            section("What to try", *map(paragraph, advice)),
            section("Results", table([*result_rows(runs), *certificate_rows(runs)], ["", *names])),
            section("Config keys that differ", table(rows, ["key", *names]) if rows else ""),
            section("Environment", table(shown, ["", *names])),
        ],
    )


def _best_first(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Return the finished runs, those with the highest test metric first if it is the same in all."""
    finished = [run for run in runs if run.result]
    metrics = [run.result.get(f"test_{run.task.curve}") for run in finished]
    if None in metrics or len({run.task.curve for run in finished}) > 1:
        return finished
    return sorted(finished, key=lambda run: -run.result[f"test_{run.task.curve}"])


def _chart(title: str, runs: Sequence[RecordedRun], split: str, metric: str) -> str:
    """Return the chart of a metric of the runs. If it is a loss, only of those whose loss the title names."""
    series = []
    for run in runs:
        is_other = metric == "loss" and not title.startswith(loss_unit(run.task))
        points = [] if is_other else run.points(split, metric)
        series.append(Series(str(run.workdir), points, is_marked=split == "validation"))
    return line_chart(title, series)
