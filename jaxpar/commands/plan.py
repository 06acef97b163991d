r"""Finds the fastest way to train a config on a cluster, which need not exist.

    jaxpar plan --config=configs/quickstart.py --cluster=h100:8 [--verify=3] [--out=best.py]
        [--json] [--save_cluster=FILE.toml] [--config.KEY=VALUE ...]
    jaxpar plan --config=configs/gpt.py:gpt2 --train_tokens=10e9 --hours=24 [--cluster=h100,mine.toml]
        [--budget=1000] [--json] [--config.KEY=VALUE ...]

Predicts the time and the memory of a step for every strategy that trains like one device, on every mesh, with every
number of microbatches, schedule and rematerialization, for batches of config.batch_size examples. Compiles nothing,
unless --verify asks for it. With config.strategy=auto, all candidates keep what the config sets of these; otherwise
only `Your config` does. The columns of the table:

  step      predicted time of a step
  MFU       FLOPs of the model / what the devices could compute in this time
  waits     share of the step in which the busiest device waits for other stages
  sends     share of the step in which it only communicates
  updates   share of the step in which it packs gradients and updates parameters; the rest is computing and starting
  memory    what the fullest device needs

A second table has the predicted rates of workers and peers that do not wait for each other, which are not ranked:
staleness is the number of updates that are missing in the weights from which a gradient is computed, and `sends` are
the bytes that the busiest device sends in a step.

The cluster is written as in --target of `jaxpar audit`, such as h100:4x8 for 4 hosts of 8 H100s, or is a file
(configs/clusters). `here` are the devices of this machine, which are measured first: on GPUs, the rates of matrix
products, of the memory and of links, and the fixed time of a kernel, which --save_cluster writes as a cluster file; on
CPUs, layers and links.

With --train_tokens and --hours, prints the least number of GPUs of each cluster that trains on this number of tokens in
this time, with its fastest plan. --cluster then lists kinds of GPUs, such as h100, and clusters, which have at most
their GPUs; by default all known kinds. With --budget, prints the cheapest number of GPUs of each cluster, whose file
must have `price_per_hour`; if all of them cost more, the command fails. --hours then need not be set.
"""

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxpar import models
from jaxpar.choose import planner, report, sizes
from jaxpar.choose.asynchronous import async_candidates, predicted
from jaxpar.choose.candidates import state_ratios
from jaxpar.choose.costs.rates import dtype_advice
from jaxpar.choose.planner import AUTO_STRATEGY
from jaxpar.cluster.target import HERE, find_target
from jaxpar.command_line import check_new_file, integer, missing, number, output_path, writing
from jaxpar.commands.config_flags import ConfigParser, load_checked
from jaxpar.errors import UserError, format_bytes
from jaxpar.files import write_text
from jaxpar.inspect import plan_report
from jaxpar.run.unused import EFFECTS

SIZE_FLAGS = {
    "--train_tokens": "print how many GPUs train on this number of tokens",
    "--hours": "in at most this time",
    "--budget": "for at most this price",
}


