"""Simulates GPipe's tables of throughput with the schedule's table, and counts the parameters of its models."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.strategies.pipeline.tables.schedule import make_table
from jaxpar.strategies.pipeline.tables.simulate import Simulation, Times, simulate_table
from scripts.bench.papers.amoebanet import amoebanet

# Tesla P40: FLOP/s in float32 and bytes/s (hardware of torchgpipe's benchmark). Only the ratio matters here.
P40_FLOPS, P40_BYTES = 11.76e12, 347.1e9
BACKWARD = 2.0  # times the forward pass, which is repeated


def values(table: Mapping[str, Any]) -> list[float]:
    """Return ours for the rows of a table: `throughput` / that of the first row, `bubble`, or `parameters`."""
    rows, kind = table["rows"], table["kind"]
    if kind == "parameters":
        return [_parameters(row) for row in rows]
    if kind == "bubble":
        return [float(_simulate([1.0] * row["K"], row["M"]).bubble_rate) for row in rows]
    rates = {row["name"]: 1 / float(_simulate(_stages(row), row["M"]).makespan) for row in rows}
    return [rates[row["name"]] / rates[row["to"]] for row in rows]


def _simulate(stages: Sequence[float], num_microbatches: int) -> Simulation:
    """Simulate a batch of one unit with remat, of which the last microbatch has no need where there are several.

    stages: forward time of the whole batch.
    """
    repeated = 1.0 if num_microbatches == 1 else (num_microbatches - 1) / num_microbatches
    forward = [stage / num_microbatches for stage in stages]
    input_gradient = [(1.0 + repeated) * one for one in forward]
    table = make_table("gpipe", num_devices=len(stages), num_microbatches=num_microbatches, num_chunks=1)
    return simulate_table(table, Times(forward, input_gradient, [(BACKWARD - 1.0) * one for one in forward]))


def _stages(row: Mapping[str, Any]) -> list[float]:
    """Return the forward times of the stages: equal, or of the layers of AmoebaNet-D by the row's balance."""
    if "balance" not in row:
        return [1.0 / row["K"]] * row["K"]
    times = [one.flops / P40_FLOPS + one.nbytes / P40_BYTES for one in amoebanet(18, row["filters"])]
    ends = [sum(row["balance"][: stage + 1]) for stage in range(row["K"])]
    assert ends[-1] == len(times)
    return [sum(times[end - size : end]) for end, size in zip(ends, row["balance"], strict=True)]


def _parameters(row: Mapping[str, Any]) -> float:
    """Return the millions of parameters of AmoebaNet-D (L, D), or of a Transformer with L layers and two embeddings."""
    if "D" in row:
        return sum(one.parameters for one in amoebanet(row["L"], row["D"])) / 1e6
    features, inner, words = 2048, 8192, 32_000
    layer = 4 * (features + 1) * features + (features + 1) * inner + (inner + 1) * features + 4 * features
    return (row["L"] * layer + 2 * words * features) / 1e6
