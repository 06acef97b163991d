"""Trains from a config to a result: build, start, loop, finish.

It does not depend on which strategy runs: all work on devices goes through the functions of
`jaxpar.strategies.Strategy`. The arithmetic of a step is in jaxpar/core/step.py.
"""

import contextlib
import math
import signal
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxpar import checkpoint, data, files
from jaxpar.checkpoint import ledger
from jaxpar.choose.auto import choose
from jaxpar.core import mesh
from jaxpar.errors import UserError, printable
from jaxpar.inspect.certified_steps import certified
from jaxpar.launch import processes
from jaxpar.launch.elastic import Survival
from jaxpar.launch.signals import Interrupt
from jaxpar.launch.signals import Stopped as Stopped
from jaxpar.launch.watchdog import Watchdog
from jaxpar.measure.phases import Phases
from jaxpar.run import build, metrics, report, resume
from jaxpar.run.build import Result, Run, StrategyState
from jaxpar.run.callbacks import Callback, Callbacks, EarlyStopping, Measurement
from jaxpar.run.evaluate import evaluate_split, load_batches
from jaxpar.run.meter import build_meter
from jaxpar.run.metrics import Progress
from jaxpar.run.restore import Past, open_ledger, save_info, start, tidy
from jaxpar.run.unused import check_unused_keys
from jaxpar.use.pages.run_page import write_report


def train(config: ConfigDict, workdir: Path | str, callbacks: Sequence[Callback] = ()) -> Result:
    """Train from Python or a notebook, or resume the run in `workdir`, and return the contents of result.json.

    In the main thread, the first Ctrl-C stops the run after the step and saves it; the second raises KeyboardInterrupt.

    Args:
      config: the config, such as that of `load_config`; it is not changed.
      workdir: directory of the run.
      callbacks: functions that get a `Measurement` after each log interval and each evaluation, in process 0 only. If
        one returns a text, it is the reason for which the run stops after this step, evaluates and ends. If one raises,
        the state is saved, and the error is raised here.

    Raises:
      UserError: the config, the data or the workdir has a mistake; nothing was compiled or lost.
      TrainingError: the training failed.
      Stopped: a signal was received; the state is saved.
    """
    if not isinstance(config, ConfigDict):
        raise UserError(f"config is {config!r:.60}; it must be a ConfigDict, such as that of jaxpar.load_config")
    if not isinstance(workdir, str | Path):
        raise UserError(f"workdir is {workdir!r:.60}; it must be the path of a directory")
    if not isinstance(callbacks, list | tuple) or not all(map(callable, callbacks)):
        raise UserError(f"callbacks is {callbacks!r:.60}; it must be a list of functions")
    config = config.copy_and_resolve_references()
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    return train_config(config, Path(workdir), Interrupt(ends_process=False), callbacks)


def train_config(
    config: ConfigDict,
    workdir: Path,
    interrupt: Interrupt,
    callbacks: Sequence[Callback] = (),
    given: Collection[str] = (),
    survival: Survival | None = None,
) -> Result:
    """Do what `train` does, after JAX was prepared.

    given: keys of the command line, which must have an effect. survival: keeps the state, if processes can be lost.
    """
    asked, (config, dataset) = config, choose(config, workdir)
    checked = build.check_run(config, workdir)
    check_unused_keys(asked, given)
    with files.locked(workdir) if processes.is_first() else contextlib.nullcontext():
        phases = Phases()
        with phases("setup"):
            run = build.make_run(config, workdir, phases, checked, dataset)
            print(printable(build.describe_run(run), keep="\n"), flush=True)
        is_main_thread = threading.current_thread() is threading.main_thread()  # Python handles signals only there
        handled = interrupt if is_main_thread else contextlib.nullcontext()
        with Watchdog(config.watchdog_seconds, phases), handled, certified(run) as run:
            result = run_through(run, interrupt, callbacks, survival)
            processes.wait("the ledger is written")
            result["seconds"] = {name: round(seconds, 2) for name, seconds in phases.seconds.items()}
            if processes.is_first():
                result["ledger"] = ledger.verify(
                    workdir / "ledger",
                    run.batches,
                    result["steps"],
                    in_flight=result["in_flight"],
                    discarded=result["discarded"],
                    skipped=result["skipped_steps"],
                )
                print(f"ledger    {result['ledger']}", flush=True)
                report.write_result(workdir, result)
                if config.log.report:
                    write_report(run)
    return result


