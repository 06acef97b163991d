"""Trains the schedules of PipeDream on handwritten digits, with and without stashed weights, at two learning rates.

    scripts/python scripts/bench/digits.py runs/digits
    scripts/python scripts/bench/stashing.py [--digits=runs/digits] [--rates=0.02,0.05] [--seeds=3]
        [--workdir=runs/stashing] [--config.KEY=VALUE ...]

An MLP of four stages on four virtual devices, each run in a separate process, with as few microbatches as a schedule
can have: `pipedream` has one for each batch, as in the paper. The tables have the mean accuracy over
seeds, and the range. Runs with results in the workdir are not repeated.
"""

import sys

from jaxpar.command_line import Parser, integer, output_path
from jaxpar.errors import exit_code
from scripts.bench.accuracy import compare

SCHEDULES = ("1f1b", "pipedream", "pipedream_vertical_sync", "pipedream_2bw", "pipedream_without_stashing")
STAGES = 4
MLP = ("model.hidden_size=64", f"model.num_layers={STAGES}", "batch_size=32", "num_epochs=10.0", "optimizer.name=sgd")


def main() -> None:
    """Print a table for each learning rate."""
    parser = Parser(__doc__)
    parser.add_argument("--digits", default="runs/digits", help="folder that scripts/bench/digits.py wrote")
    parser.add_argument("--rates", default="0.02,0.05", help="learning rates of SGD")
    parser.add_argument("--seeds", type=integer(1), default=3, help="number of runs of each schedule")
    parser.add_argument("--workdir", type=output_path, default="runs/stashing", help="directory of the runs")
    arguments, overrides = parser.parse_with_overrides()
    common = ["strategy=pipeline", f"mesh.stage={STAGES}", f"mesh.virtual_cpu_devices={STAGES}", *MLP]
    common += [f"data.train={arguments.digits}"]
    for rate in arguments.rates.split(","):
        print(f"learning rate {rate}")
        settings = [f"--config.{one}" for one in (*common, f"optimizer.lr={rate}")]
        rows = {name: [f"--config.pipeline.schedule={name}"] for name in SCHEDULES}
        workdir = arguments.workdir / str(rate)
        compare("schedule", rows, "configs/mlp_mnist.py", [*settings, *overrides], workdir, arguments.seeds)


if __name__ == "__main__":
    sys.exit(exit_code(main))
