"""Training from a config to a result: build, restore, loop, save, report.

Nothing here asks which strategy it runs. All that is on devices goes through the functions of
`jaxpar.strategies.Strategy`; the arithmetic of a step is in jaxpar/step.py.
"""

import contextlib
import json
import math
import shutil
import signal
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpar import (
    checkpoint,
    data,
    files,
    flops,
    ledger,
    mesh,
    metrics,
    models,
    optimizer,
    processes,
    report,
    resume,
    state,
    strategies,
    tasks,
    watchdog,
)
from jaxpar import config as configs
from jaxpar.errors import UserError
from jaxpar.interrupt import Interrupt
from jaxpar.meter import Meter
from jaxpar.metrics import Progress
from jaxpar.models import Params, hf
from jaxpar.step import Problem, abstract
from jaxpar.strategies import Strategy
from jaxpar.watchdog import Watchdog


class Stopped(Exception):
    """The run was asked to stop, and did so with everything saved."""


class Run(NamedTuple):
    """Everything a run is made of, built from its config."""

    config: ConfigDict
    workdir: Path
    dataset: data.Dataset
    batches: data.Batches
    problem: Problem
    pretrained: Params | None  # abstract leaves: what it lacks
    strategy: Strategy
    schedule: optimizer.Schedule
    num_steps: int
    phases: metrics.Phases


def train(config: ConfigDict, workdir: Path) -> dict[str, Any]:
    """Trains as `config` says, continuing what `workdir` holds, and returns what it writes to result.json.

    Raises:
      UserError: a mistake in the config, the data or the workdir; nothing was compiled or lost.
      Stopped: SIGTERM or Ctrl-C came; the state is saved.
    """
    check(config, workdir)
    with files.locked(workdir) if processes.is_first() else contextlib.nullcontext():
        return _train(config, workdir)


def _train(config: ConfigDict, workdir: Path) -> dict[str, Any]:
    phases = metrics.Phases()
    with phases("setup"):
        run = build(config, workdir, phases)
        print(describe(run), flush=True)
    with Watchdog(config.watchdog_seconds, phases):
        with Interrupt() as interrupt:
            result = run_through(run, interrupt)
        result["seconds"] = {name: round(seconds, 2) for name, seconds in phases.seconds.items()}
        processes.wait("the ledger is written")
        if processes.is_first():
            result["ledger"] = ledger.verify(workdir / "ledger", run.batches, run.num_steps)
            print(f"ledger    {result['ledger']}", flush=True)
            report.write_result(workdir, result)
    return result


def run_through(run: Run, interrupt: Interrupt) -> dict[str, Any]:
    """From what the workdir holds to the last step, everything saved."""
    config, workdir, phases = run.config, run.workdir, run.phases
    with phases("start"):
        current, first_step = start(run)
        processes.wait("a checkpoint was read")
        if processes.is_first():
            checkpoint.set_aside(workdir / "checkpoints", after=first_step)
            ledger.cut(workdir / "ledger", after=first_step)
        processes.wait("damaged ones are set aside")
    saver = checkpoint.Saver(
        workdir / "checkpoints", keep=config.checkpoint.keep, keep_best=config.checkpoint.keep_best
    )
    books = open_ledger(run)
    log = metrics.Log(workdir, first_step=first_step, tensorboard=config.log.tensorboard)
    try:
        current = loop(run, current, first_step, saver, log, books, interrupt)
        return finish(run, current, log)
    finally:
        log.close()
        with phases("checkpoint"):
            saver.close()


# ---- build --------------------------------------------------------------------------------------


def check(config: ConfigDict, workdir: Path) -> None:
    """Raises UserError for whatever can be known to fail before data is read and programs are compiled."""
    if config.model.init_from:
        hf.apply_directory(config)
    data.check(config)
    models.check(config)
    optimizer.check(config)
    strategies.check(config)
    if config.checkpoint.keep < 1:
        raise UserError(f"config.checkpoint.keep is {config.checkpoint.keep}; it may be 1 or more")
    for key in ("eval.every_steps", "checkpoint.every_steps"):
        section, _, name = key.partition(".")
        if config[section][name] < 0:
            raise UserError(f"config.{key} is {config[section][name]}; it may be 0 or more")
    if config.log.every_steps < 1:
        raise UserError(f"config.log.every_steps is {config.log.every_steps}; it may be 1 or more")
    if config.num_steps < 0 or (config.num_steps == 0 and not 0 < config.num_epochs < math.inf):
        raise UserError(
            f"config.num_steps is {config.num_steps} and config.num_epochs {config.num_epochs}; one must be positive"
        )
    if not 0 <= config.seed < 2**31:
        raise UserError(f"config.seed is {config.seed}; it may be 0 to {2**31 - 1}")
    if len(config.profile) != 2 or not 0 <= config.profile[0] <= config.profile[1]:
        raise UserError(f"config.profile is {config.profile}; it may be (first step, last step), or (0, 0) for none")
    watchdog.check(config.watchdog_seconds)
    resume.check(config, workdir)


