"""Searches the strategies, meshes, microbatches, schedules and kinds of rematerialization for the fastest step.

Hundreds of candidates are compared by their predicted costs alone. Only strategies that equal training on one device
are compared, with config.batch_size examples in a step.
"""

import math
import sys
import time
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from jaxpar.analysis.planner.candidates import Candidate, Settings, Space, ranked
from jaxpar.analysis.planner.pipeline_candidates import candidate_of_pipeline, of_pipelines
from jaxpar.analysis.planner.replica_candidates import candidate_of_replicas, of_replicas
from jaxpar.core.plan import Plan
from jaxpar.errors import format_count

FIRST_REPORT = 3.0  # seconds after which a search reports its progress


def candidates(space: Space) -> list[Candidate]:
    """Return all candidates, the fastest that fit first, then the others by the memory that they need."""
    return ranked(one for one in _reported(_all(space)) if space.keeps(one.settings))


def _reported(found: Iterator[Candidate]) -> Iterator[Candidate]:
    """Yield the candidates, and print to stderr how many there are so far, at growing intervals."""
    began, next_line = time.monotonic(), FIRST_REPORT
    for number, one in enumerate(found, 1):
        yield one
        if (seconds := time.monotonic() - began) >= next_line:
            print(
                f"planner   {format_count(number, 'candidate')} so far, in {seconds:.0f} s", file=sys.stderr, flush=True
            )
            next_line = 2 * seconds


def _all(space: Space) -> Iterator[Candidate]:
    yield from of_replicas(space)
    yield from of_pipelines(space)


def conflict(space: Space) -> Settings:
    """Return those of the kept settings because of which a space has no candidates; empty if it has none anyway."""
    kept = space.kept
    for key in reversed(list(space.kept)):  # rather those that are listed first
        others = {name: value for name, value in kept.items() if name != key}
        without = space._replace(kept=others)
        if not any(without.keeps(one.settings) for one in _all(without)):
            kept = others
    return kept


def candidate_of_plan(space: Space, config: ConfigDict, plan: Plan[Any]) -> Candidate:
    """Return the candidate of a plan of single, data_parallel or pipeline. For others, see unranked.py."""
    assert plan.strategy in ("single", "data_parallel", "pipeline"), plan.strategy
    find = candidate_of_pipeline if plan.strategy == "pipeline" else candidate_of_replicas
    found, used = find(space, config, plan), math.prod(plan.axes.values())
    if used < space.num_devices:
        found = found._replace(name=f"{found.name} on {used} of {space.num_devices} devices")
    return found
