"""Partitions PipeDream's published profiles for its clusters, and computes the memory of stages that stash weights."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpar.choose.costs.profile import LayerProfile, read_profile
from jaxpar.choose.pipedream import Level, PlannedStage, StageSearch

PROFILES = Path(__file__).parents[2] / "examples" / "profiles"
CLUSTERS = {
    "A": [Level(4, 15.75e9), Level(4, 1.25e9)],
    "A, three nodes": [Level(4, 15.75e9), Level(3, 1.25e9)],
    "A, one node": [Level(4, 15.75e9)],
    "A, one level": [Level(16, 1.25e9)],
    "B": [Level(8, 25e9), Level(2, 3.125e9)],
    "B, one level": [Level(16, 3.125e9)],
}


def values(table: Mapping[str, Any]) -> list[tuple[float, str] | None]:
    """Return for each row the speed-up over data parallelism of the plan that is found, and the plan's replicas.

    None: no profile of the model is published.

    If the table is of `memory`: the bytes of the fullest of four stages / those of data parallelism, and all stages.
    """
    if table["kind"] == "memory":
        return [_memory(row) for row in table["rows"]]
    model = table["communication_model"]
    return [_speedup(row, model) if "profile" in row else None for row in table["rows"]]


def _memory(row: Mapping[str, Any]) -> tuple[float, str]:
    layers = read_profile(PROFILES / f"{row['profile']}.json")
    together = sum(one.weight_bytes + one.stash_bytes for one in layers)
    parts = [of_stage / together for of_stage in stage_bytes(layers, num_stages=4)]
    return max(parts), " ".join(f"{part:.2f}" for part in parts)


def _speedup(row: Mapping[str, Any], communication_model: str) -> tuple[float, str]:
    layers = read_profile(PROFILES / f"{row['profile']}.json")
    plan = StageSearch(layers, CLUSTERS[row["cluster"]], model=communication_model).find()
    assert plan is not None
    return plan.data_parallel_seconds / plan.seconds_per_microbatch, replicas_in_short(plan.stages)


def replicas_in_short(stages: Sequence[PlannedStage]) -> str:
    """Return the replicas of the stages, as in 13×1-2-1."""
    parts = []
    for replicas, group in itertools.groupby(stage.replicas for stage in stages):
        count = len(list(group))
        parts += [f"{count}×1"] if replicas == 1 and count > 2 else [str(replicas)] * count
    return "-".join(parts)


def stage_bytes(layers: Sequence[LayerProfile], num_stages: int) -> list[float]:
    """Return the bytes of each stage of a pipeline that is balanced by time, with what PipeDream keeps.

    A stage at distance d from the last one has d + 1 microbatches in flight, each with its weights and its stash.
    """
    ends = _balanced([one.forward_s + one.backward_s for one in layers], num_stages)
    starts = [0, *ends[:-1]]
    return [
        (num_stages - stage) * sum(one.weight_bytes + one.stash_bytes for one in layers[start:end])
        for stage, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def _balanced(times: Sequence[float], num_stages: int) -> list[int]:
    """Return the ends of the stages whose slowest one is fastest."""
    cuts = itertools.combinations(range(1, len(times)), num_stages - 1)

    def slowest(inner: tuple[int, ...]) -> float:
        ends = [*inner, len(times)]
        return max(sum(times[start:end]) for start, end in zip([0, *inner], ends, strict=True))

    return [*min(cuts, key=slowest), len(times)]