def build(config: ConfigDict, workdir: Path, phases: metrics.Phases) -> Run:
    """Data, model, optimizer and strategy."""
    with processes.first_then_others("data"):
        if processes.is_first() and not (workdir / "config.json").exists():
            (workdir / "tokenizer.json").unlink(missing_ok=True)  # without a run it is what a start that failed left
        dataset = data.load(config, workdir)
    batches = data.Batches(dataset.train, batch_size=config.batch_size, seed=config.seed, shuffle=True)
    num_steps = config.num_steps or math.ceil(config.num_epochs * batches.steps_per_epoch)
    schedule = optimizer.build_schedule(config, num_steps)
    model = models.build(config, dataset.info)
    pretrained = None
    if config.model.init_from and not checkpoint.steps(workdir / "checkpoints"):
        pretrained = hf.load_params(model, model.shapes, Path(config.model.init_from).expanduser())
    longest = abstract(batches.longest())
    problem = Problem(model, optimizer.build(config, schedule), config.optimizer.accumulation_steps, longest, num_steps)
    strategy = strategies.build(config, problem)
    check_space(config, workdir, problem)
    if processes.is_first():
        configs.save(config, workdir)
        files.write_text(workdir / "data.json", json.dumps(dataset.info._asdict(), indent=1) + "\n")
    return Run(config, workdir, dataset, batches, problem, pretrained, strategy, schedule, num_steps, phases)


def check_space(config: ConfigDict, workdir: Path, problem: Problem) -> None:
    """Raises UserError where the disk cannot hold the checkpoints that are kept, and the one being written.

    What a strategy has of its own comes on top, and is not counted.
    """
    number = config.checkpoint.keep + config.checkpoint.keep_best + 1
    there = len(checkpoint.steps(workdir / "checkpoints"))
    whole = jax.eval_shape(lambda key: state.init(problem.model, problem.optimizer, key), jax.random.key(0))
    needed = max(number - there, 1) * state.nbytes((whole.params, whole.optimizer))
    free = shutil.disk_usage(workdir).free
    if needed > free:
        raise UserError(
            f"--workdir={workdir}: the disk has {free / 1e6:.0f} MB free, {number} checkpoints need "
            f"{needed / 1e6:.0f} MB; free space or lower config.checkpoint.keep"
        )


def describe(run: Run) -> str:
    """What will run, where, in a few lines."""
    config, on, model = run.config, run.strategy.describe(), run.problem.model
    kinds = ", ".join(sorted({device.device_kind for device in on.devices}))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(model.shapes))
    ends = f"{model.layers[0].name} .. {model.layers[-2].name}, {model.layers[-1].name}"
    splits = zip(("training", "validation", "test"), run.dataset[1:4], strict=True)
    where = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    sizes = ", ".join(f"{len(split) if split else 0:,} {name}" for name, split in splits)
    lines = {
        "platform": f"{jax.default_backend()}, {jax.device_count()} devices{where} ({kinds}), jax {jax.__version__}",
        "mesh": f"{mesh.DATA}={on.num_replicas}, {config.strategy}: {on.layout}",
        "": f"{on.state_bytes / 1e6:.1f} MB of state on a device, {on.wire_bytes / 1e6:.1f} MB sent by it in a step",
        "model": f"{config.model.name}, layers {ends}, {parameters:,} parameters, {config.model.dtype}",
        "data": f"{config.data.source}, {config.task}: {sizes} examples",
        "run": f"{run.num_steps:,} steps of {config.batch_size} examples, in {run.workdir}",
    }
    return "\n".join(f"{name:9} {text}" for name, text in lines.items())


# ---- restore ------------------------------------------------------------------------------------


