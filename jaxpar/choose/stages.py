"""Chooses the cuts, the schedule and the executor of a pipeline, where config.pipeline has `auto`.

The cuts and the replicas of the stages follow from the times of the layers in a profile (partition_search.py).
Schedules and executors are compared by the same predicted time of a step that the planner ranks by, and by the memory
that the plan of a schedule states. The candidates are the named schedules with a fused backward pass and, unless stages
have replicas, tables that a search finds, with a fused backward pass and with separate B and W.

The CPU devices of a process share its processors, so a device that waits leaves them to the others. A clock then takes
the time of all its actions, every schedule takes as long as its work, and separate B and W gain nothing. What executors
cost there was measured (scripts/bench/executors.py): small actions are faster in lockstep, because the host needs time
for each of them.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxpar import strategies
from jaxpar.choose.candidates import with_values
from jaxpar.choose.costs.layers import Layers, ProfiledLayers
from jaxpar.choose.costs.machine import Machine, machine_of, processors_shared, with_assumed_rates
from jaxpar.choose.costs.pipeline_steps import actions_seconds, send_seconds, stage_times
from jaxpar.choose.costs.profile import LayerProfile, read_profile
from jaxpar.choose.costs.traced_layers import TracedLayers
from jaxpar.choose.partition import (
    UNKNOWN_LAYERS,
    UNTIL_CHOSEN,
    StageChoice,
    assumed_executor,
    choose_partition,
    divisions,
    replicas_text,
)
from jaxpar.choose.search.lockstep_search import search_fused, search_lockstep
from jaxpar.choose.search.search import SearchResult, search
from jaxpar.cluster import Cluster
from jaxpar.core.plan import Plan
from jaxpar.core.state import nbytes
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, format_count
from jaxpar.models.model import Model
from jaxpar.strategies.exchanges import runs_in_lockstep
from jaxpar.strategies.pipeline.executor.partition import AUTO, layer_flops
from jaxpar.strategies.pipeline.schedules import DISPATCH, LOCKSTEP
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, WITH_REPLICAS, make_table, replicated_table
from jaxpar.strategies.pipeline.tables.simulate import Times
from jaxpar.strategies.pipeline.tables.table import BW, Table
from jaxpar.strategies.pipeline.tables.table_file import write_table
from jaxpar.strategies.pipeline.tables.validate import peak_stashed

AUTO_KEYS = ("pipeline.partition", "pipeline.schedule", "pipeline.executor")
SPLIT = "zb_h1"  # any schedule with separate B and W
FUSED = (UNTIL_CHOSEN, "eager_1f1b", "gpipe", "model_parallel")  # of those with equal costs, the first one is chosen
WIDTH = 4  # of the beam; a search for 8 unequal stages and 64 microbatches takes about 1.5 s
EVALUATIONS = 300  # of the search without lockstep
LARGEST_SEARCH = 1024  # stages x microbatches, about 4 s; above, only named schedules are compared
CPU_FLOPS = 1e9  # of a microbatch in a stage, from which dispatched stages were faster on CPU devices
SEARCHED_TABLE = "schedule.csv"
SHARED_CORES = "its devices share their cores, so no schedule saves time"


def open_keys(config: ConfigDict) -> list[str]:
    """Return the keys of config.pipeline that must be chosen."""
    own = {key: config.pipeline[key.removeprefix("pipeline.")] for key in AUTO_KEYS}
    return [key for key in AUTO_KEYS if own[key] == AUTO] if config.strategy == "pipeline" else []


def until_chosen(config: ConfigDict, cluster: Cluster, model: Model | None = None) -> ConfigDict:
    """Return a config with values that stand for `auto`, with which the run can be checked before its data is read.

    Raises UserError if no division of the layers is possible, whatever their times are.
    """
    keys, stand_in = open_keys(config), dict[str, Any]()
    _check_chunks(config)
    if "pipeline.partition" in keys:
        first = next(divisions(config, cluster, len(model.layers) if model else UNKNOWN_LAYERS, ()))
        stand_in |= {"pipeline.partition": "uniform", "pipeline.replicas": replicas_text(first.replicas)}
    stand_in |= {"pipeline.schedule": UNTIL_CHOSEN} if "pipeline.schedule" in keys else {}
    stand_in |= {"pipeline.executor": _simplest_executor(config)} if "pipeline.executor" in keys else {}
    return with_values(config, stand_in)


def choose_stages(
    config: ConfigDict, problem: Problem, cluster: Cluster, folder: Path, profile: Sequence[LayerProfile] = ()
) -> StageChoice:
    """Return the settings that replace `auto` in config.pipeline.

    Raises UserError if the profile is that of another model, or nothing fits.

    folder: where the table is written that a search finds; profile: the layers, for partition auto.
    """
    keys, settings, reasons, advice = open_keys(config), dict[str, Any](), list[str](), ""
    if "pipeline.partition" in keys:
        chosen = choose_partition(config, problem, cluster, profile)
        settings, reasons, advice = dict(chosen.settings), [*chosen.reasons], chosen.advice
        config = with_values(config, settings)
    layers = layers_of(problem, cluster, profile)
    if "pipeline.schedule" in keys:
        schedule, reason = _choose_schedule(config, problem, cluster, folder, layers)
        settings["pipeline.schedule"] = schedule
        config = with_values(config, settings)
        reasons.append(f"schedule {schedule}: {reason}")
    if "pipeline.executor" in keys:
        executor, reason = _choose_executor(config, problem, cluster, layers)
        settings["pipeline.executor"] = executor
        reasons.append(f"executor {executor}: {reason}")
    return StageChoice(settings, tuple(reasons), advice)


def with_stages(config: ConfigDict, problem: Problem, cluster: Cluster, folder: Path) -> ConfigDict:
    """Return a config without `auto` in config.pipeline. Measures nothing. See `choose_stages`."""
    path = config.pipeline.profile if "pipeline.partition" in open_keys(config) else ""
    profile = read_profile(Path(path), "config.pipeline.profile") if path else []
    return with_values(config, choose_stages(config, problem, cluster, folder, profile).settings)


def possible_stages(config: ConfigDict, problem: Problem, cluster: Cluster) -> Plan[Any] | str:
    """Return the plan of a config whose pipeline can have `auto`, or the message of the UserError in one line."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            return strategies.plan(with_stages(config, problem, cluster, Path(folder)), problem, cluster)
    except UserError as error:
        return str(error)


