"""Trains a config with every strategy, and compares them, for `jaxpar compare strategies`."""

import multiprocessing
import os
import platform
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
from jaxpar import files, models
from jaxpar.checkpoint import ledger
from jaxpar.choose.asynchronous import predicted as predicted_for
from jaxpar.choose.candidates import AsyncCandidate, Candidate, Space, StateRatios, state_ratios
from jaxpar.choose.stages import possible_stages
from jaxpar.cluster import Cluster
from jaxpar.compare.page import html_page
from jaxpar.compare.pictures import curve_panels, draw_pictures
from jaxpar.compare.report import (
    REFERENCE,
    StrategyOutcome,
    best_of,
    comparison_columns,
    csv_text,
    describe_best,
    equal_outcomes,
    format_step_seconds,
    markdown,
    time_columns,
)
from jaxpar.compare.runs import (
    changed_settings,
    check_settings,
    configured,
    find_score,
    is_finished,
    prepare_run,
    read_outcome,
    read_result,
    run_logged,
)
from jaxpar.core import mesh
from jaxpar.core.plan import Plan
from jaxpar.errors import UserError, format_count
from jaxpar.inspect.plan_report import make_space
from jaxpar.launch.launcher import format_exit, forwarded
from jaxpar.launch.place import command_of
from jaxpar.run import build, metrics, report
from jaxpar.use.pages.recorded import CERTIFICATE

_EXCHANGES = ("dp", "ddp", "horovod", "byteps", "bagua_bytegrad", "zero1", "zero2", "zero3", "onebit_adam")
_SCHEDULES = ("model_parallel", "gpipe", "1f1b", "zb_h1", "pipedream", "pipedream_2bw")
_POLICIES = ("async", "ssp")
SWARM = "swarm"
COMPARED = (REFERENCE, *_EXCHANGES, *_SCHEDULES, *_POLICIES, SWARM)
LOG = "log.txt"
NOTES = (
    "The time of a step is the median of a run, without compilation. The strategies run one after another, so "
    "other load on the machine changes their ratios. The workers or peers of an emulated strategy take turns on these "
    "devices, in virtual time; the time of this emulation is not compared.",
    "What a device sends and its state follow from the plan. In flight are the gradients and activations of a step, "
    "as an estimate; the stashes of a pipeline are those of its plan.",
    "What a strategy computes by its plan holds up to rounding. Certificates measure it; the last column has their "
    "verdicts.",
)
PREDICTED = (
    "Predicted times are those of `jaxpar plan`, for the same batch on all devices of {cluster}, where pipelines "
    "have the largest possible number of stages, and the workers or peers of async, ssp and swarm have a device each."
)
ERROR = re.compile(r"jaxpar: |[\w.]+(Error|Exception)\b")  # start of the line in which a program reports an error


class Planned(NamedTuple):
    """A strategy of the comparison."""

    overrides: list[str]
    config: ConfigDict
    plan: Plan[Any] | str  # or the reason why there is none


class Prediction(NamedTuple):
    """The prediction for a strategy."""

    seconds: float | None  # of a step
    note: str = ""  # the mesh of a pipeline, or the reason why there is no time


