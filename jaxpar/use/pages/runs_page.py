"""Compares finished or unfinished runs: a table with a column for each run, and a page with their curves."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar import config as configs
from jaxpar.run import report
from jaxpar.use.pages.charts import Series, line_chart
from jaxpar.use.pages.html import Cell, Row, document, number_cell, section, table
from jaxpar.use.pages.recorded import RecordedRun
from jaxpar.use.pages.run_page import LABELS, as_title, certificate, loss_unit, metric_label, pictures

CURVES = ("examples_per_second", "mfu")  # curves of the log intervals in the page


def comparison_rows(runs: Sequence[RecordedRun]) -> list[Row]:
    """Return a row for each property: its name, and its value for each run; empty if a run lacks it."""
    tested = [run.tested() for run in runs]
    rows: list[Row] = [["strategy", *(run.config.strategy for run in runs)]]
    rows.append(["devices", *(_devices(run) for run in runs)])
    rows.append(["state", *(_state(run) for run in runs)])
    rows.append(["steps", *(number_cell(run.steps) for run in runs)])
    names = dict.fromkeys(name for of_run in tested for name in of_run)
    rows += [[metric_label(name), *_numbers(tested, name)] for name in names]
    of_result = {"train_loss": "training loss", "skipped_steps": "skipped steps"}
    of_result |= {name: LABELS[name] for name in report.RATES if any(name in run.result for run in runs)}
    rows += [[heading, *_numbers([run.result for run in runs], name)] for name, heading in of_result.items()]
    verdicts = [certificate(run) for run in runs]
    return [*rows, ["certificate", *verdicts]] if any(verdicts) else rows


def _devices(run: RecordedRun) -> str:
    return f"{len(run.result['devices'])} x {run.result['device_kind']}" if run.result else ""


def _state(run: RecordedRun) -> str:
    return "unfinished" if not run.result else "stopped early" if "stopped_early" in run.result else "finished"


def _numbers(results: Sequence[Mapping[str, Any]], name: str) -> list[str | Cell]:
    return [number_cell(result[name]) if name in result else "" for result in results]


def different_keys(runs: Sequence[RecordedRun]) -> list[Row]:
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
    rows = different_keys(runs)
    return document(
        f"Comparison of {len(runs)} runs",
        [
            section("Results", table(comparison_rows(runs), ["", *names])),
            section("Curves", pictures(charts)),
            section("Config keys that differ", table(rows, ["key", *names]) if rows else ""),
        ],
    )


def _chart(title: str, runs: Sequence[RecordedRun], split: str, metric: str) -> str:
    """Return the chart of a metric of the runs. If it is a loss, only of those whose loss the title names."""
    series = []
    for run in runs:
        is_other = metric == "loss" and not title.startswith(loss_unit(run.task))
        points = [] if is_other else run.points(split, metric)
        series.append(Series(str(run.workdir), points, is_marked=split == "validation"))
    return line_chart(title, series)
