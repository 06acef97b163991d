"""Compares update policies of asynchronous training by what stale gradients cost, for `jaxpar compare updates`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from jaxpar import files, tasks
from jaxpar.compare.pictures import CurvePanel, PolicyCurve, draw_panels
from jaxpar.compare.report import markdown_table
from jaxpar.compare.runs import UNTESTED, configured, finish_run, read_result
from jaxpar.errors import TrainingError
from jaxpar.run import metrics
from jaxpar.strategies.asynchronous import table
from jaxpar.tasks import Score

# By name: overrides of config.asynchronous. The cases with a + are mitigations of async. RATE also divides
# config.optimizer.lr by the number of workers, whatever the staleness of a gradient.
RATE = "async+rate/n"
UPDATE_CASES: dict[str, tuple[str, ...]] = {
    "sync": ("policy=sync",),
    "async": ("policy=async", "mitigations="),
    "ssp": ("policy=ssp", "mitigations="),
    "softsync": ("policy=softsync",),
    "local_sgd": ("policy=local_sgd",),
    "diloco": ("policy=diloco",),
    "model_average": ("policy=model_average",),
    RATE: ("policy=async", "mitigations="),
    "async+staleness_aware": ("policy=async", "mitigations=staleness_aware"),
    "async+dc_asgd": ("policy=async", "mitigations=dc_asgd"),
    "async+adaptive_dc_asgd": ("policy=async", "mitigations=adaptive_dc_asgd"),
    "async+clip_by_staleness": ("policy=async", "mitigations=clip_by_staleness", "max_norm=1.0"),
    "async+corrected_momentum": ("policy=async", "mitigations=corrected_momentum"),
}
STALENESS = "staleness, mean and maximum"  # a column


class UpdatesOutcome(NamedTuple):
    """The outcome of one run."""

    steps: np.ndarray  # the steps at which the losses were logged, [P]
    losses: np.ndarray  # training losses, means over the steps since the last one logged, [P]
    seconds: np.ndarray  # virtual times at which these steps ended, [P]
    result: dict[str, Any] | None  # the contents of result.json; None if the run diverged
    throughput: float  # gradients per virtual second; nan if the run diverged


def compare_updates(
    config_name: str,
    overrides: Sequence[str],
    workdir: Path,
    *,
    num_workers: int,
    slowdown: float,
    cases: Sequence[str],
) -> list[str]:
    """Run some of UPDATE_CASES and those to compare with. Write the table and the plot, and return the table."""
    config = configured(config_name, overrides)
    score = tasks.find_task(config).score
    base = ["--config.strategy=async_data_parallel", f"--config.asynchronous.num_workers={num_workers}"]
    outcomes: dict[tuple[str, float], UpdatesOutcome] = {}
    mitigated = ["async"] if any("+" in name for name in cases) else []
    for name in dict.fromkeys(["sync", *mitigated, *cases]):
        for straggler in (1.0, slowdown):
            settings = [
                f"--config.asynchronous.{setting}" for setting in (*UPDATE_CASES[name], f"delays.slowdown={straggler}")
            ]
            rate = [f"--config.optimizer.lr={config.optimizer.lr / num_workers}"] if name == RATE else []
            of_case = workdir / f"{name.replace('+', '_').replace('/', '_')}_{straggler:g}"
            made = outcomes[name, straggler] = train_updates(
                config_name, of_case, [*base, *settings, *overrides, *rate]
            )
            did = f"{made.throughput:.2f} gradients per virtual second" if made.result else "diverged"
            print(f"{name:26} straggler {straggler:g}: {did}", flush=True)
            if name == "sync" and not made.result:
                raise TrainingError("sync diverged, so there is nothing to compare with; lower config.optimizer.lr")
    lines = update_rows(outcomes, score)
    files.write_text(workdir / "updates.md", "\n".join(lines) + "\n")
    draw_updates(outcomes).savefig(workdir / "updates.png", dpi=150)
    return lines


def train_updates(config: str, workdir: Path, overrides: list[str]) -> UpdatesOutcome:
    """Start or resume the run if it is not finished, and return its outcome."""
    is_finished = finish_run(config, workdir, overrides)
    trained = [row for row in metrics.read_metrics(workdir) if row["split"] == "train" and "loss" in row]
    steps = np.array([row["step"] for row in trained], int)
    losses = np.array([row["loss"] for row in trained])
    if not is_finished:
        return UpdatesOutcome(steps, losses, np.full(len(steps), np.nan), None, np.nan)
    made = table.read_updates(workdir / "updates.csv")
    ends = made.finish[np.searchsorted(made.step, np.arange(1, made.step[-1] + 2)) - 1]  # end of each step
    rate = len(made.finish) / float(made.finish[-1])
    return UpdatesOutcome(steps, losses, ends[steps - 1], read_result(workdir), rate)


def update_rows(outcomes: dict[tuple[str, float], UpdatesOutcome], score: Score) -> list[str]:
    """Return the table, in Markdown. score: of the task."""
    reference = outcomes["sync", 1.0]
    assert reference.result is not None
    target = float(np.interp(0.25 * reference.steps[-1], reference.steps, reference.losses))
    score = score if score.key in reference.result else UNTESTED
    heads = [
        "updates",
        "straggler",
        "gradients / virtual s",
        STALENESS,
        score.key,
        "recovered",
        f"time to loss {target:.2f}",
    ]
    table = []
    for (name, slowdown), outcome in outcomes.items():
        result, reached = outcome.result, outcome.seconds[outcome.losses <= target]
        case = [name, "none" if slowdown == 1 else f"{slowdown:g} times slower"]
        if result is None:
            table.append([*case, "", "", "diverged", "", ""])
            continue
        table.append([
            *case,
            f"{outcome.throughput:.2f}",
            f"{result['staleness_mean']:.2f}, {result['staleness_max']}",
            format(result[score.key], score.format),
            recovered(outcomes, name, slowdown, score) if "+" in name else "",
            f"{reached[0]:,.0f}" if len(reached) else "not reached",
        ])  # fmt: skip
    return markdown_table(heads, table)


def recovered(outcomes: dict[tuple[str, float], UpdatesOutcome], name: str, slowdown: float, score: Score) -> str:
    """Return the share, in percent, of the gap between async and sync that the case closes."""
    results = [outcomes[case, slowdown].result for case in (name, "async", "sync")]
    if not all(results):
        return "async diverged"
    ends = [result[score.key] for result in results if result]
    mitigated, stale, fresh = np.log(ends) if score.is_exponential else ends
    return f"{round(100 * (mitigated - stale) / (fresh - stale))}%" if fresh != stale else "nothing lost"


def draw_updates(outcomes: dict[tuple[str, float], UpdatesOutcome]) -> Figure:
    """Draw the loss against virtual time: a row without the straggler and one with it, a column for mitigations."""
    names = list(dict.fromkeys(name for name, _ in outcomes))
    mitigated = [name for name in names if "+" in name]
    columns = {"each way to update": [name for name in names if name not in mitigated]}
    if mitigated:
        columns["mitigations of async"] = ["sync", "async", *mitigated]
    rows = []
    for slowdown in sorted({slowdown for _, slowdown in outcomes}):
        straggler = "no straggler" if slowdown == 1 else f"one worker {slowdown:g} times slower"
        row = []
        for title, cases in columns.items():
            curves = []
            for name in cases:
                one = outcomes[name, slowdown]
                label = name if one.result else f"{name} (diverged)"
                curves.append(PolicyCurve(label, one.seconds, one.losses.tolist()))
            row.append(CurvePanel(f"{title}, {straggler}", "virtual seconds", curves))
        rows.append(row)
    return draw_panels(rows, "training loss (nats)")
