"""The training loop: steps, and what is due after some of them: log, evaluate, save, stop."""

import math
import signal
from collections.abc import Iterator

import numpy as np

from jaxpar import checkpoint
from jaxpar import config as configs
from jaxpar.checkpoint import ledger
from jaxpar.checkpoint.checksums import Info
from jaxpar.launch import processes
from jaxpar.launch.signals import Interrupt
from jaxpar.run import metrics
from jaxpar.run.build import Run, StrategyState
from jaxpar.run.evaluate import evaluate_split, load_batches
from jaxpar.run.meter import Meter
from jaxpar.run.metrics import Progress


class Stopped(Exception):
    """The run was asked to stop, and did so with everything saved."""


class Loop:
    """Takes a run from the state it starts from to its last step.

    Two steps are in flight: the metrics of one are read while the next computes. A log interval in which the run was
    stopped and resumed has the steps since it resumed.
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

    def run(self, state: StrategyState, interrupt: Interrupt) -> StrategyState:
        """Returns the strategy's state after the last step. Raises Stopped."""
        run, total, agree = self._run, self._run.num_steps, processes.Agreement()
        with metrics.ProfilerTrace(run.config.profile, run.workdir) as trace, Progress(self._first_step, total) as bar:
            loader = load_batches(run, run.batches, self._first_step, total, with_example_ids=True)
            for step in range(self._first_step + 1, total + 1):
                run.phases.step = step
                trace.before(step)
                state = self._step(step, state, loader)
                bar.advance(self._meter.loss)
                stop = agree(interrupt.requested or 0)
                due = {name for name, every in self._every.items() if step == total or (every and step % every == 0)}
                if due or stop:
                    self._after(step, state, due | ({"save"} if stop else set()), bar)
                if stop and step < total:
                    name = signal.Signals(stop).name
                    raise Stopped(f"{name}: stopped after step {step} of {total}, saved in {run.workdir}")
        return state

    def _step(self, step: int, state: StrategyState, loader: Iterator[dict[str, np.ndarray]]) -> StrategyState:
        phases, strategy = self._run.phases, self._run.strategy
        with phases("input"):
            batch = next(loader)
            self._books.add(step - 1, batch.pop("example_ids"))
        with phases("compile" if self._meter.is_new(batch) else "train"):
            state, step_metrics = strategy.step(state, strategy.place(batch))
            self._meter.add(step, batch, step_metrics)
        return state

    def _after(self, step: int, state: StrategyState, due: set[str], bar: Progress) -> None:
        run = self._run
        with run.phases("train"):
            self._meter.read()  # so that nothing below is of a step that failed
        if "log" in due:
            results = self._meter.metrics(self._clock()) | {"learning_rate": float(run.schedule(step - 1))}
            self._log.write(step, "train", results)
            bar.log(step, results, ["loss", run.problem.task.curve])
        validation_loss = None
        if "eval" in due and run.dataset.validation:
            results = evaluate_split(run, state, run.dataset.validation)
            self._log.write(step, "validation", results)
            bar.print_line(f"step {step}/{run.num_steps}  validation {metrics.format_metrics(results)}")
            validation_loss = results["loss"]
        is_best = validation_loss is not None and validation_loss < self._best_loss
        if "save" in due or (is_best and run.config.checkpoint.keep_best):
            self._save(step, state, validation_loss)
        if validation_loss is not None and is_best:
            self._best_loss = validation_loss

    def _save(self, step: int, state: StrategyState, validation_loss: float | None) -> None:
        run = self._run
        with run.phases("checkpoint"):
            self._books.write()  # before the checkpoint: lines of steps that none has are cut
            tree, private = run.strategy.to_canonical(state), run.strategy.to_private(state)
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
        shares=size // len(range(size)[processes.local_shard(devices, run.plan.num_replicas, size)]),
    )


def open_ledger(run: Run) -> ledger.Ledger:
    """Return the ledger of the examples that this process counts."""
    devices, size = run.strategy.devices, run.config.batch_size
    local, counted = (
        shard(devices, run.plan.num_replicas, size) for shard in (processes.local_shard, processes.counted_shard)
    )
    return ledger.Ledger(
        run.workdir / "ledger", steps_per_epoch=run.batches.steps_per_epoch, shard=counted, first=local.start
    )


def save_info(run: Run, step: int) -> Info:
    """Return what a checkpoint holds besides its arrays."""
    return {
        "data": run.dataset.fingerprint,
        "examples": run.batches.examples_before(step),
        "config": configs.keys(run.config),
        "private_key": dict(run.plan.private_key),
    }
