"""Describes candidates: as table rows, in sentences, and as a config file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.choose.candidates import DEFAULTS_OF_CHOICES, OFFLOAD, AsyncCandidate, Candidate, Settings, Space
from jaxpar.cluster.target import what_jax_takes
from jaxpar.config import config_folder
from jaxpar.errors import format_bytes
from jaxpar.measure.flops import forward_flops

OVERHEADS = {
    "waiting": "waiting for other stages",
    "exposed": "exposed communication",
    "packing": "copying gradients and parameters into and out of messages",
    "update": "the update",
}
SLOW_NETWORK = " Communication takes longer than computing: faster links would help more than faster GPUs."
SLOW_COPIES = " Copies between host and GPU take longer than computing: GPUs with more memory would help."


class StepWork(NamedTuple):
    """The work of a step, and the memory for it."""

    examples: int  # examples of a step
    tokens: int  # tokens of a step; 0 if the inputs are not tokens
    flops: float  # FLOPs of the model in a step
    peak_flops: float | None  # peak FLOP/s of all devices in the dtype of the model; None if unknown
    usable_bytes: float  # memory of a device that a run can use


def work_of(space: Space) -> StepWork:
    """Return the work of a step of the problem."""
    problem, cluster = space.problem, space.machine.cluster
    inputs = problem.batch["inputs"]
    flops = 3.0 * forward_flops(problem.model.apply, problem.model.shapes, dict(problem.batch))
    peak = cluster.peak_flops.get(space.config.model.dtype)
    tokens = inputs.size if inputs.dtype.kind == "i" else 0
    return StepWork(len(inputs), tokens, flops, peak and peak * cluster.num_devices, space.usable_bytes)


def best_of_each(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the first candidate of each name."""
    found: dict[str, Candidate] = {}
    for one in candidates:
        found.setdefault(one.name, one)
    return list(found.values())


def changes(settings: Settings) -> dict[str, Any]:
    """Return the settings that differ from those of a config without any of them."""
    return {key: value for key, value in settings.items() if DEFAULTS_OF_CHOICES.get(key, ...) != value}


def as_json(candidate: Candidate, workload: StepWork) -> dict[str, Any]:
    """Return a candidate as JSON values."""
    costs = candidate.costs
    return {
        "name": candidate.name,
        "fits": candidate.fits,
        "seconds": costs.seconds,
        "compute_seconds": costs.compute,
        "waiting_seconds": costs.waiting,
        "exposed_seconds": costs.exposed,
        "update_seconds": costs.update,
        "packing_seconds": costs.packing,
        "bytes": costs.nbytes,
        "examples_per_second": workload.examples / costs.seconds,
        "tokens_per_second": workload.tokens / costs.seconds if workload.tokens else None,
        "mfu": workload.flops / costs.seconds / workload.peak_flops if workload.peak_flops else None,
        "settings": changes(candidate.settings),
        "ranked": True,
    }


def rows(candidates: Sequence[Candidate], workload: StepWork) -> list[str]:
    """Return the lines of a table."""
    mfus = [_format_mfu(as_json(one, workload)["mfu"]) for one in candidates]
    width = max(6, *map(len, mfus))
    shares = f"{'waits':>6} {'sends':>6} {'updates':>7}"
    lines = [f"{'':3}{'step':>10} {'examples/s':>12} {'MFU':>{width}} {shares} {'memory':>10}  strategy"]
    for number, (one, mfu) in enumerate(zip(candidates, mfus, strict=True), 1):
        costs = one.costs
        lines.append(
            f"{number:2} {format_seconds(costs.seconds):>10} {format_rate(workload.examples / costs.seconds):>12} "
            f"{mfu:>{width}} {costs.waiting / costs.seconds:6.1%} {costs.exposed / costs.seconds:6.1%} "
            f"{costs.update / costs.seconds:7.1%} {format_bytes(costs.nbytes):>10}  {one.name}{details(one.settings)}"
        )
    return lines


def _format_mfu(mfu: float | None) -> str:
    """Format an MFU with three significant digits, as `0.381` or `0.000381`; None: it is unknown."""
    return "" if mfu is None else f"{mfu:.3f}" if mfu >= 0.1 else f"{mfu:#.3g}"


def unranked_json(candidate: AsyncCandidate, workload: StepWork) -> dict[str, Any]:
    """Return a candidate that is not ranked as JSON values."""
    seconds = candidate.seconds
    return {
        "name": candidate.name,
        "fits": candidate.fits,
        "seconds": seconds,
        "bytes": max(candidate.device_bytes),
        "examples_per_second": workload.examples / seconds,
        "tokens_per_second": workload.tokens / seconds if workload.tokens else None,
        "staleness_mean": candidate.mean_staleness,
        "staleness_max": candidate.max_staleness,
        "sent_bytes_by_device": candidate.sent_bytes,
        "bytes_by_device": candidate.device_bytes,
        "settings": candidate.settings,
        "ranked": False,
    }


def unranked_rows(candidates: Sequence[AsyncCandidate], workload: StepWork) -> list[str]:
    """Return the lines of the table of candidates that are not ranked. What a device sends is that of the busiest."""
    columns = f"{'examples/s':>12} {'staleness: mean':>16} {'max':>4} {'sends':>9} {'memory':>10}"
    return [
        f"{'':3}{'step':>10} {columns}  strategy",
        *(
            f"{'':3}{format_seconds(one.seconds):>10} {format_rate(workload.examples / one.seconds):>12} "
            f"{one.mean_staleness:16.2f} {one.max_staleness:4} {format_bytes(max(one.sent_bytes)):>9} "
            f"{format_bytes(max(one.device_bytes)):>10}  {one.name}{'' if one.fits else ', does not fit'}"
            for one in candidates
        ),
    ]


