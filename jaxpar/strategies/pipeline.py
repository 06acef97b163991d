"""`pipeline`: every device holds one or several stages of the model, and microbatches pass through them.

All schedules sum the same gradients, so training is equal to `single` with as many accumulation steps as there are
microbatches. Schedules are tables (jaxpar/pipeline/tables/schedule.py), and one engine runs all of them
(jaxpar/pipeline/executor/engine.py, whose docstring lists the steps of a training step). Replicas of the pipeline on
the data axis exchange gradients as config.exchange specifies.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from ml_collections import ConfigDict

from jaxpar import mesh as meshes
from jaxpar import state as states
from jaxpar import step as steps
from jaxpar.cluster import Cluster
from jaxpar.data.cache import fingerprint
from jaxpar.errors import Refusals, UserError, format_count
from jaxpar.exchange.reduce import ring_traffic
from jaxpar.layout import PER_REPLICA, Layout
from jaxpar.mesh import DATA, STAGE
from jaxpar.models.model import Batch, Model, Tie
from jaxpar.pipeline.executor import partition
from jaxpar.pipeline.executor.branches import device_branches
from jaxpar.pipeline.executor.continuous import continuous_step, padded, update_trips
from jaxpar.pipeline.executor.continuous_state import ContinuousState
from jaxpar.pipeline.executor.dispatch import dispatch_order
from jaxpar.pipeline.executor.dispatch_costs import activation_memory, dispatch_traffic, dispatched_layouts
from jaxpar.pipeline.executor.engine import (
    PipelineEngine,
    make_engine,
    pipeline_evaluation,
    pipeline_step,
)
from jaxpar.pipeline.executor.lowering import LoweredTable, TableArrays, TableShape, lower_table, table_layout
from jaxpar.pipeline.executor.stages import Stages
from jaxpar.pipeline.executor.state import PackedState, StagedState
from jaxpar.pipeline.executor.timeline import Timeline, with_filling
from jaxpar.pipeline.tables.periodic import CONTINUOUS
from jaxpar.pipeline.tables.schedule import SCHEDULES, forward_only
from jaxpar.pipeline.tables.simulate import Span, Times, simulate_table
from jaxpar.pipeline.tables.table import Table
from jaxpar.plan import ARRAYS, Decision, DelayedUpdates, Plan, Traffic, state_memory
from jaxpar.state import nbytes
from jaxpar.step import Metrics, Problem, with_shardings
from jaxpar.strategies import dispatched, exchanges
from jaxpar.strategies.auto_schedule import choose_schedule
from jaxpar.strategies.division import Division, configured_division, refuse_division
from jaxpar.strategies.placement import IN_PLACE, batch_placer, by_replica
from jaxpar.strategies.schedules import (
    AUTO_SCHEDULE,
    DISPATCH,
    LOCKSTEP,
    refuse_evaluation,
    refuse_pipeline_values,
    stage_delays,
)
from jaxpar.strategies.strategy import CompiledProgram, Strategy
from jaxpar.tasks import Sums

# Lets XLA write to a stash in place inside the branch of an action. Otherwise it copies whole stashes in every clock.
STASH_IN_PLACE = IN_PLACE | {"xla_gpu_copy_insertion_use_region_analysis": True}


def decide(config: ConfigDict, cluster: Cluster, model: Model | None, /) -> Refusals[Decision[Division]]:
    """Decide on the mesh and the table. Refuses an invalid config.mesh or config.pipeline."""
    yield from refuse_pipeline_values(config)
    yield from refuse_executor(config, cluster)
    if config.optimizer.accumulation_steps != 1:
        yield UserError(
            f"config.optimizer.accumulation_steps is {config.optimizer.accumulation_steps}; it must be 1 with "
            "config.strategy='pipeline', which accumulates over config.pipeline.num_microbatches"
        )
    if config.pipeline.trace:
        yield from meshes.refuse_processes(f"config.pipeline.trace={config.pipeline.trace}", cluster)
    yield from meshes.refuse_sizes(config, cluster)
    axes = meshes.sizes(config, cluster)
    has_ring = axes[DATA] == 1 or config.pipeline.schedule not in CONTINUOUS
    yield from exchanges.refuse_beyond_gradients(config, axes[DATA], cluster, has_ring=has_ring)
    division = yield from configured_division(config, cluster, model)
    table = division.table
    if model is not None:
        names = [layer.name for layer in model.layers]
        if not division.needs_profile:
            yield from partition.explicit_cuts(names, division.partition, table.num_stages)
        if table.period:
            ends = {names[0], names[-1]}  # they are never on one stage
            yield from refuse_ties(config, [tie for tie in model.ties if {tie.layer, tie.source} == ends])
    if table.period:
        yield from refuse_ring(config, axes[DATA])
    m = table.num_microbatches
    replicas, microbatches = format_count(axes[DATA], "replica"), format_count(m, "microbatch")
    words = f"{replicas} (the data axis) x {microbatches} (config.pipeline.num_microbatches)"
    yield from refuse_evaluation(config, axes[DATA], m)
    return Decision(axes, axes[DATA] * m, words, axes[DATA], division, division.needs_profile)


def refuse_executor(config: ConfigDict, cluster: Cluster) -> Refusals[None]:
    """Refuse an executor that cannot run the schedule, or measure it, on this cluster."""
    c = config.pipeline
    if c.executor != DISPATCH:
        return
    yield from meshes.refuse_processes(f"config.pipeline.executor={DISPATCH!r}", cluster)
    reasons = {
        f"config.pipeline.schedule={c.schedule!r}, which never drains": c.schedule in CONTINUOUS,
        f"config.pipeline.trace={c.trace}, which measures clocks": c.trace > 0,
    }
    for reason, holds in reasons.items():
        if holds:
            yield UserError(f"config.pipeline.executor is {c.executor!r}; it must be {LOCKSTEP!r} with {reason}")


@dataclass(frozen=True)
class PipelineDetails:
    """The details of a plan that `build` needs.

    Attributes:
      schedule: the schedule: its name or path, or how the plan chose it.
      table: the table of the schedule.
      lowered: the table in the form that the engine runs, as NumPy arrays.
      stages: the stages.
      staged: distribution of the state between flushes, and the exchange of gradients between replicas.
      state: distribution of the state; `staged`, unless the pipeline never drains.
      remat: none, full or dots: which values the forward pass saves for the backward pass.
      trace: number of the step whose actions are measured; 0: none.
      executor: one of EXECUTORS.
    """

    schedule: str
    table: Table
    lowered: LoweredTable
    stages: Stages
    staged: StagedState
    state: StagedState | ContinuousState
    remat: str
    trace: int
    executor: str


def plan(
    config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision[Division], /
) -> Refusals[Plan[PipelineDetails]]:
    """Plan the stages of config.pipeline, and the replicas of the pipeline on the data axis.

    Refuses a model that cannot be cut according to config.pipeline.partition, the profile of another model, and a trace
    after the last step.
    """
    if config.pipeline.trace > shapes.num_steps:
        yield UserError(
            f"config.pipeline.trace is {config.pipeline.trace}; it must be at most {shapes.num_steps}, the last step "
            "of the run"
        )
    division, num_data = decision.source, decision.num_replicas
    table = division.table
    inputs = shapes.model.inputs(shapes.batch)
    yield from refuse_division(config, division, shapes.model, inputs)
    bounds = yield from partition.stage_bounds(shapes.model, shapes.batch, inputs, division.partition, table.num_stages)
    stages = Stages(shapes.model, bounds, table.stages, inputs, shapes.task)
    staged = StagedState(decision.axes, shapes, stages, exchanges.on_gradients(config, num_data))
    yield from exchanges.refuse_uncompressed(config, staged.params.packing.shapes)
    c, schedule = config.pipeline, config.pipeline.schedule
    microbatches = abstract_microbatches(shapes, num_data, table.num_microbatches)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def engine_of(shape: TableShape) -> PipelineEngine:
        return make_engine(staged, shape, microbatches, key, c.remat)

    if schedule == AUTO_SCHEDULE:
        state_bytes = max(sum(parts.values()) for parts in state_memory(staged.memory))
        chosen = choose_schedule(config, cluster, table, engine_of, division.profile, state_bytes)
        table, schedule = chosen.table, f"auto ({chosen.policy if chosen.policy in SCHEDULES else 'searched'})"
    lowered = lower_table(table)
    engine = engine_of(lowered.shape)
    state: StagedState | ContinuousState = staged
    differs, delays = exchanges.differs(config, num_data), None
    private_key: dict[str, Any] = {}
    if has_residuals := staged.private.kind == PER_REPLICA:
        private_key = exchanges.private_key(config, num_data, shapes.model.shapes)
    private_key |= {"replicas": num_data, "bounds": list(bounds), "stages": table.stages.tolist()}
    if table.period:
        yield from refuse_ties(config, [tie for device in stages.examples for tie in stages.copies(device)])
        state = ContinuousState(staged, lowered, engine, microbatches)
        private_key |= {"schedule": c.schedule, "microbatches": table.num_microbatches, "remat": c.remat}
        # Stashes depend on more settings, such as the kernel of attention.
        arrays = [f"{x.dtype} {x.shape}" for x in jax.tree.leaves(state.layouts.private.shapes)]
        private_key[ARRAYS] = fingerprint({"private": arrays})
        delays = DelayedUpdates(stage_delays(table, stages.layers), differs)
        differs = "; ".join(filter(None, [CONTINUOUS[c.schedule].reason, differs]))
    details = PipelineDetails(schedule, table, lowered, stages, staged, state, c.remat, c.trace, c.executor)
    if c.executor == DISPATCH:
        order, programs = dispatch_order(table), engine.programs
        activations = activation_memory(order, programs) * num_data
        layouts = dispatched_layouts(staged, decision.axes)._asdict()
        held: Mapping[str, Layout] = layouts
        traffic = dispatch_traffic(order, programs, staged.all_reduce)
        private_key |= {"executor": c.executor}
    else:
        activations = [engine.activation_bytes] * math.prod(decision.axes.values())
        layouts, held = state.layouts._asdict(), state.memory
        traffic = plan_traffic(shapes.model, details, engine)
    memory = tuple({**parts, **of_device} for parts, of_device in zip(state_memory(held), activations, strict=True))
    return Plan(
        "pipeline",
        decision,
        summarize_stages(schedule, table, stages),
        layouts,
        details,
        memory,
        traffic,
        exchanges.name(config),
        private_key if table.period or has_residuals else {},
        differs,
        "; ".join(filter(None, [exchanges.exchange_advice(config), division.advice])),
        delays,
    )


def abstract_microbatches(problem: Problem, num_data: int, num_microbatches: int) -> Batch:
    """Return the shapes of the microbatches of a replica's shard of a batch, [m, B, ..]."""
    shard = steps.abstract_share(problem.batch, num_data)
    microbatches: Batch = jax.eval_shape(partial(steps.microbatches, num=num_microbatches), shard)
    return microbatches


