"""Files of a workdir: writes are atomic, and a lock lets only one process use the workdir at a time."""

import contextlib
import csv
import errno
import fcntl
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from jaxpar.errors import UserError

DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM),
    errno.ENAMETOOLONG,
)
_OS_ERROR = r"(?:os_error_code='|OS error )(\d+)"  # in tensorstore's messages; the form depends on its version

MOST_CHARACTERS = 131_072  # of a value in a table of a user
# What a run writes into its workdir, and what it contains; docs/reference/files.md lists it.
FOLDERS = {
    "checkpoints": "[saved steps](checkpoint.md)",
    "ledger": "the [examples](../explanation/checkpoints.md#ledger) of each step, a file per process",
    "tensorboard": "event files, with `config.log.tensorboard`",
    "profile": "the trace of `config.profile`",
    "outer": "the state of a worker with an [outer step](../howto/diloco.md)",
}
FILES = {
    "config.json": "the config of the last start",
    "starts.jsonl": "each start: step, date, devices, changed keys, lost processes",
    "metrics.jsonl": "the metrics of each log interval and evaluation",
    "result.json": "the [results](report.md)",
    "report.html": "the same as a page, with curves, times, memory and config",
    "curves.png": "the loss and the metric of the task",
    "confusion.png": "the confusion matrix",
    "timeline.png": "the planned and the measured actions of a pipeline, with `config.pipeline.trace`",
    "data.json": "sizes, columns and classes of the data",
    "tokenizer.json": "the tokenizer",
    "profile.json": "the measured times of the layers, with `config.pipeline.partition=auto`",
    "updates.csv": "the updates of an asynchronous run",
    "routing.csv": "the routes of a swarm",
    "scenario.json": "the peers of an emulated swarm, and when they fail",
    "certified": "the certified steps, with `config.certify_every`",
    ".lock": "locked while a process trains",
}


def run_of(path: Path) -> Path | None:
    """Return the workdir of the run that writes this path, or a folder that it is in; None if there is none."""
    path = path.resolve()
    for folder in (path, *path.parents):
        inside = path.relative_to(folder).parts
        with contextlib.suppress(OSError):  # a folder that cannot be read
            is_run = (folder / "starts.jsonl").is_file()
            is_run |= (folder / "config.json").is_file() and (folder / "checkpoints").is_dir()  # of earlier versions
            if is_run and (not inside or inside[0].removesuffix(".tmp") in (*FOLDERS, *FILES)):
                return folder
    return None


def disk_error(error: BaseException) -> str | None:
    """Return the reason, such as `No space left on device`, of a disk error that the user must fix; None for others."""
    numbers = [error.errno] if isinstance(error, OSError) else map(int, re.findall(_OS_ERROR, str(error)))
    return next((os.strerror(number) for number in numbers if number in DISK_ERRORS), None)


_STATES = {
    errno.ENOENT: "which does not exist",
    errno.EISDIR: "which is a directory",
    errno.EEXIST: "which is a file",
    errno.ENOTDIR: "which is inside a file",
}


def path_error(error: OSError) -> str:
    """Return the reason why a path cannot be used, as a clause that follows the path in an error message."""
    return _STATES.get(error.errno or 0, f"which cannot be used ({error.strerror})")


def read_csv(file: Iterable[str], first: int = 1) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of its last line and the values of each row, also of empty ones. Raises ValueError."""
    csv.field_size_limit(MOST_CHARACTERS)  # a setting of the process, which data of longer texts raises
    reader = csv.reader(file, strict=True)
    try:
        for row in reader:
            yield reader.line_num + first - 1, row
    except csv.Error as error:
        rule = f"quotes must be closed, and values must have at most {MOST_CHARACTERS:,} characters"
        raise ValueError(f"line {reader.line_num + first - 1}: {error}; {rule}") from error


def path_state(path: Path) -> str:
    """Return what a path is, or why it is nothing, as a clause that follows `PATH, which` in an error message."""
    try:
        path.stat()
    except OSError as error:
        return path_error(error).removeprefix("which ")
    return "is a directory" if path.is_dir() else "is a file" if path.is_file() else "is a device or a pipe"


def unreadable(path: str | Path, error: Exception) -> str:
    """Return the end of an error message: a CSV file, why it cannot be read, and what it must be."""
    if isinstance(error, OSError):
        return f"{str(path)!r}, {path_error(error)}; it must be the path of a CSV file"
    if isinstance(error, UnicodeDecodeError):
        return f"{str(path)!r}: byte {error.object[error.start]:#x} is not UTF-8; the file must be CSV in UTF-8"
    return f"{str(path)!r}: {error}"


def regular(path: str | Path) -> Path:
    """Return the path. Raises OSError for a device or a pipe, which could be read forever and must not be replaced."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path


def open_text(path: str | Path) -> TextIO:
    """Open a user's text file in UTF-8. Raises OSError also for a device or a pipe."""
    return regular(path).open(newline="", encoding="utf-8-sig")


