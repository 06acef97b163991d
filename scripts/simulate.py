"""Simulates the cost of a pipeline schedule: makespan, bubble, idle time, memory. No JAX and no devices.

    scripts/python scripts/simulate.py --schedule=zb_h1 --num_stages=8 --num_microbatches=24 \
        --forward=18.5 --backward=18.1 --weight=9.3 --communication=0.6
    scripts/python scripts/simulate.py --auto --num_stages=8 --num_microbatches=24 --memory_limit=12 --save=found.csv

A line is a metric: its name and its value, or its values by device.

  makespan, lockstep    time of a step, where each device goes on as soon as it can, or all go from clock to clock
  cost, bubble_rate     the longest time of a device from its first start to its last end, and the share it waits
  idle, idle_in_span    time without work, of the makespan, or from a device's first start to its last end
  peak_in_flight        most microbatches between F and B; those of one chunk of v count 1 / v
  peak_stashed          most microbatches between F and W
"""

import json
import sys

from jaxpar.errors import UserError
from jaxpar.pipeline import flags as options

METRICS = (
    "makespan",
    "cost",
    "bubble_rate",
    "lockstep",
    "idle",
    "idle_in_span",
    "peak_in_flight",
    "peak_stashed",
)


def main() -> int:
    """The command line. Exit code 2: a mistake of the user's, printed in one line."""
    parser = options.make_parser(__doc__ or "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse()
    try:
        schedule, simulation = options.find_schedule(arguments)
    except UserError as error:
        parser.error(str(error))
    metrics = {"schedule": schedule.policy} | {name: getattr(simulation, name) for name in METRICS}
    if arguments.json:
        print(json.dumps(metrics))
        return 0
    lines = []
    for name, value in metrics.items():
        values = value if isinstance(value, tuple) else (value,)
        lines.append(" ".join([name, *(each if isinstance(each, str) else f"{each:.10g}" for each in values)]))
    print("\n".join([*lines, ""]), end="")  # one write: `| head` may leave after its lines
    return 0


if __name__ == "__main__":
    sys.exit(main())
