"""Training from a config to a result: build, start, loop, finish.

Nothing here asks which strategy it runs. All that is on devices goes through the functions of
`jaxpar.strategies.Strategy`; the arithmetic of a step is in jaxpar/step.py.
"""

import contextlib
import json
from pathlib import Path

from ml_collections import ConfigDict

from jaxpar import checkpoint, files
from jaxpar import config as configs
from jaxpar.checkpoint import ledger
from jaxpar.launch import processes
from jaxpar.launch.signals import Interrupt
from jaxpar.launch.watchdog import Watchdog
from jaxpar.measure.phases import Phases
from jaxpar.run import build, metrics, report
from jaxpar.run.build import Result, Run
from jaxpar.run.loop import Loop, Stopped
from jaxpar.run.start import start

__all__ = ["Stopped", "train"]


def train(config: ConfigDict, workdir: Path) -> Result:
    """Train as `config` says, continuing what `workdir` holds, and return what result.json has.

    Raises:
      UserError: a mistake in the config, the data or the workdir; nothing was compiled or lost.
      Stopped: SIGTERM or Ctrl-C came; the state is saved.
    """
    checked = build.check_run(config, workdir)
    with files.locked(workdir) if processes.is_first() else contextlib.nullcontext():
        phases = Phases()
        with phases("setup"):
            run = build.make_run(config, workdir, phases, checked)
            print(build.describe_run(run), flush=True)
        with Watchdog(config.watchdog_seconds, phases), Interrupt() as interrupt:
            result = run_through(run, interrupt)
            processes.wait("the ledger is written")
            result["seconds"] = {name: round(seconds, 2) for name, seconds in phases.seconds.items()}
            if processes.is_first():
                result["ledger"] = ledger.verify(workdir / "ledger", run.batches, run.num_steps)
                print(f"ledger    {result['ledger']}", flush=True)
                report.write_result(workdir, result)
    return result


def run_through(run: Run, interrupt: Interrupt) -> Result:
    """Train from what the workdir holds to the last step, and save everything."""
    config, workdir, phases = run.config, run.workdir, run.phases
    with phases("start"):
        state, first_step = start(run)
        tidy(run, first_step)
    saver = checkpoint.Saver(
        workdir / "checkpoints", keep=config.checkpoint.keep, keep_best=config.checkpoint.keep_best
    )
    log = metrics.Log(workdir, first_step=first_step, tensorboard=config.log.tensorboard)
    try:
        state = Loop(run, first_step, saver, log).run(state, interrupt)
        return report.finish(run, state, log)
    finally:
        log.close()
        with phases("checkpoint"):
            saver.close()


def tidy(run: Run, first_step: int) -> None:
    """Write what a run that goes on from `first_step` needs, and remove what there is of later steps."""
    processes.wait("a checkpoint was read")
    if processes.is_first():
        ledger.cut(run.workdir / "ledger", after=first_step)
        ledger.check_ledger(run.workdir / "ledger", run.batches, first_step)
        configs.save(run.config, run.workdir)
        files.write_text(run.workdir / "data.json", json.dumps(run.dataset.info._asdict(), indent=1) + "\n")
        checkpoint.set_aside(run.workdir / "checkpoints", after=first_step)
        checkpoint.repair_metrics(run.workdir / "checkpoints", log=print)
    processes.wait("the workdir is tidy")
