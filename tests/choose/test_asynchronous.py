"""Predicted rates of workers and peers, against sums by hand, synchronous predictions, and plans of live runs."""

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import strategies
from jaxpar.choose import report
from jaxpar.choose.asynchronous import async_candidates, linked, predicted
from jaxpar.choose.candidates import AsyncCandidate, Candidate, Space, state_ratios
from jaxpar.choose.costs.layers import LayerMemory, Layers
from jaxpar.choose.costs.machine import CpuMachine, GpuMachine, Machine
from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.choose.costs.rates import EFFICIENCY
from jaxpar.cluster import Cluster
from jaxpar.core.state import nbytes
from jaxpar.inspect import plan_report as planning
from jaxpar.measure.operations import Residuals
from jaxpar.strategies.swarm.availability import SwarmPeer
from tests.choose.test_planner import small_problem

BATCH, EXAMPLE_SECONDS = 240, 1e-3  # of a layer: a third of it forward
H100 = clusters.named_cluster("h100", 4)
WEIGHTS = 1000.0
FREE = replace(H100, send_rates={"host": math.inf, "network": math.inf}, latencies={"host": 0.0, "network": 0.0})
WORKERS = ("strategy=async_data_parallel", "asynchronous.mitigations=")


class FixedLayers(Layers):
    """Layers that take EXAMPLE_SECONDS for each example, and hold WEIGHTS bytes of weights."""

    remats = ("none",)

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def profile(self, size: int, remat: str) -> list[LayerProfile]:
        assert remat == "none"
        seconds = size * EXAMPLE_SECONDS
        return [LayerProfile(name, seconds / 3, 2 * seconds / 3, 0.0, 0.0, WEIGHTS) for name in self._names]

    def memory(self, _size: int, _remat: str, *, is_split: bool) -> list[LayerMemory]:
        assert not is_split
        return [LayerMemory(0.0, 0.0) for _ in self._names]

    def residuals(self, _size: int, _remat: str) -> list[Residuals]:
        return [Residuals(0.0, 0.0, 0.0) for _ in self._names]


def make_space(cluster: Cluster = FREE, machine: Machine | None = None) -> Space:
    """Return a BERT of 4 layers on a cluster in which only layers and links take time."""
    config = configs.default_config()
    settings = (f"batch_size={BATCH}", "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2")
    configs.override(config, [f"--config.{value}" for value in settings])
    problem = small_problem(config, cluster)
    problem = problem._replace(
        batch={name: type(x)((BATCH, *x.shape[1:]), x.dtype) for name, x in problem.batch.items()}
    )
    layers = FixedLayers([layer.name for layer in problem.model.layers])
    return Space(config, problem, layers, machine or GpuMachine(replace(cluster, memory_bandwidth=math.inf)), 1e9)


def predict(space: Space, *settings: str) -> Candidate | AsyncCandidate | str:
    config = copy.deepcopy(space.config)
    configs.override(config, [f"--config.{value}" for value in settings])
    return predicted(space, config, state_ratios(space.problem))


def rate_of(space: Space, *settings: str) -> AsyncCandidate:
    found = predict(space, *settings)
    assert isinstance(found, AsyncCandidate), found
    return found


@pytest.fixture(scope="module")
def free() -> Space:
    return make_space()


ALONE = 4 * BATCH * EXAMPLE_SECONDS  # seconds of a step of one device


