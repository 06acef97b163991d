"""Checks a config and builds the parts of a run from it: data, model, optimizer, plan and strategy."""

import contextlib
import json
import math
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from jaxpar import checkpoint, data, models, strategies, tasks
from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar.cluster import Cluster
from jaxpar.core import optimizer, state
from jaxpar.core.plan import Decision, Plan
from jaxpar.core.step import Problem, abstract
from jaxpar.errors import UserError, format_bytes, format_count, is_refused
from jaxpar.host_memory import check_host_memory
from jaxpar.launch import processes, watchdog
from jaxpar.measure.phases import Phases
from jaxpar.models import Params, hf
from jaxpar.models.model import Model
from jaxpar.run import resume
from jaxpar.run.callbacks import check_early_stop
from jaxpar.run.unused import describe_unused
from jaxpar.strategies import Strategy

# Paths, which can differ between the processes of a run. The contents of the files must be the same.
PLACES = ("data.train", "data.validation", "data.test", "data.tokenizer", "model.init_from", "cache_dir")


StrategyState = Any  # the state in the form of the run's strategy
MAX_STEPS = 2**31 - 1  # the step counter is an int32
# Steps of a run that learns little, and of one for which flags are advised: from scratch, and from pretrained weights.
FROM_SCRATCH, FINE_TUNING = (100, 250), (40, 80)
SMALLEST_BATCH = 16  # that is advised, unless the devices need a larger one
PREPARATION = 3  # size of the temporary arrays with which a batch of text is prepared, in batches
Result = dict[str, Any]  # the contents of result.json


class Run(NamedTuple):
    """The parts of a run, built from its config."""

    config: ConfigDict
    workdir: Path
    dataset: data.Dataset
    batches: data.Batches
    problem: Problem
    pretrained: Params | None  # arrays that the checkpoint lacks are abstract leaves
    cluster: Cluster
    strategy: Strategy[Any]
    learning_rate: optimizer.LearningRate
    num_steps: int
    phases: Phases

    @property
    def plan(self) -> Plan[object]:
        """The plan from which the strategy was built."""
        return self.strategy.plan


class Checked(NamedTuple):
    """The results of `check_run`, known before the data is read."""

    cluster: Cluster
    decision: Decision[Any]


class Parts(NamedTuple):
    """The parts of a run that do not depend on its strategy."""

    dataset: data.Dataset
    batches: data.Batches
    problem: Problem
    pretrained: Params | None
    learning_rate: optimizer.LearningRate
    num_steps: int


def check_inputs(config: ConfigDict, cluster: Cluster) -> Model | None:
    """Check data and model, and return the model; None if it is not known before the data is read."""
    configs.check_no_nan(config)
    if config.model.init_from:
        hf.apply_directory(config)
    data.check_data(config, tasks.find_task(config).labels)
    return models.check_model(config, cluster)


def check_run(config: ConfigDict, workdir: Path, cluster: Cluster | None = None) -> Checked:
    """Raise UserError for any mistake that can be found before data is read. cluster: None for that of this run."""
    cluster = cluster or clusters.find_cluster()
    model = check_inputs(config, cluster)
    decision = strategies.decide(config, cluster, model)
    strategies.check_other_sections(config, [layer.name for layer in model.layers] if model else [])
    at_least = {"checkpoint.keep": 1, "log.every_steps": 1}
    at_least |= {"eval.every_steps": 0, "checkpoint.every_steps": 0, "certify_every": 0}
    values, profile = configs.keys(config), config.profile
    configs.check_rules(config, [(key, values[key] >= least, f"at least {least}") for key, least in at_least.items()])
    check_early_stop(config)
    if config.num_steps < 0 or not 0 <= config.num_epochs < math.inf or config.num_steps == config.num_epochs == 0:
        raise UserError(
            f"config.num_steps is {config.num_steps} and config.num_epochs is {config.num_epochs}; both must be finite "
            "and at least 0, and one of them positive"
        )
    is_range = len(profile) == 2 and min(profile[1], 1) <= profile[0] <= profile[1]
    rules: list[configs.KeyRule] = [
        ("log.peak_flops", 0 <= config.log.peak_flops < math.inf, "finite and at least 0 (0: from the table)"),
        ("num_steps", config.num_steps <= MAX_STEPS, f"at most {MAX_STEPS:,}"),
        ("num_epochs", config.num_epochs <= MAX_STEPS, f"at most {MAX_STEPS:,}"),
        ("profile", is_range, "(first step, last step), or (0, 0) to profile nothing"),
    ]
    configs.check_rules(config, rules)
    watchdog.check_seconds(config.watchdog_seconds)
    resume.check_resumable(config, workdir)
    return Checked(cluster, decision)


