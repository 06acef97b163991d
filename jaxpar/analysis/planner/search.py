"""Searches the strategies, meshes, microbatches, schedules and kinds of rematerialization for the fastest step.

Hundreds of candidates are compared by their predicted costs alone. Only strategies that equal training on one device
are compared, with config.batch_size examples in a step.
"""

import math
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from jaxpar.analysis.planner.candidates import Candidate, Settings, Space, ranked
from jaxpar.analysis.planner.pipeline_candidates import candidate_of_pipeline, of_pipelines
from jaxpar.analysis.planner.replica_candidates import candidate_of_replicas, of_replicas
from jaxpar.plan import Plan


def candidates(space: Space) -> list[Candidate]:
    """Return all candidates, the fastest that fit first, then the others by the memory that they need."""
    return ranked(one for one in _all(space) if space.keeps(one.settings))


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
