r"""Audits the traffic and memory of a training step: compiles the step without running it and compares with theory.

    jaxpar audit --config=configs/quickstart.py --config.mesh.data=4 \
        --config.mesh.virtual_cpu_devices=4 --config.exchange=bagua_bytegrad [--json]

For every kind of collective, prints the mesh axis, the dtype of the transfer, the number of collectives per step, the
bytes that a device sends, the bytes according to the formula of the exchange, and the ratio. Then prints the bytes on
each device, in the compiled program and by the formula: parameters, optimizer, exchange state (residuals, copies),
inputs (batches, plans, in-flight gradients) and temporaries. For copies that the host makes between programs, there is
only the formula. Last, lists the largest of the temporary arrays that are in memory at the peak, with the layers and
lines of code that compute them.

With --target, the step is compiled for GPUs that this machine does not have (jaxpar/cluster/gpus; the extra `targets`),
or with --target=here for those that it has, and the last line compares the memory that XLA's buffer assignment needs on
a GPU with what JAX takes there: 0.75 of the memory, or XLA_CLIENT_MEM_FRACTION.

--program also describes the schedule of that program, or of each program if a step has several: for every collective,
its bytes, how many kernels and matrix products run at the same time, and of its predicted time the part in which the
GPU only waits; the dtypes of the matrix products, attention kernels, FLOPs compared with those of the model, the number
of kernels, the bytes of those that only move slices of stacked arrays and of copies in loops, and how often the host
waits for the GPU. Findings are what of this costs time without need (jaxpar/inspect/findings.py); those that are normal
for the strategy have the reason. --time prints them too.

--time predicts the time of a step: of each kernel by its FLOPs and bytes and the rates of the GPU, of collectives by
the link that they cross (jaxpar/inspect/step_time.py). It prints what takes longest, and MFU as a run does. The
programs of dispatched stages run as soon as their inputs have arrived (jaxpar/inspect/enqueued.py). Not predicted are
the steps of async_data_parallel, swarm and exchange dp.

The exit code is 1 if no formula explains a collective or the step does not fit, and 2 for invalid arguments.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxpar.choose.costs.rates import check_rates
from jaxpar.cluster.target import find_target
from jaxpar.commands.config_flags import ConfigParser
from jaxpar.errors import UserError
from jaxpar.inspect.audit_report import audit_run, format_audit


def main(argv: Sequence[str]) -> int:
    parser = ConfigParser(__doc__, "jaxpar audit")
    add = parser.add_argument
    add("--target", help="compile for these GPUs, such as h100:8, h100:16x8 (hosts x GPUs) or here")
    add("--program", action="store_true", help="with --target: describe the schedule of the GPU program")
    add("--time", action="store_true", help="with --target: predict the time of a step")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    arguments, config = parser.read(argv)
    for flag in ("program", "time"):
        if getattr(arguments, flag) and arguments.target is None:
            raise UserError(f"--{flag} is set; it must be set with --target, because it describes a program for GPUs")
    target = None if arguments.target is None else find_target(arguments.target)
    if arguments.time and target:
        check_rates(target.cluster)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        audited = audit_run(config, Path(folder), target, with_program=arguments.program, with_time=arguments.time)
    print(json.dumps(audited, indent=1) if arguments.json else format_audit(audited))
    fits = target is None or sum(audited["needed"].values()) <= audited["usable_bytes"]
    return 0 if fits and all(row["explained"] for row in audited["collectives"]) else 1
