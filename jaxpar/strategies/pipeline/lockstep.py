"""Builds a planned pipeline as one program for all devices, which step through the clocks of the table together.

config.pipeline.executor chooses between it and programs of the stages (dispatched.py). The engine is
jaxpar/strategies/pipeline/executor/engine.py.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxpar.core import mesh as meshes
from jaxpar.core import state as states
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.plan import Plan, Traffic, ring_traffic, state_memory
from jaxpar.core.state import nbytes
from jaxpar.core.step import Metrics, Problem
from jaxpar.exchange.exchange import shared
from jaxpar.exchange.reduce import added_up
from jaxpar.layout import Layout
from jaxpar.models.model import Batch
from jaxpar.strategies.pipeline.details import ExecutorResources, PipelineDetails, num_unapplied
from jaxpar.strategies.pipeline.executor.continuous import ContinuousState, continuous_step, padded, update_trips
from jaxpar.strategies.pipeline.executor.dispatch import dispatch_order
from jaxpar.strategies.pipeline.executor.dispatch_costs import traffic_within_groups
from jaxpar.strategies.pipeline.executor.engine import pipeline_evaluation, pipeline_step
from jaxpar.strategies.pipeline.executor.lowering import (
    LoweredTable,
    TableArrays,
    TableShape,
    device_branches,
    lower_table,
    table_layout,
)
from jaxpar.strategies.pipeline.executor.state import PackedState
from jaxpar.strategies.pipeline.executor.timeline import Timeline
from jaxpar.strategies.pipeline.tables.schedule import forward_only
from jaxpar.strategies.placement import IN_PLACE, BatchPlacement, product_options
from jaxpar.strategies.strategy import CompiledProgram, Strategy
from jaxpar.tasks import Sums

# Lets XLA write to a stash in place inside the branch of an action. Otherwise it copies whole stashes in every clock.
STASH_IN_PLACE = IN_PLACE | {"xla_gpu_copy_insertion_use_region_analysis": True}


def resources(details: PipelineDetails, *, on_cpu: bool) -> ExecutorResources:
    """Return the layouts of the state, and what a device holds and sends. Each needs as much as the fullest one.

    on_cpu: whether XLA widens what the devices of a stage send.
    """
    engine, table, stages, state = details.engine, details.table, details.stages, details.state
    held = [{**parts, **engine.activation_bytes} for parts in state_memory(state.purposes)]
    # One transfer per clock and route used in it.
    clocks = details.lowered.shape.clocks
    sends = sum(clock.num_transfers for clock in clocks) * table.num_clocks // len(clocks)
    transfers = [
        Traffic("collective-permute", array.dtype.name, STAGE, sends * nbytes([array]), messages=sends)
        for array in engine.transfers.shapes
    ]
    params = details.staged.params.packing
    gradients = details.staged.all_reduce.traffic(params.shapes)
    if details.staged.all_reduce.shards:
        mean, n = details.staged.mean_packing, details.staged.packed.axes[DATA]
        shards = partial(ring_traffic, axis=DATA, size=n, nbytes=n * mean.nbytes, dtype="float32")
        gradients = [shards(kind, 1, num_vectors=len(mean.shapes)) for kind in ("reduce-scatter", "all-gather")]
    # The sums of the gradients of the replicas of a stage, and of tied arrays.
    most, copied = max(map(len, stages.groups)), stages.copied
    within = ring_traffic("all-reduce", 2, STAGE, most, params.nbytes, "float32", num_vectors=len(params.shapes))
    copied_bytes = nbytes([details.staged.mean_of(*array) for array in copied])
    tied = ring_traffic("all-reduce", 2, STAGE, table.num_devices, copied_bytes, "float32", num_vectors=len(copied))
    # In branches, a device sends what its stage does: this is the mean over stages.
    by_column = traffic_within_groups(dispatch_order(table), details.programs, details.staged, on_cpu=on_cpu)
    of_groups = shared(added_up(one for of_column in by_column for one in of_column), 1 / table.num_devices)
    return state.layouts._asdict(), tuple(held), (*transfers, *gradients, within, tied, *of_groups)


def build(plan: Plan[PipelineDetails], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[PackedState]:
    """Build the strategy on the first of these devices."""
    meshes.check_partitioner()
    details, num_data = plan.details, plan.num_replicas
    table, staged = details.table, details.staged
    mesh, timeline = meshes.make_mesh(plan.axes, devices), Timeline(details.measured_step, details.schedule, table)
    of_state = details.state
    like = states.abstract_state(problem.model, problem.optimizer)
    of_batch = BatchPlacement(mesh, problem.batch)
    step, timed_step = (jit_train_step(details, mesh, of_batch, each) for each in (None, timeline))
    forward = jit_on_mesh(pipeline_evaluation(staged), staged.params.packed, PartitionSpec(), mesh, of_batch, {})
    one_at_a_time = partial(meshes.one_at_a_time, mesh=mesh)

    def on_devices(lowered: LoweredTable) -> LoweredTable:
        shape, arrays = lowered
        return LoweredTable(shape, jax.device_put(arrays, table_layout(plan.axes, arrays).shardings(mesh)))

    training = functools.cache(lambda: on_devices(details.lowered))

    @functools.cache
    def evaluation(num_examples: int) -> LoweredTable:
        # as many of the training microbatches as divide a replica's examples
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

    def place(batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        return of_batch.place(padded(batch, problem.batch) if table.period else batch)

    def compile_programs() -> list[CompiledProgram]:
        trips = update_trips(details.lowered.shape, table.num_clocks)
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
        num_in_flight=lambda state: num_unapplied(plan, state.private) if table.period else 0,
        report=timeline.report,
        timelines=timeline.charts,
    )


def lower_step(plan: Plan[PipelineDetails], problem: Problem, mesh: Mesh) -> jax.stages.Lowered:
    """Trace and lower a training step for the problem's batch, from shapes alone."""
    shape, arrays = plan.details.lowered
    state, tables = plan.details.state.packed.abstract(mesh), table_layout(plan.axes, arrays).abstract(mesh)
    of_batch = BatchPlacement(mesh, problem.batch)
    step = jit_train_step(plan.details, mesh, of_batch)
    return step.lower(shape, state, of_batch.abstract, tables)


