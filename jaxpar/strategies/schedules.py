"""Makes the table that config.pipeline selects, and computes the delays of a periodic table."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from jaxpar.core.plan import StageDelay
from jaxpar.errors import Refusals, UserError, refuse_choice
from jaxpar.files import path_state
from jaxpar.pipeline.executor.programs import REMATS
from jaxpar.pipeline.search.layer_profile import LARGEST_VALUE
from jaxpar.pipeline.tables.periodic import CONTINUOUS, continuous_obstacle, fewest_microbatches, periodic_table
from jaxpar.pipeline.tables.replicated import WITH_REPLICAS, parse_replicas, replicated_table
from jaxpar.pipeline.tables.schedule import SCHEDULES, make_table, schedule_obstacle, unknown_schedule
from jaxpar.pipeline.tables.table import BW, B, F, Table, U, W, is_training
from jaxpar.pipeline.tables.table_file import is_table_file, read_table

EXECUTORS = LOCKSTEP, DISPATCH = "lockstep", "dispatch"
AUTO_EXECUTOR = "auto"  # the plan chooses it (auto_executor.py)
AUTO_SCHEDULE = "auto"  # the plan chooses it, when the stages are known (auto_schedule.py)
UNTIL_CHOSEN = "1f1b"  # the schedule with the sizes of AUTO_SCHEDULE that stands for it before


def refuse_pipeline_values(config: ConfigDict) -> Refusals[None]:
    """Refuse a value of config.pipeline that is out of range, whether the run has a pipeline or not."""
    c = config.pipeline
    yield from refuse_choice("pipeline.remat", c.remat, REMATS)
    yield from refuse_choice("pipeline.executor", c.executor, (*EXECUTORS, AUTO_EXECUTOR))
    if c.schedule not in {*SCHEDULES, *CONTINUOUS, AUTO_SCHEDULE} and not is_table_file(c.schedule):
        yield UserError(unknown_schedule("config.pipeline.schedule", c.schedule, (AUTO_SCHEDULE,)))
    for key in ("num_microbatches", "num_chunks"):
        if c[key] < 0:
            yield UserError(f"config.pipeline.{key} is {c[key]}; it must be at least 0")
    if c.trace < 0:
        yield UserError(f"config.pipeline.trace is {c.trace}; it must be a step number, or 0 to measure no step")
    if c.replicas and parse_replicas(c.replicas) is None:
        yield UserError(
            f"config.pipeline.replicas is {c.replicas!r}; it must list the number of devices of each stage, separated "
            "by commas, such as 2,1,1"
        )
    if not 0 <= c.memory_limit < LARGEST_VALUE:
        yield UserError(
            f"config.pipeline.memory_limit is {c.memory_limit}; it must be the bytes of a device, or 0 for no limit"
        )
    if not 0 <= c.bandwidth < math.inf:
        yield UserError(f"config.pipeline.bandwidth is {c.bandwidth}; it must be bytes per second, or 0 if not set")
    if c.profile and not Path(c.profile).is_file():
        state = path_state(Path(c.profile))
        yield UserError(f"config.pipeline.profile is {c.profile!r}, which {state}; it must be the path of a profile")


def configured_table(config: ConfigDict, replicas: Sequence[int]) -> Refusals[Table]:
    """Return the table that config.pipeline.schedule selects, whose stages have this many replicas; empty: one each.

    It is that of UNTIL_CHOSEN if the plan will choose the schedule.

    Refuses a schedule that does not exist or does not support the sizes in the config, and an invalid table.
    """
    if config.pipeline.schedule != AUTO_SCHEDULE and is_table_file(config.pipeline.schedule):
        table = yield from _table_from_file(config, replicas)
    else:
        table = yield from _table_by_name(config, replicas)
    yield from _refuse_other_sizes(config, table)
    return table


def _refuse_other_sizes(config: ConfigDict, table: Table) -> Refusals[None]:
    c = config.pipeline
    sizes = {
        "mesh.stage": (config.mesh.stage, table.num_devices),
        "pipeline.num_microbatches": (c.num_microbatches, table.num_microbatches),
        "pipeline.num_chunks": (c.num_chunks, table.num_chunks),
    }
    for key, (value, of_table) in sizes.items():
        if value not in (0, of_table):
            yield UserError(
                f"config.{key} is {value}; it must be {of_table}, as in the table of "
                f"config.pipeline.schedule={c.schedule!r}"
            )


def _table_from_file(config: ConfigDict, replicas: Sequence[int]) -> Refusals[Table]:
    name = config.pipeline.schedule
    if replicas and max(replicas) > 1:
        yield UserError(
            f"config.pipeline.replicas is {config.pipeline.replicas!r}; it must be empty with the table of "
            f"config.pipeline.schedule={name!r}"
        )
    try:
        table = read_table(name)
    except ValueError as error:
        yield UserError(f"config.pipeline.schedule is {error}")
    kinds = table.actions["kind"]
    if not is_training(table):
        yield UserError(f"config.pipeline.schedule is {name!r}, which has no backward; it must be a table for training")
    if (kinds == BW).any() and ((kinds == B) | (kinds == W)).any():
        yield UserError(
            f"config.pipeline.schedule is {name!r}, which mixes BW with B and W; it must have either BW, or B and W"
        )
    if (kinds == U).any():
        yield UserError(
            f"config.pipeline.schedule is {name!r}, which has updates (U); it must have none, because only "
            f"{', '.join(CONTINUOUS)} update their weights within the table"
        )
    return table


def _periodic_table(config: ConfigDict, replicas: Sequence[int]) -> Refusals[Table]:
    c = config.pipeline
    replicas = replicas or (1,) * config.mesh.stage
    m = c.num_microbatches or fewest_microbatches(c.schedule, replicas)
    if len(replicas) < 2:
        yield UserError(
            f"config.pipeline.replicas is {c.replicas!r} and config.mesh.stage is {config.mesh.stage}, which is one "
            f"stage; there must be at least two with config.pipeline.schedule={c.schedule!r}"
        )
    if reason := continuous_obstacle(c.schedule, replicas, num_microbatches=m, num_chunks=c.num_chunks or 1):
        yield UserError(f"config.pipeline.{reason}")
    return periodic_table(c.schedule, replicas, m)


def configured_replicas(config: ConfigDict) -> Refusals[tuple[int, ...]]:
    """Return the number of devices of each stage that config.pipeline.replicas lists; empty if it lists none."""
    text = config.pipeline.replicas
    if not text:
        return ()
    replicas = parse_replicas(text)
    assert replicas is not None, "refused by refuse_pipeline_values"
    if sum(replicas) != config.mesh.stage:
        yield UserError(
            f"config.pipeline.replicas is {text!r}, {sum(replicas)} devices; they must be as many as "
            f"config.mesh.stage, {config.mesh.stage}"
        )
    return replicas


def _table_by_name(config: ConfigDict, replicas: Sequence[int]) -> Refusals[Table]:
    c, p = config.pipeline, config.mesh.stage
    name = UNTIL_CHOSEN if c.schedule == AUTO_SCHEDULE else c.schedule
    if c.num_microbatches > config.batch_size:
        yield UserError(
            f"config.pipeline.num_microbatches is {c.num_microbatches}; it must be at most config.batch_size, "
            f"{config.batch_size}"
        )
    if c.schedule in CONTINUOUS:
        return (yield from _periodic_table(config, replicas))
    sizes = {
        "num_devices": p,
        "num_microbatches": c.num_microbatches or (1 if name == "model_parallel" else 4 * p),
        "num_chunks": c.num_chunks or SCHEDULES[name].num_chunks,
    }
    if reason := schedule_obstacle(name, **sizes):
        yield UserError(f"config.pipeline.{reason.replace(name, c.schedule)}")
    if not replicas or max(replicas) == 1:
        return make_table(name, **sizes)
    if name not in WITH_REPLICAS:
        yield UserError(
            f"config.pipeline.replicas is {c.replicas!r}; it must be empty with config.pipeline.schedule="
            f"{c.schedule!r}; only {', '.join((AUTO_SCHEDULE, *WITH_REPLICAS, *CONTINUOUS))} have replicated stages"
        )
    return replicated_table(name, replicas, sizes["num_microbatches"])


def refuse_evaluation(config: ConfigDict, num_replicas: int, num_microbatches: int) -> Refusals[None]:
    """Refuse an evaluation batch that cannot be split into microbatches: all stages but one would be idle."""
    share, rest = divmod(config.eval.batch_size, num_replicas)
    if share > 1 and not rest and num_microbatches > 1 and math.gcd(share, num_microbatches) == 1:
        yield UserError(
            f"config.eval.batch_size is {config.eval.batch_size}, which is {share} examples per replica; it must be 0, "
            "or the examples per replica must have a common divisor greater than 1 with the number of microbatches, "
            f"{num_microbatches}"
        )


def stage_delays(table: Table, layers: Sequence[Sequence[str]]) -> tuple[StageDelay, ...]:
    """Return the delays of each stage of a periodic table. layers: names of the layers of each stage.

    The lags are those of the forward passes: the gradient of a batch belongs to the weights that these read.
    """
    m, delays = table.num_microbatches, []
    for stage, of_stage in enumerate(layers):
        rows = table.actions[table.actions["stage"] == stage]
        update, *_ = rows[rows["kind"] == U]  # one for each replica
        forwards = rows[rows["kind"] == F]
        forwards = forwards[np.argsort(forwards["microbatch"] % m)]
        computed_after, lags = -(forwards["microbatch"] // m), -forwards["version"]
        updated_after = -(int(update["microbatch"]) // m)
        delays.append(StageDelay(tuple(of_stage), updated_after, tuple(computed_after.tolist()), tuple(lags.tolist())))
    return tuple(delays)