def make_run(
    config: ConfigDict,
    workdir: Path,
    phases: Phases,
    checked: Checked | None = None,
    dataset: data.Dataset | None = None,
) -> Run:
    """Build data, model, optimizer, plan and strategy from a config without any `auto`.

    checked: the result of `check_run`, or None. dataset: the data, if it was read before.

    Raises UserError if the strategy cannot train, or disk or host memory are too small.
    """
    cluster = checked.cluster if checked else clusters.find_cluster()
    decision = checked.decision if checked else strategies.decide(config, cluster)
    with unless_refused(workdir, "tokenizer.json"):
        parts = load_parts(config, workdir, cluster, dataset)
        plan = strategies.plan(config, parts.problem, cluster, decision)
        strategy = strategies.build(plan, parts.problem, clusters.devices())
        check_space(config, workdir, parts.problem)
        check_batches(config, parts.dataset, strategy, parts.num_steps)
    return Run(config=config, workdir=workdir, cluster=cluster, strategy=strategy, phases=phases, **parts._asdict())


@contextlib.contextmanager
def unless_refused(workdir: Path, name: str) -> Iterator[None]:
    """Remove a file that is prepared in the `with` block if it raises UserError, and the workdir contains no run."""
    try:
        yield
    except UserError:
        if processes.is_first() and not contains_run(workdir):
            (workdir / name).unlink(missing_ok=True)
        raise


def load_parts(config: ConfigDict, workdir: Path, cluster: Cluster, dataset: data.Dataset | None = None) -> Parts:
    """Read the data, and build the model and the optimizer. dataset: the data, if it was read before."""
    task = tasks.find_task(config)
    if dataset is None:
        with processes.first_then_others("data"):
            if processes.is_first() and not contains_run(workdir):
                (workdir / "tokenizer.json").unlink(missing_ok=True)  # left over from a start that failed
            dataset = data.load(config, task.labels, workdir)
    check_alike(config, dataset.fingerprint, workdir)
    can_stop = not config.early_stop.patience or bool(dataset.validation)
    zero = "0, because the validation split, whose loss it needs, has no examples"
    configs.check_rules(config, [("early_stop.patience", can_stop, zero)])
    size, padded = config.batch_size, strategies.padded_batch_size(config, cluster)
    batches = data.Batches(dataset.train, batch_size=size, seed=config.seed, shuffle=True, padded_size=padded)
    num_steps = config.num_steps or math.ceil(config.num_epochs * batches.steps_per_epoch)
    if num_steps > MAX_STEPS:
        raise UserError(
            f"config.num_epochs is {config.num_epochs}, which is {num_steps:.3g} steps; it must be at most "
            f"{MAX_STEPS / batches.steps_per_epoch:,.0f} ({MAX_STEPS:,} steps)"
        )
    if config.profile[1] > num_steps:
        raise UserError(f"config.profile is {config.profile}; it must be at most {num_steps}, the last step of the run")
    learning_rate = optimizer.build_learning_rate(config, num_steps)
    model = models.build(config, dataset.info, cluster)
    pretrained = None
    if config.model.init_from and not checkpoint.steps(workdir / "checkpoints"):
        pretrained = hf.load_params(model, model.shapes, Path(config.model.init_from).expanduser(), dataset.info)
    transform, accumulation = optimizer.make_optimizer(config, learning_rate), config.optimizer.accumulation_steps
    problem = Problem(model, transform, accumulation, abstract(batches.longest()), num_steps, task)
    return Parts(dataset, batches, problem, pretrained, learning_rate, num_steps)


