"""`pipeline`: the layers in stages over the devices, the batch in microbatches through them, by any schedule.

Every schedule adds up the same gradients, so the training is that of `single` with as many accumulation steps as
there are microbatches. Schedules are tables (jaxpar/pipeline/tables/schedule.py); one engine runs them all
(jaxpar/pipeline/executor/engine.py). Replicas of the pipeline on the data axis agree on gradients by config.exchange.
"""

import functools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxpar import mesh as meshes
from jaxpar import models
from jaxpar import state as states
from jaxpar import step as steps
from jaxpar.errors import UserError, check_choice, nearest
from jaxpar.exchange.fuse import AllReduce
from jaxpar.exchange.reduce import Traffic
from jaxpar.mesh import DATA, STAGE
from jaxpar.models.model import Batch
from jaxpar.pipeline.executor import partition
from jaxpar.pipeline.executor.engine import PipelineEngine
from jaxpar.pipeline.executor.lowering import Lowered, Shape, lower
from jaxpar.pipeline.executor.packing import Packed
from jaxpar.pipeline.executor.programs import REMATS
from jaxpar.pipeline.executor.stages import Stages
from jaxpar.pipeline.executor.state import SPECS, Form, PackedState, own, stacked
from jaxpar.pipeline.executor.timeline import Timeline
from jaxpar.pipeline.executor.update import StageUpdate
from jaxpar.pipeline.tables import schedule, table_file
from jaxpar.pipeline.tables.table import BW, F, Table, is_training
from jaxpar.state import nbytes
from jaxpar.step import Metrics, Problem
from jaxpar.strategies import exchanges
from jaxpar.strategies.strategy import CompiledProgram, Description, Strategy, with_shardings
from jaxpar.tasks import Sums

# Lets XLA see that the branch of an action writes into a stash in place; else it copies whole stashes every clock.
IN_PLACE = {f"xla_{backend}_copy_insertion_use_region_analysis": True for backend in ("cpu", "gpu")}


def num_replicas(config: ConfigDict) -> int:
    """Pipelines on the data axis. Raises UserError for what is wrong with config.mesh and config.pipeline."""
    check_choice("pipeline.remat", config.pipeline.remat, REMATS)
    if config.optimizer.accumulation_steps != 1:
        raise UserError(
            f"config.optimizer.accumulation_steps is {config.optimizer.accumulation_steps}; it may be 1 with "
            "config.strategy='pipeline', which accumulates over config.pipeline.num_microbatches"
        )
    if config.pipeline.trace < 0:
        raise UserError(
            f"config.pipeline.trace is {config.pipeline.trace}; it may be the number of a step, or 0 for none"
        )
    if config.pipeline.trace:
        meshes.check_one_process(f"config.pipeline.trace={config.pipeline.trace}")
    replicas = meshes.num_replicas(config)
    exchanges.check_on_gradients(config, replicas)
    table = build_table(config)
    if config.model.name in models.MODELS:  # the layers' names are the same whatever the data
        model = models.build(config, models.MODELS[config.model.name])
        partition.check([layer.name for layer in model.layers], config.pipeline.partition, table.num_stages)
    return replicas


