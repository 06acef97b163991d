"""Candidates that equal training on one device: replicas with every such exchange, and pipelines of every schedule."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar.choose.candidates import (
    DEFAULTS_OF_CHOICES,
    GROUP,
    IMPLEMENTATION,
    OF_STAGES,
    Candidate,
    Settings,
    Space,
    StateRatios,
    divisors,
    options_of,
    plan_of,
    state_ratios,
    with_settings,
)
from jaxpar.choose.costs.layers import Layers
from jaxpar.choose.costs.memory import StateBytes, splits_backward
from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.choose.costs.step import REPLICA_KEYS, UpdateBytes, pipeline_costs, replicas_costs
from jaxpar.choose.costs.updates import exchange_bytes, update_bytes
from jaxpar.core.groups import ReplicaGroup
from jaxpar.core.mesh import CONTEXT, DATA, GROUP_AXES, STAGE, TENSOR
from jaxpar.core.plan import Plan, Traffic, ring_traffic
from jaxpar.core.ring import sent_of_operand
from jaxpar.core.step import Problem
from jaxpar.exchange.exchange import shared
from jaxpar.exchange.named import EXCHANGES, exchange_differs
from jaxpar.layout import SHARDED
from jaxpar.strategies.data_parallel.shard_map import ReplicaDetails, group_traffic
from jaxpar.strategies.exchanges import sums_along_a_ring
from jaxpar.strategies.pipeline.executor.packing import Packing
from jaxpar.strategies.pipeline.executor.partition import balanced
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.pipeline.schedules import DISPATCH, EXECUTORS, LOCKSTEP
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, make_table, schedule_obstacle
from jaxpar.strategies.pipeline.tables.table import Table

GROUP_SIZES = (1, 2, 4, 8)  # devices of a tensor or context axis
LEAST_POSITIONS = 8192  # positions from which a context axis is compared
LARGEST_RING = 64  # replicas of a ring whose steps are written out in the program
COMBINED_BYTES = 30 * 2**20  # XLA combines all-reduces on GPUs up to this size
HSDP = "hsdp"  # with a group for each host; on one host, it is zero3
LARGEST_TABLE = 20_000  # devices x microbatches of the largest table that is made
NANOSECOND = 1e-9
_balanced = cache(balanced)
PackingOf = Callable[[tuple[int, ...], Table], Packing]


# ---- without stages -------------------------------------------------------------------------------------------------


def of_replicas(space: Space) -> Iterator[Candidate]:
    """Yield those whose replicas are groups of each size."""
    for sizes in group_sizes(space):
        yield from _of_groups(space, sizes)


def group_sizes(space: Space) -> Iterator[dict[str, int]]:
    """Yield the sizes of the tensor and the context axis to compare, without those of 1.

    They are those of groups on one host, unless the user set all of them.
    """
    per_host = space.num_devices // space.machine.cluster.num_processes
    for tensor in space.choices("mesh.tensor", tensor_sizes(space)):
        for context in space.choices("mesh.context", context_sizes(space)):
            sizes = {axis: size for axis, size in ((TENSOR, tensor), (CONTEXT, context)) if size > 1}
            is_given = all(f"mesh.{axis}" in space.kept for axis in sizes)
            if (space.num_devices if is_given else per_host) % (tensor * context) == 0:
                yield sizes


def tensor_sizes(space: Space) -> list[int]:
    """Return the sizes of the tensor axis to compare: groups on one host, with a part of each array on each device.

    Devices that share cores gain nothing from it.
    """
    cluster, split = space.machine.cluster, space.problem.model.tensor
    if split is None or cluster.platform == "cpu":
        return [1]
    numbers = [cluster.num_devices // cluster.num_processes, *split.counts.values()]
    return [size for size in GROUP_SIZES if not any(number % size for number in numbers)]


def context_sizes(space: Space) -> list[int]:
    """Return the sizes of the context axis to compare: for long texts, whose attention the axis allows.

    Devices that share cores gain nothing from it.
    """
    cluster, inputs, config = space.machine.cluster, space.problem.batch["inputs"], space.config
    is_text = inputs.ndim == 2 and space.problem.model.tensor is not None and space.problem.task.head != "token"
    if (
        not is_text
        or inputs.shape[1] < LEAST_POSITIONS
        or cluster.platform == "cpu"
        or config.model.attention == "cudnn"
    ):
        return [1]
    return [size for size in GROUP_SIZES if cluster.num_devices // cluster.num_processes % size == 0]


def _of_groups(space: Space, sizes: Mapping[str, int]) -> Iterator[Candidate]:
    """Yield, for each exchange, remat and form of the layers, the smallest accumulation that fits; else the largest.

    sizes: numbers of devices of a replica, by axis.
    """
    together = math.prod(sizes.values())
    n, batch = space.num_devices // together, space.config.batch_size
    of_axes = {f"mesh.{axis}": size for axis, size in sizes.items()}
    if n == 1:
        of_single = {"strategy": "single", "mesh.data": 1, **of_axes, **options_of(space, "ddp", 1)}
        exchanges: list[tuple[str, Settings]] = [("single", of_single)]
    else:
        cluster = space.machine.cluster
        per_host = cluster.num_devices // cluster.num_processes
        # one group of hsdp is zero3, and groups of one replica are ddp
        no_hsdp = GROUP not in space.kept and (cluster.num_processes == 1 or per_host <= together > 1)
        equal = (name for name in EXCHANGES if not exchange_differs(name, {}, n) and not (no_hsdp and name == HSDP))
        exchanges = [(name, {**_exchange_settings(name, space, together), **of_axes}) for name in equal]
    one_stage = {key: value for key, value in DEFAULTS_OF_CHOICES.items() if key.startswith(OF_STAGES)}
    for name, settings in exchanges:
        if not space.allows({**one_stage, **settings}):
            continue
        if n > LARGEST_RING and sums_along_a_ring(with_settings(space.config, settings)):
            continue
        plan = plan_of(space, settings)
        if isinstance(plan, str):
            continue
        update = update_of(space, plan)
        scans = ("auto", False) if space.machine.overlaps and not _gathers_layers(plan) else ("auto",)
        for remat in space.choices("model.remat", space.layers.remats):
            for scan in space.choices("model.scan_layers", scans):
                numbers = space.choices("optimizer.accumulation_steps", divisors(batch // n))
                best: Candidate | None = None
                for number in (number for number in numbers if batch % (n * number) == 0):
                    more = {"model.remat": remat, "model.scan_layers": scan, "optimizer.accumulation_steps": number}
                    best = _replicas_candidate(space, name, {**settings, **more}, plan, update)
                    if best.fits:
                        break
                if best is not None:
                    yield best


def _exchange_settings(name: str, space: Space, together: int) -> Settings:
    cluster, replicas = space.machine.cluster, space.num_devices // together
    settings: dict[str, Any] = {"strategy": "data_parallel", "mesh.data": replicas, "exchange": name}
    if name == HSDP:
        settings[GROUP] = cluster.num_devices // cluster.num_processes // together
    if IMPLEMENTATION in space.kept:
        settings[IMPLEMENTATION] = space.kept[IMPLEMENTATION]
    return settings | options_of(space, name, replicas)


def _gathers_layers(plan: Plan[Any]) -> bool:
    """Return whether a plan gathers the parameters layer by layer, which is done in a scan on GPUs."""
    return _has_exchange(plan) and plan.details.exchange.fetch is not None


def update_of(space: Space, plan: Plan[Any]) -> UpdateBytes:
    """Return the bytes that an update of replicas moves on a device."""
    problem = _layers_in(space, plan.axes).problem if TENSOR in plan.axes else space.problem
    whole = update_bytes(problem)
    if not _has_exchange(plan):
        return UpdateBytes(0.0, whole)
    both = exchange_bytes(problem, plan)
    exchange = plan.details.exchange
    if plan.layouts["optimizer"].kind == exchange.optimizer == SHARDED:  # not only over the tensor axis
        whole *= exchange.copies / plan.num_replicas
    return UpdateBytes(max(both - whole, 0.0), min(whole, both))


def _layers_in(space: Space, axes: Mapping[str, int]) -> Layers:
    """Return the layers as a device of a mesh computes them."""
    return space.layers.in_group(axes.get(TENSOR, 1), axes.get(CONTEXT, 1))


def combined(sent: Traffic, num_replicas: int) -> Traffic:
    """Return the all-reduces that XLA's partitioner adds, as XLA combines them on GPUs."""
    nbytes = sent.nbytes / sent_of_operand("all-reduce", num_replicas)
    return sent._replace(messages=min(sent.messages, 2 * (num_replicas - 1) * math.ceil(nbytes / COMBINED_BYTES)))


