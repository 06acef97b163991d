"""Compares pipeline schedules by the virtual time to an accuracy on a cluster, for `jaxpar compare pipelines`."""

import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxpar import cluster as clusters
from jaxpar import data, files, strategies
from jaxpar.choose.costs.layers import TracedLayers
from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.cluster import Cluster, Link
from jaxpar.cluster.gpus import gpu_kinds
from jaxpar.compare.pictures import PolicyCurve, save_policy_curves
from jaxpar.compare.report import markdown_table
from jaxpar.compare.runs import configured, finish_run
from jaxpar.core import mesh
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.errors import UserError, format_bytes
from jaxpar.measure.phases import Phases
from jaxpar.run import build, metrics
from jaxpar.strategies.pipeline.tables.simulate import Times, simulate_table, steady_bubble_rate, work
from jaxpar.strategies.pipeline.tables.table import Table

DDP = "ddp"
BASELINE = "1f1b"  # the case to which the others are compared
UNSPLIT = "pipedream_unsplit"  # a batch is one microbatch, as in the paper
# By name: color (Okabe and Ito, "Color Universal Design", 2008) and style in the picture, where curves can be equal.
PIPELINE_CASES = {
    DDP: ("#000000", "-"),
    "gpipe": ("#e69f00", "-"),
    BASELINE: ("#56b4e9", "--"),
    "zb_h1": ("#009e73", "-."),
    "pipedream": ("#d55e00", "-"),
    UNSPLIT: ("#d55e00", ":"),
    "pipedream_2bw": ("#cc79a7", "-"),
}


class PipelineStep(NamedTuple):
    """The time of a step on the cluster, and the fraction of it in which the busiest device waits."""

    seconds: float
    bubble: float


class PipelineCase(NamedTuple):
    """The settings of a case, and its costs on the cluster."""

    settings: list[str]  # overrides of the config
    num_microbatches: int | None  # number of microbatches; None for data parallelism
    step: PipelineStep  # time of a step
    memory: float  # bytes of the device that needs the most


class PipelineOutcome(NamedTuple):
    """The outcome of one run: steps of its evaluations, and values of the metric on the validation split.

    The metric of a run that diverged ends there.
    """

    steps: list[int]
    values: list[float]
    diverged: bool


def compare_pipelines(
    config_name: str,
    overrides: Sequence[str],
    workdir: Path,
    cluster: Cluster,
    *,
    num_microbatches: int,
    target: float,
    cases: Sequence[str],
) -> list[str]:
    """Train all cases and BASELINE. Write the table and the plot, and return the table.

    Args:
      config_name: the config, as PATH[:PRESET].
      overrides: of the config.
      workdir: directory of the runs.
      cluster: devices to predict times for: a stage each, or a replica each.
      num_microbatches: number of microbatches of a pipeline.
      target: accuracy to reach.
      cases: some of PIPELINE_CASES.
    """
    wanted = [name for name in PIPELINE_CASES if name in {BASELINE, *cases}]
    settings = {name: case_settings(name, cluster.num_devices, num_microbatches) for name in wanted}
    with tempfile.TemporaryDirectory() as folder:
        run = _make_run(configured(config_name, [*overrides, *settings[BASELINE]]), Path(folder))
        planned = {
            name: plan_case(run, cluster, configured(config_name, [*overrides, *added]), added)
            for name, added in settings.items()
        }
    metric, outcomes = run.problem.task.curve, {}
    for name, case in planned.items():
        outcomes[name] = _train(config_name, workdir / name, [*overrides, *case.settings], metric)
        print(f"{name:18} {format_step(case.step)}  {'diverged' if outcomes[name].diverged else 'trained'}", flush=True)
    lines = [_describe(cluster, run.config), "", *_rows(planned, outcomes, target, metric)]
    files.write_text(workdir / "pipelines.md", "\n".join(lines) + "\n")
    _draw(planned, outcomes, target, metric, workdir / "pipelines.png")
    return lines


