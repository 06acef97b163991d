"""A lower bound for the time of a step in lockstep: work of a device, and the fill and drain that it cannot avoid.

A table in lockstep is also a schedule whose actions start when their clocks start, so the bounds of any schedule hold:

  - The first action of device d needs one F on each device before it. This is the fill.
  - After the last B of device d, the microbatch still needs one B on each device before it, and a W. This is the drain.
  - With memory for k microbatches, one of the k slots of a device is used by m / k microbatches, one after another.
    Each stays for its way through all later stages and back.

Clocks that send are counted apart, because the communication of a clock never overlaps with computation: the first
device sends every microbatch in a clock of its own, and the last microbatch then makes its way forth and back.
"""

from itertools import pairwise

import numpy as np

from jaxpar.strategies.pipeline.tables.simulate import Time, Times
from jaxpar.strategies.pipeline.tables.table import BW, B, F, StageDevices, W


def lockstep_bound(
    times: Times,
    communication: Time,
    memory_limit: float,
    num_microbatches: int,
    stages: np.ndarray,
    weight_memory: float = 1.0,
) -> Time:
    """Return a time that no table with these stages can beat in lockstep; in the unit of the times.

    Args:
      times: times of the actions.
      communication: time of a transfer to another device.
      memory_limit: maximum number of microbatches of a whole device between their F and their W.
      num_microbatches: number of microbatches.
      stages: stage by [device, chunk]; the first chunk of device d is stage d.
      weight_memory: see `search`.
    """
    num_devices, num_chunks = stages.shape
    m, of_device = num_microbatches, times.by_kind(num_devices, num_chunks)
    devices = StageDevices(stages)
    route = [devices.device(stage, 0) for stage in range(stages.size)]
    bounds: list[Time] = []
    for d, own in enumerate(of_device):
        fill = sum(before[F] for before in of_device[:d])
        drain = max(sum(between[B] for between in of_device[i:d]) + of_device[i][W] for i in range(d + 1))
        # From the start of the F of a microbatch to the end of its B.
        stay = sum(of_device[device][F] + of_device[device][B] for device in route[d:])
        bounds += [
            fill + m * num_chunks * (own[F] + own[BW]),
            fill + m * num_chunks * (own[F] + own[B]) + drain,
            fill + (m - 1) * own[F] + stay + drain,
        ]
        if num_chunks == 1:
            turns = -(-m // int(memory_limit))
            occupied = stay + (own[W] if weight_memory == 1 else 0)
            bounds.append(fill + (turns - 1) * occupied + stay + drain)
    hops = sum(before != after for before, after in pairwise(route))
    return max(bounds) + (communication * (m - 1 + 2 * hops) if hops else 0)
