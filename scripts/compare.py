"""Trains a config with every strategy, and compares their time, traffic, memory and accuracy.

    scripts/python scripts/compare.py --config=configs/compare_bert.py [--workdir=runs/compare]
        [--strategies=ddp,gpipe,..] [--devices=2] [--cluster=h100:8] [--config.KEY=VALUE ...]

Each strategy is a run of the training binary in WORKDIR/STRATEGY, with the same examples in the same order and the same
seed. Finished runs are kept, and unfinished ones are resumed. `single`, the reference, is always one of them, and so is
every strategy with a finished run of these settings in WORKDIR. The settings of a strategy override those of the config
and the command line.

With --cluster, further columns are the times that scripts/plan.py predicts for a cluster that need not exist.

The script writes a table as WORKDIR/compare.md and WORKDIR/compare.csv, pictures as WORKDIR/*.png, and both as the page
WORKDIR/compare.html, which is self-contained. docs/strategies.md explains the columns. A strategy that fails is in
the table with the reason.

Exit codes: 0 if all strategies have results; 1 if some failed; 2 for invalid arguments; 130 for a Ctrl-C, which stops
the current run after it has saved its state.
"""

import argparse
import multiprocessing
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar import cluster as clusters
from jaxpar import files, mesh, models, strategies
from jaxpar.checkpoint import ledger
from jaxpar.choose.candidates import Candidate, Space, StateRatios, state_ratios
from jaxpar.choose.unranked import predicted as predicted_for
from jaxpar.cluster import Cluster
from jaxpar.cluster_file import find_named
from jaxpar.command_line import Parser, integer, names, output_path
from jaxpar.errors import FAILED, UserError, exit_code, format_count
from jaxpar.launch.launcher import format_exit, forwarded
from jaxpar.pages.verdict import CERTIFICATE
from jaxpar.plan import Plan
from jaxpar.run import build, metrics
from scripts.comparison import page, pictures, table
from scripts.comparison.results import find_score, read_outcome, run_seconds
from scripts.comparison.runs import changed_settings, check_settings, configured, is_finished, prepare_run, run_logged
from scripts.comparison.table import REFERENCE, Outcome, format_seconds
from scripts.plan import make_space

EXCHANGES = ("dp", "ddp", "horovod", "byteps", "bagua_bytegrad", "zero1", "zero2", "zero3", "onebit_adam")
SCHEDULES = ("model_parallel", "gpipe", "1f1b", "zb_h1", "pipedream", "pipedream_2bw")
POLICIES = ("async", "ssp")
SWARM = "swarm"
NAMES = (REFERENCE, *EXCHANGES, *SCHEDULES, *POLICIES, SWARM)
LOG = "log.txt"
NOTES = (
    "The time of a step is the median of a run, without compilation. The strategies run one after another, so "
    "other load on the machine changes their ratios. The workers or peers of an emulated strategy take turns on these "
    "devices, in virtual time; the time of this emulation is not compared.",
    "What a device sends and its state follow from the plan. In flight are the gradients and activations of a step, "
    "as an estimate; the stashes of a pipeline are those of its plan.",
)
PREDICTED = (
    "Predicted times are those of scripts/plan.py, for the same batch on all devices of the cluster, where pipelines "
    "have the largest possible number of stages, and the workers or peers of async, ssp and swarm have a device each."
)
ERROR = re.compile(r"jaxpar: |[\w.]+(Error|Exception)\b")  # start of the line in which a program reports an error


class Planned(NamedTuple):
    """A strategy of the comparison: its overrides, its config, and its plan, or the reason why there is none."""

    overrides: list[str]
    config: ConfigDict
    plan: Plan[Any] | str


class Prediction(NamedTuple):
    """Predicted seconds of a step, or None, and a note: the mesh of a pipeline, or the reason why there is no time."""

    seconds: float | None
    note: str = ""


