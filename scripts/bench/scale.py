"""Plans GPT models for 8 to 4,096 H100s, and draws the predicted MFU of the fastest strategy.

    scripts/python scripts/bench/scale.py [--out=docs/scale.png]

Models of 124M, 1.3B, 13B and 175B parameters in bfloat16, with 2,048 tokens a text and 2,048 texts a step (one for each
GPU if there are more), without dropout, on hosts of 8. Prints a row for each model and number of GPUs: the strategy,
the predicted time and MFU, what takes the longest besides computing, and the memory. Nothing is compiled.
"""

import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from jaxpar import config as configs
from jaxpar.choose import planner, report
from jaxpar.choose.candidates import Candidate, Space
from jaxpar.choose.costs.layers import TracedLayers
from jaxpar.choose.costs.machine import GpuMachine
from jaxpar.cluster.files import find_named
from jaxpar.cluster.target import memory_fraction
from jaxpar.command_line import Parser, output_path
from jaxpar.errors import exit_code, format_bytes
from jaxpar.measure.flops import forward_flops
from scripts.bench.vocabulary import DEFAULTS, make_problem

TOKENS, TEXTS = 2048, 2048
GPUS = (8, 64, 512, 4096)
SMALL = 0.05  # share of the step below which an overhead does not limit it
# Features, heads and layers: GPT-2 small, and models of Brown et al., "Language Models are Few-Shot Learners", 2020.
MODELS = {"124M": (768, 12, 12), "1.3B": (2048, 16, 24), "13B": (5120, 40, 40), "175B": (12288, 96, 96)}
COLORS = ("#0072b2", "#009e73", "#e69f00", "#d55e00")  # Okabe and Ito, "Color Universal Design", 2008


def main() -> None:
    """Print the table, and draw the picture."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=output_path, default="docs/scale.png", help="the picture")
    arguments = parser.parse()
    print("| model | H100s | strategy | step | MFU | limited by | memory |\n|---|---|---|---|---|---|---|")
    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for (model, sizes), color in zip(MODELS.items(), COLORS, strict=True):
        points = []
        for number in GPUS:
            best, work = planned(sizes, number)
            values, costs = report.as_json(best, work), best.costs
            if not best.fits:
                print(f"| {model} | {number:,} | none fits | | | memory | {format_bytes(costs.nbytes)} |", flush=True)
                continue
            points.append((number, values["mfu"]))
            limit = costs.limit()
            share = costs.overheads()[limit] / costs.seconds
            limited_by = f"{report.OVERHEADS[limit]}, {share:.0%}" if share >= SMALL else "computing"
            print(
                f"| {model} | {number:,} | {best.name}{report.details(best.settings)} | "
                f"{report.format_seconds(costs.seconds)} | {values['mfu']:.3f} | {limited_by} | "
                f"{format_bytes(costs.nbytes)} |",
                flush=True,
            )
        axis.plot(*zip(*points, strict=True), "o-", color=color, label=model)
    axis.set_xscale("log", base=2, nonpositive="mask")
    axis.set_xticks(GPUS, [f"{number:,}" for number in GPUS])
    axis.set_ylim(0, 0.7)
    axis.set_xlabel("number of H100s")
    axis.set_ylabel("predicted MFU (fraction of the peak FLOP/s)")
    axis.legend(title="parameters")
    axis.grid(alpha=0.3)
    figure.savefig(arguments.out, dpi=120)


def planned(sizes: tuple[int, int, int], number: int) -> tuple[Candidate, report.StepWork]:
    """Return the fastest candidate on this number of GPUs, and the work of a step."""
    cluster = find_named(f"h100:{number // 8}x8", "cluster")[1]
    config: Any = configs.default_config()
    features, heads, layers = sizes
    config.update_from_flattened_dict(
        DEFAULTS
        | {
            "strategy": "single",
            "model.max_length": TOKENS,
            "model.hidden_size": features,
            "model.num_heads": heads,
            "model.num_layers": layers,
            "batch_size": max(TEXTS, number),
        }
    )
    problem = make_problem(config, cluster)
    assert cluster.memory_bytes is not None
    usable = memory_fraction() * cluster.memory_bytes
    space = Space(config, problem, TracedLayers(problem, cluster), GpuMachine(cluster), usable)
    flops = 3.0 * forward_flops(problem.model.apply, problem.model.shapes, dict(problem.batch))
    peak = cluster.peak_flops[config.model.dtype] * number
    work = report.StepWork(config.batch_size, config.batch_size * TOKENS, flops, peak, usable)
    return planner.candidates(space)[0], work


if __name__ == "__main__":
    sys.exit(exit_code(main))
