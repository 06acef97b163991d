"""Searches for the table that is cheapest in lockstep, where a clock lasts as long as its most expensive device.

The candidates are the named schedules that fit the memory limit and, with one chunk per device, gpipe in blocks of as
many microbatches as fit. A beam search over the clocks (clock_beam.py) then improves on the best one. The engine runs a
table in lockstep, unlike the schedules that search.py finds for devices that wait only for their inputs.

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

from jaxpar.choose.search.clock_beam import ClockBeam, SearchEstimate, sets_of_actions, table_of_sets
from jaxpar.choose.search.insert_w import SearchProblem
from jaxpar.choose.search.search import SearchResult, filled, make_search_problem, named_schedules
from jaxpar.strategies.pipeline.tables.simulate import Time, Times, lockstep
from jaxpar.strategies.pipeline.tables.table import (
    BW,
    Action,
    B,
    F,
    StageDevices,
    Table,
    W,
    loop_stages,
    place_actions,
    with_slots,
)


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


# None of these estimates is best for all times and limits.
ESTIMATES = (SearchEstimate(0.5, 0), SearchEstimate(0, 0.1), SearchEstimate(0, 0.5))


def search_lockstep(
    times: Times,
    communication: Time,
    memory_limit: float,
    num_devices: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    weight_memory: float = 1.0,
    width: int = 16,
) -> SearchResult:
    """Search for a table of low cost in lockstep.

    No named schedule that fits the memory limit costs less, and with one chunk no gpipe in blocks that fit.

    Args:
      times: times of the actions.
      communication: time of a clock in which any device sends, in addition to its actions.
      memory_limit: maximum number of microbatches of a whole device between their F and their W.
      num_devices: number of devices.
      num_microbatches: number of microbatches.
      num_chunks: number of chunks per device.
      weight_memory: as in `search`.
      width: partial tables that the beam search keeps. More are slower, and find better tables. 0: no beam search.

    Raises:
      ValueError: a size or the memory limit is below 1.
    """
    sizes = num_devices, num_microbatches, num_chunks
    problem = make_search_problem(times, communication, memory_limit, sizes, weight_memory)
    candidates = list(named_schedules(problem))  # with one chunk, model_parallel fits any limit
    candidates.append(filled(problem) if num_chunks > 1 else in_blocks(problem))
    best = min(candidates, key=lambda result: lockstep(result.table, times, communication))
    if num_chunks > 1 or width == 0:
        return best
    beam, sets = ClockBeam(problem, width), sets_of_actions(best.table)
    for estimate in ESTIMATES:
        sets = beam.run([sets], estimate)
    improved = table_of_sets(sets, num_microbatches)
    if lockstep(improved, times, communication) < lockstep(best.table, times, communication) * (1 - 1e-9):
        return SearchResult(f"{best.policy}, improved in lockstep", improved)
    return best


def in_blocks(problem: SearchProblem) -> SearchResult:
    """Return gpipe in blocks of as many microbatches as fit: the F of a block, then the BW of the block."""
    p, m = problem.num_devices, problem.num_microbatches
    size = min(int(problem.memory), m)
    order: list[Action] = []
    for first in range(0, m, size):
        block = range(first, min(first + size, m))
        order += [Action(F, k, 0) for k in block]
        order += [Action(BW, k, 0) for k in block]
    table = place_actions([order] * p, loop_stages(p, 1), m)
    return SearchResult(f"gpipe in blocks of {size} microbatches", table)


def search_fused(
    times: Times, memory_limit: float, num_devices: int, num_microbatches: int, width: int
) -> SearchResult:
    """Search for a table of low cost in lockstep whose backward pass is fused. Arguments: see `search_lockstep`.

    times: those of F and BW; BW is B, and W takes no time, so that it can be in the clock of its B.
    """
    found = search_lockstep(times, 0, memory_limit, num_devices, num_microbatches, width=width)
    actions = found.table.actions[found.table.actions["kind"] != W]
    actions["kind"][actions["kind"] == B] = BW
    return SearchResult(found.policy, with_slots(Table(num_devices, 1, num_microbatches, actions)))