def parts(config: ConfigDict, num_replicas: int) -> tuple[int, str]:
    """What a batch divides into: of each replica, its microbatches."""
    microbatches = build_table(config).num_microbatches
    words = f"{num_replicas} replicas (the data axis) x {microbatches} microbatches (config.pipeline.num_microbatches)"
    return num_replicas * microbatches, words


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
            f"config.pipeline.schedule is {c.schedule!r}; it may be {', '.join(schedule.SCHEDULES)}, or the path of a "
            f"CSV table.{nearest(c.schedule, schedule.SCHEDULES)}"
        )
    if c.num_microbatches > config.batch_size:
        raise UserError(
            f"config.pipeline.num_microbatches is {c.num_microbatches}; it may be at most config.batch_size, "
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


def build(config: ConfigDict, problem: Problem) -> Strategy:
    """The pipeline of config.pipeline over a mesh of config.mesh."""
    if jax.__version_info__ >= (0, 11):  # whose Shardy (0.11.2) ends the process on programs like this one
        jax.config.update("jax_use_shardy_partitioner", False)
    table, num_data = build_table(config), meshes.num_replicas(config)
    mesh = meshes.build(num_data, table.num_devices)
    bounds = partition.bounds(problem.model, problem.batch, config.pipeline.partition, table.num_stages)
    stages = Stages(problem.model, bounds, table.stages, problem.batch)
    form = Form(problem, stages, mesh)
    divided = NamedSharding(mesh, PartitionSpec(DATA))
    like = jax.eval_shape(partial(states.init, problem.model, problem.optimizer), jax.random.key(0))
    plan = on_devices(lower(table), mesh)
    all_reduce = exchanges.on_gradients(config, num_data)
    state_and_metrics, replicated = (SPECS, PartitionSpec()), PartitionSpec()
    one_step = train_step(problem, stages, form, all_reduce, config.pipeline.remat)
    step = compiled(one_step, SPECS, state_and_metrics, mesh, donate_argnums=1)
    forward = compiled(evaluate_step(stages, form), PartitionSpec(STAGE), replicated, mesh)

    @functools.cache
    def evaluation_plan(num_rows: int) -> Lowered:
        """The forward pass in as many of the microbatches as the rows of a replica divide into."""
        number = math.gcd(num_rows, table.num_microbatches)
        return on_devices(lower(schedule.forward_only(table.num_devices, number, table.stages)), mesh)

    def evaluate(state: PackedState, batch: dict[str, jax.Array]) -> Sums:
        plan = evaluation_plan(len(batch["index"]) // num_data)
        return one_at_a_time(forward)(plan.shape, state.params, batch, plan.actions, plan.arrivals)

    one_at_a_time = partial(meshes.one_at_a_time, mesh=mesh)
    timeline = Timeline(config.pipeline.trace)
    traced_step = train_step(problem, stages, form, all_reduce, config.pipeline.remat, timeline)
    traced = compiled(traced_step, SPECS, state_and_metrics, mesh, donate_argnums=1)

    def train(state: PackedState, batch: dict[str, jax.Array]) -> tuple[PackedState, Metrics]:
        run = traced if timeline.next_step() else step
        return one_at_a_time(run)(plan.shape, state, batch, plan.actions, plan.arrivals)

    def with_own(state: PackedState, private: states.Canonical | None = None) -> PackedState:
        own = fresh_own(all_reduce, form, mesh)
        if private:
            own = serialization.from_state_dict(own, private)
        return state._replace(own=jax.device_put(own, NamedSharding(mesh, SPECS.own)))

    def from_canonical(tree: states.Canonical, private: states.Canonical | None = None) -> PackedState:
        timeline.steps_before(int(tree["step"]))
        return with_own(form.distribute(states.from_canonical(tree, like)), private)

    def compile() -> list[CompiledProgram]:
        state = jax.eval_shape(lambda key: with_own(form.init(key)), jax.random.key(0))
        parts = [with_shardings(part, NamedSharding(mesh, spec)) for part, spec in zip(state, SPECS, strict=True)]
        batch = with_shardings(problem.batch, divided)
        return [
            CompiledProgram(step.lower(plan.shape, PackedState(*parts), batch, plan.actions, plan.arrivals).compile())
        ]

    def report(_: PackedState, workdir: Path) -> dict[str, Any]:
        if config.pipeline.trace:
            timeline.save(workdir / "timeline.png", config.pipeline.schedule, table)
        return {}

    return Strategy(
        init=lambda key: with_own(form.init(key)),
        place=lambda rows: {k: jax.make_array_from_process_local_data(divided, v) for k, v in rows.items()},
        step=train,
        evaluate=evaluate,
        to_canonical=lambda state: states.to_canonical(form.gather(state)),
        from_canonical=from_canonical,
        compile=compile,
        describe=lambda: describe(config, problem, table, plan.shape, stages, form, mesh, all_reduce),
        to_private=lambda state: serialization.to_state_dict(state.own) if jax.tree.leaves(state.own) else {},
        private_of=f"{exchanges.full_name(config)} on {num_data} x {stages.bounds} at {table.stages.tolist()}",
        differs=exchanges.differs(config),
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


def on_devices(lowered: Lowered, mesh: Mesh) -> Lowered:
    """The arrays of a plan on the devices that they are for."""
    sharding = NamedSharding(mesh, PartitionSpec(STAGE))
    actions, arrivals = jax.device_put((lowered.actions, lowered.arrivals), sharding)
    return Lowered(lowered.shape, actions, arrivals)


def fresh_own(all_reduce: AllReduce, form: Form, mesh: Mesh) -> Any:
    """What the exchange of gradients keeps on each replica, at its start."""

    def on_device() -> Any:
        return jax.tree.map(lambda x: x[None, None], all_reduce.init(form.params.shapes))

    return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(), out_specs=SPECS.own, check_vma=False))()


def train_step(
    problem: Problem, stages: Stages, form: Form, all_reduce: AllReduce, remat: str, timeline: Timeline | None = None
) -> Callable[..., tuple[PackedState, Metrics]]:
    """A device's part of a step: all actions of the table, then the exchange of gradients and the update."""

    def step(
        shape: Shape, state: PackedState, batch: Batch, actions: Any, arrivals: Any
    ) -> tuple[PackedState, Metrics]:
        state = PackedState(state.step, state.key, own(state.params), own(state.optimizer), own(own(state.own)))
        rows = steps.microbatches(batch, shape.num_microbatches)
        key = steps.dropout_key(state.key, state.step)
        weight = jax.lax.pmean(batch["weights"].sum(), DATA)  # so that gradients are replicas' means
        engine = PipelineEngine(
            stages, form.params, shape, remat, steps.abstract(rows, 1), steps.abstract(key), timeline
        )
        own_grads, own_sums = engine.run(own((actions, arrivals)), state.params, rows, key, weight)
        faults = 1.0 - jnp.isfinite(optax.tree.norm(own_grads))  # which a code may hide
        *totals, faults = jax.lax.psum(jnp.stack([*own_sums, faults]), (DATA, STAGE))
        sums = Sums(*totals)
        grads, residuals = all_reduce.mean(own_grads, state.own)
        update = StageUpdate(problem, stages, form, jax.lax.axis_index(STAGE))
        for tie in update.copied:  # the gradient of an array that several devices use is the sum of theirs
            grads = update.replace(tie, grads, jax.lax.psum(update.part(tie, grads), STAGE))
        grad_norm = jnp.sqrt(jax.lax.psum(update.squares(grads), STAGE))
        after, metrics = update(state, grads, sums, jnp.where(faults == 0, grad_norm, jnp.nan))
        residuals = jax.tree.map(lambda new, old: jnp.where(metrics.finite, new, old), residuals, state.own)
        packed = stacked((after.params, after.optimizer, stacked(residuals)))
        return PackedState(after.step, after.key, *packed), metrics

    return step


def evaluate_step(stages: Stages, form: Form) -> Callable[..., Sums]:
    """A device's part of the forward pass without dropout."""

    def evaluate(shape: Shape, params: Packed, batch: Batch, actions: Any, arrivals: Any) -> Sums:
        rows = steps.microbatches(batch, shape.num_microbatches)
        engine = PipelineEngine(stages, form.params, shape, "none", steps.abstract(rows, 1), None)
        _, sums = engine.run(own((actions, arrivals)), own(params), rows, None, jnp.ones(()))
        return jax.lax.psum(sums, (DATA, STAGE))

    return evaluate


def describe(
    config: ConfigDict,
    problem: Problem,
    table: Table,
    shape: Shape,
    stages: Stages,
    form: Form,
    mesh: Mesh,
    all_reduce: AllReduce,
) -> Description:
    """What runs where, and what a device sends in a step: a packet over each wire in every clock, and its gradients."""
    num_data = mesh.shape[DATA]
    layers = [layer.name for layer in problem.model.layers]
    begins = ", ".join(layers[begin] for begin in stages.bounds[1:-1])
    layout = f"{config.pipeline.schedule}, {table.num_microbatches} microbatches, "
    layout += f"{table.num_stages} stages on {table.num_devices} devices" + (f" (cut at {begins})" if begins else "")
    inputs = problem.model.inputs(problem.batch)
    packet = max((nbytes(inputs[begin]) for begin in stages.bounds[1:-1]), default=0)
    packet //= num_data * table.num_microbatches
    dtype = jnp.dtype(inputs[stages.bounds[1]].dtype).name if table.num_stages > 1 else "float32"
    permutes = Traffic("collective-permute", dtype, STAGE, len(shape.wires) * table.num_clocks * packet)
    traffic = [permutes, *all_reduce.traffic(form.params.shapes)]
    copied = {(tie.source, tie.source_name) for device in stages.examples for tie in stages.copies(device)}
    copied_bytes = nbytes([problem.model.shapes[layer][name] for layer, name in sorted(copied)])
    shared = 2 * (table.num_devices - 1) / table.num_devices * copied_bytes  # the gradients of tied arrays
    traffic.append(Traffic("all-reduce", "float32", STAGE, shared))
    own = nbytes(jax.eval_shape(partial(fresh_own, all_reduce, form, mesh))) // mesh.size
    memory = {"parameters": form.params.nbytes, "optimizer": form.optimizer.nbytes, "own": own}
    return Description(tuple(mesh.devices.flat), layout, num_data, (memory,) * mesh.size, tuple(traffic))
