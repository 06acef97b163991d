r"""Simulates a pipeline schedule: makespan, bubble, idle time and memory. Needs neither JAX nor devices.

    jaxpar simulate --schedule=zb_h1 --num_stages=8 --num_microbatches=24 \
        --forward=18.5 --backward=18.1 --weight=9.3 --communication=0.6
    jaxpar simulate --auto --num_stages=8 --num_microbatches=24 --memory_limit=12 --save=found.csv

Each line of the output is a metric: its name, then its value, or one value per device. The span of a device is the time
from the start of its first action to the end of its last one.

  devices               number of devices
  microbatches          number of microbatches
  makespan              time of a step if every device waits only for its inputs
  lockstep              time of a step if all devices step through the clocks together
  cost                  the longest span of any device
  bubble_rate           fraction of the longest span in which its device waits
  idle                  time without work within the makespan
  idle_in_span          time without work within the span of the device
  steady_bubble_rate    for a schedule without flush: the bubble rate once the pipeline is full
  peak_in_flight        maximum number of microbatches between F and B; in one of v chunks, each counts 1 / v
  peak_stashed          maximum number of microbatches between F and W
  lockstep_bound        with --auto and --objective=lockstep: a lower bound of `lockstep` for all schedules with these
                        stages and this memory
"""

import json
from collections.abc import Sequence

from jaxpar.commands import schedule_flags as options
from jaxpar.strategies.pipeline.tables.periodic import CONTINUOUS

_METRICS = ("makespan", "cost", "bubble_rate", "lockstep", "idle", "idle_in_span", "peak_in_flight", "peak_stashed")


def main(argv: Sequence[str]) -> None:
    parser = options.schedule_parser(__doc__, "jaxpar simulate")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse(argv)
    schedule, simulation = options.find_schedule(arguments)
    table = schedule.table
    metrics = {"schedule": schedule.policy, "devices": table.num_devices, "microbatches": table.num_microbatches}
    metrics |= {name: getattr(simulation, name) for name in _METRICS}
    if schedule.policy in CONTINUOUS:
        metrics["steady_bubble_rate"] = options.steady_bubble(arguments)
    if arguments.objective == "lockstep":
        metrics["lockstep_bound"] = options.flagged_bound(arguments, table)
    if arguments.json:
        print(json.dumps(metrics))
        return
    lines = []
    for name, value in metrics.items():
        values = value if isinstance(value, tuple) else (value,)
        lines.append(" ".join([name, *(each if isinstance(each, str) else f"{each:.10g}" for each in values)]))
    print("\n".join([*lines, ""]), end="")  # a single write, so that `| head` causes no broken pipe
