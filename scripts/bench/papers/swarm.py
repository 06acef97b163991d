"""Repeats the published results of SWARM with the reports of `jaxpar swarm simulate`."""

from collections.abc import Mapping
from typing import Any

from jaxpar.commands.swarm_simulate import read_flags
from jaxpar.strategies.swarm import reports

SHARED = ("forward", "backward", "activation_bytes")  # flags for one microbatch


def values(table: Mapping[str, Any]) -> list[float]:
    """Return ours for the rows of a table.

    They are the utilization of a layer, throughput / optimal with rebalancing, or the time with latency / that without.
    """
    if table["kind"] == "utilization":
        return [_utilization(row) for row in table["rows"]]
    if table["kind"] == "slowdown":
        return [_slowdown(table, row) for row in table["rows"]]
    _, metrics = reports.rebalancing(read_flags(["--peers=400", "--stages=4"]))
    found = {(case["rule"], case["period"]): case["efficiency"] for case in metrics["cases"]}
    return [found[row["rule"], row["period"]] for row in table["rows"]]


def _utilization(row: Mapping[str, Any]) -> float:
    seconds, bandwidth = row["milliseconds"] / 1e3, 500 * reports.MEGABIT
    return reports.device_utilization(
        row["width"], 512, 2.0, flops=reports.V100_FLOPS, bandwidth=bandwidth, latency=seconds
    )


def _slowdown(table: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Return the time of a step with latency / that without, with a `share` of the times and bytes of the table."""
    flags = {name: value * row["share"] if name in SHARED else value for name, value in table["flags"].items()}
    _, metrics = reports.latency(read_flags(["--report=latency", *(f"--{name}={x}" for name, x in flags.items())]))
    rates = {round(1e3 * case["latency"]): case[row["system"]] for case in metrics["cases"]}
    return float(rates[0] / rates[row["milliseconds"]])
