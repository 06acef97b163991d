"""Compares times that the planner predicts with published rates of training, on GPUs that this machine does not have.

    scripts/python scripts/bench/published.py

The published rates are those of MPT models trained with FSDP (fully sharded, as zero3) in bfloat16 with 2,048 tokens a
text: mosaicml/llm-foundry at 495218376, scripts/train/benchmarking/README.md. A row has the same layers, GPUs, texts of
a microbatch, microbatches and rematerialization. MPT has other positions and norms, so what is compared is jaxpar's
step with that of another program. Prints both rates and their ratio. Nothing is compiled.
"""

import math
import statistics
import sys
from typing import Any, NamedTuple

from jaxpar import config as configs
from jaxpar import strategies
from jaxpar.analysis.planner import search
from jaxpar.analysis.planner.layers import TracedLayers
from jaxpar.analysis.planner.machine import GpuMachine
from jaxpar.cluster_file import find_named
from jaxpar.command_line import Parser
from jaxpar.errors import exit_code
from jaxpar.target import Target, memory_fraction
from scripts.bench.vocabulary import DEFAULTS, make_problem

TOKENS = 2048  # of a text
# Features, heads and layers of a model.
MODELS = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}


class Published(NamedTuple):
    """A published rate: the model, the GPUs, texts of a microbatch, microbatches, remat, and tokens/s of a GPU."""

    model: str
    cluster: str
    size: int
    accumulation: int
    remat: str
    rate: float


ROWS = (
    Published("125m", "a100-80gb:8", 32, 2, "none", 141_737),
    Published("350m", "a100-80gb:8", 32, 2, "none", 58_782),
    Published("760m", "a100-80gb:8", 24, 2, "none", 32_434),
    Published("1b", "a100-80gb:8", 14, 4, "none", 20_513),
    Published("3b", "a100-80gb:8", 10, 2, "none", 10_811),
    Published("7b", "a100-80gb:8", 6, 2, "none", 4_641),
    Published("13b", "a100-80gb:8", 2, 3, "none", 2_262),
    Published("30b", "a100-80gb:8", 3, 21, "full", 916),
    Published("70b", "a100-80gb:8x8", 8, 4, "full", 410),
    Published("760m", "h100:8", 24, 2, "none", 63_147),
    Published("1b", "h100:8", 14, 1, "none", 45_455),
    Published("7b", "h100:8", 6, 1, "none", 10_643),
    Published("13b", "h100:8x8", 2, 1, "none", 4_800),
    Published("13b", "h100:16x8", 16, 1, "full", 5_080),
    Published("30b", "h100:16x8", 8, 1, "full", 2_199),
    Published("70b", "h100:16x8", 8, 1, "full", 1_058),
    Published("70b", "h100:64x8", 8, 1, "full", 1_007),
)


def main() -> None:
    """Print a row for each published rate, and the median error."""
    Parser(__doc__).parse()
    rates = f"{'predicted':>10} {'published':>10} tokens/s of a GPU"
    print(f"{'model':6} {'GPUs':14} {'microbatch':>10} {'remat':6} {rates}  ratio")
    ratios = []
    for row in ROWS:
        rate = predicted_rate(row)
        ratios.append(rate / row.rate)
        size = f"{row.accumulation} x {row.size}"
        print(
            f"{row.model:6} {row.cluster:14} {size:>10} {row.remat:6} {rate:10,.0f} {row.rate:10,.0f} "
            f"{ratios[-1]:25.3f}",
            flush=True,
        )
    errors = [abs(ratio - 1) for ratio in ratios]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"geometric mean of the ratios {mean:.3f}; median error {statistics.median(errors):.1%}")


def predicted_rate(row: Published) -> float:
    """Return the predicted tokens/s of a GPU."""
    cluster = find_named(row.cluster, "cluster")[1]
    config: Any = configs.default_config()
    features, heads, layers = MODELS[row.model]
    config.update_from_flattened_dict(
        DEFAULTS
        | {
            "model.max_length": TOKENS,
            "model.hidden_size": features,
            "model.num_heads": heads,
            "model.num_layers": layers,
            "model.remat": row.remat,
            "mesh.data": cluster.num_devices,
            "exchange": "zero3",
            "batch_size": cluster.num_devices * row.size * row.accumulation,
            "optimizer.accumulation_steps": row.accumulation,
        }
    )
    problem = make_problem(config, Target(cluster, [], memory_fraction()))
    assert cluster.memory_bytes is not None
    layers_of = TracedLayers(problem._replace(accumulation_steps=1), cluster)
    space = search.Space(config, problem, layers_of, GpuMachine(cluster), cluster.memory_bytes)
    plan = strategies.plan(config, problem, cluster)
    found = search.candidate_of_plan(space, config, plan)
    assert not isinstance(found, str), found
    return config.batch_size * TOKENS / found.costs.seconds / cluster.num_devices


if __name__ == "__main__":
    sys.exit(exit_code(main))