def start(run: Run) -> tuple[Any, int]:
    """The strategy's state and the number of steps it has behind it: of the newest whole checkpoint, or a fresh one."""
    like = jax.eval_shape(
        lambda key: state.to_canonical(state.init(run.problem.model, run.problem.optimizer, key)), jax.random.key(0)
    )
    found = checkpoint.restore(run.workdir / "checkpoints", like, say=print)
    processes.check_same(f"the newest whole checkpoint (-1: none) in {run.workdir}", found.step if found else -1)
    if found is None:
        return fresh(run), 0
    before = check_continued(run, found)
    print(f"resume    from step {found.step:,}", flush=True)
    for change in resume.differences(before, run.config).values():
        print(f"changed   {change}", flush=True)
    private_of = found.info.get("private_of", "")
    is_own = private_of == run.strategy.private_of
    if found.private and not is_own:
        now = run.strategy.private_of or f"strategy {run.config.strategy}"
        print(f"private   state of {private_of} is left behind: this is {now}", flush=True)
    return run.strategy.from_canonical(found.tree, found.private if is_own else {}), found.step


def check_continued(run: Run, found: checkpoint.Checkpoint) -> Mapping[str, Any]:
    """The config of the run that wrote the checkpoint. Raises UserError where this run does not continue that one."""
    where = f"the checkpoint of step {found.step} in {run.workdir}"
    before: Mapping[str, Any] = found.info.get("config", configs.keys(run.config))  # the first ones had none
    resume.check_same(before, run.config, f"{where} is of")
    if found.info["data"] != run.dataset.fingerprint:
        raise UserError(f"the data changed since {where}; give a new --workdir")
    if found.step > run.num_steps:
        config = run.config
        raise UserError(
            f"config.num_steps is {config.num_steps} and config.num_epochs {config.num_epochs}: {run.num_steps} steps, "
            f"and {where} is past them; give more, or a new --workdir"
        )
    return before


def fresh(run: Run) -> Any:
    """The strategy's state at step 0, with pretrained parameters where there are some."""
    fresh = run.strategy.init(jax.random.key(run.config.seed))
    if run.pretrained is None:
        return fresh
    tree = run.strategy.to_canonical(fresh)
    tree["params"] = jax.tree.map(
        lambda ours, theirs: ours if isinstance(theirs, jax.ShapeDtypeStruct) else theirs,
        tree["params"],
        run.pretrained,
    )
    return run.strategy.from_canonical(tree)


# ---- loop ---------------------------------------------------------------------------------------


def loop(
    run: Run,
    current: Any,
    first_step: int,
    saver: checkpoint.Saver,
    log: metrics.Log,
    books: ledger.Ledger,
    interrupt: Interrupt,
) -> Any:
    """Steps first_step to num_steps. Two are in flight: the figures of one are read while the next computes.

    A log interval in which the run was stopped and resumed tells of the steps since it resumed.
    """
    config, phases, total = run.config, run.phases, run.num_steps
    every_eval = (config.eval.every_steps or run.batches.steps_per_epoch) if run.dataset.validation else 0
    every = {"log": config.log.every_steps, "eval": every_eval, "save": config.checkpoint.every_steps}
    agree = processes.Agreement()
    best_loss = min((row["loss"] for row in log.rows("validation")), default=math.inf)
    meter = build_meter(run)
    clock = phases.clock("train", "input")
    with (
        metrics.Trace(config.profile, run.workdir) as trace,
        Progress(first_step, total) as bar,
    ):
        loader = load(run, run.batches, first_step, total, numbered=True)
        for step in range(first_step + 1, total + 1):
            phases.step = step
            trace.before(step)
            with phases("input"):
                rows = next(loader)
                books.add(step - 1, rows.pop("examples"))
            with phases("compile" if meter.is_new(rows) else "train"):
                current, step_metrics = run.strategy.step(current, run.strategy.place(rows))
                meter.add(step, rows, step_metrics)
            bar.advance(meter.loss)

            stop = agree(interrupt.requested or 0)
            due = {name for name, steps in every.items() if step == total or (steps and step % steps == 0)}
            if not due and not stop:
                continue
            with phases("train"):
                meter.read()  # so that nothing below is of a step that failed
            if "log" in due:
                figures = meter.figures(clock()) | {"learning_rate": float(run.schedule(step - 1))}
                log.write(step, "train", figures)
                bar.log(step, figures)
            validation_loss = None
            if "eval" in due and run.dataset.validation:
                figures = evaluate(run, current, run.dataset.validation)
                log.write(step, "validation", figures)
                bar.say(f"step {step}/{total}  validation " + in_words(figures))
                validation_loss = figures["loss"]
            is_best = config.checkpoint.keep_best and validation_loss is not None and validation_loss < best_loss
            if "save" in due or stop or is_best:
                with phases("checkpoint"):
                    books.write()  # before the checkpoint: lines of steps that none has are cut
                    tree, private = run.strategy.to_canonical(current), run.strategy.to_private(current)
                    saver.save(tree, save_info(run, step), validation_loss, private=private)
            best_loss = min(best_loss, math.inf if validation_loss is None else validation_loss)
            if stop and step < total:
                raise Stopped(
                    f"{signal.Signals(stop).name}: stopped after step {step} of {total}, saved in {run.workdir}"
                )
    return current


