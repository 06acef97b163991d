"""The page of a run, workdir/report.html: its results, curves, times, memory, traffic, starts and config."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar import config as configs
from jaxpar import files
from jaxpar.core.plan import Plan
from jaxpar.errors import UserError, format_bytes, format_count
from jaxpar.run import report
from jaxpar.run.build import Run, advise_length, next_steps
from jaxpar.tasks import Task
from jaxpar.use.pages.charts import Series, line_chart, timeline_chart
from jaxpar.use.pages.html import DARKEST, Cell, Row, document, folded, number_cell, paragraph, pictures, section, table
from jaxpar.use.pages.recorded import CERTIFICATE, RecordedRun, read_run, read_verdict

REPORT = "report.html"
MOST_OPEN_CLASSES = 20  # of a confusion matrix that is not folded; above it, the most frequent confusions are listed
MOST_UPRIGHT = 6  # classes whose names above the columns of a confusion matrix are not turned
MOST_CLASSES = 100  # of a confusion matrix in the page
NUM_CONFUSIONS = 20
MOST_OPEN_ROWS = 20  # of a table that is not folded
MUCH = 0.2  # part of the time of a run that a phase other than training should not exceed
GOOD = 0.95  # a test accuracy after which a run was long enough
FLAG_OR_KEY = re.compile(r"(?<![`\w])(?:--[a-z][\w.]*(?:=[^\s,;]*[^\s,;.])?|config\.[\w.]*\w(?!`))")
SCHEDULE = "Rows: devices; numbers: microbatches; axis: time, planned in units of F, measured in seconds."
CURVE_SPLITS = ("train", "validation", "test")
# Metrics of a log interval: their names in metrics.jsonl, and in tables.
LABELS = {
    "examples_per_second": "examples per second",
    "tokens_per_second": "tokens per second",
    "model_flops_per_second": "model FLOP/s of all devices",
    "mfu": "MFU",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "skipped_steps": "skipped steps of a log interval",
    "loss_scale": "loss scale",
}

ABBREVIATIONS = {"f1": "F1", "r2": "R2", "rmse": "RMSE"}  # words of the names of metrics


def write_report(run: Run) -> None:
    """Write workdir/report.html for a run whose result.json is written. No error ends the run: a line reports it."""
    path = run.workdir / REPORT
    try:
        recorded = read_run(run.workdir)
        files.write_text(path, run_page(recorded, run.plan, run.num_steps, run.strategy.timelines()))
    except Exception as error:  # a drawing must not fail a run that took days
        print(f"report    {path} was not written: {type(error).__name__}: {error}", flush=True)


def run_page(run: RecordedRun, plan: Plan[object], num_steps: int, timelines: Mapping[str, Sequence[Any]]) -> str:
    """Return the page of a run.

    plan, num_steps: of its last start. timelines: actions of a step by title, of a pipeline (`Strategy.timelines`).
    """
    config = run.config
    title = f"{run.workdir.absolute().name}: {config.model.name} on {config.data.source}, {config.strategy}"
    charts = [timeline_chart(name, timeline) for name, timeline in timelines.items()]
    result, baseline = f"Reached {headline(run)}", run.result.get("test_majority_accuracy")
    rate = run.result.get("examples_per_second")
    result += f" after {format_count(run.result['steps'], 'step')}"
    result += (
        "." if rate is None else f", at {rate:,.0f} examples/s on {format_count(len(run.result['devices']), 'device')}."
    )
    if baseline is not None:
        result += f" Always predicting the most frequent class: {baseline:.2%}."
    result += _time_spent(run)
    starts = [
        (start.step, f"{before.devices} -> {format_count(start.devices, 'device')} after step {start.step:,}")
        for before, start in itertools.pairwise(run.starts)
        if before.devices != start.devices
    ]
    rates = []
    for name, label in LABELS.items():
        points = run.points("train", name)
        is_drawn = any(value for _, value in points)  # not if it is 0 in all log intervals
        rates.append(line_chart(as_title(label), [Series(label, points)] if is_drawn else [], events=starts))
    curves = [_curve(run, "loss", loss_unit(run.task)), _curve(run, run.task.curve)]
    return document(
        title,
        [
            paragraph(f"{config.strategy}: {plan.summary}"),
            section("Result", paragraph(result)),
            section("Curves", pictures(curves)),
            section("Time", *_seconds(run)),
            section("What to try", *(paragraph(as_sentence(text)) for text in _advice(run, plan, num_steps))),
            section("Numbers", table(_result_rows(run, num_steps))),
            section("Classes", *_classes(run.result)),
            section("Rates", pictures(rates)),
            section("Schedule", *([paragraph(SCHEDULE), *charts] if charts else [])),
            section("Memory", _memory_table(plan)),
            section("Traffic", traffic_table(plan)),
            section("Starts", _starts(run)),
            section("Config", *_config_tables(run)),
            section("Environment", _environment(run)),
        ],
    )


def headline(run: RecordedRun) -> str:
    """Return the main result, such as `test accuracy 78.31%`, or the training loss if there is no test split."""
    if "test_loss" in run.result and None not in run.tested().values():
        return run.task.headline.format(**run.result)
    loss = run.result["train_loss"]
    return "no finite loss" if loss is None else f"training loss {loss:.4f}"


def _result_rows(run: RecordedRun, num_steps: int) -> list[Row]:
    result = run.result
    rows: list[Row] = [[metric_label(name), number_cell(value)] for name, value in run.tested().items()]
    best = {name.removeprefix("best_"): value for name, value in result.items() if name.startswith("best_")}
    if best and best["step"] != result["steps"]:
        of_best = {name: value for name, value in best.items() if name != "step"}
        rows += [[f"{metric_label(name)} of the best checkpoint", number_cell(of_best[name])] for name in of_best]
    rows.append(["training loss", number_cell(result["train_loss"])])
    rows.append(["steps", Cell(f"{result['steps']:,} of {num_steps:,}", result["steps"])])
    if best:
        rows.append(["step of the best checkpoint", number_cell(best["step"])])
    if "stopped_early" in result:
        rows.append(["stopped early", str(result["stopped_early"])])
    rows.append(["skipped steps", number_cell(result["skipped_steps"])])
    if "loss_scale" in result:
        rows.append(["loss scale of the last step", number_cell(result["loss_scale"])])
    rows.append(["examples", number_cell(result["examples"])])
    rows += [[f"{name} split, examples", number_cell(size)] for name, size in result["splits"].items()]
    rows.append(["parameters", number_cell(result["parameters"])])
    rows += [
        [f"{LABELS[name]}, median of the log intervals", number_cell(result[name])]
        for name in report.RATES
        if name in result
    ]
    if rate := result.get("examples_per_second"):
        rows.append(["seconds of a step, at these examples per second", number_cell(run.config.batch_size / rate)])
    rows.append(["ledger", result["ledger"]])
    rows += [[f"discarded after step {one['step']:,}", one["private_state"]] for one in result["discarded"]]
    if result["in_flight"]:
        rows.append(["batches in flight", number_cell(result["in_flight"])])
    if "certified_steps" in result:
        rows.append(["certified steps", number_cell(result["certified_steps"])])
    if verdict := certificate(run):
        rows.append(["certificate", verdict])
    return rows


def certificate(run: RecordedRun) -> str:
    """Return the verdict of the certificate in the workdir; empty if there is none."""
    try:
        return read_verdict(run.workdir / CERTIFICATE, run.config)
    except UserError as error:
        return str(error)


def metric_label(name: str) -> str:
    """Return the name of a metric as a text, such as `test macro F1`."""
    return " ".join(ABBREVIATIONS.get(word, word) for word in name.split("_"))


def as_title(label: str) -> str:
    """Return a label with a capital first letter."""
    return label[:1].upper() + label[1:]


def loss_unit(task: Task) -> str:
    """Return the title of the curves of the loss."""
    return f"Loss ({task.loss_unit})"


def _curve(run: RecordedRun, name: str, title: str = "") -> str:
    """Return the chart of a metric on all splits."""
    series = [Series(split, run.points(split, name), is_marked=split != "train") for split in CURVE_SPLITS]
    return line_chart(title or as_title(metric_label(name)), series)


def _classes(result: Mapping[str, Any]) -> list[str]:
    """Return the metrics of each class, and the confusion matrix or its most frequent confusions, if there are any."""
    if "test_classes" not in result:
        return []
    rows: list[Row] = [
        [name, *(number_cell(of_class[column]) for column in ("precision", "recall", "f1", "count"))]
        for name, of_class in result["test_classes"].items()
    ]
    of_classes = table(rows, ["class", "precision", "recall", "F1", "examples"])
    if len(rows) > MOST_OPEN_ROWS:
        of_classes = folded(format_count(len(rows), "class"), of_classes)
    return [of_classes, confusions(list(result["test_classes"]), result["test_confusion"])]


def confusions(names: Sequence[str], counts_CC: Sequence[Sequence[int]]) -> str:
    """Return the confusion matrix as a table and, if there are many classes, the most frequent confusions above it."""
    matrix = _confusion_matrix(names, counts_CC) if len(names) <= MOST_CLASSES else ""
    if len(names) <= MOST_OPEN_CLASSES:
        return matrix
    mistaken = [
        (count, sum(counts_C), actual, names[place])
        for actual, counts_C in zip(names, counts_CC, strict=True)
        for place, count in enumerate(counts_C)
        if count and names[place] != actual
    ]
    mistaken.sort(key=lambda one: -one[0])
    listed: list[Row] = [
        [actual, predicted, number_cell(count), number_cell(total)]
        for count, total, actual, predicted in mistaken[:NUM_CONFUSIONS]
    ]
    most_frequent = table(listed, ["actual class", "predicted class", "examples", "of the actual class"])
    return paragraph("Most frequent confusions:") + most_frequent + (matrix and folded("Confusion matrix", matrix))


def _confusion_matrix(names: Sequence[str], counts_CC: Sequence[Sequence[int]]) -> str:
    rows: list[Row] = []
    for name, counts_C in zip(names, counts_CC, strict=True):
        total = max(1, sum(counts_C))
        rows.append([name, *(number_cell(count, DARKEST * math.sqrt(count / total)) for count in counts_C)])
    matrix = table(rows, ["", *names], is_matrix=len(names) > MOST_UPRIGHT)
    return paragraph("Rows: actual classes; columns: predicted classes.") + matrix


def _spent(run: RecordedRun) -> dict[str, float]:
    """Return the seconds of the phases of the last start, the longest first."""
    spent = {name: value for name, value in run.result["seconds"].items() if value}
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def _time_spent(run: RecordedRun) -> str:
    """Return the seconds of the last start, and the shares of the phases that took most."""
    spent = _spent(run)
    total = sum(spent.values())
    shares = ", ".join(f"{name} {value / total:.0%}" for name, value in list(spent.items())[:3])
    return f" The last start took {total:,.0f} s: {shares}." if total else ""


def _seconds(run: RecordedRun) -> list[str]:
    """Return the seconds of the phases of the last start, with bars."""
    spent = _spent(run)
    total = sum(spent.values())
    rows: list[Row] = [
        [name, number_cell(value), Cell(f"{value / total:.1%}", value / total), Cell("", bar=value / total)]
        for name, value in spent.items()
    ]
    step = run.starts[-1].step if run.starts else 0
    since = f"Seconds of the last start, from step {step + 1:,}." if step else "Seconds by phase."
    return [paragraph(since), table(rows, ["phase", "seconds", "fraction", ""])] if total else []


def _advice(run: RecordedRun, plan: Plan[object], num_steps: int) -> list[str]:
    """Return what to change in the next run, by the plan, the result and the times of this one."""
    result, found = run.result, [plan.advice] if plan.advice else []
    if "advice" not in result and (result.get("test_accuracy") or 0) < GOOD:
        length = advise_length(run.config, result["splits"]["training"], num_steps, plan.decision.batch_divisor)
        found += [length] if length else []
    return found + advice_of_result(run) + next_steps(run.config)


def advice_of_result(run: RecordedRun) -> list[str]:
    """Return what to change in the next run, by the result and the times of this one."""
    result, spent = run.result, run.result["seconds"]
    total, found = sum(spent.values()), [result["advice"]] if "advice" in result else []
    best = result.get("best_step", result["steps"])
    if best < result["steps"]:
        found.append(
            f"The validation loss was lowest at step {best:,}, so the later steps gained nothing: predictions use that "
            "checkpoint. `config.early_stop.patience` ends runs earlier."
        )
    if spent.get("compile", 0) > MUCH * total:
        found.append(
            "Compiling took much of the time. A program in the cache is only loaded, and in a longer run, compiling is "
            "a smaller part. With texts, a step compiles once for each of `config.data.length_buckets`."
        )
    if spent.get("input", 0) > MUCH * total:
        found.append("The devices waited for data: raise `config.data.num_threads` and `config.data.prefetch`.")
    if spent.get("eval", 0) > MUCH * total:
        often = sum(row["split"] == "validation" for row in run.rows) > 1
        found.append(
            "Evaluation took much of the time: raise `config.eval.batch_size` or `config.eval.every_steps`."
            if often
            else "Evaluation at the end took much of the time. It is a smaller part of a longer run, and of one with "
            "fewer validation and test examples."
        )
    if spent.get("checkpoint", 0) > MUCH * total:
        found.append("Checkpoints took much of the time: raise `config.checkpoint.every_steps`, or use a faster disk.")
    return found


def as_sentence(phrase: str) -> str:
    """Return a phrase of the terminal as a sentence, in which flags and keys are code."""
    marked = FLAG_OR_KEY.sub(r"`\g<0>`", phrase)
    return f"{as_title(marked).removesuffix('.')}."


def _memory_table(plan: Plan[object]) -> str:
    """Return the bytes that each device holds, by purpose, according to the plan."""
    purposes = list(dict.fromkeys(purpose for parts in plan.memory for purpose in parts))
    rows: list[Row] = [
        [str(device), *(_of_bytes(parts.get(purpose, 0)) for purpose in purposes), _of_bytes(total)]
        for device, (parts, total) in enumerate(zip(plan.memory, plan.device_bytes, strict=True))
    ]
    note = paragraph("Bytes that each device holds, without the temporary arrays of a step, from the plan.")
    element = table(rows, ["device", *purposes, "total"])
    return note + (folded(format_count(len(rows), "device"), element) if len(rows) > MOST_OPEN_ROWS else element)


def traffic_table(plan: Plan[object]) -> str:
    """Return the bytes that one device sends per step, according to the plan."""
    rows: list[Row] = [
        [one.kind, one.axis, one.dtype, _of_bytes(round(one.nbytes)), number_cell(one.messages)]
        for one in plan.traffic
        if one.nbytes or one.messages  # an axis of one device sends nothing
    ]
    if not rows:
        return paragraph("Devices send nothing to each other in a step.")
    rows.append(["total", "", "", _of_bytes(plan.wire_bytes), number_cell(sum(one.messages for one in plan.traffic))])
    note = paragraph("Bytes and messages that one device sends per step, from the plan.")
    return note + table(rows, ["collective", "mesh axis", "dtype", "bytes", "messages"])


def _of_bytes(nbytes: int) -> Cell:
    return Cell(format_bytes(nbytes), nbytes)


def _starts(run: RecordedRun) -> str:
    rows: list[Row] = []
    for start in run.starts:
        date = start.date.replace("T", " ").replace("+00:00", " UTC")
        changed = "; ".join(start.changed)
        rows.append([date, number_cell(start.step), start.strategy, number_cell(start.devices), changed])
    return table(rows, ["date", "steps before", "strategy", "devices", "changed"]) if rows else ""


def _config_tables(run: RecordedRun) -> list[str]:
    """Return the keys that differ from configs/default.py, and all keys."""
    default, values = configs.keys(configs.default_config()), configs.keys(run.config)
    changed: list[Row] = [
        [key, repr(value), repr(default[key])] for key, value in configs.changed_keys(run.config).items()
    ]
    return [
        paragraph(f"{format_count(len(changed), 'key')} with another value than in `configs/default.py`:"),
        table(changed, ["key", "value", "default"]),
        folded("All keys", table([[key, repr(value)] for key, value in values.items()], ["key", "value"])),
    ]


def _environment(run: RecordedRun) -> str:
    """Return the workdir, the devices, where and how the run was started, and the versions of packages."""
    result = run.result
    values = dict(result["environment"])
    versions = values.pop("versions")
    rows: list[Row] = [
        ["workdir", str(run.workdir)],
        ["devices", f"{len(result['devices'])} x {result['device_kind']}: {', '.join(result['devices'])}"],
        *([name, text or "unknown"] for name, text in {**values, **versions}.items()),
    ]
    return table(rows)
