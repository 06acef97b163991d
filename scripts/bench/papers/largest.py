"""Finds the most layers that fit into the memory of each device, and the bytes of activations, with the planner."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from jaxpar.choose.costs.layers import LayerWork
from jaxpar.choose.costs.memory import StateBytes, activation_bytes, stashes_of
from jaxpar.choose.costs.traced_layers import TracedLayers
from jaxpar.strategies.pipeline.tables.schedule import make_table
from jaxpar.strategies.pipeline.tables.validate import peak_stashed
from scripts.bench.papers.planned import predict, problem_of_row

MOMENTUM = 1.0  # bytes of the optimizer state / bytes of the parameters


def values(table: Mapping[str, Any]) -> list[float]:
    """Return for each row the most layers within `nbytes` of the table on each device.

    If the table is of `activations`: their GB on all devices, with the `layers` of the row.
    """
    models, kind = table["models"], table["kind"]
    if kind == "activations":
        return [_activations(row, models[row["model"]]) / 1e9 for row in table["rows"]]
    return [_most_layers(row, models[row["model"]], table["nbytes"]) for row in table["rows"]]


def _most_layers(row: Mapping[str, Any], model: Mapping[str, Any], nbytes: float) -> int:
    num_stages = _num_stages(row)
    if num_stages == 1:
        return largest(lambda number: predict(row, {**model, "layers": number}).candidate.costs.nbytes <= nbytes)
    traced, num_stashed = _traced(row, model)

    def fits(number: int) -> bool:
        kinds = [(True, False), (False, False), (False, True)]
        return all(sum(stage_bytes(traced, number, num_stashed, *kind)) <= nbytes for kind in kinds)

    return num_stages * largest(fits)


def _activations(row: Mapping[str, Any], model: Mapping[str, Any]) -> float:
    """Return the bytes on all devices besides the state, with stages of as many blocks as possible."""
    number, num_stages = row["layers"], _num_stages(row)
    if num_stages == 1:
        costs = predict(row, {**model, "layers": number}).candidate.costs
        return costs.nbytes - sum(costs.state)
    traced, num_stashed = _traced(row, model)
    ends = [number * stage // num_stages for stage in range(num_stages + 1)]
    last = num_stages - 1
    stages = [
        stage_bytes(traced, end - start, num_stashed, stage == 0, stage == last)
        for stage, (start, end) in enumerate(itertools.pairwise(ends))
    ]
    return sum(activations for _, activations in stages)


def _num_stages(row: Mapping[str, Any]) -> int:
    return int(row.get("config", {}).get("mesh.stage", 1))


def _traced(row: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[LayerWork, float]:
    """Return the work of the layers of a pipeline's model, and the microbatches that every device stashes."""
    num_stages = _num_stages(row)
    _, cluster, problem = problem_of_row(row, {**model, "layers": 2 * num_stages})
    traced = TracedLayers(problem._replace(accumulation_steps=1), cluster).work(
        row["size"], row["remat"], is_split=False
    )
    table = make_table("gpipe", num_devices=num_stages, num_microbatches=row["microbatches"], num_chunks=1)
    return traced, float(peak_stashed(table)[0])


def stage_bytes(
    traced: LayerWork, num_blocks: int, num_stashed: float, has_embedding: bool, has_head: bool
) -> tuple[float, float]:
    """Return the bytes of the state and of the rest of a stage.

    It has a number of equal blocks, and perhaps the first or last layer of the model. traced: a model with at least one
    block; num_stashed: microbatches that it stashes.
    """

    def repeated(values: Any) -> list[Any]:
        return [values[0]] * has_embedding + [values[1]] * num_blocks + [values[-1]] * has_head

    work = LayerWork(repeated(traced.layers), repeated(traced.memory), repeated(traced.seconds), traced.remat)
    end = len(work.layers)
    weights = float(sum(layer.weight_bytes for layer in work.layers))
    state = StateBytes(weights, MOMENTUM * weights, weights)
    if not end:
        return sum(state), 0.0
    stashed = num_stashed * sum(saved.total() for saved in stashes_of(work, 0, end))
    return sum(state), activation_bytes(work, [(0, end)], stashed, in_lockstep=False)


def largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, if all smaller ones do; 0 if none does."""
    low, high = 0, 8
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
