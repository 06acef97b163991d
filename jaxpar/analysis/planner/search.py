"""Searches the strategies, meshes, microbatches, schedules and kinds of rematerialization for the fastest step.

Thousands of candidates are compared by their predicted costs alone. Only strategies that equal training on one device
are compared, with config.batch_size examples in a step.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxpar import strategies
from jaxpar.analysis.planner import cpu_memory, gpu_memory
from jaxpar.analysis.planner.layers import Layers
from jaxpar.analysis.planner.machine import Machine
from jaxpar.analysis.planner.predict import (
    StateBytes,
    StepCosts,
    UpdateBytes,
    largest_transfer,
    pipeline_costs,
    replicas_costs,
    splits_backward,
    stash_bytes,
)
from jaxpar.analysis.planner.updates import exchange_bytes, update_bytes
from jaxpar.exchange.around import NODE, layer_message_bytes
from jaxpar.exchange.presets import EXCHANGES, exchange_differs
from jaxpar.exchange.reduce import ring_traffic
from jaxpar.exchange.settings import obstacle
from jaxpar.layout import SHARDED
from jaxpar.mesh import DATA, STAGE
from jaxpar.pipeline.executor.partition import balanced
from jaxpar.pipeline.search.layer_profile import LayerProfile
from jaxpar.pipeline.tables.schedule import SCHEDULES, make_table, schedule_obstacle
from jaxpar.pipeline.tables.table import Table
from jaxpar.plan import Plan, Traffic
from jaxpar.state import abstract_state, nbytes
from jaxpar.step import Problem
from jaxpar.strategies.exchanges import given, sums_along_a_ring
from jaxpar.strategies.replicas import ReplicaDetails

Settings = Mapping[str, Any]  # dotted key of the config -> value
LARGEST_TABLE = 20_000  # devices x microbatches of the largest table that is made
LARGEST_RING = 64  # replicas of a ring whose steps are written out in the program
COMBINED_BYTES = 30 * 2**20  # XLA combines all-reduces on GPUs up to this size
NANOSECOND = 1e-9
HSDP = "hsdp"  # with a group for each host; on one host, it is zero3
MOST_DIVISORS = 12  # numbers of microbatches that are compared
OPTIONS = "exchange_options."
GROUP, IMPLEMENTATION = f"{OPTIONS}group", "data_parallel.implementation"
# Keys that a candidate sets, and their values without the strategy that needs another one.
DEFAULTS_OF_CHOICES: Settings = {
    "mesh.stage": 1,
    "exchange": "ddp",
    GROUP: None,
    "optimizer.accumulation_steps": 1,
    "model.remat": "none",
    "model.scan_layers": "auto",
    "pipeline.schedule": "auto",
    "pipeline.num_microbatches": 0,
    "pipeline.num_chunks": 0,
    "pipeline.partition": "flops",
    "pipeline.replicas": "",
    "pipeline.remat": "none",
    IMPLEMENTATION: "auto",
}
OF_STAGES = ("mesh.stage", "pipeline.")  # beginnings of the keys that only pipelines set to other values


class Candidate(NamedTuple):
    """A way to train, and its predicted costs.

    Attributes:
      name: the strategy and its sizes, such as `zero3` or `zb_h1, 4 stages x 2 replicas`.
      settings: the keys of the config that select it.
      costs: its costs.
      fits: whether it fits into the memory of a device.
    """

    name: str
    settings: Settings
    costs: StepCosts
    fits: bool


class Space(NamedTuple):
    """The space of candidates.

    Attributes:
      config: the config of the run.
      problem: its problem, without rematerialization and accumulation.
      layers: the costs of its layers.
      machine: the cluster.
      usable_bytes: the memory of a device that a run can use.
      kept: settings of the config that every candidate must have.
    """

    config: ConfigDict
    problem: Problem
    layers: Layers
    machine: Machine
    usable_bytes: float
    kept: Settings = MappingProxyType({})

    @property
    def num_devices(self) -> int:
        """The number of devices of the cluster."""
        return self.machine.cluster.num_devices

    def choices(self, key: str, values: Iterable[Any]) -> list[Any]:
        """Return the values of a key to compare: only that of the config if it is kept."""
        return [self.kept[key]] if key in self.kept else list(values)

    def allows(self, settings: Settings) -> bool:
        """Return whether candidates with these settings, and some others, can have the settings that are kept."""
        return all(settings.get(key, value) == value for key, value in self.kept.items())

    def keeps(self, settings: Settings) -> bool:
        """Return whether a candidate has the settings that are kept."""
        has = {**DEFAULTS_OF_CHOICES, **settings}
        return all(has.get(key) == value for key, value in self.kept.items())


def candidates(space: Space) -> list[Candidate]:
    """Return all candidates, the fastest that fit first, then the others by the memory that they need."""
    return ranked(one for one in (*_of_replicas(space), *_of_pipelines(space)) if space.keeps(one.settings))


def ranked(found: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates, the fastest that fit first, then the others by the memory that they need."""
    return sorted(found, key=lambda one: (0, one.costs.seconds) if one.fits else (1, one.costs.nbytes))


