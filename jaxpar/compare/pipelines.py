"""Compares pipeline schedules by the virtual time to an accuracy on a cluster, for `jaxpar compare pipelines`."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from jaxpar import data, files, strategies
from jaxpar.choose.candidates import Space, gpu_space
from jaxpar.choose.costs.step import StepCosts
from jaxpar.choose.planner import candidate_of_plan
from jaxpar.cluster import Cluster
from jaxpar.compare.pictures import CurvePanel, PolicyCurve, draw_panels
from jaxpar.compare.report import markdown_table
from jaxpar.compare.runs import configured, finish_run
from jaxpar.core import mesh
from jaxpar.core.mesh import STAGE
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, format_bytes
from jaxpar.measure.phases import Phases
from jaxpar.run import build, metrics

DDP = "ddp"
BASELINE = "1f1b"  # the case to which the others are compared
UNSPLIT = "pipedream_unsplit"  # a batch is one microbatch, as in the paper
PIPELINE_CASES = (DDP, "gpipe", BASELINE, "zb_h1", "pipedream", UNSPLIT, "pipedream_2bw")


class PipelineCase(NamedTuple):
    """The settings of a case, and its costs on the cluster."""

    settings: list[str]  # overrides of the config
    num_microbatches: int | None  # None for data parallelism
    costs: StepCosts  # of a step


class PipelineOutcome(NamedTuple):
    """The outcome of one run."""

    steps: list[int]  # of its evaluations
    values: list[float]  # of the metric on the validation split; those of a run that diverged end there
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
    """Train some of PIPELINE_CASES and BASELINE. Write the table and the plot, and return the table.

    cluster: devices to predict times for, a stage or a replica each. target: accuracy to reach.
    """
    overrides = ["--config.pipeline.executor=lockstep", *overrides]  # unless an override replaces it
    wanted = [name for name in PIPELINE_CASES if name in {BASELINE, *cases}]
    settings = {name: case_settings(name, cluster.num_devices, num_microbatches) for name in wanted}
    config = configured(config_name, [*overrides, *settings[BASELINE]])
    problem = _load(config)
    assert cluster.memory_bytes is not None
    space = gpu_space(config, problem, cluster, cluster.memory_bytes, {})
    planned = {
        name: plan_case(space, configured(config_name, [*overrides, *added]), added) for name, added in settings.items()
    }
    metric, outcomes = problem.task.curve, {}
    for name, case in planned.items():
        outcomes[name] = _train(config_name, workdir / name, [*overrides, *case.settings], metric)
        seconds, bubble = format_times_of(case)
        did = "diverged" if outcomes[name].diverged else "trained"
        print(f"{name:18} {seconds} per step, bubble {bubble}  {did}", flush=True)
    lines = [_describe(cluster, config), "", *_rows(planned, outcomes, target, metric)]
    files.write_text(workdir / "pipelines.md", "\n".join(lines) + "\n")
    _draw(planned, outcomes, target, metric).savefig(workdir / "pipelines.png", dpi=150)
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


def _load(config: ConfigDict) -> Problem:
    """Return the problem of a run without training it. Raises UserError if it cannot be compared."""
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    with tempfile.TemporaryDirectory() as folder:
        run = build.make_run(config, Path(folder), Phases(), build.check_run(config, Path(folder)))
    if run.dataset.validation is None:
        raise UserError("config.data has no validation split; it must have one, on which the target is reached")
    return run.problem


def plan_case(space: Space, config: ConfigDict, settings: list[str]) -> PipelineCase:
    """Plan a case for the cluster of a space, which has the data and the model of all cases."""
    plan = strategies.plan(config, space.problem, space.machine.cluster)
    num_microbatches = None
    if plan.strategy == "pipeline":
        table = plan.details.table
        if table.replicas:
            devices = ",".join(map(str, table.replicas))
            raise UserError(
                f"config.pipeline.replicas is {devices}; it must be empty, because each stage has one device here"
            )
        num_microbatches = table.num_microbatches
    return PipelineCase(settings, num_microbatches, candidate_of_plan(space, config, plan).costs)


def _train(config: str, workdir: Path, overrides: list[str], metric: str) -> PipelineOutcome:
    """Start or resume the run if it is not finished, and return its outcome."""
    finished = finish_run(config, workdir, overrides)
    rows = [row for row in metrics.read_metrics(workdir) if row["split"] == "validation" and row[metric] is not None]
    return PipelineOutcome([row["step"] for row in rows], [row[metric] for row in rows], not finished)


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


def format_times_of(case: PipelineCase) -> tuple[str, str]:
    """Format the time of a step, and its bubble: the fraction in which the busiest device waits, or only sends."""
    costs = case.costs
    return f"{costs.seconds * 1e3:.3g} ms", f"{(costs.waiting + costs.exposed) / costs.seconds:.1%}"


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
    seconds = {name: number * cases[name].costs.seconds for name, number in steps.items() if number is not None}
    for name, case in cases.items():
        reached = ["not reached", "", ""]
        if name in seconds:
            ratio = f"{seconds[name] / seconds[BASELINE]:.2f}" if BASELINE in seconds else ""
            reached = [str(steps[name]), f"{seconds[name]:.3g} s", ratio]
        cells.append([
            name,
            str(case.num_microbatches or ""),
            *format_times_of(case),
            *reached,
            format_bytes(case.costs.nbytes),
            "diverged" if outcomes[name].diverged else f"{outcomes[name].values[-1]:.2%}",
        ])  # fmt: skip
    return markdown_table(heads, cells)


def _draw(
    cases: Mapping[str, PipelineCase], outcomes: Mapping[str, PipelineOutcome], target: float, metric: str
) -> Figure:
    """Draw the metric against steps and against virtual time."""
    of_steps, of_seconds = [], []
    for name, outcome in outcomes.items():
        number = steps_to(outcome, target)
        reached = None if number is None else outcome.steps.index(number)
        of_steps.append(PolicyCurve(name, outcome.steps, outcome.values, reached))
        of_seconds.append(of_steps[-1]._replace(x=np.array(outcome.steps) * cases[name].costs.seconds))
    panels = [CurvePanel("", "step", of_steps), CurvePanel("", "virtual seconds", of_seconds)]
    return draw_panels([panels], f"{metric} (validation)", target)
