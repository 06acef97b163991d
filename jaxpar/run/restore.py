"""Starts or resumes a run from the newest intact checkpoint in the workdir, and prepares its files."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar import checkpoint, data
from jaxpar import config as configs
from jaxpar.checkpoint import ledger
from jaxpar.checkpoint.checksums import Info
from jaxpar.core import state
from jaxpar.core.plan import format_private_key
from jaxpar.core.state import Canonical
from jaxpar.errors import UserError, format_count
from jaxpar.launch import processes
from jaxpar.launch.elastic import read_kept
from jaxpar.launch.place import Survivor, find_survivor
from jaxpar.run import resume
from jaxpar.run.build import Run, StrategyState
from jaxpar.run.history import record_start

# Policy, workers and mitigations in earlier private keys, such as `live async of 4 workers with dc_asgd`.
WORKERS = re.compile(r"(?:live )?(\w+) of (\d+) workers(?: with (.+))?")


class Past(NamedTuple):
    """The record of the steps before a start."""

    step: int  # the number of completed steps
    # each private state that a start discarded: {"step", "private_state", "batches"}, the completed steps, the settings
    # of the state, and the number of the last batches whose gradients some weights never get
    discarded: Sequence[Mapping[str, Any]] = ()
    # the log interval in which it was saved (`Meter.interval`); empty if a checkpoint lacks it
    interval: Mapping[str, Any] = {}
    lost: str = ""  # which processes were lost at this start, and how long that took; empty if none were
    is_new: bool = False  # whether the run has no steps of its own before this one


def survived(like: Canonical) -> checkpoint.Checkpoint | None:
    """Return the state that process 0 kept before this process survived others, or None.

    like: tree with the structure, shapes and dtypes of the state.
    """
    survivor = find_survivor()
    if survivor is None:
        return None
    kept: checkpoint.Checkpoint | None = read_kept(survivor)
    found = json.loads(processes.from_first(json.dumps(kept and [kept.step, kept.info])))
    if found is None:
        return None
    step, info = found
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    return checkpoint.Checkpoint(step, processes.from_first_process(kept.tree if kept else zeros), {}, info)


def describe_survivor(survivor: Survivor | None) -> str:
    """Return which processes were lost, and how long ago they completed a step; empty if none were."""
    if survivor is None:
        return ""
    plural = "es" if len(survivor.lost) > 1 else ""
    lost = f"process{plural} {', '.join(map(str, survivor.lost))}"
    left = f"{survivor.place.num_processes} left, numbers {', '.join(map(str, survivor.numbers))}"
    return f"{lost}; {left}; {time.time() - survivor.since:.1f} s since the last step"


def start(run: Run) -> tuple[StrategyState, Past]:
    """Return the strategy's state, from the newest intact checkpoint or fresh, and the record of earlier steps."""
    like = state.to_canonical(state.abstract_state(run.problem.model, run.problem.optimizer))
    kept, lost = survived(like), describe_survivor(find_survivor())
    if lost:
        print(f"lost      {lost}", flush=True)
    saved = kept or checkpoint.restore(run.workdir / "checkpoints", like, log=print)
    processes.check_same_value(f"the newest intact checkpoint (-1: none) in {run.workdir}", saved.step if saved else -1)
    if saved is None:
        joined, step = run.strategy.begin(fresh(run), 0, run.workdir)
        if (run.workdir / "metrics.jsonl").exists():
            print(f"restarted from step {step}, because {run.workdir}/checkpoints contains no checkpoint", flush=True)
        return joined, Past(step, lost=lost, is_new=True)
    before = check_continued(run, saved)
    if saved.step < run.num_steps:
        print(f"resumed   from step {saved.step:,}{', which was kept in memory' if kept else ''}", flush=True)
    for key, change in resume.differences(before, run.config).items():
        if key != "chosen":  # what is chosen was printed with its reasons
            print(f"changed   {change}", flush=True)
    private_key = saved_private_key(saved.info)
    is_continued = private_key == dict(run.plan.private_key)
    # Checkpoints of earlier versions lack some keys of the info.
    discarded, number = list(saved.info.get("discarded", ())), saved.info.get("in_flight", 0)
    if saved.private and not is_continued:
        now = format_private_key(run.plan.private_key) or run.plan.exchange or f"strategy {run.config.strategy}"
        name = format_private_key(private_key)
        batches = f", with {format_count(number, 'batch')} in flight, whose gradients are lost" if number else ""
        print(f"discarded private state of {name}{batches}; this run uses {now}", flush=True)
        discarded.append({"step": saved.step, "private_state": name, "batches": number})
    past = Past(saved.step, discarded, saved.info.get("log_interval", {}), lost)
    restored = run.strategy.from_canonical(saved.tree, saved.private if is_continued else {})
    if saved.step < run.num_steps:
        restored, _ = run.strategy.begin(restored, saved.step, run.workdir)
    return restored, past


