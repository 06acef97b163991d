"""`pipeline`: the layers in stages over the devices, the batch in microbatches through them, by any schedule.

Every schedule adds up the same gradients, so the training is that of `single` with as many accumulation steps as
there are microbatches. Schedules are tables (jaxpar/pipeline/schedule.py); one engine runs them all
(jaxpar/pipeline/engine.py). Replicas of the pipeline on the data axis add up their gradients.
"""

import functools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxpar import mesh as meshes
from jaxpar import models
from jaxpar import state as states
from jaxpar import step as steps
from jaxpar.errors import UserError, check_choice, nearest
from jaxpar.mesh import DATA, STAGE
from jaxpar.models.model import Batch
from jaxpar.pipeline import partition, schedule, table_file
from jaxpar.pipeline.engine import Engine
from jaxpar.pipeline.lowering import Lowered, Shape, lower
from jaxpar.pipeline.packing import Packed
from jaxpar.pipeline.programs import REMATS
from jaxpar.pipeline.stages import Stages
from jaxpar.pipeline.state import SPECS, Form, PackedState, own, stacked
from jaxpar.pipeline.table import BW, F, Table, is_training
from jaxpar.pipeline.timeline import Timeline
from jaxpar.pipeline.update import Update
from jaxpar.step import Metrics, Problem
from jaxpar.strategies.data_parallel import nbytes
from jaxpar.strategies.strategy import Description, Strategy
from jaxpar.tasks import Sums

# Lets XLA see that the branch of an action writes into a stash in place; else it copies whole stashes every clock.
IN_PLACE = {f"xla_{backend}_copy_insertion_use_region_analysis": True for backend in ("cpu", "gpu")}
MICROBATCHES = "microbatches (config.pipeline.num_microbatches)"


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
    replicas = meshes.num_replicas(config)
    table = build_table(config)
    if config.model.name in models.MODELS:  # the layers' names are the same whatever the data
        model = models.build(config, models.MODELS[config.model.name])
        partition.check([layer.name for layer in model.layers], config.pipeline.partition, table.num_stages)
    return replicas


