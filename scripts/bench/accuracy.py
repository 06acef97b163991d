"""Measures the accuracy cost of exchanges, compared with ddp, or of precisions, compared with the first one.

    scripts/python scripts/bench/accuracy.py [--config=configs/quickstart.py] [--replicas=4] [--seeds=1]
        [--exchanges=ddp,dp,.. | --dtypes=float32,float16] [--workdir=runs/accuracy] [--config.KEY=VALUE ...]

Each row is trained by the command line in a separate process, once for each seed. The table has the mean over
seeds, and the range from the lowest to the highest score. Runs with results in the workdir are not repeated.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar import tasks
from jaxpar.cluster import find_cluster
from jaxpar.command_line import Parser, integer, names, output_path
from jaxpar.errors import UserError, exit_code, is_refused
from jaxpar.exchange import EXCHANGES
from jaxpar.models import DTYPES
from jaxpar.strategies.exchanges import check_exchange
from scripts.bench.tables import show

# Exchanges whose options change the accuracy, and the options.
VARIANTS = (
    "ddp wire_dtype=bfloat16",
    "ddp wire_dtype=float8_e4m3fn",
    "ddp wire_dtype=float8_e5m2",
    "zero3 quantized_weights=True quantized_gradients=True",
    "bagua_bytegrad group=2",
    "byteps_onebit group=2",
    "byteps_topk group=2",
    "powersgd rank=16",
)
DIVERGED = 1  # exit code of a run that diverged


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--config", default="configs/quickstart.py", help="config file as PATH[:PRESET]")
    parser.add_argument("--replicas", type=integer(1), default=4, help="number of replicas")
    parser.add_argument("--seeds", type=integer(1), default=1, help="number of runs of each exchange")
    parser.add_argument(
        "--exchanges",
        type=names([*EXCHANGES, *VARIANTS]),
        help=f"exchanges to compare, by name or as one of {', '.join(map(repr, VARIANTS))} (default: these, and all "
        "that change the result, if the config supports them)",
    )
    parser.add_argument("--dtypes", type=names(DTYPES), help=f"precisions to compare instead ({', '.join(DTYPES)})")
    parser.add_argument("--workdir", type=output_path, default="runs/accuracy", help="directory of the runs")
    arguments, overrides = parser.parse_with_overrides()
    overrides += [f"--config.mesh.{key}={arguments.replicas}" for key in ("data", "virtual_cpu_devices")]
    exchanges = arguments.exchanges or inexact(arguments.config, overrides, arguments.replicas)
    head, settings = "exchange", {row: chosen(row) for row in ("ddp", *exchanges)}
    if arguments.dtypes:
        head, settings = "dtype", {dtype: [f"--config.model.dtype={dtype}"] for dtype in arguments.dtypes}
    compare(head, settings, arguments.config, overrides, arguments.workdir, arguments.seeds)


def inexact(path: str, overrides: list[str], num_replicas: int) -> list[str]:
    """Return the exchanges that change the result of a config and that it supports, and such variants."""
    changing = [name for name, one in EXCHANGES.items() if one.differs]
    cluster = find_cluster()
    return [
        row
        for row in (*changing, *VARIANTS)
        if not is_refused(check_exchange, loaded(path, [*overrides, *chosen(row)]), num_replicas, cluster)
    ]


def loaded(path: str, overrides: list[str]) -> ConfigDict:
    """Return a config with overrides."""
    config = configs.load_config(path)
    configs.override(config, overrides)
    return config


def compare(
    head: str, rows: Mapping[str, list[str]], config_path: str, overrides: list[str], workdir: Path, seeds: int
) -> None:
    """Train each row with several seeds, and show the scores and their difference from those of the first row.

    Args:
      head: head of the column with the names of the rows.
      rows: overrides of the config, by name.
      config_path: config of all rows, as PATH[:PRESET].
      overrides: overrides of all rows.
      workdir: directory of the runs.
      seeds: number of runs of each row.
    """
    config = loaded(config_path, overrides)
    columns = [head, tasks.find_task(config).score.key, f"difference from {next(iter(rows))}", "MB sent per step"]
    columns += ["range over seeds"] if seeds > 1 else []
    show(columns, compared(rows, config_path, config, overrides, workdir, seeds))


def compared(
    rows: Mapping[str, list[str]], path: str, config: ConfigDict, overrides: list[str], workdir: Path, seeds: int
) -> Iterator[list[str]]:
    """Yield the rows of `compare`."""
    score = tasks.find_task(config).score
    reference: float | None = None
    for row, settings in rows.items():
        results = []
        for seed in range(config.seed, config.seed + seeds):
            of_run = workdir / row.replace(" ", "_") / str(seed)
            results.append(train(path, of_run, [*overrides, *settings, f"--config.seed={seed}"]))
        finished = [result for result in results if result]
        if len(finished) < len(results):
            yield [row, f"{len(results) - len(finished)} of {len(results)} runs diverged", "", "", *[""] * (seeds > 1)]
            continue
        values = [result[score.key] for result in finished]
        mean = float(np.mean(values))
        reference = mean if row == next(iter(rows)) else reference
        extent = [f"{min(values):{score.format}} to {max(values):{score.format}}"] if seeds > 1 else []
        difference = "" if reference is None else f"{mean - reference:+{score.format}}"
        megabytes = f"{finished[0]['wire_bytes'] / 1e6:.3f}"
        yield [row, format(mean, score.format), difference, megabytes, *extent]


def chosen(row: str) -> list[str]:
    """Return the overrides that select an exchange and its options: `NAME`, or `NAME KEY=VALUE ..`."""
    exchange, *options = row.split()
    return [f"--config.exchange={exchange}", *(f"--config.exchange_options.{option}" for option in options)]


def train(config: str, workdir: Path, overrides: list[str]) -> dict[str, float] | None:
    """Return the result of a run, and train it if there is no result yet; None if it diverges."""
    path = workdir / "result.json"
    if not path.is_file():
        command = [sys.executable, "-m", "jaxpar", "train", f"--config={config}", f"--workdir={workdir}", *overrides]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode == DIVERGED:
            return None
        if done.returncode:
            raise UserError(f"{workdir} ended with exit code {done.returncode}, for the reason above")
    result: dict[str, float] = json.loads(path.read_text())
    return result


if __name__ == "__main__":
    sys.exit(exit_code(main))