def contains_run(workdir: Path) -> bool:
    """Return whether `workdir` contains a run."""
    return (workdir / "config.json").exists() or bool(checkpoint.steps(workdir / "checkpoints"))


def check_alike(config: ConfigDict, fingerprint: str, workdir: Path) -> None:
    """Raise UserError in all processes if any has another config, data or workdir than process 0."""
    if jax.process_count() == 1:
        return
    mark = workdir / f".mark-{uuid.uuid4().hex}"
    local = {"config": configs.keys(config), "data": fingerprint, "mark": mark.name}
    if processes.is_first():
        mark.touch()
    first = json.loads(processes.from_first(json.dumps(local)))
    changed = [text for key, text in resume.differences(first["config"], config).items() if key not in PLACES]
    if first["data"] != fingerprint:
        changed.append("the data, of which all processes must read the same examples")
    if not (workdir / first["mark"]).exists():
        changed.append(f"--workdir is {str(workdir)!r}, which is another folder")
    differ = processes.any_of(bool(changed))
    if processes.is_first():
        mark.unlink()
    if differ:
        number = jax.process_index()
        this = f"process {number} differs from process 0: {'; '.join(changed)} (process 0 -> process {number})"
        raise UserError(this if changed else "another process differs from process 0; see the error of that process")


def check_space(config: ConfigDict, workdir: Path, problem: Problem) -> None:
    """Raise UserError if the disk cannot hold the checkpoints to keep and the next one, without private states."""
    number = min(config.checkpoint.keep, problem.num_steps) + config.checkpoint.keep_best + 1
    existing = checkpoint.steps(workdir / "checkpoints")
    whole = state.abstract_state(problem.model, problem.optimizer)
    missing = max(number - len(existing), 1)
    needed = missing * state.nbytes((whole.params, whole.optimizer))
    free = shutil.disk_usage(workdir).free + checkpoint.unfinished_bytes(workdir / "checkpoints")
    if needed > free:
        has = f"; {workdir}/checkpoints contains steps {', '.join(map(str, existing))}" if existing else ""
        raise UserError(
            f"--workdir is {str(workdir)!r}, on a disk with {format_bytes(free)} free; it must have "
            f"{format_bytes(needed)} free, for {missing} of {number} checkpoints{has}; free space or lower "
            "config.checkpoint.keep"
        )


def check_batches(config: ConfigDict, dataset: data.Dataset, strategy: Strategy[Any], num_steps: int) -> None:
    """Raise UserError if the batches that a process prepares ahead do not fit into host memory."""
    eval_key = "eval.batch_size" if config.eval.batch_size else "batch_size"
    for key, split in (("batch_size", dataset.train), (eval_key, dataset.validation), (eval_key, dataset.test)):
        if split is None:
            continue
        size = config.eval.batch_size if key == "eval.batch_size" else config.batch_size
        batches = data.Batches(split, batch_size=size, seed=config.seed, shuffle=False)
        shard = processes.local_shard(strategy.devices, strategy.plan.num_replicas, size)
        nbytes = sum(x.nbytes for x in batches.longest().values()) * len(range(size)[shard]) // size
        steps = num_steps if split is dataset.train else batches.steps_per_epoch
        number = min((config.data.prefetch if config.data.num_threads else 0) + 1, steps)
        needed = (number + PREPARATION) * nbytes
        check_host_memory(f"config.{key} is {size}", needed, f"preparing and holding {format_count(number, 'batch')}")