def _has_exchange(plan: Plan[Any]) -> bool:
    """Return whether the program of a replica contains the exchange; otherwise XLA or the host adds it."""
    return isinstance(plan.details, ReplicaDetails)


def _replicas_candidate(space: Space, name: str, settings: Settings, plan: Plan[Any], update: UpdateBytes) -> Candidate:
    """Return a candidate without stages. plan: that of its exchange, without accumulation; update: see `update_of`."""
    accumulation, remat = settings["optimizer.accumulation_steps"], settings["model.remat"]
    layers = _layers_in(space, plan.axes)
    model = layers.problem.model if TENSOR in plan.axes else space.problem.model
    exchange = plan.details.exchange if _has_exchange(plan) else None
    traffic = plan.traffic
    if exchange:
        read = model.read_shapes(space.problem.batch) if exchange.fetch else model.shapes
        traffic = tuple(exchange.traffic(read, accumulation))
        on_cpu, group = space.machine.cluster.platform == "cpu", plan.details.group.with_remat(remat)
        sent = group_traffic(group, exchange, plan.num_replicas, on_cpu=on_cpu)
        traffic += tuple(one._replace(messages=accumulation * one.messages) for one in sent)
    elif plan.details == "sharding" and space.machine.overlaps:
        traffic = tuple(combined(one, plan.num_replicas) for one in traffic)
    gathers_layers = _gathers_layers(plan)
    shards = exchange and (exchange.fetch or exchange.scatter)
    memory = plan.memory[0]
    params, optimizer = memory["parameters"], sum(memory.values()) - memory["parameters"]
    gradients = params if gathers_layers or not shards else params / plan.num_replicas
    costs = replicas_costs(
        layers,
        model,
        space.machine,
        plan.axes,
        space.config.batch_size // (plan.num_replicas * accumulation),
        settings,
        traffic,
        StateBytes(params, optimizer, gradients),
        update,
        gathers_layers=gathers_layers,
    )
    if any(axis in plan.axes for axis in GROUP_AXES):
        name = _in_groups(name, plan.axes)
    return Candidate(name, settings, costs, costs.nbytes <= space.usable_bytes)


