"""Defines which config keys may change when a run resumes.

A workdir contains one training run. Keys that define where and how it is computed may change: strategy, mesh, batch
layout, logging and file paths. Keys that define the result may not: model, data, optimizer, seed, and the choice of the
examples of each step. docs/reference/resume.md lists the rules.

The paths that a run writes in its workdir are checked here, too, before it starts.
"""

import json
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from jaxpar import checkpoint
from jaxpar import config as configs
from jaxpar.errors import UserError
from jaxpar.files import FILES, FOLDERS, run_of


class ResumeRule(NamedTuple):
    """Whether some keys, or whole sections, may change; a rule of a key overrides that of its section."""

    keys: tuple[str, ...]
    may_change: bool
    why: str  # in Markdown, with links from docs/reference


LENGTH = ("num_steps", "num_epochs")
LOGGED = ("eval", "early_stop", "checkpoint", "log", "watchdog_seconds", "elastic_seconds", "certify_every")
RESUME_RULES = (
    ResumeRule(
        ("strategy", "planned_for", "chosen", "mesh", "data_parallel", "exchange", "pipeline", "asynchronous", "swarm"),
        True,
        "how updates are computed, exactly or not",
    ),
    ResumeRule(
        ("outer.address", "outer.name"), True, "only where the server of the [outer step](../howto/diloco.md) is"
    ),
    ResumeRule(("outer",), False, "different examples or averages"),
    ResumeRule(("exchange_options.average_aggregated_gradients",), False, "another scale of the gradients"),
    ResumeRule(("exchange_options.backward_passes_per_step",), False, "another number of updates"),
    ResumeRule(("exchange_options",), True, "as for `exchange`"),
    ResumeRule(("optimizer.accumulation_steps",), True, "only how a batch is divided"),
    ResumeRule(
        ("optimizer.nonfinite", "optimizer.max_skipped_steps"),
        True,
        "only what happens when a loss or a gradient is not finite",
    ),
    ResumeRule(("optimizer.name",), False, "a different optimizer state"),
    ResumeRule(("optimizer",), False, "different updates"),
    ResumeRule(
        LENGTH,
        False,
        "the learning rate depends on it; with `optimizer.schedule=constant` and `optimizer.warmup=0`, it may change",
    ),
    ResumeRule(("batch_size", "seed"), False, "some examples would be used twice, others never"),
    ResumeRule(("task",), False, "a different loss"),
    ResumeRule(
        ("model.init_from",),
        True,
        "the folder may move, but its sizes and tokenizer must be the same; the weights come from the checkpoint",
    ),
    ResumeRule(
        (
            "model.attention",
            "model.flatten_positions",
            "model.recompute_activations",
            "model.remat",
            "model.scan_layers",
        ),
        True,
        "only how the model is computed",
    ),
    ResumeRule(("model.dropout", "model.dtype", "data.class_weights"), False, "different gradients"),
    ResumeRule(("model",), False, "a different model"),
    ResumeRule(
        ("data.train", "data.validation", "data.test", "data.tokenizer"),
        True,
        "files may move, but their contents must be the same ([fingerprint](checkpoint.md#info))",
    ),
    ResumeRule(("data.num_threads", "data.prefetch"), True, "how batches are loaded, not their contents"),
    ResumeRule(("data",), False, "different examples"),
    ResumeRule((*LOGGED, "profile", "cache_dir"), True, "only what is logged and saved, where, and when the run ends"),
)
RULE_OF = {name: rule for rule in RESUME_RULES for name in rule.keys}


def may_change(key: str, config: ConfigDict) -> bool:
    """Return whether a run of `config` can resume with a different value of the dotted key."""
    if key in LENGTH:
        return bool(config.optimizer.schedule == "constant" and config.optimizer.warmup == 0)
    return (RULE_OF.get(key) or RULE_OF[key.partition(".")[0]]).may_change


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
