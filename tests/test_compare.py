"""Tests of `jaxpar compare strategies`: the table and its files from outcomes by hand, and which runs are started."""

import csv
import html
import io
import json
import math
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from jaxpar import cluster, files, strategies
from jaxpar import config as configs
from jaxpar.checkpoint.ledger import Ledger
from jaxpar.choose.asynchronous import predicted
from jaxpar.choose.candidates import AsyncCandidate, Candidate, state_ratios
from jaxpar.choose.stages import possible_stages
from jaxpar.commands import compare_strategies as command
from jaxpar.compare import runs
from jaxpar.compare import strategies as compare
from jaxpar.compare.page import html_page
from jaxpar.compare.pictures import COLORS, curve_panels, draw_pictures
from jaxpar.compare.report import (
    StrategyOutcome,
    TableColumn,
    comparison_columns,
    csv_text,
    describe_best,
    format_range,
    markdown,
    time_columns,
)
from jaxpar.compare.runs import configured, run_logged
from jaxpar.core.plan import DelayedUpdates, StageDelay
from jaxpar.errors import UserError
from jaxpar.inspect.plan_report import make_space
from jaxpar.use.pages.recorded import read_verdict
from tests.checkpoint.test_private import VALUES
from tests.html_pages import check_alone
from tests.runs import run_script, script_error, small_arguments
from tests.selection import slow

OUTCOMES = {
    "single": StrategyOutcome(
        step_seconds=0.2,
        wire_bytes=0,
        device_bytes=(8_000_000,),
        in_flight_bytes=2_000_000,
        metric=0.5,
        memory={"parameters": 5_000_000, "residuals": 3_000_000, "gradients": 2_000_000},
    ),
    "ddp": StrategyOutcome(
        step_seconds=0.16,
        wire_bytes=4_000_000,
        device_bytes=(8_000_000, 8_000_000),
        in_flight_bytes=1_000_000,
        memory={"optimizer": 6_000_000, "parameters": 2_000_000, "activations": 1_000_000},
        metric=0.504,
        guarantee="equal to single",
        certificate="passed, 10 steps",
        curve=((10, 0.25), (20, 0.5)),
        seconds={"train": 3.25, "compile": 1.5},
    ),
    "gpipe": StrategyOutcome(failed="a | b <script>alert(1)</script>"),
    "async": StrategyOutcome(
        step_seconds=2.5,
        is_emulated=True,
        wire_bytes=1,
        device_bytes=(1_000_000, 3_000_000),
        in_flight_bytes=0,
        memory={"history": 1_000_000, "parameters": 2_000_000},
        metric=0.25,
        staleness=(0.75, 3),
        guarantee="differs: stale",
        curve=((10, 0.125),),
        seconds={"train": 5.5},
    ),
}
KINDS = {"single": "single", "ddp": "data_parallel", "gpipe": "pipeline", "async": "async_data_parallel"}


def columns() -> list[TableColumn]:
    return comparison_columns(OUTCOMES, batch_size=128, metric="test_accuracy", metric_format=".1%")


def cells_of(lines: Sequence[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(" | ")] for line in (line[2:-2] for line in lines if line[0] == "|")]


def test_the_table() -> None:
    head, _, single, ddp, gpipe, emulated = cells_of(markdown(columns()))
    assert head[:2] == ["strategy", "test accuracy"]
    assert head[2:5] == ["measured time of a step", "measured examples/s", "measured relative to single"]
    assert head[5:8] == ["sent by a device", "state of a device", "in flight, about"]
    assert single[:8] == ["single", "50.0%", "200 ms", "640", "1.00", "0 B", "8 MB", "2 MB"]
    assert ddp == ["ddp", "50.4%", "160 ms", "800", "1.25", "4 MB", "8 MB", "1 MB", "", "", *ddp[-2:]]
    assert ddp[-2:] == ["equal to single", "passed, 10 steps"]
    assert gpipe == ["gpipe", *[""] * 10, r"failed: a \| b <script>alert(1)</script>"]
    assert emulated[2:7] == ["2.5 s (emulated)", "51", "", "1 B", "1 to 3 MB"]  # not compared with single
    assert emulated[8:] == ["0.75", "3", "differs: stale", "not certified"]