def case_settings(name: str, num_devices: int, num_microbatches: int) -> list[str]:
    """Return the overrides of a case."""
    if name == DDP:
        settings = {"strategy": "data_parallel", "exchange": "ddp", "mesh.data": num_devices, "mesh.stage": 1}
    else:
        settings = {
            "strategy": "pipeline",
            "mesh.data": 1,
            "mesh.stage": num_devices,
            "pipeline.schedule": name.removesuffix("_unsplit"),
            "pipeline.num_microbatches": 1 if name == UNSPLIT else num_microbatches,
        }
    return [f"--config.{key}={value}" for key, value in settings.items()]


def _make_run(config: ConfigDict, workdir: Path) -> build.Run:
    """Build a run without training it. Raises UserError if it cannot be compared."""
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    run = build.make_run(config, workdir, Phases(), build.check_run(config, workdir))
    if run.dataset.validation is None:
        raise UserError("config.data has no validation split; it must have one, on which the target is reached")
    return run


def plan_case(run: build.Run, cluster: Cluster, config: ConfigDict, settings: list[str]) -> PipelineCase:
    """Plan a case for the cluster. run: a run with the same data and model."""
    plan = strategies.plan(config, run.problem, cluster)
    memory = max(plan.device_bytes) + sum(strategies.in_flight_bytes(plan, run.problem).values())
    [device] = [name for name, kind in gpu_kinds().items() if kind.device_kind == cluster.device_kind]
    size = config.batch_size // plan.decision.batch_divisor
    gpu = clusters.named_cluster(device, 1)
    layers = TracedLayers(run.problem, gpu).profile(size, run.config.pipeline.remat)
    if config.strategy != "pipeline":
        return PipelineCase(
            settings, None, data_parallel_seconds(layers, cluster.num_devices, cluster.links[DATA]), memory
        )
    table, bounds = plan.details.table, plan.details.stages.bounds
    if table.replicas:
        devices = ",".join(map(str, table.replicas))
        raise UserError(
            f"config.pipeline.replicas is {devices}; it must be empty, because each stage has one device here"
        )
    step = pipeline_seconds(table, layers, bounds, cluster.links[STAGE])
    return PipelineCase(settings, table.num_microbatches, step, memory)


def pipeline_seconds(table: Table, layers: Sequence[LayerProfile], bounds: Sequence[int], link: Link) -> PipelineStep:
    """Return the time of a step of a pipeline with one stage per device.

    Args:
      table: its schedule; a periodic table takes the time of its steady state.
      layers: the profile for one microbatch.
      bounds: first layer of each stage, and the number of layers.
      link: the link between neighbouring stages.
    """
    stages = [layers[first:end] for first, end in pairwise(bounds)]
    forward = [sum(layer.forward_s for layer in stage) for stage in stages]
    half = [sum(layer.backward_s for layer in stage) / 2 for stage in stages]
    times = Times(forward, half, half)
    largest = max(stage[-1].output_bytes for stage in stages[:-1]) / link.bandwidth
    busy = float(max(work(table, times)))
    if table.period:
        seconds = busy / (1 - float(steady_bubble_rate(table, times, link.latency + largest)))
    else:
        seconds = float(simulate_table(table, times, link.latency + largest).makespan)
    # The simulator lets the transfers of a link overlap. `busy` is a bound except for rounding.
    seconds = max(seconds, busy, table.num_microbatches * largest)
    return PipelineStep(seconds, 1 - busy / seconds)


def data_parallel_seconds(layers: Sequence[LayerProfile], num_replicas: int, link: Link) -> PipelineStep:
    """Return the time of a step of data parallelism. layers: the profile for the examples of one replica."""
    computed, exchanged = sum(layer.forward_s for layer in layers), 0.0
    for layer in reversed(layers):
        computed += layer.backward_s
        message = link.latency + layer.weight_bytes / num_replicas / link.bandwidth
        exchanged = max(computed, exchanged) + 2 * (num_replicas - 1) * message * (layer.weight_bytes > 0)
    return PipelineStep(exchanged, 1 - computed / exchanged)


