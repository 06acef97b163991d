"""Reads the outcome of a strategy from its finished run, its plan and its certificate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxpar import files, strategies
from jaxpar.core.plan import Plan
from jaxpar.pages.recorded import CERTIFICATE, read_verdict
from jaxpar.run import build, metrics
from jaxpar.tasks import Score
from scripts.comparison.runs import UNTESTED
from scripts.comparison.table import REFERENCE, Outcome


def run_seconds(workdir: Path) -> float:
    """Return the time that the last start of a finished run took."""
    return sum(read_result(workdir)["seconds"].values())


def read_result(workdir: Path) -> dict[str, Any]:
    """Return the contents of result.json of a finished run."""
    result: dict[str, Any] = files.parse_json((workdir / "result.json").read_text())
    return result


def read_outcome(config: ConfigDict, plan: Plan[Any], workdir: Path, loaded: build.Loaded) -> Outcome:
    """Return the outcome of a finished run."""
    result, task = read_result(workdir), loaded.problem.task
    stashed = max(plan.device_bytes) - plan.state_bytes  # activations that the plan of a pipeline counts
    rate = result.get("examples_per_second")
    rows = [row for row in metrics.read_metrics(workdir) if row["split"] == "validation"]
    curve = tuple((row["step"], row[task.curve]) for row in rows if row.get(task.curve) is not None)
    return Outcome(
        step_seconds=config.batch_size / rate if rate else None,
        is_emulated=is_emulated(config),
        wire_bytes=plan.wire_bytes,
        device_bytes=tuple(plan.device_state_bytes),
        in_flight_bytes=stashed + sum(strategies.in_flight_bytes(plan, loaded.problem).values()),
        metric=result[find_score(loaded).key],
        staleness=find_staleness(plan, result),
        guarantee=find_guarantee(plan),
        certificate=read_verdict(workdir / CERTIFICATE, config),
        curve=curve,
    )


def is_emulated(config: ConfigDict) -> bool:
    """Return whether the workers or peers of a config work in virtual time."""
    section = {"async_data_parallel": config.asynchronous, "swarm": config.swarm}.get(config.strategy)
    return section is not None and section.mode == "emulated"


def find_staleness(plan: Plan[Any], result: Mapping[str, Any]) -> tuple[float, int] | None:
    """Return the mean and maximum staleness of a run; None if gradients are computed from the newest weights.

    The mean of a pipeline is over its stages and microbatches.
    """
    if plan.delays:
        lags = [lag for stage in plan.delays.stages for lag in stage.lags]
        return float(np.mean(lags)), max(lags)
    return (result["staleness_mean"], result["staleness_max"]) if "staleness_mean" in result else None


def find_guarantee(plan: Plan[Any]) -> str:
    """Return how training relates to one device according to the plan."""
    if plan.delays and not plan.delays.differs:
        return f"differs: {plan.differs}; equal to one device with the same delays"
    return f"differs: {plan.differs}" if plan.differs else f"equal to {REFERENCE}"


def find_score(loaded: build.Loaded) -> Score:
    """Return the metric of the task on the test split, or the training loss if there is no test split."""
    return loaded.problem.task.score if loaded.dataset.test else UNTESTED
