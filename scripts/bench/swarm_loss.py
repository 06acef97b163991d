"""Measures the throughput of a live swarm after one of its peers is killed, and how long it takes to recover.

    scripts/python scripts/bench/swarm_loss.py [--peers=6] [--stages=2,2,1] [--period=10] [--seconds=0.05]

The peers are processes of this machine. Each takes a fixed time per pass, most of which it sleeps, as if it waited for
a device of its own, so that the throughput is limited by the peers and not by the cores of this machine. --stages are
the numbers of layers of the stages; --seconds is the mean time of a forward pass, and a backward pass takes twice as
long. After some steps, a peer of the first stage is killed, and no other is started in its place. Prints the rates, in
microbatches per second, and:

  of the best assignment  the rate of the best assignment of peers to stages, as a peer serves one stage at a time
  recovery                time from the kill until the first step at the rate after recovery, in periods of rebalancing
"""

import os
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import strategies
from jaxpar.command_line import Parser, integer, number
from jaxpar.errors import UserError, exit_code
from jaxpar.strategies import ray_cluster
from jaxpar.strategies.swarm.live import cluster as peer_cluster
from jaxpar.strategies.swarm.live.events import EventKind, LiveEvent, PeerStatus, listeners
from jaxpar.strategies.swarm.live.peer import StagePeer
from jaxpar.strategies.swarm.live.trainer import LiveTrainer
from scripts.bench.pipeline_case import Maker
from scripts.bench.tables import COLUMNS, show

NUM_BEFORE, NUM_PERIODS = 6, 4  # steps before the kill; periods after it
SETTLED = 1.1  # a step has recovered if it takes at most this many times the median time after recovery
MODEL = {"hidden_size": 32, "max_length": 8, "vocab_size": 32}  # so that computing takes little of a pass


class PacedPeer(StagePeer):
    """A peer whose passes take a fixed time. times: seconds of a forward and of a backward pass, by stage."""

    def __init__(self, node: str, times: Sequence[Sequence[float]]) -> None:
        super().__init__(node, cpus=1, gpus=0)
        self._times = times

    def compute(self, ticket: Any, phase: int, stage: int, *arguments: Any) -> Any:
        """Compute a pass in its time."""
        end = time.perf_counter() + self._times[phase][stage]
        result = super().compute(ticket, phase, stage, *arguments)
        time.sleep(max(end - time.perf_counter(), 0))
        return result


class Timeline(NamedTuple):
    """Ends of the steps, and the kill, in seconds. kill: the peer was killed after `num_before` steps."""

    ends: list[float]
    kill: float
    num_before: int


def main() -> None:
    """Measure and print."""
    parser = Parser(__doc__)
    parser.add_argument("--peers", type=integer(2), default=6, help="number of peers")
    parser.add_argument("--stages", default="2,2,1", help="number of layers of each stage")
    parser.add_argument("--period", type=number("a positive number", 0.1), default=10.0, help="seconds of rebalancing")
    parser.add_argument("--seconds", type=number("a positive number", 1e-3), default=0.05, help="of a forward pass")
    arguments = parser.parse()
    layers = [int(part) for part in arguments.stages.split(",") if part.isdigit()]
    if len(layers) != arguments.stages.count(",") + 1 or 0 in layers or len(layers) >= arguments.peers:
        raise UserError(
            f"--stages is {arguments.stages!r}; it must be a number of layers for each of fewer stages than --peers"
        )
    jax.config.update("jax_platforms", "cpu")
    trainer, step, work = start(arguments, layers)
    timeline = train(trainer, step, arguments.period)
    report(timeline, np.array(work), arguments.peers, arguments.period, 4 * arguments.peers)


