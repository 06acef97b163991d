"""Candidates that are pipelines, of every schedule, number of stages and of microbatches, and rematerialization."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from ml_collections import ConfigDict

from jaxpar.choose.candidates import (
    DEFAULTS_OF_CHOICES,
    OF_STAGES,
    Candidate,
    Settings,
    Space,
    StateRatios,
    divisors,
    options_of,
    state_ratios,
    with_settings,
)
from jaxpar.choose.costs.layers import LayerWork
from jaxpar.choose.costs.memory import PackedBytes, StateBytes, gathered_bytes, scattered_bytes, splits_backward
from jaxpar.choose.costs.pipeline_steps import PipelineStep, action_costs, pipeline_costs
from jaxpar.choose.groups import group_sizes, layers_in, named_with_groups
from jaxpar.core.groups import ReplicaGroup
from jaxpar.core.mesh import DATA, GROUP_AXES, STAGE
from jaxpar.core.plan import ACTIVATION_PARTS, Plan, Traffic, ring_traffic
from jaxpar.core.step import Problem
from jaxpar.errors import is_refused
from jaxpar.exchange.exchange import shared
from jaxpar.exchange.named import EXCHANGES
from jaxpar.strategies.exchanges import check_gradient_exchange
from jaxpar.strategies.pipeline.executor.packing import Packing
from jaxpar.strategies.pipeline.executor.partition import balanced
from jaxpar.strategies.pipeline.executor.stage_programs import last_joins_f
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.pipeline.schedules import DISPATCH, EXECUTORS, LOCKSTEP
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, make_table, schedule_obstacle
from jaxpar.strategies.pipeline.tables.table import Table

LARGEST_TABLE = 20_000  # devices x microbatches of the largest table that is made
NANOSECOND = 1e-9
# The exchanges of gradients that are compared, by what the replicas of a stage shard: 0 nothing, 1 the optimizer state,
# 2 gradients too, 3 parameters too. From 2 on, they send in each action.
STATE_SHARDED = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
SENT_IN_ACTIONS = ((), (), ("reduce-scatter",), ("reduce-scatter", "all-gather"))  # kinds of collectives, by this value
_balanced = cache(balanced)
PackingOf = Callable[[tuple[int, ...], Table], Packing]


def of_pipelines(space: Space) -> Iterator[Candidate]:
    """Yield the pipelines whose stages are computed by groups of each size."""
    for sizes in group_sizes(space):
        yield from _pipelines_of_groups(space, sizes)


def _pipelines_of_groups(space: Space, sizes: Mapping[str, int]) -> Iterator[Candidate]:
    """Yield every schedule, number of stages and of microbatches, and kind of rematerialization.

    sizes: numbers of devices that compute a stage, by axis.
    """
    n, batch = space.num_devices // math.prod(sizes.values()), space.config.batch_size
    num_layers = len(space.problem.model.layers)
    others = {key: value for key, value in DEFAULTS_OF_CHOICES.items() if not key.startswith((*OF_STAGES, "exchange"))}
    if not space.allows(others | {f"mesh.{axis}": size for axis, size in sizes.items()}):
        return
    ratios, packing_of = state_ratios(space.problem), _packings(layers_in(space, sizes).problem)
    group, on_cpu = ReplicaGroup(space.problem, sizes), space.machine.cluster.platform == "cpu"

    sums = [one.traffic(sizes[one.axis]) for one in group.sums_of(group.params.local_shapes)]

    @cache
    def sent(remat: str, replicas: int, number: int) -> list[Traffic]:
        """Return what a device would send in `number` microbatches to its group, if it had all layers."""
        of_layers = group.with_remat(remat).traffic(replicas, {}, on_cpu=on_cpu)
        return [*(one._replace(messages=number * one.messages) for one in of_layers), *sums]

    for stages in (number for number in range(2, min(n, num_layers) + 1) if n % number == 0):
        replicas = n // stages
        if batch % replicas or not space.allows({"mesh.stage": stages, "mesh.data": replicas}):
            continue
        axes, exchanges = {DATA: replicas, STAGE: stages, **sizes}, _exchanges(space, replicas)
        for number in space.choices("pipeline.num_microbatches", divisors(batch // replicas)):
            is_few = number < stages // 2 and "pipeline.num_microbatches" not in space.kept
            if batch % (replicas * number) or is_few or stages * number > LARGEST_TABLE:
                continue
            known = set[bytes]()  # of equal tables, only the first one is a candidate
            for schedule in space.choices("pipeline.schedule", SCHEDULES):
                table = _table(schedule, stages, number, space.kept.get("pipeline.num_chunks", 0))
                if table is None or table.num_stages > num_layers:
                    continue
                key = table.stages.tobytes() + table.actions.tobytes()
                if key in known:
                    continue
                known.add(key)
                for remat in space.choices("pipeline.remat", space.layers.remats):
                    within = sent(remat, replicas, number)
                    yield from _pipeline_candidates(
                        space, schedule, table, remat, axes, ratios, packing_of, within, exchanges
                    )


def _exchanges(space: Space, num_replicas: int) -> dict[str, Settings]:
    """Return the settings of the exchanges of STATE_SHARDED that the config allows, by name."""
    found: dict[str, Settings] = {}
    for name in STATE_SHARDED if num_replicas > 1 else ("ddp",):
        settings = {"exchange": name, **options_of(space, name, num_replicas)}
        config, check = with_settings(space.config, settings), partial(check_gradient_exchange, has_flush=True)
        if space.allows(settings) and not is_refused(check, config, num_replicas, space.machine.cluster):
            found[name] = settings
    return found


def _packings(problem: Problem) -> PackingOf:
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


@cache
def _table(schedule: str, num_devices: int, num_microbatches: int, num_chunks: int) -> Table | None:
    """Return a table, or None if there is none. num_chunks: 0 for that of the schedule."""
    chunks = num_chunks or SCHEDULES[schedule].num_chunks
    sizes = {"num_devices": num_devices, "num_microbatches": num_microbatches, "num_chunks": chunks}
    return None if schedule_obstacle(schedule, **sizes) else make_table(schedule, **sizes)


def _pipeline_candidates(
    space: Space,
    schedule: str,
    table: Table,
    remat: str,
    axes: Mapping[str, int],
    ratios: StateRatios,
    packing_of: PackingOf,
    within: list[Traffic],
    exchanges: Mapping[str, Settings],
) -> Iterator[Candidate]:
    """Yield a pipeline with each exchange, and the executor of the config, or the faster one that fits.

    An exchange that sends in each action is compared only if those that shard less do not fit.

    within: what a device would send to those that compute a stage together, if it had all layers; exchanges: their
    settings, by name.
    """
    replicas = axes[DATA]
    size = space.config.batch_size // (replicas * table.num_microbatches)
    work = layers_in(space, axes).work(size, remat, is_split=splits_backward(table))
    bounds = _balanced_bounds(work, table)
    packing = packing_of(bounds, table)
    params, within, own = float(packing.nbytes), shared(within, 1 / axes[STAGE]), space.config.pipeline.executor
    executors = [own] if own in EXECUTORS else [DISPATCH, LOCKSTEP]
    step = PipelineStep(work, space.machine, axes, table, bounds, within)
    actions = [action_costs(step, executor) for executor in executors]
    fits = [False]
    for exchange, options in exchanges.items():
        of_state = STATE_SHARDED[exchange]
        if of_state > 1 and any(fits):
            break
        copies = replicas if of_state else 1
        held, gradients = params, params
        if of_state > 1:
            gradients = params / copies + scattered_bytes(work)
        if of_state > 2:
            held = params / copies + gathered_bytes(work)
        states = [StateBytes(held, ratios.optimizer * params / copies, gradients)] * table.num_devices
        packed = PackedBytes(packing.vector_bytes, ratios.optimizer * packing.vector_bytes / copies, copies)
        exchanging = step._replace(traffic=[*_sent(of_state, work, table, replicas, params), *within])
        moved = update_bytes_of_stage(ratios, params, of_state, copies)
        in_actions = SENT_IN_ACTIONS[of_state]
        possible = [one for one in actions if of_state < 2 or one.executor == DISPATCH]
        by_executor = [pipeline_costs(exchanging, one, states, packed, moved, in_actions) for one in possible]
        fits = [costs.nbytes <= space.usable_bytes for costs in by_executor]
        best = min(range(len(fits)), key=lambda number: (not fits[number], by_executor[number].seconds))
        costs, executor = by_executor[best], possible[best].executor
        settings = {
            "strategy": "pipeline",
            "mesh.data": replicas,
            "mesh.stage": table.num_devices,
            **{f"mesh.{axis}": axes[axis] for axis in GROUP_AXES if axis in axes},
            "pipeline.schedule": schedule,
            "pipeline.num_microbatches": table.num_microbatches,
            "pipeline.num_chunks": table.num_chunks,
            "pipeline.remat": remat,
            "pipeline.partition": ",".join(work.layers[bound].name for bound in bounds[1:-1]),
            **({} if executor == own else {"pipeline.executor": executor}),
            **options,
        }
        waits = space.machine.cluster.platform == "cpu" and costs.waiting > 0.0
        yield Candidate(_name(schedule, table, axes, exchange), settings, costs, fits[best], waits)


def _sent(of_state: int, work: LayerWork, table: Table, replicas: int, params: float) -> list[Traffic]:
    """Return what a device sends in a step to the replicas of its stage. of_state: a value of STATE_SHARDED."""
    if of_state == 0:
        return [ring_traffic("all-reduce", 2, DATA, replicas, params, "float32", num_vectors=len(work.layers))]
    number = table.num_microbatches if of_state > 1 else 1
    read = sum(of.narrowed or layer.weight_bytes for of, layer in zip(work.memory, work.layers, strict=True))
    share = read / sum(layer.weight_bytes for layer in work.layers)  # of the bytes of parameters: they are cast first
    scatter, gather = (
        ring_traffic(kind, 1, DATA, replicas, params, "float32", num_vectors=len(work.layers))
        for kind in ("reduce-scatter", "all-gather")
    )
    if of_state == 3:  # in the forward and in the backward pass of each microbatch
        gather = gather._replace(nbytes=2 * number * share * gather.nbytes, messages=2 * number * gather.messages)
    return [scatter._replace(nbytes=number * scatter.nbytes, messages=number * scatter.messages), gather]


def update_bytes_of_stage(ratios: StateRatios, params: float, of_state: int, copies: int) -> float:
    """Return the bytes that an update of a stage moves. params: bytes of its whole parameters.

    of_state: a value of STATE_SHARDED; copies: number of replicas that shard the state. If they have whole parameters,
    they write gradients to a stack of shards, and parameters from it.
    """
    return ratios.update * params / copies + (4.0 * params if of_state in (1, 2) else 0.0)


def _balanced_bounds(work: LayerWork, table: Table) -> tuple[int, ...]:
    """Return the bounds of stages of nearly equal times. Layers whose output has no gradient stay with the next one."""
    layers, number = work.layers, len(work.layers)
    starts = [0, *(layer + 1 for layer in range(number - 1) if layers[layer].can_cut)]

    def merged(seconds: Sequence[float]) -> tuple[int, ...]:
        spans = zip(starts, [*starts[1:], number], strict=True)
        return tuple(round(sum(seconds[start:end]) / NANOSECOND) for start, end in spans)

    backward = [layer.backward_s for layer in layers]
    both = [layer.forward_s + layer.backward_s for layer in layers]
    joins_f = last_joins_f(work.remat, has_flush=not table.period)
    chosen = _balanced(merged(both), table.num_stages, merged(backward) if joins_f else ())
    return tuple([*starts, number][index] for index in chosen)


def candidate_of_pipeline(space: Space, config: ConfigDict, plan: Plan[Any]) -> Candidate:
    """Return the candidate of the plan of a pipeline."""
    details, table, staged = plan.details, plan.details.table, plan.details.staged
    in_group = math.prod(plan.axes.get(axis, 1) for axis in GROUP_AXES)  # neighbours that have equal parts of a stage
    of_columns = plan.memory[: in_group * table.num_devices : in_group]
    states = [
        StateBytes(_held(parts), parts.get("optimizer", 0), parts.get("gradients", parts["parameters"]))
        for parts in of_columns
    ]
    size = config.batch_size // plan.decision.batch_divisor
    work = layers_in(space, plan.axes).work(size, details.remat, is_split=splits_backward(table))
    step = PipelineStep(work, space.machine, plan.axes, table, details.stages.bounds, plan.traffic)
    params = max(parts["gradients" if table.period else "parameters"] for parts in of_columns)  # of one version
    of_state = STATE_SHARDED.get(config.exchange, 3) if EXCHANGES[config.exchange].shards else 0
    if of_state > 1:
        states = [state._replace(gradients=state.gradients + scattered_bytes(work)) for state in states]
    if of_state > 2:
        gathered = gathered_bytes(work)
        states = [state._replace(parameters=state.parameters + gathered) for state in states]
        params *= plan.num_replicas
    copies = plan.num_replicas if of_state else 1
    costs = pipeline_costs(
        step,
        action_costs(step, details.executor),
        states,
        PackedBytes(staged.params.packing.vector_bytes, staged.optimizer.packing.vector_bytes, copies),
        update_bytes_of_stage(state_ratios(space.problem), params, of_state, copies),
        SENT_IN_ACTIONS[of_state],
    )
    shown = {"pipeline.num_microbatches": table.num_microbatches, "pipeline.remat": details.remat}
    name = _name(details.schedule, table, plan.axes, config.exchange)
    return Candidate(name, shown, costs, costs.nbytes <= space.usable_bytes)


def _held(parts: Mapping[str, int]) -> float:
    """Return the bytes of parameters on a device, with other parts of its state, such as earlier versions of them."""
    return sum(parts[name] for name in parts.keys() - {"optimizer", "gradients", *ACTIVATION_PARTS})


def _name(schedule: str, table: Table, axes: Mapping[str, int], exchange: str) -> str:
    name = named_with_groups(f"{schedule}, {table.num_devices} stages", axes)
    return name if exchange == "ddp" else f"{name}, {exchange}"
