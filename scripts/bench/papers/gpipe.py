"""Computes GPipe's tables of throughput, bubbles and memory, and counts the parameters of its models.

Bubbles are those of the schedule's table. Times need `seconds`: in a table, a device cannot recompute before a gradient
arrives.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.strategies.pipeline.tables.schedule import make_table
from jaxpar.strategies.pipeline.tables.simulate import Times, simulate_table
from scripts.bench.papers.amoebanet import amoebanet

# Tesla P40: FLOP/s in float32 and bytes/s (hardware of torchgpipe's benchmark). Only the ratio matters here.
P40_FLOPS, P40_BYTES = 11.76e12, 347.1e9
BACKWARD = 2.0  # times the forward pass, which is repeated
BATCH = 128  # images, of table 1


def values(table: Mapping[str, Any]) -> list[float]:
    """Return ours for the rows of a table: `throughput` / that of a row, `bubble`, `parameters` or `activations`."""
    rows, kind = table["rows"], table["kind"]
    if kind == "activations":
        return [activation_bytes(row) / row["unit_bytes"] for row in rows]
    if kind == "parameters":
        return [_parameters(row) for row in rows]
    if kind == "bubble":
        return [_bubble(row["K"], row["M"]) for row in rows]
    repeats_last = table.get("repeats_last", True)
    rates = {row["name"]: 1 / seconds(_stages(row), row["M"], repeats_last=repeats_last) for row in rows}
    return [rates[row["name"]] / rates[row["to"]] for row in rows]


def seconds(stages: Sequence[float], num_microbatches: int, *, repeats_last: bool) -> float:
    """Return the time of a batch. stages: forward time of the whole batch.

    A device recomputes a microbatch when it is free, and does not wait for the gradient (kakaobrain/torchgpipe,
    torchgpipe/checkpoint.py). repeats_last: whether the last microbatch is recomputed, too; torchgpipe does so only if
    there is no other.
    """
    forward = [stage / num_microbatches for stage in stages]
    arrivals, free = [0.0] * num_microbatches, list[float]()
    for own in forward:
        now = 0.0
        for number, arrival in enumerate(arrivals):
            now = arrivals[number] = max(now, arrival) + own
        free.append(now)
    gradients = arrivals[-1:] * num_microbatches
    for own, now in zip(reversed(forward), reversed(free), strict=True):
        for number in range(num_microbatches):  # the last one first
            now += own * (number > 0 or repeats_last or num_microbatches == 1)
            now = gradients[number] = max(now, gradients[number]) + BACKWARD * own
    return max(gradients)


def _bubble(num_stages: int, num_microbatches: int) -> float:
    """Return the share of idle time of the schedule's table, with remat in the backward pass."""
    table = make_table("gpipe", num_devices=num_stages, num_microbatches=num_microbatches, num_chunks=1)
    return float(simulate_table(table, Times(1.0, BACKWARD, BACKWARD - 1.0)).bubble_rate)


def _stages(row: Mapping[str, Any]) -> list[float]:
    """Return the forward times of the stages: equal, or of the layers of AmoebaNet-D by the row's balance."""
    if "balance" not in row:
        return [1.0 / row["K"]] * row["K"]
    times = [one.flops / P40_FLOPS + one.nbytes / P40_BYTES for one in amoebanet(18, row["filters"])]
    ends = [sum(row["balance"][: stage + 1]) for stage in range(row["K"])]
    assert ends[-1] == len(times)
    return [sum(times[end - size : end]) for end, size in zip(ends, row["balance"], strict=True)]


def activation_bytes(row: Mapping[str, Any]) -> float:
    """Return the bytes of activations of all stages of AmoebaNet-D (L, D), for a batch of 128 images.

    A stage keeps what it reads for each microbatch, and all that the layers save for the one that it recomputes.
    """
    layers, ends = amoebanet(row["L"], row["D"]), list(itertools.accumulate(row["balance"]))
    assert ends[-1] == len(layers), (ends[-1], len(layers))
    read = sum(layers[end - size].inputs for end, size in zip(ends, row["balance"], strict=True))
    return BATCH * read + BATCH / row["M"] * sum(layer.saved for layer in layers)


def _parameters(row: Mapping[str, Any]) -> float:
    """Return the millions of parameters of AmoebaNet-D (L, D), or of a Transformer with L layers and two embeddings."""
    if "D" in row:
        return sum(one.parameters for one in amoebanet(row["L"], row["D"])) / 1e6
    features, inner, words = 2048, 8192, 32_000
    layer = 4 * (features + 1) * features + (features + 1) * inner + (inner + 1) * features + 4 * features
    return (row["L"] * layer + 2 * words * features) / 1e6
