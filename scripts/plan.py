r"""Finds the fastest way to train a config on a cluster, which need not exist.

    scripts/python scripts/plan.py --config=configs/quickstart.py --cluster=h100:8 [--verify=3] [--out=best.py]
        [--json] [--save_cluster=FILE.toml] [--config.KEY=VALUE ...]

Predicts the time and the memory of a step for every strategy that trains like one device, on every mesh, with every
number of microbatches, schedule and rematerialization, for batches of config.batch_size examples. Compiles nothing,
unless --verify asks for it. The columns of the table:

  step      predicted time of a step
  MFU       FLOPs of the model / what the devices could compute in this time
  waits     share of the step in which the busiest device waits for other stages
  sends     share of the step in which it only communicates
  memory    what the fullest device needs

A second table has the predicted rates of workers and peers that do not wait for each other, which are not ranked:
staleness is the number of updates that are missing in the weights from which a gradient is computed, and `sends` are
the bytes that the busiest device sends in a step.

The cluster is written as in --target of scripts/audit.py, such as h100:4x8 for 4 hosts of 8 H100s, or is a file
(configs/clusters). `here` are the devices of this machine, which are measured first: on GPUs, the rates of matrix
products, of the memory and of links, and the time between kernels, which --save_cluster writes as a cluster file; on
CPUs, layers and links.
"""

import datetime
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import data, mesh, models, strategies
from jaxpar.analysis import audit, step_time
from jaxpar.choose import planner, report
from jaxpar.choose.auto import check_kept, kept_settings
from jaxpar.choose.candidates import (
    Candidate,
    Settings,
    Space,
    UnrankedCandidate,
    cpu_space,
    gpu_space,
    load_problem,
    ranked,
    state_ratios,
    with_settings,
)
from jaxpar.choose.costs.measured_rates import describe_rates, measured_cluster
from jaxpar.choose.planner import AUTO_STRATEGY, no_candidate
from jaxpar.choose.unranked import predicted, unranked
from jaxpar.cluster import Cluster
from jaxpar.cluster_file import cluster_toml, find_named
from jaxpar.command_line import Parser, integer, output_path
from jaxpar.errors import UserError, check_choice, exit_code, format_bytes, is_refused
from jaxpar.files import unwritable, write_text
from jaxpar.gpus import kind_of_device, name_of_kind
from jaxpar.run import build
from jaxpar.run.unused import EFFECTS, check_unused_keys
from jaxpar.step import Problem
from jaxpar.strategies import STRATEGIES
from jaxpar.target import HERE, Target, find_target, memory_fraction

SHOWN = 10  # rows of the table
NOT_RANKED = "These change the results if gradients are stale or messages are in int8, and are not ranked:"


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    parser.require("--config", "--config=configs/quickstart.py", help="config file as PATH[:PRESET]")
    parser.require("--cluster", "--cluster=h100:8", metavar="FILE|NAME:HOSTSxDEVICES|here", help="the cluster")
    add = parser.add_argument
    add("--verify", type=integer(1), default=0, metavar="N", help="compile the first N, and correct their memory")
    add("--out", type=output_path, metavar="FILE.py", help="write the first one as a config file")
    add(
        "--save_cluster",
        type=output_path,
        metavar="FILE.toml",
        help="write the GPUs of --cluster=here as a cluster file",
    )
    add("--json", action="store_true", help="print all candidates as JSON")
    arguments, overrides = parser.parse_with_overrides()
    begin = time.monotonic()
    gc.set_threshold(100_000, 20, 100)  # traced programs stay alive, and frequent collections took a sixth of the time
    if arguments.cluster == HERE and arguments.verify:
        raise UserError(f"--verify is {arguments.verify}; it must be unset with --cluster={HERE}")
    target = find_target(arguments.cluster, "--cluster") if arguments.verify else None
    config = configs.load_config(arguments.config)
    check_unused_keys(config, configs.override(config, overrides), EFFECTS)  # sections: of several strategies
    if arguments.out:
        check_path("--out", arguments.out, ".py", arguments.config)
    check_choice("strategy", config.strategy, [*STRATEGIES, AUTO_STRATEGY])
    if arguments.cluster == HERE:
        space = measured_space(config, arguments.save_cluster)
    elif arguments.save_cluster:
        raise UserError(f"--save_cluster is {str(arguments.save_cluster)!r}; it must be unset without --cluster={HERE}")
    else:
        space = make_space(config, cluster_of(arguments.cluster), target)
    if not arguments.json:
        print(models.describe_model(config, space.problem.model, space.problem.batch), flush=True)
    found = planner.candidates(space)
    if not found:
        raise no_candidate(space)
    compiled = verified(found, arguments.verify, space, target) if target else []
    corrected = {id(one.predicted): one.corrected for one in compiled}
    found = ranked(corrected.get(id(one), one) for one in found)
    work = report.work_of(space)
    ratios = state_ratios(space.problem)
    others = unranked(space, ratios)
    if arguments.json:
        listed = [report.as_json(one, work) for one in found]
        listed += [report.unranked_json(one, work) for one in others if not isinstance(one, str)]
        print(json.dumps(listed, indent=1))
    elif found[0].fits:
        own = None if config.strategy == AUTO_STRATEGY else predicted(space, config, ratios)
        print(describe(space, found, work, own, others, time.monotonic() - begin))
        print(*map(str, compiled), sep="\n", end="\n" if compiled else "")
    best = found[0]
    if not best.fits:
        raise UserError(
            f"--cluster is {arguments.cluster!r}, but nothing fits on it; it must have more devices or memory: "
            f"{best.name} needs {format_bytes(best.costs.nbytes)} on each. {report.advise_memory(space)}"
        )
    if arguments.out:
        write("--out", arguments.out, report.config_file(arguments.config, overrides, best, arguments.cluster))


