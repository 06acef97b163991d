"""Searches for the table that is cheapest in lockstep, where a clock lasts as long as its most expensive device.

The candidates are the named schedules that fit the memory limit. With one chunk per device, a beam search over the
clocks (clock_beam.py) improves on them. The engine runs a table in lockstep, unlike the schedules that search.py finds
for devices that wait only for their inputs.
"""

from jaxpar.pipeline.search.clock_beam import ClockBeam, SearchEstimate, sets_of_actions, table_of_sets
from jaxpar.pipeline.search.search import SearchResult, filled, make_search_problem, named_schedules
from jaxpar.pipeline.tables.simulate import Time, Times, lockstep

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
    """Search for a table of low cost in lockstep. No named schedule that fits the memory limit costs less.

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
    if num_chunks > 1:
        candidates.append(filled(problem))
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
