"""Tests of atomic writes and of the lock of a workdir."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar import files
from jaxpar.errors import UserError

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
