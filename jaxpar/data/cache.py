"""Arrays that are made once and memory-mapped ever after.

An entry is a directory named by the hash of all that determines its contents. It is written
elsewhere and renamed into place, so one that is there is whole, whoever was killed or wrote the same
at the same time. `entry.json` records the size of every file: an entry that lost some is made anew.
"""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxpar.errors import UserError

Facts = dict[str, Any]  # what JSON can hold

_RECORD = "entry.json"


class Entry(NamedTuple):
    """A finished entry: where it lies, and the facts that its maker returned."""

    directory: Path
    facts: Facts

    def array(self, name: str) -> np.ndarray:
        """The array of file `name`.npy, memory-mapped (an empty one cannot be mapped: read)."""
        path = self.directory / f"{name}.npy"
        array = np.load(path, mmap_mode="r" if path.stat().st_size > 4096 else None)
        assert isinstance(array, np.ndarray)
        return array.view(np.ndarray)  # np.memmap's own indexing is slow


def cache_dir(config: ConfigDict) -> Path:
    """config.cache_dir; where that is empty $JAXPAR_CACHE; where there is none ~/.cache/jaxpar."""
    return Path(config.cache_dir or os.environ.get("JAXPAR_CACHE") or "~/.cache/jaxpar").expanduser()


def fingerprint(facts: Facts) -> str:
    """A hash of facts: 40 hexadecimal digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:40]


def entry(parent: Path, name: str, make: Callable[[Path], Facts], *, doing: str) -> Entry:
    """The entry `name` under `parent`. Where there is no whole one, `make(directory)` writes its files
    (into a temporary directory) and returns its facts; `doing` is printed.

    Raises UserError where `parent` cannot be written to.
    """
    path = parent / name
    facts = _whole(path)
    if facts is not None:
        return Entry(path, facts)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        temporary = parent / f".{name[:16]}.{uuid.uuid4().hex}"
        temporary.mkdir()
    except OSError as error:
        raise UserError(f"{parent}: {error}. Set config.cache_dir or JAXPAR_CACHE.") from None
    try:
        if path.exists():
            print(f"{path} is damaged: making it anew.", flush=True)
            with contextlib.suppress(FileNotFoundError):  # another process may have been quicker
                path.replace(temporary / "damaged")
                shutil.rmtree(temporary / "damaged")
        print(f"{doing} (once: kept in {path})", flush=True)
        facts = make(temporary)
        _finish(temporary, path, facts)
    except OSError as error:
        raise UserError(f"{parent}: {error}. Set config.cache_dir or JAXPAR_CACHE.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Entry(path, facts)


def _finish(temporary: Path, path: Path, facts: Facts) -> None:
    """Record the sizes, flush to disk, rename. Another process may have been quicker: its entry is the same."""
    files = sorted(file for file in temporary.iterdir() if file.is_file())
    record = {"sizes": {file.name: file.stat().st_size for file in files}, "facts": facts}
    (temporary / _RECORD).write_text(json.dumps(record))
    for file in (*files, temporary / _RECORD):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    try:
        temporary.rename(path)
    except OSError:
        if _whole(path) is None:
            raise


def _whole(path: Path) -> Facts | None:
    """The facts of the entry, or None where a file of it is missing or not of the recorded size."""
    try:
        record = json.loads((path / _RECORD).read_text())
        sizes = {name: (path / name).stat().st_size for name in record["sizes"]}
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    facts: Facts = record["facts"]
    return facts if sizes == record["sizes"] else None