def _in_groups(name: str, axes: Mapping[str, int]) -> str:
    """Return the name of a candidate with the sizes of its axes: `ddp, tensor 4 x 2 replicas`."""
    sizes = [f"{axis} {axes[axis]}" for axis in (TENSOR, CONTEXT) if axis in axes]
    return ", ".join([name, *sizes]) + (f" x {axes[DATA]} replicas" if axes[DATA] > 1 else "")


def candidate_of_replicas(space: Space, config: ConfigDict, plan: Plan[Any]) -> Candidate:
    """Return the candidate of a plan of single or data_parallel."""
    name = config.exchange if plan.strategy == "data_parallel" else plan.strategy
    return _replicas_candidate(space, name, settings_of_replicas(config), plan, update_of(space, plan))


def settings_of_replicas(config: ConfigDict) -> Settings:
    """Return the settings of REPLICA_KEYS that a config has."""
    flat = configs.keys(config)
    return {key: flat[key] for key in REPLICA_KEYS}


# ---- pipelines ------------------------------------------------------------------------------------------------------


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
    others = {key: value for key, value in DEFAULTS_OF_CHOICES.items() if not key.startswith(OF_STAGES)}
    if not space.allows(others | {f"mesh.{axis}": size for axis, size in sizes.items()}):
        return
    ratios, packing_of = state_ratios(space.problem), _packings(_layers_in(space, sizes).problem)
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
        axes = {DATA: replicas, STAGE: stages, **sizes}
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
                    yield _pipeline_candidate(space, schedule, table, remat, axes, ratios, packing_of, within)


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


