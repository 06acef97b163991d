"""Finds the largest number of layers whose step fits into the memory of each device, by the planner's memory."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxpar.choose.costs.layers import LayerWork, TracedLayers
from jaxpar.choose.costs.memory import StateBytes, activation_bytes, stash_peaks
from jaxpar.strategies.pipeline.tables.schedule import make_table
from scripts.bench.papers.planned import predict, problem_of_row

MOMENTUM = 1.0  # bytes of the optimizer state / bytes of the parameters


def values(table: Mapping[str, Any]) -> list[float]:
    """Return the most layers for each row, within `nbytes` of the table on each device."""
    return [_most_layers(row, table["models"][row["model"]], table["nbytes"]) for row in table["rows"]]


def _most_layers(row: Mapping[str, Any], model: Mapping[str, Any], nbytes: float) -> int:
    num_stages = row.get("config", {}).get("mesh.stage", 1)
    if num_stages == 1:
        return largest(lambda number: predict(row, {**model, "layers": number}).candidate.costs.nbytes <= nbytes)
    _, cluster, problem = problem_of_row(row, {**model, "layers": 2 * num_stages})
    traced = TracedLayers(problem._replace(accumulation_steps=1), cluster).work(
        row["size"], row["remat"], is_split=False
    )
    table = make_table("gpipe", num_devices=num_stages, num_microbatches=row["microbatches"], num_chunks=1)
    peaks = [float(peak[0]) for peak in stash_peaks(table)]  # the same on all devices

    def fits(number: int) -> bool:
        kinds = [(True, False), (False, False), (False, True)]
        return all(stage_bytes(traced, number, peaks, *kind) <= nbytes for kind in kinds)

    return num_stages * largest(fits)


def stage_bytes(traced: LayerWork, num_blocks: int, peaks: list[float], has_embedding: bool, has_head: bool) -> float:
    """Return the bytes of a stage with a number of equal blocks, and perhaps the first or last layer of the model.

    traced: a model with at least one block; peaks: see `stash_peaks`.
    """

    def repeated(values: Any) -> list[Any]:
        return [values[0]] * has_embedding + [values[1]] * num_blocks + [values[-1]] * has_head

    work = LayerWork(repeated(traced.layers), repeated(traced.memory), repeated(traced.seconds), traced.remat)
    end = len(work.layers)
    weights = float(sum(layer.weight_bytes for layer in work.layers))
    state = StateBytes(weights, MOMENTUM * weights, weights)
    return sum(state) + (activation_bytes(work, [(0, end)], peaks, 0.0, in_lockstep=False) if end else 0.0)


def largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, if all smaller ones do; 0 if none does."""
    low, high = 0, 8
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