def refuse_ties(config: ConfigDict, ties: Sequence[Tie]) -> Refusals[None]:
    """Refuse tied arrays on different stages, which are at different batches if they never drain."""
    for tie in ties:
        yield UserError(
            f"config.pipeline.schedule is {config.pipeline.schedule!r}, whose stages are at different batches, so "
            f"{tie.layer} cannot share its array {tie.source_name} with {tie.source}; it must be a schedule with a "
            "flush, such as '1f1b', for this model and task"
        )


def refuse_ring(config: ConfigDict, num_data: int) -> Refusals[None]:
    """Refuse a ring all-reduce between replicas of stages that exchange their gradients at different times.

    A `ppermute` along the ring is one operation of all devices, including those of other stages.
    """
    if num_data > 1 and exchanges.sums_along_a_ring(config):
        yield UserError(
            f"config.exchange_options.algorithm is {config.exchange_options.algorithm!r}; it must be 'psum' with "
            f"exchange {config.exchange!r} and config.pipeline.schedule={config.pipeline.schedule!r}, whose stages "
            "exchange gradients at different times, so that they cannot send them round a ring"
        )


def summarize_stages(schedule: str, table: Table, stages: Stages) -> str:
    """Return the schedule, the replicas of the stages, and the cut points of the model in one line."""
    layers = [layer.name for layer in stages.model.layers]
    begins = ", ".join(layers[begin] for begin in stages.bounds[1:-1])
    summary = f"{schedule}, {format_count(table.num_microbatches, 'microbatch')}, "
    replicas = f" with {','.join(map(str, table.replicas))} replicas" if table.replicas else ""
    return (
        summary
        + f"{table.num_stages} stages{replicas} on {table.num_devices} devices"
        + (f" (cut at {begins})" if begins else "")
    )