def run_through(
    run: Run, interrupt: Interrupt, callbacks: Sequence[Callback], survival: Survival | None = None
) -> Result:
    """Train from the state in memory or in the workdir, or a fresh one, to the end and save the results."""
    config, workdir, phases = run.config, run.workdir, run.phases
    with phases("start"):
        state, past = start(run)
        tidy(run, past)
    keep = config.checkpoint
    saver = checkpoint.Saver(workdir / "checkpoints", keep=keep.keep, keep_best=keep.keep_best)
    log = metrics.Log(workdir, first_step=past.step, tensorboard=config.log.tensorboard)
    called, steps = Callbacks(callbacks), past.step
    if config.early_stop.patience:
        losses = [(row["step"], row["loss"]) for row in log.rows("validation")]
        early_stopping = EarlyStopping(config.early_stop.patience, config.early_stop.min_delta, losses)
        reason = processes.from_first(early_stopping.reason or "") or None
        called = Callbacks([*callbacks, early_stopping], reason)
    try:
        if steps == run.num_steps or called.reason:
            print(describe_finished(run, steps, called.reason), flush=True)
        else:
            state, steps = Loop(run, past, saver, log, called, survival).run(state, interrupt)
        interrupt.answer = "training has ended and the results are written"
        result = report.finish(run, state, steps, past.discarded, log, called)
        del state  # the devices may not have the memory for another one
        with phases("checkpoint"):
            saver.wait()
        return result | report.test_best(run, steps, log)
    finally:
        log.close()
        with phases("checkpoint"):
            saver.close()


def describe_finished(run: Run, steps: int, reason: str | None) -> str:
    """Return the line for a run that is started again after its last step. reason: why it stopped early, if it did."""
    if steps < run.num_steps:
        end, key = f"stopped early after step {steps} of {run.num_steps}: {reason}", "early_stop.patience"
    else:
        end, key = f"took all of its {run.num_steps} steps", "num_steps" if run.config.num_steps else "num_epochs"
    longer = f"to continue, raise config.{key}; " if resume.may_change(key, run.config) else ""
    return f"finished  this run {end}; {longer}to train again, use a new --workdir"


