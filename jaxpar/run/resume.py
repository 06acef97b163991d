"""Defines which config keys may change when a run resumes.

A workdir contains one training run. Keys that define where and how it is computed may change: strategy, mesh, batch
layout, logging and file paths. Keys that define the result may not: model, data, optimizer, seed, and the choice of the
examples of each step. docs/reference/resume.md explains each key.

The paths that a run writes in its workdir are checked here, too, before it starts.
"""

import json
from pathlib import Path

from ml_collections import ConfigDict

from jaxpar import checkpoint
from jaxpar import config as configs
from jaxpar.errors import UserError
from jaxpar.files import FILES, FOLDERS, run_of

# Keys and whole sections.
CHANGEABLE = (
    *("strategy", "planned_for", "chosen", "mesh", "data_parallel", "exchange", "exchange_options", "asynchronous"),
    *("pipeline", "swarm", "eval", "early_stop", "checkpoint", "log", "profile", "cache_dir"),
    *("watchdog_seconds", "elastic_seconds", "certify_every", "outer.address", "outer.name"),
    # Files may move: a checkpoint stores a fingerprint of their contents, and the workdir has a copy of the tokenizer.
    *("data.train", "data.validation", "data.test", "data.tokenizer", "data.num_threads", "data.prefetch"),
    "model.init_from",  # only read at step 0; the sizes are in config.model and the weights in the checkpoint
    *("model.attention", "model.flatten_positions", "model.recompute_activations", "model.remat", "model.scan_layers"),
    *("optimizer.accumulation_steps", "optimizer.max_skipped_steps", "optimizer.nonfinite"),
)
# The first stretches the learning-rate schedule, the second scales the gradients.
NOT_CHANGEABLE = ("exchange_options.backward_passes_per_step", "exchange_options.average_aggregated_gradients")
LENGTH = ("num_steps", "num_epochs")  # stretch the schedule too, unless the learning rate is constant


def may_change(key: str, config: ConfigDict) -> bool:
    """Return whether a run of `config` can resume with a different value of the dotted key."""
    if key in LENGTH:
        return bool(config.optimizer.schedule == "constant" and config.optimizer.warmup == 0)
    return key not in NOT_CHANGEABLE and any(key == name or key.startswith(name + ".") for name in CHANGEABLE)


def differences(before: configs.Values, config: ConfigDict) -> dict[str, str]:
    """Return `config.KEY: OLD -> NEW` by key. before: JSON values by key; keys that it lacks have their defaults."""
    default = configs.keys(configs.default_config())
    old, new = (json.loads(json.dumps(one)) for one in ({**default, **before}, configs.keys(config)))
    return {
        key: f"config.{key}: {old[key]!r} -> {new[key]!r}" if key in new else f"config.{key} no longer exists"
        for key in sorted(old)
        if key not in new or old[key] != new[key]
    }


def check_resumable(config: ConfigDict, workdir: Path) -> None:
    """Raise UserError if the workdir contains a run that cannot be resumed with `config`."""
    check_paths(workdir)
    folder = workdir / "checkpoints"
    # A run creates the folder before it writes metrics, and its last checkpoint before the result.
    remains = workdir / ("result.json" if folder.exists() else "metrics.jsonl")
    if remains.exists() and not checkpoint.steps(folder):
        raise UserError(
            f"--workdir is {str(workdir)!r}, which contains {remains.name}, but no checkpoint; restore "
            f"{folder.name}/, or use a new --workdir"
        )
    for step in checkpoint.steps(folder):
        if (folder / str(step)).is_symlink():  # the run would have to remove it later, and with it files elsewhere
            raise UserError(f"{folder / str(step)} is a symbolic link; it must be a folder, or not exist")
    before = checkpoint.newest_config(folder)
    if before is None:
        before = configs.read_saved(workdir)
    if before is not None:
        check_same_run(before, config, f"--workdir={workdir} contains")


def check_same_run(before: configs.Values, config: ConfigDict, where: str) -> None:
    """Raise UserError, with both values of each key, if a key has changed that must not. where: `FILE contains`."""
    changed = [text for key, text in differences(before, config).items() if not may_change(key, config)]
    if changed:
        raise UserError(f"{where} a different run ({'; '.join(changed)}); use a new --workdir")


def check_paths(workdir: Path) -> None:
    """Raise UserError for the first path of the workdir that is not what a run writes, or a workdir in another run."""
    if (run := run_of(workdir)) not in (None, workdir.resolve()):
        raise UserError(f"--workdir is {str(workdir)!r}, which belongs to the run in {run}; it must be another folder")
    # A name that ends with .tmp is of a write that did not finish.
    for name in (*FOLDERS, *(name for file in FILES for name in (file, f"{file}.tmp"))):
        path, is_folder = workdir / name, name in FOLDERS
        if not path.exists():
            if is_folder and path.is_symlink():
                raise UserError(
                    f"--workdir is {str(workdir)!r}, whose {name} is a link to {str(path.readlink())!r}, which does "
                    "not exist; it must be a folder, or not exist"
                )
        elif not (path.is_dir() if is_folder else path.is_file()):
            found = "file" if path.is_file() else "folder" if path.is_dir() else "device or pipe"
            expected = "folder" if is_folder else "file"
            raise UserError(
                f"--workdir is {str(workdir)!r}, whose {name} is a {found}; it must be a {expected}, or not exist"
            )
