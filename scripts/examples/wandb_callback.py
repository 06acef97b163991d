"""Logs a run to Weights & Biases: the config, and the metrics of every log interval and evaluation.

    scripts/python -m pip install wandb
    scripts/python scripts/examples/wandb_callback.py --config=configs/quickstart.py --workdir=runs/wandb

With WANDB_MODE=offline, nothing leaves the machine: the files are in the workdir, and `wandb sync` can upload them
later. If the command is repeated, the run is resumed, and the same run of Weights & Biases continues.
"""

import math
import sys
import uuid
from pathlib import Path

import wandb

import jaxpar
from jaxpar import config as configs
from jaxpar.command_line import EXAMPLE, Parser
from jaxpar.errors import exit_code
from jaxpar.run.callbacks import Measurement


def log_to_wandb(measured: Measurement) -> None:
    """Log the finite metrics of a log interval or an evaluation as `validation/loss` and the like."""
    finite = {name: value for name, value in measured.metrics.items() if math.isfinite(value)}
    wandb.log({f"{measured.split}/{name}": value for name, value in finite.items()}, step=measured.step)


def main() -> None:
    """Train and log."""
    parser = Parser(__doc__)
    parser.require("--config", EXAMPLE)
    parser.require("--workdir", EXAMPLE, type=Path)
    arguments, overrides = parser.parse_with_overrides()
    config, workdir = jaxpar.load_config(arguments.config), arguments.workdir
    configs.override(config, overrides)

    workdir.mkdir(parents=True, exist_ok=True)
    file = workdir / "wandb_id.txt"  # the run that a resumed run continues
    if not file.exists():
        file.write_text(uuid.uuid4().hex)
    run = {"id": file.read_text(), "resume": "allow", "name": workdir.name, "dir": workdir}
    with wandb.init(project="jaxpar", config=configs.keys(config), **run):
        jaxpar.train(config, workdir, callbacks=[log_to_wandb])


if __name__ == "__main__":
    sys.exit(exit_code(main))
