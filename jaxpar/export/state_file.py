"""Writes every array of a checkpoint to one safetensors file, which any framework can read."""

import json
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from jaxpar.checkpoint import Checkpoint


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
