"""Logs a run to MLflow, in a local file: the config, and the metrics of every log interval and evaluation.

    scripts/python -m pip install mlflow
    scripts/python scripts/examples/mlflow_callback.py --config=configs/quickstart.py --workdir=runs/mlflow

`mlflow ui --backend-store-uri=sqlite:///runs/mlflow/mlflow.db` then shows the run. If the command is repeated, the run
is resumed, and the same run of MLflow continues. Other trackers attach in the same way: a callback is a function that
gets a `Measurement`.
"""

import math
import sys
from pathlib import Path

import mlflow

import jaxpar
from jaxpar import config as configs
from jaxpar.command_line import EXAMPLE, Parser
from jaxpar.errors import exit_code
from jaxpar.run.callbacks import Measurement


def log_to_mlflow(measured: Measurement) -> None:
    """Log the finite metrics of a log interval or an evaluation as `validation/loss` and the like."""
    finite = {name: value for name, value in measured.metrics.items() if math.isfinite(value)}
    mlflow.log_metrics({f"{measured.split}/{name}": value for name, value in finite.items()}, step=measured.step)


def main() -> None:
    """Train and log."""
    parser = Parser(__doc__)
    parser.require("--config", EXAMPLE)
    parser.require("--workdir", EXAMPLE, type=Path)
    arguments, overrides = parser.parse_with_overrides()
    config, workdir = jaxpar.load_config(arguments.config), arguments.workdir
    configs.override(config, overrides)

    workdir.mkdir(parents=True, exist_ok=True)
    mlflow.set_tracking_uri(f"sqlite:///{workdir.absolute()}/mlflow.db")  # a file that SQLite creates
    mlflow.set_experiment("jaxpar")
    before = mlflow.search_runs(output_format="list")  # of the same workdir
    with mlflow.start_run(run_id=before[0].info.run_id if before else None, run_name=workdir.name):
        if not before:
            mlflow.log_params(configs.keys(config))
        jaxpar.train(config, workdir, callbacks=[log_to_mlflow])


if __name__ == "__main__":
    sys.exit(exit_code(main))
