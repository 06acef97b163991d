"""Builds a planned pipeline whose stages are programs of their own, dispatched in the order of the table.

config.pipeline.executor chooses between it and the engine in lock step (lockstep.py). The state, the exchange and the
optimizer step are those of lock step; what differs is that nothing is packed and no device waits for a clock.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar import layout
from jaxpar.core import mesh as meshes
from jaxpar.core import state as states
from jaxpar.core import step as steps
from jaxpar.core.groups import ReplicaGroup
from jaxpar.core.loss_scale import LossScale, find_scale
from jaxpar.core.mesh import DATA
from jaxpar.core.plan import NARROW_PARAMETERS, Plan, state_memory
from jaxpar.core.state import Canonical, State, nbytes
from jaxpar.core.step import Metrics, Problem, with_shardings
from jaxpar.launch import processes
from jaxpar.layout import Layout
from jaxpar.models.model import Batch
from jaxpar.strategies.pipeline.details import ExecutorResources, PipelineDetails, num_unapplied
from jaxpar.strategies.pipeline.executor.continuous import padded
from jaxpar.strategies.pipeline.executor.dispatch import (
    DispatchedAction,
    StageDispatcher,
    StepInputs,
    dispatch_order,
    input_specs,
    narrow_shapes,
)
from jaxpar.strategies.pipeline.executor.dispatch_continuous import ContinuousSteps
from jaxpar.strategies.pipeline.executor.dispatch_costs import (
    activation_memory,
    dispatch_traffic,
    dispatched_layouts,
    in_flight_layouts,
)
from jaxpar.strategies.pipeline.executor.dispatch_update import DispatchedState, FlushedSteps
from jaxpar.strategies.pipeline.executor.enqueue import (
    DEVICES,
    ON_ALL,
    Compiler,
    Host,
    MeshColumns,
    Program,
    program_on,
)
from jaxpar.strategies.pipeline.executor.state import StagedState
from jaxpar.strategies.pipeline.executor.timeline import ActionNumbers, Stopwatch, Timeline
from jaxpar.strategies.pipeline.tables.periodic import num_in_flight, unroll, versions_kept
from jaxpar.strategies.pipeline.tables.schedule import forward_only
from jaxpar.strategies.placement import BatchPlacement
from jaxpar.strategies.strategy import CompiledProgram, Strategy
from jaxpar.tasks import Sums


def resources(details: PipelineDetails, *, on_cpu: bool) -> ExecutorResources:
    """Return the layouts of the state, and what each device holds and sends. on_cpu: as in `dispatch_traffic`."""
    table, programs, staged = details.table, details.programs, details.staged
    order, axes = dispatch_order(table), staged.packed.axes
    layouts: dict[str, Layout] = dispatched_layouts(staged, axes)._asdict()
    state, whole, num_versions = state_memory(layouts), table, [1] * table.num_devices
    if table.period:
        in_flight = in_flight_layouts(order, table, programs, staged)
        state = state_memory({**layouts, "batches": in_flight["batches"]})
        layouts["private"] = layout.join({"residuals": layouts["private"], **in_flight})
        whole, kept = unroll(table, 3 * num_in_flight(table)), versions_kept(table)
        for group in details.stages.groups:
            for column in group:  # all devices of a stage hold the same versions
                num_versions[column] = max(kept[other] for other in group)
    activations, held = activation_memory(dispatch_order(whole), programs), []
    narrow = narrow_shapes(programs, staged.all_reduce.shards)
    for device, parts in enumerate(state):
        column = device // math.prod(staged.group.sizes.values()) % table.num_devices
        kind, shards = details.stages.kinds[column], staged.all_reduce.shards
        params = nbytes(staged.params.trees[kind])
        grads = nbytes(staged.means[kind].local_shapes) if shards and shards.stage > 1 else params
        more = {NARROW_PARAMETERS: copies} if (copies := nbytes(narrow[column])) else {}
        if table.period:
            more = {"earlier versions": (num_versions[column] - 1) * params}
        held.append({**parts, **more, "gradients": grads, **activations[column]})
    return layouts, tuple(held), dispatch_traffic(order, programs, staged, on_cpu=on_cpu)


def build(plan: Plan[PipelineDetails], problem: Problem, devices: Sequence[jax.Device]) -> Strategy[DispatchedState]:
    """Build the strategy on the first of these devices."""
    details, num_data = plan.details, plan.num_replicas
    table, stages, staged = details.table, details.stages, details.staged
    mesh = meshes.make_mesh(plan.axes, devices)
    columns, of_batch = MeshColumns(mesh, stages.groups), BatchPlacement(mesh, problem.batch)
    state_of = StateOnGroups(staged, columns)
    num_phases = details.lowered.shape.num_phases
    dispatcher = partial(StageDispatcher, staged, columns=columns, of_batch=of_batch.specs)
    # The weights of a pipeline that never drains change within a step.
    narrowing = None if table.period else details.programs
    training = dispatcher(table, num_phases=num_phases, remat=details.remat, programs=narrowing)
    begin = begin_program(mesh, of_batch, staged.group, table.num_microbatches)
    each_step = FlushedSteps(staged, columns, training)
    if table.period:
        each_step = ContinuousSteps(staged, columns, training, details.programs)
    settled = meshes.settled if mesh.size > table.num_devices else lambda x: x
    # Collectives of all devices may follow, such as those that agree on a signal, while arrays are still in flight.
    at_end = meshes.settled if jax.process_count() > 1 else lambda x: x
    timeline = Timeline(details.measured_step, details.schedule, table)

    @functools.cache
    def evaluation(num_examples: int) -> tuple[Program, StageDispatcher]:
        # as many of the training microbatches as divide a replica's examples
        number = math.gcd(num_examples, table.num_microbatches)
        forward = forward_only(table.num_devices, number, table.stages)
        return split_program(mesh, of_batch, number), dispatcher(forward, num_phases=1, remat="none")

    def train(state: DispatchedState, batch: Batch) -> tuple[DispatchedState, Metrics]:
        if not timeline.next_step():
            return run(state, batch, DEVICES)
        actions = each_step.actions(state)
        with Stopwatch() as stopwatch:
            results = run(state, batch, stopwatch)
            record(timeline, columns, actions, stopwatch.times())
        return results

    def run(state: DispatchedState, batch: Batch, host: Host) -> tuple[DispatchedState, Metrics]:
        scaling = None
        if staged.scaling is not None:
            scaling = columns.everywhere([find_scale(of_group) for of_group in state.optimizer])
        step, inputs = settled(host.call(begin, state.step, state.key, batch, scaling))
        after, metrics = at_end(each_step(state, inputs, host))
        return after._replace(step=step), metrics

    def evaluate(state: DispatchedState, batch: Batch) -> Sums:
        split, forward = evaluation(len(batch["index"]) // num_data)
        inputs = columns.split(DEVICES.call(split, batch))
        return at_end(each_step.sums(forward.run(state.params, inputs)))

    def init(key: jax.Array) -> DispatchedState:
        return each_step.begin(state_of.init(key))

    def from_canonical(tree: Canonical, private: Canonical | None = None) -> DispatchedState:
        timeline.steps_before(int(tree["step"]))
        state = each_step.begin(state_of.from_canonical(tree))
        return each_step.from_private(state, private) if private else state

    def place(batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        return of_batch.place(padded(batch, problem.batch) if table.period else batch)

    def compile_programs() -> list[CompiledProgram]:
        compiler, state = Compiler(), each_step.abstract(state_of.abstract())
        batch: Any = of_batch.abstract
        for _ in range(2 * num_in_flight(table) if table.period else 1):  # until all stages are busy
            compiler.begin_step()
            state, _ = run(state, batch, compiler)
        return compiled_calls(compiler)

    return Strategy(
        plan,
        tuple(mesh.devices.flat),
        init=init,
        place=place,
        step=train,
        evaluate=evaluate,
        to_canonical=state_of.to_canonical,
        from_canonical=from_canonical,
        compile=compile_programs,
        to_private=each_step.to_private,
        num_in_flight=lambda state: num_unapplied(plan, state.private) if table.period else 0,
        report=timeline.report,
        timelines=timeline.charts,
    )


def record(
    timeline: Timeline, columns: MeshColumns, actions: Sequence[DispatchedAction], times: Sequence[tuple[float, float]]
) -> None:
    """Record when the actions of a step ran. The update of a stage is that of all its replicas."""
    for action, (start, end) in zip(actions, times, strict=True):
        group = columns.groups[columns.group_of[action.column]]
        for column in group if action.is_update else [action.column]:
            timeline.record(column, ActionNumbers(action.phase, action.microbatch, action.chunk), start, end)


def compiled_calls(compiler: Compiler) -> list[CompiledProgram]:
    """Return the programs that the step calls."""
    return [
        CompiledProgram(one.compiled, arguments=one.program.kinds, calls=one.calls, mesh=one.program.mesh)
        for one in compiler.called.values()
        if one.calls
    ]


def split_program(mesh: Mesh, of_batch: BatchPlacement, number: int) -> Program:
    """Return the program that splits a batch into the microbatches of an evaluation."""

    def on_device(batch: Batch) -> StepInputs:
        return StepInputs(None, jnp.ones(()), steps.microbatches(batch, number))

    return program_on(mesh, on_device, (of_batch.specs,), input_specs(of_batch.specs), ("inputs",))


def begin_program(mesh: Mesh, of_batch: BatchPlacement, group: ReplicaGroup, num_microbatches: int) -> Program:
    """Return the program that begins a step: (step, run's key, batch, scale) -> next step, inputs of the actions."""

    def on_device(
        step: jax.Array, key: jax.Array, batch: Batch, scaling: LossScale | None
    ) -> tuple[jax.Array, StepInputs]:
        # so that the gradient is the mean over replicas
        weight = jax.lax.pmean(group.divisor(steps.batch_weight(batch)), DATA)
        key_data = jax.random.key_data(steps.dropout_key(key, step))
        return step + 1, StepInputs(key_data, weight, steps.microbatches(batch, num_microbatches), scaling)

    specs = (ON_ALL, ON_ALL, of_batch.specs, ON_ALL)
    return program_on(mesh, on_device, specs, (ON_ALL, input_specs(of_batch.specs)), ("inputs",) * len(specs))


class StateOnGroups:
    """Converts the state between its canonical form and that of the groups, without the private state."""

    def __init__(self, staged: StagedState, columns: MeshColumns):
        self._staged, self._columns = staged, columns
        # by group: its first column, and its mesh
        self._groups = [(group[0], mesh) for group, mesh in zip(columns.groups, columns.of_group, strict=True)]
        self._on_all = NamedSharding(columns.mesh, ON_ALL)

    def init(self, key: jax.Array) -> DispatchedState:
        """Return the state at step 0."""
        init_key, run_key = states.split(key)
        data, made = np.asarray(jax.random.key_data(init_key)), []
        stages, optimizer = self._staged.stages, self._staged.problem.optimizer
        for column, mesh in self._groups:
            layouts = self._layouts(column)

            def of_group(data: jax.Array, column: int = column, layouts: Any = layouts) -> tuple[Any, Any]:
                shifts = jnp.asarray(stages.shifts[column])
                params = stages.init(jax.random.wrap_key_data(data), stages.kinds[column], shifts)
                return layouts[0].to_global(params), layouts[1].to_global(optimizer.init(params))

            made.append(jax.jit(of_group, out_shardings=tuple(of.shardings(mesh) for of in layouts))(data))
        params, moments = zip(*made, strict=True)
        step, key = jax.device_put((np.zeros((), np.int32), np.asarray(run_key)), self._on_all)
        return DispatchedState(step, key, params, moments, ())

    def from_canonical(self, tree: Canonical) -> DispatchedState:
        """Return a canonical state on the groups."""
        problem = self._staged.problem
        state = states.from_canonical(tree, states.abstract_state(problem.model, problem.optimizer))
        step, key = jax.device_put((state.step, state.key), self._on_all)
        parts, made = (self._staged.params.split(state.params), self._staged.optimizer.split(state.optimizer)), []
        for column, mesh in self._groups:
            for of, of_part in zip(parts, self._layouts(column), strict=True):
                whole = of_part.to_global(of[column], np)
                made.append(jax.tree.map(processes.put_on_devices, whole, of_part.shardings(mesh)))
        params, optimizer = tuple(made[::2]), tuple(made[1::2])
        return DispatchedState(step, key, params, optimizer, ())

    def to_canonical(self, state: DispatchedState) -> Canonical:
        """Return the canonical state, as NumPy arrays."""
        step, key, params, optimizer = processes.fetch_from_owners(state[:4])
        columns, parts = range(len(self._columns.of_column)), []
        for staged, of_groups in zip((self._staged.params, self._staged.optimizer), (params, optimizer), strict=True):
            of_kinds = [staged.of_kinds[kind] for kind in self._staged.stages.kinds]
            held = [of_kinds[column].to_canonical(of_groups[self._columns.group_of[column]]) for column in columns]
            parts.append(staged.assemble(held))
        return states.to_canonical(State(step, key, *parts))

    def abstract(self) -> DispatchedState:
        """Return the shapes of the state, with shardings."""
        like = states.abstract_state(self._staged.problem.model, self._staged.problem.optimizer)
        step, key = with_shardings((like.step, like.key), self._on_all)
        made = [tuple(of.abstract(mesh) for of in self._layouts(column)) for column, mesh in self._groups]
        params, optimizer = zip(*made, strict=True)
        return DispatchedState(step, key, params, optimizer, ())

    def _layouts(self, column: int) -> tuple[Layout, Layout]:
        """Return the layouts of the parameters and the optimizer state of a column over the replicas."""
        kind = self._staged.stages.kinds[column]
        return self._staged.params.of_kinds[kind], self._staged.optimizer.of_kinds[kind]
