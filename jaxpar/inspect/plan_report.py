"""Plans for a config on a cluster: what to search, what the best candidates need when compiled, and the report."""

import datetime
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from jaxpar import cluster as clusters
from jaxpar import data, strategies
from jaxpar.choose import planner, report
from jaxpar.choose.auto import check_kept, kept_settings
from jaxpar.choose.candidates import (
    AsyncCandidate,
    Candidate,
    Settings,
    Space,
    cpu_space,
    gpu_space,
    load_problem,
    plan_of,
    ranked,
    with_settings,
)
from jaxpar.choose.costs.measured_rates import describe_rates, measured_cluster
from jaxpar.choose.costs.rates import dtype_advice
from jaxpar.choose.planner import AUTO_STRATEGY
from jaxpar.cluster import Cluster
from jaxpar.cluster.files import cluster_toml, find_named
from jaxpar.cluster.gpus import kind_of_device, name_of_kind
from jaxpar.cluster.target import HERE, Target, memory_fraction
from jaxpar.command_line import check_new_file, writing
from jaxpar.core import mesh
from jaxpar.core.plan import PREVIOUS
from jaxpar.core.step import Problem
from jaxpar.errors import UserError, check_choice, format_bytes, is_refused
from jaxpar.files import write_text
from jaxpar.inspect import audit, step_time
from jaxpar.run import build
from jaxpar.strategies import STRATEGIES

_SHOWN = 10  # rows of the table
NOT_RANKED = "These change the results if gradients are stale or messages are in int8, and are not ranked:"
WAITING_LAST = (
    "Pipelines in which devices wait are last, whatever their times: these devices share cores, so waiting helps none "
    "of them, and such times are predicted worst."
)


def cluster_of(text: str) -> Cluster:
    """Return the cluster that --cluster names."""
    if text.startswith(f"{HERE}:"):
        raise UserError(f"--cluster is {text!r}; it must be {HERE}, without a number of devices")
    return find_named(text, "--cluster", others=(HERE,))[1]


def make_space(config: ConfigDict, cluster: Cluster, target: Target | None = None, *, on_all: bool = True) -> Space:
    """Return what to search on GPUs, whose memory is that of the target, or else of the data sheet.

    on_all: whether all of these GPUs must be used.
    """
    loaded, settings = _load(config, cluster)
    if on_all:
        check_kept(settings, cluster.num_devices)
    assert cluster.memory_bytes is not None
    usable = target.usable_bytes if target else memory_fraction() * cluster.memory_bytes
    return gpu_space(config, loaded.problem, cluster, usable, settings)


def measured_space(config: ConfigDict, save: Path | None = None) -> Space:
    """Return what to search on the devices of this machine, after measuring them. save: cluster file to write."""
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    cluster = clusters.find_cluster()
    gpu = name_of_kind(cluster.device_kind)
    if save:
        check_new_file("--save_cluster", save, [".toml"])
        if gpu is None:
            raise UserError(
                f"--save_cluster is {str(save)!r} on {cluster.device_kind}; it must be unset, because a cluster file "
                "has a kind of GPU that jaxpar knows"
            )
    loaded, settings = _load(config, cluster)
    check_kept(settings, cluster.num_devices)
    if cluster.platform == "cpu":
        return cpu_space(config, loaded, cluster, settings)
    measured = measured_cluster(clusters.with_rates_of_kind(cluster), jax.local_devices())
    print(f"measured  {describe_rates(measured)}", file=sys.stderr, flush=True)
    if save and gpu:
        when = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
        source = f"measured on {cluster.num_devices} x {cluster.device_kind} on {when}, JAX {jax.__version__}"
        with writing("--save_cluster", save):
            write_text(save, cluster_toml(measured, gpu, source))
    assert cluster.memory_bytes is not None
    return gpu_space(config, loaded.problem, measured, cluster.memory_bytes, settings)