@pytest.mark.parametrize("policy", ["async", "ssp"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_equal_workers_have_the_rate_of_as_many_devices(free: Space, number: int, policy: str) -> None:
    workers = *WORKERS, f"asynchronous.num_workers={number}", f"asynchronous.policy={policy}"
    found = rate_of(free, *workers)
    assert found.seconds == pytest.approx(ALONE / number)
    synchronous = predict(free, "strategy=data_parallel", f"mesh.data={number}")
    assert isinstance(synchronous, Candidate)
    # Nothing is assumed of the launches of a server's update.
    assert found.seconds == pytest.approx(synchronous.costs.seconds, rel=2e-3)
    assert (found.mean_staleness, found.max_staleness) == (number - 1, number - 1)


def test_a_slow_worker_slows_down_only_itself_without_a_bound(free: Space) -> None:
    slow = *WORKERS, "asynchronous.num_workers=4", "asynchronous.delays.slowdown=4"
    assert rate_of(free, *slow).seconds == pytest.approx(ALONE / (3 + 1 / 4), rel=0.01)
    bounded = rate_of(free, *slow, "asynchronous.policy=ssp", "asynchronous.bound=0")
    assert bounded.seconds == pytest.approx(ALONE)  # lockstep: all wait for the one that takes 4 times as long
    live = rate_of(free, *slow, "asynchronous.mode=live")
    assert live[2:-2] == rate_of(free, *slow)[2:-2]  # emulated runs are predicted as if they were live


def test_delays_are_relative_to_the_time_of_a_gradient(free: Space) -> None:
    workers = *WORKERS, "asynchronous.delays.distribution=uniform", "asynchronous.delays.spread=0.5"
    once, again = (rate_of(free, *workers, f"asynchronous.delays.compute_time={mean}") for mean in (1.0, 7.0))
    assert once.seconds == pytest.approx(again.seconds)
    assert once.seconds == pytest.approx(ALONE / 4, rel=0.02)
    assert once.max_staleness > 3  # unequal workers overtake each other


def test_a_saturated_server_sends_at_its_rate() -> None:
    """Three workers and a server with its own device, which needs longer to send the weights than they compute."""
    slow = 1e4
    space = make_space(replace(FREE, send_rates={"host": slow}))
    found = rate_of(space, *WORKERS, "asynchronous.num_workers=3", "mesh.data=4")
    assert found.seconds > ALONE / 3
    assert found.sent_bytes[3] / found.seconds == pytest.approx(EFFICIENCY["host"] * slow)


def test_bytes_of_workers_and_server(free: Space) -> None:
    """Workers and server send what the plan of a live run has. The moments are on the server."""
    settings = *WORKERS, "asynchronous.num_workers=3", "mesh.data=4", "asynchronous.mode=live"
    found, params = rate_of(free, *settings), nbytes(free.problem.model.shapes)
    config = copy.deepcopy(free.config)
    configs.override(config, [f"--config.{value}" for value in settings])
    plan = strategies.plan(config, free.problem, H100)
    assert sum(found.sent_bytes) == pytest.approx(sum(one.nbytes for one in plan.traffic))
    assert found.sent_bytes == pytest.approx([params, params, params, 3 * params])
    # A worker has a copy of the newest weights, those that it reads, and its gradient.
    assert found.device_bytes[:3] == pytest.approx([2 * params + 4 * WEIGHTS] * 3)
    assert found.device_bytes[3] == pytest.approx(params + 2 * params + params, rel=1e-3)


PEERS = ("strategy=swarm", "swarm.num_microbatches=24", "swarm.stages=2", "swarm.peers=2", "pipeline.partition=uniform")


def test_a_peer_per_stage_has_the_rate_of_its_slowest_stage(free: Space) -> None:
    """A backward pass computes the forward pass again. Without delay, a step also fills and drains the pipeline."""
    stage = 2 * BATCH / 24 * EXAMPLE_SECONDS * (1 + 1 / 3)  # of a microbatch through 2 layers
    assert rate_of(free, *PEERS, "swarm.delayed=True").seconds == pytest.approx(24 * stage, rel=2e-3)
    assert rate_of(free, *PEERS).seconds == pytest.approx((24 + 1) * stage)
    uneven = rate_of(free, *PEERS, "pipeline.partition=block_0", "swarm.delayed=True")  # 1 and 3 layers
    assert uneven.seconds == pytest.approx(24 * stage * 3 / 2, rel=2e-3)
    several = rate_of(free, *PEERS, "swarm.peers=4", "swarm.delayed=True")
    assert several.seconds == pytest.approx(12 * stage, rel=0.1)


def test_bytes_of_peers(free: Space) -> None:
    """Two peers send each other the activations of 24 microbatches of 10 x 64 tokens, and their gradients."""
    found = rate_of(free, *PEERS)
    assert found.sent_bytes == pytest.approx([24 * 10 * 64 * 32 * 4] * 2, rel=0.02)  # and the mask with the activations
    in_8_bits = rate_of(free, *PEERS, "swarm.compress=int8")
    assert sum(in_8_bits.sent_bytes) < 0.3 * sum(found.sent_bytes)
    params = nbytes(free.problem.model.shapes)
    assert sum(found.device_bytes) == pytest.approx((1 + 1 + 2) * params, rel=0.01)  # with gradients and two moments
    delayed = rate_of(free, *PEERS, "swarm.delayed=True")
    assert (delayed.mean_staleness, delayed.max_staleness) == (1, 1)
    assert sum(delayed.device_bytes) == pytest.approx(5 * params, rel=0.01)


def test_peers_have_the_links_of_the_cluster() -> None:
    links = {"send_rates": {"host": 1e9, "network": 1e6}, "latencies": {"host": 1e-6, "network": 1e-3}}
    apart = replace(H100, num_processes=4, **links)  # type: ignore[arg-type]
    [slow, fast] = linked(make_space(apart), [SwarmPeer("slow", bandwidth=10.0, latency=1.0), SwarmPeer("fast")])
    assert slow == SwarmPeer("slow", 1.0, 10.0, 1.0)
    assert fast.bandwidth == pytest.approx(EFFICIENCY["network"] * 1e6)
    assert fast.latency == pytest.approx(0.5e-3)  # a message has that of both peers
    assert rate_of(make_space(apart), *PEERS).seconds > rate_of(make_space(), *PEERS).seconds


def test_devices_that_share_cores() -> None:
    """Four workers, or peers, on two cores have the rate of two."""
    cores = {1: 1.0, 2: 1.0, 4: 2.0}
    nothing: Any = {"all-reduce": {1: (0.0, 0.0), 4: (0.0, 0.0)}}
    machine = CpuMachine(H100, cores, {1: 0.0}, nothing, 0.0, {1: 0.0})
    space = make_space(H100, machine)
    assert rate_of(space, *WORKERS, "asynchronous.num_workers=4").seconds == pytest.approx(ALONE / 2)
    alone, shared = (
        rate_of(make_space(H100, one), *PEERS, "swarm.peers=4", "swarm.delayed=True").seconds
        for one in (machine._replace(slowdown={1: 1.0, 4: 1.0}), machine)
    )
    assert shared == pytest.approx(2 * alone, rel=0.1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            (*WORKERS, "asynchronous.policy=softsync"),
            "config.asynchronous.policy is 'softsync'; only async and ssp are",
        ),
        ((*WORKERS, "asynchronous.num_workers=7"), "config.batch_size is 240; it must be a multiple of"),
        (("strategy=swarm", "swarm.peers=5"), "config.swarm.peers is '5'; it must be at most 4, the number of devices"),
    ],
)
def test_reasons(free: Space, settings: tuple[str, ...], reason: str) -> None:
    found = predict(free, *settings)
    assert isinstance(found, str)
    assert reason in found


