"""Finds the largest number of layers whose step fits into the memory of each device, by the planner's memory."""

from collections.abc import Mapping
from typing import Any

from scripts.bench.papers.planned import predict


def values(table: Mapping[str, Any]) -> list[float]:
    """Return the most layers for each row: a multiple of its stages, within `nbytes` of the table on each device."""
    return [_most_layers(row, table["models"][row["model"]], table["nbytes"]) for row in table["rows"]]


def _most_layers(row: Mapping[str, Any], model: Mapping[str, Any], nbytes: float) -> int:
    num_stages = row.get("config", {}).get("mesh.stage", 1)

    def fits(of_stage: int) -> bool:
        return predict(row, {**model, "layers": of_stage * num_stages}).candidate.costs.nbytes <= nbytes

    low, high = 0, 8
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * num_stages