def with_settings(config: ConfigDict, settings: Settings) -> ConfigDict:
    """Return a copy of a config with the settings of a candidate."""
    changed = copy.deepcopy(config)
    with changed.ignore_type():  # some keys have values of several types, such as 'auto' and a bool
        changed.update_from_flattened_dict(dict(DEFAULTS_OF_CHOICES) | dict(settings))
    return changed


class StateRatios(NamedTuple):
    """Bytes for each byte of the parameters: of the optimizer state, and that an update moves."""

    optimizer: float
    update: float


def state_ratios(problem: Problem) -> StateRatios:
    """Return the ratios of a problem."""
    state = abstract_state(problem.model, problem.optimizer)
    params = nbytes(state.params)
    return StateRatios(nbytes(state.optimizer) / params, update_bytes(problem) / params)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number; at most MOST_DIVISORS of them, with the smallest and the largest."""
    found = [one for one in range(1, number + 1) if number % one == 0]
    return [
        found[i] for i in sorted({round(i) for i in np.linspace(0, len(found) - 1, min(len(found), MOST_DIVISORS))})
    ]


def options_of(space: Space, exchange: str, num_replicas: int) -> dict[str, Any]:
    """Return the settings of the options that the config sets; None for those that the exchange cannot have.

    These are options of other exchanges, those that are impossible with this number of replicas, and lossy ones.
    """

    def possible(name: str, value: Any) -> bool:
        options = {name: value}
        is_exact = num_replicas > 1 and not exchange_differs(exchange, options, num_replicas)
        return is_exact and obstacle(exchange, num_replicas, options) is None

    return {f"{OPTIONS}{name}": value if possible(name, value) else None for name, value in given(space.config).items()}


# ---- replicas -------------------------------------------------------------------------------------------------------


def _of_replicas(space: Space) -> Iterator[Candidate]:
    """Yield, for each exchange, remat and form of the layers, the smallest accumulation that fits; else the largest."""
    n, batch = space.num_devices, space.config.batch_size
    if n == 1:
        of_single = {"strategy": "single", "mesh.data": 1, **options_of(space, "ddp", 1)}
        exchanges: list[tuple[str, Settings]] = [("single", of_single)]
    else:
        is_zero3 = space.machine.cluster.num_processes == 1 and GROUP not in space.kept  # hsdp in one group
        equal = (name for name in EXCHANGES if not exchange_differs(name, {}, n) and not (is_zero3 and name == HSDP))
        exchanges = [(name, _exchange_settings(name, space)) for name in equal]
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
                    best = replicas_candidate(space, name, {**settings, **more}, plan, update)
                    if best.fits:
                        break
                if best is not None:
                    yield best


def _exchange_settings(name: str, space: Space) -> Settings:
    settings: dict[str, Any] = {"strategy": "data_parallel", "mesh.data": space.num_devices, "exchange": name}
    cluster = space.machine.cluster
    if name == HSDP:
        settings[GROUP] = cluster.num_devices // cluster.num_processes
    if IMPLEMENTATION in space.kept:
        settings[IMPLEMENTATION] = space.kept[IMPLEMENTATION]
    return settings | options_of(space, name, space.num_devices)


def plan_of(space: Space, settings: Settings) -> Plan[Any] | str:
    """Return the plan of some settings, or the reason why there is none."""
    return strategies.possible(with_settings(space.config, settings), space.problem, space.machine.cluster)


def _gathers_layers(plan: Plan[Any]) -> bool:
    """Return whether a plan gathers the parameters layer by layer, which is done in a scan on GPUs."""
    return has_exchange(plan) and plan.details.exchange.fetch is not None


def update_of(space: Space, plan: Plan[Any]) -> UpdateBytes:
    """Return the bytes that an update of replicas moves on a device."""
    whole = update_bytes(space.problem)
    if not has_exchange(plan):
        return UpdateBytes(0.0, whole)
    both = exchange_bytes(space.problem, plan)
    if plan.layouts["optimizer"].kind == SHARDED:
        whole *= plan.details.exchange.copies / plan.num_replicas
    return UpdateBytes(max(both - whole, 0.0), min(whole, both))


def combined(sent: Traffic, num_replicas: int) -> Traffic:
    """Return the all-reduces that XLA's partitioner adds, as XLA combines them on GPUs."""
    nbytes = sent.nbytes * num_replicas / (2 * (num_replicas - 1))
    return sent._replace(messages=min(sent.messages, 2 * (num_replicas - 1) * math.ceil(nbytes / COMBINED_BYTES)))