def compare_strategies(
    config_name: str,
    overrides: Sequence[str],
    workdir: Path,
    *,
    names: Sequence[str],
    num_devices: int | None,
    predict_for: tuple[str, Cluster] | None,
) -> tuple[dict[str, StrategyOutcome], list[str]]:
    """Train some of COMPARED, write the table, the pictures and the page, and return the outcomes and the table.

    num_devices: None for all. predict_for: name of a cluster, and the cluster, for which times are predicted.
    """
    jax.config.update("jax_platforms", "cpu")  # runs need the memory of the GPUs
    virtual = configured(config_name, overrides).mesh.virtual_cpu_devices
    if virtual and num_devices:
        overrides = [*overrides, f"--config.mesh.virtual_cpu_devices={num_devices}"]
    cluster = find_cluster_apart(config_name, list(overrides))
    num_devices = num_devices or cluster.num_devices
    if num_devices < 2:
        raise UserError(
            f"config.mesh.virtual_cpu_devices is {virtual}; it must be at least 2, because this machine has one device"
        )
    settings = {name: [*overrides, *strategy_settings(name, num_devices)] for name in COMPARED}
    all_configs = {name: configured(config_name, of_strategy) for name, of_strategy in settings.items()}
    with files.locked(workdir):
        required = {REFERENCE, *names}
        for name, config in all_configs.items():
            if name in required:
                check_settings(config, workdir / name)
        wanted = [  # also those with a finished run of the config
            name
            for name, config in all_configs.items()
            if name in required or (is_finished(workdir / name) and not changed_settings(config, workdir / name))
        ]
        loaded = load(all_configs[REFERENCE], cluster)
        planned = {
            name: Planned(settings[name], config, possible_stages(config, loaded.problem, cluster))
            for name, config in all_configs.items()
            if name in wanted
        }
        predicted: dict[str, Prediction] = {}
        if predict_for:
            space = make_space(configured(config_name, overrides), predict_for[1])
            ratios = state_ratios(space.problem)
            predicted = {name: predict_strategy(name, config_name, overrides, space, ratios) for name in wanted}
        outcomes = train_all(planned, config_name, workdir, loaded)
        devices = format_count(num_devices, "virtual device")
        machine = f"{format_count(os.cpu_count() or 1, 'CPU core')} ({devices})"
        if cluster.platform != "cpu":
            machine = f"{num_devices} x {cluster.device_kind}"
        elsewhere = predict_for[0] if predict_for else ""
        return outcomes, write(outcomes, planned, config_name, workdir, loaded, machine, predicted, elsewhere)


