"""Tests of atomic writes and of the lock of a workdir."""

import contextlib
import errno
import fcntl
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxpar import files
from jaxpar.errors import UserError

# Text -> the value, or the start of the message. Python accepts the first three.
JSON: dict[str, Any] = {
    '{"a": 1, "b": {"a": 2}, "a": 3}': "the key 'a' occurs twice",
    "[1, -Infinity]": "-Infinity is not a finite number",
    '{"a": 1e999}': "1e999 is not a finite number",
    "[" * 100_000: "nested more than 100 levels deep",
    '{"a":' * 101 + "1" + "}" * 101: "nested more than 100 levels deep",
    "[" * 900 + "]" * 900: "nested more than 100 levels deep",
    "1" * 5000: "a number has 5000 digits; it must have at most 4000",
    "": "Expecting value",
    '["' + "[" * 1000 + '", 1e3]': ["[" * 1000, 1000.0],
}


@pytest.mark.parametrize("text", JSON)
def test_json_of_others(text: str) -> None:
    if isinstance(JSON[text], list):
        assert files.parse_json(text) == files.parse_json(text.encode()) == JSON[text]
        return
    with pytest.raises(ValueError, match=f"^{JSON[text]}"):
        files.parse_json(text)


def test_json_with_nonfinite_numbers() -> None:
    assert files.parse_json("[Infinity, 1e999, -Infinity]", nonfinite=True) == [math.inf, math.inf, -math.inf]
    assert math.isnan(files.parse_json("NaN", nonfinite=True))
    assert files.parse_json("[" * 100 + "]" * 100) != []


HOLD = "import pathlib, sys; from jaxpar import files\nwith files.locked(pathlib.Path(sys.argv[1])):\n    input()"


def test_a_failed_write_leaves_the_old_text(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "new\udcff")
    assert path.read_text() == "old"


def test_the_error_of_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's errors of writes lack the name."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        files.write_text(tmp_path / "file", "new")
    assert caught.value.filename == str(tmp_path / "file")


def test_a_write_that_fails_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        files.write_text(tmp_path / "folder", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("precious")
    (tmp_path / "file.tmp").symlink_to(tmp_path / "other")
    for text in ("new", "newer"):
        files.write_text(tmp_path / "file", text)
        assert (tmp_path / "file").read_text() == text
    assert (tmp_path / "other").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]


def test_a_workdir_is_locked_until_its_process_ends(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, cwd=Path(__file__).parent.parent
    )
    while not (tmp_path / "run" / ".lock").exists():
        assert process.poll() is None

    def lock_until_refused() -> None:
        while True:  # the process creates the file before it locks it
            with files.locked(tmp_path / "run"):
                pass

    with pytest.raises(UserError, match="which another process is using"):
        lock_until_refused()
    process.kill()
    process.communicate()
    with files.locked(tmp_path / "run"):
        pass


@pytest.mark.parametrize("moved", [True, False])
def test_a_workdir_that_is_moved_or_deleted_during_a_run(moved: bool, tmp_path: Path) -> None:
    """The failure of any write is explained, and a folder at the same place is left alone."""
    workdir = tmp_path / "run"

    def work() -> None:
        with files.locked(workdir):
            workdir.rename(tmp_path / "moved") if moved else shutil.rmtree(workdir)
            if moved:
                workdir.mkdir()
                (workdir / ".lock").touch()  # of another run
            (workdir / "ledger" / "0.jsonl").write_text("line")

    with pytest.raises(
        UserError, match=f"--workdir is '{workdir}', which was moved or deleted during the run; it must"
    ):
        work()
    assert (workdir / ".lock").exists() == moved


def test_text_of_a_device_or_a_pipe_is_refused(tmp_path: Path) -> None:
    """Reading one could last forever, and one that is replaced is lost."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        files.write_text(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo()
    for path in ("/dev/zero", tmp_path / "pipe"):
        with pytest.raises(OSError, match="not a regular file") as caught:
            files.open_text(path)
        assert files.path_error(caught.value) == "which cannot be used (not a regular file)"


def test_a_file_of_a_folder_of_others(tmp_path: Path) -> None:
    """Names and links of others must not lead out of the folder, except into the blobs of Hugging Face's cache."""
    folder, blobs = (tmp_path / name for name in ("snapshots/1a", "blobs"))
    for each in (folder / "inner", blobs):
        each.mkdir(parents=True)
    (blobs / "weights").write_text("numbers")
    (tmp_path / "secret").write_text("of the user")
    for link, target in {"weights": "../../blobs/weights", "same": "weights", "out": "../../secret"}.items():
        (folder / link).symlink_to(target)
    (folder / "in").symlink_to(blobs / ".." / "secret")
    os.mkfifo(folder / "pipe")
    (tmp_path / "latest").symlink_to(folder)
    for top in (folder, tmp_path / "latest"):
        assert [files.file_of(top, name).read_text() for name in ("weights", "same")] == ["numbers"] * 2
        assert files.file_of(top, "missing") == top / "missing"
        refused = {"out": "a link to another folder", "in": "a link to another folder", "pipe": "a device or a pipe"}
        refused |= dict.fromkeys(("../1a/weights", "/etc/passwd", "inner/x", "inner/", "..", ".", ""), "a path")
        for name, state in refused.items():
            reason = re.escape(f"{top}: {name!r} is {state}; it must be a regular file of this folder")
            with pytest.raises(UserError, match=f"^{reason}$"):
                files.file_of(top, name)
    (tmp_path / "snapshots" / "link").symlink_to("../blobs/weights")
    with pytest.raises(UserError, match="'link' is a link to another folder"):
        files.file_of(tmp_path / "snapshots", "link")


def test_a_refused_run_leaves_nothing(tmp_path: Path) -> None:
    """The lock file and the new directories are removed, but not what was there before."""

    def refused(workdir: Path, *, written: str = "") -> None:
        with contextlib.suppress(UserError), files.locked(workdir):
            if written:
                (workdir / written).touch()
            raise UserError("no")

    refused(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    refused(tmp_path / "a" / "b", written="file")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]
    with files.locked(tmp_path / "a" / "b"):
        pass
    refused(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / ".lock").exists()


def test_a_lock_that_is_removed_while_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process can remove the file between opening and locking; a lock on a removed file would lock nothing."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: (tmp_path / ".lock").unlink())
    with pytest.raises(UserError, match="which another process is using"), files.locked(tmp_path):
        pass
