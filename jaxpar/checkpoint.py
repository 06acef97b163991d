"""Checkpoints of the canonical state, by orbax: written in the background, whole or not at all.

    workdir/checkpoints/STEP/state     the canonical state (jaxpar/state.py), a pytree of arrays
    workdir/checkpoints/STEP/private   what else its strategy needs to go on exactly; where it needs nothing, not there
    workdir/checkpoints/STEP/info      JSON: format, step, examples, config, data fingerprint, checksums
    workdir/checkpoints/STEP/metrics   JSON: validation_loss, where it was measured at this step

docs/checkpoints.md specifies all of it, and says how to read it without jaxpar.

A single process copies the arrays to the host and writes them from there while the next steps compute; of several, each
copies and writes its part. Orbax writes into a temporary folder and renames it last, so a killed process leaves no half
checkpoint. Checksums of the arrays find what a disk or a copy did to one later. Reading changes
nothing; training goes on from the newest whole checkpoint and sets later ones aside as STEP.damaged.
"""

import contextlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict
from orbax.checkpoint.checkpoint_managers import preservation_policy

from jaxpar import checksums, files, processes
from jaxpar import config as configs
from jaxpar.errors import TrainingError, UserError
from jaxpar.models.model import Params
from jaxpar.state import Canonical

FORMAT = 1
CHECKSUMS = {"state": "checksums", "private": "private_checksums"}  # keys of info, by folder


class Checkpoint(NamedTuple):
    """What a checkpoint holds, in host memory."""

    step: int
    tree: Canonical
    private: Canonical  # empty where there is none
    info: dict[str, Any]


class Saver:
    """Writes checkpoints of one run and keeps the last `keep` and, if asked, the best."""

    def __init__(self, directory: Path, *, keep: int, keep_best: bool):
        """Args: keep: at least 1. keep_best: also the one of the least validation loss."""
        policies: list[Any] = [preservation_policy.LatestN(keep)]
        if keep_best:
            policies.append(
                preservation_policy.BestN(
                    get_metric_fn=_goodness,
                    n=1,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self._directory = directory
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
                best_fn=_goodness,  # without it orbax does not write metrics, and a resumed run forgets the best one
                cleanup_tmp_directories=True,
            ),
        )

    def save(
        self,
        tree: Canonical,
        info: dict[str, Any],
        validation_loss: float | None = None,
        *,
        private: Canonical | None = None,
    ) -> None:
        """Begins to write; returns when the arrays have been copied. A step that is there already is left as it is.

        private: of the strategy; see Strategy.to_private.
        """
        self.wait()
        trees = {"state": tree, "private": private} if private else {"state": tree}
        metrics = None if validation_loss is None else {"validation_loss": validation_loss}
        if jax.process_count() == 1:
            self._writing = self._writer.submit(self._write, _copied(trees), info, metrics)
        else:  # orbax makes them wait for each other, which all must do at the same place
            self._write(processes.divided(trees), info, metrics)

    def _write(self, trees: dict[str, Canonical], info: dict[str, Any], metrics: dict[str, float] | None) -> None:
        step = int(trees["state"]["step"])
        if step in self._manager.all_steps():
            return
        info = {"format": FORMAT, "step": step, **info}
        for name, tree in trees.items():
            info[CHECKSUMS[name]] = checksums.of_tree(tree)
        if metrics:
            info |= metrics
        info["checksum"] = checksums.of_info(info)
        items = {name: ocp.args.PyTreeSave(tree) for name, tree in trees.items()}
        contents = ocp.args.Composite(**items, info=ocp.args.JsonSave(info))
        with _explained(self._directory):
            self._manager.save(step, args=contents, metrics=metrics, force=True)

    def wait(self) -> None:
        """Returns when everything is on disk."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()
        with _explained(self._directory):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then ends the background threads."""
        self.wait()
        self._writer.shutdown()
        self._manager.close()


def _goodness(metrics: dict[str, float]) -> float:
    return -metrics["validation_loss"]


class _explained:
    """Turns a failed write into one line; the user's mistake is a full disk, say. The checkpoints before are whole."""

    def __init__(self, directory: Path):
        self._directory = directory

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            whole = max(steps(self._directory), default=None)
            left = f"the newest whole one is of step {whole}" if whole is not None else "there is none yet"
            refused = files.disk_error(error)
            kind = UserError if refused else TrainingError
            raise kind(
                f"writing a checkpoint in {self._directory} failed: {refused or _line(error)}; {left}"
            ) from error


def steps(directory: Path) -> list[int]:
    """The steps that `directory` has checkpoints of, in order."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


def unfinished_bytes(directory: Path) -> int:
    """Of what killed processes left in `directory`, and the next `Saver` removes."""
    return sum(file.stat().st_size for file in directory.glob("*.orbax-checkpoint-tmp*/**/*") if file.is_file())


class Damaged(Exception):
    """A checkpoint whose files are missing, cut short or changed."""


def restore(directory: Path, like: Canonical | None, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint, with NumPy leaves; None where the directory has none at all. Changes nothing.

    Args:
      like: gives the structure, shapes and dtypes; leaves may be abstract. None: as they were saved.
      say: is told of each damaged checkpoint that is newer.

    Raises:
      UserError: all of them are damaged, or the newest whole one is of another model or a later version.
    """
    found = steps(directory)
    for step in reversed(found):
        try:
            return read(directory / str(step), like)
        except Damaged as error:
            say(f"checkpoint {directory / str(step)} is damaged: {error}")
    if found:
        raise UserError(f"no checkpoint in {directory} can be read: all of {found} are damaged; give a new --workdir")
    return None


