r"""Audits the traffic and memory of a training step: compiles the step without running it and compares with theory.

    scripts/python scripts/audit.py --config=configs/quickstart.py --config.mesh.data=4 \
        --config.mesh.virtual_cpu_devices=4 --config.exchange=bagua_bytegrad [--json]

For every kind of collective, prints the mesh axis, the dtype of the transfer, the number of collectives per step, the
bytes that a device sends, the bytes according to the formula of the exchange, and the ratio. Then prints the bytes on
each device, in the compiled program and by the formula: parameters, optimizer, exchange state (residuals, copies),
inputs (batches, plans, in-flight gradients) and temporaries. For copies that the host makes between programs, there is
only the formula.

With --target, the step is compiled for GPUs that this machine does not have (jaxpar/gpus; the extra `targets`), and the
last line compares the memory that XLA's buffer assignment needs on a GPU with what JAX takes there: 0.75 of the memory,
or XLA_CLIENT_MEM_FRACTION.

The exit code is 1 if no formula explains a collective, and 2 for invalid arguments.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxpar import config as configs
from jaxpar import data, mesh, strategies
from jaxpar.analysis import audit
from jaxpar.command_line import Parser
from jaxpar.errors import exit_code, format_bytes
from jaxpar.measure.phases import Phases
from jaxpar.run import build
from jaxpar.target import FRACTION, Target, find_target

LARGEST_FRACTION = 0.95  # of the memory of a GPU; the rest is for CUDA and its libraries


def main() -> int:
    """Run the command line and return the exit code."""
    parser = Parser(__doc__)
    parser.require("--config", "--config=configs/quickstart.py", help="config file as PATH[:PRESET]")
    parser.add_argument("--target", help="compile for these GPUs, such as h100:8 or h100:16x8 (hosts x GPUs)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments, overrides = parser.parse_with_overrides()
    config = configs.load_config(arguments.config)
    configs.override(config, overrides)
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    target = find_target(arguments.target) if arguments.target else None
    with tempfile.TemporaryDirectory() as folder:
        audited = run(config, Path(folder), target)
    print(json.dumps(audited, indent=1) if arguments.json else format_audit(audited))
    return 0 if all(row["explained"] for row in audited["collectives"]) else 1


def run(config: Any, workdir: Path, target: Target | None = None) -> dict[str, Any]:
    """Audit the training step of a config, on the devices of this machine or of a target."""
    if target:
        cluster, decision = build.check_run(config, workdir, target.cluster)
        problem = build.load_parts(config, workdir, cluster).problem
        plan = strategies.plan(config, problem, cluster, decision)
        strategy = strategies.build(plan, problem, target.devices)
    else:
        built = build.make_run(config, workdir, Phases(), build.check_run(config, workdir))
        problem, strategy = built.problem, built.strategy
    programs = strategy.compile()
    rows = audit.audit(programs, strategy.plan, problem.task)
    audited: dict[str, Any] = {
        "layout": strategy.plan.summary,
        "collectives": [row._asdict() | {"ratio": row.ratio, "explained": row.is_explained} for row in rows],
        "devices": [
            {name: entry._asdict() for name, entry in parts.items()} for parts in audit.memory(programs, strategy)
        ],
    }
    if target:
        audited["needed"] = audit.needed_bytes(programs)
        audited["memory_bytes"], audited["usable_bytes"] = target.cluster.memory_bytes, target.usable_bytes
    return audited


def format_audit(audited: dict[str, Any]) -> str:
    """Return the audit as tables."""
    lines = [audited["layout"], ""]
    lines.append(f"{'collective':20} {'axis':8} {'dtype':9} {'per step':>8} {'bytes sent':>14} {'theory':>14}  ratio")
    for row in audited["collectives"]:
        theory = "" if row["theory"] is None else f"{row['theory']:,.0f}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.4f}"
        note = "" if row["explained"] else "  not explained by theory"
        what = f"{row['kind']:20} {row['axis']:8} {row['dtype']:9}"
        found_bytes = f"{row['number']:8.2f} {row['nbytes']:14,.0f}"
        if row["kind"] == "copy":  # copied by the host between programs, so not in a compiled program
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
    if "needed" in audited:
        lines += ["", format_needed(audited["needed"], audited["usable_bytes"], audited["memory_bytes"])]
    return "\n".join(lines)


def format_needed(needed: dict[str, int], usable_bytes: float, memory_bytes: float) -> str:
    """Return whether the largest program of the step fits into the memory that JAX takes on a GPU."""
    total = sum(needed.values())
    left = usable_bytes - total
    parts = ", ".join(f"{format_bytes(nbytes)} of {kind}" for kind, nbytes in needed.items() if nbytes)
    verdict = f"fits, with {format_bytes(left)} to spare" if left >= 0 else f"does not fit, by {format_bytes(-left)}"
    if left < 0 and total <= LARGEST_FRACTION * memory_bytes:
        verdict += f" (but {FRACTION}={LARGEST_FRACTION:g} would suffice)"
    memory = f"{format_bytes(usable_bytes)} that JAX takes of {format_bytes(memory_bytes)}"
    return f"A GPU needs {format_bytes(total)} ({parts}) of the {memory}: {verdict}."


if __name__ == "__main__":
    sys.exit(exit_code(main))
