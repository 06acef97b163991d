r"""Divides a profiled model into pipeline stages and replicas, by PipeDream's partitioner. Needs no JAX and no devices.

    jaxpar partition --profile=profile.json --num_workers=16 --bandwidth=1.25e9
    jaxpar partition --profile=profile.json --num_workers=16 --levels=8:3e11,2:1.25e9 --json

The profile is a JSON file with the times and sizes of the layers (docs/howto/partition.md). The plan minimizes the time
of the slowest stage, transfer, or exchange of gradients.
"""

import math
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from jaxpar.choose import pipedream
from jaxpar.choose.costs.profile import LayerProfile, read_profile
from jaxpar.choose.pipedream import Level, StagePlan
from jaxpar.command_line import Parser, choice, format_rows, integer, missing, number
from jaxpar.errors import UserError, format_count
from jaxpar.files import json_text

RULE = "SIZE:BANDWIDTH of each level, the innermost first, as in 8:3e11,2:1.25e9"


def levels(text: str) -> list[Level]:
    """Parse the levels of a hierarchy: `SIZE:BANDWIDTH`, separated by commas."""
    result = []
    for part in text.split(","):
        size, _, bandwidth = part.partition(":")
        try:
            level = Level(int(size), float(bandwidth))
        except ValueError:
            raise ArgumentTypeError(f"{text!r}; it must be {RULE}") from None
        if level.size < 1 or not 1 <= level.bandwidth < math.inf:
            raise ArgumentTypeError(f"{text!r}; it must be {RULE}, with sizes and bandwidths of at least 1")
        result.append(level)
    return result


def hierarchy(num_workers: int, bandwidth: float | None, given: list[Level] | None) -> list[Level]:
    """Return the levels that the flags describe: `given`, or one level with this bandwidth."""
    if given is None:
        if bandwidth is None:
            raise missing("--bandwidth", "--bandwidth=1.25e9", "set without --levels")
        return [Level(num_workers, bandwidth)]
    if bandwidth is not None:
        raise UserError(f"--bandwidth is {bandwidth:g}; it must not be set with --levels, which has bandwidths")
    if (product := math.prod(level.size for level in given)) != num_workers:
        raise UserError(f"--num_workers is {num_workers}; it must be {product}, the product of the sizes in --levels")
    return given


def _as_json(plan: StagePlan) -> str:
    time = plan.seconds_per_microbatch
    return json_text(
        {
            "stages": [stage._asdict() for stage in plan.stages],
            "seconds_per_microbatch": time,
            "speedup_over_data_parallel": plan.data_parallel_seconds / time if time else 1.0,
            "speedup_over_model_parallel": plan.model_parallel_seconds / time if time else 1.0,
            "num_in_flight": plan.num_in_flight,
        }
    )


def _as_text(plan: StagePlan, layers: list[LayerProfile]) -> str:
    rows = [("stage", "layers", "replicas", "first layer", "last layer")]
    for index, (first, last, replicas) in enumerate(plan.stages):
        rows.append((str(index), f"{first}-{last}", str(replicas), layers[first].name, layers[last].name))
    time = plan.seconds_per_microbatch
    lines = [format_rows(rows), "", f"time per microbatch   {time:.6g} s"]
    if time:
        lines.append(f"data parallelism      {plan.data_parallel_seconds / time:.3g} times as long")
        lines.append(f"model parallelism     {plan.model_parallel_seconds / time:.3g} times as long")
    in_flight = format_count(plan.num_in_flight, "microbatch")
    return "\n".join([*lines, f"in flight             {in_flight} per device of the first stage"])


def main(argv: Sequence[str]) -> None:
    parser = Parser(__doc__, "jaxpar partition")
    require, add = parser.require, parser.add_argument
    require("--profile", "--profile=profile.json", type=Path, metavar="FILE.json", help="the profile of the model")
    require("--num_workers", "--num_workers=16", type=integer(1), metavar="N", help="number of workers (devices)")
    add("--bandwidth", type=number("at least 1 byte per second", minimum=1), help="bytes per second")
    add("--levels", type=levels, help=f"a hierarchy instead of --bandwidth: {RULE}")
    limit = number("a non-negative number of bytes")
    add("--memory_limit", type=limit, default=0.0, help="bytes of a worker; 0 (default): no limit")
    models = pipedream.COMMUNICATION_MODELS
    model = "time of a gradient exchange: of a ring all-reduce (default), or by the formula of PipeDream's paper or "
    model += "released code"
    add("--communication_model", type=choice(models), metavar="|".join(models), default="ring", help=model)
    add("--straight", action="store_true", help="give every stage one worker")
    add("--no_transfers", action="store_true", help="ignore the transfers of activations and gradients between stages")
    add("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse(argv)
    layers, num_workers = read_profile(arguments.profile), arguments.num_workers
    of_layers = format_count(len(layers), "layer")
    chosen_levels = hierarchy(num_workers, arguments.bandwidth, arguments.levels)
    if num_workers > (most := pipedream.most_workers(len(layers))):
        raise UserError(
            f"--num_workers is {num_workers}; it must be at most {most} for a profile of {of_layers}, because the "
            "search would take too long"
        )
    work = pipedream.search_work(len(layers), chosen_levels, has_limit=bool(arguments.memory_limit))
    if len(chosen_levels) > 1 and work > pipedream.MAX_WORK:
        seconds, most_seconds = (one / pipedream.WORK_PER_SECOND for one in (work, pipedream.MAX_WORK))
        raise UserError(
            f"--levels has {len(chosen_levels)} levels; for {of_layers} and {num_workers} workers the search would "
            f"take about {seconds:,.0f} s, and it must take at most {most_seconds:,.0f} s; merge layers, or use fewer "
            "workers"
        )
    plan = pipedream.StageSearch(
        layers,
        chosen_levels,
        model=arguments.communication_model,
        transfers=not arguments.no_transfers,
        straight=arguments.straight,
        memory_limit=arguments.memory_limit or math.inf,
    ).find()
    most_stages = 1 + sum(layer.can_cut for layer in layers[:-1])
    if plan is None and arguments.straight and most_stages < num_workers:
        raise UserError(
            f"--num_workers is {num_workers}; it must be at most {most_stages}, the number of stages that the "
            f"{of_layers} can be cut into, with --straight"
        )
    if plan is None:
        raise UserError(f"--memory_limit is {arguments.memory_limit:g}; it must be larger, because no plan fits")
    print(_as_json(plan) if arguments.json else _as_text(plan, layers))
