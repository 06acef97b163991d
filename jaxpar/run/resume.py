"""Keys of a config that may change where a run resumes, and those that may not.

A workdir holds one training. Where and how it is computed may change: strategy, mesh, batch layout, logging, the places
of files. What is computed may not: model, data, optimizer, the seed, and which examples a step takes.
docs/checkpoints.md says why, key by key.
"""

import json
from pathlib import Path

from ml_collections import ConfigDict

from jaxpar import checkpoint
from jaxpar import config as configs
from jaxpar.errors import UserError

# Keys, and sections of them.
CHANGEABLE = (
    "strategy",
    "mesh",
    "data_parallel",
    "exchange",
    "exchange_options",
    "asynchronous",
    "pipeline",
    "eval",
    "checkpoint",
    "log",
    "watchdog_seconds",
    "profile",
    "cache_dir",
    "data.train",  # files may move: a checkpoint knows what is in them
    "data.validation",
    "data.test",
    "data.tokenizer",  # likewise: the workdir has a copy
    "data.num_threads",
    "data.prefetch",
    "model.init_from",  # likewise: its sizes stay, its weights are in the checkpoint
    "model.attention",
    "model.remat",
    "model.scan_layers",
    "optimizer.accumulation_steps",
    "optimizer.nonfinite",
)
# The first stretches the learning rate's schedule, the other scales gradients.
NOT_CHANGEABLE = ("exchange_options.backward_passes_per_step", "exchange_options.average_aggregated_gradients")
LENGTH = ("num_steps", "num_epochs")  # so do these, unless there is nothing to stretch


def may_change(key: str, config: ConfigDict) -> bool:
    """Whether a run of `config` may go on with another value of the dotted key."""
    if key in LENGTH:
        return bool(config.optimizer.schedule == "constant" and config.optimizer.warmup == 0)
    return key not in NOT_CHANGEABLE and any(key == name or key.startswith(name + ".") for name in CHANGEABLE)


def differences(before: configs.Values, config: ConfigDict) -> dict[str, str]:
    """Return `config.KEY: OLD there, NEW here` by key. before: keys and values as JSON has them, else defaults."""
    default = configs.keys(configs.default_config())
    there, now = (json.loads(json.dumps(one)) for one in ({**default, **before}, configs.keys(config)))
    return {
        key: f"config.{key}: {there[key]!r} there, {now[key]!r} here" if key in now else f"config.{key} is no more"
        for key in sorted(there)
        if key not in now or there[key] != now[key]
    }


def check_resumable(config: ConfigDict, workdir: Path) -> None:
    """Raises UserError where the workdir holds a run that `config` does not continue."""
    before = checkpoint.newest_config(workdir / "checkpoints")
    if before is None:
        before = configs.read_saved(workdir)
    if before is not None:
        check_same_run(before, config, f"--workdir={workdir} holds")


def check_same_run(before: configs.Values, config: ConfigDict, where: str) -> None:
    """Raises UserError, with every key and both values, where what may not change has. where: `WHAT holds`."""
    changed = [text for key, text in differences(before, config).items() if not may_change(key, config)]
    if changed:
        raise UserError(f"{where} another run ({'; '.join(changed)}); give a new --workdir")
