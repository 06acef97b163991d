"""Makes the table that config.pipeline selects, a named schedule or a CSV file, and the delays of a periodic table."""

from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from jaxpar.errors import Refusals, UserError
from jaxpar.pipeline.tables.periodic import CONTINUOUS, continuous_obstacle, fewest_microbatches, periodic_table
from jaxpar.pipeline.tables.schedule import SCHEDULES, make_table, schedule_obstacle, unknown_schedule
from jaxpar.pipeline.tables.table import BW, B, F, Table, U, W, is_training
from jaxpar.pipeline.tables.table_file import is_table_file, read_table
from jaxpar.plan import StageDelay


def configured_table(config: ConfigDict) -> Refusals[Table]:
    """Return the table that config.pipeline.schedule selects.

    Refuses a schedule that does not exist or does not support the sizes in the config, and an invalid table.
    """
    c = config.pipeline
    table = yield from (_table_from_file(config) if is_table_file(c.schedule) else _table_by_name(config))
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
    return table


def _table_from_file(config: ConfigDict) -> Refusals[Table]:
    name = config.pipeline.schedule
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


def _periodic_table(config: ConfigDict) -> Refusals[Table]:
    c, p = config.pipeline, config.mesh.stage
    m = c.num_microbatches or fewest_microbatches(c.schedule, p)
    if reason := continuous_obstacle(c.schedule, num_devices=p, num_microbatches=m, num_chunks=c.num_chunks or 1):
        yield UserError(f"config.pipeline.{reason}".replace("pipeline.num_devices", "mesh.stage"))
    return periodic_table(c.schedule, p, m)


def _table_by_name(config: ConfigDict) -> Refusals[Table]:
    c, p = config.pipeline, config.mesh.stage
    if c.schedule in CONTINUOUS:
        return (yield from _periodic_table(config))
    if c.schedule not in SCHEDULES:
        yield UserError(unknown_schedule("config.pipeline.schedule", c.schedule))
    if c.num_microbatches > config.batch_size:
        yield UserError(
            f"config.pipeline.num_microbatches is {c.num_microbatches}; it must be at most config.batch_size, "
            f"{config.batch_size}"
        )
    sizes = {
        "num_devices": p,
        "num_microbatches": c.num_microbatches or (1 if c.schedule == "model_parallel" else 4 * p),
        "num_chunks": c.num_chunks or SCHEDULES[c.schedule].num_chunks,
    }
    if reason := schedule_obstacle(c.schedule, **sizes):
        yield UserError(f"config.pipeline.{reason}")
    return make_table(c.schedule, **sizes)


def stage_delays(table: Table, layers: Sequence[Sequence[str]]) -> tuple[StageDelay, ...]:
    """Return the delays of each stage of a periodic table. layers: names of the layers of each stage.

    The lags are those of the forward passes: the gradient of a batch belongs to the weights that these read.
    """
    m, delays = table.num_microbatches, []
    for stage, of_stage in enumerate(layers):
        rows = table.actions[table.actions["stage"] == stage]
        [update] = rows[rows["kind"] == U]
        forwards = rows[rows["kind"] == F]
        forwards = forwards[np.argsort(forwards["microbatch"] % m)]
        computed_after, lags = -(forwards["microbatch"] // m), -forwards["version"]
        updated_after = -(int(update["microbatch"]) // m)
        delays.append(StageDelay(tuple(of_stage), updated_after, tuple(computed_after.tolist()), tuple(lags.tolist())))
    return tuple(delays)
