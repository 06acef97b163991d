"""Measures how stale gradients affect a model: trains it with each update policy, with and without a straggler.

    scripts/python scripts/compare_updates.py --config=configs/quickstart.py [--workdir=runs/updates] [--workers=4]
        [--slowdown=4] [--cases=sync,async,..] [--config.KEY=VALUE ...]

Each case is a run of the training binary; a run that is already in the workdir is not repeated. The script draws the
loss against steps (an equal number of gradients) and against virtual time as WORKDIR/updates.png, and prints a table,
which it also writes as WORKDIR/updates.md:

  throughput   gradients per virtual second; one worker computes 1 by default
  staleness    number of versions between the one a gradient is computed from and the one it is applied to: mean,
               maximum
  recovered    for a mitigation: the share of the gap between async and sync that it closes (of log perplexity)
  time to      virtual seconds to the training loss that sync without a straggler has after 1/4 of the run

The curve of a case that diverges ends there, and the case has no results.

The delays are those of config.asynchronous.delays; --config.asynchronous.delays.distribution=lognormal, for example,
changes them.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

from jaxpar import files, tasks
from jaxpar.asynchronous import table
from jaxpar.command_line import Parser, integer, names, number, output_path
from jaxpar.errors import TrainingError, exit_code
from jaxpar.run import metrics
from jaxpar.tasks import Score
from scripts.comparison.runs import UNTESTED, configured, finish_run

# By name: overrides of config.asynchronous. The cases with a + are mitigations of async. RATE also divides
# config.optimizer.lr by the number of workers, whatever the staleness of a gradient.
RATE = "async+rate/n"
CASES: dict[str, tuple[str, ...]] = {
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


class Outcome(NamedTuple):
    """The outcome of one run.

    Attributes:
      steps: the steps at which the losses were logged, [P].
      losses: training losses, means over the steps since the last one logged, [P].
      seconds: virtual times at which these steps ended, [P].
      result: the contents of result.json; None if the run diverged.
      throughput: gradients per virtual second; nan if the run diverged.
    """

    steps: np.ndarray
    losses: np.ndarray
    seconds: np.ndarray
    result: dict[str, Any] | None
    throughput: float


def main() -> None:
    """Run all cases, and write the table and the plot."""
    parser = Parser(__doc__)
    parser.require("--config", "--config=configs/quickstart.py", help="config file as PATH[:PRESET]")
    parser.add_argument("--workdir", type=output_path, default="runs/updates", help="directory of the runs")
    parser.add_argument("--workers", type=integer(1), default=4, help="number of workers")
    parser.add_argument(
        "--slowdown",
        type=number("a number of at least 1", minimum=1),
        default=4.0,
        help="how many times slower the straggler is",
    )
    parser.add_argument(
        "--cases", type=names(CASES), default=list(CASES), help=f"some of {', '.join(CASES)} (default: all)"
    )
    arguments, overrides = parser.parse_with_overrides()
    config = configured(arguments.config, overrides)
    score = tasks.find_task(config).score
    base = ["--config.strategy=async_data_parallel", f"--config.asynchronous.num_workers={arguments.workers}"]
    outcomes: dict[tuple[str, float], Outcome] = {}
    mitigated = ["async"] if any("+" in name for name in arguments.cases) else []
    for name in dict.fromkeys(["sync", *mitigated, *arguments.cases]):
        for slowdown in (1.0, arguments.slowdown):
            settings = [f"--config.asynchronous.{setting}" for setting in (*CASES[name], f"delays.slowdown={slowdown}")]
            rate = [f"--config.optimizer.lr={config.optimizer.lr / arguments.workers}"] if name == RATE else []
            workdir = arguments.workdir / f"{name.replace('+', '_').replace('/', '_')}_{slowdown:g}"
            made = outcomes[name, slowdown] = train(arguments.config, workdir, [*base, *settings, *overrides, *rate])
            did = f"{made.throughput:.2f} gradients per virtual second" if made.result else "diverged"
            print(f"{name:26} straggler {slowdown:g}: {did}", flush=True)
            if name == "sync" and not made.result:
                raise TrainingError("sync diverged, so there is nothing to compare with; lower config.optimizer.lr")
    lines = rows(outcomes, score)
    files.write_text(arguments.workdir / "updates.md", "\n".join(lines) + "\n")
    draw(outcomes, arguments.workdir / "updates.png")
    print("\n".join(["", *lines, "", f"picture   {arguments.workdir}/updates.png"]))


def train(config: str, workdir: Path, overrides: list[str]) -> Outcome:
    """Start or resume the run if it is not finished, and return its outcome."""
    is_finished = finish_run(config, workdir, overrides)
    trained = [row for row in metrics.read_metrics(workdir) if row["split"] == "train" and "loss" in row]
    steps = np.array([row["step"] for row in trained], int)
    losses = np.array([row["loss"] for row in trained])
    if not is_finished:
        return Outcome(steps, losses, np.full(len(steps), np.nan), None, np.nan)
    made = table.read_updates(workdir / "updates.csv")
    ends = made.finish[np.searchsorted(made.step, np.arange(1, made.step[-1] + 2)) - 1]  # end of each step
    result = json.loads((workdir / "result.json").read_text())
    return Outcome(steps, losses, ends[steps - 1], result, len(made.finish) / float(made.finish[-1]))


def rows(outcomes: dict[tuple[str, float], Outcome], score: Score) -> list[str]:
    """Return the table, in Markdown. score: of the task."""
    reference = outcomes["sync", 1.0]
    assert reference.result is not None
    target = float(np.interp(0.25 * reference.steps[-1], reference.steps, reference.losses))
    score = score if score.key in reference.result else UNTESTED
    heads = ["updates", "straggler", "throughput", "staleness", score.key, "recovered", f"time to loss {target:.2f}"]
    table = [heads, ["---"] * len(heads)]
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
    return [f"| {' | '.join(cells)} |" for cells in table]


def recovered(outcomes: dict[tuple[str, float], Outcome], name: str, slowdown: float, score: Score) -> str:
    """Return the share, in percent, of the gap between async and sync that the case closes."""
    results = [outcomes[case, slowdown].result for case in (name, "async", "sync")]
    if not all(results):
        return "async diverged"
    ends = [result[score.key] for result in results if result]
    mitigated, stale, fresh = np.log(ends) if score.is_exponential else ends
    return f"{round(100 * (mitigated - stale) / (fresh - stale))}%" if fresh != stale else "nothing lost"


def draw(outcomes: dict[tuple[str, float], Outcome], path: Path) -> None:
    """Plot the loss against steps and against virtual time: a row without the straggler, and one with it."""
    slowdowns = sorted({slowdown for _, slowdown in outcomes})
    figure, axes = pyplot.subplots(
        len(slowdowns), 2, figsize=(14, 4.5 * len(slowdowns)), layout="constrained", squeeze=False
    )
    colors = pyplot.get_cmap("tab20")
    for line, slowdown in zip(axes, slowdowns, strict=True):
        for index, name in enumerate(dict.fromkeys(name for name, _ in outcomes)):
            outcome = outcomes[name, slowdown]
            for axis, x in zip(line, (outcome.steps, outcome.seconds), strict=True):
                style = "k-" if name == "sync" else "-"
                color = {} if name == "sync" else {"color": colors(index)}
                axis.plot(x, outcome.losses, style, label=name, lw=1.4, **color)
        title = "no straggler" if slowdown == 1 else f"one worker {slowdown:g} times slower"
        for axis, label in zip(line, ("step", "virtual seconds"), strict=True):
            axis.set_xlabel(label)
            axis.set_ylabel("training loss (nats)")
            axis.set_title(title)
            axis.grid(alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(exit_code(main))
