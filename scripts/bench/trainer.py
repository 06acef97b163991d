"""Measures the overhead of the training loop: time of the full loop / time of a bare loop over the same jitted step.

    scripts/python scripts/bench/trainer.py [--config=configs/quickstart.py] [--config.KEY=VALUE ...]

The full loop loads and places batches, logs, shows progress, counts FLOPs and writes checkpoints as in any run, but
does not evaluate. The bare loop runs the step on the same batches, which are on the devices already. Rounds of both
alternate, and the medians are compared.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax

from jaxpar import checkpoint, data
from jaxpar import config as configs
from jaxpar.core import mesh
from jaxpar.errors import exit_code
from jaxpar.launch.signals import Interrupt
from jaxpar.measure.phases import Phases
from jaxpar.run import build, metrics
from jaxpar.run.restore import Past
from jaxpar.training import Loop
from scripts.bench.steps import arguments_of
from scripts.bench.tables import COLUMNS, show

ROUNDS = 3
STEPS = 250


def main() -> None:
    """Print the ratio."""
    name, overrides = arguments_of(__doc__)
    config = configs.load_config(name)
    configs.override(config, [f"--config.num_steps={STEPS}", f"--config.checkpoint.every_steps={STEPS}", *overrides])
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    times: dict[str, list[float]] = {"bare": [], "whole": []}
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder)
        build.check_run(config, workdir)
        built = build.make_run(config, workdir, Phases())
        run = built._replace(dataset=built.dataset._replace(validation=None))
        batches = [run.strategy.place(run.batches.batch(step)) for step in range(STEPS)]
        for number in range(ROUNDS + 1):
            state = run.strategy.init(jax.random.key(0))
            start = time.perf_counter()
            for batch in batches:
                state, step_metrics = run.strategy.step(state, batch)
            jax.block_until_ready((state, step_metrics))
            bare = time.perf_counter() - start
            state = jax.block_until_ready(run.strategy.init(jax.random.key(0)))
            saver = checkpoint.Saver(workdir / f"checkpoints{number}", keep=1, keep_best=False)
            log = metrics.Log(workdir, first_step=0, tensorboard=True)
            start = time.perf_counter()
            jax.block_until_ready(Loop(run, Past(0), saver, log).run(state, Interrupt()))
            whole = time.perf_counter() - start
            saver.close()
            log.close()
            if number > 0:  # the first round compiles
                times["bare"].append(bare)
                times["whole"].append(whole)
    ratio = statistics.median(times["whole"]) / statistics.median(times["bare"])
    show(COLUMNS, [[f"training loop / bare loop over {STEPS} steps", f"{ratio:.3f}", "<= 1.03"]])


if __name__ == "__main__":
    sys.exit(exit_code(main))
