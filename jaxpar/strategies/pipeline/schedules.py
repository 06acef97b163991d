"""Makes the table that config.pipeline selects, and computes the delays of a periodic table."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from jaxpar.core.plan import StageDelay
from jaxpar.errors import UserError, check_choice
from jaxpar.files import path_state
from jaxpar.strategies.pipeline.executor.partition import AUTO
from jaxpar.strategies.pipeline.executor.stage_programs import REMATS
from jaxpar.strategies.pipeline.tables.periodic import (
    CONTINUOUS,
    continuous_obstacle,
    fewest_microbatches,
    periodic_table,
)
from jaxpar.strategies.pipeline.tables.schedule import (
    SCHEDULES,
    WITH_REPLICAS,
    make_table,
    parse_replicas,
    replicated_table,
    schedule_obstacle,
    unknown_schedule,
)
from jaxpar.strategies.pipeline.tables.simulate import LARGEST_VALUE
from jaxpar.strategies.pipeline.tables.table import BW, B, F, Table, U, W, is_training
from jaxpar.strategies.pipeline.tables.table_file import is_table_file, read_table

EXECUTORS = LOCKSTEP, DISPATCH = "lockstep", "dispatch"


def check_pipeline_values(config: ConfigDict) -> None:
    """Raise UserError for a value of config.pipeline that is out of range, whether the run has a pipeline or not."""
    c = config.pipeline
    check_choice("pipeline.remat", c.remat, REMATS)
    check_choice("pipeline.executor", c.executor, (*EXECUTORS, AUTO))
    if c.schedule not in {*SCHEDULES, *CONTINUOUS, AUTO} and not is_table_file(c.schedule):
        raise UserError(unknown_schedule("config.pipeline.schedule", c.schedule, (AUTO,)))
    for key in ("num_microbatches", "num_chunks"):
        if c[key] < 0:
            raise UserError(f"config.pipeline.{key} is {c[key]}; it must be at least 0")
    if c.trace < 0:
        raise UserError(f"config.pipeline.trace is {c.trace}; it must be a step number, or 0 to measure no step")
    if c.replicas and parse_replicas(c.replicas) is None:
        raise UserError(
            f"config.pipeline.replicas is {c.replicas!r}; it must list the number of devices of each stage, separated "
            "by commas, such as 2,1,1"
        )
    if not 0 <= c.memory_limit < LARGEST_VALUE:
        raise UserError(
            f"config.pipeline.memory_limit is {c.memory_limit}; it must be the bytes of a device, or 0 for no limit"
        )
    if not 0 <= c.bandwidth < math.inf:
        raise UserError(f"config.pipeline.bandwidth is {c.bandwidth}; it must be bytes per second, or 0 if not set")
    if c.profile and not Path(c.profile).is_file():
        state = path_state(Path(c.profile))
        raise UserError(f"config.pipeline.profile is {c.profile!r}, which {state}; it must be the path of a profile")


def check_no_auto(config: ConfigDict) -> None:
    """Raise UserError for `auto` in config.pipeline, which must have been replaced."""
    examples = {"partition": "flops", "schedule": "1f1b", "executor": LOCKSTEP}
    for key, example in examples.items():
        if config.pipeline[key] == AUTO:
            raise UserError(
                f"config.pipeline.{key} is {AUTO!r}; it must be replaced (jaxpar.choose) before the run is planned, or "
                f"be another value, such as {example!r}"
            )


def configured_table(config: ConfigDict, replicas: Sequence[int]) -> Table:
    """Return the table that config.pipeline.schedule selects, whose stages have this many replicas; empty: one each.

    Raises UserError for a schedule that does not exist or does not support the configured sizes, and an invalid table.
    """
    c = config.pipeline
    table = _table_from_file(config, replicas) if is_table_file(c.schedule) else _table_by_name(config, replicas)
    sizes = {
        "mesh.stage": (config.mesh.stage, table.num_devices),
        "pipeline.num_microbatches": (c.num_microbatches, table.num_microbatches),
        "pipeline.num_chunks": (c.num_chunks, table.num_chunks),
    }
    for key, (value, of_table) in sizes.items():
        if value not in (0, of_table):
            raise UserError(
                f"config.{key} is {value}; it must be {of_table}, as in the table of "
                f"config.pipeline.schedule={c.schedule!r}"
            )
    return table


def _table_from_file(config: ConfigDict, replicas: Sequence[int]) -> Table:
    name = config.pipeline.schedule
    if replicas and max(replicas) > 1:
        raise UserError(
            f"config.pipeline.replicas is {config.pipeline.replicas!r}; it must be empty with the table of "
            f"config.pipeline.schedule={name!r}"
        )
    try:
        table = read_table(name)
    except ValueError as error:
        raise UserError(f"config.pipeline.schedule is {error}") from None
    kinds = table.actions["kind"]
    if not is_training(table):
        raise UserError(f"config.pipeline.schedule is {name!r}, which has no backward; it must be a table for training")
    if (kinds == BW).any() and ((kinds == B) | (kinds == W)).any():
        raise UserError(
            f"config.pipeline.schedule is {name!r}, which mixes BW with B and W; it must have either BW, or B and W"
        )
    if (kinds == U).any():
        raise UserError(
            f"config.pipeline.schedule is {name!r}, which has updates (U); it must have none, because only "
            f"{', '.join(CONTINUOUS)} update their weights within the table"
        )
    return table


def configured_replicas(config: ConfigDict) -> tuple[int, ...]:
    """Return the number of devices of each stage that config.pipeline.replicas lists; empty if it lists none."""
    text = config.pipeline.replicas
    if not text:
        return ()
    replicas = parse_replicas(text)
    assert replicas is not None, "refused by check_pipeline_values"
    if sum(replicas) != config.mesh.stage:
        raise UserError(
            f"config.pipeline.replicas is {text!r}, {sum(replicas)} devices; they must be as many as "
            f"config.mesh.stage, {config.mesh.stage}"
        )
    return replicas


def _table_by_name(config: ConfigDict, replicas: Sequence[int]) -> Table:
    c, p = config.pipeline, config.mesh.stage
    name = c.schedule
    if c.num_microbatches > config.batch_size:
        raise UserError(
            f"config.pipeline.num_microbatches is {c.num_microbatches}; it must be at most config.batch_size, "
            f"{config.batch_size}"
        )
    if name in CONTINUOUS:
        replicas = replicas or (1,) * p
        m = c.num_microbatches or fewest_microbatches(name, replicas)
        if len(replicas) < 2:
            raise UserError(
                f"config.pipeline.replicas is {c.replicas!r} and config.mesh.stage is {p}, which is one stage; there "
                f"must be at least two with config.pipeline.schedule={name!r}"
            )
        if reason := continuous_obstacle(name, replicas, num_microbatches=m, num_chunks=c.num_chunks or 1):
            raise UserError(f"config.pipeline.{reason}")
        return periodic_table(name, replicas, m)
    sizes = {
        "num_devices": p,
        "num_microbatches": c.num_microbatches or (1 if name == "model_parallel" else 4 * p),
        "num_chunks": c.num_chunks or SCHEDULES[name].num_chunks,
    }
    if reason := schedule_obstacle(name, **sizes):
        raise UserError(f"config.pipeline.{reason}")
    if not replicas or max(replicas) == 1:
        return make_table(name, **sizes)
    if name not in WITH_REPLICAS:
        raise UserError(
            f"config.pipeline.replicas is {c.replicas!r}; it must be empty with config.pipeline.schedule="
            f"{c.schedule!r}; only {', '.join((AUTO, *WITH_REPLICAS, *CONTINUOUS))} have replicated stages"
        )
    return replicated_table(name, replicas, sizes["num_microbatches"])


def check_evaluation(config: ConfigDict, num_replicas: int, num_microbatches: int) -> None:
    """Raise UserError for an evaluation batch that microbatches cannot divide: all stages but one would be idle."""
    share, rest = divmod(config.eval.batch_size, num_replicas)
    if share > 1 and not rest and num_microbatches > 1 and math.gcd(share, num_microbatches) == 1:
        raise UserError(
            f"config.eval.batch_size is {config.eval.batch_size}, which is {share} examples per replica; it must be 0, "
            "or the examples per replica must have a common divisor greater than 1 with the number of microbatches, "
            f"{num_microbatches}"
        )


def stage_delays(table: Table, layers: Sequence[Sequence[str]]) -> tuple[StageDelay, ...]:
    """Return the delays of each stage of a periodic table. layers: names of the layers of each stage."""
    m, delays = table.num_microbatches, []
    for stage, of_stage in enumerate(layers):
        rows = table.actions[table.actions["stage"] == stage]
        update, *_ = rows[rows["kind"] == U]  # one for each replica
        forwards = rows[rows["kind"] == F]
        forwards = forwards[np.argsort(forwards["microbatch"] % m)]
        # The lags are those of the forward passes: the gradient of a batch belongs to the weights that these read.
        computed_after, lags = -(forwards["microbatch"] // m), -forwards["version"]
        updated_after = -(int(update["microbatch"]) // m)
        delays.append(StageDelay(tuple(of_stage), updated_after, tuple(computed_after.tolist()), tuple(lags.tolist())))
    return tuple(delays)
