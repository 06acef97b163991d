import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxpar.data import cache
from jaxpar.errors import UserError


class Maker:
    """Writes a cache entry and counts its calls."""

    calls = 0

    def __call__(self, directory: Path) -> dict[str, Any]:
        self.calls += 1
        np.save(directory / "numbers.npy", np.arange(5000))
        (directory / "empty.npy").write_bytes(b"")
        return {"answer": 42}


def get(parent: Path, make: Callable[[Path], dict[str, Any]]) -> cache.Entry:
    return cache.entry(parent, "name", make, doing="Counting")


def test_an_entry_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make = Maker()
    for _ in range(3):
        entry = get(tmp_path / "deep" / "cache", make)
        assert entry.facts == {"answer": 42}
        assert entry.array("numbers").tolist() == list(range(5000))
    assert make.calls == 1
    assert isinstance(entry.array("numbers").base, np.memmap)
    assert [path.name for path in (tmp_path / "deep" / "cache").iterdir()] == ["name"]
    assert capsys.readouterr().out.splitlines() == [f"Counting (only once; cached in {tmp_path}/deep/cache/name)"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: truncate(entry / "numbers.npy"),
        lambda entry: (entry / "numbers.npy").unlink(),
        lambda entry: truncate(entry / "entry.json"),
        lambda entry: (entry / "entry.json").unlink(),
        lambda entry: (entry / "entry.json").write_text("[]"),
        lambda entry: (entry / "entry.json").write_text("[" * 100_000),
        lambda entry: (entry / "entry.json").write_text('{"sizes": {}}'),
    ],
)
def test_a_damaged_entry_is_made_anew(
    damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make = Maker()
    get(tmp_path, make)
    capsys.readouterr()
    damage(tmp_path / "name")
    assert get(tmp_path, make).array("numbers").tolist() == list(range(5000))
    assert make.calls == 2
    assert capsys.readouterr().out.splitlines()[0] == f"Cache entry {tmp_path}/name is damaged; rebuilding it"
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_a_maker_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def make(directory: Path) -> dict[str, Any]:
        (directory / "half.npy").write_bytes(b"half")
        raise ValueError("broken")

    with pytest.raises(ValueError, match=r"broken"):
        get(tmp_path, make)
    assert not list(tmp_path.iterdir())


def test_a_maker_that_is_killed_leaves_no_entry(tmp_path: Path) -> None:
    code = f"""
import os, signal, pathlib
from jaxpar.data import cache
def make(directory):
    (directory / "half.npy").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
cache.entry(pathlib.Path({str(tmp_path)!r}), "name", make, doing="Dying")
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == -9
    assert not (tmp_path / "name").exists()
    assert get(tmp_path, Maker()).facts == {"answer": 42}


def test_two_at_once_both_get_a_whole_entry(tmp_path: Path) -> None:
    inner = Maker()

    def make(directory: Path) -> dict[str, Any]:
        get(tmp_path, inner)  # another process finishes first
        return Maker()(directory)

    assert get(tmp_path, make).array("numbers").tolist() == list(range(5000))
    assert inner.calls == 1
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.*set config.cache_dir or JAXPAR_CACHE"):
        get(tmp_path / "file" / "inner", Maker())


def test_a_full_disk(tmp_path: Path) -> None:
    def make(_directory: Path) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"No space left on device; set config.cache_dir"):
        get(tmp_path, make)


def test_the_folder(monkeypatch: pytest.MonkeyPatch, config: ConfigDict) -> None:
    monkeypatch.setenv("JAXPAR_CACHE", "/from/environment")
    monkeypatch.setenv("HOME", "/home/someone")
    config.cache_dir = "~/from/config"
    assert cache.cache_dir(config) == Path("/home/someone/from/config")
    config.cache_dir = ""
    assert cache.cache_dir(config) == Path("/from/environment")
    monkeypatch.delenv("JAXPAR_CACHE")
    assert cache.cache_dir(config) == Path("/home/someone/.cache/jaxpar")


def test_the_fingerprint_is_of_all_facts() -> None:
    facts = {"a": 1, "b": [1, 2]}
    assert cache.fingerprint(facts) == cache.fingerprint({"b": (1, 2), "a": 1})
    assert cache.fingerprint(facts) != cache.fingerprint({**facts, "a": 2})
