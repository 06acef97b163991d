"""Compares pipeline schedules and data parallelism by the time to a target accuracy, in virtual time on a cluster.

    scripts/python scripts/compare_pipelines.py --config=configs/quickstart.py [--workdir=runs/pipelines] [--stages=2]
        [--num_microbatches=8] [--target=0.7] [--cases=1f1b,pipedream,..] [--device=v100] [--bandwidth=1.5e11]
        [--latency=5e-6] [--config.KEY=VALUE ...]

Each case is a run of the training binary, with the same batches and seed; a run that is already in the workdir is not
repeated. The settings of a case override those of the config and the command line. The virtual time of a run is its
number of steps times the time of a step on the cluster, which does not depend on this machine:

  layers       times by the roofline of the GPU (scripts/profile_layers.py) for the longest texts. Half of a backward
               pass is B, and half is W. The update of the weights is not counted.
  pipelines    by the simulator. A result takes the latency, and its bytes divided by the bandwidth, to the next stage.
               A schedule without flush takes the time of a step in its steady state.
  ddp          each layer's gradients are exchanged by a ring all-reduce as soon as they are computed, one layer at a
               time, while the backward pass of earlier layers continues

The script draws the accuracy against steps and against virtual time as WORKDIR/pipelines.png, and prints a table, which
it also writes as WORKDIR/pipelines.md:

  bubble       fraction of a step in which the busiest device waits
  time to      virtual time of the first evaluation (config.eval.every_steps) at or above the target
  memory       of the device with the most, according to the plan and its estimates (docs/plans.md)
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from ml_collections import ConfigDict

matplotlib.use("Agg")
from matplotlib import pyplot

from jaxpar import cluster as clusters
from jaxpar import data, files, mesh, strategies
from jaxpar.choose.costs.layers import TracedLayers
from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.cluster import Cluster, Link
from jaxpar.command_line import Parser, choice, integer, names, number, output_path
from jaxpar.errors import UserError, exit_code, format_bytes
from jaxpar.gpus import gpu_kinds
from jaxpar.measure.phases import Phases
from jaxpar.mesh import DATA, STAGE
from jaxpar.pipeline.tables.simulate import LARGEST_VALUE, Times, simulate_table, steady_bubble_rate, work
from jaxpar.pipeline.tables.table import Table
from jaxpar.run import build, metrics
from scripts.comparison.runs import configured, finish_run

DDP = "ddp"
REFERENCE = "1f1b"  # the case to which the others are compared
UNSPLIT = "pipedream_unsplit"  # a batch is one microbatch, as in the paper
# By name: color (Okabe and Ito, "Color Universal Design", 2008) and style in the picture, where curves can be equal.
CASES = {
    DDP: ("#000000", "-"),
    "gpipe": ("#e69f00", "-"),
    REFERENCE: ("#56b4e9", "--"),
    "zb_h1": ("#009e73", "-."),
    "pipedream": ("#d55e00", "-"),
    UNSPLIT: ("#d55e00", ":"),
    "pipedream_2bw": ("#cc79a7", "-"),
}


class StepTime(NamedTuple):
    """The time of a step on the cluster, and the fraction of it in which the busiest device waits."""

    seconds: float
    bubble: float


class Case(NamedTuple):
    """The settings of a case, and its costs on the cluster.

    Attributes:
      settings: overrides of the config.
      num_microbatches: number of microbatches; None for data parallelism.
      step: time of a step.
      memory: bytes of the device that needs the most.
    """

    settings: list[str]
    num_microbatches: int | None
    step: StepTime
    memory: float


class Outcome(NamedTuple):
    """The outcome of one run: steps of its evaluations, and values of the metric on the validation split.

    The metric of a run that diverged ends there.
    """

    steps: list[int]
    values: list[float]
    diverged: bool


def main() -> None:
    """Train all cases, and write the table and the plot."""
    parser = Parser(__doc__)
    add = parser.add_argument
    parser.require("--config", "--config=configs/quickstart.py", help="config file as PATH[:PRESET]")
    add("--workdir", type=output_path, default="runs/pipelines", help="directory of the runs")
    add("--stages", type=integer(2), default=2, help="number of devices: stages, or replicas of ddp")
    add("--num_microbatches", type=integer(1), default=8, help="number of microbatches of a batch")
    add("--target", type=number("a number between 0 and 1", maximum=1), default=0.7, help="accuracy to reach")
    add("--cases", type=names(CASES), default=list(CASES), help=f"some of {', '.join(CASES)} (default: all)")
    kinds = gpu_kinds()
    add("--device", type=choice(kinds, ignore_case=True), default="v100", help=f"GPU: {', '.join(kinds)}")
    rate = number("at least 1 byte per second", minimum=1)
    add("--bandwidth", type=rate, default=1.5e11, help="of each link, in bytes per second")
    add(
        "--latency",
        type=number(f"a time between 0 and {LARGEST_VALUE:g}", maximum=LARGEST_VALUE),
        default=5e-6,
        help="of each link, in seconds",
    )
    arguments, overrides = parser.parse_with_overrides()
    link = Link(arguments.bandwidth, arguments.latency)
    cluster = clusters.named_cluster(arguments.device, arguments.stages, links={DATA: link, STAGE: link})
    wanted = [name for name in CASES if name in {REFERENCE, *arguments.cases}]
    settings = {name: case_settings(name, arguments.stages, arguments.num_microbatches) for name in wanted}
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(configured(arguments.config, [*overrides, *settings[REFERENCE]]), Path(folder))
        cases = {
            name: plan_case(run, cluster, configured(arguments.config, [*overrides, *added]), added)
            for name, added in settings.items()
        }
    outcomes = {}
    for name, case in cases.items():
        workdir = arguments.workdir / name
        outcomes[name] = train(arguments.config, workdir, [*overrides, *case.settings], run.problem.task.curve)
        print(f"{name:18} {format_step(case.step)}  {'diverged' if outcomes[name].diverged else 'trained'}", flush=True)
    lines = [describe(cluster, run.config), "", *rows(cases, outcomes, arguments.target, run.problem.task.curve)]
    files.write_text(arguments.workdir / "pipelines.md", "\n".join(lines) + "\n")
    draw(cases, outcomes, arguments.target, run.problem.task.curve, arguments.workdir / "pipelines.png")
    print("\n".join(["", *lines, "", f"picture   {arguments.workdir}/pipelines.png"]))


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


def make_run(config: ConfigDict, workdir: Path) -> build.Run:
    """Build a run without training it. Raises UserError if it cannot be compared."""
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    run = build.make_run(config, workdir, Phases(), build.check_run(config, workdir))
    if run.dataset.validation is None:
        raise UserError("config.data has no validation split; it must have one, on which the target is reached")
    return run


def plan_case(run: build.Run, cluster: Cluster, config: ConfigDict, settings: list[str]) -> Case:
    """Plan a case for the cluster. run: a run with the same data and model."""
    plan = strategies.plan(config, run.problem, cluster)
    memory = max(plan.device_bytes) + sum(strategies.in_flight_bytes(plan, run.problem).values())
    [device] = [name for name, kind in gpu_kinds().items() if kind.device_kind == cluster.device_kind]
    size = config.batch_size // plan.decision.batch_divisor
    gpu = clusters.named_cluster(device, 1)
    layers = TracedLayers(run.problem, gpu).profile(size, run.config.pipeline.remat)
    if config.strategy != "pipeline":
        return Case(settings, None, data_parallel_step(layers, cluster.num_devices, cluster.links[DATA]), memory)
    table, bounds = plan.details.table, plan.details.stages.bounds
    if table.replicas:
        devices = ",".join(map(str, table.replicas))
        raise UserError(
            f"config.pipeline.replicas is {devices}; it must be empty, because each stage has one device here"
        )
    step = pipeline_step(table, layers, bounds, cluster.links[STAGE])
    return Case(settings, table.num_microbatches, step, memory)


def pipeline_step(table: Table, layers: Sequence[LayerProfile], bounds: Sequence[int], link: Link) -> StepTime:
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
    return StepTime(seconds, 1 - busy / seconds)


def data_parallel_step(layers: Sequence[LayerProfile], num_replicas: int, link: Link) -> StepTime:
    """Return the time of a step of data parallelism. layers: the profile for the examples of one replica."""
    computed, exchanged = sum(layer.forward_s for layer in layers), 0.0
    for layer in reversed(layers):
        computed += layer.backward_s
        message = link.latency + layer.weight_bytes / num_replicas / link.bandwidth
        exchanged = max(computed, exchanged) + 2 * (num_replicas - 1) * message * (layer.weight_bytes > 0)
    return StepTime(exchanged, 1 - computed / exchanged)


def train(config: str, workdir: Path, overrides: list[str], metric: str) -> Outcome:
    """Start or resume the run if it is not finished, and return its outcome."""
    finished = finish_run(config, workdir, overrides)
    rows = [row for row in metrics.read_metrics(workdir) if row["split"] == "validation" and row[metric] is not None]
    return Outcome([row["step"] for row in rows], [row[metric] for row in rows], not finished)


def describe(cluster: Cluster, config: ConfigDict) -> str:
    """Return the cluster and the common settings of the runs in one line."""
    link, dtype = cluster.links[STAGE], config.model.dtype
    assert cluster.memory_bandwidth is not None
    return (
        f"{cluster.num_devices} x {cluster.device_kind}, each {cluster.peak_flops[dtype] / 1e12:g} TFLOP/s in {dtype} "
        f"and {format_bytes(cluster.memory_bandwidth)}/s of memory; links of {format_bytes(link.bandwidth)}/s with "
        f"{link.latency * 1e6:g} us latency; {config.batch_size} examples per batch, learning rate "
        f"{config.optimizer.lr:g}, seed {config.seed}"
    )


def format_step(step: StepTime) -> str:
    """Format the time of a step and its bubble."""
    return f"{step.seconds * 1e3:.3g} ms per step, bubble {step.bubble:.1%}"


def steps_to(outcome: Outcome, target: float) -> int | None:
    """Return the step of the first evaluation at or above the target; None if there is none."""
    reached = (step for step, value in zip(outcome.steps, outcome.values, strict=True) if value >= target)
    return next(reached, None)


def rows(cases: Mapping[str, Case], outcomes: Mapping[str, Outcome], target: float, metric: str) -> list[str]:
    """Return the table, in Markdown."""
    goal = f"{target:.0%}"
    heads = ["strategy", "microbatches", "time of a step", "bubble", f"steps to {goal}", f"time to {goal}"]
    heads += [f"relative to {REFERENCE}", "memory per device", f"final {metric}"]
    table = [heads, ["---"] * len(heads)]
    steps = {name: steps_to(outcome, target) for name, outcome in outcomes.items()}
    seconds = {name: number * cases[name].step.seconds for name, number in steps.items() if number is not None}
    for name, case in cases.items():
        reached = ["not reached", "", ""]
        if name in seconds:
            ratio = f"{seconds[name] / seconds[REFERENCE]:.2f}" if REFERENCE in seconds else ""
            reached = [str(steps[name]), f"{seconds[name]:.3g} s", ratio]
        table.append([
            name,
            str(case.num_microbatches or ""),
            f"{case.step.seconds * 1e3:.3g} ms",
            f"{case.step.bubble:.1%}",
            *reached,
            format_bytes(case.memory),
            "diverged" if outcomes[name].diverged else f"{outcomes[name].values[-1]:.2%}",
        ])  # fmt: skip
    return [f"| {' | '.join(cells)} |" for cells in table]


def draw(cases: Mapping[str, Case], outcomes: Mapping[str, Outcome], target: float, metric: str, path: Path) -> None:
    """Plot the metric against steps and against virtual time."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 5), layout="constrained", sharey=True)
    for name, outcome in outcomes.items():
        color, style = CASES[name]
        number = steps_to(outcome, target)
        for axis, unit in ((left, 1), (right, cases[name].step.seconds)):
            axis.plot(np.array(outcome.steps) * unit, outcome.values, style, color=color, lw=1.6, label=name)
            if number is not None:
                value = outcome.values[outcome.steps.index(number)]
                axis.plot(number * unit, value, "o", color=color, ms=6)
    for axis, label in ((left, "step"), (right, "virtual seconds")):
        axis.axhline(target, color="grey", lw=0.8, label="target" if axis is left else None)
        axis.set_xlim(left=0)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    left.set_ylabel(f"{metric} (validation)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(exit_code(main))
