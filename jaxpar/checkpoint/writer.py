"""Writes checkpoints by orbax, in the background: whole or not at all."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from jaxpar import files
from jaxpar.checkpoint import checksums
from jaxpar.checkpoint.checksums import Info
from jaxpar.checkpoint.reader import FORMAT, gist, steps
from jaxpar.errors import TrainingError, UserError
from jaxpar.launch import processes
from jaxpar.state import Canonical

CHECKSUMS = {"state": "checksums", "private": "private_checksums"}  # keys of info, by folder


class Saver:
    """Writes checkpoints of one run and keeps the last `keep` and, if asked, the best."""

    def __init__(self, directory: Path, *, keep: int, keep_best: bool):
        """Args: keep: at least 1. keep_best: also the one of the least validation loss."""
        policies: list[preservation_policy.PreservationPolicy] = [preservation_policy.LatestN(keep)]
        if keep_best:
            policies.append(
                preservation_policy.BestN(
                    get_metric_fn=_negative_loss,
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
                best_fn=_negative_loss,  # without it orbax writes no metrics, and a resumed run forgets the best one
                cleanup_tmp_directories=True,
            ),
        )

    def save(
        self,
        tree: Canonical,
        info: Info,
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


def _negative_loss(metrics: dict[str, float]) -> float:
    return -metrics["validation_loss"]


class _explained:
    """Turns a failed write into one line; a full disk is the user's mistake. The checkpoints before are whole."""

    def __init__(self, directory: Path):
        self._directory = directory

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            whole = max(steps(self._directory), default=None)
            left = f"the newest whole one is of step {whole}" if whole is not None else "there is none yet"
            refused = files.disk_error(error)
            kind = UserError if refused else TrainingError
            raise kind(f"writing a checkpoint in {self._directory} failed: {refused or gist(error)}; {left}") from error


def _copied(tree: dict[str, Canonical]) -> dict[str, Canonical]:
    """Return NumPy arrays in memory that no later step writes to: `device_get` alone only looks at arrays of a CPU."""
    fetched = jax.device_get(tree)
    return jax.tree.map(np.array, fetched) if jax.default_backend() == "cpu" else fetched