def test_the_best_equal_the_reference() -> None:
    """async is emulated and differs; of the others, single has no guarantee here."""
    assert describe_best(OUTCOMES) == (
        "Of the strategies that equal single, `ddp` is the fastest, 160 ms for a step, and `ddp` needs least memory, "
        "about 9 MB."
    )
    small = replace(OUTCOMES["ddp"], step_seconds=0.3, in_flight_bytes=0)
    assert "`ddp` is the fastest, 160 ms" in describe_best({**OUTCOMES, "zero": small})
    assert "`zero` needs least memory, about 8 MB" in describe_best({**OUTCOMES, "zero": small})
    assert describe_best({"gpipe": OUTCOMES["gpipe"]}) == ""


def test_the_csv_file_has_exact_values() -> None:
    rows = {row["strategy"]: row for row in csv.DictReader(io.StringIO(csv_text(columns())))}
    assert list(rows) == list(OUTCOMES)
    assert float(rows["ddp"]["measured_relative"]) == pytest.approx(1.25)
    assert (rows["async"]["measured_relative"], rows["async"]["staleness_max"]) == ("", "3")
    assert (rows["ddp"]["state_bytes"], rows["ddp"]["test_accuracy"]) == ("8000000", "0.504")
    assert rows["gpipe"]["certificate"] == "failed: a | b <script>alert(1)</script>"


def test_times_of_another_origin_have_other_names() -> None:
    group = time_columns({"single": 1.0, "ddp": 0.25, "gpipe": None, "async": 2.0}, "predicted", batch_size=64)
    assert [column.name for column in group] == [
        "predicted_step_seconds",
        "predicted_examples_per_second",
        "predicted_relative",
    ]
    step, rate, relative = (list(column.cells) for column in group)
    assert (step, rate) == (["1 s", "250 ms", "", "2 s"], ["64", "256", "", "32"])
    assert relative == ["1.00", "4.00", "", "0.50"]
    headings = [column.heading for column in (*columns(), *group) if column.heading.endswith("time of a step")]
    assert headings == ["measured time of a step", "predicted time of a step"]
    assert [column.cells for column in time_columns({"ddp": 2.0}, "x", batch_size=2)][2] == [""]  # without a reference


def test_bytes_of_devices() -> None:
    assert format_range([]) == ""
    assert format_range([3_000_000, 1_500_000]) == "1.5 to 3 MB"
    assert format_range([999, 2_000]) == "999 B to 2 kB"


def page_of(outcomes: Mapping[str, StrategyOutcome], made: Sequence[TableColumn]) -> str:
    panels, notes = curve_panels(outcomes, KINDS, "accuracy"), ["first", "code `--x=<y>` ends", "last"]
    return html_page("a <b> & c", made, outcomes, panels, batch_size=128, advice=["try `this`"], notes=notes)


def test_the_page_needs_no_other_file_and_escapes_text() -> None:
    text = page_of(OUTCOMES, columns())
    page = check_alone(text)
    assert "<title>a &lt;b&gt; &amp; c</title>" in text
    assert "<p>code <code>--x=&lt;y&gt;</code> ends</p>" in text
    body = {row[0]: row for row in page.rows[1:5]}
    assert list(body) == list(OUTCOMES)
    assert body["gpipe"][-1] == "failed: a | b <script>alert(1)</script>"
    below = "examples/s", "state of a device", "in flight, about"  # in tables of their own
    assert body["ddp"] == [column.cells[1] for column in columns() if not column.heading.endswith(below)]


def test_the_page_shows_rates_memory_times_and_curves_with_values() -> None:
    """Bars are relative to the longest one, and points show their values to the pointer."""
    text = page_of(OUTCOMES, columns())
    rows = check_alone(text).rows
    at = rows.index(["strategy", "examples/s", ""])
    assert rows[at + 1 : at + 4] == [["single", "640", ""], ["ddp", "800", ""], ["async", "51 (emulated)", ""]]
    at = rows.index(["strategy", "state of a device", "in flight, about", "together", ""])
    assert rows[at + 1 : at + 4] == [
        ["single", "8 MB", "2 MB", "10 MB", ""],
        ["ddp", "8 MB", "1 MB", "9 MB", ""],
        ["async", "1 to 3 MB", "0 B", "3 MB", ""],
    ]
    widths = [80.0, 100.0, 6.4, 100.0, 90.0, 30.0]  # of 800 examples/s, and of 10 MB
    assert [float(width) for width in re.findall(r"width:([\d.]+)%", text)] == widths
    assert re.findall(r'class="hatched" style="width:([\d.]+)%', text) == ["6.4"]  # the emulation
    at = rows.index(["strategy", "train", "compile", "total"])
    assert rows[at + 1 : at + 3] == [["ddp", "3.25", "1.5", "4.75"], ["async", "5.5", "0", "5.5"]]
    assert ">ddp, time of the steps (s) 1.6: 0.25</text>" in text  # 10 steps of 0.16 s
    assert ">async (emulated), time of the steps (s) 25: 0.125</text>" in text


