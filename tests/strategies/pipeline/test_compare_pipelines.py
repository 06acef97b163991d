"""Tests of jaxpar compare pipelines: the table, its times, and runs that are not repeated."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpar import config as configs
from jaxpar import training
from jaxpar.choose.costs.step import StepCosts
from jaxpar.commands import compare_pipelines
from jaxpar.compare import pipelines
from jaxpar.compare.pipelines import (
    PIPELINE_CASES,
    PipelineCase,
    PipelineOutcome,
    steps_to,
)
from tests.checkpoint.test_private import VALUES
from tests.runs import run_script, script_error, small_arguments


def test_the_table() -> None:
    cases = {
        "1f1b": PipelineCase([], 8, StepCosts(0.2, 0.14, waiting=0.02, exposed=0.03, update=0.01, nbytes=1e6)),
        "pipedream": PipelineCase([], 8, StepCosts(0.1, 0.075, waiting=0.025, exposed=0, update=0, nbytes=1e6)),
        "ddp": PipelineCase([], None, StepCosts(0.4, 0.4, waiting=0, exposed=0, update=0, nbytes=2e6)),
        "gpipe": PipelineCase([], 8, StepCosts(0.1, 0.1, waiting=0, exposed=0, update=0, nbytes=1e6)),
    }
    outcomes = {
        "1f1b": PipelineOutcome([10, 20, 30], [0.1, 0.8, 0.9], diverged=False),
        "pipedream": PipelineOutcome([10, 20, 30], [0.1, 0.5, 0.7], diverged=False),
        "ddp": PipelineOutcome([10, 20, 30], [0.1, 0.5, 0.69], diverged=False),
        "gpipe": PipelineOutcome([], [], diverged=True),
    }
    assert [steps_to(outcome, 0.7) for outcome in outcomes.values()] == [20, 30, None, None]
    lines = pipelines._rows(cases, outcomes, 0.7, "accuracy")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0][4:7] == ["steps to 70%", "time to 70%", "relative to 1f1b"]
    assert cells[2] == ["1f1b", "8", "200 ms", "25.0%", "20", "4 s", "1.00", "1 MB", "90.00%"]
    assert cells[3] == ["pipedream", "8", "100 ms", "25.0%", "30", "3 s", "0.75", "1 MB", "70.00%"]
    assert cells[4] == ["ddp", "", "400 ms", "0.0%", "not reached", "", "", "2 MB", "69.00%"]
    assert cells[5][4:] == ["not reached", "", "", "1 MB", "diverged"]


def flags(tmp_path: Path, *others: str) -> Sequence[str]:
    overrides = [*small_arguments(tmp_path), *(f"--config.{key}={value}" for key, value in VALUES.items())]
    return "--config=configs/default.py", f"--workdir={tmp_path}/runs", *overrides, *others


def arguments_of(command: Sequence[str]) -> tuple[Path, list[str]]:
    [workdir] = [Path(a.removeprefix("--workdir=")) for a in command if a.startswith("--workdir=")]
    return workdir, [argument for argument in command if argument.startswith("--config.")]


def test_finished_runs_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = {}

    def run(command: Sequence[str], **_: Any) -> SimpleNamespace:
        workdir, overrides = arguments_of(command)
        config = configs.default_config()
        configs.override(config, overrides)
        started[workdir.name] = config
        rows = [{"step": step, "split": "validation", "accuracy": step / 10} for step in (2, 8)]
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name in ("config.json", "result.json"):
            (workdir / name).write_text("{}")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    assert run_script(monkeypatch, compare_pipelines, *flags(tmp_path)) == 0
    first = capsys.readouterr().out.splitlines()
    assert set(started) == set(PIPELINE_CASES)
    sizes = {name: (config.mesh.data, config.mesh.stage) for name, config in started.items()}
    assert sizes == {name: (2, 1) if name == "ddp" else (1, 2) for name in PIPELINE_CASES}
    pipelines = {name: config.pipeline for name, config in started.items() if name != "ddp"}
    assert {name: c.num_microbatches for name, c in pipelines.items() if c.num_microbatches != 8} == {
        "pipedream_unsplit": 1
    }
    assert pipelines["pipedream_unsplit"].schedule == pipelines["pipedream"].schedule == "pipedream"
    assert (tmp_path / "runs" / "pipelines.png").stat().st_size > 20_000
    lines = (tmp_path / "runs" / "pipelines.md").read_text().splitlines()
    assert lines[0].startswith("2 x Tesla V100-SXM2-32GB, each 15.7 TFLOP/s in float32 and 900 GB/s of memory; links")
    assert first[-len(lines) - 2 : -2] == lines
    cells = {row[0]: row for row in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:])}
    assert list(cells) == list(PIPELINE_CASES)
    assert {row[4] for row in cells.values()} == {"8"}
    started.clear()

    slower = "--latency=0.01", "--target=0.9", "--cases=ddp"  # these flags do not change the runs
    assert run_script(monkeypatch, compare_pipelines, *flags(tmp_path, *slower)) == 0
    later = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert not started
    assert [row[0].strip() for row in later[2:]] == ["ddp", "1f1b"]
    assert {row[4].strip() for row in later[2:]} == {"not reached"}
    slowed = float(cells["ddp"][2].split()[0]) + 20  # in ms, by the two hops of one all-reduce
    assert float(later[2][2].split()[0]) == pytest.approx(slowed, rel=0.01)

    assert run_script(monkeypatch, compare_pipelines, *flags(tmp_path, "--config.seed=1", "--cases=1f1b")) == 2
    assert "1f1b contains a run with other settings" in capsys.readouterr().err


@pytest.mark.slow
def test_trained_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """ddp and 1f1b train alike up to rounding, with the same batches."""

    def run(command: Sequence[str], **_: Any) -> SimpleNamespace:
        workdir, overrides = arguments_of(command)
        config = configs.default_config()
        configs.override(config, overrides)
        training.train(config, workdir)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    others = "--cases=ddp,pipedream", "--config.eval.every_steps=4", "--target=0"
    assert run_script(monkeypatch, compare_pipelines, *flags(tmp_path, *others)) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = {row[0].strip(): [cell.strip() for cell in row] for row in rows[2:]}
    assert {row[4] for row in cells.values()} == {"4"}
    assert cells["ddp"][-1] == cells["1f1b"][-1]
    losses = [
        [row["loss"] for row in map(json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines())]
        for name in ("ddp", "1f1b", "pipedream")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[2] != pytest.approx(losses[1], rel=1e-4)


MISTAKES = {
    "--cases=1f1b,zbh1": "--cases is '1f1b,zbh1'; it must be one or more of ddp, gpipe, 1f1b, zb_h1, pipedream, ",
    "--stages=1": "--stages is 1; it must be at least 2",
    "--target=60": "--target is '60'; it must be a number between 0 and 1",
    "--device=V10": "--device is 'V10'; it must be one of a100-40gb, ",
    "--bandwidth=0": "--bandwidth is '0'; it must be at least 1 byte per second",
    "--latency=-1": "--latency is '-1'; it must be a time between 0 and 1e+30",
    "--num_microbatches=1": "config.pipeline.num_microbatches is 1; it must be at least 2 for schedule pipedream_2bw",
    "--stages=3 --config.pipeline.replicas=2,1": "config.pipeline.replicas is 2,1; it must be empty, ",
    "--config.data.validation_fraction=0": "config.data has no validation split; it must have one, ",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = flags(tmp_path, *mistake.split())
    _, message = script_error(monkeypatch, capsys, compare_pipelines, *arguments)
    assert message.startswith(MISTAKES[mistake])
    assert not (tmp_path / "runs").exists()