def plan_traffic(model: Model, details: PipelineDetails, engine: PipelineEngine) -> tuple[Traffic, ...]:
    """Return the traffic of a device in a step: one transfer per clock and route used in it, and the gradients."""
    table, stages = details.table, details.stages
    clocks = details.lowered.shape.clocks
    sends = sum(clock.num_transfers for clock in clocks) * table.num_clocks // len(clocks)
    transfers = [
        Traffic("collective-permute", array.dtype.name, STAGE, sends * nbytes([array]), messages=sends)
        for array in engine.transfers.shapes
    ]
    copied = {(tie.source, tie.source_name) for device in stages.examples for tie in stages.copies(device)}
    copied_bytes = nbytes([model.shapes[layer][name] for layer, name in sorted(copied)])
    # The sum of the gradients of tied arrays.
    tied = ring_traffic("all-reduce", 2, STAGE, table.num_devices, copied_bytes, "float32", num_vectors=len(copied))
    params = details.staged.params.packing
    gradients = details.staged.all_reduce.traffic(params.shapes)
    most = max((len(group) for group in stages.groups), default=1)
    # The sum of the gradients of the replicas of a stage.
    within = ring_traffic("all-reduce", 2, STAGE, most, params.nbytes, "float32", num_vectors=len(params.shapes))
    return (*transfers, *gradients, within, tied)


