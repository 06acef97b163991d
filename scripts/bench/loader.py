"""Examples a second of the loader, and as a multiple of those that training consumes.

    scripts/python scripts/bench/loader.py --consumption=4000

Measures the quickstart's data with the quickstart's settings (batch size, threads, batches ahead): runs of
`--steps` batches from grain, each run from a fresh loader at the next steps, and says the median.
`--consumption`: examples a second that training takes (examples_per_second in the quickstart's
result.json). Exits with 1 where the ratio is below 10.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from jaxpar import config as configs
from jaxpar import tasks
from jaxpar.data import Batches, load


def rates(batches: Batches, steps: int, runs: int, num_threads: int, prefetch: int) -> list[float]:
    """Examples a second of each run. The start of the loader's threads counts; making an epoch's plan does too."""
    result = []
    for run in range(runs):
        first = time.perf_counter()
        loader = batches.loader(run * steps, (run + 1) * steps, num_threads=num_threads, prefetch=prefetch)
        examples = sum(len(batch["inputs"]) for batch in loader)
        result.append(examples / (time.perf_counter() - first))
    return result


def main() -> None:
    """Print the rates and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--consumption", type=float, required=True, help="examples a second that training takes")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=400, help="batches a run")
    arguments = parser.parse_args()
    config = configs.load_config(arguments.config)
    with tempfile.TemporaryDirectory() as workdir:
        dataset = load(config, tasks.find_task(config).labels, Path(workdir))
    batches = Batches(dataset.train, batch_size=config.batch_size, seed=config.seed, shuffle=True)
    rates(batches, 1, 1, config.data.num_threads, config.data.prefetch)  # imports grain
    speeds = rates(batches, arguments.steps, arguments.runs, config.data.num_threads, config.data.prefetch)
    median = statistics.median(speeds)
    ratio = median / arguments.consumption
    print(f"loader: {median:,.0f} examples/s (median of {len(speeds)} runs, {min(speeds):,.0f} to {max(speeds):,.0f})")
    print(f"training consumes {arguments.consumption:,.0f} examples/s: the loader gives {ratio:.1f} times that")
    sys.exit(ratio < 10)


if __name__ == "__main__":
    main()