def test_panels_of_one_kind_have_titles_of_their_own() -> None:
    many = {"single": OUTCOMES["single"], **{f"ddp{number}": OUTCOMES["ddp"] for number in range(9)}}
    panels = curve_panels(many, dict.fromkeys(many, "data_parallel"), "accuracy")
    assert [panel.title for panel in panels] == [f"Validation accuracy, data_parallel ({n} of 2)" for n in (1, 2)]


def test_the_page_has_no_empty_columns_and_begins_with_the_first_note() -> None:
    outcomes = {name: replace(outcome, staleness=None) for name, outcome in OUTCOMES.items()}
    made = comparison_columns(outcomes, batch_size=64, metric="accuracy", metric_format=".1%")
    text = page_of(outcomes, made)
    assert "staleness" in "".join(column.heading for column in made)
    assert "staleness" not in text
    order = ["<p>first</p>", "<table>", "<svg", "<p>try <code>this</code></p>", "<h2>How to read the table</h2>"]
    order += ["<h2>Environment</h2>", "<p>last</p>"]
    places = [text.index(element) for element in order]
    assert places == sorted(places)


def heights(axis: Any) -> list[float]:
    return [bar.get_width() for bars in axis.containers for bar in bars]


def test_pictures_show_the_values_of_the_table() -> None:
    drawn_by_name = draw_pictures(OUTCOMES, KINDS, batch_size=128, metric="accuracy")
    assert list(drawn_by_name) == ["throughput", "accuracy", "memory"]
    throughput, accuracy, memory = (figure.axes[0] for figure in drawn_by_name.values())
    assert heights(throughput) == pytest.approx([640, 800, 51.2])
    bars = {str(bars.get_label()): [bar.get_width() for bar in bars] for bars in memory.containers}
    assert bars == {
        "parameters": [5, 2, 2],
        "gradients": [2, 0, 0],
        "optimizer": [0, 6, 0],
        "other state": [3, 0, 1],
        "activations": [0, 1, 0],
    }
    assert [text.get_text().strip() for text in memory.texts] == ["10 MB", "9 MB", "3 MB"]
    ends = [max(bar.get_x() + bar.get_width() for bar in bars) for bars in zip(*memory.containers, strict=True)]
    assert ends == pytest.approx([10, 9, 3])  # stacked
    drawn = [line for axis in accuracy.figure.axes for line in axis.lines]
    lines = {str(line.get_label()): np.array(line.get_xydata()).tolist() for line in drawn}
    assert lines == {"ddp": [[1.6, 0.25], [3.2, 0.5]], "async": [[25.0, 0.125]]}  # 10 and 20 steps of 0.16 s
    assert [axis.get_title() for axis in accuracy.figure.axes] == ["ddp", "async (emulated)"]


