"""`pipeline`: every device holds one or several stages of the model, and microbatches pass through them.

All schedules sum the same gradients, so training is equal to `single` with as many accumulation steps as there are
microbatches. Schedules are tables (tables/schedule.py). Two executors run all of them: one program in lockstep
(executor/engine.py, whose docstring lists the steps of a training step), or programs of the stages that are dispatched
one by one (executor/dispatch.py). Replicas of the pipeline on the data axis exchange gradients as config.exchange
specifies.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpar.cluster import Cluster
from jaxpar.core import mesh as meshes
from jaxpar.core import step as steps
from jaxpar.core.context import part_shapes
from jaxpar.core.mesh import DATA
from jaxpar.core.plan import ARRAYS, Decision, DelayedUpdates, Plan
from jaxpar.core.step import Problem
from jaxpar.data.cache import fingerprint
from jaxpar.errors import UserError, format_count
from jaxpar.layout import PER_REPLICA
from jaxpar.models.model import Batch, Model, Tie
from jaxpar.strategies import exchanges, groups
from jaxpar.strategies.pipeline import dispatched, lockstep
from jaxpar.strategies.pipeline.details import PipelineDetails
from jaxpar.strategies.pipeline.executor import partition
from jaxpar.strategies.pipeline.executor.continuous import ContinuousState
from jaxpar.strategies.pipeline.executor.engine import PipelineEngine
from jaxpar.strategies.pipeline.executor.lowering import lower_table
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.pipeline.executor.state import StagedState
from jaxpar.strategies.pipeline.schedules import (
    DISPATCH,
    LOCKSTEP,
    check_evaluation,
    check_no_auto,
    check_pipeline_values,
    configured_replicas,
    configured_table,
    stage_delays,
)
from jaxpar.strategies.pipeline.tables.periodic import CONTINUOUS
from jaxpar.strategies.pipeline.tables.table import Table
from jaxpar.strategies.pipeline.tables.table_file import is_table_file
from jaxpar.strategies.strategy import Strategy

EXECUTOR_MODULES: dict[str, Any] = {LOCKSTEP: lockstep, DISPATCH: dispatched}


def decide(config: ConfigDict, cluster: Cluster, model: Model | None, /) -> Decision[Table]:
    """Decide on the mesh and the table. Raises UserError for an invalid config.mesh or config.pipeline."""
    check_pipeline_values(config)
    check_no_auto(config)
    if config.optimizer.accumulation_steps != 1:
        raise UserError(
            f"config.optimizer.accumulation_steps is {config.optimizer.accumulation_steps}; it must be 1 with "
            "config.strategy='pipeline', which accumulates over config.pipeline.num_microbatches"
        )
    if config.pipeline.trace:
        meshes.check_processes(f"config.pipeline.trace={config.pipeline.trace}", cluster)
    groups.check_group_of_stage(config)
    meshes.check_sizes(config, cluster)
    axes = meshes.sizes(config, cluster)
    has_flush = config.pipeline.schedule not in CONTINUOUS
    exchanges.check_gradient_exchange(config, axes[DATA], cluster, has_flush=has_flush)
    replicas_of_stages = configured_replicas(config)
    table = configured_table(config, replicas_of_stages)
    if model is not None:
        names = [layer.name for layer in model.layers]
        partition.explicit_cuts(names, config.pipeline.partition, table.num_stages)
        if table.period:
            ends = {names[0], names[-1]}  # they are never on one stage
            check_ties(config, [tie for tie in model.ties if {tie.layer, tie.source} == ends])
    if table.period:
        check_ring(config, axes[DATA])
    m = table.num_microbatches
    replicas, microbatches = format_count(axes[DATA], "replica"), format_count(m, "microbatch")
    is_file = is_table_file(config.pipeline.schedule)
    source = f"of {config.pipeline.schedule}" if is_file else "config.pipeline.num_microbatches"
    words = f"{replicas} (the data axis) x {microbatches} ({source})"
    check_evaluation(config, axes[DATA], m)
    return Decision(axes, axes[DATA] * m, words, axes[DATA], table)


def plan(config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision[Table], /) -> Plan[PipelineDetails]:
    """Plan the stages of config.pipeline, and the replicas of the pipeline on the data axis.

    Raises UserError if config.pipeline.partition cannot cut the model, or the step to measure is after the last one.
    """
    if config.pipeline.trace > shapes.num_steps:
        raise UserError(
            f"config.pipeline.trace is {config.pipeline.trace}; it must be at most {shapes.num_steps}, the last step "
            "of the run"
        )
    c, table, num_data = config.pipeline, decision.source, decision.num_replicas
    exchanges.check_not_empty(config, shapes.model.shapes)
    inputs, group = shapes.model.inputs(shapes.batch), groups.replica_group(config, shapes, decision.axes)
    bounds = partition.stage_bounds(shapes.model, shapes.batch, inputs, c.partition, table.num_stages)
    stages = Stages(shapes.model, bounds, table.stages, inputs, shapes.task, group)
    staged = StagedState(group, shapes, stages, exchanges.on_gradients(config, num_data))
    exchanges.check_compressed(config, staged.params.packing.shapes)
    microbatches = abstract_microbatches(shapes, num_data, table.num_microbatches, group.group.context)
    key = jax.eval_shape(lambda: jax.random.key(0))
    lowered = lower_table(table)
    engine = PipelineEngine(staged, lowered.shape, microbatches, key, c.remat)
    state: StagedState | ContinuousState = staged
    differs, delays = exchanges.differs(config, num_data), None
    private_key: dict[str, Any] = {}
    if has_residuals := staged.private.kind == PER_REPLICA:
        private_key = exchanges.private_key(config, num_data, shapes.model.shapes)
    private_key |= group.sizes | {"replicas": num_data, "bounds": list(bounds), "stages": table.stages.tolist()}
    if table.period:
        check_ties(config, [tie for device in stages.examples for tie in stages.copies(device)])
        state = ContinuousState(staged, lowered, engine, microbatches)
        private_key |= {"schedule": c.schedule, "microbatches": table.num_microbatches, "remat": c.remat}
        # Stashes depend on more settings, such as the kernel of attention.
        arrays = [f"{x.dtype} {x.shape}" for x in jax.tree.leaves(state.layouts.private.shapes)]
        private_key[ARRAYS] = fingerprint({"private": arrays})
        delays = DelayedUpdates(stage_delays(table, stages.layers), differs)
        differs = "; ".join(filter(None, [CONTINUOUS[c.schedule].reason, differs]))
    summary = summarize_stages(c.schedule, table, stages) + ", dispatched" * (c.executor == DISPATCH)
    summary += groups.summary(decision.axes)
    details = PipelineDetails(c.schedule, table, lowered, stages, engine, staged, state, c.remat, c.trace, c.executor)
    if c.executor == DISPATCH:
        private_key |= {"executor": c.executor}
    on_cpu = cluster.platform == "cpu"
    layouts, memory, traffic = EXECUTOR_MODULES[c.executor].resources(details, on_cpu=on_cpu)
    return Plan(
        "pipeline",
        decision,
        summary,
        layouts,
        details,
        memory,
        traffic,
        exchanges.name(config),
        private_key if table.period or has_residuals else {},
        differs,
        exchanges.exchange_advice(config),
        delays,
    )


def abstract_microbatches(problem: Problem, num_data: int, num_microbatches: int, context: int = 1) -> Batch:
    """Return the shapes of the microbatches of a replica's shard of a batch, [m, B, ..].

    context: number of devices that have different positions of each text.
    """
    shard = part_shapes(steps.abstract_share(problem.batch, num_data), context)
    return jax.eval_shape(partial(steps.microbatches, num=num_microbatches), shard)


def check_ties(config: ConfigDict, ties: Sequence[Tie]) -> None:
    """Raise UserError for tied arrays on different stages, which are at different batches if they never drain."""
    for tie in ties:
        raise UserError(
            f"config.pipeline.schedule is {config.pipeline.schedule!r}, whose stages are at different batches, so "
            f"{tie.layer} cannot share its array {tie.source_name} with {tie.source}; it must be a schedule with a "
            "flush, such as '1f1b', for this model and task"
        )


def check_ring(config: ConfigDict, num_data: int) -> None:
    """Raise UserError for a ring between replicas of stages that exchange their gradients at different times.

    A `ppermute` along the ring is one operation of all devices, including those of other stages.
    """
    if num_data > 1 and exchanges.sums_along_a_ring(config):
        raise UserError(
            f"config.exchange_options.algorithm is {config.exchange_options.algorithm!r}; it must be 'psum' with "
            f"exchange {config.exchange!r} and config.pipeline.schedule={config.pipeline.schedule!r}, whose stages "
            "exchange gradients at different times, so that they cannot send them round a ring"
        )


def summarize_stages(schedule: str, table: Table, stages: Stages) -> str:
    """Return the schedule, the replicas of the stages, and the cut points of the model in one line."""
    begins = ", ".join(layers[0] for layers in stages.layers[1:])
    replicas = f" with {','.join(map(str, table.replicas))} replicas" if table.replicas else ""
    microbatches = format_count(table.num_microbatches, "microbatch")
    num_devices = table.num_devices * math.prod(stages.group_sizes.values())
    summary = f"{schedule}, {microbatches}, {table.num_stages} stages{replicas} on {num_devices} devices"
    return f"{summary} (cut at {begins})" if begins else summary


def build(plan: Plan[PipelineDetails], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[Any]:
    """Build a planned pipeline on the first of these devices."""
    return EXECUTOR_MODULES[plan.details.executor].build(plan, problem, devices)