def main() -> int:
    """Train all strategies, and write the table, the pictures and the page."""
    parser = Parser(__doc__)
    parser.require("--config", "--config=configs/compare_bert.py", help="config file as PATH[:PRESET]")
    parser.add_argument("--workdir", type=output_path, default="runs/compare", help="directory of the runs")
    parser.add_argument(
        "--strategies", type=names(NAMES), default=list(NAMES), help=f"some of {', '.join(NAMES)} (default: all)"
    )
    parser.add_argument("--devices", type=integer(2), help="number of devices (default: all)")
    parser.add_argument("--cluster", metavar="FILE|NAME:HOSTSxDEVICES", help="also predict times on this cluster")
    arguments, overrides = parser.parse_with_overrides()
    elsewhere = find_named(arguments.cluster, "--cluster")[1] if arguments.cluster is not None else None
    jax.config.update("jax_platforms", "cpu")  # runs need the memory of the GPUs
    virtual = configured(arguments.config, overrides).mesh.virtual_cpu_devices
    if virtual and arguments.devices:
        overrides.append(f"--config.mesh.virtual_cpu_devices={arguments.devices}")
    cluster = find_cluster_apart(arguments.config, overrides)
    num_devices = arguments.devices or cluster.num_devices
    if num_devices < 2:
        raise UserError(
            f"config.mesh.virtual_cpu_devices is {virtual}; it must be at least 2, because this machine has one device"
        )
    settings = {name: [*overrides, *strategy_settings(name, num_devices)] for name in NAMES}
    all_configs = {name: configured(arguments.config, of_strategy) for name, of_strategy in settings.items()}
    with files.locked(arguments.workdir):
        wanted = choose_rows(arguments.strategies, all_configs, arguments.workdir)
        loaded = load(all_configs[REFERENCE], cluster)
        planned = {
            name: Planned(settings[name], config, strategies.possible(config, loaded.problem, cluster))
            for name, config in all_configs.items()
            if name in wanted
        }
        predicted = predict_all(arguments.config, wanted, overrides, elsewhere) if elsewhere else {}
        outcomes = train_all(planned, arguments.config, arguments.workdir, loaded)
        lines = write(outcomes, planned, arguments, loaded, describe_machine(cluster, num_devices), predicted)
    print("\n".join(["", *lines, "", f"page      {arguments.workdir}/compare.html"]))
    return FAILED if any(row.failed for row in outcomes.values()) else 0


def choose_rows(chosen: Sequence[str], all_configs: Mapping[str, ConfigDict], workdir: Path) -> list[str]:
    """Return the strategies of the table: REFERENCE, the chosen ones, and those with a finished run of the config.

    Raises:
      UserError: REFERENCE or a chosen strategy has a run with other settings.
    """
    required = {REFERENCE, *chosen}
    for name, config in all_configs.items():
        if name in required:
            check_settings(config, workdir / name)
    return [
        name
        for name, config in all_configs.items()
        if name in required or (is_finished(workdir / name) and not changed_settings(config, workdir / name))
    ]


