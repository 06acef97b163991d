"""The training loop: steps, and what is due after some of them: log, evaluate, save, stop."""

import math
import signal
from typing import Any

from jaxpar import checkpoint
from jaxpar import config as configs
from jaxpar.checkpoint import ledger
from jaxpar.launch import processes
from jaxpar.launch.signals import Interrupt
from jaxpar.run import metrics
from jaxpar.run.build import Run
from jaxpar.run.evaluate import evaluate_split, load_batches
from jaxpar.run.meter import Meter
from jaxpar.run.metrics import Progress


class Stopped(Exception):
    """The run was asked to stop, and did so with everything saved."""


class Loop:
    """Takes a run from the state it starts from to its last step.

    Two steps are in flight: the figures of one are read while the next computes. A log interval in which the run was
    stopped and resumed tells of the steps since it resumed.
    """

    def __init__(self, run: Run, first_step: int, saver: checkpoint.Saver, log: metrics.Log):
        """first_step: the number of steps that the state has behind it."""
        self._run, self._first_step, self._saver, self._log = run, first_step, saver, log
        config = run.config
        self._every = {
            "log": config.log.every_steps,
            "eval": (config.eval.every_steps or run.batches.steps_per_epoch) if run.dataset.validation else 0,
            "save": config.checkpoint.every_steps,
        }
        self._best_loss = min((row["loss"] for row in log.rows("validation")), default=math.inf)
        self._meter = build_meter(run)
        self._books = open_ledger(run)
        self._clock = run.phases.clock("train", "input")

    def run(self, current: Any, interrupt: Interrupt) -> Any:
        """Returns the strategy's state after the last step. Raises Stopped."""
        run, total, agree = self._run, self._run.num_steps, processes.Agreement()
        with metrics.ProfilerTrace(run.config.profile, run.workdir) as trace, Progress(self._first_step, total) as bar:
            loader = load_batches(run, run.batches, self._first_step, total, with_example_ids=True)
            for step in range(self._first_step + 1, total + 1):
                run.phases.step = step
                trace.before(step)
                current = self._step(step, current, loader)
                bar.advance(self._meter.loss)
                stop = agree(interrupt.requested or 0)
                due = {name for name, every in self._every.items() if step == total or (every and step % every == 0)}
                if due or stop:
                    self._after(step, current, due | ({"save"} if stop else set()), bar)
                if stop and step < total:
                    name = signal.Signals(stop).name
                    raise Stopped(f"{name}: stopped after step {step} of {total}, saved in {run.workdir}")
        return current

    def _step(self, step: int, current: Any, loader: Any) -> Any:
        phases, strategy = self._run.phases, self._run.strategy
        with phases("input"):
            rows = next(loader)
            self._books.add(step - 1, rows.pop("example_ids"))
        with phases("compile" if self._meter.is_new(rows) else "train"):
            current, step_metrics = strategy.step(current, strategy.place(rows))
            self._meter.add(step, rows, step_metrics)
        return current

    def _after(self, step: int, current: Any, due: set[str], bar: Progress) -> None:
        run = self._run
        with run.phases("train"):
            self._meter.read()  # so that nothing below is of a step that failed
        if "log" in due:
            figures = self._meter.figures(self._clock()) | {"learning_rate": float(run.schedule(step - 1))}
            self._log.write(step, "train", figures)
            bar.log(step, figures, ["loss", run.problem.task.curve])
        validation_loss = None
        if "eval" in due and run.dataset.validation:
            figures = evaluate_split(run, current, run.dataset.validation)
            self._log.write(step, "validation", figures)
            bar.say(f"step {step}/{run.num_steps}  validation {metrics.format_metrics(figures)}")
            validation_loss = figures["loss"]
        is_best = validation_loss is not None and validation_loss < self._best_loss
        if "save" in due or (is_best and run.config.checkpoint.keep_best):
            self._save(step, current, validation_loss)
        if validation_loss is not None and is_best:
            self._best_loss = validation_loss

    def _save(self, step: int, current: Any, validation_loss: float | None) -> None:
        run = self._run
        with run.phases("checkpoint"):
            self._books.write()  # before the checkpoint: lines of steps that none has are cut
            tree, private = run.strategy.to_canonical(current), run.strategy.to_private(current)
            self._saver.save(tree, save_info(run, step), validation_loss, private=private)
            if not run.config.checkpoint.asynchronous:
                self._saver.wait()


def build_meter(run: Run) -> Meter:
    """The meter of this run's model on this run's devices."""
    devices, size = run.strategy.devices, run.config.batch_size
    peak = run.config.log.peak_flops or run.cluster.peak_flops.get(run.config.model.dtype)
    return Meter(
        run.problem.model,
        task=run.problem.task,
        peak_flops=peak * len(devices) if peak else None,
        stop_if_nonfinite=run.config.optimizer.nonfinite == "stop",
        shares=size // len(range(size)[processes.own_rows(devices, run.plan.num_replicas, size)]),
    )


def open_ledger(run: Run) -> ledger.Ledger:
    """Of the rows of batches that this process counts."""
    devices, size = run.strategy.devices, run.config.batch_size
    own, counted = (rows(devices, run.plan.num_replicas, size) for rows in (processes.own_rows, processes.counted_rows))
    return ledger.Ledger(
        run.workdir / "ledger", steps_per_epoch=run.batches.steps_per_epoch, rows=counted, first_row=own.start
    )


def save_info(run: Run, step: int) -> dict[str, Any]:
    """What a checkpoint says besides its arrays."""
    return {
        "data": run.dataset.fingerprint,
        "examples": run.batches.examples_before(step),
        "config": configs.keys(run.config),
        "private_key": dict(run.plan.private_key),
    }
