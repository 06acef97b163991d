"""Audits what a step sends and holds: compiles it without running it, and compares with theory.

    scripts/python scripts/audit.py --config=configs/quickstart.py --config.mesh.data=4 \
        --config.mesh.virtual_cpu_devices=4 --config.exchange=bagua_bytegrad [--json]

Of every kind of collective: the mesh axis, the dtype on the wire, how many a step, the bytes that a device sends, the
bytes by the exchange's formula, and the ratio. Then the bytes on each device, in the program and by the formula:
parameters, optimizer, the exchange's state (residuals, copies), inputs (batches, plans, gradients in flight) and
temporary ones. What is in no program, such as copies that the host makes between them, has its formula alone. Exit code
1: a collective that no formula explains.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxpar import config as configs
from jaxpar import data, mesh
from jaxpar.analysis import audit
from jaxpar.errors import USER_ERROR, UserError
from jaxpar.measure.phases import Phases
from jaxpar.run import build


def main() -> int:
    """The command line. Exit code 2: a mistake of the user's, reported in one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.py", help="PATH[:PRESET]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments, overrides = parser.parse_known_args()
    try:
        config = configs.load_config(arguments.config)
        configs.override(config, overrides)
        mesh.prepare_jax(config, data.cache_dir(config) / "xla")
        with tempfile.TemporaryDirectory() as folder:
            audited = run(config, Path(folder))
    except UserError as error:
        print(f"jaxpar: {error}", file=sys.stderr)
        return USER_ERROR
    print(json.dumps(audited, indent=1) if arguments.json else format_audit(audited))
    return 0 if all(row["explained"] for row in audited["collectives"]) else 1


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """The audit of a config's step."""
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
    """The audit as a table."""
    lines = [audited["layout"], ""]
    lines.append(f"{'collective':20} {'axis':8} {'dtype':9} {'a step':>8} {'bytes':>14} {'theory':>14}  ratio")
    for row in audited["collectives"]:
        theory = "" if row["theory"] is None else f"{row['theory']:,.0f}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.4f}"
        note = "" if row["explained"] else "  no formula explains this"
        what = f"{row['kind']:20} {row['axis']:8} {row['dtype']:9}"
        found_bytes = f"{row['number']:8.2f} {row['nbytes']:14,.0f}"
        if row["kind"] == "copy":  # the host makes it, between programs
            found_bytes = ratio = ""
        lines.append(f"{what} {found_bytes:23} {theory:>14}  {ratio}{note}".rstrip())
    devices = audited["devices"]
    for parts in [parts for number, parts in enumerate(devices) if parts not in devices[:number]]:
        alike = ", ".join(str(number) for number, other in enumerate(devices) if other == parts)
        lines += ["", f"on device {alike:37} {'bytes':>14} {'theory':>14}  ratio"]
        for name, entry in parts.items():
            theory = "" if entry["theory"] is None else f"{entry['theory']:,}"
            nbytes = "" if entry["nbytes"] is None else f"{entry['nbytes']:,}"
            ratio = f"{entry['nbytes'] / entry['theory']:.4f}" if entry["theory"] and nbytes else ""
            lines.append(f"{name:47} {nbytes:>14} {theory:>14}  {ratio}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