def find_cluster_apart(config: str, overrides: list[str]) -> Cluster:
    """Return the devices of this machine. They are found in another process, which then releases them."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(find_cluster_of, config, overrides).result()


def find_cluster_of(config: str, overrides: list[str]) -> Cluster:
    """Return the devices that a run of this config would find."""
    mesh.prepare_jax(configured(config, overrides), Path())
    return clusters.find_cluster()


def describe_machine(cluster: Cluster, num_devices: int) -> str:
    """Return the devices of the comparison: `2 CPU cores (2 virtual devices)`, or `8 x Tesla V100-SXM2-32GB`."""
    if cluster.platform != "cpu":
        return f"{num_devices} x {cluster.device_kind}"
    return f"{format_count(os.cpu_count() or 1, 'CPU core')} ({format_count(num_devices, 'virtual device')})"


def strategy_settings(name: str, num_devices: int, num_stages: int | None = None) -> list[str]:
    """Return the overrides that select a strategy of NAMES on this number of devices.

    num_stages: stages of a pipeline, a divisor of the number of devices; None: as many as devices.
    """
    settings: dict[str, object] = {"exchange": "ddp", "mesh.data": num_devices, "mesh.stage": 1}
    if name in EXCHANGES:
        settings |= {"strategy": "data_parallel", "exchange": name}
    elif name in SCHEDULES:
        num_stages = num_stages or num_devices
        settings |= {"strategy": "pipeline", "pipeline.schedule": name}
        settings |= {"mesh.data": num_devices // num_stages, "mesh.stage": num_stages}
    elif name in POLICIES:
        settings |= {"strategy": "async_data_parallel", "asynchronous.policy": name}
        settings |= {"asynchronous.num_workers": num_devices}
    elif name == SWARM:
        settings |= {"strategy": SWARM, "swarm.peers": num_devices}
    else:
        settings |= {"strategy": REFERENCE, "mesh.data": 1}
    return [f"--config.{key}={value}" for key, value in settings.items()]


def predict_all(
    config: str, wanted: Sequence[str], overrides: Sequence[str], cluster: Cluster
) -> dict[str, Prediction]:
    """Return the prediction for each strategy on all devices of a cluster."""
    space = make_space(configured(config, overrides), cluster)
    ratios = state_ratios(space.problem)
    return {name: predict(name, config, overrides, space, ratios) for name in wanted}


def predict(name: str, config: str, overrides: Sequence[str], space: Space, ratios: StateRatios) -> Prediction:
    """Return the prediction for a strategy. A pipeline has as many stages as possible.

    If no number of stages is possible, the reason is that of the smallest one.
    """
    reason, is_pipeline = "", name in SCHEDULES
    for num_stages in stage_numbers(space) if is_pipeline else [1]:
        settings = strategy_settings(name, space.num_devices, num_stages)
        of_strategy = configured(config, [*overrides, *settings])
        found = predicted_for(space, of_strategy, ratios)
        if not isinstance(found, str):
            stages, replicas = format_count(num_stages, "stage"), space.num_devices // num_stages
            if not isinstance(found, Candidate):
                return Prediction(found.seconds, f"{found.name}, mean staleness {found.mean_staleness:.2f}")
            note = f"{stages} x {format_count(replicas, 'replica')}" if is_pipeline else ""
            return Prediction(found.costs.seconds, note)
        reason = found
    return Prediction(None, reason)


def stage_numbers(space: Space) -> list[int]:
    """Return the numbers of stages that divide the devices of a cluster and have a layer each, the largest first.

    If there are none, it is the number of devices, for which the plan then gives the reason.
    """
    n, num_layers = space.num_devices, len(space.problem.model.layers)
    return [number for number in range(min(n, num_layers), 1, -1) if n % number == 0] or [n]


def load(config: ConfigDict, cluster: Cluster) -> build.Loaded:
    """Read the data and build the model, which all strategies have in common. Raises UserError for their mistakes."""
    with tempfile.TemporaryDirectory() as folder:
        build.check_run(config, Path(folder), cluster)
        return build.load_parts(config, Path(folder), cluster)


def train_all(planned: Mapping[str, Planned], config: str, workdir: Path, loaded: build.Loaded) -> dict[str, Outcome]:
    """Train all strategies, one after another, and return the outcomes. Raises KeyboardInterrupt after a signal."""
    commands = {
        name: prepare_run(config, workdir / name, one.overrides)
        for name, one in planned.items()
        if not isinstance(one.plan, str)
    }
    outcomes: dict[str, Outcome] = {}
    signals: list[int] = []
    took: list[float] = []  # of rows that were trained in this call, with start-up and compilation
    with forwarded(signals):
        for number, (name, one) in enumerate(planned.items(), start=1):
            print(f"row {number} of {len(planned)}  {name}: ", end="", flush=True)
            start, was_finished = time.monotonic(), is_finished(workdir / name)
            outcomes[name] = (
                Outcome(failed=one.plan)
                if isinstance(one.plan, str)
                else train(commands[name], one.config, one.plan, workdir / name, signals, loaded)
            )
            if signals:
                command = " ".join(["scripts/python", *map(shlex.quote, sys.argv)])
                print(f"stopped\nresume    {command}", flush=True)
                raise KeyboardInterrupt
            left = [
                other
                for other, its in list(planned.items())[number:]
                if not isinstance(its.plan, str) and not is_finished(workdir / other)
            ]
            if is_finished(workdir / name) and not was_finished:
                took.append(time.monotonic() - start)
            seconds = [run_seconds(workdir / other) for other in planned if is_finished(workdir / other)]
            mean = max(float(np.mean(some)) for some in (seconds, took) if some) if seconds else 0.0
            clock = metrics.format_clock(len(left) * mean)
            print(f"{describe_outcome(outcomes[name])}; {clock} left", flush=True)
    return check_examples(outcomes, workdir)


def train(
    command: list[str], config: ConfigDict, plan: Plan[Any], workdir: Path, signals: list[int], loaded: build.Loaded
) -> Outcome:
    """Return the outcome of a strategy, and train it with the command if it is not finished."""
    if not is_finished(workdir):
        code = run_logged(command, workdir / LOG, signals)
        if not is_finished(workdir):
            return Outcome(failed=failure(code, (workdir / LOG).read_text(errors="replace")))
    return read_outcome(config, plan, workdir, loaded)


def failure(code: int, output: str) -> str:
    """Return the reason why a run failed: the last line of its output that reports an error, or how it ended."""
    reported = [line for line in output.splitlines() if ERROR.match(line)]
    return reported[-1].removeprefix("jaxpar: ") if reported and code > 0 else format_exit(code)


def check_examples(outcomes: Mapping[str, Outcome], workdir: Path) -> dict[str, Outcome]:
    """Return the outcomes, in which a run has failed if its examples are not those of the first one."""
    used = {name: ledger.used_examples(workdir / name / "ledger") for name, row in outcomes.items() if not row.failed}
    first = next(iter(used), "")
    reason = f"the run did not use the same examples as {first}"
    return {
        name: Outcome(failed=reason) if name in used and used[name] != used[first] else row
        for name, row in outcomes.items()
    }


def describe_outcome(outcome: Outcome) -> str:
    """Return an outcome in one line."""
    if outcome.failed:
        return f"failed: {outcome.failed}"
    return f"{format_seconds(outcome.step_seconds)} per step" if outcome.step_seconds else "not timed"


def write(
    outcomes: Mapping[str, Outcome],
    planned: Mapping[str, Planned],
    arguments: argparse.Namespace,
    loaded: build.Loaded,
    machine: str,
    predicted: Mapping[str, Prediction],
) -> list[str]:
    """Write the table, the pictures and the page, and return the table in Markdown, with its notes."""
    workdir, config, score = arguments.workdir, planned[REFERENCE].config, find_score(loaded)
    columns = table.comparison_columns(
        outcomes, batch_size=config.batch_size, machine=machine, metric=score.key, metric_format=score.format
    )
    if predicted:
        heading = f"predicted for {arguments.cluster}"
        predicted_seconds = {name: one.seconds for name, one in predicted.items()}
        columns += table.time_columns(predicted_seconds, heading, batch_size=config.batch_size)
    kinds = {name: one.config.strategy for name, one in planned.items()}
    drawn = pictures.pictures(
        outcomes, kinds, batch_size=config.batch_size, machine=machine, metric=loaded.problem.task.curve
    )
    for picture in drawn:
        picture.figure.savefig(workdir / f"{picture.name}.png", dpi=150)
    size = models.num_parameters(loaded.problem.model)
    header = (
        f"`{arguments.config}`: {config.model.name} of {size:,} parameters, {config.data.source}, "
        f"{loaded.num_steps:,} steps of {config.batch_size} examples, learning rate {config.optimizer.lr:g}, seed "
        f"{config.seed}. Times are measured on {machine}."
    )
    notes = [
        *NOTES,
        *([PREDICTED, *prediction_notes(predicted)] if predicted else []),
        certify_note(outcomes, planned, arguments),
    ]
    lines = [header, "", *table.markdown(columns), *(f"\n{note}" for note in notes)]
    figures = {picture.title: pictures.svg(picture) for picture in drawn}
    title = f"{len(outcomes)} strategies, {loaded.problem.task.name} with {config.model.name}"
    files.write_text(workdir / "compare.md", "\n".join(lines) + "\n")
    files.write_text(workdir / "compare.csv", table.csv_text(columns))
    files.write_text(workdir / "compare.html", page.html_page(title, columns, figures, [header, *notes]))
    return lines


def prediction_notes(predicted: Mapping[str, Prediction]) -> list[str]:
    """Return the notes on the predictions, each with the strategies that it concerns."""
    of_note: dict[str, list[str]] = {}
    for name, one in predicted.items():
        if one.note:
            of_note.setdefault(
                f"{'not predicted: ' if one.seconds is None else 'predicted with '}{one.note}", []
            ).append(name)
    return [f"{', '.join(concerned)}: {note}" for note, concerned in of_note.items()]


def certify_note(outcomes: Mapping[str, Outcome], planned: Mapping[str, Planned], arguments: argparse.Namespace) -> str:
    """Return the note on the last column, with the command that certifies the last strategy that is finished."""
    note = (
        "What a strategy computes by its plan holds up to rounding. Certificates measure it; the last column has their "
        "verdicts."
    )
    finished = [name for name, row in outcomes.items() if not row.failed]
    if not finished:
        return note
    name = finished[-1]
    output = f"--output={arguments.workdir / name / CERTIFICATE}"
    overrides = planned[name].overrides
    command = ["scripts/python", "scripts/certify.py", f"--config={arguments.config}", *overrides, output]
    return f"{note} For {name}: `{shlex.join(command)}`"


if __name__ == "__main__":
    sys.exit(exit_code(main))
