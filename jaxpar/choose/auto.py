"""Replaces every `auto` of a config by what is chosen, before a run is planned.

With config.strategy=auto, the planner chooses. In a pipeline, the partition, the schedule and the executor can be
`auto`. Values that the user set for a key that is chosen are kept: only candidates that have them are compared. The
result is a config that a person could have written, with the reason in config.chosen.
"""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import data, files
from jaxpar.choose import report
from jaxpar.choose.candidates import (
    DEFAULTS_OF_CHOICES,
    OPTIONS,
    Settings,
    cpu_space,
    gpu_space,
    load_problem,
    with_settings,
    with_values,
)
from jaxpar.choose.costs.layer_programs import LayerPrograms
from jaxpar.choose.costs.profile import LayerProfile, read_profile, write_profile
from jaxpar.choose.partition import check_unset
from jaxpar.choose.planner import AUTO_STRATEGY, fastest
from jaxpar.choose.stages import choose_stages, open_keys, settled_stages, until_chosen
from jaxpar.cluster import Cluster
from jaxpar.cluster.gpus import gpu_kinds, kind_of_device
from jaxpar.cluster.target import Target
from jaxpar.core import mesh
from jaxpar.errors import UserError, check_choice, format_count
from jaxpar.exchange.named import EXCHANGES, exchange_differs
from jaxpar.launch import processes
from jaxpar.run import build
from jaxpar.strategies import STRATEGIES
from jaxpar.strategies.pipeline.executor.partition import AUTO
from jaxpar.strategies.pipeline.executor.stage_programs import REMATS
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES

CHOSEN_FOR_STAGES = ("pipeline.partition", "pipeline.replicas")  # keys that no candidate has from the config
REPEATS = 10  # measurements of each layer for a profile
PROFILE = "profile.json"


Chosen = tuple[ConfigDict, data.Dataset | None]  # a config without `auto`, and the data of the run if it had to be read


def choose(config: ConfigDict, workdir: Path, target: Target | None = None) -> Chosen:
    """Return the config with the settings that are chosen for each `auto`, and the data of the run if it was read.

    Prints each choice and the reason. In a run of several processes, process 0 chooses for all of them. A profile or a
    table is written to the workdir. Raises UserError, with nothing written, if a value does not exist or nothing can
    train this config on these devices.

    target: the GPUs to choose for; None: the devices of this run.
    """
    check_choice("strategy", config.strategy, [*STRATEGIES, AUTO_STRATEGY])
    check_unset(config)
    if config.strategy != AUTO_STRATEGY and not open_keys(config):
        return config, None
    cluster = target.cluster if target else clusters.find_cluster()
    if config.strategy == AUTO_STRATEGY:
        config = _with_strategy(config, workdir, cluster, target)
    return _with_stages(config, workdir, cluster) if open_keys(config) else (config, None)