def num_microbatches(config: ConfigDict) -> int:
    """Of a replica's share of the batch."""
    return build_table(config).num_microbatches


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
    table, num_data = build_table(config), meshes.num_replicas(config)
    mesh = meshes.build(num_data, table.num_devices)
    bounds = partition.bounds(problem.model, problem.batch, config.pipeline.partition, table.num_stages)
    stages = Stages(problem.model, bounds, table.stages, problem.batch)
    form = Form(problem, stages, mesh)
    divided = NamedSharding(mesh, PartitionSpec(DATA))
    like = jax.eval_shape(partial(states.init, problem.model, problem.optimizer), jax.random.key(0))
    plan = on_devices(lower(table), mesh)
    state_and_metrics, replicated = (SPECS, PartitionSpec()), PartitionSpec()
    one_step = train_step(problem, stages, form, config.pipeline.remat)
    step = compiled(one_step, SPECS, state_and_metrics, mesh, donate_argnums=1)
    forward = compiled(evaluate_step(stages, form), PartitionSpec(STAGE), replicated, mesh)

    @functools.cache
    def evaluation_plan(num_rows: int) -> Lowered:
        """The forward pass in as many of the microbatches as the rows of a replica divide into."""
        number = math.gcd(num_rows, table.num_microbatches)
        return on_devices(lower(schedule.forward_only(table.num_devices, number, table.stages)), mesh)

    def evaluate(state: PackedState, batch: dict[str, jax.Array]) -> Sums:
        plan = evaluation_plan(len(batch["index"]) // num_data)
        return forward(plan.shape, state.params, batch, plan.actions, plan.arrivals)

    timeline = Timeline(config.pipeline.trace)
    traced_step = train_step(problem, stages, form, config.pipeline.remat, timeline)
    traced = compiled(traced_step, SPECS, state_and_metrics, mesh, donate_argnums=1)

    def train(state: PackedState, batch: dict[str, jax.Array]) -> tuple[PackedState, Metrics]:
        run = traced if timeline.next_step() else step
        return run(plan.shape, state, batch, plan.actions, plan.arrivals)

    def from_canonical(tree: states.Canonical) -> PackedState:
        timeline.steps_before(int(tree["step"]))
        return form.distribute(states.from_canonical(tree, like))

    def report(workdir: Path) -> None:
        if config.pipeline.trace:
            timeline.save(workdir / "timeline.png", config.pipeline.schedule, table)

    return Strategy(
        init=form.init,
        place=lambda rows: {k: jax.make_array_from_process_local_data(divided, v) for k, v in rows.items()},
        step=train,
        evaluate=evaluate,
        to_canonical=lambda state: states.to_canonical(form.gather(state)),
        from_canonical=from_canonical,
        describe=lambda: describe(config, problem, table, plan.shape, stages, form, mesh),
        report=report,
    )


def compiled(
    function: Callable[..., Any], state_specs: Any, out_specs: Any, mesh: Mesh, **options: Any
) -> Callable[..., Any]:
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

    return meshes.one_at_a_time(jax.jit(mapped, static_argnums=0, compiler_options=IN_PLACE, **options), mesh)


def on_devices(lowered: Lowered, mesh: Mesh) -> Lowered:
    """The arrays of a plan on the devices that they are for."""
    sharding = NamedSharding(mesh, PartitionSpec(STAGE))
    actions, arrivals = jax.device_put((lowered.actions, lowered.arrivals), sharding)
    return Lowered(lowered.shape, actions, arrivals)


def train_step(
    problem: Problem, stages: Stages, form: Form, remat: str, timeline: Timeline | None = None
) -> Callable[..., tuple[PackedState, Metrics]]:
    """A device's part of a step: all actions of the table, then the exchange of gradients and the update."""

    def step(
        shape: Shape, state: PackedState, batch: Batch, actions: Any, arrivals: Any
    ) -> tuple[PackedState, Metrics]:
        state = state._replace(params=own(state.params), optimizer=own(state.optimizer))
        rows = steps.microbatches(batch, shape.num_microbatches)
        key, weight = steps.dropout_key(state.key, state.step), jax.lax.psum(batch["weights"].sum(), DATA)
        engine = Engine(stages, form.params, shape, remat, steps.abstract(rows, 1), steps.abstract(key), timeline)
        grads_unreduced, sums_unreduced = engine.run(own((actions, arrivals)), state.params, rows, key, weight)
        grads, sums = jax.lax.psum(grads_unreduced, DATA), jax.lax.psum(sums_unreduced, (DATA, STAGE))
        update = Update(problem, stages, form, jax.lax.axis_index(STAGE))
        for tie in update.copied:  # the gradient of an array that several devices use is the sum of theirs
            grads = update.replace(tie, grads, jax.lax.psum(update.part(tie, grads), STAGE))
        grad_norm = jnp.sqrt(jax.lax.psum(update.squares(grads), STAGE))
        state, metrics = update(state, grads, sums, grad_norm)
        return state._replace(params=stacked(state.params), optimizer=stacked(state.optimizer)), metrics

    return step


def evaluate_step(stages: Stages, form: Form) -> Callable[..., Sums]:
    """A device's part of the forward pass without dropout."""

    def evaluate(shape: Shape, params: Packed, batch: Batch, actions: Any, arrivals: Any) -> Sums:
        rows = steps.microbatches(batch, shape.num_microbatches)
        engine = Engine(stages, form.params, shape, "none", steps.abstract(rows, 1), None)
        _, sums = engine.run(own((actions, arrivals)), own(params), rows, None, jnp.ones(()))
        return jax.lax.psum(sums, (DATA, STAGE))

    return evaluate


def describe(
    config: ConfigDict, problem: Problem, table: Table, shape: Shape, stages: Stages, form: Form, mesh: Mesh
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
    wire_bytes = len(shape.wires) * table.num_clocks * packet
    wire_bytes += 2 * (num_data - 1) * form.params.nbytes // num_data  # all-reduce over replicas
    copied = {(tie.source, tie.source_name) for device in stages.examples for tie in stages.copies(device)}
    copied_bytes = nbytes([problem.model.shapes[layer][name] for layer, name in sorted(copied)])
    wire_bytes += 2 * (table.num_devices - 1) * copied_bytes // table.num_devices  # and over stages, of tied arrays
    return Description(tuple(mesh.devices.flat), layout, num_data, form.nbytes, wire_bytes)
