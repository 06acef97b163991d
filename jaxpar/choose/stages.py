"""Chooses the cuts, the schedule and the executor of a pipeline, where config.pipeline has `auto`.

The cuts and the replicas of the stages follow from the times of the layers in a profile (partitions.py). Schedules and
executors are compared by the same predicted time of a step that the planner ranks by, and by the memory that the plan
of a schedule states. The candidates are the named schedules with a fused backward pass and, unless stages have
replicas, tables that a search finds, with a fused backward pass and with separate B and W.

The CPU devices of a process share its processors, so a device that waits leaves them to the others. A clock then takes
the time of all its actions, every schedule takes as long as its work, and separate B and W gain nothing. What executors
cost there was measured (scripts/bench/executors.py): small actions are faster in lockstep, because the host needs time
for each of them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxpar import strategies
from jaxpar.choose.candidates import Settings
from jaxpar.choose.costs.layers import Layers, ProfiledLayers, TracedLayers
from jaxpar.choose.costs.machine import Machine, machine_of, processors_shared, with_assumed_rates
from jaxpar.choose.costs.profile import LayerProfile, read_profile
from jaxpar.choose.costs.step import actions_seconds, send_seconds, stage_times
from jaxpar.choose.partitions import (
    Partition,
    PartitionSearch,
    TableCosts,
    continuous_candidates,
    flushing_candidates,
    flushing_costs,
)
from jaxpar.choose.pipedream import most_workers
from jaxpar.choose.search.lockstep_search import search_fused, search_lockstep
from jaxpar.choose.search.search import SearchResult, search
from jaxpar.cluster import Cluster
from jaxpar.core.mesh import DATA, STAGE, sizes
from jaxpar.core.optimizer import make_optimizer
from jaxpar.core.plan import Plan
from jaxpar.core.ring import sent_of_operand
from jaxpar.core.state import nbytes
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, format_count, is_refused
from jaxpar.models.model import Model
from jaxpar.strategies.pipeline.executor.partition import AUTO, layer_flops
from jaxpar.strategies.pipeline.schedules import (
    DISPATCH,
    LOCKSTEP,
    check_evaluation,
    check_pipeline_values,
    configured_table,
)
from jaxpar.strategies.pipeline.tables.periodic import CONTINUOUS
from jaxpar.strategies.pipeline.tables.replicated import WITH_REPLICAS, replicated_table
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, make_table
from jaxpar.strategies.pipeline.tables.simulate import Times
from jaxpar.strategies.pipeline.tables.table import BW, Table
from jaxpar.strategies.pipeline.tables.table_file import write_table
from jaxpar.strategies.pipeline.tables.validate import peak_stashed

AUTO_KEYS = ("pipeline.partition", "pipeline.schedule", "pipeline.executor")
UNTIL_CHOSEN = "1f1b"  # the schedule that stands for `auto` until the stages are known
SPLIT = "zb_h1"  # any schedule with separate B and W
FUSED = (UNTIL_CHOSEN, "eager_1f1b", "gpipe", "model_parallel")  # of those with equal costs, the first one is chosen
WIDTH = 4  # of the beam; a search for 8 unequal stages and 64 microbatches takes about 1.5 s
EVALUATIONS = 300  # of the search without lockstep
LARGEST_SEARCH = 1024  # stages x microbatches, about 4 s; above, only named schedules are compared
CPU_FLOPS = 1e9  # of a microbatch in a stage, from which dispatched stages were faster on CPU devices
EQUAL = 0.01  # largest relative difference between a size in a profile and that of the model, for rounded numbers
UNKNOWN_LAYERS = 700  # number of layers to assume while the model is not known
UNSET = {"profile": "", "bandwidth": 0.0, "memory_limit": 0.0}  # keys that only partition auto reads
SEARCHED_TABLE = "schedule.csv"
SHARED_CORES = "its devices share their cores, so that no schedule saves time"


class StageChoice(NamedTuple):
    """The settings that were chosen, why, and advice that follows from a profile; empty if there is none."""

    settings: Settings
    reasons: tuple[str, ...]
    advice: str = ""


def open_keys(config: ConfigDict) -> list[str]:
    """Return the keys of config.pipeline that must be chosen."""
    own = {key: config.pipeline[key.removeprefix("pipeline.")] for key in AUTO_KEYS}
    return [key for key in AUTO_KEYS if own[key] == AUTO] if config.strategy == "pipeline" else []


def with_values(config: ConfigDict, settings: Settings) -> ConfigDict:
    """Return a copy of a config with other values of some keys."""
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict(dict(settings))
    return changed


def until_chosen(config: ConfigDict, cluster: Cluster, model: Model | None = None) -> ConfigDict:
    """Return a config with values that stand for `auto`, with which the run can be checked before its data is read.

    Raises:
      UserError: no division of the layers is possible, whatever their times are.
    """
    keys, stand_in = open_keys(config), dict[str, Any]()
    _check_chunks(config)
    if "pipeline.partition" in keys:
        first = next(_divisions(config, cluster, len(model.layers) if model else UNKNOWN_LAYERS, ()))
        stand_in |= {"pipeline.partition": "uniform", "pipeline.replicas": _replicas_text(first.replicas)}
    stand_in |= {"pipeline.schedule": UNTIL_CHOSEN} if "pipeline.schedule" in keys else {}
    stand_in |= {"pipeline.executor": LOCKSTEP} if "pipeline.executor" in keys else {}
    return with_values(config, stand_in)


def _check_chunks(config: ConfigDict) -> None:
    number = config.pipeline.num_chunks
    if "pipeline.schedule" in open_keys(config) and number > 1:
        raise UserError(f"config.pipeline.num_chunks is {number}; it must be 1 for schedule {AUTO}")


def choose_stages(
    config: ConfigDict, problem: Problem, cluster: Cluster, folder: Path, profile: Sequence[LayerProfile] = ()
) -> StageChoice:
    """Return the settings that replace `auto` in config.pipeline.

    Args:
      config: the config of a pipeline.
      problem: its problem.
      cluster: the cluster that it is for.
      folder: where the table is written that a search finds.
      profile: the layers of the profile, for partition auto.

    Raises:
      UserError: the profile is that of another model, or nothing fits.
    """
    keys, choice = open_keys(config), StageChoice({}, ())
    if "pipeline.partition" in keys:
        choice = _choose_partition(config, problem, cluster, profile)
        config = with_values(config, choice.settings)
    layers = layers_of(problem, cluster, profile)
    if "pipeline.schedule" in keys:
        schedule, reason = _choose_schedule(config, problem, cluster, folder, layers)
        config = with_values(config, {"pipeline.schedule": schedule})
        choice = _with(choice, {"pipeline.schedule": schedule}, f"schedule {schedule}: {reason}")
    if "pipeline.executor" in keys:
        executor, reason = _choose_executor(config, problem, cluster, layers)
        choice = _with(choice, {"pipeline.executor": executor}, f"executor {executor}: {reason}")
    return choice


def with_stages(config: ConfigDict, problem: Problem, cluster: Cluster, folder: Path) -> ConfigDict:
    """Return a config without `auto` in config.pipeline. Measures nothing. See `choose_stages`."""
    path = config.pipeline.profile if "pipeline.partition" in open_keys(config) else ""
    profile = read_profile(Path(path), "config.pipeline.profile") if path else []
    return with_values(config, choose_stages(config, problem, cluster, folder, profile).settings)


def _with(choice: StageChoice, settings: Settings, reason: str) -> StageChoice:
    return choice._replace(settings={**choice.settings, **settings}, reasons=(*choice.reasons, reason))


def layers_of(problem: Problem, cluster: Cluster, profile: Sequence[LayerProfile]) -> Layers:
    """Return the layers with the times of a profile, or those at the rates of the cluster, or at assumed ones."""
    return ProfiledLayers(problem, profile) if profile else TracedLayers(problem, with_assumed_rates(cluster))


# ---- partition ------------------------------------------------------------------------------------------------------


def _choose_partition(
    config: ConfigDict, problem: Problem, cluster: Cluster, profile: Sequence[LayerProfile]
) -> StageChoice:
    c, model = config.pipeline, problem.model
    if not profile:
        raise UserError(
            f"config.pipeline.profile is ''; it must be the path of a profile, which `jaxpar partition profile` "
            f"writes, for a plan with config.pipeline.partition={AUTO!r}; only the start of a run measures the layers "
            "itself"
        )
    check_layers(config, profile, model)
    bandwidth, limit = _bandwidth(config, cluster), c.memory_limit or math.inf
    divisions = _divisions(config, cluster, len(profile), profile)
    search = PartitionSearch(_without_cuts_of_ties(config, profile, model), bandwidth=bandwidth, memory_limit=limit)
    found = search.find(divisions)
    if found is None:
        raise _no_division(config, len(profile))
    check_layer_sizes(config, profile, model, model.inputs(problem.batch))
    settings = {
        "pipeline.partition": ",".join(profile[stage.first_layer].name for stage in found.stages[1:]),
        "pipeline.replicas": _replicas_text(found.costs.replicas),
    }
    reason = f"{len(found.stages)} stages: the division of the layers whose step is shortest by the profile"
    return StageChoice(settings, (reason,), _advice(config, cluster, profile, bandwidth, found))


def _replicas_text(replicas: Sequence[int]) -> str:
    return ",".join(map(str, replicas)) if max(replicas) > 1 else ""


def check_unset(config: ConfigDict) -> None:
    """Raise UserError if a pipeline sets a key that only partition auto reads, without it."""
    c = config.pipeline
    for key, unset in UNSET.items() if c.partition != AUTO and config.strategy == "pipeline" else ():
        of_schedule = f" or config.pipeline.schedule={AUTO!r}" if key == "memory_limit" else ""
        if c[key] != unset and not (of_schedule and c.schedule == AUTO):
            raise UserError(
                f"config.pipeline.{key} is {c[key]!r}; it must be {unset!r} without "
                f"config.pipeline.partition={AUTO!r}{of_schedule}"
            )


def _bandwidth(config: ConfigDict, cluster: Cluster) -> float:
    """Return the bandwidth between two stages."""
    if STAGE in cluster.links:
        return cluster.links[STAGE].bandwidth
    bandwidth: float = config.pipeline.bandwidth
    if not 1 <= bandwidth < math.inf:
        raise UserError(
            f"config.pipeline.bandwidth is {bandwidth}; it must be the bandwidth between two devices in bytes per "
            f"second, such as 1.25e9, with config.pipeline.partition={AUTO!r}"
        )
    return bandwidth


def _divisions(
    config: ConfigDict, cluster: Cluster, num_layers: int, profile: Sequence[LayerProfile]
) -> Iterator[TableCosts]:
    """Yield the costs of all replicas with which config.pipeline can run. Raises UserError if there are none.

    profile: empty if the times are not known yet.
    """
    c, number = config.pipeline, config.mesh.stage
    check_pipeline_values(config)
    if c.replicas:
        raise UserError(
            f"config.pipeline.replicas is {c.replicas!r}; it must be empty with config.pipeline.partition={AUTO!r}, "
            "which chooses them"
        )
    _bandwidth(config, cluster)
    name = UNTIL_CHOSEN if c.schedule == AUTO else c.schedule
    has_replicas = name in {*WITH_REPLICAS, *CONTINUOUS}
    table = configured_table(with_values(config, {"pipeline.schedule": name}), ())
    _check_number_of_stages(config, table, num_layers, has_replicas=has_replicas)
    forward, backward = sum(layer.forward_s for layer in profile), sum(layer.backward_s for layer in profile)
    ratio, moments = backward / forward if forward else 2.0, optimizer_moments(config)
    most_stages, executor = min(number, num_layers), executor_for_costs(config)
    found: Iterator[TableCosts] = iter(())
    if not has_replicas:
        found = iter([flushing_costs(table, ratio, moments, executor)])
    elif name not in CONTINUOUS:
        found = flushing_candidates(name, number, table.num_microbatches, most_stages, ratio, moments, executor)
    else:
        num_data = sizes(config, cluster)[DATA]
        of_replica = max(config.batch_size // num_data, 1)

        def accepts(m: int) -> bool:
            if c.num_microbatches:  # other checks refuse a number that is not possible
                return True
            return of_replica % m == 0 and not is_refused(check_evaluation, config, num_data, m)

        found = continuous_candidates(name, number, c.num_microbatches, most_stages, of_replica, accepts, moments)
    first = next(found, None)
    if first is None:
        key = "pipeline.num_microbatches" if c.num_microbatches else "batch_size"
        raise UserError(
            f"config.mesh.stage is {number}; it must be at most {num_layers}, the number of layers, because "
            f"config.{key}={c.num_microbatches or config.batch_size} cannot be shared by the replicas of fewer stages "
            f"with config.pipeline.schedule={c.schedule!r}"
        )
    yield first
    yield from found


def _check_number_of_stages(config: ConfigDict, table: Table, num_layers: int, *, has_replicas: bool) -> None:
    """Raise UserError for numbers of stages that cannot be searched, or that the layers are too few for."""
    number, stage = table.num_stages, config.mesh.stage
    if number < 2:
        raise UserError(f"config.mesh.stage is {stage}; it must be at least 2 with config.pipeline.partition={AUTO!r}")
    if number > (most := most_workers(num_layers)):
        raise UserError(
            f"config.mesh.stage is {stage}, with {format_count(number, 'stage')}; there must be at most {most} for "
            f"{num_layers} layers, because the search would take too long"
        )
    if number > num_layers and not has_replicas:
        raise UserError(
            f"config.mesh.stage is {stage}, with {number} stages; there must be at most {num_layers}, the number of "
            f"layers, with config.pipeline.schedule={config.pipeline.schedule!r}"
        )


def optimizer_moments(config: ConfigDict) -> float:
    """Return the bytes of the optimizer state of a large matrix / the bytes of the matrix."""
    like = {"layer": {"kernel": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}}
    return nbytes(jax.eval_shape(make_optimizer(config, lambda _step: 0.0).init, like)) / nbytes(like)


def _without_cuts_of_ties(config: ConfigDict, profile: Sequence[LayerProfile], model: Model) -> list[LayerProfile]:
    """Return the profile, without the cuts between layers that share an array if these must be on one stage."""
    layers, numbers = list(profile), {layer.name: number for number, layer in enumerate(profile)}
    for tie in model.ties if config.pipeline.schedule in CONTINUOUS else ():
        first, last = sorted((numbers[tie.layer], numbers[tie.source]))
        layers[first:last] = [layer._replace(can_cut=False) for layer in layers[first:last]]
    return layers


def _advice(
    config: ConfigDict, cluster: Cluster, profile: Sequence[LayerProfile], bandwidth: float, found: Partition
) -> str:
    """Return advice to use data parallelism if it is faster by the profile, with an exchange after the backward."""
    number = config.mesh.stage
    compute = found.costs.num_microbatches / number * sum(layer.forward_s + layer.backward_s for layer in profile)
    sent = sent_of_operand("all-reduce", number) * sum(layer.weight_bytes for layer in profile)
    seconds = compute + sent / bandwidth
    if config.batch_size % math.prod(sizes(config, cluster).values()) or seconds >= found.seconds:
        return ""
    return (
        f"by the profile, config.strategy='data_parallel' on these {number} devices would take "
        f"{seconds / found.seconds:.0%} of the time of the pipeline"
    )


def _no_division(config: ConfigDict, num_layers: int) -> UserError:
    """Return the error for a profile that cannot be divided at all, or not within the memory limit."""
    c = config.pipeline
    if c.memory_limit:
        return UserError(
            f"config.pipeline.memory_limit is {c.memory_limit:g}; it must be larger, because no division of the "
            f"{format_count(num_layers, 'layer')} fits"
        )
    return UserError(
        f"config.mesh.stage is {config.mesh.stage}; it must be smaller, because the {num_layers} layers of the model "
        f"can be cut at too few places with config.pipeline.schedule={c.schedule!r}"
    )


def check_layers(config: ConfigDict, profile: Sequence[LayerProfile], model: Model) -> None:
    """Raise UserError for a profile whose layers are not those of the model."""
    names = [layer.name for layer in profile], [layer.name for layer in model.layers]
    for number in range(max(map(len, names))):
        stated, name = (of[number] if number < len(of) else "missing" for of in names)
        if stated != name:
            raise UserError(
                f"config.pipeline.profile is {config.pipeline.profile!r}, whose layer {number} is {stated}; it must be "
                f"{name}, as in this model"
            )


def check_layer_sizes(config: ConfigDict, profile: Sequence[LayerProfile], model: Model, inputs: Sequence[Any]) -> None:
    """Raise UserError for a profile with other sizes than the model. A size of 0 is accepted as not stated.

    The profile can be of another number of examples, so outputs are compared in proportion to the first one.
    """
    where, scale = f"config.pipeline.profile is {config.pipeline.profile!r}, whose", 0.0
    for layer, of_model, after in zip(profile, model.layers, [*inputs[1:], None], strict=True):
        weights, output = nbytes(of_model.shapes), nbytes(after)
        if layer.weight_bytes and not math.isclose(layer.weight_bytes, weights, rel_tol=EQUAL):
            raise UserError(
                f"{where} layer {layer.name} has {layer.weight_bytes:.10g} bytes of weights; it must have {weights}, "
                "as in this model, or 0 if they are not known"
            )
        if not layer.output_bytes or not output:
            continue
        scale = scale or layer.output_bytes / output
        if not math.isclose(layer.output_bytes, scale * output, rel_tol=EQUAL):
            raise UserError(
                f"{where} layer {layer.name} has {layer.output_bytes:.10g} bytes of output; it must have "
                f"{scale * output:.10g}, in proportion to those of the first layers, or 0 if they are not known"
            )


# ---- schedule -------------------------------------------------------------------------------------------------------


def executor_for_costs(config: ConfigDict) -> str:
    """Return the executor of the config, or dispatch while it is still to be chosen."""
    executor: str = config.pipeline.executor
    return DISPATCH if executor == AUTO else executor


def shares_cores(config: ConfigDict, cluster: Cluster) -> bool:
    """Return whether all stages share cores, so that nothing waits, and no memory limit bounds the schedule."""
    return processors_shared(cluster) >= config.mesh.stage and not config.pipeline.memory_limit


def settled_stages(config: ConfigDict, cluster: Cluster) -> StageChoice | None:
    """Return the choice if it does not depend on the problem; None otherwise."""
    if open_keys(config) != ["pipeline.schedule"] or not shares_cores(config, cluster):
        return None
    _check_chunks(config)
    return StageChoice({"pipeline.schedule": UNTIL_CHOSEN}, (f"schedule {UNTIL_CHOSEN}: {SHARED_CORES}",))


class _Stages(NamedTuple):
    """The stages of a pipeline with the programs of a table, and how long they take.

    Attributes:
      plan: the plan of the table.
      times: times of F, B and W, by stage.
      transfer: seconds of a transfer.
      machine: the cluster.
      executor: one of EXECUTORS.
    """

    plan: Plan[Any]
    times: Times
    transfer: float
    machine: Machine
    executor: str

    def seconds(self, table: Table) -> float:
        """Return the time of the actions and transfers of a table for these stages."""
        replicas = self.plan.num_replicas
        return sum(actions_seconds(table, self.times, self.transfer, self.machine, replicas, self.executor))


def _stages(config: ConfigDict, problem: Problem, cluster: Cluster, layers: Layers, executor: str) -> _Stages:
    """Return the stages of a config with a schedule. executor: the one whose costs are wanted."""
    plan, machine = _plan_in_lockstep(config, problem, cluster), machine_of(cluster)
    details = plan.details
    is_split = details.lowered.shape.num_phases > 2
    seconds = layers.phase_seconds(config.batch_size // plan.decision.batch_divisor, details.remat, is_split=is_split)
    times = stage_times(seconds, details.stages.bounds)
    transfer = send_seconds(machine, details.engine.transfers.nbytes, plan.axes)
    return _Stages(plan, times, transfer, machine, executor)


def _plan_in_lockstep(config: ConfigDict, problem: Problem, cluster: Cluster) -> Plan[Any]:
    """Return the plan of a config in lockstep, whatever its memory: a schedule that fits is yet to be found."""
    return strategies.plan(
        with_values(config, {"pipeline.executor": LOCKSTEP}), problem, replace(cluster, memory_bytes=None)
    )


def _choose_schedule(
    config: ConfigDict, problem: Problem, cluster: Cluster, folder: Path, layers: Layers
) -> tuple[str, str]:
    """Return the name of the fastest schedule that fits, or the path of a table; and why."""
    stages, sharing = config.mesh.stage, processors_shared(cluster)
    if shares_cores(config, cluster):
        return UNTIL_CHOSEN, SHARED_CORES
    executor = executor_for_costs(config)

    def stages_of(name: str) -> _Stages:
        return _stages(with_values(config, {"pipeline.schedule": name}), problem, cluster, layers, executor)

    fused = stages_of(UNTIL_CHOSEN)
    start = fused.plan.details.table
    limit = _limit(config, cluster, fused.plan)
    if limit < 1 and config.pipeline.memory_limit:
        raise _too_low(config, fused.plan)
    found = [(fused, of_fused) for of_fused in _named(start, limit)]
    if not start.replicas and sharing < stages:
        found += _searched(fused, stages_of(SPLIT), limit, lambda split: _limit(config, cluster, split))
    seconds = [of.seconds(result.table) for of, result in found]
    best = next(result for (_, result), of in zip(found, seconds, strict=True) if of <= min(seconds) * (1 + 1e-9))
    reason = f"the shortest step of {format_count(len(found), 'schedule')} that fit"
    if best.policy in SCHEDULES:
        return best.policy, reason
    path = folder / SEARCHED_TABLE
    write_table(best.table, path)
    return str(path), f"{reason}, found by a search ({best.policy})"


def _named(start: Table, limit: int) -> list[SearchResult]:
    """Return the named schedules with a fused backward pass that fit.

    If stages have replicas and none fits, it is the one with the fewest microbatches in memory.
    """
    p, m = start.num_devices, start.num_microbatches
    if start.replicas:
        made = {name: replicated_table(name, start.replicas, m) for name in FUSED if name in WITH_REPLICAS}
    else:
        made = {name: make_table(name, num_devices=p, num_microbatches=m, num_chunks=1) for name in FUSED}
    peaks = {name: int(peak_stashed(table).max()) for name, table in made.items()}
    return [SearchResult(name, made[name]) for name in made if peaks[name] <= max(limit, min(peaks.values()))]


def _searched(
    fused: _Stages, split: _Stages, limit: int, limit_of: Callable[[Plan[Any]], int]
) -> list[tuple[_Stages, SearchResult]]:
    """Return tables that searches find: with a fused backward pass, and with separate B and W."""
    table = fused.plan.details.table
    p, m, in_lockstep = table.num_devices, table.num_microbatches, fused.executor == LOCKSTEP
    width, found = WIDTH if p * m <= LARGEST_SEARCH else 0, []
    if 1 <= limit < 2 * p - 1:  # otherwise eager_1f1b fits
        forward, backward, weight = fused.times
        together = Times(forward, np.add(backward, weight).tolist(), [0.0] * p)
        found.append((fused, search_fused(together, limit, p, m, width)))
    limit = limit_of(split.plan)
    if limit < 1:
        return found
    named = split.plan.details.table
    if in_lockstep:
        result = search_lockstep(split.times, split.transfer, limit, p, m, width=width)
    elif width:
        result = search(split.times, split.transfer, limit, p, m, evaluations=EVALUATIONS)
    elif peak_stashed(named).max() <= limit:
        result = SearchResult(SPLIT, named)
    else:
        return found
    if (result.table.actions["kind"] != BW).all():  # otherwise other programs run it, which need more memory
        found.append((split, result))
    return found


def _limit(config: ConfigDict, cluster: Cluster, plan: Plan[Any]) -> int:
    """Return for how many microbatches a device has memory between F and W; below 1 if not even the state fits.

    The memory is config.pipeline.memory_limit, or what JAX takes of that of a device of the cluster. If neither is
    known, it is the number of devices, as for 1f1b.
    """
    details, state = plan.details, _state_bytes(plan)
    most, (transfers, of_microbatch) = 2 * details.table.num_devices - 1, _bytes_of_microbatches(plan)
    if config.pipeline.memory_limit:
        fitting = (config.pipeline.memory_limit - state - transfers) // max(of_microbatch, 1)
    elif cluster.usable_bytes is None:
        fitting = details.table.num_devices
    else:
        memory = cluster.usable_bytes / processors_shared(cluster)  # the CPU devices of a machine share its memory
        gradients = max(nbytes(program.inputs.params) for program in details.programs.programs)
        # A backward pass has as much as was saved once more: its gradients, or what it computes again.
        fitting = (memory - state - gradients - transfers) // max(of_microbatch, 1) - 1
    return int(min(fitting, most, details.table.num_microbatches))


def _state_bytes(plan: Plan[Any]) -> int:
    return max(plan.device_state_bytes)


def _bytes_of_microbatches(plan: Plan[Any]) -> tuple[int, int]:
    """Return the bytes that a device needs once, and for each microbatch.

    A microbatch counts as if all its stashes and transfers existed at the same time.
    """
    engine = plan.details.engine
    transfers = 2 * engine.transfers.nbytes
    return transfers, sum(stash.nbytes for stash in engine.stashes.values()) + transfers


def _too_low(config: ConfigDict, plan: Plan[Any]) -> UserError:
    least = _state_bytes(plan) + sum(_bytes_of_microbatches(plan))
    return UserError(
        f"config.pipeline.memory_limit is {config.pipeline.memory_limit:g}; it must be at least {least:,} with "
        f"config.pipeline.schedule={AUTO!r}, for the state and one microbatch of a device"
    )


# ---- executor -------------------------------------------------------------------------------------------------------


def _choose_executor(config: ConfigDict, problem: Problem, cluster: Cluster, layers: Layers) -> tuple[str, str]:
    """Return the executor whose step is shorter, and why."""
    if cluster.platform == "cpu":
        flops = _stage_flops(config, problem, cluster)
        size = "1 GFLOP or more" if flops >= CPU_FLOPS else "less than 1 GFLOP"
        return DISPATCH if flops >= CPU_FLOPS else LOCKSTEP, f"a stage computes {size} for a microbatch"
    stages = _stages(config, problem, cluster, layers, DISPATCH)
    table = stages.plan.details.table
    dispatched, lockstep = (stages._replace(executor=executor).seconds(table) for executor in (DISPATCH, LOCKSTEP))
    ratio = max(dispatched, lockstep) / min(dispatched, lockstep)
    return DISPATCH if dispatched <= lockstep else LOCKSTEP, f"the other one takes {ratio - 1:.0%} longer"


def _stage_flops(config: ConfigDict, problem: Problem, cluster: Cluster) -> float:
    """Return the FLOPs of a microbatch in the stage with the fewest."""
    plan, inputs = _plan_in_lockstep(config, problem, cluster), problem.model.inputs(problem.batch)
    forward = np.add.reduceat(layer_flops(problem.model, problem.batch, inputs), plan.details.stages.bounds[:-1])
    return 3.0 * float(forward.min()) / plan.decision.batch_divisor