def describe_memory(space: Space) -> str:
    """Return a sentence about the memory of a device that a run can use."""
    if space.machine.cluster.platform == "cpu":
        usable = format_bytes(space.usable_bytes)
        return f"A run can use {usable} of memory for a device; predicted are the bytes of a GPU, and a CPU needs more."
    return f"{what_jax_takes(space.usable_bytes)}; a larger fraction gives a run more."


def explain(candidate: Candidate, best: Candidate, workload: StepWork) -> str:
    """Return one sentence: why a candidate is the best, or why it is not."""
    costs = candidate.costs
    largest, longest = max(costs.overheads().items(), key=lambda item: item[1])
    needed, usable = format_bytes(costs.nbytes), format_bytes(workload.usable_bytes)
    if not candidate.fits:
        return f"{candidate.name} does not fit: it needs {needed}, and a run can use {usable} of a device."
    needs = f"it needs {needed} of {usable}"
    if candidate is best:
        slow = SLOW_COPIES if candidate.settings.get(OFFLOAD) else SLOW_NETWORK
        return (
            f"{candidate.name} computes {costs.compute / costs.seconds:.0%} of the time, and {OVERHEADS[largest]} "
            f"takes {longest / costs.seconds:.1%}; {needs}.{slow if costs.exposed > costs.compute else ''}"
        )
    here, there = ({"compute": one.compute} | one.overheads() for one in (costs, best.costs))
    worst = max(here, key=lambda name: here[name] - there[name])
    what = {"compute": "computing"} | OVERHEADS
    slower = costs.seconds / best.costs.seconds - 1
    if slower <= -0.0005:  # the first one was compiled (`--verify`)
        return f"{candidate.name} is predicted to take {-slower:.1%} less; {needs}."
    if slower < 0.0005:
        return f"{candidate.name} takes as long as the first; {needs}."
    seconds = f"{format_seconds(here[worst])} instead of {format_seconds(there[worst])}"
    return f"{candidate.name} takes {slower:.1%} longer: {what[worst]} takes {seconds}; {needs}."


def explain_own(own: Candidate, best: Candidate, workload: StepWork, others: Sequence[Candidate] = ()) -> str:
    """Return the sentence of `explain` for the user's own choice, with its options, and what would make it faster.

    others: the fastest candidate of each strategy.
    """
    named = own._replace(name=own.name + details(own.settings))
    same = own.name == best.name and details(own.settings) == details(best.settings)
    text = explain(named, named if same else best, workload)
    for faster in (one for one in others if one.name == own.name and one.costs.seconds < own.costs.seconds):
        settings = {**DEFAULTS_OF_CHOICES, **faster.settings}
        changed = [f"config.{key}={settings[key]}" for key, value in own.settings.items() if settings[key] != value]
        slower = faster.costs.seconds / best.costs.seconds - 1
        text += f" With {' and '.join(changed)}, it takes {slower:.1%} longer." if changed and slower >= 0 else ""
    return text


def config_file(name: str, overrides: Sequence[str], candidate: Candidate, cluster: str) -> str:
    """Return the text of a config file that runs a candidate.

    name: the config that was planned, as PATH[:PRESET]. The path of the user's own file becomes absolute.
    """
    settings = {**DEFAULTS_OF_CHOICES, **candidate.settings}
    path, colon, preset = name.partition(":")
    if Path(path).is_file() and Path(path).resolve().parent != config_folder().resolve():
        name = f"{Path(path).resolve()}{colon}{preset}"
    lines = "\n".join(f"        {key!r}: {value!r}," for key, value in settings.items())
    overriding = f"    configs.override(config, {list(overrides)!r})\n" if overrides else ""
    return (
        f'"""{name} with {candidate.name}, planned for {cluster}."""\n\n'
        "from ml_collections import ConfigDict\n\n"
        "from jaxpar import config as configs\n\n\n"
        "def get_config() -> ConfigDict:\n"
        f'    """Return the config of {name} with the planned strategy."""\n'
        f"    config = configs.load_config({name!r})\n"
        f"{overriding}"
        f"    config.update_from_flattened_dict({{\n{lines}\n    }})\n"
        "    return config\n"
    )


def details(settings: Mapping[str, Any]) -> str:
    """Return the settings that the name of a candidate lacks, such as `, remat full`."""
    numbers = (settings.get(key, 1) for key in ("pipeline.num_microbatches", "optimizer.accumulation_steps"))
    texts = [f"{number} microbatches" for number in numbers if number > 1]
    remats = [settings.get(key, "none") for key in ("model.remat", "pipeline.remat")]
    texts += [f"remat {remat}" for remat in remats if remat != "none"]
    if settings.get("model.scan_layers") is False:
        texts.append("no scan")
    return "".join(f", {text}" for text in texts)


def format_rate(rate: float) -> str:
    """Format a number per second."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def format_seconds(seconds: float) -> str:
    """Format a time."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{round(seconds * 1e3, 4):.3g} ms"