def has_exchange(plan: Plan[Any]) -> bool:
    """Return whether the program of a replica contains the exchange; otherwise XLA or the host adds it."""
    return isinstance(plan.details, ReplicaDetails)


def replicas_candidate(space: Space, name: str, settings: Settings, plan: Plan[Any], update: UpdateBytes) -> Candidate:
    """Return a candidate without stages.

    Args:
      space: what is searched.
      name: its name.
      settings: its settings.
      plan: the plan of its exchange, without accumulation.
      update: what `update_of` returns.
    """
    accumulation, remat = settings["optimizer.accumulation_steps"], settings["model.remat"]
    exchange = plan.details.exchange if has_exchange(plan) else None
    traffic = plan.traffic
    if exchange:
        read = space.problem.model.read_shapes(space.problem.batch) if exchange.fetch else space.problem.model.shapes
        traffic = tuple(exchange.traffic(read, accumulation))
    elif plan.details == "sharding" and space.machine.overlaps:
        traffic = tuple(combined(one, plan.num_replicas) for one in traffic)
    gathers_layers = _gathers_layers(plan)
    shards = exchange and (exchange.fetch or exchange.scatter)
    memory = plan.memory[0]
    params, optimizer = memory["parameters"], sum(memory.values()) - memory["parameters"]
    gradients = params if gathers_layers or not shards else params / plan.num_replicas
    size = space.config.batch_size // (plan.num_replicas * accumulation)
    state = StateBytes(params, optimizer, gradients)
    is_scanned = settings["model.scan_layers"] is not False and space.machine.overlaps
    if space.machine.runs_early:
        needed = _replica_bytes_on_cpu(space, settings, plan, size, state)
    else:
        needed = gpu_memory.gpu_replica_bytes(
            space.layers,
            space.problem.model,
            state,
            size,
            remat,
            is_scanned=is_scanned,
            is_accumulated=accumulation > 1,
            gathers_layers=gathers_layers,
        )
    costs = replicas_costs(
        space.layers.profile(size, remat),
        space.machine,
        plan.axes,
        accumulation,
        traffic,
        state,
        update,
        needed,
        is_scanned=is_scanned,
        gathers_layers=gathers_layers,
    )
    return Candidate(name, settings, costs, costs.nbytes <= space.usable_bytes)


def _replica_bytes_on_cpu(space: Space, settings: Settings, plan: Plan[Any], size: int, state: StateBytes) -> float:
    """Return the bytes of a replica. size: examples of a microbatch; state: that of a device."""
    remat, scan, model = settings["model.remat"], settings["model.scan_layers"], space.problem.model
    gathers_layers, is_divided = _gathers_layers(plan), plan.details == "sharding" and plan.num_replicas > 1
    num_shares = plan.num_replicas if is_divided else 1
    passes = space.layers.passes(size, "none", num_shares=num_shares)  # the rest is computed again too early to help
    gradients, copies = [layer.weight_bytes for layer in space.layers.profile(size, remat)], 0.0
    if gathers_layers:
        gradients = [0.0] * len(gradients)
        default = layer_message_bytes(NODE if settings["exchange"] == HSDP else plan.num_replicas)
        copies = cpu_memory.gathered_bytes(model, space.config.exchange_options.bucket_bytes or default)
    elif scan is True or (scan == "auto" and remat != "none"):
        again, copies = space.layers.passes(size, remat, num_shares=num_shares), cpu_memory.stacked_bytes(model)
        for run in filter(cpu_memory.is_run, model.runs):
            passes = [*passes[: run.start], *again[run.start : run.stop], *passes[run.stop :]]
    if not gathers_layers and not is_divided:
        passes = cpu_memory.without_zeros(passes, model)
    is_accumulated = settings["optimizer.accumulation_steps"] > 1
    is_shared = plan.layouts["optimizer"].kind == SHARDED and not gathers_layers
    updated = state.parameters / (plan.num_replicas if is_shared else 1)
    return cpu_memory.cpu_replica_bytes(
        passes, gradients, state, is_accumulated=is_accumulated, copies=copies, updated=updated
    )


