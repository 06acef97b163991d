"""Helpers for a run small enough for tests: a one-layer BERT on a CSV file of 200 rows."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar.commands import train
from jaxpar.errors import exit_code

WORDS = ("red", "green", "blue", "cat", "dog", "bird", "runs", "sleeps", "eats", "now")


def write_csv(path: Path, *, rows: int = 200, seed: int = 0) -> Path:
    """Write texts of random words. The label is the first colour in the text, or `none`."""
    rng = np.random.default_rng(seed)
    lines = ["text,label"]
    for number in range(rows):
        words = [WORDS[i] for i in rng.integers(0, len(WORDS), rng.integers(3, 12))]
        label = next((word for word in words if word in WORDS[:3]), "none")
        lines.append(f"{' '.join(words)} {number},{label}")
    path.write_text("\n".join(lines) + "\n")
    return path


def small_arguments(folder: Path) -> list[str]:
    """Return overrides of configs/default.py for 16 steps on `folder`/data.csv, which is created if it is missing."""
    path = folder / "data.csv"
    if not path.exists():
        write_csv(path)
    values = {
        "data.source": "csv",
        "data.train": path,
        "data.vocab_size": 128,
        "data.max_length": 16,
        "model.num_layers": 1,
        "model.hidden_size": 16,
        "model.num_heads": 2,
        "model.mlp_size": 32,
        "mesh.data": 2,
        "batch_size": 24,
        "num_epochs": 2,
        "log.every_steps": 2,
        "log.tensorboard": False,
        "log.curves": False,  # saves the import of matplotlib, almost a second
        "checkpoint.every_steps": 3,
        "optimizer.lr": 0.01,
        "watchdog_seconds": 0,  # pytest uses the single timer of faulthandler
    }
    return [f"--config.{key}={value}" for key, value in values.items()]


def without_texts(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without the keys of texts of `small_arguments`, which have no effect on other data."""
    return [one for one in arguments if not one.startswith(("--config.data.max_length=", "--config.data.vocab_size="))]


def small_config(folder: Path, *overrides: str) -> ConfigDict:
    """Return the config of `small_arguments` with additional overrides."""
    config = configs.default_config()
    configs.override(config, [*small_arguments(folder), *overrides])
    return config


def change_info(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the info of the checkpoint in `folder` and remove the checksum of the info."""
    path = folder / "info" / "metadata"
    info = json.loads(path.read_text())
    del info["checksum"]
    change(info)
    path.write_text(json.dumps(info))


def refused(folder: Path, tmp_path: Path, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command line of a small run with these arguments, which must be refused without writing files.

    Returns the single line on stderr.
    """
    command = ["jaxpar", "--config=configs/default.py", f"--workdir={tmp_path}/run", *small_arguments(folder)]
    assert train.main([*command, *arguments]) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert captured.out == ""
    assert not (tmp_path / "run").exists()
    return str(lines[0])


def run_script(monkeypatch: pytest.MonkeyPatch, script: ModuleType, *arguments: str) -> int:
    """Run a command with these arguments in this process, and return its exit code."""
    name = script.__name__.rpartition(".")[2].split("_")
    monkeypatch.setattr(sys, "argv", ["jaxpar", *name, *arguments])
    return exit_code(lambda: script.main(arguments))


def script_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: ModuleType, *arguments: str
) -> tuple[str, str]:
    """Run a command that refuses its arguments. Return its output, and its message, which must be one line."""
    assert run_script(monkeypatch, script, *arguments) == 2
    out, err = capsys.readouterr()
    [line] = [line for line in err.splitlines() if not line.startswith("planner ")]  # progress, on a slow machine
    assert line.startswith("jaxpar: ")
    return out, line.removeprefix("jaxpar: ") + "\n"