def test_the_second_table(free: Space) -> None:
    """The table has the user's own config, too, and the reason why others are not possible."""
    others = async_candidates(free, state_ratios(free.problem))
    assert [one if isinstance(one, str) else one.name for one in others] == [
        "async, 4 workers",
        "ssp with bound 3, 4 workers",
        "swarm, 4 peers in 2 stages",
        "swarm, 4 peers in 2 stages, delayed, int8 messages",
    ]
    work = report.work_of(free)
    best = predict(free, "strategy=data_parallel", "mesh.data=4")
    assert isinstance(best, Candidate)
    own = rate_of(free, *WORKERS, "asynchronous.num_workers=2")
    text = planning.describe_plans(free, [best], work, own, [*others, "a reason"], 1.0)
    assert planning.NOT_RANKED in text
    assert planning.WAITING_LAST not in text
    found = [best, best._replace(name="1f1b", waits=True)]
    assert planning.WAITING_LAST in planning.describe_plans(free, found, work, own, [], 1.0)
    *_, last, _, reason = text.splitlines()
    assert last.split()[:4] == ["480", "ms", "500", "1.00"]
    assert last.endswith("your config: async, 2 workers")
    assert reason == "Not possible: a reason"
    values = [report.unranked_json(one, work) for one in others if not isinstance(one, str)]
    assert [value["ranked"] for value in values] == [False] * 4
    assert values[0]["examples_per_second"] == pytest.approx(BATCH / (ALONE / 4))
    assert len(values[0]["sent_bytes_by_device"]) == len(values[0]["bytes_by_device"]) == 4
    assert np.isfinite([value["seconds"] for value in values]).all()
