"""Replaces config.strategy='auto' by the choice of the planner, before anything else reads the config.

Values that the user set for a key that the planner chooses are kept: only candidates that have them are compared.
"""

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import files, mesh, strategies
from jaxpar.analysis.planner import report, search
from jaxpar.analysis.planner.candidates import DEFAULTS_OF_CHOICES, OPTIONS, Candidate, Settings, Space, with_settings
from jaxpar.analysis.planner.spaces import cpu_space, gpu_space, load_problem
from jaxpar.cluster import Cluster
from jaxpar.errors import UserError, check_choice, format_bytes, format_count
from jaxpar.exchange.named import EXCHANGES, exchange_differs
from jaxpar.gpus import gpu_kinds, kind_of_device
from jaxpar.launch import processes
from jaxpar.pipeline.executor.programs import REMATS
from jaxpar.pipeline.tables.schedule import SCHEDULES
from jaxpar.run import build
from jaxpar.strategies import STRATEGIES
from jaxpar.target import Target

AUTO_STRATEGY = "auto"
CHOSEN_FOR_STAGES = ("pipeline.partition", "pipeline.replicas")  # keys that no candidate has from the config


def resolve_strategy(config: ConfigDict, workdir: Path, target: Target | None = None) -> ConfigDict:
    """Return the config with the settings that the planner chooses for strategy auto; other configs unchanged.

    Prints the choice and the reason. In a run of several processes, process 0 chooses for all of them. A run that
    resumes on the same devices keeps its choice, which its config.json has.

    Args:
      config: the config.
      workdir: directory of the run.
      target: the GPUs to choose for; None: the devices of this run.

    Raises:
      UserError: the strategy does not exist, or nothing can train this config on these devices; nothing was written.
    """
    check_choice("strategy", config.strategy, [*STRATEGIES, AUTO_STRATEGY])
    if config.strategy != AUTO_STRATEGY:
        return config
    cluster = target.cluster if target else clusters.find_cluster()
    mesh.check_sizes(config, cluster)
    check_kept(kept_settings(config), cluster.num_devices)
    planned_for = f"{cluster.num_devices} x {cluster.device_kind}, {format_count(cluster.num_processes, 'process')}"
    settings = settings_before(config, workdir, planned_for)
    if settings is None:
        with files.locked(workdir) if processes.is_first() else contextlib.nullcontext():
            settings = _choose(config, workdir, cluster, target)
    else:
        print("chosen    the same strategy as before, for the same devices", flush=True)
    if settings["strategy"] == "pipeline":
        mesh.partition_by_gspmd()
    resolved = with_settings(config, settings)
    resolved.planned_for = planned_for
    return resolved


def kept_settings(config: ConfigDict) -> Settings:
    """Return the keys among those of a candidate that a config sets to another value than the default."""
    changed = configs.changed_keys(config)
    options = [f"{OPTIONS}{name}" for name in config.exchange_options]
    keys = dict.fromkeys(("mesh.data", *DEFAULTS_OF_CHOICES, *options))
    return {key: changed[key] for key in keys if key in changed}


def check_kept(kept: Settings, num_devices: int) -> None:
    """Raise a UserError if no candidate can have one of the values that are kept, whatever the model costs."""
    with_auto = f"with config.strategy={AUTO_STRATEGY!r}"
    sizes = {key: kept[key] for key in ("mesh.data", "mesh.stage") if key in kept}
    if num_devices % math.prod(sizes.values()) or (len(sizes) == 2 and math.prod(sizes.values()) != num_devices):
        given = " and ".join(f"config.{key} is {size}" for key, size in sizes.items())
        what = "their product must be" if len(sizes) == 2 else "it must divide"
        raise UserError(f"{given}; {what} {num_devices}, the number of devices, {with_auto}")
    for key in CHOSEN_FOR_STAGES:
        if key in kept:
            raise UserError(f"config.{key} is {kept[key]!r}; it must be {DEFAULTS_OF_CHOICES[key]!r} {with_auto}")
    equal = [name for name in EXCHANGES if not exchange_differs(name, {}, num_devices)]
    choices = {"exchange": equal, "pipeline.schedule": SCHEDULES, "model.remat": REMATS, "pipeline.remat": REMATS}
    for key, names in choices.items():
        if key in kept and kept[key] not in names:
            raise UserError(
                f"config.{key} is {kept[key]!r}; it must be one of {', '.join(names)} {with_auto}, which compares what "
                "trains like one device"
            )


