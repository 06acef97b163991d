"""Measures data-parallel step time / single-device step time, on the same batch and the same cores.

    scripts/python scripts/bench/data_parallel.py [--config=configs/quickstart.py] [--config.KEY=VALUE ...]

Uses one batch of each padded length in the data. The strategies take turns for many rounds, so that a slow phase of
the machine affects all of them. Compares the medians for each length, and the sum of the medians weighted by the
frequency of each length in an epoch. Batches are on the devices before the timing starts.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

from jaxpar import config as configs
from jaxpar import data, tasks
from jaxpar.cluster import find_cluster
from jaxpar.core import mesh
from jaxpar.errors import exit_code
from scripts.bench.steps import arguments_of, measure
from scripts.bench.tables import COLUMNS, show

ROUNDS, WAYS = 30, ("shard_map", "sharding", "pmap")
VARIANTS = {
    "single": ["--config.strategy=single"],
    **{way: ["--config.strategy=data_parallel", f"--config.data_parallel.implementation={way}"] for way in WAYS},
}


def main() -> None:
    """Print the ratios."""
    name, overrides = arguments_of(__doc__)
    config = configs.load_config(name)
    configs.override(config, overrides)
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    with tempfile.TemporaryDirectory() as folder:
        dataset = data.load(config, tasks.find_task(config).labels, Path(folder))
    batches = data.Batches(dataset.train, batch_size=config.batch_size, seed=0, shuffle=True)
    batch_by_length, counts = {}, Counter[int]()
    for step in range(batches.steps_per_epoch):
        batch = batches.batch(step)
        counts[batch["inputs"].shape[1]] += 1
        batch_by_length[batch["inputs"].shape[1]] = batch
    there = find_cluster()
    print(f"{name}: batches of {config.batch_size}, {there.num_devices} {there.device_kind} devices")
    contenders = {variant: configs.load_config(name) for variant in VARIANTS}
    for variant, more in VARIANTS.items():
        configs.override(contenders[variant], [*overrides, *more])
    totals = dict.fromkeys(VARIANTS, 0.0)
    for length in sorted(batch_by_length):
        timings = measure(contenders, dataset.info, batch_by_length[length], rounds=ROUNDS)
        medians = {variant: timing.seconds for variant, timing in timings.items()}
        ratios = ", ".join(f"{way} {medians[way] / medians['single']:.3f}" for way in WAYS)
        print(f"length {length} ({counts[length] / batches.steps_per_epoch:.0%} of the steps)  {ratios}", flush=True)
        totals = {variant: total + counts[length] * medians[variant] for variant, total in totals.items()}
    what = f"step on {there.num_devices} devices / on one"
    show(COLUMNS, [[f"{what}, {way}", f"{totals[way] / totals['single']:.3f}", "<= 1.10"] for way in WAYS])


if __name__ == "__main__":
    sys.exit(exit_code(main))
