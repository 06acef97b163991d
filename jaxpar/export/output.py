"""Outputs that appear only when they are complete: a file or a directory is written elsewhere and then renamed."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from jaxpar.errors import UserError
from jaxpar.files import path_error


def check_output(path: Path, *, is_directory: bool) -> None:
    """Raise UserError if the output exists, except for an empty directory, or if its parent is not a directory."""
    if not path.parent.is_dir():
        raise UserError(f"--output is '{path}'; it must be in an existing directory, and '{path.parent}' is not one")
    is_empty = is_directory and path.is_dir() and not any(path.iterdir())
    if (path.exists() or path.is_symlink()) and not is_empty:
        raise UserError(f"--output is '{path}', which exists; it must be a new {_kind(is_directory)}")


@contextlib.contextmanager
def completed(path: Path, *, is_directory: bool) -> Iterator[Path]:
    """Yield a path to write instead of `path`. At the end it is renamed to `path`; after an error, it is removed.

    Raises:
      UserError: the output exists, or cannot be written.
    """
    check_output(path, is_directory=is_directory)
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        temporary = folder / path.name
        if is_directory:
            temporary.mkdir()
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"--output is '{path}', {path_error(error)}; it must be a writable {_kind(is_directory)}"
        ) from error
    except SafetensorError as error:
        raise UserError(f"--output is '{path}'; it must be a writable {_kind(is_directory)}: {error}") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _kind(is_directory: bool) -> str:
    return "directory" if is_directory else "file"
