"""Writes a checkpoint of a run as one safetensors file: parameters, optimizer state, step and RNG key.

    scripts/python scripts/export.py runs/quickstart quickstart.safetensors [--step=N]

    >>> from safetensors.numpy import load_file
    >>> arrays = load_file("quickstart.safetensors")
    >>> arrays["params.block_0.attention.query.kernel"]

Names are the paths of the canonical state, with dots; the metadata of the file has the checkpoint's info.
The newest whole checkpoint is taken, or that of step N. docs/checkpoints.md specifies both formats.
"""

import argparse
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
from jaxpar.errors import UserError, exit_code


def export(workdir: Path, file: Path, step: int | None) -> None:
    """Writes `file`, which must be new, whole or not at all. Raises UserError."""
    if file.exists():
        raise UserError(f"{file} exists; give the name of a new file")
    if not file.parent.is_dir():
        raise UserError(f"{file} cannot be written: there is no folder {file.parent}")
    saved = checkpoint.of_run(workdir, step)
    arrays = {name: np.asarray(x, order="C") for name, x in flatten_dict(saved.tree, sep=".").items()}
    assert len(arrays) == len(jax.tree.leaves(saved.tree)), "two arrays have one name"
    info = {key: value for key, value in saved.info.items() if "checksum" not in key}
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in info.items()}
    temporary = file.with_name(f"{file.name}.tmp")
    try:
        save_file(arrays, temporary, metadata)
        temporary.replace(file)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{file} cannot be written: {error}") from error
    print(f"{file}: {len(arrays)} arrays of step {saved.step}, {file.stat().st_size / 1e6:.1f} MB")


def main() -> int:
    """The command line. Exit code 2: a mistake of the user's, reported in one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", type=Path, help="of a run")
    parser.add_argument("file", type=Path, metavar="FILE.safetensors", help="to write; new")
    parser.add_argument("--step", type=int, help="of the checkpoint; the newest whole one without it")
    arguments = parser.parse_args()
    logging.set_verbosity(logging.FATAL)  # orbax logs as errors what it also raises
    return exit_code(lambda: export(arguments.workdir, arguments.file, arguments.step))


if __name__ == "__main__":
    sys.exit(main())
