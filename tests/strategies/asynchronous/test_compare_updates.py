import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpar import config as configs
from jaxpar import training
from jaxpar.commands import compare_updates
from jaxpar.compare import updates
from jaxpar.errors import UserError
from jaxpar.strategies.asynchronous import options
from jaxpar.tasks import Score
from jaxpar.tasks.classification import TASK
from scripts.bench import mitigations
from tests.checkpoint.test_private import config as small_run


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the script's calls of the training binary by training a small model in this process."""
    run_program = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        if "train" not in command:  # the run asks git for its commit
            return run_program(command, **options)
        overrides = [argument for argument in command if argument.startswith("--config.")]
        [workdir] = [Path(a.removeprefix("--workdir=")) for a in command if a.startswith("--workdir=")]
        config = small_run()
        configs.override(config, overrides)
        training.train(config, workdir)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)


def compare(*arguments: str) -> None:
    compare_updates.main(["--config=configs/default.py", *arguments])


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_a_straggler_slows_sync_to_its_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(f"--workdir={tmp_path}", "--cases=async+dc_asgd", "--workers=4", "--config.num_steps=16")
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert cells[0][:5] == [
        "updates",
        "straggler",
        "gradients / virtual s",
        "staleness, mean and maximum",
        "test_accuracy",
    ]
    assert cells[0][5] == "recovered"
    by_run = {(row[0], row[1]): row for row in cells[2:]}
    slow = "4 times slower"
    assert by_run.keys() == {(name, which) for name in ("sync", "async", "async+dc_asgd") for which in ("none", slow)}
    assert [by_run["sync", which][2:4] for which in ("none", slow)] == [["4.00", "0.00, 0"], ["1.00", "0.00, 0"]]
    assert by_run["async+dc_asgd", "none"][2] == "4.00"
    assert 3 < float(by_run["async+dc_asgd", slow][2]) < 3.5  # 3.25, except for the end of the run
    assert (tmp_path / "updates.png").stat().st_size > 20_000
    assert (tmp_path / "updates.md").read_text().splitlines() == [line for line in lines if line.startswith("|")]
    accuracy = {key: float(row[4].rstrip("%")) for key, row in by_run.items()}
    lost, left = (accuracy["sync", "none"] - accuracy[name, "none"] for name in ("async", "async+dc_asgd"))
    formatted = by_run["async+dc_asgd", "none"][5]
    assert formatted == ("nothing lost" if lost == 0 else f"{round(100 * (1 - left / lost))}%")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    assert len(before) == 6
    compare(f"--workdir={tmp_path}", "--cases=sync", "--workers=4", "--config.num_steps=16")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")} == before  # nothing was run again
    with pytest.raises(UserError, match="sync_1 contains a run with other settings"):
        compare(f"--workdir={tmp_path}", "--cases=sync", "--workers=4", "--config.num_steps=12")


def test_the_rate_is_divided_by_the_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {}

    def run(_config: str, workdir: Path, overrides: list[str]) -> updates.UpdatesOutcome:
        config = configs.default_config()
        configs.override(config, overrides)
        rates[workdir.name] = config.optimizer.lr
        result = {"test_accuracy": 0.5, "staleness_mean": 0.0, "staleness_max": 0}
        return updates.UpdatesOutcome(np.arange(2), np.ones(2), np.arange(2.0), result, 4.0)

    monkeypatch.setattr(updates, "train_updates", run)
    cases = f"--cases={updates.RATE}", "--slowdown=2"
    compare(f"--workdir={tmp_path}", *cases, "--workers=4", "--config.optimizer.lr=0.2")
    expected = {"sync": 0.2, "async": 0.2, "async_rate_n": 0.05}
    assert rates == {f"{name}_{slowdown}": rate for name, rate in expected.items() for slowdown in (1, 2)}