def _by_first(found: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON values that a function returns in process 0. Its UserError is raised in all processes."""
    result: dict[str, Any] = {}
    if processes.is_first():  # an error must reach all processes, because they wait for the choice
        try:
            result = found()
        except UserError as error:
            result = {"error": str(error)}
    result = json.loads(processes.from_first(json.dumps(result)))
    if "error" in result:
        raise UserError(result["error"])
    return result


def _locked(workdir: Path) -> contextlib.AbstractContextManager[None]:
    return files.locked(workdir) if processes.is_first() else contextlib.nullcontext()


# ---- strategy -------------------------------------------------------------------------------------------------------


def _with_strategy(config: ConfigDict, workdir: Path, cluster: Cluster, target: Target | None) -> ConfigDict:
    """Return the config with the strategy that the planner chooses.

    A run that resumes on the same devices keeps its choice, which its config.json has.
    """
    mesh.check_sizes(config, cluster)
    check_kept(kept_settings(config), cluster.num_devices)
    planned_for = f"{cluster.num_devices} x {cluster.device_kind}, {format_count(cluster.num_processes, 'process')}"
    settings = _settings_before(config, workdir, planned_for)
    if settings is None:
        with _locked(workdir), build.unless_refused(workdir, "tokenizer.json"):
            loaded, hosts = load_problem(config, cluster, workdir), processes.num_hosts()
            settings = _by_first(lambda: _fastest_settings(config, loaded, cluster, target, hosts))
        print(f"chosen    {settings['chosen']}", flush=True)
    else:
        print("chosen    the same strategy as before, for the same devices", flush=True)
    return with_settings(config, {**settings, "planned_for": planned_for})


def _fastest_settings(
    config: ConfigDict, loaded: build.Parts, cluster: Cluster, target: Target | None, hosts: int
) -> dict[str, Any]:
    """Return the settings of the fastest candidate, and the reason as `chosen`. hosts: machines of this run."""
    kept = kept_settings(config)
    if target:
        space = gpu_space(config, loaded.problem, cluster, target.usable_bytes, kept)
    elif cluster.platform == "cpu":
        print("chosen    measuring layers and links, for about half a minute", flush=True)
        space = cpu_space(config, loaded, cluster, kept)
    else:
        present = replace(with_rates(cluster), num_processes=hosts)
        assert cluster.memory_bytes is not None
        space = gpu_space(config, loaded.problem, present, cluster.memory_bytes, kept)
    best = fastest(space, cluster)
    details = report.details(best.settings).removeprefix(", ")
    reason = report.explain(best, best, report.work_of(space)) + (f" Options: {details}." if details else "")
    return {**best.settings, "chosen": reason}


def kept_settings(config: ConfigDict) -> Settings:
    """Return the keys among those of a candidate that a config sets to another value than the default."""
    changed = configs.changed_keys(config)
    options = [f"{OPTIONS}{name}" for name in config.exchange_options]
    keys = dict.fromkeys(("mesh.data", *DEFAULTS_OF_CHOICES, *options))
    return {key: changed[key] for key in keys if key in changed}


def check_kept(kept: Settings, num_devices: int) -> None:
    """Raise a UserError if no candidate can have one of the values that are kept, whatever the model costs."""
    with_auto = f"with config.strategy={AUTO_STRATEGY!r}"
    sizes = {key: kept[key] for key in ("mesh.data", "mesh.stage", "mesh.tensor", "mesh.context") if key in kept}
    is_whole = "mesh.data" in kept and len(sizes) > 1  # the sizes of all axes that a candidate can have
    if num_devices % math.prod(sizes.values()) or (is_whole and math.prod(sizes.values()) != num_devices):
        given = " and ".join(f"config.{key} is {size}" for key, size in sizes.items())
        subject = "their product" if len(sizes) > 1 else "it"
        what = f"{subject} must be" if is_whole else f"{subject} must divide"
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


def _settings_before(config: ConfigDict, workdir: Path, planned_for: str) -> Settings | None:
    """Return the settings of the run in the workdir, if they were chosen for these devices and these kept values."""
    saved = {**DEFAULTS_OF_CHOICES, **(configs.read_saved(workdir) or {})}  # earlier versions lack some keys
    kept = kept_settings(config)
    if saved.get("planned_for") != planned_for or any(saved[key] != value for key, value in kept.items()):
        return None
    executor = ("pipeline.executor",) if config.pipeline.executor == AUTO else ()
    keys = ("strategy", "mesh.data", *DEFAULTS_OF_CHOICES, *executor)
    return {**{key: saved[key] for key in keys}, "chosen": saved.get("chosen", "")}


def with_rates(cluster: Cluster) -> Cluster:
    """Return the present GPUs with the rates of their kind. Raises UserError if it is unknown."""
    if kind_of_device(cluster.device_kind) is None:
        known = ", ".join(gpu.device_kind for gpu in gpu_kinds().values())
        raise UserError(
            f"config.strategy is {AUTO_STRATEGY!r} on {cluster.device_kind}, whose rates are unknown; it must be "
            f"one of {', '.join(STRATEGIES)} (the rates are known of {known})"
        )
    return clusters.with_rates_of_kind(cluster)


# ---- stages of a pipeline -------------------------------------------------------------------------------------------


def _with_stages(config: ConfigDict, workdir: Path, cluster: Cluster) -> Chosen:
    """Return the config with the partition, the schedule and the executor that are chosen.

    A run that resumes reads the profile that its first start measured, and so keeps its stages.
    """
    early = settled_stages(config, cluster)
    if early is not None:
        chosen = _with_choice(config, early.settings, early.reasons)
        build.check_run(chosen, workdir, cluster)  # a mistake ends the run before anything is printed
        print(f"chosen    {early.reasons[0]}", flush=True)
        return chosen, None
    stand_in = until_chosen(config, cluster, build.check_inputs(config, cluster))
    build.check_run(stand_in, workdir, cluster)
    with _locked(workdir), build.unless_refused(workdir, "tokenizer.json"), build.unless_refused(workdir, PROFILE):
        loaded = build.load_parts(stand_in, workdir, cluster)
        stand_in = until_chosen(config, cluster, loaded.problem.model)
        size = config.batch_size // build.check_run(stand_in, workdir, cluster).decision.batch_divisor
        found = _by_first(lambda: _stage_settings(config, workdir, loaded, cluster, size))
    for reason in found["reasons"]:
        print(f"chosen    {reason}", flush=True)
    if found["advice"]:
        print(f"advice    {found['advice']}", flush=True)
    return _with_choice(config, found["settings"], found["reasons"]), loaded.dataset


def _with_choice(config: ConfigDict, settings: Settings, reasons: Sequence[str]) -> ConfigDict:
    return with_values(config, {**settings, "chosen": "; ".join(filter(None, [config.chosen, *reasons]))})


def _stage_settings(
    config: ConfigDict, workdir: Path, loaded: build.Parts, cluster: Cluster, size: int
) -> dict[str, Any]:
    """Return the settings, the reasons and the advice. size: examples of a microbatch."""
    measured, profile = {}, list[LayerProfile]()
    if config.pipeline.partition == AUTO:
        path = Path(config.pipeline.profile or workdir / PROFILE)
        if not config.pipeline.profile:
            measured = {"pipeline.profile": str(path)}
            if not (path.exists() and build.contains_run(workdir)):
                write_profile(measure_layers(config, loaded, size, REPEATS), path)
        profile = read_profile(path, "config.pipeline.profile")
    choice = choose_stages(with_values(config, measured), loaded.problem, cluster, workdir, profile)
    return {**choice._asdict(), "settings": {**choice.settings, **measured}}


def measure_layers(config: ConfigDict, loaded: build.Parts, size: int, repeats: int) -> list[LayerProfile]:
    """Return the profile of the layers on the first device, for a microbatch of `size` examples of full length."""
    microbatch = {name: x[:size] for name, x in loaded.batches.longest().items()}
    programs = LayerPrograms(loaded.problem, microbatch, remat=config.pipeline.remat)
    return programs.measure(microbatch, repeats=repeats)
