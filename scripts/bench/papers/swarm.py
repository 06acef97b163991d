"""Repeats the published results of SWARM with the reports of `jaxpar swarm simulate`."""

from collections.abc import Mapping
from typing import Any

from jaxpar.commands.swarm_simulate import read_flags
from jaxpar.strategies.swarm import reports


def values(table: Mapping[str, Any]) -> list[float]:
    """Return ours for the rows of a table: the utilization of a layer, or throughput / optimal with rebalancing."""
    if table["kind"] == "utilization":
        return [_utilization(row) for row in table["rows"]]
    _, metrics = reports.rebalancing(read_flags(["--peers=400", "--stages=4"]))
    found = {(case["rule"], case["period"]): case["efficiency"] for case in metrics["cases"]}
    return [found[row["rule"], row["period"]] for row in table["rows"]]


def _utilization(row: Mapping[str, Any]) -> float:
    seconds, bandwidth = row["milliseconds"] / 1e3, 500 * reports.MEGABIT
    return reports.device_utilization(
        row["width"], 512, 2.0, flops=reports.V100_FLOPS, bandwidth=bandwidth, latency=seconds
    )