def _load(config: ConfigDict, cluster: Cluster) -> tuple[build.Parts, Settings]:
    """Return data and model of a config, and the settings that a run with strategy auto keeps in all candidates."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_problem(config, cluster, Path(folder))
    return loaded, kept_settings(config) if config.strategy == AUTO_STRATEGY else {}


def plan(config: ConfigDict, cluster: str) -> list[Candidate]:
    """Return all ways to train a config on a cluster, as `jaxpar plan` ranks them: the best first.

    Args:
      config: the config, such as that of `load_config`; it is not changed.
      cluster: `h100:8`, `h100:4x8` for 4 hosts, the path of a cluster file, or `here` for the devices of this machine,
        which are measured.

    Raises:
      UserError: the config or the cluster has a mistake, or no strategy is possible.
    """
    config = config.copy_and_resolve_references()
    check_strategy_name(config)
    space = measured_space(config) if cluster == HERE else make_space(config, cluster_of(cluster))
    return planner.find_candidates(space)


def check_strategy_name(config: ConfigDict) -> None:
    """Raise UserError unless the strategy of a config exists, or the planner chooses it."""
    check_choice("strategy", config.strategy, [*STRATEGIES, AUTO_STRATEGY])


def describe_plans(
    space: Space,
    found: Sequence[Candidate],
    work: report.StepWork,
    own: Candidate | AsyncCandidate | str | None,
    others: Sequence[AsyncCandidate | str],
    seconds: float,
) -> str:
    """Return the table of the best candidates, and why they are, and that of the strategies that are not ranked.

    own: the user's own config, or the reason why its time is not predicted; None if the planner chooses.
    """
    cluster, best = space.machine.cluster, found[0]
    each = report.best_of_each([one for one in found if one.fits])
    hosts = f" on {cluster.num_processes} hosts" if cluster.num_processes > 1 else ""
    kind = kind_of_device(cluster.device_kind)
    name = cluster.device_kind
    if kind is not None and cluster.memory_bytes not in (None, kind.memory_bytes):
        name = f"{name_of_kind(name)} with {format_bytes(cluster.memory_bytes or 0)}"  # the full name states the memory
    advice = dtype_advice(cluster, space.config.model.dtype) if cluster.platform == "gpu" else None
    lines = [
        f"{cluster.num_devices} x {name}{hosts}: {len(found):,} candidates in {seconds:.1f} s, "
        f"of which {sum(one.fits for one in found):,} fit; {work.examples:,} examples in a step",
        report.describe_memory(space),
        *([advice] if advice else []),
        "",
        *report.rows(each[:_SHOWN], work),
    ]
    if any(one.waits for one in each):
        lines.append(WAITING_LAST)
    if cluster.price_per_hour is not None:
        rent = cluster.num_devices * cluster.price_per_hour
        of_million = rent / 3600 * best.costs.seconds / work.examples * 1e6
        lines += [
            "",
            f"The cluster costs {rent:.4g} an hour; with the first one, a million examples cost {of_million:.3g}.",
        ]
    if space.config.elastic_seconds:
        lines += ["", _describe_previous(space, best)]
    size, n = space.config.batch_size, space.num_devices
    if size % n and all(one.settings["strategy"] == "pipeline" for one in found):
        multiple = f"config.batch_size is {size}, which is not a multiple of {n}"
        lines += ["", f"No strategy without stages is possible: {multiple}."]
    lines += ["", *(report.explain(one, best, work) for one in each[:3])]
    possible = [one for one in others if not isinstance(one, str)]
    if isinstance(own, AsyncCandidate):
        lines.append("Your config is in the last row of the second table.")
        possible.append(own._replace(name=f"your config: {own.name}"))
    elif own is not None:
        lines.append("Your config: " + (own if isinstance(own, str) else report.explain_own(own, best, work, each)))
    lines += [
        "",
        "The first one:",
        *(f"  --config.{key}={value}" for key, value in report.changes(best.settings).items()),
        "",
        NOT_RANKED,
        *(["", *report.unranked_rows(possible, work)] if possible else []),
        "",
        *dict.fromkeys(f"Not possible: {reason}" for reason in others if isinstance(reason, str)),
    ]
    return "\n".join(lines).rstrip()


def _describe_previous(space: Space, best: Candidate) -> str:
    """Return a sentence about the state before a step, which elastic runs of several processes keep."""
    plan = plan_of(space, best.settings)
    assert not isinstance(plan, str), plan
    kept = plan.memory[0].get(PREVIOUS)
    if kept is None:
        return (
            "config.elastic_seconds: with a process for each host, as planned here, there is no other process. With "
            f"several, each device also keeps the state before a step, {format_bytes(plan.device_bytes[0])}."
        )
    return f"config.elastic_seconds: {format_bytes(kept)} of the memory are for the state before a step."


class Verified(NamedTuple):
    """A candidate that was compiled."""

    predicted: Candidate
    corrected: Candidate  # with the memory that the compiler states
    seconds: float | None  # the time of a step, predicted from the compiled program; None if it is not

    def __str__(self) -> str:
        before, after = (one.costs for one in self[:2])
        of_program = "not predicted from programs" if self.seconds is None else report.format_seconds(self.seconds)
        return (
            f"compiled: {self.predicted.name}: needs {format_bytes(after.nbytes)} (predicted "
            f"{format_bytes(before.nbytes)}), {'fits' if self.corrected.fits else 'does not fit'}; "
            f"{of_program} (predicted {report.format_seconds(before.seconds)})"
        )


def check_lowers(problem: Problem) -> None:
    """Raise UserError if the forward pass needs a library that is not installed, before a search of half a minute."""
    traced = jax.jit(problem.model.apply).trace(problem.model.shapes, dict(problem.batch))
    traced.lower(lowering_platforms=("cuda",))


def verified(
    found: Sequence[Candidate], number: int, space: Space, target: Target
) -> tuple[list[Candidate], list[Verified]]:
    """Compile the first candidates, of different names, for the target, and the one that is then the first.

    Returns all candidates in their corrected order, and those that were compiled. The order of those that were compiled
    and fit is that of the times of their programs.
    """
    compiled: list[Verified] = []
    waiting = report.best_of_each(found)[:number]
    while waiting:
        total = len(compiled) + len(waiting)
        for one in waiting:
            text = f"{len(compiled) + 1} of {total}: {one.name}{report.details(one.settings)}"
            print(f"compiling {text}", file=sys.stderr, flush=True)
            compiled.append(_compiled(one, space, target))
        corrected = {id(one.predicted): one.corrected for one in compiled}
        found = ranked(corrected.get(id(one), one) for one in found)
        is_compiled = any(found[0] is one.corrected for one in compiled)
        waiting = [] if is_compiled or not found[0].fits else found[:1]
    return by_programs(found, compiled), compiled


def by_programs(found: Sequence[Candidate], compiled: Sequence[Verified]) -> list[Candidate]:
    """Return the candidates with those whose programs were timed, and that fit, in the order of these times."""
    seconds = {id(one.corrected): one.seconds for one in compiled if one.seconds is not None and one.corrected.fits}
    places = [place for place, one in enumerate(found) if id(one) in seconds]
    timed = sorted((found[place] for place in places), key=lambda one: seconds[id(one)])
    ordered = list(found)
    for place, one in zip(places, timed, strict=True):
        ordered[place] = one
    return ordered


def _compiled(one: Candidate, space: Space, target: Target) -> Verified:
    config = with_settings(space.config, one.settings)
    with tempfile.TemporaryDirectory() as folder:
        cluster, decision = build.check_run(config, Path(folder), target.cluster)
        problem = build.load_parts(config, Path(folder), cluster).problem
    plan = strategies.plan(config, problem, cluster, decision)
    strategy = strategies.build(plan, problem, target.devices)
    programs = strategy.compile()
    needed = float(sum(audit.needed_bytes(programs, strategy).values()))
    corrected = one._replace(costs=one.costs._replace(nbytes=needed), fits=needed <= space.usable_bytes)
    predicts = not is_refused(step_time.check_step, config)
    seconds = step_time.predict(programs, cluster, plan.offloaded_bytes).seconds if predicts else None
    return Verified(one, corrected, seconds)