def test_each_curve_is_in_a_panel() -> None:
    """Each with the reference, in the color of its kind, and no text is cut."""
    names = ["single", *(f"exchange_{number}" for number in range(9)), *(f"schedule_{number}" for number in range(6))]
    outcomes = dict.fromkeys(names, OUTCOMES["ddp"])
    kinds = {name: {"e": "data_parallel", "p": "pipeline"}.get(name[0], "single") for name in names}
    kinds |= {name: "pipeline" for name in names if name.startswith("schedule")}
    drawn = draw_pictures(outcomes, kinds, batch_size=128, metric="accuracy")
    axes = drawn["accuracy"].axes
    assert axes[0].get_ylim()[0] > 0.2  # the values are 0.25 and 0.5
    assert [axis.get_title() for axis in axes if axis.get_visible()] == names[1:]
    for name, axis in zip(names[1:], axes, strict=False):
        assert [(line.get_label(), line.get_color()) for line in axis.lines] == [
            (one, COLORS[kinds[one]]) for one in ("single", name)
        ]
    texts = (drawn["accuracy"].get_supxlabel(), drawn["accuracy"].get_supylabel())
    assert texts == ("time of the steps (s)", "validation accuracy")
    for name in ("throughput", "accuracy"):
        patches = {patch.get_label(): patch.get_facecolor() for patch in drawn[name].legends[0].get_patches()}
        assert patches == {kind: to_rgba(COLORS[kind]) for kind in ("single", "data_parallel", "pipeline")}
    for figure in drawn.values():
        figure.draw_without_rendering()
        width = figure.bbox.width
        for axis in figure.axes:
            box = axis.xaxis.label.get_window_extent()
            assert box.x0 >= 0
            assert box.x1 <= width


def problem_of(folder: Path, num_devices: int = 2) -> Any:
    config = configured("configs/default.py", [*overrides(folder), *compare.strategy_settings("single", num_devices)])
    return compare.load(config, cluster.named_cluster("cpu", num_devices))


def overrides(folder: Path) -> list[str]:
    return [*small_arguments(folder), *(f"--config.{key}={value}" for key, value in VALUES.items())]


def write_run(
    workdir: Path, *, examples_per_second: float = 64.0, seconds: float = 60, ids: Sequence[int] = range(48)
) -> None:
    """Write what a finished run of 2 steps leaves in its workdir."""
    workdir.mkdir(parents=True, exist_ok=True)
    result = {"test_accuracy": 0.25, "seconds": {"train": seconds - 10, "compile": 10.0}, "staleness_mean": 0.5}
    result |= {"staleness_max": 2, "examples_per_second": examples_per_second}
    (workdir / "result.json").write_text(json.dumps(result))
    (workdir / "config.json").write_text("{}")
    rows = [{"step": 1, "split": "train", "accuracy": 0.9}, {"step": 2, "split": "validation", "accuracy": 0.125}]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    used = Ledger(workdir / "ledger", steps_per_epoch=8, shard=slice(0, 24), first=0)
    for step, part in enumerate(np.array(ids).reshape(2, -1)):
        used.add(step, part)
    used.write()


def test_an_outcome_of_a_run(tmp_path: Path) -> None:
    loaded = problem_of(tmp_path)
    config = configured("configs/default.py", [*overrides(tmp_path), *compare.strategy_settings("async", 2)])
    plan = strategies.plan(config, loaded.problem, cluster.named_cluster("cpu", 2))
    write_run(tmp_path / "run")
    outcome = runs.read_outcome(config, plan, tmp_path / "run", loaded)
    assert outcome.step_seconds == 24 / 64
    assert outcome.is_emulated
    assert outcome.metric == 0.25
    assert outcome.staleness == (0.5, 2)
    assert outcome.curve == ((2, 0.125),)
    assert outcome.guarantee.startswith("differs: async of 2 workers")
    assert outcome.device_bytes == tuple(plan.device_bytes)
    assert outcome.wire_bytes == plan.wire_bytes > 0
    assert outcome.certificate == ""
    assert sum(outcome.seconds.values()) == 60


def test_the_state_and_what_is_in_flight_are_apart_on_gradients_too(tmp_path: Path) -> None:
    """As for replicas, whose activations are no part of the plan."""
    loaded = problem_of(tmp_path)
    write_run(tmp_path / "run")
    config = configured("configs/default.py", [*overrides(tmp_path), *compare.strategy_settings("gpipe", 2)])
    config.pipeline.executor = "lockstep"
    plan = strategies.plan(config, loaded.problem, cluster.named_cluster("cpu", 2))
    pipeline = runs.read_outcome(config, plan, tmp_path / "run", loaded)
    stashes = [sum(parts.get(part, 0) for part in ("stashes", "transfers")) for parts in plan.memory]
    assert min(stashes) > 0
    assert [*pipeline.device_bytes] == [sum(parts.values()) - n for parts, n in zip(plan.memory, stashes, strict=True)]
    gradients = sum(strategies.in_flight_bytes(plan, loaded.problem).values())
    whole = max(pipeline.device_bytes) + (pipeline.in_flight_bytes or 0)
    assert whole == sum(pipeline.memory.values()) == max(sum(parts.values()) for parts in plan.memory) + gradients


