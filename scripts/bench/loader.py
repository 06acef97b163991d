"""Measures the examples per second of the loader, and their ratio to the examples per second that training consumes.

    scripts/python scripts/bench/loader.py --consumption=4000

Uses the data and settings of the quickstart (batch size, threads, prefetch). Each run takes the next `--steps` batches
from a new loader; the median of the runs is printed. `--consumption` is the rate of training in examples per second
(examples_per_second in the quickstart's result.json). The exit code is 1 if the ratio is below 10.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from jaxpar import config as configs
from jaxpar import tasks
from jaxpar.command_line import Parser, integer, number
from jaxpar.data import Batches, load
from jaxpar.errors import exit_code
from scripts.bench.tables import COLUMNS, show


def rates(batches: Batches, steps: int, runs: int, num_threads: int, prefetch: int) -> list[float]:
    """Return the examples per second of each run, including the start of the threads and the planning of epochs."""
    result = []
    for run in range(runs):
        first = time.perf_counter()
        loader = batches.loader(run * steps, (run + 1) * steps, num_threads=num_threads, prefetch=prefetch)
        examples = sum(len(batch["inputs"]) for batch in loader)
        result.append(examples / (time.perf_counter() - first))
    return result


def main() -> int:
    """Print the rates and the ratio, and return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("--config", default="configs/quickstart.py", help="config file as PATH[:PRESET]")
    rate = number("a number of at least 1", minimum=1)
    parser.require("--consumption", "--consumption=4000", type=rate, help="examples per second of training")
    parser.add_argument("--runs", type=integer(1), default=9, help="number of runs")
    parser.add_argument("--steps", type=integer(1), default=400, help="batches per run")
    arguments = parser.parse()
    config = configs.load_config(arguments.config)
    with tempfile.TemporaryDirectory() as workdir:
        dataset = load(config, tasks.find_task(config).labels, Path(workdir))
    batches = Batches(dataset.train, batch_size=config.batch_size, seed=config.seed, shuffle=True)
    rates(batches, 1, 1, config.data.num_threads, config.data.prefetch)  # imports grain
    speeds = rates(batches, arguments.steps, arguments.runs, config.data.num_threads, config.data.prefetch)
    median = statistics.median(speeds)
    ratio = median / arguments.consumption
    print(f"loader: {median:,.0f} examples/s (median of {len(speeds)} runs, {min(speeds):,.0f} to {max(speeds):,.0f})")
    show(COLUMNS, [["examples/s of the loader / of training", f"{ratio:.0f}", ">= 10"]])
    return int(ratio < 10)


if __name__ == "__main__":
    sys.exit(exit_code(main))