class Loop:
    """The training loop. Two steps are in flight: the metrics of one step are read while the next one computes."""

    def __init__(
        self,
        run: Run,
        past: Past,
        saver: checkpoint.Saver,
        log: metrics.Log,
        callbacks: Callbacks | None = None,
        survival: Survival | None = None,
    ):
        """past: of the state, from `start`."""
        self._run, self._past, self._saver, self._log = run, past, saver, log
        self._survival = survival if survival and survival.is_on else None
        self._callbacks = callbacks or Callbacks(())
        config = run.config
        self._every = {
            "log": config.log.every_steps,
            "eval": (config.eval.every_steps or run.batches.steps_per_epoch) if run.dataset.validation else 0,
            "save": config.checkpoint.every_steps,
        }
        losses = (row["loss"] for row in log.rows("validation"))
        self._best_loss = min((loss for loss in losses if loss is not None), default=math.inf)
        self._meter = build_meter(run)
        if past.interval:
            self._meter.resume(past.interval)
        self._ledger = open_ledger(run)
        self._clock = run.phases.clock("train", "input")

    def run(self, state: StrategyState, interrupt: Interrupt) -> tuple[StrategyState, int]:
        """Run all steps, or those until a callback ends the run; return the last state and step. Raises Stopped."""
        run, first, total, agree = self._run, self._past.step, self._run.num_steps, processes.Agreement()
        with metrics.ProfilerTrace(run.config.profile, run.workdir) as trace, Progress(first, total, run.phases) as bar:
            loader = load_batches(run, run.batches, first, total, with_example_ids=True)
            for step in range(first + 1, total + 1):
                run.phases.step = step
                self._keep(step - 1, state)
                trace.before(step)
                state = self._step(step, state, loader)
                bar.advance(self._meter.loss)
                stop = agree(interrupt.requested or 0)
                due = {name for name, every in self._every.items() if step == total or (every and step % every == 0)}
                if due or stop:
                    self._after(step, state, due | ({"save"} if stop else set()), bar)
                if self._callbacks.reason and step < total:
                    bar.print_line(f"stopped   after step {step} of {total}: {self._callbacks.reason}")
                    return state, step
                if stop and step < total:
                    name = signal.Signals(stop).name
                    raise Stopped(f"{name}: stopped after step {step} of {total}, state saved in {run.workdir}")
        return state, total

    def _step(self, step: int, state: StrategyState, loader: Iterator[dict[str, np.ndarray]]) -> StrategyState:
        phases, strategy = self._run.phases, self._run.strategy
        with phases("input"):
            batch = next(loader)
            self._ledger.add(step - 1, batch.pop("example_ids"))
            if self._survival:
                self._ledger.write(sync=False)  # also of a process that is lost later
        with phases("compile" if self._meter.is_new(batch) else "train"):
            state, step_metrics = strategy.step(state, strategy.place(batch))
            self._meter.add(step, batch, step_metrics)
        return state

    def _after(self, step: int, state: StrategyState, due: set[str], bar: Progress) -> None:
        run = self._run
        with run.phases("train"):
            self._meter.revise(run.strategy.drain(state))  # late gradients are part of the state that is saved
            self._meter.read()  # raises if the step failed, before anything is logged or saved
        measured: dict[str, dict[str, float]] = {}
        if "log" in due:
            results = self._meter.metrics(self._clock()) | {"learning_rate": float(run.learning_rate(step - 1))}
            self._log.write(step, "train", results)
            bar.log(step, results, ["loss", run.problem.task.curve], run.problem.task.rate_unit)
            measured["train"] = results
        validation_loss = None
        if "eval" in due and run.dataset.validation:
            task = run.problem.task
            results = task.all_metrics(evaluate_split(run, state, run.dataset.validation))
            self._log.write(step, "validation", results)
            line = metrics.format_metrics(task.printed(results))
            bar.print_line(f"step {step}/{run.num_steps}  validation {line}")
            measured["validation"], validation_loss = results, results["loss"]
        is_best = validation_loss is not None and validation_loss < self._best_loss
        save = "save" in due or (is_best and run.config.checkpoint.keep_best)
        try:
            for split, results in measured.items():
                self._callbacks(Measurement(step, run.num_steps, split, results))
        except BaseException:  # also the KeyboardInterrupt of a notebook
            save = True  # the error of a callback ends the run, which can be resumed
            raise
        finally:
            if save or self._callbacks.reason:
                self._keep(step, state)  # the step need not be done again if a process is lost while it is saved
                self._save(step, state, validation_loss)
        if validation_loss is not None and is_best:
            self._best_loss = validation_loss

    def _keep(self, step: int, state: StrategyState) -> None:
        """Keep the state after `step`, if processes can be lost. Waits until the step is complete."""
        if self._survival:
            with self._run.phases("train"):
                self._meter.read()
            self._survival.keep(partial(self._kept, step, state, self._meter.interval()))

    def _kept(self, step: int, state: StrategyState, interval: Mapping[str, Any]) -> checkpoint.Checkpoint:
        run = self._run
        info = save_info(run, step, run.strategy.num_in_flight(state), self._past._replace(interval=interval))
        return checkpoint.Checkpoint(step, processes.fetch(run.strategy.to_canonical(state)), {}, info)

    def _save(self, step: int, state: StrategyState, validation_loss: float | None) -> None:
        run = self._run
        with run.phases("checkpoint"):
            self._ledger.write()  # before the checkpoint; resuming cuts lines of steps after the last checkpoint
            tree, private = run.strategy.to_canonical(state), run.strategy.to_private(state)
            past = self._past._replace(interval=self._meter.interval())
            info = save_info(run, step, run.strategy.num_in_flight(state), past)
            self._saver.save(tree, info, validation_loss, private=private)
            if not run.config.checkpoint.asynchronous:
                self._saver.wait()
