"""Compares the partitioner's prediction of a pipeline's speed with the measured one.

    scripts/python scripts/bench/partitioner.py [--rounds=5] [--config.KEY=VALUE ...]

Two processes, on a core each, profile the layers of a BERT classifier with 6 blocks of width 256: at the same time,
because cores share a memory. Pipelines of two stages without a flush, whose devices have a core each, then take steps
of 16 microbatches: cut where the partitioner chooses, and one layer before and after. The prediction is the time of the
slowest stage; the exchange of activations takes no time. A row has the predicted and the measured milliseconds of a
microbatch, and their ratio.
"""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack

from jaxpar import config as configs
from jaxpar import data
from jaxpar.choose.costs.layer_programs import LayerPrograms
from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.choose.pipedream import Level, StageSearch
from jaxpar.command_line import Parser, integer
from jaxpar.core import mesh
from jaxpar.errors import exit_code
from scripts.bench.pipeline_case import CLASSIFIER, Maker
from scripts.bench.steps import race
from scripts.bench.tables import COLUMNS, show

NUM_EXAMPLES, NUM_MICROBATCHES = 8, 16
SIZE = ("--config.model.num_layers=6", "--config.optimizer.name=sgd")
REPEATS = 15
FREE = 1e15  # bytes a second
CUTS = {-1: "one layer before the choice", 0: "as chosen", 1: "one layer after the choice"}


def maker(overrides: Sequence[str]) -> Maker:
    """Return the maker of pipelines of the model."""
    return Maker((*CLASSIFIER, *SIZE, *overrides), NUM_EXAMPLES)


def prepare() -> None:
    """Configure JAX for two devices."""
    config = configs.default_config()
    configs.override(config, ["--config.mesh.virtual_cpu_devices=2"])
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    mesh.partition_by_gspmd()


def profile(overrides: Sequence[str]) -> list[LayerProfile]:
    """Measure the layers on the cores of this process."""
    prepare()
    case = maker(overrides).pipeline(2, "pipedream", m=NUM_MICROBATCHES)
    microbatch = {name: x[:NUM_EXAMPLES] for name, x in case.batch.items()}
    return LayerPrograms(case.problem, microbatch, remat="none").measure(microbatch, repeats=REPEATS)


def main() -> None:
    """Print the ratios."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=integer(1), default=5, help="measured steps of each pipeline")
    parsed, overrides = parser.parse_with_overrides()
    spawn, cores = multiprocessing.get_context("spawn"), sorted(os.sched_getaffinity(0))[:2]
    with ExitStack() as stack:
        pools = [ProcessPoolExecutor(1, spawn, os.sched_setaffinity, (0, {core})) for core in cores]
        layers, _ = [job.result() for job in [stack.enter_context(pool).submit(profile, overrides) for pool in pools]]
    prepare()
    seconds = [layer.forward_s + layer.backward_s for layer in layers]
    plan = StageSearch(layers, [Level(2, FREE)], straight=True).find()
    assert plan is not None
    chosen = plan.stages[1].first_layer
    cases = {
        cut: maker(overrides)
        .more(f"--config.pipeline.partition={layers[cut].name}")
        .pipeline(2, "pipedream", m=NUM_MICROBATCHES)
        for cut in (chosen - 1, chosen, chosen + 1)
    }
    contenders = {layers[cut].name: case.contender for cut, case in cases.items()}
    timings = race(contenders, next(iter(cases.values())).batch, rounds=parsed.rounds, warm_up=3)
    rows = []
    for cut in cases:
        predicted = max(sum(seconds[:cut]), sum(seconds[cut:]))
        measured = timings[layers[cut].name].seconds / NUM_MICROBATCHES
        what = f"predicted / measured time, cut {CUTS[cut - chosen]}"
        of = f"{1e3 * predicted:.2f} / {1e3 * measured:.2f} ms"
        rows.append([what, f"{of} = {predicted / measured:.3f}", "0.85 to 1.15"])
    show(COLUMNS, rows)


if __name__ == "__main__":
    sys.exit(exit_code(main))
