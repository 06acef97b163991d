r"""Certifies a strategy: runs it and a single-device reference on the same batches, and reports the differences.

    scripts/python scripts/certify.py --config=configs/quickstart.py [--num_steps=10] [--output=certificate.json] \
        [--config.KEY=VALUE ...]

For each layer, reports the error of the initial parameters, the largest errors over all steps of the gradient and of
the optimizer update, the error of a resumed state, and the difference of the parameters after two independent runs.
A pipeline that never drains is compared with one device that delays its updates as the pipeline does.
docs/certificate.md explains what is compared and why.

Exit codes: 0 if the differences are within the tolerance, or if there is no tolerance because the strategy computes
different numbers by design; 1 if they are outside the tolerance, or if the training failed; 2 for invalid arguments.
"""

import argparse
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar import data, files, mesh
from jaxpar.analysis import certificate, delayed, reference
from jaxpar.analysis.certificate import MOST_STEPS, QUANTITIES, ROUNDINGS, TOLERANCES
from jaxpar.choose.auto import choose
from jaxpar.command_line import Parser, integer, output_path
from jaxpar.errors import UserError, exit_code, format_count
from jaxpar.measure import provenance
from jaxpar.measure.phases import Phases
from jaxpar.run import build
from jaxpar.run.unused import check_unused_keys


def main() -> int:
    """Run the command line and return the exit code."""
    parser = Parser(__doc__)
    parser.require("--config", "--config=configs/quickstart.py", help="config file as PATH[:PRESET]")
    parser.add_argument(
        "--num_steps",
        type=integer(1, MOST_STEPS),
        default=10,
        help=f"number of steps, up to {MOST_STEPS}; the learning rate schedule spans them",
    )
    parser.add_argument(
        "--reference_passes",
        type=integer(1),
        default=1,
        help="number of microbatches into which the reference divides a batch",
    )
    parser.add_argument("--output", type=output_path, default="certificate.json", help="JSON file to write")
    arguments, overrides = parser.parse_with_overrides()
    config = configs.load_config(arguments.config)
    check_unused_keys(config, configs.override(config, overrides))
    check(config, arguments)
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    with tempfile.TemporaryDirectory() as folder:
        certified = certify(config, Path(folder), arguments.reference_passes)
    files.write_text(arguments.output, files.json_text(certified, indent=1) + "\n")
    print(f"{format_certificate(certified)}\nwritten    {arguments.output}")
    return 1 if certified["outside"] else 0


def check(config: ConfigDict, arguments: argparse.Namespace) -> None:
    """Set config.num_steps. Raises UserError for invalid flags."""
    config.num_steps = arguments.num_steps
    passes = arguments.reference_passes
    if config.batch_size % passes:
        raise UserError(f"--reference_passes is {passes}; it must divide config.batch_size ({config.batch_size})")
    if arguments.output.is_dir():
        raise UserError(f"--output is '{arguments.output}', which is a directory; it must be a file")
    if not arguments.output.parent.is_dir():
        raise UserError(
            f"--output is '{arguments.output}'; it must be in an existing directory, and '{arguments.output.parent}' "
            "is not one"
        )


def certify(config: ConfigDict, workdir: Path, passes: int) -> dict[str, Any]:
    """Compute the certificate of the strategy of a config."""
    # By default GPUs round the factors of matrix products to 10 bits, which would hide small errors.
    with jax.default_matmul_precision("highest"):
        config, dataset = choose(config, workdir)
        checked = build.check_run(config, workdir)
        run = build.make_run(config, workdir, Phases(), checked, dataset)
        runs, delays = reference.make_runs(run, passes), run.plan.delays
        measured = delayed.measure_recurrence(runs) if delays else certificate.measure(runs)
        flags = provenance.flags()
    differs = delays.differs if delays else run.plan.differs
    tolerance = None if differs else TOLERANCES[config.model.dtype]
    updates = " with delayed updates" if delays else ""
    return {
        "strategy": f"{config.strategy}: {run.plan.summary}",
        "model": f"{config.model.name}, {config.model.dtype}",
        "differs": differs,
        "delays": [stage._asdict() for stage in delays.stages] if delays else [],
        "tolerance": tolerance,
        "outside": certificate.outside(measured, tolerance) if tolerance else [],
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
        "versions": provenance.versions(),
        "devices": provenance.describe_devices(run.strategy.devices),
        "flags": flags,
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
    lines += [
        format_table([["", "relative error, max error in ULPs"], *([n, cell(e)] for n, e in metrics.items())]),
        "",
    ]
    present = [q for q in QUANTITIES if any(q in errors for errors in layers.values())]
    heading = ["layer", *present]
    lines += [format_table([heading, *([name, *(cell(of.get(q)) for q in present)] for name, of in layers.items())])]
    if certified["differs"]:
        return "\n".join([*lines, "", f"verdict    no tolerance applies: {certified['differs']}"])
    if not certified["outside"]:
        most = ", ".join(f"{name} {scientific(value)}" for name, value in certified["tolerance"].items())
        rounded = f", or {ROUNDINGS:g} x rounding" if "rounding" in present else ""
        return "\n".join([*lines, "", f"verdict    passed, within the tolerance: {most}{rounded}"])
    return "\n".join(
        [*lines, "", "verdict    failed, outside the tolerance", *(f"outside    {one}" for one in certified["outside"])]
    )


def format_delays(stage: dict[str, Any]) -> str:
    """Return the delays of a stage in one line. stage: a StageDelay as a dict."""
    layers, lags, steps = stage["layers"], sorted(set(stage["lags"])), format_count(stage["updated_after"], "step")
    names = ", ".join(layers) if len(layers) < 3 else f"{layers[0]} .. {layers[-1]}"
    missing = f"{' or '.join(map(str, lags))} {'update' if lags == [1] else 'updates'}"
    return f"{names}: gradients at weights that lack {missing}, applied after {steps}"


def format_table(rows: list[list[str]]) -> str:
    """Return rows of cells as lines with columns of equal width."""
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    lines = ["".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def cell(error: dict[str, Any] | None) -> str:
    """Return an error as text for a table."""
    if error is None:
        return "-"
    if error["bitwise"]:
        return "bitwise"
    if error["ulps"] is None:
        return "not finite"
    relative = "inf" if error["relative"] is None else scientific(error["relative"])  # None: the norm is zero
    spec = ".1f" if error["ulps"] < 1e6 else ".1e"
    return f"{relative}, {error['ulps']:{spec}}"


def scientific(value: float) -> str:
    """Return a number with two digits."""
    return f"{value:.1e}" if value else "0"


if __name__ == "__main__":
    sys.exit(exit_code(main))