def test_guarantee_and_staleness_of_plans() -> None:
    stages = (StageDelay(("a",), 2, (1, 1), (2, 1)), StageDelay(("b",), 0, (0, 0), (0, 0)))
    exact: Any = SimpleNamespace(differs="older weights", delays=DelayedUpdates(stages, ""))
    lossy: Any = SimpleNamespace(differs="older weights; lossy", delays=DelayedUpdates(stages, "lossy"))
    plain: Any = SimpleNamespace(differs="", delays=None)
    assert runs.find_guarantee(exact) == "differs: older weights; equal to one device with the same delays"
    assert runs.find_guarantee(lossy) == "differs: older weights; lossy"
    assert runs.find_guarantee(plain) == "equal to single"
    assert runs.find_staleness(exact, {}) == (0.75, 2)
    assert runs.find_staleness(plain, {}) is None


def test_only_virtual_time_is_emulated() -> None:
    def emulated(*values: str) -> bool:
        return runs.is_emulated(configured("configs/default.py", [f"--config.{value}" for value in values]))

    assert emulated("strategy=async_data_parallel")
    assert emulated("strategy=swarm")
    assert not emulated("strategy=async_data_parallel", "asynchronous.mode=live")
    assert not emulated("strategy=swarm", "swarm.mode=live")
    assert not emulated("strategy=pipeline")


def test_verdicts(tmp_path: Path) -> None:
    config, path = configs.default_config(), tmp_path / "certificate.json"
    config.optimizer.lr = 0.5
    assert read_verdict(path, config) == ""
    certified = {"outside": [], "batches": [0, 1], "tolerance": {"loss": 1}}
    certified["config"] = configs.changed_keys(config) | {"num_steps": 2}  # the command sets its own length
    for changed, verdict in (
        ({}, "passed, 2 steps"),
        ({"outside": ["x"]}, "failed: 1 error outside the tolerance"),
        ({"tolerance": None}, "no tolerance applies"),
        ({"config": {"optimizer.lr": 0.25}}, "of other settings"),
        (
            {"config": {"optimizer.lr": 0.5, "swarm.peers": 7, "pipeline.schedule": "gpipe"}},
            "passed, 2 steps",
        ),  # unread
        ({"config": {"optimizer.lr": 0.5, "exchange": "zero3"}}, "of other settings"),
    ):
        path.write_text(files.json_text(certified | changed))
        assert read_verdict(path, config) == verdict
    path.write_text("[]")
    with pytest.raises(UserError, match=r"certificate.json is damaged: it is not a certificate \("):
        read_verdict(path, config)


@pytest.mark.parametrize("num_devices", [2, slow(4)])
def test_every_strategy_can_be_planned(num_devices: int) -> None:
    """For the default of the config, with synthetic data instead of a tokenizer."""
    base = ["--config.data.source=synthetic", f"--config.mesh.virtual_cpu_devices={num_devices}"]
    on = cluster.named_cluster("cpu", num_devices)
    settings = {name: [*base, *compare.strategy_settings(name, num_devices)] for name in compare.COMPARED}
    loaded = compare.load(configured("configs/compare_bert.py", settings["single"]), on)
    plans = {
        name: possible_stages(configured("configs/compare_bert.py", of_strategy), loaded.problem, on)
        for name, of_strategy in settings.items()
    }
    assert len(plans) == 19
    assert not [plan for plan in plans.values() if isinstance(plan, str)]
    used = {name: plan.num_devices for name, plan in plans.items() if not isinstance(plan, str)}
    assert used == {name: 1 if name == "single" else num_devices for name in compare.COMPARED}


def test_the_preset_for_gpus() -> None:
    base = configs.load_config("configs/compare_bert.py:base")
    assert (base.model.size, base.optimizer.lr, base.num_epochs, base.batch_size) == ("base", 2e-5, 1.0, 128)
    assert (base.mesh.virtual_cpu_devices, base.data.max_length, base.optimizer.name) == (0, 128, "adamw")
    with pytest.raises(UserError, match="the preset of --config is 'large'; it must be one of small, base"):
        configs.load_config("configs/compare_bert.py:large")


