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

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxpar.choose.candidates import Settings, with_values
from jaxpar.choose.costs.layers import Layers, ProfiledLayers, TracedLayers
from jaxpar.choose.costs.machine import with_assumed_rates
from jaxpar.choose.costs.profile import LayerProfile, read_profile
from jaxpar.choose.partition import UNKNOWN_LAYERS, StageChoice, choose_partition, divisions, replicas_text
from jaxpar.choose.schedule import (
    SHARED_CORES,
    UNTIL_CHOSEN,
    check_chunks,
    choose_executor,
    choose_schedule,
    shares_cores,
)
from jaxpar.cluster import Cluster
from jaxpar.core.step import Problem
from jaxpar.models.model import Model
from jaxpar.strategies.pipeline.executor.partition import AUTO
from jaxpar.strategies.pipeline.schedules import LOCKSTEP

AUTO_KEYS = ("pipeline.partition", "pipeline.schedule", "pipeline.executor")


def open_keys(config: ConfigDict) -> list[str]:
    """Return the keys of config.pipeline that must be chosen."""
    own = {key: config.pipeline[key.removeprefix("pipeline.")] for key in AUTO_KEYS}
    return [key for key in AUTO_KEYS if own[key] == AUTO] if config.strategy == "pipeline" else []


def until_chosen(config: ConfigDict, cluster: Cluster, model: Model | None = None) -> ConfigDict:
    """Return a config with values that stand for `auto`, with which the run can be checked before its data is read.

    Raises:
      UserError: no division of the layers is possible, whatever their times are.
    """
    keys, stand_in = open_keys(config), dict[str, Any]()
    check_chunks(config)
    if "pipeline.partition" in keys:
        first = next(divisions(config, cluster, len(model.layers) if model else UNKNOWN_LAYERS, ()))
        stand_in |= {"pipeline.partition": "uniform", "pipeline.replicas": replicas_text(first.replicas)}
    stand_in |= {"pipeline.schedule": UNTIL_CHOSEN} if "pipeline.schedule" in keys else {}
    stand_in |= {"pipeline.executor": LOCKSTEP} if "pipeline.executor" in keys else {}
    return with_values(config, stand_in)


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
        choice = choose_partition(config, problem, cluster, profile)
        config = with_values(config, choice.settings)
    layers = layers_of(problem, cluster, profile)
    if "pipeline.schedule" in keys:
        schedule, reason = choose_schedule(config, problem, cluster, folder, layers)
        config = with_values(config, {"pipeline.schedule": schedule})
        choice = _with(choice, {"pipeline.schedule": schedule}, f"schedule {schedule}: {reason}")
    if "pipeline.executor" in keys:
        executor, reason = choose_executor(config, problem, cluster, layers)
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


def settled_stages(config: ConfigDict, cluster: Cluster) -> StageChoice | None:
    """Return the choice if it does not depend on the problem; None otherwise."""
    if open_keys(config) != ["pipeline.schedule"] or not shares_cores(config, cluster):
        return None
    check_chunks(config)
    return StageChoice({"pipeline.schedule": UNTIL_CHOSEN}, (f"schedule {UNTIL_CHOSEN}: {SHARED_CORES}",))
