"""Exports a checkpoint as one safetensors file with parameters, optimizer state, step and RNG key.

    scripts/python scripts/export.py runs/quickstart quickstart.safetensors [--step=N]

    >>> from safetensors.numpy import load_file
    >>> arrays = load_file("quickstart.safetensors")
    >>> arrays["params.block_0.attention.query.kernel"]

Array names are paths in the canonical state, separated by dots. The metadata of the file contains the info of the
checkpoint. Exports the newest complete checkpoint, or the checkpoint of step N. docs/checkpoints.md specifies both
formats.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from absl import logging
from flax.traverse_util import flatten_dict
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxpar import checkpoint
from jaxpar.command_line import Parser, integer
from jaxpar.errors import UserError, exit_code


def export(workdir: Path, file: Path, step: int | None) -> None:
    """Write `file` atomically. Raises UserError if it exists or cannot be written, or if there is no checkpoint."""
    if file.exists():
        raise UserError(f"FILE is '{file}', which exists; it must be a new file")
    if not file.parent.is_dir():
        raise UserError(f"FILE is '{file}'; it must be in an existing directory, and '{file.parent}' is not one")
    saved = checkpoint.of_run(workdir, step)
    arrays = {name: np.asarray(x, order="C") for name, x in flatten_dict(saved.tree, sep=".").items()}
    assert len(arrays) == len(jax.tree.leaves(saved.tree)), "array names are not unique"
    info = {key: value for key, value in saved.info.items() if "checksum" not in key}
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in info.items()}
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.unlink(missing_ok=True)  # a link is replaced, not followed
    try:
        save_file(arrays, temporary, metadata)
        temporary.replace(file)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"FILE is '{file}'; it must be a writable file: {error}") from error
    print(f"{file}: {len(arrays)} arrays of step {saved.step}, {file.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    example = "scripts/export.py runs/quickstart quickstart.safetensors"
    parser.require("workdir", example, rule="the workdir of a run", type=Path, help="workdir of a run")
    parser.require("file", example, rule="a new file", type=Path, help="file to write; it must not exist")
    parser.add_argument(
        "--step", type=integer(0), help="step of the checkpoint (default: the newest complete checkpoint)"
    )
    arguments = parser.parse()
    logging.set_verbosity(logging.FATAL)  # orbax also logs the errors that it raises
    export(arguments.workdir, arguments.file, arguments.step)


if __name__ == "__main__":
    sys.exit(exit_code(main))