def test_recovered_of_a_loss_and_of_a_perplexity() -> None:
    def outcomes(figure: str, *ends: float) -> Any:
        names = ("sync", "async", "async+dc_asgd")
        return {(name, 1.0): SimpleNamespace(result={figure: end}) for name, end in zip(names, ends, strict=True)}

    def recovered(figure: str, *ends: float) -> str:
        score = Score(figure, "", is_exponential=figure == "perplexity")
        return updates.recovered(outcomes(figure, *ends), "async+dc_asgd", 1.0, score)

    assert recovered("test_loss", 1.0, 3.0, 2.5) == "25%"
    assert recovered("perplexity", 10.0, 1000.0, 100.0) == "50%"
    assert recovered("test_accuracy", 0.6, 0.1, 0.7) == "120%"
    assert recovered("train_loss", 1.0, 1.0, 1.0) == "nothing lost"


def test_a_case_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"--cases is 'sync,asink'; .* one or more of sync, .* you mean 'async'\?$"):
        compare("--cases=sync,asink")


def test_a_case_that_diverges() -> None:
    steps, losses = np.arange(1, 5), np.array([4.0, 3.0, 2.0, 1.0])
    result = {"test_accuracy": 0.5, "staleness_mean": 0.0, "staleness_max": 0}
    fine = updates.UpdatesOutcome(steps, losses, steps * 1.0, result, 4.0)
    lost = updates.UpdatesOutcome(steps[:1], losses[:1], np.array([np.nan]), None, np.nan)
    outcomes = {("sync", 1.0): fine, ("async", 1.0): lost, ("async+dc_asgd", 1.0): fine}
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in updates.update_rows(outcomes, TASK.score)]
    assert cells[2] == ["sync", "none", "4.00", "0.00, 0", "50.00%", "", "1"]
    assert cells[3] == ["async", "none", "", "", "diverged", "", ""]
    assert cells[4][5] == "async diverged"


def test_the_picture_of_all_cases() -> None:
    """No panel has more curves than colors, and equal curves differ in color, width and marked points."""
    steps = np.arange(5, 205, 5)
    outcomes = {
        (name, slowdown): updates.UpdatesOutcome(steps, 1 / steps, slowdown * steps, {"updates": 40}, 1.0)
        for name in updates.UPDATE_CASES
        for slowdown in (4.0, 1.0)
    }
    outcomes["ssp", 4.0] = updates.UpdatesOutcome(steps[:1], np.ones(1), np.full(1, np.nan), None, np.nan)
    figure: Any = updates.draw_updates(outcomes)
    panels = [{str(line.get_label()): line for line in axis.lines} for axis in figure.axes]
    ways = [name for name in updates.UPDATE_CASES if "+" not in name]
    mitigated = ["sync", "async", *(name for name in updates.UPDATE_CASES if "+" in name)]
    diverged = [name.replace("ssp", "ssp (diverged)") for name in ways]
    assert [list(lines) for lines in panels] == [ways, mitigated, diverged, mitigated]
    assert [lines["sync"].get_xdata()[-1] for lines in panels] == [200, 200, 800, 800]
    assert {axis.get_xlabel() for axis in figure.axes} == {"virtual seconds"}
    for lines in panels:
        marks = [line.get_markevery() for line in lines.values()]
        marked = [point for first, every in marks for point in range(first, len(steps), every)]
        assert len(marked) == len(set(marked)) == 5 * len(lines)
        for looks in ("color", "linewidth", "marker"):
            assert len({line.properties()[looks] for line in lines.values()}) == len(lines)
    shown = [text.get_text() for text in figure.axes[2].get_legend().get_texts()]
    assert shown == [*ways, "ssp (diverged)"]


@pytest.mark.parametrize("row", mitigations.ROWS)
def test_rows_of_the_benchmark_of_mitigations(row: str) -> None:
    config = configs.default_config()
    configs.override(config, ["--config.strategy=async_data_parallel", *mitigations.chosen(row)])
    options.decide_updates(config)
    policy, _, rest = row.partition("+")
    name, _, strength = rest.partition(" dc_strength=")
    assert config.asynchronous.policy == policy
    assert options.named_mitigations(config) == ([name] if name else [])
    assert config.asynchronous.dc_strength == (float(strength) if strength else None)
