"""Tables of schedules with a flush whose stages have replicas: several devices that take turns with the microbatches.

Replica i of r runs the microbatches k with k mod r = i, forward and backward alike (1F1B-RR in Narayanan et al.,
"PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, section 3.2).
"""

from collections.abc import Sequence

import numpy as np

from jaxpar.strategies.pipeline.tables.schedule import gpipe, one_f_one_b
from jaxpar.strategies.pipeline.tables.table import Table, place_actions

WITH_REPLICAS = ("gpipe", "1f1b")  # besides the schedules without flush (periodic.py)


def parse_replicas(text: str) -> tuple[int, ...] | None:
    """Return the numbers of devices that a text such as `2,1,1` lists; None if it does not list any."""
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isascii() and number.isdigit() and len(number) < 10 and int(number) > 0 for number in numbers):
        return None
    return tuple(map(int, numbers))


def noam(num_workers: int, num_replicas: int) -> int:
    """Return the microbatches that 1F1B has in flight on each replica of a stage (NOAM in PipeDream, section 3.2).

    num_workers: the number of workers of this stage and all later ones.
    """
    return -(-num_workers // num_replicas)


def replicated_table(name: str, replicas: Sequence[int], num_microbatches: int) -> Table:
    """Make the table of a schedule, one of WITH_REPLICAS. replicas: number of devices of each stage.

    Each replica runs its microbatches in the order of the schedule.
    """
    orders = []
    for stage, number in enumerate(replicas):
        in_flight = noam(sum(replicas[stage:]), number)
        for replica in range(number):
            own = range(replica, num_microbatches, number)
            order = gpipe(1, len(own), 1, 0) if name == "gpipe" else one_f_one_b(in_flight, len(own), 1, 0)
            orders.append([action._replace(microbatch=own[action.microbatch]) for action in order])
    stages = np.repeat(np.arange(len(replicas)), replicas)[:, None]  # devices of a stage are next to each other
    return place_actions(orders, stages, num_microbatches)
