"""Runs of the training binary that a script compares: kept if they are finished, otherwise started or resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar import files
from jaxpar.errors import FAILED, UserError
from jaxpar.launch.launcher import LAUNCHER, MAX_FORWARDED, POLL_SECONDS, start_process
from jaxpar.pages.recorded import different_settings
from jaxpar.run.unused import unused_keys
from jaxpar.tasks import Score

UNTESTED = Score("train_loss", ".4f")  # metric by which runs without a test split are compared
SETTINGS = "settings.json"  # the config that a run was started with, before the run completes it


def configured(name: str, overrides: Sequence[str]) -> ConfigDict:
    """Return the config `PATH[:PRESET]` with overrides."""
    config = configs.load_config(name)
    configs.override(config, overrides)
    return config


def check_settings(config: ConfigDict, workdir: Path) -> None:
    """Raise UserError if the workdir contains a run that was started with another config."""
    if changed := changed_settings(config, workdir):
        raise UserError(f"{workdir} contains a run with other settings ({changed}); remove it or use a new --workdir")


def changed_settings(config: ConfigDict, workdir: Path) -> str:
    """Return the keys of `different_settings` with another value when the run in the workdir was started, and both.

    Empty if there are none, or if there is no run.
    """
    if not (workdir / "config.json").exists():
        return ""
    if not (workdir / SETTINGS).is_file():
        return "unknown"
    before = files.parse_json((workdir / SETTINGS).read_text(), nonfinite=True)  # written atomically
    return "; ".join(different_settings(before, config).values())


def is_finished(workdir: Path) -> bool:
    """Return whether the run in the workdir is finished."""
    return (workdir / "result.json").is_file()


def finish_run(config: str, workdir: Path, overrides: list[str]) -> bool:
    """Start or resume the run if it is not finished, and return whether it is now; otherwise it diverged."""
    command = prepare_run(config, workdir, overrides)
    if not is_finished(workdir):
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode not in (0, FAILED):
            sys.exit(done.returncode)  # the run has printed the reason
    return is_finished(workdir)


def prepare_run(name: str, workdir: Path, overrides: list[str]) -> list[str]:
    """Record the settings of a run in its workdir, and return its command. Raises UserError if they have changed.

    UserError is also raised if the workdir cannot be created or written.
    """
    config = configured(name, overrides)
    check_settings(config, workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        files.write_text(workdir / SETTINGS, json.dumps(configs.keys(config), indent=1) + "\n")
    except OSError as error:
        raise files.unusable(workdir, error) from error
    used = with_effect(config, overrides)
    return [sys.executable, "-m", "jaxpar.main", f"--config={name}", f"--workdir={workdir}", *used]


def with_effect(config: ConfigDict, overrides: Sequence[str]) -> list[str]:
    """Return the overrides without those that have no effect on this run, which are meant for others."""
    unused, kept, has_effect = unused_keys(config, configs.keys(config)), [], True
    for argument in overrides:
        if argument.startswith("--"):  # not the value of the flag before it
            key = argument.partition("=")[0].removeprefix("--").removeprefix("no").removeprefix("config.")
            has_effect = key not in unused
        kept += [argument] if has_effect else []
    return kept


def run_logged(command: list[str], log: Path, signals: list[int]) -> int:
    """Run a command with its output in a file, and return its exit code, or -N if signal N killed it.

    signals: the signals that this process receives (`jaxpar.launch.launcher.forwarded`), which are forwarded. The
    command does not receive a Ctrl-C from the terminal itself, so it has time to save, and ends with this process.
    """
    with log.open("w") as output:
        process = start_process(command, os.environ | {LAUNCHER: str(os.getpid())}, output)
    sent = 0
    while process.poll() is None:
        for number in signals[sent:]:
            sent += 1
            process.send_signal(number if sent <= MAX_FORWARDED else signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return process.returncode
