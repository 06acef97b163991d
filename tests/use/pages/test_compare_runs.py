"""`jaxpar compare runs`: the table, the page and the mistakes."""

from pathlib import Path

import pytest

from jaxpar.commands import compare_runs
from jaxpar.commands.compare_runs import comparison_page
from jaxpar.use.pages.recorded import read_run
from tests.html_pages import check_alone
from tests.runs import run_script, script_error
from tests.use.pages.recorded_runs import write_run


def test_the_table_and_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = write_run(tmp_path / "a"), write_run(tmp_path / "b<i>", "optimizer.lr=0.25", finished=False)
    (other / "checkpoints" / "41").mkdir(parents=True)  # saved when it was stopped, after the last log interval
    output = tmp_path / "comparison.html"
    assert run_script(monkeypatch, compare_runs, str(one), str(other), f"--output={output}") == 0
    lines = [[word for word in line.split("  ") if word] for line in capsys.readouterr().out.splitlines()]
    cells = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines if line}
    assert cells["state"] == ["stopped early", "unfinished"]
    assert cells["steps"] == ["40", "41"]
    assert cells["test accuracy"] == ["0.6719"]
    assert cells["examples per second"] == ["1,242"]
    assert cells["optimizer.lr"] == ["0.001", "0.25"]
    assert "seed" not in cells
    page = check_alone(output.read_text())
    assert ["", str(one), str(other)] in page.rows
    assert ["test loss", "0.6094", ""] in page.rows
    assert f"{one} reached test accuracy 67.19%." in "".join(page.texts)
    assert ["seconds of the last start, compile", "2.25", ""] in page.rows
    assert ": The validation loss was lowest at step 30" in "".join(page.texts)  # in what to try
    assert ["optimizer.lr", "0.001", "0.25"] in page.rows
    assert [text for text in page.texts if text.endswith(("train", "validation"))] == [
        *("Loss (nats), train", "Loss (nats), validation", "Accuracy, train", "Accuracy, validation")
    ]
    assert page.texts.count(f"{other} ") == 6  # in the legend of each curve


def test_losses_in_different_units_are_in_different_charts(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", "task=regression", finished=False)
    text = comparison_page([read_run(one), read_run(other)])
    of_charts = {}
    for figure in text.split("<figure")[1:]:
        title = figure.partition("<figcaption>")[2].partition("<")[0]
        of_charts[title] = [name for name in (one, other) if f">{name} <data" in figure]
    assert of_charts["Loss (nats), train"] == of_charts["Loss (nats), validation"] == [one]
    assert of_charts["Loss (mean squared error), train"] == [other]
    assert of_charts["Accuracy, train"] == [one, other]  # the files of both have it
    assert "R2, train" not in of_charts  # without points


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one, empty, damaged = (write_run(tmp_path / name) for name in ("one", "empty", "damaged"))
    (empty / "metrics.jsonl").write_text("")
    (damaged / "result.json").write_text("[]")
    (tmp_path / "there.html").touch()
    nowhere = tmp_path / "nowhere" / "c.html"
    too_long = tmp_path / f"{'x' * 300}.html"
    for arguments, message in {
        (): "the argument RUNS is missing; it must be set, as in runs/a runs/b",
        (one,): f"the argument RUNS is {one}; it must be at least two workdirs, as in runs/a runs/b",
        (one, one): f"the argument RUNS contains {one} twice; each workdir must be another one",
        (one, tmp_path): f"{tmp_path} contains no run: {tmp_path}/config.json does not exist",
        (one, empty): f"{empty} contains a run without metrics; train it until its first log line",
        (
            one,
            damaged,
        ): f"{damaged}/result.json is damaged (it is not a JSON object); delete it and start the run again",
        (one, empty, f"--output={tmp_path}/there.html"): f"--output is '{tmp_path}/there.html', which exists; it must "
        "be a new file",
        (one, empty, f"--output={nowhere}"): f"--output is '{nowhere}'; it must be in an existing directory, and "
        f"'{nowhere.parent}' is not one",
        (one, empty, f"--output={too_long}"): f"--output is '{too_long}'; it must be a writable file: File name too "
        "long",
    }.items():
        out, error = script_error(monkeypatch, capsys, compare_runs, *map(str, arguments))
        assert (out, error) == ("", f"{message}\n")