def cluster_of(text: str) -> Cluster:
    """Return the cluster that --cluster names."""
    if text.startswith(f"{HERE}:"):
        raise UserError(f"--cluster is {text!r}; it must be {HERE}, without a number of devices")
    return find_named(text, "--cluster", others=(HERE,))[1]


def check_path(flag: str, path: Path, suffix: str, config: str = "") -> None:
    """Raise a UserError if a file cannot have the path that a flag names, or would replace the config that it loads."""
    if path.suffix != suffix or path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"{flag} is {str(path)!r}; it must be the path of a {suffix} file in a folder that exists")
    if config and path.resolve() == Path(config.partition(":")[0]).resolve():
        raise UserError(f"{flag} is {str(path)!r}; it must be another file than that of --config, which it loads")


def write(flag: str, path: Path, text: str) -> None:
    """Write the file that a flag names. Raises UserError if this is not possible."""
    try:
        write_text(path, text)
    except OSError as error:
        raise UserError(f"{flag} is {str(path)!r}; it must be {unwritable(path, error)}") from None


def make_space(config: ConfigDict, cluster: Cluster, target: Target | None = None) -> Space:
    """Return what to search on GPUs: the problem of a config, and the costs of its layers.

    target: the GPUs that are compiled for. Without one, the memory is that of the data sheet.
    """
    problem = load(config, cluster).problem
    assert cluster.memory_bytes is not None
    usable = target.usable_bytes if target else memory_fraction() * cluster.memory_bytes
    return gpu_space(config, problem, cluster, usable, kept(config, cluster))


def measured_space(config: ConfigDict, save: Path | None) -> Space:
    """Return what to search on the devices of this machine, after measuring them. save: cluster file to write."""
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    cluster = clusters.find_cluster()
    gpu = name_of_kind(cluster.device_kind)
    if save:
        check_path("--save_cluster", save, ".toml")
        if gpu is None:
            raise UserError(
                f"--save_cluster is {str(save)!r} on {cluster.device_kind}; it must be unset, because a cluster file "
                "has a kind of GPU that jaxpar knows"
            )
    loaded, settings = load(config, cluster), kept(config, cluster)
    if cluster.platform == "cpu":
        return cpu_space(config, loaded, cluster, settings)
    measured = measured_cluster(clusters.with_rates_of_kind(cluster), jax.local_devices())
    print(f"measured  {describe_rates(measured)}", file=sys.stderr, flush=True)
    if save and gpu:
        when = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
        source = f"measured on {cluster.num_devices} x {cluster.device_kind} on {when}, JAX {jax.__version__}"
        write("--save_cluster", save, cluster_toml(measured, gpu, source))
    assert cluster.memory_bytes is not None
    return gpu_space(config, loaded.problem, measured, cluster.memory_bytes, settings)