def start(arguments: Any, layers: Sequence[int]) -> tuple[LiveTrainer, Any, list[float]]:
    """Return the trainer, a function that takes a step, and the seconds of a microbatch by stage."""
    num_peers, num_stages = arguments.peers, len(layers)
    cuts = ",".join(f"block_{first}" for first in np.cumsum(layers)[:-1])
    model = [f"--config.model.{key}={value}" for key, value in ({"num_layers": sum(layers)} | MODEL).items()]
    case = Maker(tuple(model), 1).single(4 * num_peers)
    config = case.config.copy_and_resolve_references()
    namespace = secrets.token_hex(4)
    settings = {
        "mode": "live",
        "stages": num_stages,
        "peers": num_peers,
        "num_microbatches": 4 * num_peers,
        "rebalance_seconds": arguments.period,
        "join_seconds": 0,
        "namespace": namespace,
    }
    more = [f"--config.swarm.{key}={value}" for key, value in settings.items()]
    configs.override(config, ["--config.strategy=swarm", "--config.optimizer.accumulation_steps=1", *more])
    configs.override(config, [f"--config.pipeline.partition={cuts}"])
    ray = ray_cluster.connect("swarm.address", "", num_peers)
    node = ray.nodes()[0]["NodeID"]
    plan: Any = strategies.plan(config, case.problem, clusters.find_cluster())
    workload = plan.details.workload
    scale = arguments.seconds / statistics.mean(workload.forward)
    times = [[scale * one for one in part] for part in (workload.forward, workload.backward)]
    for peer in range(num_peers):
        lasting = {"name": f"{peer_cluster.PEER_NAME}-{peer}", "namespace": namespace, "lifetime": "detached"}
        actor = ray.remote(PacedPeer).options(num_cpus=0, **lasting)
        actor.remote(node, times)
    strategy = strategies.make(config, case.problem)
    trainer: LiveTrainer = strategy.step.__self__  # type: ignore[attr-defined]
    state = strategy.init(jax.random.key(0))

    def step() -> None:
        nonlocal state
        state, _ = strategy.step(state, strategy.place(case.batch))

    return trainer, step, [sum(both) for both in zip(*times, strict=True)]


def train(trainer: LiveTrainer, step: Any, period: float) -> Timeline:
    """Train until all peers serve, then some steps more, kill a peer, and train for some periods."""
    members = trainer.members
    moves = members.counts["moves"]
    while any(peer.status != PeerStatus.SERVING for peer in members.peers) or moves != members.counts["moves"]:
        moves = members.counts["moves"]
        step()
    settled = time.monotonic() + 2 * period  # the first rebalancing has measured speeds
    while time.monotonic() < settled:
        step()
    ends = [time.monotonic()]
    for _ in range(NUM_BEFORE):
        step()
        ends.append(time.monotonic())
    kills: list[float] = []

    def kill(event: LiveEvent) -> None:
        if event.kind == EventKind.COMPUTED and event.stage == 0 and not kills:
            place = members.peers[event.peer].place
            assert place is not None
            kills.append(time.monotonic())
            os.kill(place.pid, signal.SIGKILL)

    listeners.append(kill)
    while not kills or time.monotonic() < kills[0] + NUM_PERIODS * period:
        step()
        ends.append(time.monotonic())
    return Timeline(ends, kills[0], NUM_BEFORE)


def whole_peers(work: np.ndarray, num_peers: int) -> float:
    """Return the most microbatches per second of equal peers that each serve one stage. work: seconds by stage."""
    cuts = combinations(range(1, num_peers), len(work) - 1)
    return max(float((np.diff([0, *cut, num_peers]) / work).min()) for cut in cuts)


def report(timeline: Timeline, work: np.ndarray, num_peers: int, period: float, num_microbatches: int) -> None:
    """Print the rates."""
    seconds = np.diff(timeline.ends)
    last = [
        one
        for one, end in zip(seconds, timeline.ends[1:], strict=True)
        if end - one > timeline.kill + 2 * period  # after the time in which it must recover
    ]
    before, after = statistics.median(seconds[: timeline.num_before]), statistics.median(last)
    recovered = next(
        end
        for one, end in zip(seconds, timeline.ends[1:], strict=True)
        if end - one > timeline.kill and one <= SETTLED * after
    )
    left = (num_peers - 1) / num_peers
    rates, most = [], [whole_peers(work, num_peers), whole_peers(work, num_peers - 1)]
    for name, seconds_of_step, limit in zip(("before", "after"), (before, after), most, strict=True):
        rate = num_microbatches / seconds_of_step
        rates.append(
            [f"microbatches/s {name} / of the best assignment", f"{rate:.2f} / {limit:.2f} = {rate / limit:.3f}"]
        )
    rows = [
        *rates,
        ["rate after / before", f"{before / after:.3f}"],
        ["rate after / before, relative to the peers that are left", f"{before / after / left:.3f}"],
        ["the same of the best assignments", f"{most[1] / most[0] / left:.3f}"],
        ["recovery, in periods of rebalancing", f"{(recovered - timeline.kill) / period:.2f} of {period:g} s"],
    ]
    show(COLUMNS[:2], rows)


if __name__ == "__main__":
    sys.exit(exit_code(main))
