"""Repeats the published results of SWARM with the reports of `jaxpar swarm simulate`."""

from collections.abc import Mapping
from typing import Any

from jaxpar.choose.costs.rates import product_seconds
from jaxpar.cluster import named_cluster
from jaxpar.commands.swarm_simulate import read_flags
from jaxpar.strategies.swarm import reports

SHARED = ("forward", "backward", "activation_bytes")  # flags for one microbatch


def values(table: Mapping[str, Any]) -> list[float]:
    """Return ours for the rows of a table.

    They are the utilization of a layer, its milliseconds on a T4, throughput / optimal with rebalancing, or by latency,
    the time with latency / that without, or the `t4` of a run.
    """
    if table["kind"] == "utilization":
        return [_utilization(row) for row in table["rows"]]
    if table["kind"] == "latency":
        return _by_latency(table)
    if table["kind"] == "slowdown":
        return [_slowdown(table, row) for row in table["rows"]]
    if table["kind"] == "layer":
        return [_milliseconds(row) for row in table["rows"]]
    if table["kind"] == "t4":
        return [_of_t4(table["model"], row) for row in table["rows"]]
    _, metrics = reports.rebalancing(read_flags(["--peers=400", "--stages=4"]))
    found = {(case["rule"], case["period"]): case["efficiency"] for case in metrics["cases"]}
    return [found[row["rule"], row["period"]] for row in table["rows"]]


def _utilization(row: Mapping[str, Any]) -> float:
    seconds, bandwidth = row["milliseconds"] / 1e3, 500 * reports.MEGABIT
    return reports.device_utilization(
        row["width"], 512, 2.0, flops=reports.V100_FLOPS, bandwidth=bandwidth, latency=seconds
    )


def _milliseconds(row: Mapping[str, Any]) -> float:
    """Return the milliseconds in which a T4 computes both passes of a layer in float16, or sends its two messages."""
    width, tokens = row["width"], 512
    if row["value"] == "sending":
        return 1e3 * 2 * 2.0 * tokens * width / (500 * reports.MEGABIT)
    return 1e3 * product_seconds(
        named_cluster("t4", 1), "product", "float16", reports.transformer_layer_flops(width, tokens)
    )


def _by_latency(table: Mapping[str, Any]) -> list[float]:
    """Return throughput / that of devices that never wait: simulated, or of an exchange that nothing hides."""
    flags = [f"--{name}={value}" for name, value in table["flags"].items()]
    _, metrics = reports.latency(read_flags(["--report=latency", *flags]))
    cases = {round(1e3 * case["latency"]): case for case in metrics["cases"]}
    return [
        _offload(table["offload"], row["milliseconds"])
        if row["system"] == "offload"
        else cases[row["milliseconds"]][row["system"]]
        for row in table["rows"]
    ]


def _slowdown(table: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Return the time of a step with latency / that without, with a `share` of the times and bytes of the table."""
    flags = {name: value * row["share"] if name in SHARED else value for name, value in table["flags"].items()}
    rows = [{**row, "milliseconds": milliseconds} for milliseconds in (0, row["milliseconds"])]
    without, with_latency = _by_latency({"flags": flags, "rows": rows})
    return without / with_latency


def _offload(model: Mapping[str, Any], milliseconds: float) -> float:
    """Return the share of time in which replicas of ZeRO-Offload compute.

    In a step, gradients are reduced to shards, and weights gathered, in rings over all devices with messages of 16
    bits.
    """
    devices = model["devices"]
    sent = 2 * (devices - 1) * (2.0 * model["parameters"] / devices / (model["megabits"] * reports.MEGABIT))
    waiting = sent + 2 * (devices - 1) * milliseconds / 1e3
    return float(model["seconds"] / (model["seconds"] + waiting))


def t4_seconds(model: Mapping[str, Any]) -> tuple[float, float]:
    """Return the seconds of both passes of a stage on a T4, with recomputation, at the rates that the planner assumes.

    A block has 16 D^2 parameters: four products of attention, and a gated feed-forward network of 4 D.
    """
    tokens, width = model["tokens"], model["width"]
    flops = model["blocks"] * (32 * tokens * width**2 + 4 * tokens**2 * width)
    forward = product_seconds(named_cluster("t4", 1), "product", "float16", float(flops))
    return forward, 3 * forward


def _of_t4(model: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Return the Mb/s that a peer of the run sends if it never waits, or the share of time in which peers compute."""
    forward, backward = t4_seconds(model)
    message = model["tokens"] * model["width"] * row["value_bytes"]
    if row["value"] == "megabits":  # a result to the next stage, and a gradient to the one before
        return 2 * message / (forward + backward) / reports.MEGABIT
    flags = {"peers": 12, "stages": 3, "num_microbatches": 48, "bandwidth": row["megabits"]}
    flags |= {"forward": forward, "backward": backward, "activation_bytes": message}
    _, metrics = reports.latency(read_flags(["--report=latency", *(f"--{name}={x}" for name, x in flags.items())]))
    return float(metrics["cases"][-1]["delayed"])
