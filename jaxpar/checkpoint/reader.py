"""Reads checkpoints, and finds what a disk or a copy did to them. Reading changes nothing; repair.py does."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar.checkpoint import checksums
from jaxpar.checkpoint.checksums import Info
from jaxpar.errors import UserError
from jaxpar.models.model import Params
from jaxpar.state import Canonical

FORMAT = 1


class Checkpoint(NamedTuple):
    """The contents of a checkpoint, in host memory."""

    step: int
    tree: Canonical
    private: Canonical  # empty where there is none
    info: Info


class Damaged(Exception):
    """A checkpoint whose files are missing, cut short or changed."""


def steps(directory: Path) -> list[int]:
    """The steps that `directory` has checkpoints of, in order."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


def unfinished_bytes(directory: Path) -> int:
    """Return the bytes that killed processes left in `directory`, and the next `Saver` removes."""
    return sum(file.stat().st_size for file in directory.glob("*.orbax-checkpoint-tmp*/**/*") if file.is_file())


def restore(directory: Path, like: Canonical | None, log: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint, with NumPy leaves; None where the directory has none at all. Changes nothing.

    Args:
      like: gives the structure, shapes and dtypes; leaves may be abstract. None: as they were saved.
      log: is called with a line for each damaged checkpoint that is newer.

    Raises:
      UserError: all of them are damaged, or the newest whole one is of another model or a later version.
    """
    there = steps(directory)
    for step in reversed(there):
        try:
            return read(directory / str(step), like)
        except Damaged as error:
            log(f"checkpoint {directory / str(step)} is damaged: {error}")
    if there:
        raise UserError(f"no checkpoint in {directory} can be read: all of {there} are damaged; give a new --workdir")
    return None


def read(path: Path, like: Canonical | None = None) -> Checkpoint:
    """The checkpoint in folder `path`; see `restore` for `like`.

    Raises:
      Damaged: it is not whole.
      UserError: it is whole, but of another model or a later version.
    """
    info, saved = info_of(path), _shapes(path / "state")
    like = saved if like is None else like
    tree = _arrays(path / "state", saved, info["checksums"])
    there, here = (
        {name: f"{x.dtype} {x.shape}" for name, x in checksums.by_path(tree).items()} for tree in (saved, like)
    )
    for name in sorted(there.keys() | here.keys()):
        was, wanted = there.get(name, "missing"), here.get(name, "missing")
        if was != wanted:
            raise UserError(f"checkpoint {path} is of another model or optimizer: {name} is {was}, not {wanted}")
    if not path.name == str(info["step"]) == str(tree["step"]):
        raise Damaged(f"its step is {path.name} by name, {info['step']} by its info and {tree['step']} by its state")
    private: Canonical = {}
    if "private_checksums" in info:
        private = _arrays(path / "private", _shapes(path / "private"), info["private_checksums"])
    return Checkpoint(info["step"], tree, private, info)


def _arrays(path: Path, shapes: Canonical, sums: dict[str, int]) -> Canonical:
    """The arrays of these shapes in a folder, in NumPy."""
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            as_numpy = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype), shapes)
            restore_args = ocp.args.PyTreeRestore(shapes, restore_args=as_numpy)
            tree: Canonical = checkpointer.restore(path.absolute(), args=restore_args)
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # whatever orbax and tensorstore raise on damaged files
        raise Damaged(gist(error)) from error
    leaves = checksums.by_path(tree)
    if odd := sorted(leaves.keys() ^ sums.keys()):
        raise Damaged(f"{odd[0]} is {'an array without a checksum' if odd[0] in leaves else 'missing'}")
    for name, leaf in leaves.items():
        if checksums.of_array(leaf) != sums[name]:
            raise Damaged(f"the checksum of {name} is wrong")
    return tree


def _shapes(path: Path) -> Canonical:
    """Return the shapes and dtypes of the arrays in a folder."""
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            saved = checkpointer.metadata(path.absolute()).item_metadata.tree
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # as in `_arrays`
        raise Damaged(gist(error)) from error
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved)


def info_of(path: Path) -> Info:
    """Return the info of the checkpoint in folder `path`. Raises Damaged and UserError as `read`."""
    try:
        info: Info = json.loads((path / "info" / "metadata").read_text())
        number, expected = info["format"], checksums.of_info(info)
    except (MemoryError, PermissionError):
        raise
    except Exception as error:
        raise Damaged(gist(error)) from error
    if number != FORMAT:
        raise UserError(f"checkpoint {path} has format {number}; this version of jaxpar reads {FORMAT}")
    if info.get("checksum", expected) != expected:  # the first ones had none
        raise Damaged("the checksum of its info is wrong")
    return info


def newest_config(directory: Path) -> Info | None:
    """Keys and values, as JSON has them, of the run that `directory` is of; None where no checkpoint can tell."""
    for step in reversed(steps(directory)):
        with contextlib.suppress(Damaged):  # `restore` logs it
            if config := info_of(directory / str(step)).get("config"):
                return dict(config)
    return None


def gist(error: Exception) -> str:
    """The gist of an exception on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) < 200 else text[:200] + "..."


def of_run(workdir: Path, step: int | None = None) -> Checkpoint:
    """The checkpoint of that step of the run in `workdir`, with NumPy leaves; None: the newest whole one.

    Raises:
      UserError: there is no run, no such checkpoint, or it cannot be read.
    """
    directory = workdir / "checkpoints"
    if not (there := steps(directory)):
        configs.read_config(workdir)
        raise UserError(f"{workdir} holds no checkpoint yet")
    if step is None:
        newest = restore(directory, None, log=print)
        assert newest is not None
        return newest
    if step not in there:
        raise UserError(f"{workdir} has no checkpoint of step {step}; there are {', '.join(map(str, there))}")
    try:
        return read(directory / str(step))
    except Damaged as error:
        raise UserError(f"checkpoint {directory / str(step)} is damaged: {error}") from error


def restore_params(workdir: Path) -> tuple[ConfigDict, Params]:
    """The config and the newest parameters, NumPy leaves, of the run in `workdir`. Raises UserError as `of_run`."""
    saved = of_run(workdir)
    config = saved.info.get("config")  # the first ones had none
    return configs.from_keys(config) if config else configs.read_config(workdir), saved.tree["params"]
