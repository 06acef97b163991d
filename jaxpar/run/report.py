"""Writes the results of a run, with its environment: result.json, curves.png and confusion.png."""

import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar import checkpoint, files, models
from jaxpar.colors import CURVE_COLORS
from jaxpar.core.loss_scale import AVOID_NONFINITE, AVOID_OVERFLOW
from jaxpar.data import Split
from jaxpar.errors import TrainingError, format_count
from jaxpar.launch import processes
from jaxpar.launch.place import command_of
from jaxpar.run import classes, metrics
from jaxpar.run.build import Result, Run, StrategyState, advise_length, split_sizes
from jaxpar.run.callbacks import Callbacks, Measurement
from jaxpar.run.evaluate import evaluate_split
from jaxpar.tasks import Task
from jaxpar.tasks.classification import CONFUSION

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax")
PROJECT = Path(__file__).parents[2]  # of a clone
CPUS = Path("/proc/cpuinfo")
JAX_SETTINGS = ("jax_default_matmul_precision", "jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl")
SPLIT_STYLES = {"train": "-", "validation": "o--", "test": "*"}  # of the curve of each split
RATES = ("examples_per_second", "tokens_per_second", "model_flops_per_second", "mfu")


def finish(
    run: Run,
    state: StrategyState,
    steps: int,
    discarded: Sequence[Mapping[str, Any]],
    log: metrics.Log,
    callbacks: Callbacks,
) -> Result:
    """Evaluate on the test split, draw the curves and return the result.

    discarded: the private states that earlier starts discarded (`restore.Past`).

    Raises TrainingError if a loss of the last step is not finite, and config.optimizer.nonfinite is `stop`.
    """
    result = test_split(run, state, run.dataset.test, steps, log, callbacks) if run.dataset.test else {}
    for row in [*log.rows("validation")[-1:], *log.rows("test")]:
        if row["step"] == steps and row["loss"] is None and run.config.optimizer.nonfinite == "stop":
            remedy = AVOID_OVERFLOW if run.config.model.dtype == "float16" else AVOID_NONFINITE
            raise TrainingError(
                f"the {row['split']} loss after step {steps} is not finite; {remedy}, or accept such losses with "
                "config.optimizer.nonfinite='skip'"
            )
    # Whether a constant predicts as well: the most frequent class, or the mean.
    if result.get("test_accuracy", 1) <= result.get("test_majority_accuracy", -1) or result.get("test_r2", 1) <= 0:
        flags = advise_length(run.config, len(run.dataset.train), run.num_steps, run.plan.decision.batch_divisor)
        longer = "config.num_steps" if run.config.num_steps else "config.num_epochs"
        advice = flags or f"raise {longer}, or change config.optimizer.lr"
        result["advice"] = f"the model learned nothing, it predicts no better than a constant; {advice}"
        print(f"advice    {result['advice']}", flush=True)
    trained = log.rows("train")
    rates = {name: [row[name] for row in trained if row.get(name) is not None] for name in RATES}
    skipped = sum(row.get("skipped_steps") or 0 for row in trained)
    if skipped:
        reason = "because their losses or gradients were not finite"
        print(f"skipped   {skipped} of {format_count(steps, 'step')}, {reason}", flush=True)
    devices = run.strategy.devices
    result |= {
        "train_loss": trained[-1].get("loss") if trained else None,  # None if all steps of the interval were skipped
        "steps": steps,
        "skipped_steps": skipped,
        **({"loss_scale": trained[-1]["loss_scale"]} if trained and "loss_scale" in trained[-1] else {}),
        "examples": run.batches.examples_before(steps),
        "in_flight": run.strategy.num_in_flight(state),
        "discarded": list(discarded),
        **{name: statistics.median(values) for name, values in rates.items() if values},
        "parameters": models.num_parameters(run.problem.model),
        "splits": split_sizes(run.dataset),
        "strategy": run.config.strategy,
        "devices": [str(device) for device in devices],
        "device_kind": devices[0].device_kind,
        "state_bytes": run.plan.state_bytes,
        "wire_bytes": run.plan.wire_bytes,
    }
    if steps < run.num_steps:
        result["stopped_early"] = callbacks.reason
    if processes.is_first():
        result["environment"] = {
            "host": platform.node(),
            "processor": processor(),
            "command": python_path(run.config) + command_of(sys.argv),
            "commit": commit(),
            "versions": versions(),
        }
        result |= run.strategy.report(state, run.workdir)
        if run.config.log.curves:
            title = f"{run.config.model.name} on {run.config.data.source}, {run.config.strategy}"
            draw_curves(run.workdir, run.problem.task, title)
    return result


def test_best(run: Run, steps: int, log: metrics.Log) -> Result:
    """Evaluate the best checkpoint on the test split, once all are written, and return its results."""
    task, split, directory = run.problem.task, run.dataset.test, run.workdir / "checkpoints"
    best = checkpoint.best_step(directory)
    processes.check_same_value(f"the best checkpoint (-1: none) in {run.workdir}", -1 if best is None else best)
    if best is None:
        print(f"best      step {steps}, the last one, because no validation loss was measured", flush=True)
        return {}
    tested = {name: x for row in log.rows("test") for name, x in row.items() if name not in ("step", "split")}
    text = ", the last one" if best == steps else ""
    if split is not None and best != steps:
        # The step is that after which nothing is in flight; an evaluation does not depend on it.
        tree = checkpoint.read(directory / str(best)).tree | {"step": np.int32(run.num_steps)}
        tested = task.all_metrics(evaluate_split(run, run.strategy.from_canonical(tree), split))
        text = f": test {metrics.format_metrics(task.printed(tested))}"
    print(f"best      step {best}{text}", flush=True)
    return {"best_step": best, **{f"best_{name}": value for name, value in task.results(tested).items()}}


