"""Finds how many GPUs of which kind train a number of tokens in time, and the cheapest of them.

The numbers of GPUs of a cluster are powers of two on a host, and then of hosts. The planner searches the fastest plan
of each, from the least number whose matrix products alone could be fast enough, until a plan is.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxpar.choose import planner, report
from jaxpar.choose.auto import check_kept
from jaxpar.choose.candidates import Candidate, Space
from jaxpar.choose.costs.machine import GpuMachine
from jaxpar.choose.costs.rates import product_seconds
from jaxpar.cluster import Cluster
from jaxpar.cluster.files import find_named
from jaxpar.cluster.gpus import gpu_kinds
from jaxpar.errors import UserError, format_count, is_refused

HOST_GPUS, MOST_HOSTS = 8, 512  # of a kind of GPU whose number is not given
SECONDS_PER_HOUR = 3600
REMAT_KEYS = ("model.remat", "pipeline.remat")
RECOMPUTED = 4 / 3  # the FLOPs of a step that computes all activations again / of one that stores them


class Training(NamedTuple):
    """A run on some GPUs of a cluster with their fastest plan."""

    name: str  # the cluster, as it is named in --cluster
    cluster: Cluster  # these GPUs
    plan: Candidate
    tokens_per_second: float
    hours: float

    @property
    def gpu_hours(self) -> float:
        """The hours of all GPUs together."""
        return self.hours * self.cluster.num_devices

    @property
    def price(self) -> float | None:
        """The price of these hours; None if unknown."""
        return None if self.cluster.price_per_hour is None else self.gpu_hours * self.cluster.price_per_hour

    def __str__(self) -> str:
        return f"{format_count(self.cluster.num_devices, 'GPU')} of {self.name}"


def find_clusters(text: str) -> dict[str, Cluster]:
    """Return all GPUs of each cluster that --cluster lists, by its name; of each known kind if it lists none.

    Raises UserError if one is unknown or invalid.
    """
    names = [name.strip() for name in text.split(",")] if text else list(gpu_kinds())
    found = {name: find_named(name, "--cluster")[1] for name in names}
    for name, cluster in found.items():
        if name.lower() in gpu_kinds():  # without a number
            found[name] = replace(cluster, num_devices=MOST_HOSTS * HOST_GPUS, num_processes=MOST_HOSTS)
    return found


def numbers_of(cluster: Cluster) -> list[int]:
    """Return the numbers of GPUs of a cluster that are compared; the last one is that of all of them."""
    hosts, each = cluster.num_processes, cluster.num_devices // cluster.num_processes
    on_host = [2**power for power in range(each.bit_length()) if 2**power < each]
    return [*on_host, *(each * 2**power for power in range(hosts.bit_length()) if 2**power < hosts), hosts * each]


def best_training(name: str, space: Space, tokens: float, hours: float, *, cheapest: bool = False) -> Training | None:
    """Return the run of this number of tokens on the fewest GPUs that take at most `hours`; else the nearest run.

    Raises UserError if the inputs of the task are not tokens. Returns None if no plan fits. space: of all GPUs;
    cheapest: the least GPU-hours. The search ends at a number that exceeds the best, if the best computes activations
    again by more than that costs, which the memory of more GPUs could save. hours can be infinite.
    """
    work, cluster = report.work_of(space), space.machine.cluster
    per_host = cluster.num_devices // cluster.num_processes
    if not work.tokens:
        raise UserError(
            f"config.task is {space.config.task!r}, whose inputs are not tokens; it must be a task of texts with "
            "--train_tokens"
        )
    # Every step has at least the products of its forward pass, and those of the gradients of the weights.
    products = product_seconds(cluster, "product", space.config.model.dtype, 2 / 3 * work.flops)
    least_gpu_hours, best = tokens / work.tokens * products / SECONDS_PER_HOUR, None
    for number in numbers_of(cluster):
        is_too_slow = least_gpu_hours > hours * number and number < cluster.num_devices
        if is_too_slow or is_refused(check_kept, space.kept, number):
            continue
        part = replace(cluster, num_devices=number, num_processes=max(1, number // per_host))
        found = planner.candidates(space._replace(machine=GpuMachine(part)))
        if not found or not found[0].fits:
            continue
        rate = work.tokens / found[0].costs.seconds
        one = Training(name, part, found[0], rate, tokens / rate / SECONDS_PER_HOUR)
        print(f"planner   {one}: {one.hours:.3g} hours", file=sys.stderr, flush=True)
        is_in_time = best is not None and best.hours <= hours
        if best is None or (one.gpu_hours < best.gpu_hours if is_in_time else one.hours < best.hours):
            best = one
        could_save = RECOMPUTED if any(best.plan.settings.get(key, "none") != "none" for key in REMAT_KEYS) else 1.0
        if best.hours <= hours and (not cheapest or (one is not best and one.gpu_hours >= could_save * best.gpu_hours)):
            break
    return best


def check_prices(clusters: Mapping[str, Cluster], budget: float) -> None:
    """Raise UserError if the price of a cluster is unknown."""
    for name, cluster in clusters.items():
        if cluster.price_per_hour is None:
            raise UserError(
                f"--budget is {budget:g}, but {name} has no price; --cluster must list cluster files with "
                "price_per_hour, the price of a GPU for an hour"
            )


def check_found(found: Sequence[Training], hours: float, budget: float | None) -> None:
    """Raise UserError unless a run takes at most `hours` and costs at most `budget`. None: any price is right."""
    if not found:
        raise UserError("no plan fits on --cluster; it must have more GPUs, or GPUs with more memory")
    in_time = [one for one in found if one.hours <= hours]
    if not in_time:
        nearest = min(found, key=lambda one: one.hours)
        raise UserError(f"--hours is {hours:g}; it must be at least {_rounded_up(nearest.hours)}, on {nearest}")
    if budget is not None and _price(least := min(in_time, key=_price)) > budget:
        limit = f" for at most {hours:g} hours" if hours < math.inf else ""
        raise UserError(f"--budget is {budget:g}; it must be at least {_rounded_up(_price(least))}{limit}, on {least}")


def ordered(found: Sequence[Training], hours: float, *, by_price: bool) -> list[Training]:
    """Return the runs that take at most `hours` first, by price or in the same order, and then the others."""
    return sorted(found, key=lambda one: (one.hours > hours, _price(one) if by_price else 0.0))


def _price(one: Training) -> float:
    assert one.price is not None  # see `check_prices`
    return one.price


def training_rows(found: Sequence[Training], hours: float, budget: float | None) -> list[str]:
    """Return the lines of a table. hours, budget: what a run may take and cost."""
    width = max(len(name) for name in ("cluster", *(one.name for one in found)))
    lines = [f"{'cluster':{width}} {'GPUs':>6} {'tokens/s':>12} {'hours':>8} {'GPU-hours':>10} {'price':>10}  strategy"]
    for one in found:
        price = "" if one.price is None else report.format_rate(one.price)
        lines.append(
            f"{one.name:{width}} {one.cluster.num_devices:6,} {report.format_rate(one.tokens_per_second):>12} "
            f"{one.hours:8.3g} {report.format_rate(one.gpu_hours):>10} {price:>10}  {one.plan.name}"
            f"{report.details(one.plan.settings)}"
            f"{', too slow' if one.hours > hours else ''}"
            f"{', too expensive' if budget is not None and _price(one) > budget else ''}"
        )
    return lines


def training_json(one: Training) -> dict[str, object]:
    """Return a run as JSON values."""
    return {
        "cluster": one.name,
        "gpus": one.cluster.num_devices,
        "hosts": one.cluster.num_processes,
        "tokens_per_second": one.tokens_per_second,
        "hours": one.hours,
        "gpu_hours": one.gpu_hours,
        "price": one.price,
        "name": one.plan.name,
        "settings": report.changes(one.plan.settings),
    }


def _rounded_up(value: float) -> str:
    """Format a number with three digits that is not less."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step) * step:.6g}"
