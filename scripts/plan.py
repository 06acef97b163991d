r"""Finds the fastest way to train a config on a cluster, which need not exist.

    scripts/python scripts/plan.py --config=configs/quickstart.py --cluster=h100:8 [--verify=3] [--out=best.py]
        [--json] [--config.KEY=VALUE ...]

Predicts the time and the memory of a step for every strategy that trains like one device, on every mesh, with every
number of microbatches, schedule and rematerialization, for batches of config.batch_size examples. Compiles nothing,
unless --verify asks for it. The columns of the table:

  step      predicted time of a step
  MFU       FLOPs of the model / what the devices could compute in this time
  waits     share of the step in which the busiest device waits for other stages
  sends     share of the step in which it only communicates
  memory    what the fullest device needs

The cluster is written as in --target of scripts/audit.py, such as h100:4x8 for 4 hosts of 8 H100s, or is a file
(configs/clusters). `here` are the CPU devices of this machine, whose layers and links are measured first.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import data, mesh, strategies
from jaxpar.analysis import audit, step_time
from jaxpar.analysis.planner import report, search
from jaxpar.analysis.planner.auto import AUTO_STRATEGY, check_kept, kept_settings, no_candidate
from jaxpar.analysis.planner.search import Candidate, Settings, Space, with_settings
from jaxpar.analysis.planner.spaces import cpu_space, gpu_space, load_problem
from jaxpar.cluster import Cluster
from jaxpar.cluster_file import find_named
from jaxpar.command_line import Parser, integer
from jaxpar.errors import UserError, check_choice, exit_code, format_bytes
from jaxpar.files import unwritable, write_text
from jaxpar.run import build
from jaxpar.step import Problem
from jaxpar.strategies import STRATEGIES
from jaxpar.target import Target, find_target, memory_fraction

SHOWN = 10  # rows of the table
HERE = "here"


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    parser.require("--config", "--config=configs/quickstart.py", help="config file as PATH[:PRESET]")
    parser.require("--cluster", "--cluster=h100:8", metavar="FILE|NAME:HOSTSxDEVICES|here", help="the cluster")
    add = parser.add_argument
    add("--verify", type=integer(1), default=0, metavar="N", help="compile the first N, and correct their memory")
    add("--out", type=Path, metavar="FILE.py", help="write the first one as a config file")
    add("--json", action="store_true", help="print all candidates as JSON")
    arguments, overrides = parser.parse_with_overrides()
    begin = time.monotonic()
    if arguments.cluster == HERE and arguments.verify:
        raise UserError(f"--verify is {arguments.verify}; it must be unset with --cluster={HERE}")
    target = find_target(arguments.cluster, "--cluster") if arguments.verify else None
    config = configs.load_config(arguments.config)
    configs.override(config, overrides)
    if arguments.out:
        check_out(arguments.out, arguments.config)
    check_choice("strategy", config.strategy, [*STRATEGIES, AUTO_STRATEGY])
    is_here = arguments.cluster == HERE
    space = measured_space(config) if is_here else make_space(config, cluster_of(arguments.cluster))
    found = search.candidates(space)
    if not found:
        raise no_candidate(space)
    compiled = verified(found, arguments.verify, space, target) if target else []
    corrected = {id(one.predicted): one.corrected for one in compiled}
    found = search.ranked(corrected.get(id(one), one) for one in found)
    work = report.work_of(space)
    if arguments.json:
        print(json.dumps([report.as_json(one, work) for one in found], indent=1))
    else:
        print(describe(space, found, work, time.monotonic() - begin))
        print(*map(str, compiled), sep="\n", end="\n" if compiled else "")
    best = found[0]
    if not best.fits:
        raise UserError(
            f"--cluster is {arguments.cluster!r}, on which nothing fits; it must have more devices or memory: "
            f"{best.name} needs {format_bytes(best.costs.nbytes)} on each"
        )
    if arguments.out:
        text = report.config_file(arguments.config, overrides, best, arguments.cluster)
        try:
            write_text(arguments.out, text)
        except OSError as error:
            raise UserError(f"--out is {str(arguments.out)!r}; it must be {unwritable(arguments.out, error)}") from None


def cluster_of(text: str) -> Cluster:
    """Return the cluster that --cluster names."""
    return find_named(text, "--cluster")[1]


def check_out(path: Path, config: str) -> None:
    """Raise a UserError if a config file cannot be written to a path, or would replace the config that it loads."""
    if path.suffix != ".py" or path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--out is {str(path)!r}; it must be the path of a .py file in a folder that exists")
    if path.resolve() == Path(config.partition(":")[0]).resolve():
        raise UserError(f"--out is {str(path)!r}; it must be another file than that of --config, which it loads")


def make_space(config: ConfigDict, cluster: Cluster) -> Space:
    """Return what to search on GPUs: the problem of a config, and the costs of its layers."""
    problem = load(config, cluster).problem
    assert cluster.memory_bytes is not None
    return gpu_space(config, problem, cluster, memory_fraction() * cluster.memory_bytes, kept(config, cluster))


def measured_space(config: ConfigDict) -> Space:
    """Return what to search on the CPU devices of this machine, after measuring what layers and links cost."""
    mesh.prepare_jax(config, data.cache_dir(config) / "xla")
    cluster = clusters.find_cluster()
    if cluster.platform != "cpu":
        raise UserError(f"--cluster is {HERE!r}, {cluster.device_kind}; it must be a kind of GPU, such as h100:8")
    return cpu_space(config, load(config, cluster), cluster, kept(config, cluster))


def load(config: ConfigDict, cluster: Cluster) -> build.Loaded:
    """Read the data and build the model of a config, whatever its strategy. Raises UserError for its mistakes."""
    with tempfile.TemporaryDirectory() as folder:
        return load_problem(config, cluster, Path(folder))


def kept(config: ConfigDict, cluster: Cluster) -> Settings:
    """Return the settings that all candidates must have: those that a run with strategy auto keeps."""
    settings = kept_settings(config) if config.strategy == AUTO_STRATEGY else {}
    check_kept(settings, cluster.num_devices)
    return settings


def describe(space: Space, found: list[Candidate], work: report.StepWork, seconds: float) -> str:
    """Return the table of the best candidates, and why they are."""
    cluster, best = space.machine.cluster, found[0]
    each = report.best_of_each([one for one in found if one.fits])
    hosts = f" on {cluster.num_processes} hosts" if cluster.num_processes > 1 else ""
    lines = [
        f"{cluster.num_devices} x {cluster.device_kind}{hosts}: {len(found):,} candidates in {seconds:.1f} s, of which "
        f"{sum(one.fits for one in found):,} fit; {work.examples:,} examples in a step",
        "",
        *report.rows(each[:SHOWN], work),
        "",
        *(report.explain(one, best, work) for one in each[:3]),
    ]
    if space.config.strategy != AUTO_STRATEGY:
        own = search.choice_of(space)
        lines.append("Your config: " + (own if isinstance(own, str) else report.explain_own(own, best, work)))
    lines += [
        "",
        "The first one:",
        *(f"  --config.{key}={value}" for key, value in report.changes(best.settings).items()),
    ]
    return "\n".join(lines)


class Verified(NamedTuple):
    """A candidate that was compiled.

    Attributes:
      predicted: the candidate as it was predicted.
      corrected: the candidate with the memory that the compiler states.
      seconds: the time of a step, predicted from the compiled program.
    """

    predicted: Candidate
    corrected: Candidate
    seconds: float

    def __str__(self) -> str:
        before, after = (one.costs for one in self[:2])
        return (
            f"compiled: {self.predicted.name}: needs {format_bytes(after.nbytes)} (predicted "
            f"{format_bytes(before.nbytes)}), {'fits' if self.corrected.fits else 'does not fit'}; "
            f"{self.seconds * 1e3:.3g} ms (predicted {before.seconds * 1e3:.3g} ms)"
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
        programs = strategies.build(plan, problem, target.devices).compile()
        needed = float(sum(audit.needed_bytes(programs, plan).values()))
        corrected = one._replace(costs=one.costs._replace(nbytes=needed), fits=needed <= space.usable_bytes)
        compiled.append(Verified(one, corrected, step_time.predict(programs, cluster).seconds))
    return compiled


if __name__ == "__main__":
    sys.exit(exit_code(main))