def test_split(
    run: Run, state: StrategyState, split: Split, steps: int, log: metrics.Log, callbacks: Callbacks
) -> Result:
    """Evaluate on the test split, and return the results. With a confusion matrix, also report the classes."""
    task, sums = run.problem.task, evaluate_split(run, state, split)
    tested = task.all_metrics(sums)
    log.write(steps, "test", tested)
    print(f"test      {metrics.format_metrics(task.printed(tested))}", flush=True)
    callbacks(Measurement(steps, run.num_steps, "test", tested))
    result: Result = {**task.results(tested)}
    if CONFUSION in sums.terms:
        confusion_CC, names = sums.terms[CONFUSION], run.dataset.info.class_names
        print(classes.format_classes(confusion_CC, names), flush=True)
        result |= classes.class_results(confusion_CC, names)
        if processes.is_first() and run.config.log.curves:
            classes.draw_confusion(run.workdir / "confusion.png", confusion_CC, names)
    return result


def write_result(workdir: Path, result: Result) -> None:
    """Write workdir/result.json: one line for each key, and for each item of a table, such as a matrix."""
    values = ",\n".join(f"  {files.json_text(key)}: {_format_value(value)}" for key, value in result.items())
    files.write_text(workdir / "result.json", f"{{\n{values}\n}}\n")


def _format_value(value: Any) -> str:
    """Return a value of result.json as JSON, with one line for each item that is a dict or a list."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not items or not all(isinstance(item, dict | list) for item in items):
        return files.json_text(value)
    keys = [f"{files.json_text(key)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    lines = [f"\n    {key}{files.json_text(item)}" for key, item in zip(keys, items, strict=True)]
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}{','.join(lines)}\n  {end}"


def draw_curves(workdir: Path, task: Task, title: str) -> Path | None:
    """Draw the loss and the task's metric from metrics.jsonl as workdir/curves.png. Returns None without metrics."""
    from matplotlib.figure import Figure  # imported here because the import takes almost a second

    rows = metrics.read_metrics(workdir)
    if not rows:
        return None
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axis, name in zip(figure.subplots(1, 2), ("loss", task.curve), strict=True):
        for (split, style), color in zip(SPLIT_STYLES.items(), CURVE_COLORS[1:], strict=False):
            points = [(row["step"], row[name]) for row in rows if row["split"] == split and row.get(name) is not None]
            if points:
                size = 12 if split == "test" else 5
                label = f"{split} {points[-1][1]:.3f}"
                axis.plot(*zip(*points, strict=True), style, color=color, label=label, ms=size, lw=1.3)
        axis.set_xlabel("step")
        axis.set_ylabel(f"loss ({task.loss_unit})" if name == "loss" else name)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    figure.suptitle(title)
    path = workdir / "curves.png"
    path.unlink(missing_ok=True)  # a link is replaced, not followed
    with files.naming(path):
        figure.savefig(path, dpi=120)
    return path


def versions() -> dict[str, str]:
    """Return the versions of jaxpar, Python and the numerical packages."""
    project = PROJECT / "pyproject.toml"  # exists in a clone; a wheel has metadata
    own = tomllib.loads(project.read_text())["project"]["version"] if project.is_file() else version("jaxpar")
    return {"jaxpar": own, "python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def python_path(config: ConfigDict) -> str:
    """Return `PYTHONPATH=... `, with which a command finds the model of a config; empty for a model of jaxpar."""
    folders = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one not in ("", str(PROJECT))]
    is_needed = folders and config.model.name not in models.MODELS
    return f"PYTHONPATH={shlex.quote(os.pathsep.join(folders))} " if is_needed else ""


def processor() -> str:
    """Return the processor of this machine and its number of cores.

    Virtual machines often hide the name of the model, but not its numbers.
    """
    text = CPUS.read_text() if CPUS.is_file() else ""
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    first = {key.strip(): " ".join(value.split()) for key, _, value in pairs}  # of the first core
    name = first.get("model name", platform.machine())
    numbers = ", ".join(f"{key.removeprefix('cpu ')} {first[key]}" for key in ("cpu family", "model") if key in first)
    vectors = next((flag for flag in ("avx512f", "avx2") if flag in first.get("flags", "").split()), "")
    return f"{os.cpu_count()} cores of {name}{numbers and f' ({numbers})'}{vectors and f' with {vectors}'}"


def commit() -> str | None:
    """Return the commit of the clone with this code, with `-dirty` if its files differ; None without a clone or git."""
    if not (PROJECT / ".git").exists() or shutil.which("git") is None:
        return None
    git = ["git", "--no-optional-locks", "-C", str(PROJECT)]
    describe = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    return subprocess.run([*git, *describe], capture_output=True, text=True).stdout.strip() or None


def describe_devices(used: Sequence[jax.Device]) -> dict[str, Any]:
    """Return the platform, the kinds and the number of these devices."""
    kinds = sorted({device.device_kind for device in used})
    return {"platform": used[0].platform, "kinds": kinds, "number": len(used), "machine": platform.machine()}


def flags() -> dict[str, Any]:
    """Return the settings of XLA and JAX that affect numerical results."""
    return {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")} | {name: getattr(jax.config, name) for name in JAX_SETTINGS}