def main(argv: Sequence[str]) -> None:
    parser = ConfigParser(__doc__, "jaxpar plan")
    add = parser.add_argument
    add("--cluster", default="", metavar="FILE|NAME:HOSTSxDEVICES|here", help="the cluster")
    amount = number("a number greater than 0", minimum=1e-9)
    for flag, help_text in SIZE_FLAGS.items():
        add(flag, type=amount, help=help_text)
    add("--verify", type=integer(1), default=0, metavar="N", help="compile the first N, and correct memory and order")
    add("--out", type=output_path, metavar="FILE.py", help="write the first one as a config file")
    of_here = "write the GPUs of --cluster=here as a cluster file"
    add("--save_cluster", type=output_path, metavar="FILE.toml", help=of_here)
    add("--json", action="store_true", help="print all candidates as JSON")
    arguments, overrides = parser.parse_with_overrides(argv)
    begin = time.monotonic()
    gc.set_threshold(100_000, 20, 100)  # traced programs stay alive, and frequent collections took a sixth of the time
    if arguments.train_tokens:
        _print_sizes(arguments, overrides)
        return
    for flag in SIZE_FLAGS:
        if value := getattr(arguments, flag.removeprefix("--")):
            raise UserError(f"{flag} is {value:g}; it must be unset without --train_tokens")
    if not arguments.cluster:
        raise missing("--cluster", "--cluster=h100:8")
    if "," in arguments.cluster and not Path(arguments.cluster).is_file():
        rule = "one cluster, unless --train_tokens is set"
        raise UserError(f"--cluster is {arguments.cluster!r}; it must be {rule}")
    if arguments.cluster == HERE and arguments.verify:
        raise UserError(f"--verify is {arguments.verify}; it must be unset with --cluster={HERE}")
    target = find_target(arguments.cluster, "--cluster") if arguments.verify else None
    config = load_checked(arguments.config, overrides, EFFECTS)  # sections: of several strategies
    if arguments.out:
        check_new_file("--out", arguments.out, [".py"], arguments.config)
    plan_report.check_strategy_name(config)
    if arguments.cluster == HERE:
        space = plan_report.measured_space(config, arguments.save_cluster)
    elif arguments.save_cluster:
        raise UserError(f"--save_cluster is {str(arguments.save_cluster)!r}; it must be unset without --cluster={HERE}")
    else:
        space = plan_report.make_space(config, plan_report.cluster_of(arguments.cluster), target)
    if target:
        plan_report.check_lowers(space.problem)
    if not arguments.json:
        print(models.describe_model(config, space.problem.model, space.problem.batch), flush=True)
    found = planner.find_candidates(space)
    found, compiled = plan_report.verified(found, arguments.verify, space, target) if target else (found, [])
    work = report.work_of(space)
    ratios = state_ratios(space.problem)
    others = async_candidates(space, ratios)
    if arguments.json:
        listed = [report.as_json(one, work) for one in found]
        listed += [report.unranked_json(one, work) for one in others if not isinstance(one, str)]
        print(json.dumps(listed, indent=1))
    elif found[0].fits:
        own = None if config.strategy == AUTO_STRATEGY else predicted(space, config, ratios)
        print(plan_report.describe_plans(space, found, work, own, others, time.monotonic() - begin))
    if not arguments.json:
        print(*map(str, compiled), sep="\n", end="\n" if compiled else "")
    best = found[0]
    if not best.fits:
        raise UserError(
            f"--cluster is {arguments.cluster!r}, but nothing fits on it; it must have more devices or memory: "
            f"{best.name} needs {format_bytes(best.costs.nbytes)} on each. {report.describe_memory(space)}"
        )
    if arguments.out:
        with writing("--out", arguments.out):
            write_text(arguments.out, report.config_file(arguments.config, overrides, best, arguments.cluster))


def _print_sizes(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Print how many GPUs of each cluster train the tokens in time."""
    if not (arguments.hours or arguments.budget):
        raise missing("--hours", "--train_tokens=10e9 --hours=24", "set with --train_tokens, unless --budget is")
    for flag in ("verify", "out", "save_cluster"):
        if value := getattr(arguments, flag):
            raise UserError(f"--{flag} is {str(value)!r}; it must be unset with --train_tokens")
    hours, budget = arguments.hours or math.inf, arguments.budget
    clusters = sizes.find_clusters(arguments.cluster)
    if budget:
        sizes.check_prices(clusters, budget)
    config = load_checked(arguments.config, overrides, EFFECTS)
    plan_report.check_strategy_name(config)
    found = []
    for name, cluster in clusters.items():
        space = plan_report.make_space(config, cluster, on_all=False)
        if advice := dtype_advice(cluster, config.model.dtype):
            print(f"planner   {name}: {advice}", file=sys.stderr, flush=True)
        one = sizes.best_training(name, space, arguments.train_tokens, hours, cheapest=bool(budget))
        found += [one] if one else []
    found = sizes.ordered(found, hours, by_price=bool(budget))
    if arguments.json:
        print(json.dumps([sizes.training_json(one) for one in found], indent=1))
    elif found:
        print(*sizes.training_rows(found, hours, budget), sep="\n")
    sizes.check_found(found, hours, budget)