def jit_train_step(
    details: PipelineDetails, mesh: Mesh, of_batch: BatchPlacement, timeline: Timeline | None = None
) -> Any:
    """Jit a training step: (table's shape, state, batch, table's arrays) -> (state, metrics). It donates the state.

    Tables of the same shape, with arrays of the same size, share a compiled program.
    """
    state, packed = details.state, details.state.packed
    make: Any = continuous_step if isinstance(state, ContinuousState) else pipeline_step
    step = make(state, details.remat, timeline)
    specs, of_products = (packed.specs, PartitionSpec()), product_options(details.stages.model)
    return jit_on_mesh(step, packed, specs, mesh, of_batch, of_products, donate_argnums=1)


def jit_on_mesh(
    function: Callable[..., Any],
    of_state: Layout,
    out_specs: Any,
    mesh: Mesh,
    of_batch: BatchPlacement,
    of_products: dict[str, Any],
    **options: Any,
) -> Any:
    """Jit a function over the mesh: (table's shape, state, batch, table's arrays) -> results.

    Inside `shard_map`, `function` receives each device's parts of these arguments. of_products: `product_options`.
    """

    def mapped(shape: TableShape, state: Any, batch: Batch, arrays: TableArrays) -> Any:
        tables = table_layout(of_state.axes, arrays)

        def on_device(state: Any, batch: Batch, arrays: TableArrays) -> Any:
            return function(shape, state, batch, tables.local(arrays))

        in_specs = of_state.specs, of_batch.specs, tables.specs
        return jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(
            state, batch, arrays
        )

    return jax.jit(mapped, static_argnums=0, compiler_options=STASH_IN_PLACE | of_products, **options)
