"""Runs of `jaxpar train` to compare: kept if they are finished, otherwise started or resumed; and their outcomes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar import files, strategies
from jaxpar.compare.report import REFERENCE, StrategyOutcome
from jaxpar.core.plan import ON_HOST, Plan
from jaxpar.errors import FAILED, UserError
from jaxpar.launch.launcher import LAUNCHER, MAX_FORWARDED, POLL_SECONDS, start_process
from jaxpar.launch.place import COMMAND
from jaxpar.run import build, metrics
from jaxpar.run.unused import unused_keys
from jaxpar.tasks import Score
from jaxpar.use.pages.recorded import CERTIFICATE, different_settings, read_verdict

UNTESTED = Score("train_loss", ".4f")  # metric by which runs without a test split are compared
STARTED_WITH = "settings.json"  # the config that a run was started with, before the run completes it


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
    """Return the settings that differ from those with which the run in the workdir, if any, started; empty: none."""
    if not (workdir / "config.json").exists():
        return ""
    if not (workdir / STARTED_WITH).is_file():
        return "unknown"
    before = files.parse_json((workdir / STARTED_WITH).read_text(), nonfinite=True)  # written atomically
    return "; ".join(different_settings(before, config).values())


def is_finished(workdir: Path) -> bool:
    """Return whether the run in the workdir is finished."""
    return (workdir / "result.json").is_file()


def finish_run(config: str, workdir: Path, overrides: list[str]) -> bool:
    """Start or resume the run if it is not finished, and return whether it is now; otherwise it diverged."""
    command = prepare_run(config, workdir, overrides)
    if not is_finished(workdir):
        done = subprocess.run(command, stdout=subprocess.DEVNULL, env=without_command())
        if done.returncode not in (0, FAILED):
            sys.exit(done.returncode)  # the run has printed the reason
    return is_finished(workdir)


def prepare_run(name: str, workdir: Path, overrides: list[str]) -> list[str]:
    """Record the settings of a run in its workdir, and return its command. Raises UserError if they have changed."""
    config = configured(name, overrides)
    check_settings(config, workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        files.write_text(workdir / STARTED_WITH, json.dumps(configs.keys(config), indent=1) + "\n")
    except OSError as error:
        raise files.unusable(workdir, error) from error
    used = with_effect(config, overrides)
    return [sys.executable, "-m", "jaxpar", "train", f"--config={name}", f"--workdir={workdir}", *used]


def with_effect(config: ConfigDict, overrides: Sequence[str]) -> list[str]:
    """Return the overrides without those that have no effect on this run, which are meant for others."""
    unused, kept, has_effect = unused_keys(config, configs.keys(config)), [], True
    for argument in overrides:
        if argument.startswith("--"):  # not the value of the flag before it
            key = argument.partition("=")[0].removeprefix("--").removeprefix("no").removeprefix("config.")
            has_effect = key not in unused
        kept += [argument] if has_effect else []
    return kept


def without_command() -> dict[str, str]:
    """Return the environment of a run, which must not print the command of this process as its own."""
    return {name: value for name, value in os.environ.items() if name != COMMAND}


def run_logged(command: list[str], log: Path, signals: list[int]) -> int:
    """Run a command with its output in a file, and return its exit code, or -N if signal N killed it.

    signals: the signals that this process receives (`jaxpar.launch.launcher.forwarded`), which are forwarded. The
    command does not receive a Ctrl-C from the terminal itself, so it has time to save, and ends with this process.
    """
    with log.open("w") as output:
        process = start_process(command, without_command() | {LAUNCHER: str(os.getpid())}, output)
    sent = 0
    while process.poll() is None:
        for number in signals[sent:]:
            sent += 1
            process.send_signal(number if sent <= MAX_FORWARDED else signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return process.returncode


# ---- outcomes of runs ----------------------------------------------------------------------------------------


def read_result(workdir: Path) -> dict[str, Any]:
    """Return the contents of the result.json of a finished run."""
    result: dict[str, Any] = files.parse_json((workdir / "result.json").read_text())
    return result


def read_outcome(config: ConfigDict, plan: Plan[Any], workdir: Path, loaded: build.Parts) -> StrategyOutcome:
    """Return the outcome of a finished run."""
    result, task = read_result(workdir), loaded.problem.task
    stashed = max(plan.device_bytes) - plan.state_bytes  # activations that the plan of a pipeline counts
    in_flight = strategies.in_flight_bytes(plan, loaded.problem)
    fullest = plan.memory[plan.device_bytes.index(max(plan.device_bytes))]
    rate = result.get("examples_per_second")
    rows = [row for row in metrics.read_metrics(workdir) if row["split"] == "validation"]
    curve = tuple((row["step"], row[task.curve]) for row in rows if row.get(task.curve) is not None)
    return StrategyOutcome(
        step_seconds=config.batch_size / rate if rate else None,
        is_emulated=is_emulated(config),
        wire_bytes=plan.wire_bytes,
        device_bytes=tuple(plan.device_state_bytes),
        in_flight_bytes=stashed + sum(in_flight.values()),
        memory={**{part: n for part, n in fullest.items() if not part.endswith(ON_HOST)}, **in_flight},
        metric=result[find_score(loaded).key],
        staleness=find_staleness(plan, result),
        guarantee=find_guarantee(plan),
        certificate=read_verdict(workdir / CERTIFICATE, config),
        curve=curve,
        seconds=result["seconds"],
    )


def is_emulated(config: ConfigDict) -> bool:
    """Return whether the workers or peers of a config work in virtual time."""
    section = {"async_data_parallel": config.asynchronous, "swarm": config.swarm}.get(config.strategy)
    return section is not None and section.mode == "emulated"


def find_staleness(plan: Plan[Any], result: Mapping[str, Any]) -> tuple[float, int] | None:
    """Return the mean (over stages and microbatches) and maximum staleness; None if weights are always the newest."""
    if plan.delays:
        lags = [lag for stage in plan.delays.stages for lag in stage.lags]
        return float(np.mean(lags)), max(lags)
    return (result["staleness_mean"], result["staleness_max"]) if "staleness_mean" in result else None


def find_guarantee(plan: Plan[Any]) -> str:
    """Return how training relates to one device according to the plan."""
    if plan.delays and not plan.delays.differs:
        return f"differs: {plan.differs}; equal to one device with the same delays"
    return f"differs: {plan.differs}" if plan.differs else f"equal to {REFERENCE}"


def find_score(loaded: build.Parts) -> Score:
    """Return the metric of the task on the test split, or the training loss if there is no test split."""
    return loaded.problem.task.score if loaded.dataset.test else UNTESTED