def saved_private_key(info: Info) -> dict[str, Any]:
    """Return the private key of a checkpoint. info: its info, whose key can be in one of two earlier forms."""
    if "private_key" not in info:
        return {"of": info.get("private_of", "")}  # a text, which equals no key
    key: dict[str, Any] = info["private_key"]
    if not (found := WORKERS.fullmatch(key.get("policy", ""))):
        return key
    policy, workers, mitigations = found.groups()
    named = mitigations.split(", ") if mitigations else []
    return {"policy": policy, "workers": int(workers), "mitigations": named, "table": key["table"]}


def check_continued(run: Run, saved: checkpoint.Checkpoint) -> configs.Values:
    """Return the config of the run that wrote the checkpoint. Raises UserError if this run cannot continue it."""
    where = f"the checkpoint of step {saved.step} in {run.workdir}"
    before: configs.Values = saved.info.get("config", configs.keys(run.config))  # the first checkpoints lack it
    resume.check_same_run(before, run.config, f"{where} is from")
    if saved.info["data"] != run.dataset.fingerprint:
        raise UserError(f"the data has changed since {where} was written; use a new --workdir")
    if saved.step > run.num_steps:
        config = run.config
        raise UserError(
            f"config.num_steps is {config.num_steps} and config.num_epochs is {config.num_epochs}, which is "
            f"{run.num_steps} steps; it must be at least the {saved.step} steps of {where}, or use a new --workdir"
        )
    return before


def fresh(run: Run) -> StrategyState:
    """Return the strategy's state at step 0, with pretrained parameters if there are any."""
    fresh = run.strategy.init(jax.random.key(run.config.seed))
    if run.pretrained is None:
        return fresh
    tree = run.strategy.to_canonical(fresh)

    def choose(ours: Any, theirs: Any) -> Any:
        return ours if isinstance(theirs, jax.ShapeDtypeStruct) else theirs  # the checkpoint lacks it

    tree["params"] = jax.tree.map(choose, tree["params"], run.pretrained)
    return run.strategy.from_canonical(tree)


def tidy(run: Run, past: Past) -> None:
    """Write the files of a run that continues after these steps, and remove the records of later steps."""
    first_step = past.step
    processes.wait("a checkpoint was read")
    if processes.is_first():
        ledger.cut(run.workdir / "ledger", after=0 if past.is_new else first_step)
        ledger.begin(run.workdir / "ledger", first_step, run.batches.steps_per_epoch)
        ledger.check_ledger(run.workdir / "ledger", run.batches, first_step)
        record_start(run, first_step, past.lost)
        configs.save(run.config, run.workdir)
        data.write_info(run.workdir, run.dataset.info)
        checkpoint.set_aside(run.workdir / "checkpoints", after=first_step)
        checkpoint.repair_metrics(run.workdir / "checkpoints", log=print)
    processes.wait("the workdir is tidy")


def open_ledger(run: Run) -> ledger.Ledger:
    """Return the ledger of the examples that this process records."""
    devices, size = run.strategy.devices, run.batches.padded_size
    local, counted = (
        shard(devices, run.plan.num_replicas, size) for shard in (processes.local_shard, processes.counted_shard)
    )
    real = range(run.batches.batch_size)[counted]
    return ledger.Ledger(
        run.workdir / "ledger",
        steps_per_epoch=run.batches.steps_per_epoch,
        shard=slice(real.start, real.stop),
        first=local.start,
    )


def save_info(run: Run, step: int, in_flight: int, past: Past) -> Info:
    """Return the info of a checkpoint, which is saved next to its arrays. in_flight: `Strategy.num_in_flight`."""
    return {
        "data": run.dataset.fingerprint,
        "examples": run.batches.examples_before(step),
        "config": configs.keys(run.config),
        "private_key": dict(run.plan.private_key),
        "in_flight": in_flight,
        "discarded": list(past.discarded),
        "log_interval": dict(past.interval),
    }
