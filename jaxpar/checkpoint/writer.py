"""Writes checkpoints atomically with orbax, in the background, and repairs those of a run before it resumes."""

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from jaxpar import files
from jaxpar.checkpoint import checksums
from jaxpar.checkpoint.checksums import Info
from jaxpar.checkpoint.late_errors import hide_late_errors
from jaxpar.checkpoint.reader import FORMAT, gist, loss_in_metrics, recorded_loss, steps
from jaxpar.core.state import Canonical, is_finite_tree
from jaxpar.errors import TrainingError, UserError
from jaxpar.launch import processes

CERTIFIED = "certified"  # file of the workdir with the steps of `certified_steps`, one a line
CHECKSUMS = {"state": "checksums", "private": "private_checksums"}  # folder -> key of info


class Saver:
    """Writes the checkpoints of a run, and keeps the newest `keep` >= 1 and optionally that with the lowest loss.

    If steps are certified, it also keeps the newest one that is not later than the last certified step.
    """

    def __init__(self, directory: Path, *, keep: int, keep_best: bool):
        policies: list[preservation_policy.PreservationPolicy] = [preservation_policy.LatestN(keep)]
        policies.append(_NewestCertified(directory.parent))
        if keep_best:
            best = preservation_policy.BestN(get_metric_fn=_negative_loss, n=1, keep_checkpoints_without_metrics=False)
            policies.append(best)
        hide_late_errors()
        self._directory = directory
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy(policies), cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(directory.absolute(), options=self._options)

    def save(
        self, tree: Canonical, info: Info, validation_loss: float | None = None, *, private: Canonical | None = None
    ) -> None:
        """Start writing a checkpoint and return when the arrays have been copied. Does nothing if the step was saved.

        Args:
          validation_loss: the loss measured at this step, if any. A loss that is not finite is not recorded.
          private: the strategy's private state; see Strategy.to_private.

        Raises TrainingError if the parameters are not finite. The existing checkpoints stay.
        """
        self.wait()
        if not is_finite_tree(tree["params"]):  # an update can overflow, although its loss and gradient are finite
            raise TrainingError(
                f"the parameters are not finite after step {int(tree['step'])}, and are not saved; lower "
                f"config.optimizer.lr; {_left(self._directory)}"
            )
        trees = {"state": tree, "private": private} if private else {"state": tree}
        metrics = None
        if validation_loss is not None and math.isfinite(validation_loss):
            metrics = {"validation_loss": validation_loss}
        if jax.process_count() == 1:
            copied = jax.device_get(trees)  # to memory that no later step overwrites
            if jax.default_backend() == "cpu":  # there, device_get alone does not copy
                copied = jax.tree.map(np.array, copied)
            self._writing = self._writer.submit(self._write, copied, info, metrics)
        else:  # orbax synchronizes the processes, which all must reach at the same point of the program
            self._write(processes.divided(trees), info, metrics)

    def _write(self, trees: dict[str, Canonical], info: Info, metrics: dict[str, float] | None) -> None:
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
        # With best_fn, orbax writes metrics, so that a resumed run knows the best, and warns about a save without any.
        self._options.best_fn = _negative_loss if metrics else None
        with _explained(self._directory):
            self._manager.save(step, args=contents, metrics=metrics, force=True)

    def wait(self) -> None:
        """Wait until everything is on disk."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()
        with _explained(self._directory):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait until everything is on disk, then stop the background threads."""
        self.wait()
        self._writer.shutdown()
        self._manager.close()


def certified_steps(workdir: Path) -> list[int]:
    """Return the step since which a run is certified, and the certified steps. Empty if it never was."""
    path = workdir / CERTIFIED
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


class _NewestCertified(NamedTuple):
    """The policy that keeps the newest checkpoint that is not later than the last certified step."""

    workdir: Path

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        [*_, last] = certified_steps(self.workdir) or [-1]
        newest = max((one.step for one in checkpoints if one.step <= last), default=None)
        return [one.step == newest for one in checkpoints]


def _negative_loss(metrics: dict[str, float]) -> float:
    loss = metrics["validation_loss"]
    return -math.inf if math.isnan(loss) else -loss  # NaN, which earlier versions recorded, is the worst


@contextlib.contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Convert a failed write to a one-line UserError for a disk error, or to a TrainingError for any other error."""
    try:
        yield
    except Exception as error:
        reason = files.disk_error(error)
        kind = UserError if reason else TrainingError
        failed = f"writing a checkpoint in {directory} failed: {reason or gist(error)}"
        raise kind(f"{failed}; {_left(directory)}") from error


def _left(directory: Path) -> str:
    """Return which checkpoint there is after an error."""
    newest = max(steps(directory), default=None)
    return "no checkpoint exists yet" if newest is None else f"the newest checkpoint is from step {newest}"


def set_aside(directory: Path, after: int, kind: str = "damaged") -> None:
    """Rename the checkpoints of steps later than `after` to STEP.kind, the newest one first."""
    for step in reversed(steps(directory)):
        if step > after:
            aside = directory / f"{step}.{kind}"
            shutil.rmtree(aside, ignore_errors=True)  # from an earlier repair
            (directory / str(step)).rename(aside)


def repair_metrics(directory: Path, log: Callable[[str], None]) -> None:
    """Restore the validation loss of each checkpoint from its info, because orbax selects the best one by this loss."""
    for step in steps(directory):
        path = directory / str(step)
        folder, found, expected = path / "metrics", loss_in_metrics(path), recorded_loss(path)
        if repr(found) == repr(expected) and (found is not None or not folder.exists()):
            continue
        result = "removed" if expected is None else f"restored to {expected:.4f}"
        log(f"checkpoint {path}: the damaged validation loss was {result}")
        shutil.rmtree(folder, ignore_errors=True)
        if expected is not None:
            folder.mkdir()
            files.write_text(folder / "metrics", json.dumps({"validation_loss": expected}))
