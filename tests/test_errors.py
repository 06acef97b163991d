"""Tests of the texts in error messages."""

import errno
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxpar import command_line, errors
from jaxpar.commands import train
from jaxpar.errors import exit_code, format_bytes, most_similar, nearest

ROOT = Path(__file__).parent.parent

CONFIGS = ("configs/default.py", "configs/gpt_wordnet.py", "configs/vit_cifar10.py")
KEYS = ("optimizer.lr", "optimizer.b1", "optimizer.eps", "data.train")


@pytest.mark.parametrize(
    ("name", "choices", "expected"),
    [
        ("asink", ["sync", "async", "ssp"], "async"),
        ("tarin.csv", ["train.csv", "test.csv"], "train.csv"),
        ("configs/defualt.py", CONFIGS, "configs/default.py"),
        ("cofigs/default.py", CONFIGS, "configs/default.py"),
        ("configs/nope.py", CONFIGS, None),
        ("optimizer.lrr", KEYS, "optimizer.lr"),
        ("optimzer.lr", KEYS, "optimizer.lr"),
        ("optimizer.momentum2", KEYS, None),
        ("txt", ["text", "label"], "text"),
        ("anything", [], None),
    ],
)
def test_the_most_similar_name(name: str, choices: list[str], expected: str | None) -> None:
    """Common sections, folders and extensions make no names similar."""
    assert most_similar(name, choices) == expected
    assert nearest(name, choices) == (f" Did you mean {expected!r}?" if expected else "")


def test_units() -> None:
    numbers = {0: "0 B", 999: "999 B", 1000: "1 kB", 12_345: "12.3 kB", 999_900: "1 MB", 80e9: "80 GB"}
    assert {number: format_bytes(number) for number in numbers} == numbers
    assert format_bytes(1.54e12) == "1.54 TB"
    assert format_bytes(2e18) == "2e+03 PB"


@pytest.mark.parametrize("is_closed", [True, False])
def test_the_exit_code_without_a_reader_of_the_errors(is_closed: bool) -> None:
    """The standard error can be closed, or be a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    code = f"import sys{'; sys.stderr = None' * is_closed}; from jaxpar import errors; sys.exit(errors.fail('no'))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writer, cwd=ROOT, check=False)
    os.close(writer)
    assert (done.returncode, done.stdout) == (2, b"")


def test_the_middle_of_a_long_line_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.fail("a" * 5000 + "\x1b[31mz") == 2
    line = capsys.readouterr().err
    assert line.startswith("jaxpar: aaaa")
    assert line.endswith("\\x1b[31mz\n")
    assert len(line) < errors.LONGEST_LINE + 20


ENDS = """
import sys
def get_config(how):
    if how == "exit":
        sys.exit(0)
    elif how == "quit":
        quit()
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize(("how", "line"), [("exit", 5), ("quit", 7), ("interrupt", 8)])
def test_a_config_that_ends_the_process(
    how: str, line: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(ENDS)
    assert train.main(["jaxpar", f"--config={path}:{how}", f"--workdir={tmp_path}/run"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"jaxpar: {path}, line {line}")
    assert message.count("\n") == 1


def test_a_model_that_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check it for the command jaxpar and for scripts."""
    (tmp_path / "ending_models").mkdir()
    path = tmp_path / "ending_models" / "mine.py"
    path.write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["--config=configs/default.py", "--config.model.name=ending_models.mine", f"--workdir={tmp_path}/run"]
    assert train.main(["jaxpar", *arguments]) == 2

    def script() -> None:
        runpy.run_path(str(path))

    assert exit_code(script) == 2
    expected = f"jaxpar: {path}, line 1, raised SystemExit(); it must not end the run\n"
    assert capsys.readouterr().err == 2 * expected


def test_scripts_end_by_help_and_signals() -> None:
    with pytest.raises(SystemExit) as caught:
        exit_code(lambda: command_line.Parser("").parse(["--help"]))  # type: ignore[arg-type, return-value]
    assert not caught.value.code


@pytest.mark.parametrize("run", [lambda raises: exit_code(raises), None], ids=["script", "train"])
def test_a_full_disk_for_the_output_and_long_names(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "x" * 300
    cases = {
        "the standard output cannot be written: No space left on device": OSError(
            errno.ENOSPC, "No space left on device"
        ),
        f"--workdir is '/runs/{'x' * 53}...; each name in a path must have at most 255 bytes": OSError(
            errno.ENAMETOOLONG, "File name too long", f"/runs/{name}/checkpoints"
        ),
        f"config.data.train is '{'y' * 59}...; each name": OSError(errno.ENAMETOOLONG, "File name too long", "y" * 300),
    }
    argv = ["jaxpar", f"--workdir=/runs/{name}", "--config.data.train", "y" * 300]
    monkeypatch.setattr("sys.argv", argv)
    monkeypatch.setattr(errors, "discard", lambda _stream: None)
    for message, error in cases.items():

        def raises(*_: object, error: OSError = error) -> int:
            raise error

        monkeypatch.setattr(train, "_main", raises)
        assert (run(raises) if run else train.main(argv)) == 2
        assert capsys.readouterr().err.startswith(f"jaxpar: {message}")
