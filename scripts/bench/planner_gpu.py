"""Compares predicted with measured times of a step, on the GPUs of this machine.

    scripts/python scripts/bench/planner_gpu.py [--rounds=15] [--size=base]

Measures the rates of the GPUs as --cluster=here of `jaxpar plan` does, and prints them. For BERT in float32 and in
16 bits (float16 on GPUs without bfloat16), and for each strategy, prints the time of a step in milliseconds, and
predicted / measured:

  assumed   predicted by the planner from the rates of the data sheet and assumed efficiencies; only for known GPUs
  measured  predicted by the planner from the measured rates
  compiled  predicted from the compiled program and the measured rates

--size=tiny tests the script on any device, such as a CPU, on which the predictions mean nothing.
"""

import sys
from typing import Any, NamedTuple

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import strategies
from jaxpar.choose import planner
from jaxpar.choose.candidates import gpu_space
from jaxpar.choose.costs.measured_rates import GPU_SIZES, MeasuredSizes, describe_rates, measured_cluster
from jaxpar.cluster import Cluster
from jaxpar.command_line import Parser, choice, integer
from jaxpar.core import mesh
from jaxpar.core.step import Problem
from jaxpar.errors import exit_code
from jaxpar.inspect import step_time
from scripts.bench.gpu_steps import half_dtype
from scripts.bench.planner import text_config, texts
from scripts.bench.steps import make_problem, race


class Size(NamedTuple):
    """Examples on a GPU, tokens of each, settings of the model, and the sizes of the programs that measure rates."""

    examples: int
    length: int
    model: tuple[str, ...]
    rates: MeasuredSizes


SIZES = {
    "base": Size(32, 128, ("model.num_layers=12", "model.hidden_size=768", "model.num_heads=12"), GPU_SIZES),
    "tiny": Size(
        2,
        16,
        ("model.num_layers=2", "model.hidden_size=32", "model.num_heads=2"),
        MeasuredSizes(width=512, kernels=64, few=2**14, many=2**22, sent=2**18),
    ),
}


def main() -> None:
    """Print the rates and the table."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=integer(1), default=15, help="measurements of each step")
    parser.add_argument("--size", type=choice(SIZES), default="base", help=f"one of {', '.join(SIZES)}")
    arguments = parser.parse()
    mesh.partition_by_gspmd()
    mesh.prepare_jax(configs.default_config(), configs.config_folder().parent / ".cache")
    size, devices = SIZES[arguments.size], clusters.devices()
    assumed = clusters.with_rates_of_kind(clusters.find_cluster())
    measured = measured_cluster(assumed, devices, size.rates)
    print(f"{len(devices)} x {assumed.device_kind}: {describe_rates(measured)}", flush=True)
    print(f"{'':24} {'step':>10} {'assumed':>8} {'measured':>8} {'compiled':>8}")
    for dtype in ("float32", half_dtype(assumed)):
        compare(size, f"model.dtype={dtype}", arguments.rounds, assumed, measured)


def strategies_of(n: int) -> dict[str, tuple[str, ...]]:
    """Return the settings of each strategy on n GPUs, by name."""
    if n == 1:
        return {name: ("strategy=single", *more) for name, more in (("single", ()), ("remat", ("model.remat=full",)))}
    found = {name: (f"mesh.data={n}", f"exchange={name}") for name in ("ddp", "zero2", "zero3")}
    pipeline = (
        "strategy=pipeline",
        "pipeline.executor=lockstep",
        "mesh.data=1",
        f"mesh.stage={n}",
        f"pipeline.num_microbatches={2 * n}",
    )
    return {**found, "1f1b": (*pipeline, "pipeline.schedule=1f1b")}


def compare(size: Size, dtype: str, rounds: int, assumed: Cluster, measured: Cluster) -> None:
    """Print the rows of a dtype. assumed, measured: the GPUs with these rates."""
    n, devices = measured.num_devices, clusters.devices()
    info, batch = texts(size.examples * n, size.length)
    contenders, predictions = {}, {}
    for name, settings in strategies_of(n).items():
        config = text_config(size.examples * n, size.length, (*size.model, dtype, *settings))
        problem = make_problem(config, info, batch)
        plan = strategies.plan(config, problem, measured)
        contenders[name] = strategies.build(plan, problem, devices)
        compiled = step_time.predict(contenders[name].compile(), measured).seconds
        clusters_of = (assumed, measured) if assumed.memory_bandwidth else (measured,)
        planned = [planned_seconds(config, problem, plan, cluster) for cluster in clusters_of]
        predictions[name] = [None] * (2 - len(planned)) + [*planned, compiled]
    for name, timing in race(contenders, batch, rounds=rounds).items():
        ratios = ["-" if seconds is None else f"{seconds / timing.seconds:.3f}" for seconds in predictions[name]]
        label = f"{name}, {dtype.partition('=')[2]}"
        print(f"{label:24} {timing.seconds * 1e3:7.1f} ms {' '.join(f'{ratio:>8}' for ratio in ratios)}", flush=True)


def planned_seconds(config: Any, problem: Problem, plan: Any, cluster: Cluster) -> float:
    """Return the time of a step that the planner predicts."""
    one = planner.candidate_of_plan(gpu_space(config, problem, cluster, float("inf"), {}), config, plan)
    assert not isinstance(one, str), one
    return one.costs.seconds


if __name__ == "__main__":
    sys.exit(exit_code(main))
