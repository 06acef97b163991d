"""Exports a checkpoint of a run in a format that other programs read.

    jaxpar export --workdir=runs/quickstart --output=DIRECTORY --format=hf

Formats:
  safetensors  a file with every array of the checkpoint: parameters, optimizer state, step and random key
  hf           a directory for Hugging Face `transformers`, or `sentence-transformers` if BERT pools by the mean
  stablehlo    a directory with the model as a program that JAX runs on CPUs and GPUs without jaxpar

The output must not exist. docs/howto/export.md describes the formats.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from absl import logging
from flax.traverse_util import flatten_dict
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxpar import checkpoint, data
from jaxpar.command_line import Parser, check_absent, choice, integer, output_path
from jaxpar.errors import UserError, format_bytes
from jaxpar.files import path_error
from jaxpar.use.export import hugging_face, program

FORMATS = ("safetensors", "hf", "stablehlo")
USAGE = "--workdir=runs/quickstart --output=quickstart.safetensors --format=safetensors"


def main(argv: Sequence[str]) -> None:
    parser = Parser(__doc__, "jaxpar export")
    parser.require("--workdir", USAGE, type=Path, help="workdir of a run")
    parser.require("--output", USAGE, type=output_path, help="file or directory to write; it must not exist")
    parser.require("--format", USAGE, type=choice(FORMATS), help=f"one of {', '.join(FORMATS)}")
    which = "best: the one with the lowest validation loss (default); or newest"
    parser.add_argument("--checkpoint", type=choice(("best", "newest")), help=which)
    parser.add_argument("--step", type=integer(0), help="step of the checkpoint, instead of --checkpoint")
    arguments = parser.parse(argv)
    if arguments.step is not None and arguments.checkpoint is not None:
        raise UserError(f"--step is {arguments.step}; it must not be set together with --checkpoint")
    logging.set_verbosity(logging.FATAL)  # orbax also logs the errors that it raises
    best = arguments.checkpoint != "newest"
    export_run(arguments.workdir, arguments.output, arguments.format, arguments.step, best=best)


def export_run(workdir: Path, output: Path, kind: str, step: int | None, *, best: bool) -> None:
    """Write a checkpoint of a run to `output`: a file for safetensors, otherwise a directory. kind: one of FORMATS."""
    output_kind = "file" if kind == "safetensors" else "directory"
    check_absent("--output", output, output_kind)
    saved = checkpoint.of_run(workdir, step, best=best)
    with completed(output, output_kind) as path:
        if kind == "safetensors":
            _save_state(saved, path)
        else:
            config, info = checkpoint.config_of(saved, workdir), data.read_info(workdir)
            tokenizer = workdir / "tokenizer.json"
            if kind == "hf":
                hugging_face.save_directory(saved.tree["params"], config, info, tokenizer, path)
            else:
                program.save_program(saved, config, info, tokenizer, path)
    files = sorted(file for file in output.rglob("*") if file.is_file())
    size = format_bytes(sum(file.stat().st_size for file in files or [output]))
    names = ": " + ", ".join(str(file.relative_to(output)) for file in files) if files else ""
    print(f"{output}: step {saved.step}, {size}{names}")


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


def _save_state(saved: checkpoint.Checkpoint, file: Path) -> None:
    """Write parameters, optimizer state, step and random key to a file.

    The name of an array is its path in the canonical state, joined by dots. The metadata in the header of the file is
    the info of the checkpoint without its checksums. docs/reference/checkpoint.md specifies both.
    """
    arrays = {name: np.asarray(x, order="C") for name, x in flatten_dict(saved.tree, sep=".").items()}
    assert len(arrays) == len(jax.tree.leaves(saved.tree)), "array names are not unique"
    info = {key: value for key, value in saved.info.items() if "checksum" not in key}
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in info.items()}
    save_file(arrays, file, metadata)