def set_aside(directory: Path, after: int) -> None:
    """Renames the checkpoints of later steps than `after`, which are damaged, to STEP.damaged."""
    for step in steps(directory):
        if step > after:
            aside = directory / f"{step}.damaged"
            shutil.rmtree(aside, ignore_errors=True)  # of an earlier fall back
            (directory / str(step)).rename(aside)


def read(path: Path, like: Canonical | None = None) -> Checkpoint:
    """The checkpoint in folder `path`; see `restore` for `like`.

    Raises:
      Damaged: it is not whole.
      UserError: it is whole, but of another model or a later version.
    """
    info, saved = _info(path), _shapes(path / "state")
    like = saved if like is None else like
    tree = _arrays(path / "state", saved, info["checksums"])
    there, here = (
        {name: f"{x.dtype} {x.shape}" for name, x in checksums.named(tree).items()} for tree in (saved, like)
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
        raise Damaged(_line(error)) from error
    leaves = checksums.named(tree)
    if odd := sorted(leaves.keys() ^ sums.keys()):
        raise Damaged(f"{odd[0]} is {'an array without a checksum' if odd[0] in leaves else 'missing'}")
    for name, leaf in leaves.items():
        if checksums.of_array(leaf) != sums[name]:
            raise Damaged(f"the checksum of {name} is wrong")
    return tree


def _shapes(path: Path) -> Canonical:
    """Of the arrays in a folder."""
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            saved = checkpointer.metadata(path.absolute()).item_metadata.tree
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # as in `_arrays`
        raise Damaged(_line(error)) from error
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved)


def _info(path: Path) -> dict[str, Any]:
    try:
        info = json.loads((path / "info" / "metadata").read_text())
        number, expected = info["format"], checksums.of_info(info)
    except (MemoryError, PermissionError):
        raise
    except Exception as error:
        raise Damaged(_line(error)) from error
    if number != FORMAT:
        raise UserError(f"checkpoint {path} has format {number}; this version of jaxpar reads {FORMAT}")
    if info.get("checksum", expected) != expected:  # the first ones had none
        raise Damaged("the checksum of its info is wrong")
    return info


def newest_config(directory: Path) -> dict[str, Any] | None:
    """Keys and values, as JSON has them, of the run that `directory` is of; None where no checkpoint can tell."""
    for step in reversed(steps(directory)):
        with contextlib.suppress(Damaged):  # `restore` says so
            if config := _info(directory / str(step)).get("config"):
                return dict(config)
    return None


def mend_metrics(directory: Path, say: Callable[[str], None]) -> None:
    """Makes the validation loss of each checkpoint that of its info: orbax reads all, to know the best one."""
    for step in steps(directory):
        file = directory / str(step) / "metrics" / "metrics"
        there = _measured(file)
        try:
            expected = _info(directory / str(step)).get("validation_loss", there)  # the first ones lack it
        except Damaged:
            expected = there
        if repr(there) == repr(expected) and (there is not None or not file.parent.exists()):
            continue
        now = "not known" if expected is None else f"{expected:.4f}"
        say(f"checkpoint {directory / str(step)}: its validation loss was damaged, and is {now} now")
        shutil.rmtree(file.parent, ignore_errors=True)
        if expected is not None:
            file.parent.mkdir()
            files.write_text(file, json.dumps({"validation_loss": expected}))


def _measured(file: Path) -> float | None:
    """The validation loss in a file; None where there is none, or what is there cannot be read."""
    try:
        return float(json.loads(file.read_bytes())["validation_loss"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _copied(tree: Any) -> Any:
    """In NumPy, in memory that no later step writes to: `device_get` alone only looks at arrays of a CPU."""
    fetched = jax.device_get(tree)
    return jax.tree.map(np.array, fetched) if jax.default_backend() == "cpu" else fetched


def _line(error: Exception) -> str:
    """The gist of an exception on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) < 200 else text[:200] + "..."


def of_run(workdir: Path, step: int | None = None) -> Checkpoint:
    """The checkpoint of that step of the run in `workdir`, with NumPy leaves; None: the newest whole one.

    Raises:
      UserError: there is no run, no such checkpoint, or it cannot be read.
    """
    directory = workdir / "checkpoints"
    if not (found := steps(directory)):
        configs.read(workdir)
        raise UserError(f"{workdir} holds no checkpoint yet")
    if step is None:
        newest = restore(directory, None, say=print)
        assert newest is not None
        return newest
    if step not in found:
        raise UserError(f"{workdir} has no checkpoint of step {step}; there are {', '.join(map(str, found))}")
    try:
        return read(directory / str(step))
    except Damaged as error:
        raise UserError(f"checkpoint {directory / str(step)} is damaged: {error}") from error


def restore_params(workdir: Path) -> tuple[ConfigDict, Params]:
    """The config and the newest parameters, NumPy leaves, of the run in `workdir`. Raises UserError as `of_run`."""
    found = of_run(workdir)
    config = found.info.get("config")  # the first ones had none
    return configs.from_keys(config) if config else configs.read(workdir), found.tree["params"]