def file_of(folder: Path, name: str) -> Path:
    """Return the path of a file, which can be missing, in a folder that others made, as they can have chosen `name`.

    Raises UserError for a path, a device, a pipe, and a link to elsewhere, except to the blobs of Hugging Face's cache.
    """
    path, real, top = folder / name, os.path.realpath(folder / name), Path(os.path.realpath(folder))
    blobs = top.parent.parent / "blobs" if top.parent.name == "snapshots" else top
    if name in ("", "..") or Path(name).name != name:
        state = "a path"
    elif path.is_symlink() and Path(real).parent not in (top, blobs):
        state = "a link to another folder"
    elif path.exists() and not path.is_file() and not path.is_dir():
        state = "a device or a pipe"
    else:
        return path
    raise UserError(f"{folder}: {name!r} is {state}; it must be a regular file of this folder")


def unwritable(path: Path, error: OSError) -> str:
    """Return what the path of a file must be if it cannot be written, as the end of an error message."""
    if not path.parent.is_dir():
        return f"in an existing directory, and '{path.parent}' is not one"
    return f"a writable file: {error.strerror}"


JSON_DEPTH = 100  # levels of nested lists and objects
JSON_DIGITS = 4000  # of an integer; Python itself accepts a few more


def parse_json(text: str | bytes, *, nonfinite: bool = False) -> Any:
    """Return the value of a JSON text that other programs wrote or that can be damaged.

    nonfinite: whether to accept NaN and Infinity, which Python and earlier versions of jaxpar write.

    Raises ValueError also for a key that occurs twice, and for numbers and depths beyond the limits.
    """
    text = text if isinstance(text, str) else text.decode()
    try:
        value = (_NONFINITE_JSON if nonfinite else _JSON).decode(text)
    except RecursionError:
        depth = math.inf
    else:
        depth, level = 0, [value]
        while level := [each for each in level if isinstance(each, dict | list)]:
            depth += 1
            level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
    if depth > JSON_DEPTH:
        raise ValueError(f"nested more than {JSON_DEPTH} levels deep")
    return value


def _integer(digits: str) -> int:
    if len(digits) > JSON_DIGITS:  # parsing takes quadratic time
        raise ValueError(f"a number has {len(digits)} digits; it must have at most {JSON_DIGITS}")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refused(digits)


def _refused(number: str) -> float:
    raise ValueError(f"{number[:40]} is not a finite number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for place, (key, _) in enumerate(pairs) if key in dict(pairs[:place]))
        raise ValueError(f"the key {twice[:40]!r} occurs twice")
    return value


_JSON = json.JSONDecoder(parse_int=_integer, parse_float=_finite, parse_constant=_refused, object_pairs_hook=_object)
_NONFINITE_JSON = json.JSONDecoder(parse_int=_integer, object_pairs_hook=_object)


def shortened(value: Any) -> str:
    """Return the representation of a value of a user, with at most 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print an integer of more than 4300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON. Floats that are not finite become null, because JSON has no NaN and no infinity."""
    return json.dumps(without_nonfinite(value), indent=indent, allow_nan=False)


def without_nonfinite(value: Any) -> Any:
    """Return a value of JSON types with None for each float that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nonfinite(item) for key, item in value.items()}
    return [without_nonfinite(item) for item in value] if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within `with`, add the path to an OSError without one: those of writes lack it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: readers, also after a crash, see either the old text or the new text.

    A link at the place of the temporary file is replaced, not followed. Raises OSError also for a device or a pipe.
    """
    temporary = regular(path).with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # left over from a crash
    with naming(path):
        try:
            with temporary.open("x") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def unusable(workdir: Path, error: OSError) -> UserError:
    """Return the UserError for a workdir that cannot be created or written."""
    return UserError(f"--workdir is {str(workdir)!r}, {path_error(error)}; it must be a writable directory")


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Create `workdir` and lock it for this process, until it ends for any reason.

    If a UserError ends the `with` block, the lock file and the directories that were created for it are removed, unless
    they contain other files. Raises UserError if the directory is not writable, or another process has locked it.
    """
    path = workdir / ".lock"
    folders = [folder for folder in (workdir, *workdir.parents) if not folder.exists()]
    is_new = not path.exists()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise unusable(workdir, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(file, path):
                raise BlockingIOError  # another process locked the file and removed it
        except BlockingIOError:
            raise UserError(
                f"--workdir is {str(workdir)!r}, which another process is using; wait for that process or use a new "
                "--workdir"
            ) from None
        try:
            yield
        except Exception as error:
            if not _is_at(file, path):
                raise UserError(
                    f"--workdir is {str(workdir)!r}, which was moved or deleted during the run; it must stay there"
                ) from error
            if is_new and isinstance(error, UserError):
                path.unlink()
                with contextlib.suppress(OSError):  # a directory that contains files stays
                    for folder in folders:
                        folder.rmdir()
            raise


def _is_at(file: TextIO, path: Path) -> bool:
    """Return whether the open file is the one at this path."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