def layers_of(problem: Problem, cluster: Cluster, profile: Sequence[LayerProfile]) -> Layers:
    """Return the layers with the times of a profile, or those at the rates of the cluster, or at assumed ones."""
    return ProfiledLayers(problem, profile) if profile else TracedLayers(problem, with_assumed_rates(cluster))


def settled_stages(config: ConfigDict, cluster: Cluster) -> StageChoice | None:
    """Return the choice if it does not depend on the problem; None otherwise."""
    if open_keys(config) != ["pipeline.schedule"] or not _shares_cores(config, cluster):
        return None
    _check_chunks(config)
    return StageChoice({"pipeline.schedule": UNTIL_CHOSEN}, (f"schedule {UNTIL_CHOSEN}: {SHARED_CORES}",))


# ---- schedule and executor ------------------------------------------------------------------------------------------


def _shares_cores(config: ConfigDict, cluster: Cluster) -> bool:
    """Return whether all stages share cores, so that nothing waits, and no memory limit bounds the schedule."""
    return processors_shared(cluster) >= config.mesh.stage and not config.pipeline.memory_limit


class _Stages(NamedTuple):
    """The stages of a pipeline with the programs of a table, and how long they take."""

    plan: Plan[Any]  # the plan of the table
    times: Times  # times of F, B and W, by stage
    transfer: float  # seconds of a transfer
    machine: Machine
    executor: str

    def seconds(self, table: Table) -> float:
        """Return the time of the actions and transfers of a table for these stages."""
        replicas = self.plan.num_replicas
        return sum(actions_seconds(table, self.times, self.transfer, self.machine, replicas, self.executor))