def split_sizes(dataset: data.Dataset) -> dict[str, int]:
    """Return the number of examples of each split."""
    splits = zip(("training", "validation", "test"), dataset[1:4], strict=True)
    return {name: len(split) if split else 0 for name, split in splits}


def advise_length(config: ConfigDict, num_examples: int, num_steps: int, divisor: int = 1) -> str:
    """Return the flags for a longer run if the epochs of a config are few steps; empty if they are not."""
    few, enough = FINE_TUNING if config.model.init_from else FROM_SCRATCH
    if config.num_steps or num_steps >= few:
        return ""
    size, wanted = config.batch_size, max(num_examples // 12, SMALLEST_BATCH)
    if wanted < size:
        rounded = 1 << wanted.bit_length() - 1
        size = min(size, -(-rounded // divisor) * divisor)
    epochs = math.ceil(enough / math.ceil(num_examples / size) / 5) * 5
    flags = f"--config.batch_size={size} " if size < config.batch_size else ""
    too_few = f"{format_count(num_steps, 'step')} {'is' if num_steps == 1 else 'are'} too few"
    return f"{too_few}; train longer, in a new workdir, with {flags}--config.num_epochs={epochs}"


def changes_to_try(config: ConfigDict) -> list[str]:
    """Return flags for runs to compare with a run of `config`. Each of them, added alone, is possible."""
    flags, found = [], clusters.find_cluster()
    other = config.copy_and_resolve_references()
    other.strategy = "data_parallel" if config.strategy == "single" else "single"
    if found.num_devices > 1 and not is_refused(strategies.decide, other, found):
        flags.append(f"--config.strategy={other.strategy}")
    if (config.model.name, config.model.size, config.model.init_from) == ("bert", "tiny", ""):
        flags.append("--config.model.size=mini")
    return flags


def next_steps(config: ConfigDict) -> list[str]:
    """Return what a user can do after a run, in phrases."""
    changes = changes_to_try(config)
    own = ", or train on your own data (docs/howto/data.md)" if config.data.source in ("wordnet", "synthetic") else ""
    page = "generate.md" if config.task == "causal_lm" else "predict.md"
    use = f"use the model (docs/howto/{page}, serve.md){own}"
    return [f"to compare, try {' or '.join(changes)} with a new --workdir", use] if changes else [use]


def describe_run(run: Run) -> str:
    """Return the header of a run: devices, strategy, model, data and length."""
    config, plan, cluster, problem = run.config, run.plan, run.cluster, run.problem
    kinds = ", ".join(sorted({device.device_kind for device in run.strategy.devices}))
    processes_text = f" in {cluster.num_processes} processes" if cluster.num_processes > 1 else ""
    sizes = ", ".join(f"{size:,} {name}" for name, size in split_sizes(run.dataset).items())
    replicas = format_count(plan.num_replicas, "replica")
    others = [("unused", describe_unused(config)), ("advice", plan.advice)]
    if not contains_run(run.workdir):
        length = advise_length(config, len(run.dataset.train), run.num_steps, plan.decision.batch_divisor)
        others.append(("advice", length))
    lines = {  # the launcher waits for the first one
        "platform": f"{cluster.platform}, {format_count(cluster.num_devices, 'device')}{processes_text} ({kinds}), "
        f"jax {jax.__version__}",
        "strategy": f"{config.strategy}, {replicas}: {plan.summary}",
        "memory": f"{format_bytes(plan.state_bytes)} of state per device",
        "traffic": f"{format_bytes(plan.wire_bytes)} sent per device per step",
        "model": models.describe_model(config, problem.model, problem.batch),
        "data": f"{config.data.source}, {problem.task.name}: {sizes} examples",
        "run": f"{format_count(run.num_steps, 'step')} of {config.batch_size} examples in {run.workdir}",
    }
    return "\n".join(f"{name:9} {text}" for name, text in [*lines.items(), *others] if text)