# ---- the script --------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces training by files of a finished run, and returns the options of the runs that are started, by name.

    A function under the key of a strategy runs instead, with its workdir and the signals.
    """
    ran: dict[str, Any] = {"order": [], "instead": {}}

    def run(_: Sequence[str], log: Path, signals: list[int]) -> int:
        ran["order"].append(log.parent.name)
        log.write_text("")
        if log.parent.name in ran["instead"]:
            return int(ran["instead"][log.parent.name](log, signals))
        write_run(log.parent)
        return 0

    monkeypatch.setattr(compare, "run_logged", run)
    monkeypatch.setattr(compare, "find_cluster_apart", lambda *_: cluster.named_cluster("cpu", 2))
    return ran


def flags(folder: Path, *others: str) -> Sequence[str]:
    return "--config=configs/default.py", f"--workdir={folder}/runs", *overrides(folder), *others


def test_failed_and_finished_runs(
    tmp_path: Path, started: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverge(log: Path, _: list[int]) -> int:
        log.write_text("step 1\njaxpar: step 2 has loss nan\n--------------------\nFor simplicity, ..\n")
        return 1

    started["instead"]["zero1"] = diverge
    chosen = "--strategies=zero1,gpipe,dp", "--config.pipeline.num_microbatches=5"  # 24 examples are not divisible
    assert run_script(monkeypatch, command, *flags(tmp_path, *chosen)) == 1
    assert started["order"] == ["single", "dp", "zero1"]
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == [
        "row 1 of 4  single: 375 ms per step; 2:00 left",
        "row 2 of 4  dp: 375 ms per step; 1:00 left",
        "row 3 of 4  zero1: failed: step 2 has loss nan; 0:00 left",
    ]
    assert out[3].startswith("row 4 of 4  gpipe: failed: config.batch_size is 24; it must be a multiple of 5: ")
    rows = {row[0]: row for row in cells_of([line for line in out if line])}
    assert list(rows)[2:] == ["single", "dp", "zero1", "gpipe"]
    assert rows["dp"][2:5] == ["375 ms", "64", "1.00"]
    assert rows["zero1"][-1] == "failed: step 2 has loss nan"
    written = tmp_path / "runs"
    assert (written / "compare.md").read_text().splitlines() == out[out.index("") + 1 : -2]
    assert [row["strategy"] for row in csv.DictReader((written / "compare.csv").read_text().splitlines())] == list(
        rows
    )[2:]
    assert "failed: step 2 has loss nan" in (written / "compare.html").read_text()
    assert all((written / f"{name}.png").stat().st_size > 10_000 for name in ("throughput", "accuracy", "memory"))

    started["order"].clear()
    del started["instead"]["zero1"]
    assert run_script(monkeypatch, command, *flags(tmp_path, *chosen)) == 1  # gpipe
    assert started["order"] == ["zero1"]  # the others are finished
    assert capsys.readouterr().out.splitlines()[2] == "row 3 of 4  zero1: 375 ms per step; 0:00 left"

    started["order"].clear()
    assert run_script(monkeypatch, command, *flags(tmp_path, "--strategies=dp", "--config.seed=1")) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxpar: {tmp_path}/runs/single contains a run with other settings (config.seed: 0 -> 1); ")
    assert not started["order"]


def test_the_table_keeps_finished_runs_with_the_same_settings(
    tmp_path: Path, started: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key that only pipelines read excludes a finished pipeline, and no other strategy."""
    started["instead"]["ssp"] = lambda *_: 1
    assert run_script(monkeypatch, command, *flags(tmp_path, "--strategies=dp,gpipe,async,ssp")) == 1
    out = capsys.readouterr().out  # async differs by design, and ssp failed
    assert "whether gpipe computes what its plan states, for the last column: `jaxpar certify" in out
    assert "To train with single, the fastest: `jaxpar train --config=configs/default.py " in out
    [splits] = re.findall(r"synthetic \((\d+) training, (\d+) validation, (\d+) test examples\)", out)
    assert sum(map(int, splits)) == 400
    started["order"].clear()

    def rows(*arguments: str) -> list[str]:
        assert run_script(monkeypatch, command, *flags(tmp_path, *arguments)) == 0
        capsys.readouterr()
        table = (tmp_path / "runs" / "compare.csv").read_text().splitlines()
        return [row["strategy"] for row in csv.DictReader(table)]

    assert rows("--strategies=zero3") == ["single", "dp", "zero3", "gpipe", "async"]
    assert rows("--strategies=dp", "--config.pipeline.num_microbatches=2") == ["single", "dp", "zero3", "async"]
    assert rows("--strategies=dp") == ["single", "dp", "zero3", "gpipe", "async"]
    assert started["order"] == ["zero3"]
    changed = flags(tmp_path, "--strategies=gpipe", "--config.pipeline.num_microbatches=2")
    _, message = script_error(monkeypatch, capsys, command, *changed)
    assert "runs/gpipe contains a run with other settings (config.pipeline.num_microbatches: 0 -> 2); " in message


