"""Outputs that appear only when they are complete: a file or a directory is written elsewhere and then renamed.

The simplest is a safetensors file with every array of a checkpoint, which any framework can read.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxpar.checkpoint import Checkpoint
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


def save_state_file(saved: Checkpoint, file: Path) -> None:
    """Write parameters, optimizer state, step and random key to a file.

    The name of an array is its path in the canonical state, joined by dots. The metadata in the header of the file is
    the info of the checkpoint without its checksums. docs/checkpoints.md specifies both.

    Raises:
      OSError, SafetensorError: the file cannot be written.
    """
    arrays = {name: np.asarray(x, order="C") for name, x in flatten_dict(saved.tree, sep=".").items()}
    assert len(arrays) == len(jax.tree.leaves(saved.tree)), "array names are not unique"
    info = {key: value for key, value in saved.info.items() if "checksum" not in key}
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in info.items()}
    save_file(arrays, file, metadata)
