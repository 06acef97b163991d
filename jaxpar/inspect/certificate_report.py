"""Certifies the strategy of a config, and formats the certificate."""

import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar import data, files
from jaxpar.choose.auto import choose
from jaxpar.command_line import format_rows
from jaxpar.core import mesh
from jaxpar.errors import UserError, format_count
from jaxpar.inspect import certificate, delayed, reference
from jaxpar.inspect.cause import find_cause
from jaxpar.inspect.certificate import QUANTITIES
from jaxpar.inspect.reference import Runs
from jaxpar.inspect.rounding import FALSE_ALARM, SEEDS
from jaxpar.measure.phases import Phases
from jaxpar.run import build, report


def certify(config: ConfigDict, num_steps: int = 10, reference_passes: int = 1) -> dict[str, Any]:
    """Return the certificate of the strategy of a config, as `jaxpar certify` writes it to a JSON file.

    Args:
      config: the config, such as that of `load_config`; it is not changed.
      num_steps: number of steps to compare, which the learning rate schedule spans.
      reference_passes: number of microbatches into which the reference divides a batch.

    Raises:
      UserError: the config or the data has a mistake.
      TrainingError: the training failed.
    """
    if config.batch_size % reference_passes:
        raise UserError(
            f"--reference_passes is {reference_passes}; it must divide config.batch_size ({config.batch_size})"
        )
    config = config.copy_and_resolve_references()
    config.num_steps, config.pipeline.trace = num_steps, 0  # a certificate times no step
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    # By default GPUs round the factors of matrix products to 10 bits, which would hide small errors.
    with tempfile.TemporaryDirectory() as folder, jax.default_matmul_precision("highest"):
        config, dataset = choose(config, Path(folder))
        run = build.make_run(config, Path(folder), Phases(), build.check_run(config, Path(folder)), dataset)
        return issue(reference.make_runs(run, reference_passes))


def issue(runs: Runs) -> dict[str, Any]:
    """Compare a strategy with its reference, and return the certificate."""
    run, passes = runs.ours, runs.one_device.problem.accumulation_steps
    config, delays = run.config, run.plan.delays
    measured = delayed.measure_recurrence(runs) if delays else certificate.measure(runs)
    differs = delays.differs if delays else run.plan.differs
    updates, cause = " with delayed updates" if delays else "", None if differs else find_cause(runs, measured)
    derivation = {
        "false_alarm": FALSE_ALARM,
        "number": measured.num_tolerances,
        "samples": len(SEEDS),
        "smallest_scale_errors": measured.smallest_scale_errors,
    }
    return {
        "strategy": f"{config.strategy}: {run.plan.summary}",
        "model": f"{config.model.name}, {config.model.dtype}",
        "differs": differs,
        "delays": [stage._asdict() for stage in delays.stages] if delays else [],
        "tolerance": None if differs else derivation,
        "outside": certificate.outside(measured),
        "cause": cause and cause._asdict(),
        "metrics": {name: files.without_nonfinite(error._asdict()) for name, error in measured.metrics.items()},
        "layers": {
            layer: {quantity: files.without_nonfinite(error._asdict()) for quantity, error in errors.items()}
            for layer, errors in measured.layers.items()
        },
        "counters": measured.counters,
        "sums": {
            "batch_size": config.batch_size,
            "strategy": run.plan.decision.batch_words,
            "reference": f"one device{updates}, all examples in {format_count(passes, 'pass')}",
        },
        "batches": measured.batches,
        "seeds": {"config.seed": config.seed, "config.exchange_options.seed": config.exchange_options.seed},
        "versions": report.versions(),
        "devices": report.describe_devices(run.strategy.devices),
        "flags": report.flags(),
        "config": configs.changed_keys(config),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def format_certificate(certified: dict[str, Any]) -> str:
    """Return the certificate as a table."""
    sums, on, versions = certified["sums"], certified["devices"], certified["versions"]
    metrics, layers = certified["metrics"], certified["layers"]
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    steps = f"{len(certified['batches'])}, on batches {', '.join(map(str, certified['batches']))}"
    lines = [f"strategy   {certified['strategy']}", f"model      {certified['model']}", f"steps      {steps}"]
    lines += [f"batch      {sums['batch_size']} examples over {sums['strategy']}", f"reference  {sums['reference']}"]
    for number, stage in enumerate(certified["delays"]):
        lines += [f"{'' if number else 'delays':10} {format_delays(stage)}"]
    lines += [f"devices    {on['number']} x {', '.join(on['kinds'])}", f"versions   {packages}", ""]
    present = [q for q in QUANTITIES if any(q in errors for errors in layers.values())]
    lines += [
        format_rows([["", "relative error / tolerance"], *([n, cell(e)] for n, e in metrics.items())]),
        "",
        format_rows([["layer", *present], *([n, *(cell(of.get(q)) for q in present)] for n, of in layers.items())]),
        "",
    ]
    if certified["differs"]:
        lines.append(f"verdict    no tolerance applies: {certified['differs']}")
        return "\n".join(lines)
    of = certified["tolerance"]
    lines += format_verdict(certified["outside"], of["number"], of["false_alarm"])
    if cause := certified["cause"]:
        lines += format_cause(cause)
    else:
        scales = of["smallest_scale_errors"].items()
        (first, least), (last, most) = (pick(scales, key=lambda item: item[1]) for pick in (min, max))
        lines.append(
            f"finds      a scale error of one layer's gradient of {least:.1e} ({first}) to {most:.1e} ({last})"
        )
    return "\n".join(lines)


def describe_verdict(outside: Sequence[str], number: int, false_alarm: float) -> str:
    """Return the verdict on a number of differences. outside: those that exceed their tolerances."""
    if outside:
        return "failed, outside the tolerance"
    return f"passed: all {number} differences are within tolerance; the probability of a false alarm is {false_alarm:g}"


def format_verdict(outside: Sequence[str], number: int, false_alarm: float) -> list[str]:
    """Return the lines of the verdict, and of the errors that exceed their tolerances."""
    verdict = describe_verdict(outside, number, false_alarm)
    return [f"verdict    {verdict}", *(f"outside    {one}" for one in outside)]


def format_cause(cause: dict[str, Any]) -> list[str]:
    """Return the lines of a cause. cause: a Cause as a dict."""
    lines = [f"where      {cause['where']}", f"cause      {cause['cause']}"]
    return lines + [f"evidence   {one}" for one in cause["evidence"]]


def format_delays(stage: dict[str, Any]) -> str:
    """Return the delays of a stage in one line. stage: a StageDelay as a dict."""
    layers, lags, steps = stage["layers"], sorted(set(stage["lags"])), format_count(stage["updated_after"], "step")
    names = ", ".join(layers) if len(layers) < 3 else f"{layers[0]} .. {layers[-1]}"
    missing = f"{' or '.join(map(str, lags))} {'update' if lags == [1] else 'updates'}"
    return f"{names}: gradients at weights that lack {missing}, applied after {steps}"


def cell(error: dict[str, Any] | None) -> str:
    """Return a relative error and its tolerance as text for a table."""
    if error is None:
        return "-"
    relative = "bitwise" if error["bitwise"] else _scientific(error["relative"])
    if error["ulps"] is None:
        relative = "not finite"
    elif error["relative"] is None:  # the norm of the reference is zero
        relative = "inf"
    return relative if not error["tolerance"] else f"{relative} / {_scientific(error['tolerance'])}"


def _scientific(value: float) -> str:
    return f"{value:.1e}" if value else "0"
