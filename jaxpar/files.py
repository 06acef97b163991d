"""Files of a workdir: written whole or not at all, and by one process at a time."""

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from jaxpar.errors import UserError

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM)
_OS_ERROR = r"(?:os_error_code='|OS error )(\d+)"  # in messages of tensorstore, by its version


def disk_error(error: BaseException) -> str | None:
    """Why the disk refused something, which the user must repair: `No space left on device`. None for other errors."""
    numbers = [error.errno] if isinstance(error, OSError) else map(int, re.findall(_OS_ERROR, str(error)))
    return next((os.strerror(number) for number in numbers if number in DISK_ERRORS), None)


def unreadable(error: Exception) -> str:
    """Return why a CSV file of the user cannot be read, and what it must be; of an error of its contents, its text."""
    if isinstance(error, OSError):
        return f"{error.strerror}; it must be the path of a CSV file"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.object[error.start]:#x} is not UTF-8; it must be a CSV file in UTF-8"
    return str(error)


def write_text(path: Path, text: str) -> None:
    """Replace the file: who reads it, or comes after a crash, finds the old text or the new one, never a part."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Make `workdir`, and lock it for this process. The lock ends with the process, however it ends.

    Raises:
      UserError: the folder cannot be written, or another process runs in it.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = (workdir / ".lock").open("a")
    except OSError as error:
        raise UserError(f"--workdir={workdir} cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--workdir={workdir} is in use by another process; wait for it or give another") from None
        yield
