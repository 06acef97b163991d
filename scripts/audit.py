r"""Audits the traffic and memory of a training step: compiles the step without running it and compares with theory.

    scripts/python scripts/audit.py --config=configs/quickstart.py --config.mesh.data=4 \
        --config.mesh.virtual_cpu_devices=4 --config.exchange=bagua_bytegrad [--json]

For every kind of collective, prints the mesh axis, the dtype of the transfer, the number of collectives per step, the
bytes that a device sends, the bytes according to the formula of the exchange, and the ratio. Then prints the bytes on
each device, in the compiled program and by the formula: parameters, optimizer, exchange state (residuals, copies),
inputs (batches, plans, in-flight gradients) and temporaries. For copies that the host makes between programs, there is
only the formula.

The exit code is 1 if no formula explains a collective, and 2 for invalid arguments.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxpar import config as configs
from jaxpar import data, mesh
from jaxpar.analysis import audit
from jaxpar.command_line import Parser
from jaxpar.errors import exit_code
from jaxpar.measure.phases import Phases
from jaxpar.run import build


def main() -> int:
    """Run the command line and return the exit code."""
    parser = Parser(__doc__)
    parser.require("--config", "--config=configs/quickstart.py", help="config file as PATH[:PRESET]")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments, overrides = parser.parse_with_overrides()
    config = configs.load_config(arguments.config)
    configs.override(config, overrides)
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    with tempfile.TemporaryDirectory() as folder:
        audited = run(config, Path(folder))
    print(json.dumps(audited, indent=1) if arguments.json else format_audit(audited))
    return 0 if all(row["explained"] for row in audited["collectives"]) else 1


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Audit the training step of a config."""
    built = build.make_run(config, workdir, Phases(), build.check_run(config, workdir))
    programs = built.strategy.compile()
    rows = audit.audit(programs, built.plan, built.problem.task)
    return {
        "layout": built.plan.summary,
        "collectives": [row._asdict() | {"ratio": row.ratio, "explained": row.is_explained} for row in rows],
        "devices": [
            {name: entry._asdict() for name, entry in parts.items()} for parts in audit.memory(programs, built.strategy)
        ],
    }


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
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(exit_code(main))
