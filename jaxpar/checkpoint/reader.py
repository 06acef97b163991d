"""Reads checkpoints and detects damage to their files. Reading changes no files; writer.py does."""

import contextlib
import errno
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar.checkpoint import checksums
from jaxpar.checkpoint.checksums import Info
from jaxpar.checkpoint.late_errors import hide_late_errors
from jaxpar.core.state import Canonical
from jaxpar.errors import UserError, printable
from jaxpar.files import parse_json, regular
from jaxpar.models.model import Params

FORMAT = 1
_REQUIRED: dict[str, type] = {"step": int, "data": str, "checksums": dict}  # the keys of info and their types
_OPTIONAL = {"config": dict, "private_key": dict, "private_checksums": dict, "log_interval": dict}
_INFO = _REQUIRED | _OPTIONAL | {"in_flight": int, "discarded": list}


class Checkpoint(NamedTuple):
    """The contents of a checkpoint, in host memory."""

    step: int
    tree: Canonical
    private: Canonical  # empty if the checkpoint has no private state
    info: Info


class Damaged(Exception):
    """Raised for a checkpoint whose files are missing, truncated or changed."""


def steps(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in `directory`, in ascending order."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if re.fullmatch(r"0|[1-9][0-9]*", path.name))


def unfinished_bytes(directory: Path) -> int:
    """Return the bytes of unfinished checkpoints left by killed processes, which the next Saver removes."""
    return sum(file.stat().st_size for file in directory.glob("*.orbax-checkpoint-tmp*/**/*") if file.is_file())


def restore(directory: Path, like: Canonical | None, log: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest intact checkpoint, with NumPy leaves, or None if the directory contains no checkpoint.

    The directory is listed again after each checkpoint that cannot be read, because a run that is being trained removes
    old checkpoints after it has written new ones.

    Args:
      like: tree with the expected structure, shapes and dtypes; leaves can be abstract. None: accept any.
      log: called with one line for each newer checkpoint that is damaged.

    Raises:
      UserError: all checkpoints are damaged, or the newest intact one is from a different model or format.
    """
    failed: dict[int, Damaged] = {}
    newest = None
    while newest is None and (untried := [step for step in steps(directory) if step not in failed]):
        try:
            newest = read(directory / str(untried[-1]), like)
        except Damaged as error:
            failed[untried[-1]] = error
    for step, damage in failed.items():
        if (directory / str(step)).exists():  # otherwise it has been removed in the meantime
            log(printable(f"checkpoint {directory / str(step)} is damaged: {damage}"))
    if newest is None and (existing := steps(directory)):
        damaged = f"all checkpoints in {directory} are damaged: steps {existing}"
        raise UserError(f"{damaged}; to train again, use a new --workdir")
    return newest


def read(path: Path, like: Canonical | None = None) -> Checkpoint:
    """Read the checkpoint in directory `path`. See `restore` for `like`.

    Raises Damaged, or UserError if the checkpoint is intact, but from a different model or format.
    """
    hide_late_errors()
    info, saved = info_of(path), _shapes(path / "state")
    like = saved if like is None else like
    tree = _arrays(path / "state", saved, info["checksums"])
    found, expected = (
        {name: f"{x.dtype} {x.shape}" for name, x in checksums.by_path(tree).items()} for tree in (saved, like)
    )
    for name in sorted(found.keys() | expected.keys()):
        is_now, must_be = found.get(name, "missing"), expected.get(name, "missing")
        if is_now != must_be:
            other = f"checkpoint {path} is from a different model or optimizer"
            raise UserError(f"{other}: {name} is {is_now}; it must be {must_be}")
    if not path.name == str(info["step"]) == str(tree["step"]):
        where = f"{path.name} in its name, {info['step']} in its info and {tree['step']} in its state"
        raise Damaged(f"the step is {where}")
    folder, sums = path / "private", info.get("private_checksums")
    private = {} if sums is None else _arrays(folder, _shapes(folder), sums)
    return Checkpoint(info["step"], tree, private, info)


def _arrays(path: Path, shapes: Canonical, sums: dict[str, int]) -> Canonical:
    """Read the arrays in a directory, with these shapes, as NumPy arrays and verify their checksums."""
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            as_numpy = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype), shapes)
            restore_args = ocp.args.PyTreeRestore(shapes, restore_args=as_numpy)
            tree: Canonical = checkpointer.restore(path.absolute(), args=restore_args)
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # orbax and tensorstore raise many types for damaged files
        raise _unreadable(path, error) from error
    leaves = checksums.by_path(tree)
    if odd := sorted(leaves.keys() ^ sums.keys()):
        raise Damaged(f"{odd[0]} {'has no checksum' if odd[0] in leaves else 'is missing'}")
    for name, leaf in leaves.items():
        if checksums.of_array(leaf) != sums[name]:
            raise Damaged(f"the checksum of {name} is wrong")
    return tree


def _shapes(path: Path) -> Canonical:
    """Return the shapes and dtypes of the arrays in a directory."""
    try:
        for file in path.rglob("*"):  # a pipe could be read forever, and a link to a folder can lead to one
            if not file.is_file() and (file.is_symlink() or not file.is_dir()):
                raise ValueError(f"{file.relative_to(path)} is not a regular file")
        # A checkpointer would also look for a file that is in the folder above, and warn that it is missing.
        with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            saved = handler.metadata(path.absolute()).tree
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # as in `_arrays`
        raise _unreadable(path, error) from error
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved)


def _unreadable(path: Path, error: Exception) -> Exception:
    """Return the error to raise for files in `path` that could not be read."""
    text = str(error)
    if "PERMISSION_DENIED" in text:
        return PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    array = re.search(r'Error reading "([^"]*)"', text)
    return Damaged(f"{array[1]} cannot be read" if array else gist(error))


def info_of(path: Path) -> Info:
    """Return the info of the checkpoint in directory `path`. Raises Damaged and UserError as `read` does."""
    try:
        info: Info = parse_json(regular(path / "info" / "metadata").read_text(), nonfinite=True)
        number, expected = info["format"], checksums.of_info(info)
    except (MemoryError, PermissionError):
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Damaged("info/metadata is missing") from error
    except Exception as error:
        raise Damaged(gist(error)) from error
    if number != FORMAT:
        raise UserError(f"checkpoint {path} has format {number}; this version of jaxpar reads format {FORMAT}")
    if info.get("checksum", expected) != expected:  # the first checkpoints lack it
        raise Damaged("the checksum of its info is wrong")
    for key, kinds in _INFO.items():  # of checkpoints without that checksum
        if not isinstance(info.get(key, None if key in _REQUIRED else kinds()), kinds):
            raise Damaged(f"{key} in its info is {info.get(key)!r:.40}")
    return info


def newest_config(directory: Path) -> Info | None:
    """Return the config, as JSON values by key, in the newest checkpoint that contains one, if any."""
    for step in reversed(steps(directory)):
        with contextlib.suppress(Damaged):  # `restore` logs it
            if config := info_of(directory / str(step)).get("config"):
                return dict(config)
    return None


def gist(error: Exception) -> str:
    """Return a one-line summary of an exception."""
    text = printable(" ".join(f"{type(error).__name__}: {error}".split()))
    return text if len(text) < 200 else text[:200] + "..."


def loss_in_metrics(path: Path) -> float | None:
    """Return the validation loss in the metrics of checkpoint `path`, or None if the file is missing or damaged."""
    file = path / "metrics" / "metrics"
    try:
        return float(parse_json(file.read_bytes(), nonfinite=True)["validation_loss"]) if file.is_file() else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError):
        return None


def recorded_loss(path: Path) -> float | None:
    """Return the validation loss of checkpoint `path`, or None if it was not measured.

    The loss in the info is used, since it has a checksum. Without an intact info, it is the one in the metrics.
    """
    loss = loss_in_metrics(path)
    with contextlib.suppress(Damaged):
        loss = info_of(path).get("validation_loss", loss)  # the info of the first checkpoints lacks it
    return loss


def of_run(
    workdir: Path, step: int | None = None, *, best: bool = False, log: Callable[[str], None] = print
) -> Checkpoint:
    """Return a checkpoint of the run in `workdir`, with NumPy leaves.

    Args:
      step: the step of the checkpoint. None: the newest intact one.
      best: whether to prefer the intact one with the lowest validation loss, if any loss was measured.
      log: called with one line for each checkpoint that is damaged and replaced by another one.

    Raises UserError if there is no run or no such checkpoint, or the checkpoint cannot be read.
    """
    directory = workdir / "checkpoints"
    if step is None:
        damaged: dict[str, str] = {}  # line to log, by path
        found = None

        def note(line: str) -> None:
            damaged.setdefault(line.removeprefix("checkpoint ").partition(" is damaged")[0], line)

        try:
            found = (_best(directory, damaged) if best else None) or restore(directory, None, note)
        finally:
            for line in damaged.values():
                log(f"{line}; using that of step {found.step}" if found else line)
        if found:
            return found
    existing = steps(directory)
    if step is None or not existing:
        configs.read_config(workdir)
        raise UserError(f"{workdir} contains no checkpoint yet")
    if step not in existing:
        listed = ", ".join(map(str, existing))
        raise UserError(f"{workdir} contains no checkpoint of step {step}; its checkpoints are from steps {listed}")
    path = directory / str(step)
    try:
        return read(path)
    except Damaged as error:
        raise UserError(f"checkpoint {path} is damaged: {error}") from error


def best_step(directory: Path) -> int | None:
    """Return the step of the checkpoint with the lowest validation loss, or None if no loss was measured."""
    return _lowest(_losses(directory))


def _losses(directory: Path) -> dict[int, float | None]:
    return {step: recorded_loss(directory / str(step)) for step in steps(directory)}


def _lowest(losses: Mapping[int, float | None]) -> int | None:
    measured = [(loss, step) for step, loss in losses.items() if loss is not None and not math.isnan(loss)]
    return min(measured)[1] if measured else None


def _best(directory: Path, damaged: dict[str, str]) -> Checkpoint | None:
    """Return the checkpoint with the lowest validation loss, or None if no loss was measured or it is damaged.

    damaged: gets a line for this checkpoint if it is damaged, and for each one whose loss cannot be read, by path.
    """
    while True:
        losses = _losses(directory)
        for step in (step for step, loss in losses.items() if loss is None or math.isnan(loss)):
            path = directory / str(step)
            try:
                info_of(path)
            except Damaged as error:
                if path.exists():
                    damaged[str(path)] = f"checkpoint {path} is damaged, and its validation loss is unknown: {error}"
        if (best := _lowest(losses)) is None:
            return None
        path = directory / str(best)
        try:
            return read(path)
        except Damaged as error:
            if path.exists():  # otherwise, a run that is being trained has replaced it by a better one
                damaged[str(path)] = f"the best checkpoint, {path}, is damaged: {error}"
                return None


def config_of(saved: Checkpoint, workdir: Path) -> ConfigDict:
    """Return the config with which a checkpoint of the run in `workdir` was saved."""
    config = saved.info.get("config")  # the first checkpoints lack it
    return configs.from_keys(config) if config else configs.read_config(workdir)


def restore_params(workdir: Path) -> tuple[ConfigDict, Params]:
    """Return the config and the newest parameters, as NumPy arrays, of the run in `workdir`. Raises as `of_run`."""
    saved = of_run(workdir)
    return config_of(saved, workdir), saved.tree["params"]