def build(plan: Plan[PipelineDetails], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[Any]:
    """Build a planned pipeline on the first of these devices."""
    if plan.details.executor == DISPATCH:
        return dispatched.build(plan, problem, devices)
    meshes.check_partitioner()
    details, num_data = plan.details, plan.num_replicas
    table = details.table
    mesh, staged, timeline = meshes.make_mesh(plan.axes, devices), details.staged, Timeline(details.trace)
    of_state = details.state
    like = states.abstract_state(problem.model, problem.optimizer)
    step, timed_step = (jit_train_step(details, mesh, each) for each in (None, timeline))
    forward = jit_on_mesh(pipeline_evaluation(staged), staged.params.packed, PartitionSpec(), mesh)
    one_at_a_time = partial(meshes.one_at_a_time, mesh=mesh)

    def on_devices(lowered: LoweredTable) -> LoweredTable:
        """Place the arrays of a table on the mesh."""
        shape, arrays = lowered
        return LoweredTable(shape, jax.device_put(arrays, table_layout(plan.axes, arrays).shardings(mesh)))

    @functools.cache
    def training() -> LoweredTable:
        return on_devices(details.lowered)

    @functools.cache
    def evaluation(num_examples: int) -> LoweredTable:
        """Return a forward-only table with as many of the training microbatches as divide a replica's examples."""
        number = math.gcd(num_examples, table.num_microbatches)
        return on_devices(lower_table(forward_only(table.num_devices, number, table.stages)))

    def train(state: PackedState, batch: dict[str, jax.Array]) -> tuple[PackedState, Metrics]:
        run = timed_step if timeline.next_step() else step
        lowered = training()
        return one_at_a_time(run)(lowered.shape, state, batch, lowered.arrays)

    def evaluate(state: PackedState, batch: dict[str, jax.Array]) -> Sums:
        lowered = evaluation(len(batch["index"]) // num_data)
        return one_at_a_time(forward)(lowered.shape, of_state.newest(state).params, batch, lowered.arrays)

    def from_canonical(tree: states.Canonical, private: states.Canonical | None = None) -> PackedState:
        timeline.steps_before(int(tree["step"]))
        return of_state.distribute(states.from_canonical(tree, like), private, mesh)

    def report(_: PackedState, workdir: Path) -> dict[str, Any]:
        if details.trace:
            timeline.save(workdir / "timeline.png", details.schedule, table)
        return {}

    def timelines() -> dict[str, Sequence[Span]]:
        planned = simulate_table(with_filling(table), Times(1, 1, 1)).timeline
        titles: dict[str, Sequence[Span]] = {f"{details.schedule}, planned, if F, B and W take equal time": planned}
        if timeline.is_measured:
            measured = timeline.spans(table)
            seconds = float(max(span.end for span in measured))
            titles[f"{details.schedule}, measured in step {details.trace}: {seconds:.3g} s"] = measured
        return titles

    on_mesh, never_drains = batch_placer(mesh), isinstance(of_state, ContinuousState)

    def place(batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        return on_mesh(padded(batch, problem.batch) if never_drains else batch)

    def num_in_flight(state: PackedState) -> int:
        most = max(stage.updated_after for stage in plan.delays.stages) if plan.delays else 0
        return min(int(jax.device_get(state.private.num_entered)), most) if never_drains else 0

    trips = update_trips(details.lowered.shape, table.num_clocks)

    def compile_programs() -> list[CompiledProgram]:
        branches = device_branches(details.lowered, staged.stages)
        frequencies = trips | {scope: one.fractions for scope, one in branches.items()}
        return [CompiledProgram(lower_step(plan, problem, mesh).compile(), frequencies, branches=branches)]

    return Strategy(
        plan,
        tuple(mesh.devices.flat),
        init=lambda key: of_state.init(key, mesh),
        place=place,
        step=train,
        evaluate=evaluate,
        to_canonical=lambda state: states.to_canonical(of_state.gather(state)),
        from_canonical=from_canonical,
        compile=compile_programs,
        to_private=of_state.private_state,
        num_in_flight=num_in_flight,
        report=report,
        timelines=timelines,
    )


def lower_step(plan: Plan[PipelineDetails], problem: Problem, mesh: Mesh) -> jax.stages.Lowered:
    """Trace and lower a training step for the problem's batch, from shapes alone."""
    shape, arrays = plan.details.lowered
    state, tables = plan.details.state.packed.abstract(mesh), table_layout(plan.axes, arrays).abstract(mesh)
    batch = with_shardings(problem.batch, by_replica(mesh))
    lowered: jax.stages.Lowered = jit_train_step(plan.details, mesh).lower(shape, state, batch, tables)
    return lowered


def jit_train_step(details: PipelineDetails, mesh: Mesh, timeline: Timeline | None = None) -> Any:
    """Jit a training step: (table's shape, state, batch, table's arrays) -> (state, metrics). It donates the state.

    Tables of the same shape, with arrays of the same size, share a compiled program.
    """
    state, packed = details.state, details.state.packed
    if isinstance(state, ContinuousState):
        function = continuous_step(state, details.remat, timeline)
    else:
        function = pipeline_step(state, details.remat, timeline)
    return jit_on_mesh(function, packed, (packed.specs, PartitionSpec()), mesh, donate_argnums=1)


def jit_on_mesh(function: Callable[..., Any], of_state: Layout, out_specs: Any, mesh: Mesh, **options: Any) -> Any:
    """Jit a function over the mesh: (table's shape, state, batch, table's arrays) -> results.

    Inside `shard_map`, `function` receives each device's parts of these arguments.
    """

    def mapped(shape: TableShape, state: Any, batch: Batch, arrays: TableArrays) -> Any:
        tables = table_layout(of_state.axes, arrays)

        def on_device(state: Any, batch: Batch, arrays: TableArrays) -> Any:
            return function(shape, state, batch, tables.local(arrays))

        in_specs = of_state.specs, PartitionSpec(DATA), tables.specs
        return jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(
            state, batch, arrays
        )

    return jax.jit(mapped, static_argnums=0, compiler_options=STASH_IN_PLACE, **options)