def _pipeline_candidate(
    space: Space,
    schedule: str,
    table: Table,
    remat: str,
    axes: Mapping[str, int],
    ratios: StateRatios,
    packing_of: PackingOf,
    within: list[Traffic],
) -> Candidate:
    """Return a pipeline, with the executor of the config, or the faster one if it has none.

    within: what a device would send to those that compute a stage together, if it had all layers.
    """
    replicas = axes[DATA]
    size = space.config.batch_size // (replicas * table.num_microbatches)
    work = _layers_in(space, axes).work(size, remat, is_split=splits_backward(table))
    bounds = _balanced_bounds(work.layers, table.num_stages)
    packing = packing_of(bounds, table)
    largest, packed = float(packing.nbytes), (1 + ratios.optimizer) * packing.vector_bytes
    states = [StateBytes(largest, ratios.optimizer * largest, largest)] * table.num_devices
    vectors = len(work.layers)  # of gradients; the engine packs the arrays of a device
    traffic = [ring_traffic("all-reduce", 2, DATA, replicas, largest, "float32", num_vectors=vectors)]
    traffic += shared(within, 1 / axes[STAGE])
    update = ratios.update * largest
    own = space.config.pipeline.executor
    by_executor = {
        executor: pipeline_costs(
            work, space.machine, axes, table, bounds, traffic, states, packed, update, executor=executor
        )
        for executor in ([own] if own in EXECUTORS else [DISPATCH, LOCKSTEP])
    }
    executor, costs = min(by_executor.items(), key=lambda item: item[1].seconds)
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
        **options_of(space, "ddp", replicas),
    }
    waits = space.machine.cluster.platform == "cpu" and costs.waiting > 0.0
    name = _name(schedule, table, axes)
    return Candidate(name, settings, costs, costs.nbytes <= space.usable_bytes, waits)


def _balanced_bounds(layers: Sequence[LayerProfile], num_stages: int) -> tuple[int, ...]:
    """Return the bounds of stages of nearly equal times. Layers whose output has no gradient stay with the next one."""
    starts = [0, *(number + 1 for number, layer in enumerate(layers[:-1]) if layer.can_cut)]
    times = [layer.forward_s + layer.backward_s for layer in layers]
    merged = [sum(times[start:end]) for start, end in zip(starts, [*starts[1:], len(times)], strict=True)]
    chosen = _balanced(tuple(round(seconds / NANOSECOND) for seconds in merged), num_stages)
    return tuple([*starts, len(times)][index] for index in chosen)


def candidate_of_pipeline(space: Space, config: ConfigDict, plan: Plan[Any]) -> Candidate:
    """Return the candidate of the plan of a pipeline."""
    details, table, staged = plan.details, plan.details.table, plan.details.staged
    states = [
        StateBytes(parts["parameters"], parts.get("optimizer", 0), parts.get("gradients", parts["parameters"]))
        for parts in plan.memory
    ]
    size = config.batch_size // plan.decision.batch_divisor
    costs = pipeline_costs(
        _layers_in(space, plan.axes).work(size, details.remat, is_split=splits_backward(table)),
        space.machine,
        plan.axes,
        table,
        details.stages.bounds,
        plan.traffic,
        states,
        staged.params.packing.vector_bytes + staged.optimizer.packing.vector_bytes,
        state_ratios(space.problem).update * max(state.parameters for state in states),
        executor=details.executor,
    )
    shown = {"pipeline.num_microbatches": table.num_microbatches, "pipeline.remat": details.remat}
    name = _name(details.schedule, table, plan.axes)
    return Candidate(name, shown, costs, costs.nbytes <= space.usable_bytes)


def _name(schedule: str, table: Table, axes: Mapping[str, int]) -> str:
    return _in_groups(f"{schedule}, {table.num_devices} stages", axes)
