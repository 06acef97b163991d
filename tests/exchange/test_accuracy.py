"""Tests of the script that compares the accuracy of exchanges, with results that are not from training."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpar import config as configs
from jaxpar.errors import UserError
from jaxpar.exchange import EXCHANGES
from jaxpar.exchange.named import check_options
from jaxpar.strategies.exchanges import given
from scripts.bench import accuracy


def compare(monkeypatch: pytest.MonkeyPatch, *arguments: str, codes: dict[str, int] | None = None) -> list[str]:
    """Run the script. Return the exchanges in the order of their runs. codes: exit codes other than 0, by exchange."""
    ran = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        config = configs.default_config()
        configs.override(config, [argument for argument in command if argument.startswith("--config.")])
        check_options(config.exchange, config.mesh.data, given(config))
        ran.append(config.exchange)
        code = (codes or {}).get(config.exchange, 0)
        if code == 0:
            [workdir] = [Path(a.removeprefix("--workdir=")) for a in command if a.startswith("--workdir=")]
            workdir.mkdir(parents=True)
            score = 0.5 + 0.1 * config.seed - 0.25 * (config.exchange != "ddp")
            (workdir / "result.json").write_text(json.dumps({"test_accuracy": score, "wire_bytes": 2e6}))
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["accuracy.py", "--config=configs/default.py", *arguments])
    accuracy.main()
    return ran


def test_rows_without_names_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows support the optimizer of the config."""
    changing = [name for name, one in EXCHANGES.items() if one.differs]
    variants = [row.split()[0] for row in accuracy.VARIANTS]
    assert compare(monkeypatch, f"--workdir={tmp_path / 'adamw'}") == ["ddp", *changing, *variants]
    ran = compare(monkeypatch, f"--workdir={tmp_path / 'sgd'}", "--config.optimizer.name=sgd")
    of_adamw = {"bagua_qadam", "onebit_adam"}
    assert ran == ["ddp", *(name for name in changing if name not in of_adamw), *variants]
    alone = compare(monkeypatch, f"--workdir={tmp_path / 'alone'}", "--replicas=1")
    assert "bagua_decentralized" not in alone  # it needs at least two replicas
    assert "bagua_bytegrad" in alone


def test_rows_are_compared_with_the_first_one_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(monkeypatch, f"--workdir={tmp_path}", "--exchanges=zero1", codes={"ddp": 1})
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["ddp", "1", "of", "1", "runs", "diverged"], ["zero1", "25.00%", "2.000"]]


def test_rows_are_means_over_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"--workdir={tmp_path}", "--seeds=2", "--exchanges=byteps_onebit group=2,zero1"
    ran = compare(monkeypatch, *arguments, codes={"zero1": 1})
    assert ran == ["ddp", "ddp", "byteps_onebit", "byteps_onebit", "zero1", "zero1"]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [
        ["ddp", "55.00%", "+0.00%", "2.000", "50.00%", "to", "60.00%"],
        ["byteps_onebit", "group=2", "30.00%", "-25.00%", "2.000", "25.00%", "to", "35.00%"],
        ["zero1", "2", "of", "2", "runs", "diverged"],
    ]
    assert compare(monkeypatch, *arguments, codes={"zero1": 1}) == ["zero1", "zero1"]  # the others have results


def test_a_run_that_is_refused_ends_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"ddp/0 ended with exit code 2, for the reason above$"):
        compare(monkeypatch, f"--workdir={tmp_path}", codes={"ddp": 2})
