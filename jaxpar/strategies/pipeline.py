"""`pipeline`: the layers in stages over the devices, the batch in microbatches through them, by any schedule.

Every schedule adds up the same gradients, so the training is that of `single` with as many accumulation steps as
there are microbatches. Schedules are tables (jaxpar/pipeline/tables/schedule.py); one engine runs them all
(jaxpar/pipeline/executor/engine.py). Replicas of the pipeline on the data axis agree on gradients by config.exchange.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxpar import layout, models
from jaxpar import mesh as meshes
from jaxpar import state as states
from jaxpar import step as steps
from jaxpar.cluster import Cluster
from jaxpar.errors import UserError, check_choice, nearest
from jaxpar.exchange.fuse import AllReduce
from jaxpar.exchange.reduce import psum_small, ring_traffic
from jaxpar.mesh import DATA, STAGE
from jaxpar.models.model import Batch
from jaxpar.pipeline.executor import partition
from jaxpar.pipeline.executor.engine import PipelineEngine
from jaxpar.pipeline.executor.lowering import INBOXES, Lowered, Shape, lower
from jaxpar.pipeline.executor.packing import Packed
from jaxpar.pipeline.executor.programs import REMATS
from jaxpar.pipeline.executor.stages import Stages
from jaxpar.pipeline.executor.state import SPECS, PackedState, StagedState, local, stacked
from jaxpar.pipeline.executor.timeline import Timeline
from jaxpar.pipeline.executor.update import StageUpdate
from jaxpar.pipeline.tables import schedule, table_file
from jaxpar.pipeline.tables.table import BW, F, Table, is_training
from jaxpar.plan import Decision, Plan, Traffic
from jaxpar.state import nbytes
from jaxpar.step import Metrics, Problem
from jaxpar.strategies import exchanges
from jaxpar.strategies.strategy import CompiledProgram, Strategy, placer, with_shardings
from jaxpar.tasks import Sums

# Lets XLA see that the branch of an action writes into a stash in place; else it copies whole stashes every clock.
IN_PLACE = {f"xla_{backend}_copy_insertion_use_region_analysis": True for backend in ("cpu", "gpu")}


def decide(config: ConfigDict, cluster: Cluster) -> Decision:
    """Decide on the mesh and the table. Raises UserError for what is wrong with config.mesh and config.pipeline."""
    check_choice("pipeline.remat", config.pipeline.remat, REMATS)
    if config.optimizer.accumulation_steps != 1:
        raise UserError(
            f"config.optimizer.accumulation_steps is {config.optimizer.accumulation_steps}; it must be 1 with "
            "config.strategy='pipeline', which accumulates over config.pipeline.num_microbatches"
        )
    if config.pipeline.trace < 0:
        raise UserError(
            f"config.pipeline.trace is {config.pipeline.trace}; it must be the number of a step, or 0 for none"
        )
    if config.pipeline.trace:
        meshes.check_one_process(f"config.pipeline.trace={config.pipeline.trace}", cluster)
    axes = meshes.sizes(config, cluster)
    exchanges.check_on_gradients(config, axes[DATA], cluster)
    table = build_table(config)
    if config.model.name in models.MODELS:  # the layers' names are the same whatever the data
        model = models.build(config, models.MODELS[config.model.name], cluster)
        partition.check([layer.name for layer in model.layers], config.pipeline.partition, table.num_stages)
    m = table.num_microbatches
    words = f"{axes[DATA]} replicas (the data axis) x {m} microbatches (config.pipeline.num_microbatches)"
    return Decision(axes, axes[DATA] * m, words, axes[DATA], table)


def build_table(config: ConfigDict) -> Table:
    """The table that config.pipeline.schedule names. Raises UserError where there is none such."""
    c = config.pipeline
    table = load_table(config) if table_file.is_file(c.schedule) else named_table(config)
    asked = {
        "mesh.stage": (config.mesh.stage, table.num_devices),
        "pipeline.num_microbatches": (c.num_microbatches, table.num_microbatches),
        "pipeline.num_chunks": (c.num_chunks, table.num_chunks),
    }
    for key, (value, there) in asked.items():
        if value not in (0, there):
            raise UserError(
                f"config.{key} is {value}; the table of config.pipeline.schedule={c.schedule!r} has {there}"
            )
    return table


def load_table(config: ConfigDict) -> Table:
    """The CSV table that config.pipeline.schedule names, which this strategy can run."""
    name = config.pipeline.schedule
    try:
        table = table_file.load(name)
    except ValueError as error:
        raise UserError(f"config.pipeline.schedule is {error}") from error
    kinds = table.actions["kind"]
    if not is_training(table):
        raise UserError(f"config.pipeline.schedule is {name!r}, a forward pass alone: it has no backward")
    if (kinds == BW).any() and (kinds != BW)[kinds != F].any():
        raise UserError(
            f"config.pipeline.schedule is {name!r}, which has BW next to B and W; it may have one of the two"
        )
    if table.actions["version"].any():
        raise UserError(f"config.pipeline.schedule is {name!r}, which asks for other weight versions than 0")
    return table


def named_table(config: ConfigDict) -> Table:
    """The table of the schedule that config.pipeline.schedule names."""
    c, p = config.pipeline, config.mesh.stage
    if c.schedule not in schedule.SCHEDULES:
        raise UserError(
            f"config.pipeline.schedule is {c.schedule!r}; it must be {', '.join(schedule.SCHEDULES)}, or the path of a "
            f"CSV table.{nearest(c.schedule, schedule.SCHEDULES)}"
        )
    if c.num_microbatches > config.batch_size:
        raise UserError(
            f"config.pipeline.num_microbatches is {c.num_microbatches}; it must be at most config.batch_size, "
            f"{config.batch_size}"
        )
    sizes = {
        "num_devices": p,
        "num_microbatches": c.num_microbatches or (1 if c.schedule == "model_parallel" else 4 * p),
        "num_chunks": c.num_chunks or schedule.SCHEDULES[c.schedule].num_chunks,
    }
    if reason := schedule.obstacle(c.schedule, **sizes):
        raise UserError(f"config.pipeline.{reason}")
    return schedule.build(c.schedule, **sizes)


@dataclass(frozen=True)
class PipelineDetails:
    """What `build` needs of a plan, and what can be asked of a pipeline without devices.

    Attributes:
      schedule: as the config names it.
      lowered: the table in the engine's form, in NumPy.
      stages: which layers are where.
      state: where the state lives.
      all_reduce: how replicas agree on gradients.
      remat: what the backward pass finds saved.
      trace: the step whose actions are timed; 0: none.
    """

    schedule: str
    lowered: Lowered
    stages: Stages
    state: StagedState
    all_reduce: AllReduce
    remat: str
    trace: int

    def engine(self, problem: Problem, num_data: int) -> PipelineEngine:
        """Trace the programs of a training step, for the problem's batch."""
        batch = {
            name: jax.ShapeDtypeStruct((len(x) // num_data, *x.shape[1:]), x.dtype) for name, x in problem.batch.items()
        }
        rows = jax.eval_shape(partial(steps.microbatches, num=self.lowered.shape.num_microbatches), batch)
        key = jax.eval_shape(lambda: jax.random.key(0))
        packing = self.state.params.packing
        return PipelineEngine(self.stages, packing, self.lowered.shape, self.remat, steps.abstract(rows, 1), key)


def plan(config: ConfigDict, shapes: Problem, cluster: Cluster, decision: Decision | None = None) -> Plan:
    """Plan the stages of config.pipeline, and the replicas of the pipeline on the data axis.

    Raises:
      UserError: as `decide`; or the model cannot be cut where config.pipeline.partition says.
    """
    decision = decision or decide(config, cluster)
    table, num_data = decision.table, decision.num_replicas
    bounds = partition.bounds(shapes.model, shapes.batch, config.pipeline.partition, table.num_stages)
    stages = Stages(shapes.model, bounds, table.stages, shapes.batch, shapes.task)
    state = StagedState(decision.axes, shapes, stages)
    all_reduce = exchanges.on_gradients(config, num_data)
    c = config.pipeline
    details = PipelineDetails(c.schedule, lower(table), stages, state, all_reduce, c.remat, c.trace)
    private = jax.eval_shape(
        lambda: jax.vmap(lambda _: all_reduce.init(state.params.packing.shapes), axis_name=DATA)(jnp.zeros(num_data))
    )
    layouts = state.layouts | {"private": layout.per_replica(decision.axes, steps.abstract(private, 1), DATA)}
    memory = {
        "parameters": state.params.packing.nbytes,
        "optimizer": state.optimizer.packing.nbytes,
        "private": layouts["private"].nbytes_on(),
        **activation_bytes(details.engine(shapes, num_data)),
    }
    return Plan(
        "pipeline",
        decision,
        summarize(config, table, stages),
        layouts,
        (memory,) * (num_data * table.num_devices),
        plan_traffic(shapes, table, details, num_data),
        all_reduce,
        exchanges.private_key(config, num_data) | {"bounds": list(bounds), "stages": table.stages.tolist()},
        exchanges.differs(config),
        details,
    )


def activation_bytes(engine: PipelineEngine) -> dict[str, int]:
    """Return the bytes on each device of what actions keep for later ones, and of what is in flight between devices."""
    slots = dict(engine.shape.num_slots)
    stashes = sum(slots[stash] * packing.nbytes for stash, packing in engine.stashes.items())
    inboxes = sum(slots.get(inbox, 0) for inbox in INBOXES)
    return {"stashes": stashes, "transfers": (inboxes + len(INBOXES)) * engine.wire.nbytes}


def summarize(config: ConfigDict, table: Table, stages: Stages) -> str:
    """Return the schedule, and where the model is cut, in one line."""
    layers = [layer.name for layer in stages.model.layers]
    begins = ", ".join(layers[begin] for begin in stages.bounds[1:-1])
    summary = f"{config.pipeline.schedule}, {table.num_microbatches} microbatches, "
    return (
        summary
        + f"{table.num_stages} stages on {table.num_devices} devices"
        + (f" (cut at {begins})" if begins else "")
    )


def plan_traffic(shapes: Problem, table: Table, details: PipelineDetails, num_data: int) -> tuple[Traffic, ...]:
    """Return what a device sends in a step: over each route in every clock, and its gradients."""
    stages, routes = details.stages, len(details.lowered.shape.wires)
    inputs = shapes.model.inputs(shapes.batch)
    size = max((nbytes(inputs[begin]) for begin in stages.bounds[1:-1]), default=0)
    size //= num_data * table.num_microbatches
    dtype = jnp.dtype(inputs[stages.bounds[1]].dtype).name if table.num_stages > 1 else "float32"
    sends = routes * table.num_clocks
    permutes = Traffic("collective-permute", dtype, STAGE, sends * size, messages=sends)
    copied = {(tie.source, tie.source_name) for device in stages.examples for tie in stages.copies(device)}
    copied_bytes = nbytes([shapes.model.shapes[layer][name] for layer, name in sorted(copied)])
    tied = ring_traffic("all-reduce", 2, STAGE, table.num_devices, copied_bytes, "float32")  # gradients of tied arrays
    gradients = details.all_reduce.traffic(details.state.params.packing.shapes)
    return (permutes, *gradients, tied._replace(messages=len(copied)))


def build(plan: Plan, problem: Problem, devices: Sequence[jax.Device]) -> Strategy:
    """Build a planned pipeline on the first of these devices."""
    table, details, num_data = plan.decision.table, plan.details, plan.num_replicas
    mesh = meshes.build(plan.axes, devices)
    staged, all_reduce = details.state, details.all_reduce
    divided, by_stage = NamedSharding(mesh, PartitionSpec(DATA)), NamedSharding(mesh, PartitionSpec(STAGE))
    like = states.abstract(problem.model, problem.optimizer)
    state_and_metrics, replicated = (SPECS, PartitionSpec()), PartitionSpec()
    step = compiled(train_step(staged, all_reduce, details.remat), SPECS, state_and_metrics, mesh, donate_argnums=1)
    forward = compiled(evaluate_step(staged), PartitionSpec(STAGE), replicated, mesh)
    one_at_a_time = partial(meshes.one_at_a_time, mesh=mesh)

    @functools.cache
    def on_devices() -> tuple[Any, Any]:
        """The table's arrays on the devices that they are for."""
        arrays: tuple[Any, Any] = jax.device_put((details.lowered.actions, details.lowered.arrivals), by_stage)
        return arrays

    @functools.cache
    def evaluation(num_rows: int) -> Lowered:
        """The forward pass in as many of the microbatches as the rows of a replica divide into."""
        number = math.gcd(num_rows, table.num_microbatches)
        lowered = lower(schedule.forward_only(table.num_devices, number, table.stages))
        actions, arrivals = jax.device_put((lowered.actions, lowered.arrivals), by_stage)
        return Lowered(lowered.shape, actions, arrivals)

    def evaluate(state: PackedState, batch: dict[str, jax.Array]) -> Sums:
        lowered = evaluation(len(batch["index"]) // num_data)
        return one_at_a_time(forward)(lowered.shape, state.params, batch, lowered.actions, lowered.arrivals)

    timeline = Timeline(details.trace)
    traced_step = train_step(staged, all_reduce, details.remat, timeline)
    traced = compiled(traced_step, SPECS, state_and_metrics, mesh, donate_argnums=1)

    def train(state: PackedState, batch: dict[str, jax.Array]) -> tuple[PackedState, Metrics]:
        run = traced if timeline.next_step() else step
        return one_at_a_time(run)(details.lowered.shape, state, batch, *on_devices())

    def fresh_private() -> Any:
        return jax.tree.map(lambda x: x[None, None], all_reduce.init(staged.params.packing.shapes))

    init_private = jax.jit(
        jax.shard_map(fresh_private, mesh=mesh, in_specs=(), out_specs=SPECS.private, check_vma=False)
    )

    def with_private(state: PackedState, private: states.Canonical | None = None) -> PackedState:
        fresh = init_private()
        if private:
            fresh = serialization.from_state_dict(fresh, private)
        return state._replace(private=jax.device_put(fresh, NamedSharding(mesh, SPECS.private)))

    def from_canonical(tree: states.Canonical, private: states.Canonical | None = None) -> PackedState:
        timeline.steps_before(int(tree["step"]))
        return with_private(staged.distribute(states.from_canonical(tree, like), mesh), private)

    def compile() -> list[CompiledProgram]:
        state = staged.shapes(table.num_devices)._replace(private=jax.eval_shape(init_private))
        parts = [with_shardings(part, NamedSharding(mesh, spec)) for part, spec in zip(state, SPECS, strict=True)]
        arrays = with_shardings((details.lowered.actions, details.lowered.arrivals), by_stage)
        arguments = PackedState(*parts), with_shardings(problem.batch, divided), *arrays
        return [CompiledProgram(step.lower(details.lowered.shape, *arguments).compile())]

    def report(_: PackedState, workdir: Path) -> dict[str, Any]:
        if details.trace:
            timeline.save(workdir / "timeline.png", details.schedule, table)
        return {}

    return Strategy(
        plan,
        tuple(mesh.devices.flat),
        init=lambda key: with_private(staged.init(key, mesh)),
        place=placer(divided),
        step=train,
        evaluate=evaluate,
        to_canonical=lambda state: states.to_canonical(staged.gather(state)),
        from_canonical=from_canonical,
        compile=compile,
        to_private=lambda state: serialization.to_state_dict(state.private) if jax.tree.leaves(state.private) else {},
        report=report,
    )


def compiled(function: Callable[..., Any], state_specs: Any, out_specs: Any, mesh: Mesh, **options: Any) -> Any:
    """(shape, state, batch, actions, arrivals) -> what `function` makes of each device's part of them."""
    staged = PartitionSpec(STAGE)

    def mapped(shape: Shape, *arguments: Any) -> Any:
        return jax.shard_map(
            partial(function, shape),
            mesh=mesh,
            in_specs=(state_specs, PartitionSpec(DATA), staged, staged),
            out_specs=out_specs,
            check_vma=False,
        )(*arguments)

    return jax.jit(mapped, static_argnums=0, compiler_options=IN_PLACE, **options)


def train_step(
    staged: StagedState, all_reduce: AllReduce, remat: str, timeline: Timeline | None = None
) -> Callable[..., tuple[PackedState, Metrics]]:
    """A device's part of a step: all actions of the table, then the exchange of gradients and the update."""

    def step(
        shape: Shape, state: PackedState, batch: Batch, actions: Any, arrivals: Any
    ) -> tuple[PackedState, Metrics]:
        state = PackedState(
            state.step, state.key, local(state.params), local(state.optimizer), local(local(state.private))
        )
        rows = steps.microbatches(batch, shape.num_microbatches)
        key = steps.dropout_key(state.key, state.step)
        weight = jax.lax.pmean(batch["weights"].sum(), DATA)  # so that gradients are replicas' means
        engine = PipelineEngine(
            staged.stages, staged.params.packing, shape, remat, steps.abstract(rows, 1), steps.abstract(key), timeline
        )
        local_grads, local_sums = engine.run(local((actions, arrivals)), state.params, rows, key, weight)
        faults = 1.0 - jnp.isfinite(optax.tree.norm(local_grads))  # which a code may hide
        sums, faults = psum_small((local_sums, faults), (DATA, STAGE))
        grads, residuals = all_reduce.mean(local_grads, state.private)
        update = StageUpdate(staged, jax.lax.axis_index(STAGE))
        for tie in update.copied:  # the gradient of an array that several devices use is the sum of theirs
            grads = update.replace(tie, grads, jax.lax.psum(update.part(tie, grads), STAGE))
        grad_norm = jnp.sqrt(jax.lax.psum(update.squares(grads), STAGE))
        after, metrics = update(state, grads, sums, jnp.where(faults == 0, grad_norm, jnp.nan))
        residuals = jax.tree.map(lambda new, old: jnp.where(metrics.finite, new, old), residuals, state.private)
        packed = stacked((after.params, after.optimizer, stacked(residuals)))
        return PackedState(after.step, after.key, *packed), metrics

    return step


def evaluate_step(staged: StagedState) -> Callable[..., Sums]:
    """A device's part of the forward pass without dropout."""

    def evaluate(shape: Shape, params: Packed, batch: Batch, actions: Any, arrivals: Any) -> Sums:
        rows = steps.microbatches(batch, shape.num_microbatches)
        engine = PipelineEngine(staged.stages, staged.params.packing, shape, "none", steps.abstract(rows, 1), None)
        _, sums = engine.run(local((actions, arrivals)), local(params), rows, None, jnp.ones(()))
        return jax.lax.psum(sums, (DATA, STAGE))

    return evaluate
