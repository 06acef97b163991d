"""The state a run starts from: that of the newest whole checkpoint in its workdir, or a fresh one.

And what a run leaves in its workdir to start from: checkpoints with their info, and the ledger of its examples.
"""

import json

import jax

from jaxpar import checkpoint, files, state
from jaxpar import config as configs
from jaxpar.checkpoint import ledger
from jaxpar.checkpoint.checksums import Info
from jaxpar.errors import UserError
from jaxpar.launch import processes
from jaxpar.plan import format_private_key
from jaxpar.run import resume
from jaxpar.run.build import Run, StrategyState


def start(run: Run) -> tuple[StrategyState, int]:
    """The strategy's state and the number of steps it has behind it: of the newest whole checkpoint, or a fresh one."""
    like = state.to_canonical(state.abstract_state(run.problem.model, run.problem.optimizer))
    saved = checkpoint.restore(run.workdir / "checkpoints", like, log=print)
    processes.check_same_value(f"the newest whole checkpoint (-1: none) in {run.workdir}", saved.step if saved else -1)
    if saved is None:
        return fresh(run), 0
    before = check_continued(run, saved)
    print(f"resume    from step {saved.step:,}", flush=True)
    for change in resume.differences(before, run.config).values():
        print(f"changed   {change}", flush=True)
    private_key = saved.info.get("private_key", {"of": saved.info.get("private_of", "")})  # the first ones had words
    is_continued = private_key == dict(run.plan.private_key)
    if saved.private and not is_continued:
        now = format_private_key(run.plan.private_key) or f"strategy {run.config.strategy}"
        print(f"private   state of {format_private_key(private_key)} is left behind: this is {now}", flush=True)
    return run.strategy.from_canonical(saved.tree, saved.private if is_continued else {}), saved.step


def check_continued(run: Run, saved: checkpoint.Checkpoint) -> configs.Values:
    """The config of the run that wrote the checkpoint. Raises UserError where this run does not continue that one."""
    where = f"the checkpoint of step {saved.step} in {run.workdir}"
    before: configs.Values = saved.info.get("config", configs.keys(run.config))  # the first ones had none
    resume.check_same_run(before, run.config, f"{where} is of")
    if saved.info["data"] != run.dataset.fingerprint:
        raise UserError(f"the data changed since {where}; give a new --workdir")
    if saved.step > run.num_steps:
        config = run.config
        raise UserError(
            f"config.num_steps is {config.num_steps} and config.num_epochs {config.num_epochs}: {run.num_steps} steps, "
            f"and {where} is past them; give more, or a new --workdir"
        )
    return before


def fresh(run: Run) -> StrategyState:
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
