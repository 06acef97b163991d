"""Searches the strategies, meshes, microbatches, schedules and kinds of rematerialization for the fastest step.

Hundreds of candidates are compared by their predicted costs alone. Only strategies that equal training on one device
are compared, with config.batch_size examples in a step.
"""

import itertools
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from jaxpar import strategies
from jaxpar.choose import report
from jaxpar.choose.candidates import Candidate, Settings, Space, ranked, with_settings
from jaxpar.choose.pipelines import candidate_of_pipeline, of_pipelines
from jaxpar.choose.replicas import candidate_of_replicas, of_replicas
from jaxpar.cluster import Cluster
from jaxpar.core.plan import Plan
from jaxpar.errors import UserError, format_bytes, format_count

AUTO_STRATEGY = "auto"
FIRST_REPORT = 3.0  # seconds after which a search reports its progress


def candidates(space: Space) -> list[Candidate]:
    """Return all candidates, the fastest that fit first, then the others by the memory that they need."""
    found, began, next_line = list[Candidate](), time.monotonic(), FIRST_REPORT
    for number, one in enumerate(_all(space), 1):
        if space.keeps(one.settings):
            found.append(one)
        if (seconds := time.monotonic() - began) >= next_line:
            so_far = f"{format_count(number, 'candidate')} so far, in {seconds:.0f} s"
            print(f"planner   {so_far}", file=sys.stderr, flush=True)
            next_line = 2 * seconds
    return ranked(found)


def _all(space: Space) -> Iterator[Candidate]:
    pipelines = () if space.config.elastic_seconds else of_pipelines(space)  # no run continues without a stage
    return itertools.chain(of_replicas(space), pipelines)


def candidate_of_plan(space: Space, config: ConfigDict, plan: Plan[Any]) -> Candidate:
    """Return the candidate of a plan of single, data_parallel or pipeline. For others, see asynchronous.py."""
    assert plan.strategy in ("single", "data_parallel", "pipeline"), plan.strategy
    find = candidate_of_pipeline if plan.strategy == "pipeline" else candidate_of_replicas
    found, used = find(space, config, plan), math.prod(plan.axes.values())
    if used < space.num_devices:
        found = found._replace(name=f"{found.name} on {used} of {space.num_devices} devices")
    return found


def find_candidates(space: Space) -> list[Candidate]:
    """Return what `candidates` returns. Raises UserError if there are none."""
    found = candidates(space)
    if not found:
        raise no_candidate(space)
    return found


def fastest(space: Space, cluster: Cluster) -> Candidate:
    """Return the fastest candidate that fits and has a plan for the cluster. Raises UserError if there is none."""
    found, reasons = find_candidates(space), []
    for one in found:
        if one.fits:
            plan = strategies.possible(with_settings(space.config, one.settings), space.problem, cluster)
            if not isinstance(plan, str):
                return one
            reasons.append(plan)
    if reasons:
        raise UserError(reasons[0])
    least = found[0]
    name, missing = least.name + report.details(least.settings), least.costs.nbytes - space.usable_bytes
    raise UserError(
        f"config.strategy is {AUTO_STRATEGY!r}, but nothing fits: {name} needs "
        f"{format_bytes(least.costs.nbytes)} of a device, {format_bytes(missing)} more than there is; it must fit in "
        f"{format_bytes(space.usable_bytes)}; try more devices, a lower config.batch_size or a smaller config.model. "
        f"{report.describe_memory(space)}"
    )


def no_candidate(space: Space) -> UserError:
    """Return the error for a space without candidates."""
    devices, size = format_count(space.num_devices, "device"), space.config.batch_size
    conflict = _conflict(space)
    if conflict:
        kept = " and ".join(f"config.{key} is {value!r}" for key, value in conflict.items())
        subject = "together they" if len(conflict) > 1 else "it"
        return UserError(
            f"{kept}; {subject} must allow a strategy on {devices} that trains like one device and divides "
            f"config.batch_size={size} into replicas x microbatches"
        )
    if space.num_devices == 1:
        single = with_settings(space.config, {"strategy": "single", "mesh.data": 1})
        reason = strategies.possible(single, space.problem, space.machine.cluster)
        if isinstance(reason, str):  # its state alone needs more memory than the device has
            return UserError(reason)
    return UserError(f"config.batch_size is {size}; on {devices} it must be a multiple of replicas x microbatches")


def _conflict(space: Space) -> Settings:
    """Return those of the kept settings because of which a space has no candidates; empty if it has none anyway."""
    kept = space.kept
    for key in reversed(list(space.kept)):  # rather those that are listed first
        others = {name: value for name, value in kept.items() if name != key}
        without = space._replace(kept=others)
        if not any(without.keeps(one.settings) for one in _all(without)):
            kept = others
    return kept
