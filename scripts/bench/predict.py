"""Compares the rate of predictions from a file with that of the evaluation of the same rows.

    scripts/python scripts/bench/predict.py --workdir=runs/quickstart --rows=20000

The rows are texts of the glosses, as a csv file. A prediction reads and tokenizes the file, computes, and writes csv;
an evaluation reads tokens that are on disk. Both run on the same devices in turn, and the medians are compared.
"""

import csv
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from absl import logging

from jaxpar import config as configs
from jaxpar import data
from jaxpar.command_line import Parser, integer
from jaxpar.core import mesh
from jaxpar.data import text
from jaxpar.data.corpus import WORDNET
from jaxpar.data.rows import Columns, read_files
from jaxpar.errors import exit_code
from jaxpar.measure.phases import seconds_in_turn
from jaxpar.use.inference import inputs, outputs
from jaxpar.use.inference.load import load_trained
from jaxpar.use.inference.predictor import Predictor
from scripts.bench.tables import COLUMNS, show


def write_rows(path: Path, number: int) -> None:
    """Write the first glosses as csv."""
    rows = read_files("tsv", [WORDNET], Columns(("text",), "label"))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        writer.writerows((row.texts[0], row.label) for row, _ in zip(rows, range(number), strict=False))


def predict(predictor: Predictor, source: Path, target: Path) -> None:
    """Predict the rows of `source` as `jaxpar predict` does."""
    target.unlink(missing_ok=True)
    windows = inputs.read_windows(predictor.trained, source, "csv", predictor.batch_size)
    with outputs.open_output(target, "csv") as write:
        for window, predictions in predictor.stream(windows):
            write(window.records, predictions)


def measure(workdir: Path, number: int, rounds: int) -> None:
    """Print the rates and their ratio."""
    config = configs.read_config(workdir)
    config.mesh.virtual_cpu_devices = 0
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    trained = load_trained(workdir)
    predictor = Predictor(trained)
    assert trained.tokenizer is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "rows.csv"
        write_rows(source, number)
        evaluated = trained.config.copy_and_resolve_references()
        evaluated.data.update(source="csv", test=str(source))
        (folder / "tokens").mkdir()
        split = text.load_split(
            evaluated, trained.task.labels, trained.info, trained.tokenizer.to_str(), workdir, folder / "tokens"
        )
        calls: dict[str, Callable[[], object]] = {
            "evaluate": lambda: predictor.metrics(split),
            "predict": lambda: predict(predictor, source, folder / "predicted.csv"),
            "read": lambda: sum(
                len(one) for _, one in inputs.read_windows(trained, source, "csv", predictor.batch_size)
            ),
        }
        begin = time.perf_counter()
        seconds = seconds_in_turn(calls, rounds)
    print(f"{len(split):,} examples, {trained.mesh.size} devices, batches of {predictor.batch_size}, {rounds} rounds")
    for call, median in seconds.items():
        print(f"{call:9} {len(split) / median:8,.0f} examples/s")
    ratio = seconds["evaluate"] / seconds["predict"]
    show(COLUMNS, [["examples/s of predictions from csv / of evaluation", f"{ratio:.3f}", ">= 0.8"]])
    print(f"took {time.perf_counter() - begin:.0f} s")


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    parser.require("--workdir", "--workdir=runs/quickstart", rule="the workdir of a run", type=Path)
    parser.add_argument("--rows", type=integer(1), default=20_000, help="rows of the file (default: 20000)")
    parser.add_argument("--rounds", type=integer(1), default=5, help="rounds (default: 5)")
    arguments = parser.parse()
    logging.set_verbosity(logging.FATAL)
    measure(arguments.workdir, arguments.rows, arguments.rounds)


if __name__ == "__main__":
    sys.exit(exit_code(main))