def load(
    run: Run, batches: data.Batches, start: int, stop: int, *, numbered: bool = False
) -> Iterator[dict[str, np.ndarray]]:
    """Batches start to stop, this process's rows of them, made in the background. numbered: see data.Batches.batch."""
    c, on = run.config.data, run.strategy.describe()
    rows = processes.own_rows(on.devices, on.num_replicas, batches.batch_size)
    return batches.loader(start, stop, rows=rows, numbered=numbered, num_threads=c.num_threads, prefetch=c.prefetch)


def open_ledger(run: Run) -> ledger.Ledger:
    """Of the rows of batches that this process counts."""
    on, size = run.strategy.describe(), run.config.batch_size
    own, counted = (rows(on.devices, on.num_replicas, size) for rows in (processes.own_rows, processes.counted_rows))
    return ledger.Ledger(
        run.workdir / "ledger", steps_per_epoch=run.batches.steps_per_epoch, rows=counted, first_row=own.start
    )


def build_meter(run: Run) -> Meter:
    """The meter of this run's model on this run's devices."""
    on, size = run.strategy.describe(), run.config.batch_size
    peak = run.config.log.peak_flops or flops.peak_flops(on.devices[0].device_kind, run.config.model.dtype)
    return Meter(
        run.problem.model,
        task=run.config.task,
        peak_flops=peak * len(on.devices) if peak else None,
        stop_if_nonfinite=run.config.optimizer.nonfinite == "stop",
        shares=size // len(range(size)[processes.own_rows(on.devices, on.num_replicas, size)]),
    )


def save_info(run: Run, step: int) -> dict[str, Any]:
    """What a checkpoint says besides its arrays."""
    return {
        "data": run.dataset.fingerprint,
        "examples": run.batches.examples_before(step),
        "config": configs.keys(run.config),
        "private_of": run.strategy.private_of,
    }


def evaluate(run: Run, current: Any, split: data.Split) -> dict[str, float]:
    """The figures of all of `split`."""
    size = run.config.eval.batch_size or run.config.batch_size
    batches = data.Batches(split, batch_size=size, seed=run.config.seed, shuffle=False)
    with run.phases("eval"):
        loader = load(run, batches, 0, batches.steps_per_epoch)
        sums = []
        for rows in loader:
            sums.append(run.strategy.evaluate(current, run.strategy.place(rows)))
            run.phases.alive()
        totals = np.asarray(jax.device_get(sums), np.float64).sum(axis=0)
    return tasks.figures(run.config.task, *totals)


# ---- report -------------------------------------------------------------------------------------


def in_words(figures: dict[str, float]) -> str:
    """`loss 0.1234  accuracy 0.5678`."""
    return "  ".join(f"{name} {value:.4f}" for name, value in figures.items())


def finish(run: Run, current: Any, log: metrics.Log) -> dict[str, Any]:
    """Evaluates on the test split, draws the curves and puts the result together."""
    result: dict[str, Any] = {}
    if run.dataset.test:
        figures = evaluate(run, current, run.dataset.test)
        log.write(run.num_steps, "test", figures)
        print(f"test      {in_words(figures)}", flush=True)
        result = {name if name == "perplexity" else f"test_{name}": value for name, value in figures.items()}
    trained = [row for row in log.rows("train") if "loss" in row]
    names = ("examples_per_second", "tokens_per_second", "model_flops_per_second", "mfu")
    rates = {name: [row[name] for row in trained if name in row] for name in names}
    description = run.strategy.describe()
    result |= {
        "train_loss": trained[-1]["loss"] if trained else None,
        "steps": run.num_steps,
        "examples": run.batches.examples_before(run.num_steps),
        **{name: statistics.median(values) for name, values in rates.items() if values},
        "strategy": run.config.strategy,
        "devices": [str(device) for device in description.devices],
        "device_kind": description.devices[0].device_kind,
        "state_bytes": description.state_bytes,
        "wire_bytes": description.wire_bytes,
    }
    if processes.is_first():
        result |= run.strategy.report(current, run.workdir)
        report.draw_curves(run.workdir, f"{run.config.model.name} on {run.config.data.source}, {run.config.strategy}")
    return result