def load(config: ConfigDict, cluster: Cluster) -> build.Loaded:
    """Read the data and build the model of a config, whatever its strategy. Raises UserError for its mistakes."""
    with tempfile.TemporaryDirectory() as folder:
        return load_problem(config, cluster, Path(folder))


def kept(config: ConfigDict, cluster: Cluster) -> Settings:
    """Return the settings that all candidates must have: those that a run with strategy auto keeps."""
    settings = kept_settings(config) if config.strategy == AUTO_STRATEGY else {}
    check_kept(settings, cluster.num_devices)
    return settings


def describe(
    space: Space,
    found: Sequence[Candidate],
    work: report.StepWork,
    own: Candidate | UnrankedCandidate | str | None,
    others: Sequence[UnrankedCandidate | str],
    seconds: float,
) -> str:
    """Return the table of the best candidates, and why they are, and that of the strategies that are not ranked.

    own: the user's own config, or the reason why its time is not predicted; None if the planner chooses.
    """
    cluster, best = space.machine.cluster, found[0]
    each = report.best_of_each([one for one in found if one.fits])
    hosts = f" on {cluster.num_processes} hosts" if cluster.num_processes > 1 else ""
    kind = kind_of_device(cluster.device_kind)
    other_memory = kind is not None and cluster.memory_bytes not in (None, kind.memory_bytes)
    memory = f" with {format_bytes(cluster.memory_bytes or 0)}" if other_memory else ""
    lines = [
        f"{cluster.num_devices} x {cluster.device_kind}{memory}{hosts}: {len(found):,} candidates in {seconds:.1f} s, "
        f"of which {sum(one.fits for one in found):,} fit; {work.examples:,} examples in a step",
        report.describe_memory(space),
        "",
        *report.rows(each[:SHOWN], work),
        "",
        *undivided(space),
        *(report.explain(one, best, work) for one in each[:3]),
    ]
    possible = [one for one in others if not isinstance(one, str)]
    if isinstance(own, UnrankedCandidate):
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


def undivided(space: Space) -> list[str]:
    """Return the line that explains why no candidate is without stages, if there is none."""
    size, n = space.config.batch_size, space.num_devices
    if size % n == 0:
        return []
    return [f"No strategy without stages is possible: config.batch_size is {size}, which is not a multiple of {n}.", ""]


class Verified(NamedTuple):
    """A candidate that was compiled.

    Attributes:
      predicted: the candidate as it was predicted.
      corrected: the candidate with the memory that the compiler states.
      seconds: the time of a step, predicted from the compiled program; None if it is not.
    """

    predicted: Candidate
    corrected: Candidate
    seconds: float | None

    def __str__(self) -> str:
        before, after = (one.costs for one in self[:2])
        of_program = "not predicted from programs" if self.seconds is None else f"{self.seconds * 1e3:.3g} ms"
        return (
            f"compiled: {self.predicted.name}: needs {format_bytes(after.nbytes)} (predicted "
            f"{format_bytes(before.nbytes)}), {'fits' if self.corrected.fits else 'does not fit'}; "
            f"{of_program} (predicted {before.seconds * 1e3:.3g} ms)"
        )


def verified(found: Sequence[Candidate], number: int, space: Space, target: Target) -> list[Verified]:
    """Compile the first candidates, of different names, for the target."""
    compiled = []
    for index, one in enumerate(report.best_of_each(found)[:number], 1):
        print(f"compiling {index} of {number}: {one.name}{report.details(one.settings)}", file=sys.stderr, flush=True)
        config = with_settings(space.config, one.settings)
        with tempfile.TemporaryDirectory() as folder:
            cluster, decision = build.check_run(config, Path(folder), target.cluster)
            problem: Problem = build.load_parts(config, Path(folder), cluster).problem
        plan: Any = strategies.plan(config, problem, cluster, decision)
        strategy = strategies.build(plan, problem, target.devices)
        programs = strategy.compile()
        needed = float(sum(audit.needed_bytes(programs, strategy).values()))
        corrected = one._replace(costs=one.costs._replace(nbytes=needed), fits=needed <= space.usable_bytes)
        predicts = not is_refused(step_time.check_step, config)
        compiled.append(Verified(one, corrected, step_time.predict(programs, cluster).seconds if predicts else None))
    return compiled


if __name__ == "__main__":
    sys.exit(exit_code(main))