def _train(config: str, workdir: Path, overrides: list[str], metric: str) -> PipelineOutcome:
    """Start or resume the run if it is not finished, and return its outcome."""
    finished = finish_run(config, workdir, overrides)
    _rows = [row for row in metrics.read_metrics(workdir) if row["split"] == "validation" and row[metric] is not None]
    return PipelineOutcome([row["step"] for row in _rows], [row[metric] for row in _rows], not finished)


def _describe(cluster: Cluster, config: ConfigDict) -> str:
    """Return the cluster and the common settings of the runs in one line."""
    link, dtype = cluster.links[STAGE], config.model.dtype
    assert cluster.memory_bandwidth is not None
    return (
        f"{cluster.num_devices} x {cluster.device_kind}, each {cluster.peak_flops[dtype] / 1e12:g} TFLOP/s in {dtype} "
        f"and {format_bytes(cluster.memory_bandwidth)}/s of memory; links of {format_bytes(link.bandwidth)}/s with "
        f"{link.latency * 1e6:g} us latency; {config.batch_size} examples per batch, learning rate "
        f"{config.optimizer.lr:g}, seed {config.seed}"
    )


def format_step(step: PipelineStep) -> str:
    """Format the time of a step and its bubble."""
    return f"{step.seconds * 1e3:.3g} ms per step, bubble {step.bubble:.1%}"


def steps_to(outcome: PipelineOutcome, target: float) -> int | None:
    """Return the step of the first evaluation at or above the target; None if there is none."""
    reached = (step for step, value in zip(outcome.steps, outcome.values, strict=True) if value >= target)
    return next(reached, None)


def _rows(
    cases: Mapping[str, PipelineCase], outcomes: Mapping[str, PipelineOutcome], target: float, metric: str
) -> list[str]:
    """Return the table, in Markdown."""
    goal = f"{target:.0%}"
    heads = ["strategy", "microbatches", "time of a step", "bubble", f"steps to {goal}", f"time to {goal}"]
    heads += [f"relative to {BASELINE}", "memory per device", f"final {metric}"]
    cells = []
    steps = {name: steps_to(outcome, target) for name, outcome in outcomes.items()}
    seconds = {name: number * cases[name].step.seconds for name, number in steps.items() if number is not None}
    for name, case in cases.items():
        reached = ["not reached", "", ""]
        if name in seconds:
            ratio = f"{seconds[name] / seconds[BASELINE]:.2f}" if BASELINE in seconds else ""
            reached = [str(steps[name]), f"{seconds[name]:.3g} s", ratio]
        cells.append([
            name,
            str(case.num_microbatches or ""),
            f"{case.step.seconds * 1e3:.3g} ms",
            f"{case.step.bubble:.1%}",
            *reached,
            format_bytes(case.memory),
            "diverged" if outcomes[name].diverged else f"{outcomes[name].values[-1]:.2%}",
        ])  # fmt: skip
    return markdown_table(heads, cells)


def _draw(
    cases: Mapping[str, PipelineCase], outcomes: Mapping[str, PipelineOutcome], target: float, metric: str, path: Path
) -> None:
    """Plot the metric against steps and against virtual time."""
    curves = []
    for name, (steps, values, _) in outcomes.items():
        color, style = PIPELINE_CASES[name]
        number = steps_to(outcomes[name], target)
        x = steps, np.array(steps) * cases[name].step.seconds
        reached = None if number is None else steps.index(number)
        curves.append(PolicyCurve(name, x, values, {"color": color, "linestyle": style, "lw": 1.6}, reached))
    save_policy_curves(path, {"": curves}, f"{metric} (validation)", target)
