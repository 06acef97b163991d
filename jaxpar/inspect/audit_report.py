"""Audits the step of a config, and formats the audit: traffic, memory, programs, findings and predicted time."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar import models, strategies
from jaxpar.choose.auto import choose
from jaxpar.choose.costs.rates import check_rates
from jaxpar.choose.report import format_seconds
from jaxpar.cluster import Cluster
from jaxpar.cluster.target import FRACTION, Target
from jaxpar.core.plan import COPY, Plan
from jaxpar.core.step import Problem
from jaxpar.errors import format_bytes, is_refused
from jaxpar.inspect import audit, findings
from jaxpar.inspect.programs import ProgramSummary, buffers_at_peak, summarize
from jaxpar.inspect.step_time import (
    NOTHING,
    StepTime,
    are_on_busiest,
    check_step,
    predict,
    predict_program,
    short_source,
    total_time,
)
from jaxpar.measure.flops import forward_flops
from jaxpar.measure.hlo import present_lines
from jaxpar.measure.kernels import ATTENTION
from jaxpar.measure.phases import Phases
from jaxpar.run import build
from jaxpar.strategies import Strategy
from jaxpar.strategies.strategy import CompiledProgram

LONGEST = 5  # parts of a step whose predicted time is printed
NUM_BUFFERS = 5  # lines of temporary arrays
LARGEST_FRACTION = 0.95  # of the memory of a GPU; the rest is for CUDA and its libraries


def audit_run(
    config: Any, workdir: Path, target: Target | None = None, *, with_program: bool = False, with_time: bool = False
) -> dict[str, Any]:
    """Audit the training step of a config, on the devices of this machine or of a target."""
    config, dataset = choose(config, workdir, target)
    if with_time:
        check_step(config)
    if target:
        cluster, decision = build.check_run(config, workdir, target.cluster)
        problem = build.load_parts(config, workdir, cluster, dataset).problem
        plan = strategies.plan(config, problem, cluster, decision)
        strategy = strategies.build(plan, problem, target.devices)
    else:
        built = build.make_run(config, workdir, Phases(), build.check_run(config, workdir), dataset)
        problem, strategy = built.problem, built.strategy
    with present_lines():
        programs = strategy.compile()
    rows = audit.audit(programs, strategy.plan, problem.task)
    audited: dict[str, Any] = {
        "model": models.describe_model(config, problem.model, problem.batch),
        "layout": strategy.plan.summary,
        "collectives": [row._asdict() | {"ratio": row.ratio, "explained": row.is_explained} for row in rows],
        "devices": [
            {name: entry._asdict() for name, entry in parts.items()} for parts in audit.memory(programs, strategy)
        ],
        "buffers": [one._asdict() for one in buffers_at_peak(programs, [one.name for one in problem.model.layers])],
    }
    if target:
        audited["needed"] = audit.needed_bytes(programs, strategy)
        audited["host_bytes"] = max(map(audit.host_bytes_of, strategy.plan.memory))
        audited["memory_bytes"], audited["usable_bytes"] = target.memory_bytes, target.usable_bytes
    if with_program or with_time:
        assert target is not None
        has_memory = 2 * sum(audited["needed"].values()) < target.usable_bytes
        described = _described(programs, strategy, problem, config, target.cluster, has_memory=has_memory)
        audited |= described if with_program else {"findings": described["findings"]}
    if with_time:
        assert target is not None
        audited["time"] = _predicted(programs, strategy.plan, problem, config.model.dtype, target.cluster)
    return audited


def model_flops(problem: Problem) -> float:
    """Return the FLOPs of the forward and backward pass of the global batch, without recomputation."""
    return 3 * forward_flops(problem.model.apply, problem.model.shapes, dict(problem.batch))


def _described(
    programs: Sequence[CompiledProgram],
    strategy: Strategy[Any],
    problem: Problem,
    config: Any,
    cluster: Cluster,
    *,
    has_memory: bool,
) -> dict[str, Any]:
    """Return the summaries of the programs, and the findings. Without the rates of the GPUs, no time is known.

    has_memory: whether half of the memory is free.
    """
    summaries = [summarize(program) for program in programs]
    can_predict = not is_refused(check_rates, cluster)
    times = [predict_program(program, cluster) if can_predict else NOTHING for program in programs]
    rows = [
        describe_program(summary, time)
        | {
            "devices": sorted(strategy.devices.index(device) for device in audit.devices_of(program)),
            "runs": program.runs,
        }
        for program, summary, time in zip(programs, summaries, times, strict=True)
    ]
    has_calls = any(program.calls for program in programs)
    if len(programs) > 1 and not (has_calls and can_predict):  # at what times each of them runs is unknown
        return {"programs": rows, "findings": None}
    step = total_time(programs, times, cluster, strategy.plan.offloaded_bytes) if can_predict else NOTHING
    numbers = [program.runs for program in programs]
    run = [*map(findings.RunProgram, summaries, times, numbers, are_on_busiest(programs, times))]
    flops = model_flops(problem)
    expected = findings.expectations(config, has_memory=has_memory)
    remedies = findings.remedies(config, cluster, has_memory=has_memory)
    found = findings.find(run, step, cluster, expected, remedies, dtype=config.model.dtype, model_flops=flops)
    listed = [one._asdict() | {"is_normal": one.is_normal} for one in found]
    return {"programs": rows, "model_flops": flops, "findings": listed}


def describe_program(summary: ProgramSummary, time: StepTime) -> dict[str, Any]:
    """Return the summary of a program with the predicted seconds of its collectives; None if `time` lacks them."""
    row: dict[str, Any] = summary._asdict() | {"flops": summary.flops}
    row["products"] = [product._asdict() for product in summary.products]
    row |= {name: getattr(summary, name)._asdict() for name in ("stacks", "copies", "kernels")}
    row["collectives"] = []
    for one in summary.collectives:
        seconds, exposed = time.collectives.get(one.name, (None, None))
        row["collectives"].append(one._asdict() | {"seconds": seconds, "exposed_seconds": exposed})
    return row


def _predicted(
    programs: Sequence[CompiledProgram], plan: Plan[Any], problem: Problem, dtype: str, cluster: Cluster
) -> dict[str, Any]:
    """Return the predicted time of a step, its rates, and the parts that take longest. dtype: that of the model."""
    time, inputs = predict(programs, cluster, plan.offloaded_bytes), problem.batch["inputs"]
    flops = model_flops(problem)
    peak = cluster.peak_flops[dtype] * cluster.num_devices
    return {
        "seconds": time.seconds,
        "exposed_seconds": time.exposed,
        "examples_per_second": len(inputs) / time.seconds,
        "tokens_per_second": inputs.size / time.seconds if inputs.dtype == np.int32 else None,
        "mfu": flops / time.seconds / peak,
        "by_kind": time.by_kind(),
        "longest": [
            {"kind": part.kind, "source": short_source(part.source), "seconds": seconds}
            for part, seconds in time.longest()[:LONGEST]
        ],
    }


def format_audit(audited: dict[str, Any]) -> str:
    """Return the audit as tables."""
    lines = [audited["model"], audited["layout"], ""]
    lines.append(f"{'collective':20} {'axis':8} {'dtype':9} {'per step':>8} {'bytes sent':>14} {'theory':>14}  ratio")
    for row in audited["collectives"]:
        theory = "" if row["theory"] is None else f"{row['theory']:,.0f}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.4f}"
        note = "" if row["explained"] else "  not explained by theory"
        what = f"{row['kind']:20} {row['axis']:8} {row['dtype']:9}"
        found_bytes = f"{row['number']:8.2f} {row['nbytes']:14,.0f}"
        if row["kind"] == COPY and not row["nbytes"]:  # made by the host; only those between calls are known
            found_bytes = ratio = ""
        lines.append(f"{what} {found_bytes:23} {theory:>14}  {ratio}{note}".rstrip())
    devices = audited["devices"]
    for parts in [parts for number, parts in enumerate(devices) if parts not in devices[:number]]:
        alike = ", ".join(str(number) for number, other in enumerate(devices) if other == parts)
        title = f"memory on {'devices' if ',' in alike else 'device'} {alike}"
        lines += ["", f"{title:47} {'bytes':>14} {'theory':>14}  ratio"]
        for name, entry in parts.items():
            theory = "" if entry["theory"] is None else f"{entry['theory']:,}"
            nbytes = "" if entry["nbytes"] is None else f"{entry['nbytes']:,}"
            ratio = f"{entry['nbytes'] / entry['theory']:.4f}" if entry["theory"] and nbytes else ""
            lines.append(f"{name:47} {nbytes:>14} {theory:>14}  {ratio}".rstrip())
    lines += ["", *format_buffers(audited["buffers"])]
    if "needed" in audited:
        lines += ["", _format_needed(audited["needed"], audited["usable_bytes"], audited["memory_bytes"])]
        if audited["host_bytes"]:
            lines.append(f"For each GPU, {format_bytes(audited['host_bytes'])} of its state are on the host.")
    lines += format_programs(audited.get("programs", []))
    if audited.get("programs") and audited["findings"] is None:
        why = "each of them perhaps more than once or at the same time as others, and copies arrays between them"
        lines += ["", f"The step runs several programs, {why}: no totals and findings."]
    if "model_flops" in audited:
        flops = sum(one["runs"] * one["num_devices"] * one["flops"] for one in audited["programs"])
        lines += ["", f"FLOPs of all products / those of the model: {flops / audited['model_flops']:.2f}"]
    if audited.get("findings") is not None:
        lines += [*([] if "model_flops" in audited else [""]), *format_findings(audited["findings"])]
    if "time" in audited:
        lines += ["", *_format_time(audited["time"])]
    return "\n".join(lines)


def _format_time(time: dict[str, Any]) -> list[str]:
    seconds = time["seconds"]
    tokens = f", {time['tokens_per_second']:,.0f} tokens/s" if time["tokens_per_second"] else ""
    exposed = f"{1e3 * time['exposed_seconds']:.3g} ms of it are waits for other GPUs"
    return [
        f"predicted time of a step: {format_seconds(seconds)} ({time['examples_per_second']:,.0f} examples/s{tokens}, "
        f"MFU {time['mfu']:.3f}); {exposed}",
        ", ".join(f"{kind} {of_kind / seconds:.1%}" for kind, of_kind in time["by_kind"].items()),
        *(f"{row['seconds'] / seconds:8.1%}  {row['kind']:10} {row['source']}" for row in time["longest"]),
    ]


def format_buffers(buffers: list[dict[str, Any]]) -> list[str]:
    """Return the largest temporary arrays as lines, and the bytes of the others."""
    lines = [f"{'largest temporary arrays at the peak':47} {'bytes':>14}  layer and line"]
    for row in buffers[:NUM_BUFFERS]:
        number = f"{row['number']} x " if row["number"] > 1 else ""
        arrays = f"{number}{row['dtype']}[{','.join(map(str, row['shape']))}]"
        layers = {re.sub(r"\d+", "*", layer) if len(row["layers"]) > 1 else layer for layer in row["layers"]}
        lines.append(f"{arrays:47} {row['nbytes']:14,}  {'  '.join([*layers, row['source']])}")
    others = buffers[NUM_BUFFERS:]
    lines.append(
        f"{sum(row['number'] for row in others)} others".ljust(47) + f" {sum(row['nbytes'] for row in others):14,}"
    )
    return lines


def format_programs(programs: list[dict[str, Any]]) -> list[str]:
    """Return the summaries of programs as lines. Several have titles, and equal ones are printed once."""
    devices: dict[int, list[int]] = {}  # index of the first of equal programs -> devices of all of them
    unlike = [{key: value for key, value in program.items() if key != "devices"} for program in programs]
    for program, contents in zip(programs, unlike, strict=True):
        devices.setdefault(unlike.index(contents), []).extend(program["devices"])
    lines = []
    for number, on in devices.items():
        numbers = ", ".join(map(str, sorted(on)))
        title = f"program {programs[number]['name']} on {'devices' if len(on) > 1 else 'device'} {numbers}"
        if len(programs) > 1:
            lines += ["", title, *format_program(programs[number], "per run")]
        else:
            lines += ["", *format_program(programs[number])]
    return lines


def format_program(program: dict[str, Any], how_often: str = "per step") -> list[str]:
    """Return the summary of a program as lines. how_often: title of the numbers of collectives."""
    lines = [
        f"{'collective':18} {'dtype':9} {'bytes':>14} {how_often:>8}  kernels, matrix products meanwhile  ms, exposed"
    ]
    for row in program["collectives"]:
        sent = f"{row['kind']:18} {row['dtype']:9} {row['nbytes']:14,} {row['per_step']:8.2f}"
        line = f"{sent} {row['kernels']:8,} {row['products']:16,}"
        if row["seconds"] is not None:
            line += f" {1e3 * row['seconds']:16.3f} {1e3 * row['exposed_seconds']:8.3f}"
        lines.append(line)
    numbers, attention = Counter[str](), Counter[str]()
    for row in program["products"]:
        numbers[row["dtype"]] += row["per_step"]
        if row["library"].startswith(ATTENTION):
            attention[row["library"]] += row["per_step"]
    products = ", ".join(f"{number:,.0f} of {dtype}" for dtype, number in sorted(numbers.items()))
    kernels = ", ".join(f"{number:,.0f} of {name}" for name, number in attention.items())
    lines += [
        f"matrix products: {products or 'none'}; attention kernels: {kernels or 'none'}",
        *(
            f"    of float32: {source}"
            for source in dict.fromkeys(row["source"] for row in program["products"] if row["dtype"] == "float32")
            if len(numbers) > 1
        ),
        f"kernels: {program['kernels']['number']:,.0f}; slices of stacked arrays: {_format_moves(program['stacks'])}; "
        f"copies in loops: {_format_moves(program['copies'])}; the host waits for the GPU: "
        f"{findings.format_times(program['synchronizations'])}",
    ]
    return lines


def _format_moves(moves: dict[str, float]) -> str:
    return f"{moves['number']:,.0f} ({format_bytes(moves['nbytes'])})" if moves["number"] else "none"


def format_findings(found: list[dict[str, Any]]) -> list[str]:
    """Return the findings as lines: first the defects, with remedies, then those that are normal for the strategy."""
    lines = []
    for row in found:
        reason = f" ({row['reason']})" if row["reason"] else ""
        remedy = f"; {row['remedy']}" if row["remedy"] and not row["is_normal"] else ""
        lines.append(f"{'normal' if row['is_normal'] else 'finding'}: {row['text']}{reason}{remedy}")
    defects = [line for line in lines if line.startswith("finding")]
    return [*(defects or ["no findings"]), *(line for line in lines if line not in defects)]


def _format_needed(needed: dict[str, int], usable_bytes: float, memory_bytes: float) -> str:
    """Return whether the largest program of the step fits into the memory that JAX takes on a GPU."""
    total = sum(needed.values())
    left = usable_bytes - total
    parts = ", ".join(f"{format_bytes(nbytes)} of {kind}" for kind, nbytes in needed.items() if nbytes)
    spare = format_bytes(abs(left), digits=4)
    verdict = f"fits, with {spare} to spare" if left >= 0 else f"does not fit, by {spare}"
    if left < 0 and total <= LARGEST_FRACTION * memory_bytes:
        verdict += f" (but {FRACTION}={LARGEST_FRACTION:g} would suffice)"
    memory = f"{format_bytes(usable_bytes, digits=4)} that JAX takes of {format_bytes(memory_bytes, digits=4)}"
    return f"A GPU needs {format_bytes(total, digits=4)} ({parts}) of the {memory}: {verdict}."
