"""A cache of arrays that are created once and memory-mapped in later runs.

A cache entry is a directory named by the hash of everything that determines its contents. It is renamed into place when
it is complete. `entry.json` records the size of every file, and an entry with missing or truncated files is rebuilt.
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
from jaxpar.files import parse_json, path_state

Facts = dict[str, Any]  # metadata by name; values must be JSON-serializable

_RECORD = "entry.json"


class Entry(NamedTuple):
    """A finished entry: its directory, and the metadata returned by the function that created it."""

    directory: Path
    facts: Facts

    def array(self, name: str) -> np.ndarray:
        """Return the array in `name`.npy, memory-mapped unless the file is small (an empty array cannot be mapped)."""
        path = self.directory / f"{name}.npy"
        array = np.load(path, mmap_mode="r" if path.stat().st_size > 4096 else None)
        assert isinstance(array, np.ndarray)
        return array.view(np.ndarray)  # indexing an np.memmap is slow


def cache_dir(config: ConfigDict) -> Path:
    """Return config.cache_dir, or $JAXPAR_CACHE if that is empty, or ~/.cache/jaxpar if neither is set.

    Raises UserError if it is not a directory and cannot become one.
    """
    path = Path(config.cache_dir or os.environ.get("JAXPAR_CACHE") or "~/.cache/jaxpar").expanduser()
    state = path_state(path)
    if state not in ("is a directory", "does not exist"):
        key = "config.cache_dir" if config.cache_dir else "JAXPAR_CACHE"
        raise UserError(f"{key} is {str(path)!r}, which {state}; it must be a directory, or not exist")
    return path


def fingerprint(facts: Facts) -> str:
    """Return the hash of `facts` as 40 hexadecimal digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:40]


def entry(parent: Path, name: str, make: Callable[[Path], Facts], *, doing: str) -> Entry:
    """Return the entry `name` in directory `parent`, and create it if it is missing or damaged.

    To create it, print `doing` and call `make` with a temporary directory. `make` writes the files of the entry there
    and returns the metadata to record. Raises UserError if `parent` is not writable.
    """
    path, temporary = parent / name, parent / f".{name[:16]}.{uuid.uuid4().hex}"
    facts = _whole(path)
    if facts is not None:
        return Entry(path, facts)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        if path.exists():
            print(f"Cache entry {path} is damaged; rebuilding it", flush=True)
            with contextlib.suppress(FileNotFoundError):  # another process may have moved it already
                path.replace(temporary / "damaged")
                shutil.rmtree(temporary / "damaged")
        print(f"{doing} (only once; cached in {path})", flush=True)
        facts = make(temporary)
        files = sorted(file for file in temporary.iterdir() if file.is_file())
        record = {"sizes": {file.name: file.stat().st_size for file in files}, "facts": facts}
        (temporary / _RECORD).write_text(json.dumps(record))
        for file in (*files, temporary / _RECORD):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        try:
            temporary.rename(path)
        except OSError:
            if _whole(path) is None:  # otherwise another process finished first; its identical entry stays
                raise
    except OSError as error:
        rule = "set config.cache_dir or JAXPAR_CACHE"
        raise UserError(f"the cache {parent} cannot be written: {error}; {rule}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Entry(path, facts)


def _whole(path: Path) -> Facts | None:
    """Return the metadata of the entry, or None if one of its files is missing or does not have the recorded size."""
    try:
        record = parse_json((path / _RECORD).read_text())
        sizes = {name: (path / name).stat().st_size for name in record["sizes"]}
        facts: Facts = record["facts"]
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, KeyError, TypeError):
        return None
    return facts if sizes == record["sizes"] else None