def find_cluster_apart(config: str, overrides: list[str]) -> Cluster:
    """Return the devices of this machine. They are found in another process, which then releases them."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(find_cluster_of, config, overrides).result()


def find_cluster_of(config: str, overrides: list[str]) -> Cluster:
    """Return the devices that a run of this config would find."""
    mesh.prepare_jax(configured(config, overrides), Path())
    return clusters.find_cluster()


def strategy_settings(name: str, num_devices: int, num_stages: int | None = None) -> list[str]:
    """Return the overrides that select a strategy of COMPARED. num_stages: a divisor of the number of devices."""
    settings: dict[str, object] = {"exchange": "ddp", "mesh.data": num_devices, "mesh.stage": 1}
    if name in _EXCHANGES:
        settings |= {"strategy": "data_parallel", "exchange": name}
    elif name in _SCHEDULES:
        num_stages = num_stages or num_devices
        settings |= {"strategy": "pipeline", "pipeline.schedule": name}
        settings |= {"mesh.data": num_devices // num_stages, "mesh.stage": num_stages}
    elif name in _POLICIES:
        settings |= {"strategy": "async_data_parallel", "asynchronous.policy": name}
        settings |= {"asynchronous.num_workers": num_devices}
    elif name == SWARM:
        settings |= {"strategy": SWARM, "swarm.peers": num_devices}
    else:
        settings |= {"strategy": REFERENCE, "mesh.data": 1}
    return [f"--config.{key}={value}" for key, value in settings.items()]


def predict_strategy(name: str, config: str, overrides: Sequence[str], space: Space, ratios: StateRatios) -> Prediction:
    """Return the prediction for a strategy, with as many stages as possible, or the reason for the smallest number."""
    n, num_layers, stages = space.num_devices, len(space.problem.model.layers), [1]
    if name in _SCHEDULES:  # with a layer each; if there are none, the plan for n stages has the reason
        stages = [number for number in range(min(n, num_layers), 1, -1) if n % number == 0] or [n]
    reason = ""
    for num_stages in stages:
        of_strategy = configured(config, [*overrides, *strategy_settings(name, n, num_stages)])
        found = predicted_for(space, of_strategy, ratios)
        if isinstance(found, AsyncCandidate):
            return Prediction(found.seconds, f"{found.name}, mean staleness {found.mean_staleness:.2f}")
        if isinstance(found, Candidate):
            sizes = f"{format_count(num_stages, 'stage')} x {format_count(n // num_stages, 'replica')}"
            return Prediction(found.costs.seconds, sizes if name in _SCHEDULES else "")
        reason = found
    return Prediction(None, reason)


def load(config: ConfigDict, cluster: Cluster) -> build.Parts:
    """Read the data and build the model, which all strategies have in common. Raises UserError for their mistakes."""
    with tempfile.TemporaryDirectory() as folder:
        build.check_run(config, Path(folder), cluster)
        return build.load_parts(config, Path(folder), cluster)


def train_all(
    planned: Mapping[str, Planned], config: str, workdir: Path, loaded: build.Parts
) -> dict[str, StrategyOutcome]:
    """Train all strategies on the same examples, and return the outcomes. Raises KeyboardInterrupt after a signal."""
    commands = {
        name: prepare_run(config, workdir / name, one.overrides)
        for name, one in planned.items()
        if not isinstance(one.plan, str)
    }
    outcomes: dict[str, StrategyOutcome] = {}
    signals: list[int] = []
    took: list[float] = []  # of rows that were trained in this call, with start-up and compilation
    with forwarded(signals):
        for number, (name, one) in enumerate(planned.items(), start=1):
            print(f"row {number} of {len(planned)}  {name}: ", end="", flush=True)
            start, was_finished = time.monotonic(), is_finished(workdir / name)
            outcomes[name] = outcome = (
                StrategyOutcome(failed=one.plan)
                if isinstance(one.plan, str)
                else train_strategy(commands[name], one.config, one.plan, workdir / name, signals, loaded)
            )
            if signals:
                print(f"stopped\nresume    {command_of(sys.argv)}", flush=True)
                raise KeyboardInterrupt
            num_left = sum(other in commands and not is_finished(workdir / other) for other in list(planned)[number:])
            if is_finished(workdir / name) and not was_finished:
                took.append(time.monotonic() - start)
            finished = (read_result(workdir / other) for other in planned if is_finished(workdir / other))
            seconds = [sum(result["seconds"].values()) for result in finished]  # of their last starts
            mean = max(float(np.mean(some)) for some in (seconds, took) if some) if seconds else 0.0
            step = f"{format_step_seconds(outcome.step_seconds)} per step" if outcome.step_seconds else "not timed"
            result = f"failed: {outcome.failed}" if outcome.failed else step
            print(f"{result}; {metrics.format_clock(num_left * mean)} left", flush=True)
    used = {name: ledger.used_examples(workdir / name / "ledger") for name, row in outcomes.items() if not row.failed}
    first = next(iter(used), "")
    for name, examples in used.items():
        if examples != used[first]:
            outcomes[name] = StrategyOutcome(failed=f"the run did not use the same examples as {first}")
    return outcomes


def train_strategy(
    command: list[str], config: ConfigDict, plan: Plan[Any], workdir: Path, signals: list[int], loaded: build.Parts
) -> StrategyOutcome:
    """Return the outcome of a strategy, and train it with the command if it is not finished."""
    if not is_finished(workdir):
        code = run_logged(command, workdir / LOG, signals)
        if not is_finished(workdir):
            return StrategyOutcome(failed=reason_of_failure(code, (workdir / LOG).read_text(errors="replace")))
    return read_outcome(config, plan, workdir, loaded)


def reason_of_failure(code: int, output: str) -> str:
    """Return the reason why a run failed: the last line of its output that reports an error, or how it ended."""
    reported = [line for line in output.splitlines() if ERROR.match(line)]
    return reported[-1].removeprefix("jaxpar: ") if reported and code > 0 else format_exit(code)


def write(
    outcomes: Mapping[str, StrategyOutcome],
    planned: Mapping[str, Planned],
    config_name: str,
    workdir: Path,
    loaded: build.Parts,
    machine: str,
    predicted: Mapping[str, Prediction],
    cluster: str,
) -> list[str]:
    """Write the table, the pictures and the page, and return the table in Markdown, with its notes."""
    config, score = planned[REFERENCE].config, find_score(loaded)
    columns = comparison_columns(outcomes, batch_size=config.batch_size, metric=score.key, metric_format=score.format)
    notes = [*NOTES]
    if predicted:
        predicted_seconds = {name: one.seconds for name, one in predicted.items()}
        columns += time_columns(predicted_seconds, "predicted", batch_size=config.batch_size)
        notes += [PREDICTED.format(cluster=cluster), *prediction_notes(predicted)]
    kinds = {name: one.config.strategy for name, one in planned.items()}
    curve = loaded.problem.task.curve
    for name, figure in draw_pictures(outcomes, kinds, batch_size=config.batch_size, metric=curve).items():
        figure.savefig(workdir / f"{name}.png", dpi=150)
    size, splits = models.num_parameters(loaded.problem.model), build.split_sizes(loaded.dataset)
    examples = ", ".join(f"{number:,} {name}" for name, number in splits.items())
    header = (
        f"`{config_name}`: {config.model.name} of {size:,} parameters, {config.data.source} ({examples} examples), "
        f"{loaded.num_steps:,} steps of {config.batch_size} examples, learning rate {config.optimizer.lr:g}, seed "
        f"{config.seed}. Times are measured on {machine}."
    )
    notes.append(
        f"Started as `{report.python_path(config)}{command_of(sys.argv)}` on {platform.node()} "
        f"({report.processor()}), at commit {report.commit() or 'unknown'}, "
        f"with jaxpar {report.versions()['jaxpar']} and jax {jax.__version__}."
    )
    title = f"{len(outcomes)} strategies, {loaded.problem.task.name} with {config.model.name}"
    header = f"{describe_best(outcomes)} {header}".strip()
    advice = what_to_try(outcomes, planned, config_name, workdir, is_predicted=bool(predicted))
    lines = [header, "", *markdown(columns), *(f"\n{note}" for note in [*notes, *advice])]
    page = html_page(
        title,
        columns,
        outcomes,
        curve_panels(outcomes, kinds, curve),
        batch_size=config.batch_size,
        advice=advice,
        notes=[header, *notes],
    )
    files.write_text(workdir / "compare.md", "\n".join(lines) + "\n")
    files.write_text(workdir / "compare.csv", csv_text(columns))
    files.write_text(workdir / "compare.html", page)
    return lines


def prediction_notes(predicted: Mapping[str, Prediction]) -> list[str]:
    """Return the notes on the predictions, each with the strategies that it concerns."""
    of_note: dict[str, list[str]] = {}
    for name, one in predicted.items():
        if one.note:
            note = f"{'not predicted: ' if one.seconds is None else 'predicted with '}{one.note}"
            of_note.setdefault(note, []).append(name)
    return [f"{', '.join(concerned)}: {note}" for note, concerned in of_note.items()]


def what_to_try(
    outcomes: Mapping[str, StrategyOutcome],
    planned: Mapping[str, Planned],
    config_name: str,
    workdir: Path,
    *,
    is_predicted: bool,
) -> list[str]:
    """Return commands that follow from the outcomes. is_predicted: whether the times of a cluster are in the table."""

    def command(verb: str, name: str, flag: str) -> str:
        words = ["jaxpar", verb, f"--config={config_name}", *planned[name].overrides, flag]
        return f"`{report.python_path(planned[name].config)}{shlex.join(words)}`"

    fastest, smallest = best_of(outcomes) or ("", "")
    advice = []
    if fastest:
        advice.append(f"To train with {fastest}, the fastest: {command('train', fastest, '--workdir=NEW')}")
    if smallest != fastest:
        advice.append(f"To train in least memory, with {smallest}: {command('train', smallest, '--workdir=NEW')}")
    certifiable = [name for name in equal_outcomes(outcomes) if name != REFERENCE and not outcomes[name].certificate]
    if certifiable:
        name = fastest if fastest in certifiable else certifiable[-1]
        arguments = command("certify", name, f"--output={workdir / name / CERTIFICATE}")
        advice.append(f"To measure whether {name} computes what its plan states, for the last column: {arguments}")
    if not is_predicted:
        advice.append("To add the predicted times of GPUs that you don't have: `--cluster=h100:8`")
    return advice