def settings_before(config: ConfigDict, workdir: Path, planned_for: str) -> Settings | None:
    """Return the settings of the run in the workdir, or None if they must be chosen.

    planned_for: the devices. The settings must have been chosen for these, and have the values that the config keeps.
    """
    saved = configs.read_saved(workdir) or {}
    kept = kept_settings(config)
    if saved.get("planned_for") != planned_for or any(saved[key] != value for key, value in kept.items()):
        return None
    return {key: saved[key] for key in ("strategy", "mesh.data", *DEFAULTS_OF_CHOICES)}


def _choose(config: ConfigDict, workdir: Path, cluster: Cluster, target: Target | None) -> Settings:
    """Return the settings that process 0 chooses, and print why."""
    hosts = processes.num_hosts()
    with build.unless_refused(workdir, "tokenizer.json"):
        loaded = load_problem(config, cluster, workdir)
        found: dict[str, Any] = {}
        if processes.is_first():  # an error must reach all processes, because they wait for the choice
            try:
                space = _space(config, loaded, cluster, target, hosts)
                best = choose(space, cluster)
                found = {"settings": dict(best.settings), "reason": describe_choice(best, space)}
            except UserError as error:
                found = {"error": str(error)}
        found = json.loads(processes.from_first(json.dumps(found)))
        if "error" in found:
            raise UserError(found["error"])
    print(f"chosen    {found['reason']}", flush=True)
    settings: Settings = found["settings"]
    return settings


def _space(config: ConfigDict, loaded: build.Loaded, cluster: Cluster, target: Target | None, hosts: int) -> Space:
    """Return the space of candidates. hosts: machines of this run."""
    kept = kept_settings(config)
    if target:
        return gpu_space(config, loaded.problem, cluster, target.usable_bytes, kept)
    if cluster.platform == "cpu":
        print("chosen    measuring layers and links, for about half a minute", flush=True)
        return cpu_space(config, loaded, cluster, kept)
    present = replace(with_rates(cluster), num_processes=hosts)
    assert cluster.memory_bytes is not None
    return gpu_space(config, loaded.problem, present, cluster.memory_bytes, kept)


def with_rates(cluster: Cluster) -> Cluster:
    """Return the present GPUs with the rates of their kind. Raises UserError if it is unknown."""
    if kind_of_device(cluster.device_kind) is None:
        known = ", ".join(gpu.device_kind for gpu in gpu_kinds().values())
        raise UserError(
            f"config.strategy is {AUTO_STRATEGY!r} on {cluster.device_kind}, whose rates are unknown; it must be "
            f"one of {', '.join(STRATEGIES)} (the rates are known of {known})"
        )
    return clusters.with_rates_of_kind(cluster)


def choose(space: Space, cluster: Cluster) -> Candidate:
    """Return the fastest candidate that fits and has a plan for the cluster. Raises UserError if there is none."""
    found = search.candidates(space)
    if not found:
        raise no_candidate(space)
    reasons = []
    for one in found:
        if one.fits:
            plan = strategies.possible(with_settings(space.config, one.settings), space.problem, cluster)
            if not isinstance(plan, str):
                return one
            reasons.append(plan)
    if reasons:
        raise UserError(reasons[0])
    least = found[0]
    name, missing = least.name + report.details(least.settings), least.costs.nbytes - space.usable_bytes
    raise UserError(
        f"config.strategy is {AUTO_STRATEGY!r}, but nothing fits: {name} needs "
        f"{format_bytes(least.costs.nbytes)} of a device, {format_bytes(missing)} more than there is; it must fit in "
        f"{format_bytes(space.usable_bytes)}; try more devices, a lower config.batch_size or a smaller config.model. "
        f"{report.advise_memory(space)}"
    )


def no_candidate(space: Space) -> UserError:
    """Return the error for a space without candidates."""
    devices, size = format_count(space.num_devices, "device"), space.config.batch_size
    conflict = search.conflict(space)
    if conflict:
        kept = " and ".join(f"config.{key} is {value!r}" for key, value in conflict.items())
        subject = "together they" if len(conflict) > 1 else "it"
        return UserError(
            f"{kept}; {subject} must allow a strategy on {devices} that trains like one device and divides "
            f"config.batch_size={size} into replicas x microbatches"
        )
    if space.num_devices == 1:
        single = with_settings(space.config, {"strategy": "single", "mesh.data": 1})
        reason = strategies.possible(single, space.problem, space.machine.cluster)
        if isinstance(reason, str):  # its state alone needs more memory than the device has
            return UserError(reason)
    return UserError(f"config.batch_size is {size}; on {devices} it must be a multiple of replicas x microbatches")


def describe_choice(best: Candidate, space: Space) -> str:
    """Return a sentence: the candidate, and where its time goes."""
    details = report.details(best.settings).removeprefix(", ")
    return report.explain(best, best, report.work_of(space)) + (f" Options: {details}." if details else "")
