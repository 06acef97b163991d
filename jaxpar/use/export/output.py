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
from jaxpar.command_line import check_absent
from jaxpar.errors import UserError
from jaxpar.files import path_error


@contextlib.contextmanager
def completed(path: Path, kind: str) -> Iterator[Path]:
    """Yield a path to write instead of `path`. At the end it is renamed to `path`; after an error, it is removed.

    Raises UserError if the output exists or cannot be written. kind: file, or directory, which is made.
    """
    check_absent("--output", path, kind)
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        temporary = folder / path.name
        if kind == "directory":
            temporary.mkdir()
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"--output is '{path}', {path_error(error)}; it must be a writable {kind}") from error
    except SafetensorError as error:
        raise UserError(f"--output is '{path}'; it must be a writable {kind}: {error}") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def save_state_file(saved: Checkpoint, file: Path) -> None:
    """Write parameters, optimizer state, step and random key to a file.

    The name of an array is its path in the canonical state, joined by dots. The metadata in the header of the file is
    the info of the checkpoint without its checksums. docs/checkpoints.md specifies both.
    """
    arrays = {name: np.asarray(x, order="C") for name, x in flatten_dict(saved.tree, sep=".").items()}
    assert len(arrays) == len(jax.tree.leaves(saved.tree)), "array names are not unique"
    info = {key: value for key, value in saved.info.items() if "checksum" not in key}
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in info.items()}
    save_file(arrays, file, metadata)