# ---- pipelines ------------------------------------------------------------------------------------------------------


def _of_pipelines(space: Space) -> Iterator[Candidate]:
    n, batch, num_layers = space.num_devices, space.config.batch_size, len(space.problem.model.layers)
    others = {key: value for key, value in DEFAULTS_OF_CHOICES.items() if not key.startswith(OF_STAGES)}
    if not space.allows(others):
        return
    ratios = state_ratios(space.problem)
    for stages in (number for number in range(2, min(n, num_layers) + 1) if n % number == 0):
        replicas = n // stages
        if batch % replicas or not space.allows({"mesh.stage": stages, "mesh.data": replicas}):
            continue
        for number in space.choices("pipeline.num_microbatches", divisors(batch // replicas)):
            if batch % (replicas * number) or number < stages // 2 or stages * number > LARGEST_TABLE:
                continue
            for schedule in space.choices("pipeline.schedule", SCHEDULES):
                table = _table(schedule, stages, number, space.kept.get("pipeline.num_chunks", 0))
                if table is not None and table.num_stages <= num_layers:
                    for remat in space.choices("pipeline.remat", space.layers.remats):
                        yield pipeline_candidate(space, schedule, table, remat, replicas, ratios)


@cache
def _table(schedule: str, num_devices: int, num_microbatches: int, num_chunks: int) -> Table | None:
    """Return a table, or None if there is none. num_chunks: 0 for that of the schedule."""
    chunks = num_chunks or SCHEDULES[schedule].num_chunks
    sizes = {"num_devices": num_devices, "num_microbatches": num_microbatches, "num_chunks": chunks}
    if schedule_obstacle(schedule, **sizes):
        return None
    return make_table(schedule, **sizes)


def pipeline_candidate(
    space: Space, schedule: str, table: Table, remat: str, replicas: int, ratios: StateRatios
) -> Candidate:
    """Return a pipeline."""
    size = space.config.batch_size // (replicas * table.num_microbatches)
    layers, memory = (
        space.layers.profile(size, remat),
        space.layers.memory(size, remat, is_split=splits_backward(table)),
    )
    bounds = balanced_bounds(layers, table.num_stages)
    axes = {DATA: replicas, STAGE: table.num_devices}
    weights = [0.0] * table.num_devices
    for device, of_device in enumerate(table.stages.tolist()):
        for stage in of_device:
            weights[device] += sum(layer.weight_bytes for layer in layers[bounds[stage] : bounds[stage + 1]])
    largest = max(weights)  # all devices allocate what the fullest one needs
    states = [StateBytes(largest, ratios.optimizer * largest, largest)] * table.num_devices
    vectors = len(layers)  # of gradients; the engine packs the arrays of a device
    traffic = [ring_traffic("all-reduce", 2, DATA, replicas, largest, "float32", num_vectors=vectors)]
    update = ratios.update * largest
    costs = pipeline_costs(layers, memory, space.machine, axes, table, bounds, traffic, states, update, remat=remat)
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


def candidate_of_plan(space: Space, config: ConfigDict, plan: Plan[Any]) -> Candidate:
    """Return the candidate of a plan of single, data_parallel or pipeline. For others, see unranked.py."""
    if plan.strategy == "pipeline":
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
        costs = pipeline_costs(
            profile, memory, space.machine, plan.axes, table, bounds, plan.traffic, states, update, remat=details.remat
        )
        if space.machine.runs_early:
            nbytes = _pipeline_bytes_on_cpu(space, size, details.remat, table, bounds, max(states, key=sum))
            costs = costs._replace(nbytes=nbytes)
        replicas = f" x {plan.num_replicas} replicas" if plan.num_replicas > 1 else ""
        name = f"{config.pipeline.schedule}, {table.num_devices} stages{replicas}"
        shown = {"pipeline.num_microbatches": table.num_microbatches, "pipeline.remat": details.remat}
        return Candidate(name, shown, costs, costs.nbytes <= space.usable_bytes)
    assert plan.strategy in ("single", "data_parallel"), plan.strategy
    settings = {
        "optimizer.accumulation_steps": config.optimizer.accumulation_steps,
        "model.remat": config.model.remat,
        "model.scan_layers": config.model.scan_layers,
    }
    name = config.exchange if plan.strategy == "data_parallel" else plan.strategy
    return replicas_candidate(space, name, settings, plan, update_of(space, plan))