def _stages(config: ConfigDict, problem: Problem, cluster: Cluster, layers: Layers, executor: str) -> _Stages:
    plan, machine = _plan_in_lockstep(config, problem, cluster), machine_of(cluster)
    details = plan.details
    is_split = details.lowered.shape.num_phases > 2
    work = layers.work(config.batch_size // plan.decision.batch_divisor, details.remat, is_split=is_split)
    times = stage_times(work, details.stages.bounds, machine, plan.num_devices, executor)
    transfer = send_seconds(machine, details.engine.transfers.nbytes, plan.axes)
    return _Stages(plan, times, transfer, machine, executor)


def _plan_in_lockstep(config: ConfigDict, problem: Problem, cluster: Cluster) -> Plan[Any]:
    """Return the plan of a config in lockstep, whatever its memory: a schedule that fits is yet to be found."""
    executor = {"pipeline.executor": _simplest_executor(config)}
    return strategies.plan(with_values(config, executor), problem, replace(cluster, memory_bytes=None))


def _simplest_executor(config: ConfigDict) -> str:
    """Return lockstep, or dispatch if the exchange does not run in lockstep."""
    return LOCKSTEP if runs_in_lockstep(config) else DISPATCH


def _choose_schedule(
    config: ConfigDict, problem: Problem, cluster: Cluster, folder: Path, layers: Layers
) -> tuple[str, str]:
    """Return the name of the fastest schedule that fits, or the path of a table; and why."""
    stages, sharing = config.mesh.stage, processors_shared(cluster)
    if _shares_cores(config, cluster):
        return UNTIL_CHOSEN, SHARED_CORES
    executor = assumed_executor(config)

    def stages_of(name: str) -> _Stages:
        return _stages(with_values(config, {"pipeline.schedule": name}), problem, cluster, layers, executor)

    fused = stages_of(UNTIL_CHOSEN)
    start = fused.plan.details.table
    limit = _limit(config, cluster, fused.plan)
    if limit < 1 and config.pipeline.memory_limit:
        least = max(fused.plan.device_state_bytes) + sum(_bytes_of_microbatches(fused.plan))
        raise UserError(
            f"config.pipeline.memory_limit is {config.pipeline.memory_limit:g}; it must be at least {least:,} with "
            f"config.pipeline.schedule={AUTO!r}, for the state and one microbatch of a device"
        )
    found = [(fused, of_fused) for of_fused in _named(start, limit)]
    if not start.replicas and sharing < stages:
        split = stages_of(SPLIT)
        found += _searched(fused, split, limit, _limit(config, cluster, split.plan))
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


def _searched(fused: _Stages, split: _Stages, limit: int, split_limit: int) -> list[tuple[_Stages, SearchResult]]:
    """Return tables that searches find: with a fused backward pass, and with separate B and W.

    limit, split_limit: the microbatches for which a device has memory.
    """
    table = fused.plan.details.table
    p, m, in_lockstep = table.num_devices, table.num_microbatches, fused.executor == LOCKSTEP
    width, found = WIDTH if p * m <= LARGEST_SEARCH else 0, []
    if 1 <= limit < 2 * p - 1:  # otherwise eager_1f1b fits
        forward, backward, weight = fused.times
        together = Times(forward, np.add(backward, weight).tolist(), [0.0] * p)
        found.append((fused, search_fused(together, limit, p, m, width)))
    named = split.plan.details.table
    if split_limit < 1:
        return found
    if in_lockstep:
        result = search_lockstep(split.times, split.transfer, split_limit, p, m, width=width)
    elif width:
        result = search(split.times, split.transfer, split_limit, p, m, evaluations=EVALUATIONS)
    elif peak_stashed(named).max() <= split_limit:
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
    details, state = plan.details, max(plan.device_state_bytes)
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


def _bytes_of_microbatches(plan: Plan[Any]) -> tuple[int, int]:
    """Return the bytes that a device needs once, and for each microbatch.

    A microbatch counts as if all its stashes and transfers existed at the same time.
    """
    engine = plan.details.engine
    transfers = 2 * engine.transfers.nbytes
    return transfers, sum(stash.nbytes for stash in engine.stashes.values()) + transfers


def _check_chunks(config: ConfigDict) -> None:
    """Raise UserError for several chunks with a schedule that must be chosen."""
    number = config.pipeline.num_chunks
    if config.pipeline.schedule == AUTO and number > 1:
        raise UserError(f"config.pipeline.num_chunks is {number}; it must be 1 for schedule {AUTO}")


def _choose_executor(config: ConfigDict, problem: Problem, cluster: Cluster, layers: Layers) -> tuple[str, str]:
    """Return the executor whose step is shorter, and why."""
    if not runs_in_lockstep(config):
        return DISPATCH, f"exchange {config.exchange} does not run in lockstep"
    if cluster.platform == "cpu":
        plan, inputs = _plan_in_lockstep(config, problem, cluster), problem.model.inputs(problem.batch)
        forward = np.add.reduceat(layer_flops(problem.model, problem.batch, inputs), plan.details.stages.bounds[:-1])
        flops = 3.0 * float(forward.min()) / plan.decision.batch_divisor  # of a microbatch in the stage with the fewest
        size = "1 GFLOP or more" if flops >= CPU_FLOPS else "less than 1 GFLOP"
        return DISPATCH if flops >= CPU_FLOPS else LOCKSTEP, f"a stage computes {size} for a microbatch"
    if cluster.num_processes > 1:
        return LOCKSTEP, "transfers between GPUs of several processes have not been tested"
    stages = _stages(config, problem, cluster, layers, DISPATCH)
    table = stages.plan.details.table
    dispatched, lockstep = (stages._replace(executor=executor).seconds(table) for executor in (DISPATCH, LOCKSTEP))
    ratio = max(dispatched, lockstep) / min(dispatched, lockstep)
    return DISPATCH if dispatched <= lockstep else LOCKSTEP, f"the other one takes {ratio - 1:.0%} longer"