def test_other_examples_are_a_failure(
    tmp_path: Path, started: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def other(log: Path, _: list[int]) -> int:
        write_run(log.parent, ids=[*range(47), 48])
        return 0

    started["instead"]["ddp"] = other
    assert run_script(monkeypatch, command, *flags(tmp_path, "--strategies=ddp,horovod")) == 1
    rows = {row[0]: row for row in cells_of([line for line in capsys.readouterr().out.splitlines() if line])}
    assert rows["ddp"][-1] == "failed: the run did not use the same examples as single"
    assert rows["horovod"][-2:] == ["equal to single", "not certified"]


def test_a_signal_stops_the_comparison(
    tmp_path: Path, started: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(_: Path, signals: list[int]) -> int:
        signal.raise_signal(signal.SIGINT)
        assert signals == [signal.SIGINT]
        return 0

    started["instead"]["dp"] = stop
    before = signal.getsignal(signal.SIGINT)
    assert run_script(monkeypatch, command, *flags(tmp_path, "--strategies=dp,ddp")) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert started["order"] == ["single", "dp"]
    *_, stopped, resume = capsys.readouterr().out.splitlines()
    assert stopped == "row 2 of 3  dp: stopped"
    assert resume.startswith("resume    jaxpar compare strategies --config=configs/default.py --workdir=")
    assert resume.endswith("--strategies=dp,ddp")
    assert not (tmp_path / "runs" / "compare.md").exists()


@pytest.mark.usefixtures("started")
def test_predicted_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On 8 devices, pipelines of 3 and 6 layers have 2 and 4 stages, and the times of these meshes."""
    on = cluster.named_cluster("h100", 8)
    for num_layers, num_stages in (1, 2), (4, 4):
        shared = f"--config.model.num_layers={num_layers}", "--config.pipeline.num_microbatches=3"
        chosen = "--strategies=gpipe,async", "--cluster=h100:8", f"--workdir={tmp_path}/{num_layers}", *shared
        assert run_script(monkeypatch, command, *flags(tmp_path, *chosen)) == 0
        out = capsys.readouterr().out
        assert f"\ngpipe: predicted with {num_stages} stages x {8 // num_stages} replicas\n" in out
        mesh = f"--config.mesh.stage={num_stages}", f"--config.mesh.data={8 // num_stages}"
        gpipe = *shared, *mesh, "--config.strategy=pipeline", "--config.pipeline.schedule=gpipe"
        wanted = "strategy=async_data_parallel", "asynchronous.num_workers=8", "mesh.data=8"
        workers = *shared, *(f"--config.{setting}" for setting in wanted)
        seconds = {"gpipe": seconds_of(tmp_path, on, *gpipe), "async": seconds_of(tmp_path, on, *workers)}
        rows = csv.DictReader((tmp_path / str(num_layers) / "compare.csv").read_text().splitlines())
        found = {row["strategy"]: row["predicted_step_seconds"] for row in rows}
        assert {name: float(found[name]) for name in seconds} == pytest.approx(seconds)
        note = "async: predicted with async, 8 workers, mean staleness 7.00"
        assert f"\n{note}\n" in out
        assert f"<p>{html.escape(note)}" in (tmp_path / str(num_layers) / "compare.html").read_text()


def seconds_of(tmp_path: Path, on: cluster.Cluster, *more: str) -> float:
    config = configured("configs/default.py", [*overrides(tmp_path), *more])
    space = make_space(config, on)
    one = predicted(space, config, state_ratios(space.problem))
    assert isinstance(one, Candidate | AsyncCandidate)
    return one.costs.seconds if isinstance(one, Candidate) else one.seconds


MISTAKES = {
    "--strategies=ddp,zero4": "--strategies is 'ddp,zero4'; it must be one or more of single, dp, ddp, horovod, ",
    "--devices=1": "--devices is 1; it must be at least 2",
    "--config.optimizer.lr=-1": "config.optimizer.lr is -1.0; it must be ",
    "--config.data.train=missing.csv --config.data.source=csv": "config.data.train is 'missing.csv'",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(
    mistake: str,
    tmp_path: Path,
    started: Mapping[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, message = script_error(monkeypatch, capsys, command, *flags(tmp_path, *mistake.split()))
    assert message.startswith(MISTAKES[mistake])
    assert "zero4" not in mistake or message.endswith("Did you mean 'zero3'?\n")
    assert not started["order"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["", "/new", "/ddp"])
def test_a_workdir_that_cannot_be_written(
    name: str,
    tmp_path: Path,
    started: Mapping[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The workdir is a file or is inside one, or the directory of a row is a file."""
    file = tmp_path / "runs" / "ddp" if name == "/ddp" else tmp_path / "runs"
    file.parent.mkdir(exist_ok=True)
    file.write_text("kept")
    flag = f"--workdir={tmp_path}/runs{'' if name == '/ddp' else name}"
    out, message = script_error(monkeypatch, capsys, command, *flags(tmp_path, "--strategies=ddp", flag))
    assert message.startswith(f"--workdir is '{tmp_path}/runs{name}', which is ")
    assert message.endswith("; it must be a writable directory\n")
    assert not out
    assert not started["order"]
    assert file.read_text() == "kept"


def test_one_device_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "find_cluster_apart", lambda *_: cluster.named_cluster("cpu", 1))
    _, message = script_error(monkeypatch, capsys, command, *flags(tmp_path))
    assert message.startswith("config.mesh.virtual_cpu_devices is 0; it must be at least 2, ")


CHILD = """
import signal, sys, time
print("ready", flush=True)
signal.signal(signal.SIGINT, lambda *_: (print("saved", flush=True), sys.exit(0)))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
time.sleep(60)
"""


def test_a_run_receives_signals_and_has_time_to_save(tmp_path: Path) -> None:
    log, signals = tmp_path / "log.txt", list[int]()

    def send() -> None:
        while not log.exists() or "ready" not in log.read_text():
            time.sleep(0.01)
        signals.append(signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    assert run_logged([sys.executable, "-c", CHILD], log, signals) == 0
    sender.join()
    assert log.read_text().splitlines() == ["ready", "saved"]


def test_the_reason_of_a_failure() -> None:
    output = (
        "step 1\nTraceback (most recent call last):\n  File x\njax.errors.JaxRuntimeError: INTERNAL: no\n----\nFor ..\n"
    )
    assert compare.reason_of_failure(1, output) == "jax.errors.JaxRuntimeError: INTERNAL: no"
    assert compare.reason_of_failure(2, "jaxpar: config.x is 1; it must be 2\n") == "config.x is 1; it must be 2"
    assert compare.reason_of_failure(-9, output) == "was killed by SIGKILL"
    assert compare.reason_of_failure(3, "hangs\n") == "exited with code 3"


@pytest.mark.slow
def test_trained_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command trains two strategies in processes of their own: ddp equals single, up to rounding."""
    arguments = [one for one in flags(tmp_path, "--strategies=ddp", "--config.num_steps=8") if "mesh.data" not in one]
    on_cpus = ["--config.mesh.virtual_cpu_devices=2"]
    assert run_script(monkeypatch, command, *arguments, *on_cpus) == 0
    [single, ddp] = csv.DictReader((tmp_path / "runs" / "compare.csv").read_text().splitlines())
    assert ddp["test_accuracy"] == single["test_accuracy"]
    assert math.isclose(
        float(ddp["measured_relative"]), float(single["measured_step_seconds"]) / float(ddp["measured_step_seconds"])
    )
    assert int(ddp["sent_bytes"]) > int(single["sent_bytes"]) == 0
    assert (ddp["guarantee"], ddp["certificate"]) == ("equal to single", "not certified")
