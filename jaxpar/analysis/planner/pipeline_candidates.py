"""Candidates with stages: every schedule, number of stages and of microbatches, with replicas on the other devices."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from ml_collections import ConfigDict

from jaxpar.analysis.planner import cpu_memory
from jaxpar.analysis.planner.candidates import (
    DEFAULTS_OF_CHOICES,
    OF_STAGES,
    Candidate,
    Space,
    StateRatios,
    divisors,
    options_of,
    state_ratios,
)
from jaxpar.analysis.planner.predict import StateBytes, largest_transfer, pipeline_costs, splits_backward, stash_bytes
from jaxpar.core.plan import Plan
from jaxpar.exchange.reduce import ring_traffic
from jaxpar.mesh import DATA, STAGE
from jaxpar.pipeline.executor.packing import Packing
from jaxpar.pipeline.executor.partition import balanced
from jaxpar.pipeline.executor.stages import Stages
from jaxpar.pipeline.search.layer_profile import LayerProfile
from jaxpar.pipeline.tables.schedule import SCHEDULES, make_table, schedule_obstacle
from jaxpar.pipeline.tables.table import Table
from jaxpar.step import Problem

LARGEST_TABLE = 20_000  # devices x microbatches of the largest table that is made
NANOSECOND = 1e-9


def of_pipelines(space: Space) -> Iterator[Candidate]:
    """Yield every schedule, number of stages and of microbatches, and kind of rematerialization."""
    n, batch, num_layers = space.num_devices, space.config.batch_size, len(space.problem.model.layers)
    others = {key: value for key, value in DEFAULTS_OF_CHOICES.items() if not key.startswith(OF_STAGES)}
    if not space.allows(others):
        return
    ratios, packing_of = state_ratios(space.problem), _packings(space.problem)
    for stages in (number for number in range(2, min(n, num_layers) + 1) if n % number == 0):
        replicas = n // stages
        if batch % replicas or not space.allows({"mesh.stage": stages, "mesh.data": replicas}):
            continue
        for number in space.choices("pipeline.num_microbatches", divisors(batch // replicas)):
            is_few = number < stages // 2 and "pipeline.num_microbatches" not in space.kept
            if batch % (replicas * number) or is_few or stages * number > LARGEST_TABLE:
                continue
            for schedule, table in _tables(space, stages, number).items():
                if table.num_stages <= num_layers:
                    for remat in space.choices("pipeline.remat", space.layers.remats):
                        yield pipeline_candidate(space, schedule, table, remat, replicas, ratios, packing_of)


def _packings(problem: Problem) -> Callable[[tuple[int, ...], Table], Packing]:
    """Return a function of the bounds of stages and a table that returns how devices pack their parameters."""
    inputs = problem.model.inputs(problem.batch)
    found: dict[tuple[tuple[int, ...], bytes], Packing] = {}

    def packing_of(bounds: tuple[int, ...], table: Table) -> Packing:
        key = bounds, table.stages.tobytes()
        if key not in found:
            stages = Stages(problem.model, bounds, table.stages, inputs, problem.task)
            found[key] = Packing([stages.select(problem.model.shapes, device) for device in stages.examples])
        return found[key]

    return packing_of


def _tables(space: Space, num_devices: int, num_microbatches: int) -> dict[str, Table]:
    """Return the tables of all schedules by name. Of equal tables, there is only the first one."""
    tables: dict[bytes, tuple[str, Table]] = {}
    for schedule in space.choices("pipeline.schedule", SCHEDULES):
        table = _table(schedule, num_devices, num_microbatches, space.kept.get("pipeline.num_chunks", 0))
        if table is not None:
            tables.setdefault(table.stages.tobytes() + table.actions.tobytes(), (schedule, table))
    return dict(tables.values())


@cache
def _table(schedule: str, num_devices: int, num_microbatches: int, num_chunks: int) -> Table | None:
    """Return a table, or None if there is none. num_chunks: 0 for that of the schedule."""
    chunks = num_chunks or SCHEDULES[schedule].num_chunks
    sizes = {"num_devices": num_devices, "num_microbatches": num_microbatches, "num_chunks": chunks}
    if schedule_obstacle(schedule, **sizes):
        return None
    return make_table(schedule, **sizes)


def pipeline_candidate(
    space: Space,
    schedule: str,
    table: Table,
    remat: str,
    replicas: int,
    ratios: StateRatios,
    packing_of: Callable[[tuple[int, ...], Table], Packing],
) -> Candidate:
    """Return a pipeline."""
    size = space.config.batch_size // (replicas * table.num_microbatches)
    layers, memory = (
        space.layers.profile(size, remat),
        space.layers.memory(size, remat, is_split=splits_backward(table)),
    )
    bounds = balanced_bounds(layers, table.num_stages)
    axes = {DATA: replicas, STAGE: table.num_devices}
    packing = packing_of(bounds, table)
    largest, packed = float(packing.nbytes), (1 + ratios.optimizer) * packing.vector_bytes
    states = [StateBytes(largest, ratios.optimizer * largest, largest)] * table.num_devices
    vectors = len(layers)  # of gradients; the engine packs the arrays of a device
    traffic = [ring_traffic("all-reduce", 2, DATA, replicas, largest, "float32", num_vectors=vectors)]
    update = ratios.update * largest
    costs = pipeline_costs(
        layers, memory, space.machine, axes, table, bounds, traffic, states, packed, update, remat=remat
    )
    if space.machine.runs_early:
        nbytes = _pipeline_bytes_on_cpu(space, size, remat, table, bounds, max(states, key=sum))
        costs = costs._replace(nbytes=nbytes)
    cuts = ",".join(layers[bound].name for bound in bounds[1:-1])
    settings = {
        "strategy": "pipeline",
        "mesh.data": replicas,
        "mesh.stage": table.num_devices,
        "pipeline.schedule": schedule,
        "pipeline.num_microbatches": table.num_microbatches,
        "pipeline.num_chunks": table.num_chunks,
        "pipeline.remat": remat,
        "pipeline.partition": cuts,
        **options_of(space, "ddp", replicas),
    }
    name = f"{schedule}, {table.num_devices} stages" + (f" x {replicas} replicas" if replicas > 1 else "")
    return Candidate(name, settings, costs, costs.nbytes <= space.usable_bytes)


def _pipeline_bytes_on_cpu(
    space: Space, size: int, remat: str, table: Table, bounds: Sequence[int], state: StateBytes
) -> float:
    """Return the bytes of a device. size: examples of a microbatch of a replica; state: that of the fullest device."""
    layers = space.layers.profile(size, remat)
    memory = space.layers.memory(size, remat, is_split=splits_backward(table))
    sent = largest_transfer(layers, bounds)
    kept = [layer.stash_bytes for layer in layers]
    if remat == "full":  # a stage computes the forward pass of all its layers again
        kept = [layer.held for layer in space.layers.passes(size, "none")]
    return cpu_memory.cpu_pipeline_bytes(
        space.layers.passes(size, remat, is_apart=True),
        kept,
        [layer.weight_bytes for layer in layers],
        bounds,
        stash_bytes(table, layers, memory, bounds, sent, remat),
        state,
    )


def balanced_bounds(layers: Sequence[LayerProfile], num_stages: int) -> tuple[int, ...]:
    """Return the bounds of stages of nearly equal times. Layers whose output has no gradient stay with the next one."""
    starts = [0, *(number + 1 for number, layer in enumerate(layers[:-1]) if layer.can_cut)]
    times = [layer.forward_s + layer.backward_s for layer in layers]
    merged = [sum(times[start:end]) for start, end in zip(starts, [*starts[1:], len(times)], strict=True)]
    chosen = _balanced(tuple(round(seconds / NANOSECOND) for seconds in merged), num_stages)
    return tuple([*starts, len(times)][index] for index in chosen)


@cache
def _balanced(costs: tuple[int, ...], num_stages: int) -> tuple[int, ...]:
    return balanced(costs, num_stages)


def candidate_of_pipeline(space: Space, config: ConfigDict, plan: Plan[Any]) -> Candidate:
    """Return the candidate of the plan of a pipeline."""
    details, layers = plan.details, space.layers
    table, bounds = details.table, details.stages.bounds
    size = config.batch_size // plan.decision.batch_divisor
    profile, memory = (
        layers.profile(size, details.remat),
        layers.memory(size, details.remat, is_split=splits_backward(table)),
    )
    states = []
    for parts in plan.memory:
        params, optimizer = parts["parameters"], parts.get("optimizer", 0)
        states.append(StateBytes(params, optimizer, params))
    update = state_ratios(space.problem).update * max(parts["parameters"] for parts in plan.memory)
    staged = details.staged
    packed = staged.params.packing.vector_bytes + staged.optimizer.packing.vector_bytes
    costs = pipeline_costs(
        profile,
        memory,
        space.machine,
        plan.axes,
        table,
        bounds,
        plan.traffic,
        states,
        packed,
        update,
        remat=details.remat,
    )
    if space.machine.runs_early:
        nbytes = _pipeline_bytes_on_cpu(space, size, details.remat, table, bounds, max(states, key=sum))
        costs = costs._replace(nbytes=nbytes)
    replicas = f" x {plan.num_replicas} replicas" if plan.num_replicas > 1 else ""
    name = f"{details.schedule}, {table.num_devices} stages{replicas}"
    shown = {"pipeline.num_microbatches": table.num_microbatches, "pipeline.remat": details.remat}
    return Candidate(name, shown, costs, costs.nbytes <= space.usable_bytes)
