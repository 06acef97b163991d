r"""Simulates pipelines over unreliable peers (SWARM): rebalancing, latency, and width. Needs neither JAX nor devices.

    jaxpar swarm simulate --peers=400 --stages=4 [--trace=FILE] [--rebalance_seconds=300] [--json]
    jaxpar swarm simulate --peers=400 --stages=4 --make_trace=trace.csv --lifetime=24 --rejoin=4
    jaxpar swarm simulate --report=latency --peers=16 --stages=4
    jaxpar swarm simulate --report=width
    jaxpar swarm simulate --report=replay --scenario=runs/swarm/scenario.json

Peers and traces are CSV files (docs/howto/swarm.md). If --peers is a number, the peers are equal: p0, p1, ...
Without --trace, a trace is generated from --hours, --lifetime, --rejoin, --groups, --group_lifetime, --group_share and
--seed; --make_trace also writes it. The reports:

  rebalancing  throughput as a fraction of the optimum, without rebalancing, and with each rule and period. The optimum
               is the bound of the linear program: at each moment, the speed of all present peers divided by the work of
               all stages. --out=FILE.{png,svg} draws the capacity of the stages over time. The published values are
               those of the paper's rule on the trace of its authors; they are shown if all settings are the defaults.
  latency      throughput at latencies from 0 to 200 ms, as a fraction of that without any idle time, of GPipe in fixed
               pipelines and of a swarm whose peers do not fail, without the averaging of gradients
  width        utilization of devices by the width of a transformer layer, the bandwidth and the round-trip time
  replay       the simulated run of a scenario that a training run has written, again, and its check
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from jaxpar.command_line import Parser, choice, integer, number, output_path
from jaxpar.errors import UserError
from jaxpar.strategies.swarm.membership import REBALANCING_RULES
from jaxpar.strategies.swarm.reports import REPORTS

# Flags of a generated trace, and the flags that each report reads.
_GENERATED = ("lifetime", "rejoin", "groups", "group_lifetime", "group_share", "seed", "make_trace")
_PASSES = ("peers", "stages", "forward", "backward", "bandwidth")
_READ = {
    "rebalancing": (*_PASSES, "trace", *_GENERATED, "hours", "state_bytes", "rebalance_seconds", "rule", "out"),
    "latency": (*_PASSES, "activation_bytes", "num_microbatches"),
    "width": (),
    "replay": ("scenario",),
}


def main(argv: Sequence[str]) -> None:
    arguments = read_flags(argv)
    lines, metrics = REPORTS[arguments.report](arguments)
    print(json.dumps(metrics) if arguments.json else "\n".join(lines))


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags, and as `is_published`, whether all but the seed define the swarm of the published results."""
    parser = Parser(__doc__, "jaxpar swarm simulate")
    add = parser.add_argument
    positive = number("finite and greater than 0", minimum=1e-12)
    share = number("between 0 and 1", maximum=1)
    seconds = number("between 1 and 1000000000", minimum=1, maximum=1e9)
    hours = number("between 0.01 and 1000000", minimum=0.01, maximum=1e6)
    add("--report", type=choice(REPORTS), default="rebalancing")
    add("--peers", default="400", help="number of equal peers, or a file of peers")
    add("--stages", type=integer(1), default=4, help="number of stages")
    add("--trace", type=Path, help="file of the trace")
    add("--make_trace", type=output_path, metavar="FILE", help="file to write the generated trace to")
    add("--scenario", type=Path, help="file of the scenario to replay")
    add("--hours", type=hours, default=16.0, help="length of the run")
    add("--lifetime", type=hours, default=24.0, help="mean hours that a peer stays")
    add("--rejoin", type=hours, default=4.0, help="mean hours until it joins again")
    add("--groups", type=integer(1), default=4, help="groups of peers that are preempted together")
    add("--group_lifetime", type=hours, default=6.0, help="mean hours between their preemptions")
    add("--group_share", type=share, default=0.7, help="fraction that is preempted")
    add("--seed", type=integer(0), default=0, help="seed of the generated trace")
    add("--rebalance_seconds", type=seconds, help="the only period to compare with none")
    add("--rule", type=choice(REBALANCING_RULES), help="the only rule to compare")
    add("--bandwidth", type=positive, default=200.0, help="of each equal peer, in Mb/s")
    add("--state_bytes", type=positive, default=1e9, help="parameters and optimizer state of a stage")
    add("--forward", type=positive, default=0.1, help="seconds of a forward pass at speed 1")
    add("--backward", type=positive, default=0.3, help="seconds of a backward pass, which recomputes")
    add("--activation_bytes", type=positive, default=1e6, help="bytes between two stages")
    add("--num_microbatches", type=integer(1), default=64, help="in a global batch, for latency")
    add("--out", type=output_path, metavar="FILE.{png,svg}", help="picture of the capacity of the stages")
    add("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse(argv)
    changed = {name: value for name, value in vars(arguments).items() if value != parser.get_default(name)}
    for name, value in changed.items():
        if name not in ("report", "json", *_READ[arguments.report]):
            raise UserError(f"--{name} is {value}; it must be left out with --report={arguments.report}")
        if arguments.trace and name in _GENERATED:
            raise UserError(f"--{name} is {value}; it must be left out with --trace")
    of_swarm = set(_READ["rebalancing"]) - {"seed", "make_trace", "rebalance_seconds", "rule", "out"}
    arguments.is_published = not of_swarm & changed.keys()
    return arguments
