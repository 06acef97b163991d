"""The planner: costs against sums by hand and the simulator, and what it chooses against brute force."""

import copy
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

import jaxpar
from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import models, strategies, tasks
from jaxpar.choose import planner, report
from jaxpar.choose.candidates import (
    MOST_DIVISORS,
    OFFLOAD,
    Candidate,
    Space,
    divisors,
    plan_of,
    with_settings,
    with_values,
)
from jaxpar.choose.costs import calibrate, updates
from jaxpar.choose.costs.layer_programs import LayerPrograms
from jaxpar.choose.costs.layers import LayerMemory, Layers, LayerWork, PhaseSeconds, resized
from jaxpar.choose.costs.machine import CpuMachine, GpuMachine, partners
from jaxpar.choose.costs.memory import (
    PackedBytes,
    StateBytes,
    pipeline_bytes,
    splits_backward,
    stash_bytes,
    working_bytes,
)
from jaxpar.choose.costs.pipeline_steps import (
    PACKING,
    STAGE_UPDATE_KERNELS,
    PipelineStep,
    action_costs,
    clock_seconds,
    dispatched_seconds,
    narrows,
    pipeline_costs,
    sending_clocks,
    stage_times,
)
from jaxpar.choose.costs.profile import LayerProfile
from jaxpar.choose.costs.rates import EFFICIENCY, HOP_SECONDS, LAUNCH_SECONDS, collective_seconds
from jaxpar.choose.costs.replica_steps import REPLICA_KEYS, replicas_costs
from jaxpar.choose.costs.step import StepCosts, UpdateWork
from jaxpar.choose.costs.traced_layers import TracedLayers
from jaxpar.choose.pipelines import of_pipelines
from jaxpar.choose.replicas import combined, of_replicas, update_of
from jaxpar.cluster import Cluster
from jaxpar.cluster.files import find_named
from jaxpar.cluster.target import Target
from jaxpar.commands import plan as command
from jaxpar.core import optimizer
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.plan import Traffic
from jaxpar.core.state import nbytes
from jaxpar.core.step import Problem
from jaxpar.data import DataInfo
from jaxpar.errors import UserError
from jaxpar.exchange.exchange import Rule
from jaxpar.exchange.named import EXCHANGES
from jaxpar.exchange.reduce import Axis
from jaxpar.inspect import plan_report as planning
from jaxpar.measure.operations import Residuals
from jaxpar.run import build
from jaxpar.strategies.pipeline.schedules import DISPATCH, LOCKSTEP
from jaxpar.strategies.pipeline.tables.periodic import periodic_table
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, make_table
from jaxpar.strategies.pipeline.tables.simulate import Times, lockstep, simulate_table, steady_bubble_rate
from jaxpar.strategies.pipeline.tables.table import F, Table, W
from jaxpar.strategies.pipeline.tables.validate import peak_in_flight
from scripts.bench import planned_memory as cases
from tests.cluster.test_target import needs_plugin, run
from tests.runs import run_script, script_error
from tests.strategies.pipelines import Task, make_batch, make_config, make_problem

H100 = clusters.named_cluster("h100", 16, num_processes=2)
GPUS = GpuMachine(H100)
HOST, NETWORK = (EFFICIENCY[name] * H100.send_rates[name] for name in ("host", "network"))
NO_STATE, NO_UPDATE = StateBytes(0, 0, 0), UpdateWork(0, 0)
NOT_PACKED = PackedBytes(0, 0)
FLUSHED = make_table("1f1b", num_devices=2, num_microbatches=4, num_chunks=1)
NEVER_DRAINED = periodic_table("pipedream_2bw", (1, 1), 4)
NOTHING = LayerMemory(0, 0)
# in which parameters need most of the memory
SMALL_GPT = ("model.num_layers=3", "model.hidden_size=64", "model.num_heads=2", "model.tied_embeddings=False")
USABLE = 3.3e9  # bytes of a device of `space`
# A perceptron of 4 layers on generated vectors, which is planned in a second.
PERCEPTRON = (
    "--config=configs/default.py",
    "--config.data.source=synthetic",
    "--config.data.synthetic_examples=64",
    "--config.model.name=mlp",
    "--config.model.hidden_size=16",
    "--config.batch_size=8",
)


def layer(forward: float, backward: float = 0.0, *, output: float = 0.0, stash: float = 0.0) -> LayerProfile:
    return LayerProfile("layer", forward, backward or 2 * forward, output, stash, 0.0)


def work_of(layers: list[LayerProfile], memory: list[LayerMemory] | None = None, remat: str = "none") -> LayerWork:
    seconds = [PhaseSeconds(one.forward_s, one.backward_s / 2, one.backward_s / 2) for one in layers]
    return LayerWork(layers, memory or [NOTHING] * len(layers), seconds, remat)


class GivenLayers(Layers):
    """Layers that hold nothing."""

    def __init__(self, profile: list[LayerProfile]) -> None:
        self._profile_given = profile

    def profile(self, _size: int, _remat: str) -> list[LayerProfile]:
        return self._profile_given

    def memory(self, _size: int, _remat: str, *, is_split: bool) -> list[LayerMemory]:
        assert not is_split
        return [NOTHING] * len(self._profile_given)

    def residuals(self, _size: int, _remat: str) -> list[Residuals]:
        return [Residuals(0.0, 0.0, 0.0)] * len(self._profile_given)


def costs_of_replicas(
    layers: list[LayerProfile],
    machine: GpuMachine,
    axes: dict[str, int],
    traffic: list[Traffic],
    state: StateBytes = NO_STATE,
    update: UpdateWork = NO_UPDATE,
    *,
    accumulation: int = 1,
    scan_layers: Any = False,
    **flags: Any,
) -> StepCosts:
    """Return the costs of replicas whose layers have this profile."""
    model: Any = SimpleNamespace(runs=[range(0, len(layers))])
    settings = dict(zip(REPLICA_KEYS, (accumulation, "none", scan_layers), strict=True))
    return replicas_costs(GivenLayers(layers), model, machine, axes, 1, settings, traffic, state, update, **flags)


def costs_of_pipeline(
    work: LayerWork,
    machine: GpuMachine,
    axes: dict[str, int],
    table: Table,
    bounds: tuple[int, ...],
    traffic: list[Traffic],
    *,
    packed: PackedBytes = NOT_PACKED,
    executor: str = LOCKSTEP,
    state: StateBytes = NO_STATE,
) -> StepCosts:
    """Return the costs of a pipeline whose update moves nothing."""
    step = PipelineStep(work, machine, axes, table, bounds, traffic)
    return pipeline_costs(step, action_costs(step, executor), [state] * table.num_devices, packed, 0.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_clocks_take_as_long_as_in_lockstep(schedule: str) -> None:
    p, m = 4, 8 if schedule != "model_parallel" else 1
    table = make_table(schedule, num_devices=p, num_microbatches=m, num_chunks=SCHEDULES[schedule].num_chunks)
    forward = [0.5 + device / 7 for device in range(table.num_stages)]
    by_stage = Times(forward, [2 * x for x in forward], [x / 3 for x in forward])
    of_device = Times(*(_by_device(table, times) for times in by_stage))
    clocks = clock_seconds(table, by_stage)
    if table.num_chunks == 1:
        simulated = simulate_table(table, of_device, 0.25).cost
        assert dispatched_seconds(table, by_stage, 0.25) == pytest.approx(simulated)
    together = GPUS.together(clocks).sum() + 0.25 * sending_clocks(table)
    if table.num_chunks == 1:
        assert together == pytest.approx(lockstep(table, of_device, 0.25))
    assert clocks.sum() == pytest.approx(m * np.sum(by_stage))


def _by_device(table: Any, times: Any) -> list[float]:
    return [sum(times[stage] for stage in of_device) for of_device in table.stages.tolist()]


def test_a_pipeline_that_never_drains_takes_its_period() -> None:
    table = periodic_table("pipedream", (1, 1, 1), 4)
    clocks = clock_seconds(table, Times([1.0] * 3, [1.0] * 3, [1.0] * 3))
    assert clocks.shape == (table.period, 3)
    assert clocks.sum(axis=0).tolist() == [12.0] * 3  # every stage is busy with 4 microbatches
    for transfer in (0.0, 0.5):
        rate = steady_bubble_rate(table, Times(1.0, 1.0, 1.0), transfer)
        times = Times([1.0] * 3, [1.0] * 3, [1.0] * 3)
        assert dispatched_seconds(table, times, transfer) == pytest.approx(12 / (1 - rate))


@pytest.mark.parametrize(
    ("axis", "axes", "size", "rate", "reduced", "gathered"),
    [
        (DATA, {DATA: 2, STAGE: 8}, 2, NETWORK, (0, 2), (0, 1)),  # replicas of a stage are on different hosts
        (DATA, {DATA: 8, STAGE: 2}, 8, min(4 * NETWORK, HOST), (12, 2), (6, 1)),  # four of them share a host
        (DATA, {DATA: 16, STAGE: 1}, 16, min(8 * NETWORK, HOST), (28, 2), (14, 1)),
        (STAGE, {DATA: 2, STAGE: 8}, 8, HOST, (14, 0), (7, 0)),
    ],
)
def test_collectives(
    axis: str, axes: dict[str, int], size: int, rate: float, reduced: tuple[int, int], gathered: tuple[int, int]
) -> None:
    """reduced and gathered: hops of an all-reduce and of an all-gather inside a host and between hosts."""
    for kind, passes, hops in (("all-reduce", 2, reduced), ("all-gather", 1, gathered)):
        sent = Traffic(kind, "float32", axis, 1e9, 3 * passes * (size - 1))  # of three vectors
        latency = hops[0] * HOP_SECONDS["host"] + hops[1] * HOP_SECONDS["network"]
        assert GPUS.collective(sent, axes) == pytest.approx(1e9 / rate + 3 * latency), kind


def test_hops_over_many_hosts() -> None:
    """Rings pass every GPU of 96 hosts. The tree of an all-reduce has 7 levels of hosts, but 0.92 of the bandwidth."""
    cluster = clusters.named_cluster("a100-80gb", 768, num_processes=96)
    rate, ring, tree = 8 * 0.8 * 25e9, 672 * 3e-6 + 95 * 1e-5, 14 * 3e-6 + 14 * 1e-5

    def seconds(kind: str, nbytes: float) -> float:
        return collective_seconds(cluster, kind, [range(768)], nbytes)

    assert [seconds(kind, 0.0) for kind in ("all-gather", "reduce-scatter")] == pytest.approx([ring] * 2)
    assert seconds("all-reduce", 0.0) == pytest.approx(tree)
    assert seconds("all-reduce", 1e9) == pytest.approx(1e9 / rate / 0.92 + tree)
    assert seconds("all-reduce", 100e9) == pytest.approx(100e9 / rate + 2 * ring)


def test_neighbours_send_over_one_network_card() -> None:
    """100 MB from the last stage of a host to the first one of the next: one 50 GB/s card at 0.8, and one hop."""
    sent = Traffic("collective-permute", "float32", STAGE, 100e6, 1)
    assert GPUS.collective(sent, {DATA: 1, STAGE: 16}) == pytest.approx(100e6 / 40e9 + 1e-5)
    ring = sent._replace(axis=DATA)
    assert GPUS.collective(ring, {DATA: 16, STAGE: 1}) == pytest.approx(100e6 / 40e9 + 1e-5)
    assert GPUS.collective(sent, {DATA: 2, STAGE: 8}) == pytest.approx(100e6 / HOST + 3e-6)


def test_a_network_card_that_eight_gpus_share() -> None:
    """One GPU of a ring sends to the next host, with the whole card. If all send, each has an eighth of it."""
    cluster = replace(clusters.named_cluster("v100", 16, num_processes=2), network_cards=1)
    card = 8 * 0.8 * 6.25e9
    ring, apart = [(0, 1), (7, 8), (15, 0)], [(one, one + 8) for one in range(8)]
    for pairs, senders in ((ring, 1), (apart, 8), (apart[:2], 2)):
        seconds = collective_seconds(cluster, "collective-permute", pairs, 1e9, 0)
        assert seconds == pytest.approx(senders * 1e9 / card), senders
    two_cards = replace(cluster, network_cards=2)
    for pairs, together in ((ring, 1), (apart[:3], 2)):  # of three senders, two share a card
        seconds = collective_seconds(two_cards, "collective-permute", pairs, 1e9, 0)
        assert seconds == pytest.approx(2e9 * together / card)


def test_replicas_that_send_to_others_than_neighbours() -> None:
    """All GPUs of a host send to the other one at once, and so share its card; rounds of Adasum begin in the host."""
    cluster = replace(clusters.named_cluster("v100", 16, num_processes=2), network_cards=1)
    axis = Axis(DATA, 16)
    shapes = {"w": jax.ShapeDtypeStruct((250_000_000,), np.float32)}
    for name in ("bagua_decentralized", "horovod_adasum"):
        exchange = EXCHANGES[name].call(axis, Rule(optax.sgd(0.1), shapes))
        seconds = [GpuMachine(cluster).collective(one, {DATA: 16, STAGE: 1}) for one in exchange.traffic(shapes, 1)]
        over_network = [one for one in seconds if one > 0.1]
        assert over_network == pytest.approx([1e9 / (0.8 * 6.25e9)], rel=1e-3), name
    assert len(seconds) == 4
    # In groups of a host, each GPU sends an eighth of the weights to the other host, or a quarter of that, twice.
    for name, share in (("bagua_decentralized", 1.0), ("bagua_low_precision_decentralized", 2 / 4)):
        exchange = EXCHANGES[name].call(axis, Rule(optax.sgd(0.1), shapes), group=8)
        [sent] = [one for one in exchange.traffic(shapes, 1) if one.kind == "collective-permute"]
        in_groups = GpuMachine(cluster).collective(sent, {DATA: 16, STAGE: 1})
        assert in_groups == pytest.approx(share * 1e9 / (8 * 0.8 * 6.25e9), rel=1e-2), name
    assert partners(range(8), 2) == [(i, i ^ 2) for i in range(8)]


def test_all_to_all_sends_most_of_its_bytes_over_the_network() -> None:
    """A GPU sends 8 of the 15 shards of others on two hosts to the other one, and no GPU of its host helps it."""
    for group, others in ((range(16), 8 / 15), ((0, 8), 1)):
        seconds = collective_seconds(H100, "all-to-all", [group], 1e9, 0)
        assert seconds == pytest.approx(others * 1e9 / (0.8 * 50e9))


def test_groups_within_a_host_do_not_cross_the_network() -> None:
    axes = {DATA: 16, STAGE: 1}
    within = Traffic("all-gather", "float32", DATA, 1e9, 7, members=tuple(range(8)))
    between = Traffic("all-reduce", "float32", DATA, 1e9, 2, members=(0, 8))
    assert GPUS.collective(within, axes) == pytest.approx(1e9 / HOST + 7 * HOP_SECONDS["host"])
    assert GPUS.collective(between, axes) == pytest.approx(1e9 / NETWORK + 2 * HOP_SECONDS["network"])


def test_devices_that_share_cores() -> None:
    """Two cores: four devices take twice as long as one, unless one of them has more to do than all others."""
    machine = CpuMachine(
        H100, {1: 1.0, 2: 1.0, 4: 2.0}, {1: 1e-9, 4: 4e-9}, {"all-reduce": {2: (1e-3, 1e-9)}}, 0, {1: 0}
    )
    seconds = np.array([[1.0, 1, 1, 1], [3.0, 0, 0, 0], [2.0, 2, 0, 0], [9.0, 1, 0, 0], [0, 0, 0, 0]])
    assert machine.together(seconds).tolist() == [2.0, 3.0, 2.0, 9.0, 0.0]
    assert machine.moved(1e9, 2) == pytest.approx(2.0)
    sent = Traffic("all-reduce", "float32", DATA, 1e6, 2)
    assert machine.collective(sent, {DATA: 2, STAGE: 1}) == pytest.approx(1e-3 + 1e-3)


def test_exposed_communication() -> None:
    """Gradients are hidden behind the backward pass, unless a scan returns them all at its end."""
    axes, cluster = {DATA: 8, STAGE: 1}, GpuMachine(clusters.named_cluster("h100", 8))

    def exposed(first_weights: float, num_messages: int, *, is_scanned: bool = False) -> float:
        layers = [layer(0.01)._replace(weight_bytes=weights) for weights in (first_weights, *(1.0,) * 9)]
        sent = [Traffic("all-reduce", "float32", DATA, 0.1 * HOST, 14 * num_messages)]
        return costs_of_replicas(layers, cluster, axes, sent, scan_layers=is_scanned).exposed

    assert exposed(1.0, 10) == pytest.approx(0.01, rel=0.01)  # that of the first layer
    assert exposed(9.0, 10) == pytest.approx(0.05, rel=0.01)  # which has half of the weights
    assert exposed(1.0, 2) == pytest.approx(0.05, rel=0.01)  # or of the message that contains them
    assert exposed(1.0, 10, is_scanned=True) == pytest.approx(0.1 - 0.02, rel=0.2)


@pytest.mark.parametrize(
    ("gather", "exposed", "once"),
    [(0.15, 0.0075 + 0.005, 0.05 + 0.005), (0.3, 0.05 + 0.005, 0.2 + 0.005), (0.5, 0.15 + 0.1, 0.4 + 0.005)],
)
def test_exposed_gathers(gather: float, exposed: float, once: float) -> None:
    """The forward pass of 100 ms hides half of the gathers, and the backward pass of 200 ms the rest and reductions.

    Nothing hides those of the first of ten layers. once: what is exposed if all are sent for the forward pass.
    """
    axes, cluster = {DATA: 8, STAGE: 1}, GpuMachine(clusters.named_cluster("h100", 8))
    layers = [layer(0.01)._replace(weight_bytes=1.0)] * 10
    sent = [
        Traffic("all-gather", "float32", DATA, gather * HOST, 0),
        Traffic("reduce-scatter", "float32", DATA, 0.05 * HOST, 70),
    ]
    costs = costs_of_replicas(layers, cluster, axes, sent, gathers_layers=True)
    assert costs.exposed == pytest.approx(exposed, rel=0.01)
    whole = costs_of_replicas(layers, cluster, axes, sent, gathers_whole=True)
    assert whole.exposed == pytest.approx(once, rel=0.01)
    before_a_loop = costs_of_replicas(layers, cluster, axes, sent, gathers_whole=True, sent_alone=["all-gather"])
    assert before_a_loop.exposed == pytest.approx(gather + 0.005, rel=0.01)


@pytest.mark.parametrize(("gather", "exposed"), [(0.0, 0.2), (0.12, 0.03 + 0.22), (0.4, 0.1 + 0.36)])
def test_collectives_within_actions(gather: float, exposed: float) -> None:
    """Each action hides those of all layers but the last one backward; stage 0 has half of its weights in that one.

    It computes for 120 ms forward and 240 ms backward, and scatters gradients for 400 ms, after a half of the gathers.
    """
    table, axes = make_table("1f1b", num_devices=2, num_microbatches=4, num_chunks=1), {DATA: 4, STAGE: 2}
    layers = [layer(0.01)._replace(weight_bytes=weights) for weights in (2.0, 1.0, 1.0, 1.0, 1.0, 1.0)]
    sent = [Traffic("all-gather", "float32", DATA, gather * HOST, 0)]
    sent += [Traffic("reduce-scatter", "float32", DATA, 0.4 * HOST, 0)]
    step = PipelineStep(work_of(layers), GPUS, axes, table, (0, 3, 6), [])
    actions = action_costs(step, DISPATCH)
    given = (step._replace(traffic=sent), actions, [NO_STATE] * 2, NOT_PACKED, 0.0)
    within = pipeline_costs(*given, ("reduce-scatter", "all-gather"))
    assert within.exposed - actions.exposed == pytest.approx(exposed, rel=0.01)
    after = pipeline_costs(*given, ("reduce-scatter",))  # the gather follows the actions
    assert after.exposed - actions.exposed == pytest.approx(gather + 0.2, rel=0.01)


@pytest.mark.parametrize(("params", "longer"), [(124_439_808, 0.0350), (1_235_814_400, 0.347)])
def test_an_offloaded_state_is_copied_there_and_back(params: int, longer: float) -> None:
    """The copies take as long as they did for GPT-2 124M and Llama 1B on an H200 (docs/results/gpu/offload.md)."""
    machine, axes, layers = GpuMachine(clusters.named_cluster("h200", 1)), {DATA: 1, STAGE: 1}, [layer(0.01)]
    kept, offloaded = (
        costs_of_replicas(layers, machine, axes, [], StateBytes(1e9, optimizer, 1e9), update)
        for optimizer, update in ((8.0 * params, UpdateWork(0, 1e9)), (0.0, UpdateWork(0, 1e9, 8 * params)))
    )
    assert offloaded.exposed == pytest.approx(longer, rel=0.05)
    assert offloaded.seconds - kept.seconds == pytest.approx(offloaded.exposed)


def test_an_offloaded_state_is_on_the_device_during_the_update() -> None:
    """A copy of 8 GB and gradients of 4 GB, with 4 GB of parameters. Layers that hold nothing need only gradients."""
    machine, axes, state = GpuMachine(clusters.named_cluster("h200", 1)), {DATA: 1, STAGE: 1}, StateBytes(4e9, 0, 4e9)
    update = UpdateWork(0, 1e9, 8e9, held=12e9)
    assert costs_of_replicas([layer(0.01)], machine, axes, [], state, update).nbytes == 16e9


def test_offload_is_compared_on_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A GPT of 1.1 billion parameters needs 19 GB on one device, more than JAX takes of an L4."""
    model = ("num_layers=26", "hidden_size=1792", "num_heads=16", "remat=full")
    flags = [f"--config.{value}" for value in ("data.source=synthetic", "batch_size=8", *(f"model.{x}" for x in model))]
    assert run_script(monkeypatch, command, "--config=configs/gpt.py:gpt2", *flags, "--cluster=l4:1", "--json") == 0
    ranked = [one for one in json.loads(capsys.readouterr().out) if one["ranked"]]
    assert {one["name"].partition(", remat")[0] for one in ranked if one["fits"]} == {
        "zero2, offload",
        "zero3, offload",
    }
    assert "single" in {one["name"].partition(",")[0] for one in ranked}


def test_an_offloaded_config_is_compared_with_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only `strategy=auto` keeps offload."""
    offloaded = ("--config.exchange=zero2", "--config.exchange_options.offload=True", "--cluster=h100:2")

    def planned(*flags: str) -> dict[str, float]:
        assert run_script(monkeypatch, command, *PERCEPTRON, *offloaded, *flags, "--json") == 0
        return {one["name"]: one["seconds"] for one in json.loads(capsys.readouterr().out) if one["ranked"]}

    every = planned("--config.strategy=data_parallel")
    assert every["zero2"] < every["zero2, offload"]
    assert every["zero3"] < every["zero3, offload"]
    assert set(planned("--config.strategy=auto")) == {"zero2, offload"}


def test_xla_combines_all_reduces() -> None:
    """Eight replicas send 7/4 of the bytes: those of 50 arrays of 3 MiB in five messages, and a larger array alone."""
    sent = Traffic("all-reduce", "float32", DATA, 50 * 3 * 2**20 * 7 / 4, 50 * 14)
    assert combined(sent, 8) == sent._replace(messages=5 * 14)
    large = Traffic("all-reduce", "float32", DATA, 2**30 * 7 / 4, 14)
    assert combined(large, 8) == large


def test_steps_add_up() -> None:
    state = StateBytes(1e9, 2e9, 1e9)
    layers, update = [layer(0.01, stash=5e8)], UpdateWork(1e9, 8e9)
    costs = costs_of_replicas(layers, GPUS, {DATA: 16, STAGE: 1}, [], state, update, accumulation=4)
    assert costs.compute == pytest.approx(4 * (0.03 + GPUS.moved(3e9, 1)))
    assert costs.update == pytest.approx(GPUS.moved(9e9, 1))
    assert costs.overheads() == pytest.approx(
        {"waiting": 0, "exposed": 0, "packing": GPUS.moved(1e9, 1), "update": GPUS.moved(8e9, 1)}
    )
    assert costs.seconds == pytest.approx(costs.compute + costs.update)
    table = make_table("1f1b", num_devices=2, num_microbatches=4, num_chunks=1)
    layers = [layer(0.01, output=HOST * 1e-3)] * 4
    axes = {DATA: 8, STAGE: 2}
    piped = costs_of_pipeline(work_of(layers), GPUS, axes, table, (0, 2, 4), [])
    assert piped.compute == pytest.approx(4 * 2 * 0.03)
    total = piped.compute + piped.waiting + piped.exposed + piped.update
    assert piped.seconds == pytest.approx(total)
    assert piped.exposed == pytest.approx(sending_clocks(table) * (1e-3 + HOP_SECONDS["host"]))


def test_lockstep_copies_stashes() -> None:
    """F writes two stashes, B reads one and writes another, and W reads two and adds gradients to those before.

    A kernel writes or adds each array; half of those that are read are copied first.
    """
    layers = [layer(0.01)._replace(weight_bytes=1e9)] * 2
    stashes = {"bfloat16": 1e6}, {"bfloat16": 2e6, "float32": 1e6}, {"float32": 4e6}
    work = work_of(layers, [LayerMemory(0, 0, stashes, num_weights=5, num_saved=(2, 3, 4))] * 2)
    apart, lockstep = (stage_times(work, (0, 1, 2), GPUS, 2, executor) for executor in (DISPATCH, LOCKSTEP))
    added = GPUS.moved(3e9, 1) + GPUS.launched(5)
    assert np.array(apart) == pytest.approx(np.array([[0.01] * 2, [0.01] * 2, [0.01 + added] * 2]))
    each = zip((4e6, 8e6, 7e6), (2 + 3, 4 + 2 / 2, (3 + 4) / 2), strict=True)
    copied = [[GPUS.moved(2 * nbytes, 1) + GPUS.launched(number)] * 2 for nbytes, number in each]
    assert np.array(lockstep) - np.array(apart) == pytest.approx(np.array(copied))


def test_the_gradient_of_a_lookup_is_scattered_to_where_it_is_added() -> None:
    lookup = LayerMemory(0, 0, num_weights=2, is_lookup=True)
    work = work_of([layer(0.01)._replace(weight_bytes=1e9)] * 2, [lookup, LayerMemory(0, 0, num_weights=4)])
    apart, lockstep = (stage_times(work, (0, 1, 2), GPUS, 2, executor) for executor in (DISPATCH, LOCKSTEP))
    added = [GPUS.moved(3e9, 1) + GPUS.launched(number) for number in (2, 4)]
    assert apart.weight == pytest.approx([0.01, 0.01 + added[1]])
    assert lockstep.weight == pytest.approx([0.01 + nbytes for nbytes in added])  # to a vector with other arrays


@pytest.mark.parametrize(("name", "is_lookup"), [("bert", True), ("mlp", False)])
def test_lookups_have_no_products(name: str, is_lookup: bool) -> None:
    """Both have inputs of integers, but the first layer of an mlp multiplies the pixels of images."""
    config = configs.load_config("configs/quickstart.py" if name == "bert" else "configs/default.py")
    config.model.name, config.data.source = name, "synthetic"
    loaded = build.load_parts(config, Path("runs/none"), H100)
    found = [of.is_lookup for of in TracedLayers(loaded.problem, H100).memory(4, "none", is_split=False)]
    assert found == [is_lookup, *[False] * (len(found) - 1)]


def test_arrays_of_a_layer_are_counted() -> None:
    case = cases.Case(8, 16, 512, (*cases.GPT, "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2"))
    layers = TracedLayers(cases.make_problem(cases.configured(case, ()), case, H100), H100)
    for is_split, spans in ((False, [(0, 1)]), (True, [(0, 1), (0, 2), (1, 2)])):
        programs = LayerPrograms(
            layers.problem, resized(layers.problem.batch, 8), remat="none", num_phases=2 + is_split
        )
        saved = [programs.programs.programs[number].cut.saved for number in programs.numbers]
        found = layers.memory(8, "none", is_split=is_split)
        assert [of.num_saved for of in found] == [tuple(len(of.get(span, [])) for span in spans) for of in saved]
        assert [of.num_weights for of in found] == [2, 16, 16, 3]  # of the head, one is the embedding


def test_an_update_launches_kernels_for_each_array() -> None:
    table = make_table("1f1b", num_devices=2, num_microbatches=4, num_chunks=1)
    work = work_of([layer(0.01)] * 2, [LayerMemory(0, 0, num_weights=number) for number in (3, 5)])
    costs = costs_of_pipeline(work, GPUS, {DATA: 8, STAGE: 2}, table, (0, 1, 2), [], executor=DISPATCH)
    assert costs.update == pytest.approx(GPUS.launched(5 * STAGE_UPDATE_KERNELS))


def test_with_remat_f_of_the_last_stage_is_part_of_b() -> None:
    work = work_of([layer(0.01)] * 3)._replace(remat="full")
    flush, none = (stage_times(work, (0, 1, 3), GPUS, 2, DISPATCH, has_flush=x) for x in (True, False))
    assert (flush.forward, none.forward) == ([0.01, 0.0], [0.01, 0.02])
    assert flush[1:] == none[1:]


def test_narrow_weights_are_not_cast_in_each_action() -> None:
    """Without a flush, weights change within a step. The gradient of a looped loss is computed with the loss."""
    memory = [LayerMemory(0, 1e9), LayerMemory(0, 1e9, looped=1.0)]
    work = work_of([layer(0.01)] * 2, memory)
    table = make_table("1f1b", num_devices=2, num_microbatches=4, num_chunks=1)
    cast, uncast = (np.array(stage_times(work, (0, 1, 2), GPUS, 2, DISPATCH, has_flush=x)) for x in (False, True))
    once = GPUS.moved(3e9, 1)
    assert cast - uncast == pytest.approx(np.array([[once, once], [once, 0], [0, 0]]))
    case = work, GPUS, {DATA: 8, STAGE: 2}, table, (0, 1, 2), list[Traffic]()
    assert costs_of_pipeline(*case, executor=DISPATCH).update == pytest.approx(once)
    assert costs_of_pipeline(*case, executor=LOCKSTEP).update == 0
    assert not narrows(DISPATCH, has_flush=False)


def test_lockstep_packs_gradients() -> None:
    table = make_table("1f1b", num_devices=2, num_microbatches=4, num_chunks=1)
    held = StateBytes(0.0, 0.0, 1e9)
    case = work_of([layer(0.01)] * 2), GPUS, {DATA: 8, STAGE: 2}, table, (0, 1, 2), list[Traffic]()
    lockstep, apart = (costs_of_pipeline(*case, executor=one, state=held) for one in (LOCKSTEP, DISPATCH))
    assert (lockstep.packing, lockstep.update) == (GPUS.moved(PACKING * 1e9, 1),) * 2
    assert lockstep.seconds == pytest.approx(sum(lockstep.overheads().values()) + lockstep.compute)
    assert apart.packing == apart.update == 0


def test_stashes_have_a_vector_for_each_dtype() -> None:
    """Each is as long as the stage needs that saves most in its dtype. With remat full, a stage saves its input."""
    saved = {"bfloat16": 8.0}, {"bfloat16": 2.0}, {"float32": 5.0}
    memory = [LayerMemory(0, 0, (of_layer,)) for of_layer in saved]
    spans, table = [(0, 2), (2, 3)], make_table("gpipe", num_devices=2, num_microbatches=4, num_chunks=1)
    assert stash_bytes(work_of([layer(0.01)] * 3, memory), table, spans) == 4 * (10 + 5)
    assert stash_bytes(work_of([layer(0.01)] * 3, memory, "full"), table, spans) == 4 * (8 + 5)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v"])
def test_dispatched_stashes_are_as_large_as_their_stages(schedule: str) -> None:
    """A device with two stages needs at most what its microbatches have saved at the same time, each for its stage."""
    table, sizes = make_table(schedule, num_devices=2, num_microbatches=4, num_chunks=2), [1.0, 2.0, 4.0, 8.0]
    layers, axes = [layer(0.01)] * 4, (0, 1, 2, 3, 4)
    stashes = [(({"float32": size},) + ({},) * 2) if splits_backward(table) else ({"float32": size},) for size in sizes]
    work = work_of(layers, [LayerMemory(0, 0, of_layer) for of_layer in stashes])
    found, _ = pipeline_bytes(work, table, axes, [NO_STATE] * 2, NOT_PACKED, in_lockstep=False)
    most = 0.0
    for device in range(2):
        held = dict[tuple[int, int], float]()
        for action in table.actions[table.actions["device"] == device]:
            key = int(action["stage"]), int(action["microbatch"])
            if action["kind"] == F:
                held[key] = sizes[key[0]]
                most = max(most, sum(held.values()))
            elif action["kind"] != W:
                del held[key]
    assert found == most < 8 * peak_in_flight(table).max()


def test_the_loss_is_not_computed_again() -> None:
    """With rematerialization, the layers before it take longer."""

    class Rematerialized(GivenLayers):
        def profile(self, _size: int, remat: str) -> list[LayerProfile]:
            return [layer(0.01, 0.02 if remat == "none" else 0.03)] * 4

    model: Any = SimpleNamespace(runs=[range(0, 4)])
    settings = dict(zip(REPLICA_KEYS, (1, "full", False), strict=True))
    layers, axes = Rematerialized([layer(0.01)] * 4), {DATA: 1, STAGE: 1}
    costs = replicas_costs(layers, model, GPUS, axes, 1, settings, [], NO_STATE, NO_UPDATE)
    assert costs.compute == pytest.approx(3 * 0.04 + 0.03)


@pytest.mark.parametrize(
    ("schedule", "remat"), [("1f1b", "full"), ("gpipe", "none"), ("zb_v", "none"), ("zb_h1", "full"), ("zb_v", "full")]
)
def test_stashes_are_those_of_the_engine(schedule: str, remat: str, bert: Space) -> None:
    """The engine allocates what the planner predicts from the layers alone.

    B of a first stage saves what it computes again of the embedding, which it does not compute for the embedding alone.
    """
    space = bert
    settings = {"strategy": "pipeline", "mesh.data": 4, "mesh.stage": 2, "pipeline.num_microbatches": 4}
    plan = plan_of(space, {**settings, "pipeline.schedule": schedule, "pipeline.remat": remat})
    assert not isinstance(plan, str), plan
    table, bounds = plan.details.table, plan.details.stages.bounds
    work = space.layers.work(16, remat, is_split=splits_backward(table))
    assert stash_bytes(work, table, list(itertools.pairwise(bounds))) == pytest.approx(
        plan.memory[0]["stashes"], rel=0.06 if (schedule, remat) == ("zb_h1", "full") else 0.01
    )


def test_copies_in_the_dtype_of_the_computation() -> None:
    """Linear maps of bfloat16 models read narrow copies of their kernels and biases; norms read float32."""
    config = configs.default_config()
    settings = ("dtype=bfloat16", "num_layers=1", "hidden_size=32", "num_heads=2", "mlp_size=64")
    configs.override(config, [f"--config.model.{value}" for value in settings])
    _, block, _ = Layers(small_problem(config, H100))._narrowed()
    assert block == 2 * (4 * (32 * 32 + 32) + (32 * 64 + 64) + (64 * 32 + 32))
    config.model.dtype = "float32"
    assert Layers(small_problem(config, H100))._narrowed() == [0.0] * 3


def test_what_a_stage_works_with() -> None:
    """One layer and its gradient, or the loop of a loss; in lockstep or with rematerialization, all that it saves.

    The gradients of the scores of attention come on top with rematerialization. In lockstep, only the stage that is
    computed has narrow weights.
    """
    layers = [layer(0.01, output=0.5)._replace(weight_bytes=weights) for weights in (3.0, 5.0, 4.0)]
    memory = [LayerMemory(computed, narrowed=2.0) for computed in (10.0, 1.0, 7.0)]
    looping = [*memory[:2], memory[2]._replace(looped=40.0)]
    together = 5 + 10 + 1
    scores = [memory[0]._replace(score_gradients=20.0), *memory[1:]]
    rows = (
        (memory, "none", 3 + 10, together),
        (looping, "none", 40, 40),
        (looping, "full", together, together),
        (scores, "none", 3 + 20, 3 + 20),
        (scores, "full", together + 20, together + 20),
    )
    for of, remat, *expected in rows:
        work, spans = work_of(layers, of, remat), [(0, 2), (2, 3)]
        apart, lockstep = (working_bytes(work, spans, in_lockstep=in_lockstep) - 0.5 for in_lockstep in (False, True))
        assert [apart - 3 * 2.0, lockstep - 2 * 2.0] == expected


@pytest.mark.parametrize(
    ("table", "packed", "copied"),
    [
        (FLUSHED, NOT_PACKED, 2),  # the largest layer is apart
        # 5 of parameters and 10 of moments are new. Apart: the largest layer, and the moments of the other 3 of 5.
        (FLUSHED, PackedBytes(5.0, 10.0), 5 + 10 + 2 + 3 * 2),
        (FLUSHED, PackedBytes(1.0, 2.0), 1 + 2 + 2),  # no vector is larger than the largest layer
        # zero1: the stacked shards of the gradients; those that a replica gets, and its part of the largest layer.
        (FLUSHED, PackedBytes(5.0, 2.5, 4), 3 + (3 + 2) / 4),
        (NEVER_DRAINED, PackedBytes(5.0, 10.0), 5 + 10 + 2 + 3 * 3),  # three more copies of what has gradients
    ],
)
def test_the_update_of_a_pipeline(table: Table, packed: PackedBytes, copied: float) -> None:
    """The update needs more than the activations of these layers."""
    layers = [layer(0.01)._replace(weight_bytes=weights) for weights in (2.0, 1.0, 1.0, 1.0)]
    axes, bounds, state, work = {DATA: 8, STAGE: 2}, (0, 2, 4), StateBytes(3, 6, 3), work_of(layers)
    lockstep, apart = (
        costs_of_pipeline(work, GPUS, axes, table, bounds, [], packed=packed, state=state, executor=executor).nbytes
        for executor in (LOCKSTEP, DISPATCH)
    )
    assert lockstep == 3 + 6 + 3 + copied
    assert apart == 3 + 6 + 3 + 2  # nothing is packed


@needs_plugin
def test_the_update_of_compiled_pipelines() -> None:
    """Planned bytes are at most 5% below those of the programs, and 10% above."""
    done = run(["-m", "tests.absent_updates"])
    assert done.returncode == 0, done.stderr
    ratios = json.loads(done.stdout)
    assert list(ratios) == ["ddp", "zero1"]
    assert all(0.95 < ratio < 1.1 for ratio in ratios.values()), ratios


@pytest.fixture(scope="module")
def bert() -> Space:
    """BERT with 2 layers on 8 H100s."""
    config, cluster = configs.default_config(), clusters.named_cluster("h100", 8)
    settings = ("model.num_layers=2", "model.hidden_size=768", "model.num_heads=12", "batch_size=256")
    configs.override(config, [f"--config.{value}" for value in (*settings, "pipeline.executor=lockstep")])
    problem = small_problem(config, cluster)
    return Space(config, problem, TracedLayers(problem, cluster), GpuMachine(cluster), 1e12)


@pytest.fixture(scope="module")
def space() -> Space:
    """A perceptron of 8 layers on 8 H100s whose memory does not hold everything. Transformers take longer to trace."""
    config, cluster = configs.default_config(), clusters.named_cluster("h100", 8)
    settings = ("model.name=mlp", "model.num_layers=6", "model.hidden_size=8192", "batch_size=64")
    configs.override(config, [f"--config.{value}" for value in (*settings, "pipeline.executor=lockstep")])
    batch = {
        "inputs": jax.ShapeDtypeStruct((64, 64), np.float32),
        "labels": jax.ShapeDtypeStruct((64,), np.int32),
        "weights": jax.ShapeDtypeStruct((64,), np.float32),
        "index": jax.ShapeDtypeStruct((64,), np.int32),
    }
    problem = problem_of(config, DataInfo("vector", (64,), 10, tuple("0123456789"), 0, 0), batch, cluster)
    return Space(config, problem, TracedLayers(problem, cluster), GpuMachine(cluster), USABLE)


def small_problem(config: ConfigDict, cluster: Cluster) -> Problem:
    """Return the problem of classifying 256 texts of 64 tokens."""
    info = DataInfo("text", (64,), 10, tuple("0123456789"), 8000, 0)
    dtypes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "inputs": (np.int32, (256, 64)),
        "mask": (np.bool_, (256, 64)),
        "labels": (np.int32, (256,)),
        "weights": (np.float32, (256,)),
        "index": (np.int32, (256,)),
    }
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (dtype, shape) in dtypes.items()}
    return problem_of(config, info, batch, cluster)


def problem_of(config: ConfigDict, info: DataInfo, batch: dict[str, Any], cluster: Cluster) -> Problem:
    adamw = optimizer.make_optimizer(config, optimizer.build_learning_rate(config, 100))
    return Problem(models.build(config, info, cluster), adamw, 1, batch, 100, tasks.find_task(config))


@pytest.fixture(scope="module")
def found(space: Space) -> list[Candidate]:
    return planner.candidates(space)


def test_divisors() -> None:
    assert divisors(27) == [1, 3, 9, 27]
    assert len(divisors(5040)) == MOST_DIVISORS
    assert {1, 5040} <= set(divisors(5040))


def test_equal_tables_are_one_candidate(found: list[Candidate]) -> None:
    """With one microbatch, for example, all schedules with a fused backward pass are the same."""
    tables: dict[tuple[Any, ...], list[bytes]] = {}
    for one in (one for one in found if one.settings["strategy"] == "pipeline"):
        stages, number, chunks = (
            one.settings[key] for key in ("mesh.stage", "pipeline.num_microbatches", "pipeline.num_chunks")
        )
        sizes = {"num_devices": stages, "num_microbatches": number, "num_chunks": chunks}
        table = make_table(one.settings["pipeline.schedule"], **sizes)
        key = (stages, number, one.settings["pipeline.remat"], one.settings["exchange"])
        tables.setdefault(key, []).append(table.stages.tobytes() + table.actions.tobytes())
    assert len(tables) > 10
    assert all(len(of_sizes) == len(set(of_sizes)) for of_sizes in tables.values())
    assert len(tables[2, 1, "none", "ddp"]) < len(tables[2, 8, "none", "ddp"])


def test_fewer_microbatches_than_stages_if_they_are_kept(space: Space) -> None:
    kept = {"mesh.stage": 8, "pipeline.num_microbatches": 1}
    assert planner.candidates(space._replace(kept=kept))
    assert not [
        one
        for one in planner.candidates(space._replace(kept={"mesh.stage": 8}))
        if one.settings["pipeline.num_microbatches"] == 1
    ]


def test_options_of_the_user(space: Space) -> None:
    """An option counts for the exchanges that have it; with strategy auto, the others are not compared."""
    config = copy.deepcopy(space.config)
    config.exchange_options.algorithm = "psum"
    given, key = space._replace(config=config), "exchange_options.algorithm"
    by_exchange = {one.settings.get("exchange"): one.settings[key] for one in planner.candidates(given)}
    assert by_exchange["ddp"] == by_exchange["horovod"] == "psum"
    assert by_exchange["zero1"] is None
    kept = planner.candidates(given._replace(kept={key: "psum"}))
    assert "ddp" in {one.settings.get("exchange") for one in kept}
    assert "zero1" not in {one.settings.get("exchange") for one in kept}


def test_options_that_no_candidate_has(space: Space) -> None:
    """Lossy options are not ranked, and groups must divide the replicas."""
    config = copy.deepcopy(space.config)
    config.exchange_options.wire_dtype, config.exchange_options.group = "bfloat16", 4
    for one in planner.candidates(space._replace(config=config, kept={"model.remat": "none"})):
        assert one.settings["exchange_options.wire_dtype"] is None
        group = one.settings["exchange_options.group"]
        assert group is None or one.settings["mesh.data"] % group == 0, one.name


def test_values_that_are_kept(space: Space) -> None:
    for key, value in (("data_parallel.implementation", "shard_map"), ("exchange_options.group", 4)):
        config = copy.deepcopy(space.config)
        config.update_from_flattened_dict({key: value})
        found = planner.candidates(space._replace(config=config, kept={key: value}))
        assert {one.settings[key] for one in found} == {value}, key


def test_the_fastest_that_fits_is_first(space: Space, found: list[Candidate]) -> None:
    fitting = [one for one in found if one.fits]
    assert 10 < len(fitting) < len(found)
    assert all(one.costs.nbytes <= space.usable_bytes for one in fitting)
    assert all(one.costs.nbytes > space.usable_bytes for one in found if not one.fits)
    assert found[0] == min(fitting, key=lambda one: one.costs.seconds)
    # Replicas accumulate as few microbatches as fit, or the most.
    steps = {(one.fits, one.settings.get("optimizer.accumulation_steps")) for one in found}
    assert steps == {(True, 1), (False, 8), (True, None), (False, None)}
    of_state = {one.settings.get("optimizer.accumulation_steps"): one.costs.state for one in found}
    assert of_state[1].gradients == 0 < of_state[8].gradients  # which are added up
    names = {one.name for one in found}
    assert {"ddp", "zero1", "zero2", "zero3", "1f1b, 4 stages x 2 replicas", "zb_h1, 8 stages"} <= names
    assert {one.settings["exchange"] for one in found if one.settings["strategy"] == "pipeline"} == {"ddp", "zero1"}
    assert not {"onebit_adam", "bagua_bytegrad"} & names  # they do not equal training on one device


def test_candidates_are_planned_as_predicted(space: Space, found: list[Candidate]) -> None:
    """The plan of a candidate's settings has the costs that were predicted without it."""
    one_f1b = "1f1b, 4 stages x 2 replicas"
    wanted = ("zero2", "zero3", one_f1b, f"{one_f1b}, zero1", "interleaved_1f1b, 2 stages x 4 replicas")
    each = {one.name: one for one in reversed(found)}
    for name in wanted:
        config = with_settings(space.config, each[name].settings)
        plan = strategies.possible(config, space.problem, space.machine.cluster)
        assert not isinstance(plan, str), plan
        again = planner.candidate_of_plan(space, config, plan)
        assert again.costs.seconds == pytest.approx(each[name].costs.seconds, rel=0.03), name
        assert again.costs.nbytes == pytest.approx(each[name].costs.nbytes, rel=0.1), name
        assert again.name == name
        held = max(plan.memory, key=lambda parts: sum(parts.values()))
        assert again.costs.state[:2] == (held["parameters"], held["optimizer"]), name
        assert sum(again.costs.state) < again.costs.nbytes, name
    same = {**each[one_f1b].settings, "exchange": "zero1"}
    [sharded] = [one for one in found if one.settings == same]
    plan = strategies.plan(with_settings(space.config, each[one_f1b].settings), space.problem, space.machine.cluster)
    halves = max(parts["optimizer"] for parts in plan.memory) / 2
    # It holds half of the moments, and where the update needs most, copies of half of their vectors.
    assert halves <= each[one_f1b].costs.nbytes - sharded.costs.nbytes <= 2 * halves


def test_pipelines_shard_more_if_less_does_not_fit(space: Space) -> None:
    """Exchanges that send in each action need a dispatched pipeline, and their plans have the predicted costs."""
    config = with_values(space.config, {"pipeline.executor": "auto"})
    kept = {"mesh.stage": 2, "mesh.data": 4, "pipeline.schedule": "1f1b", "pipeline.num_microbatches": 4}
    kept |= {"pipeline.remat": "none"}

    def fitting(usable: float) -> dict[str, Candidate]:
        alone = space._replace(config=config, kept=kept, usable_bytes=usable)
        return {one.settings["exchange"]: one for one in of_pipelines(alone)}

    every = fitting(0.0)
    assert list(every) == ["ddp", "zero1", "zero2", "zero3"]
    needed = {name: one.costs.nbytes for name, one in every.items()}
    assert needed["zero3"] < needed["zero2"] < needed["zero1"] < needed["ddp"]
    largest = 4 * 8192 * 8193
    shards = (needed["zero1"] - (needed["zero2"] - largest)) * 4 / 3  # zero2 packs the gradient of the largest layer
    assert shards == pytest.approx(3 * largest, rel=0.01)  # of a stage
    gradients = {name: one.costs.state.gradients for name, one in every.items()}
    assert gradients["zero3"] == gradients["zero2"] == gradients["zero1"] / 4 + largest
    assert list(fitting(needed["zero1"])) == ["ddp", "zero1"]
    assert list(fitting(needed["zero2"])) == ["ddp", "zero1", "zero2"]
    for name in ("zero2", "zero3"):
        assert every[name].settings["pipeline.executor"] == "dispatch"
        own = with_settings(config, every[name].settings)
        again = planner.candidate_of_plan(space, own, strategies.plan(own, space.problem, space.machine.cluster))
        assert again.costs.seconds == pytest.approx(every[name].costs.seconds, rel=0.05), name
        assert again.costs.nbytes == pytest.approx(every[name].costs.nbytes, rel=0.01), name
        assert again.name == every[name].name


def test_a_config_with_some_of_the_devices(space: Space) -> None:
    settings = {"strategy": "pipeline", "mesh.data": 2, "mesh.stage": 2, "pipeline.num_microbatches": 4}
    config = with_settings(space.config, {**settings, "pipeline.schedule": "1f1b"})
    found = planner.candidate_of_plan(space, config, strategies.plan(config, space.problem, space.machine.cluster))
    assert found.name == "1f1b, 2 stages x 2 replicas on 4 of 8 devices"


def test_copies_of_tied_arrays_are_counted() -> None:
    """The last stage of a GPT holds a copy of the embeddings, here most of the memory."""
    cluster, case = clusters.named_cluster("h100", 8), cases.Case(16, 8, 9000, (*cases.GPT, "model.num_layers=2"))
    config = cases.configured(case, (*cases.PIPELINE, "pipeline.schedule=1f1b"))
    problem = cases.make_problem(config, case, cluster)
    kept = {"mesh.stage": 2, "mesh.data": 4, "pipeline.schedule": "1f1b", "pipeline.num_microbatches": 4}
    layers = TracedLayers(problem, cluster)
    kept |= {"pipeline.remat": "none", "exchange": "ddp"}
    space = Space(config, problem, layers, GpuMachine(cluster), 1e12, kept)
    [one] = of_pipelines(space)
    planned = planner.candidate_of_plan(space, config, strategies.plan(config, problem, cluster))
    assert one.costs.nbytes == pytest.approx(planned.costs.nbytes, rel=0.01)


@pytest.mark.parametrize(
    ("executor", "tokens", "words", "least"),
    [(DISPATCH, 8, 2000, 1.0), (DISPATCH, 256, 200, 1.0), (LOCKSTEP, 8, 2000, 1.5), (LOCKSTEP, 256, 200, 1.2)],
)
def test_pipedream_needs_what_is_in_flight(executor: str, tokens: int, words: int, least: float) -> None:
    """The executor counts earlier versions, most of the memory with many words, and stashes, most with many tokens.

    In lockstep, an update copies what it changes, or an action works with a copy of what it reads.
    """
    cluster, case = clusters.named_cluster("h100", 2), cases.Case(8, tokens, words, (*cases.GPT, *SMALL_GPT))
    settings = "strategy=pipeline", "mesh.stage=2", "pipeline.schedule=pipedream", f"pipeline.executor={executor}"
    config = cases.configured(case, (*settings, "pipeline.num_microbatches=1"))
    problem = cases.make_problem(config, case, cluster)
    plan = strategies.plan(config, problem, cluster)
    space = Space(config, problem, TracedLayers(problem, cluster), GpuMachine(cluster), 1e12)
    counted = max(sum(parts.values()) for parts in plan.memory)
    assert least < planner.candidate_of_plan(space, config, plan).costs.nbytes / counted < least + 0.35


def test_b_computes_the_passes_of_f_again_with_remat() -> None:
    """A product is as fast in both; passes move as much, and take as many kernels, as in F."""
    case = cases.Case(8, 512, 512, (*cases.GPT, "model.num_layers=3", "model.hidden_size=64", "model.num_heads=2"))
    layers = TracedLayers(cases.make_problem(cases.configured(case, ()), case, H100), H100)
    none, full = (layers.seconds(8, remat) for remat in ("none", "full"))
    assert full[1][1] == pytest.approx(sum(none[1]), rel=0.15)
    assert sum(full[-1]) == pytest.approx(sum(none[-1]), rel=0.05)  # F of the loss is part of B


def test_a_config_of_the_user_needs_what_the_same_candidate_needs() -> None:
    cluster, case = clusters.named_cluster("h100", 8), cases.Case(64, 16, 512, ("model.size=tiny",))
    problem = cases.make_problem(cases.configured(case, ()), case, cluster)
    layers = TracedLayers(problem, cluster)
    kept = {"model.remat": "none", "model.scan_layers": "auto"}
    for name in ("ddp", "zero1", "zero3"):
        config = cases.configured(case, cases.CONFIGS[name])
        space = Space(config, problem, layers, GpuMachine(cluster), 1e12, {**kept, "exchange": name})
        own = planner.candidate_of_plan(space, config, strategies.plan(config, problem, cluster))
        assert own.costs.nbytes in [one.costs.nbytes for one in of_replicas(space)]


def test_a_run_with_accumulation_is_priced() -> None:
    """In float32, one pass has no explicit exchange to trace, and two have one."""
    cluster, case = clusters.named_cluster("h100", 8), cases.Case(64, 16, 512, ("model.size=tiny",))
    config = cases.configured(case, cases.CONFIGS["ddp, 2 microbatches"])
    problem = cases.make_problem(cases.configured(case, ()), case, cluster)
    space = Space(config, problem, TracedLayers(problem, cluster), GpuMachine(cluster), 1e12, {})
    plan = strategies.plan(config, cases.make_problem(config, case, cluster), cluster)
    assert planner.candidate_of_plan(space, config, plan).costs.packing > 0


def test_time_and_memory_follow_the_sizes(bert: Space) -> None:
    space = bert
    for remat in ("none", "full"):
        few, many = (space.layers.profile(size, remat) for size in (8, 64))
        assert all(a.forward_s <= b.forward_s for a, b in zip(few, many, strict=True))
    none, full = (space.layers.profile(64, remat) for remat in ("none", "full"))
    assert sum(one.stash_bytes for one in full) < 0.2 * sum(one.stash_bytes for one in none)
    assert sum(one.backward_s for one in full) > 1.3 * sum(one.backward_s for one in none)


def test_rematerialization_saves_memory_only_in_a_scan(bert: Space) -> None:
    """A compiled step of BERT base that rematerializes needs 3.1 GB with a scan, and 6.6 GB without (8.3 GB alone)."""
    kept = {"exchange": "ddp", "mesh.data": bert.num_devices, "optimizer.accumulation_steps": 1}

    def nbytes_of(**settings: Any) -> float:
        [found] = list(of_replicas(bert._replace(kept={**kept, **settings})))
        return found.costs.nbytes

    scanned, unrolled = ({"model.scan_layers": scan, "model.remat": "full"} for scan in (True, False))
    assert nbytes_of(**scanned) < 0.8 * nbytes_of(**unrolled)
    assert nbytes_of(**unrolled) == nbytes_of(**{"model.scan_layers": False, "model.remat": "none"})
    for one in of_replicas(bert._replace(kept=kept)):
        assert one.settings["model.scan_layers"] == "auto"


def test_sizes_equal_those_of_traced_layers() -> None:
    """Only two sizes are traced, and the last layer of others: here, its loss of many tokens is computed in chunks."""
    case = cases.Case(64, 128, 50304, (*cases.GPT, "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2"))
    problem = cases.make_problem(cases.configured(case, ()), case, H100)
    sizes = TracedLayers(problem, H100)
    for size, remat in ((1, "none"), (64, "dots")):
        microbatch = resized(problem.batch, size)
        fused, split = (LayerPrograms(problem, microbatch, remat=remat, num_phases=number) for number in (2, 3))
        found, of_split = sizes.profile(size, remat), sizes.memory(size, remat, is_split=True)
        for number, layer, of in zip(fused.numbers, found, of_split, strict=True):
            program = fused.programs.programs[number]
            assert layer.output_bytes == nbytes(program.y)
            assert layer.stash_bytes == nbytes(program.cut.saved.get((0, 1), []))
            saved = split.programs.programs[number].cut.saved
            of_spans = [nbytes(saved.get(span, [])) for span in ((0, 1), (0, 2), (1, 2))]
            assert [sum(stash.values()) for stash in of.stashes] == of_spans


def test_the_loss_of_each_number_of_texts_is_traced() -> None:
    """A loss has at most 32 chunks, so that the bytes of sums of gradients are not linear in the texts."""
    size = ("model.num_layers=1", "model.hidden_size=2048", "model.num_heads=16")
    case = cases.Case(8, 4096, 128256, (*cases.GPT, *size))
    layers = TracedLayers(cases.make_problem(cases.configured(case, ()), case, H100), H100)
    alone, four = (sum(layers.seconds(size, "none")[-1]) for size in (1, 4))
    assert 0.2 * four < alone < 0.35 * four


def test_a_lookup_launches_one_kernel() -> None:
    """The embedding of a few texts looks up tokens and positions; other layers fuse its passes."""
    case = cases.Case(8, 16, 512, (*cases.GPT, "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2"))
    layers = TracedLayers(cases.make_problem(cases.configured(case, ()), case, H100), H100)
    forward, _ = layers.seconds(1, "none")[0]
    assert forward == pytest.approx(2 * LAUNCH_SECONDS, rel=0.02)


def test_config_file(found: list[Candidate], tmp_path: Path) -> None:
    """The file that is written can be loaded, and selects the candidate."""
    best = next(one for one in found if "stages" in one.name)
    path = tmp_path / "best.py"
    path.write_text(report.config_file("configs/quickstart.py", ["--config.batch_size=128"], best, "h100:8"))
    config = configs.load_config(str(path))
    flat = configs.keys(config)
    assert {key: flat[key] for key in best.settings} == best.settings
    assert flat["batch_size"] == 128
    assert flat["num_epochs"] == 2.0  # that of the quickstart


def test_explanations(found: list[Candidate]) -> None:
    work = report.StepWork(256, 256 * 64, 1e15, 8e15, 0.7e9)
    best = found[0]
    assert re.match(
        rf"{best.name} computes \d+% of the time, and .* takes .*; it needs .* of 700 MB",
        report.explain(best, best, work),
    )
    slower = next(one for one in found if one.fits and one.costs.seconds > 1.5 * best.costs.seconds)
    ratio = slower.costs.seconds / best.costs.seconds - 1
    assert f"takes {ratio:.1%} longer" in report.explain(slower, best, work)
    assert "does not fit" in report.explain(found[-1], best, work)
    assert [report.format_rate(rate) for rate in (1234.5, 99.96, 3.514)] == ["1,234", "100", "3.51"]
    each = report.best_of_each(found)
    heading, *lines = report.rows(each, work)
    assert heading.split()[3:7] == ["waits", "sends", "updates", "memory"]
    shares = [re.findall(r"([\d.]+)%", line)[2] for line in lines]
    assert shares == [f"{100 * one.costs.update / one.costs.seconds:.1f}" for one in each]


def test_the_cause_of_a_slow_step() -> None:
    """Packing is not the update, although it is priced with it; and a slow network is named."""
    work = report.StepWork(256, 0, 1e9, 8e12, 2e9)
    best = Candidate("zero3", {}, StepCosts(1.0, 0.9, 0.0, 0.05, 0.05, 1e9), fits=True)
    other = Candidate("zero2", {}, StepCosts(1.3, 0.9, 0.0, 0.06, 0.34, 1e9, packing=0.29), fits=True)
    cause = "copying gradients and parameters into and out of messages takes 290 ms instead of 0 ms"
    assert report.explain(other, best, work) == f"zero2 takes 30.0% longer: {cause}; it needs 1 GB of 2 GB."
    assert report.explain(best, best, work).endswith("takes 5.0%; it needs 1 GB of 2 GB.")
    slow = best._replace(costs=StepCosts(2.0, 0.9, 0.0, 1.05, 0.05, 1e9))
    assert report.explain(slow, slow, work).endswith("faster links would help more than faster GPUs.")
    copied = slow._replace(settings={OFFLOAD: True})
    assert report.explain(copied, copied, work).endswith("than computing: GPUs with more memory would help.")
    assert report.rows([best], work)[1].split()[4] == "0.000125"  # 1e9 / 8e12


CLUSTER = 'gpu = "v100"\nhosts = 2\ngpus_per_host = 4\n[host]\nbandwidth = 1e11\nlatency = 1e-6\n'
NETWORK_LINK = "[network]\nbandwidth = 1e9\nlatency = 1e-5\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CLUSTER.replace("hosts = 2", "hosts = 0"), "hosts is 0; it must be an integer of at least 1"),
        ("network_cards = 5\n" + CLUSTER + NETWORK_LINK, "network_cards is 5; it must be at most 4, gpus_per_host"),
        (CLUSTER.replace('"v100"', '"v10"'), "gpu is 'v10'; it must be one of"),
        (CLUSTER.replace("latency = 1e-6", ""), "host is {'bandwidth': 100000000000.0}; it must be a table with"),
        (CLUSTER.replace("hosts", "host_s", 1), "host_s is not a key; it must be one of"),
        (CLUSTER + NETWORK_LINK.replace("1e9", "true"), "network: bandwidth is True; it must be a number"),
        (CLUSTER + NETWORK_LINK + "[peak_flops]\nint8 = 1e12\n", "peak_flops is {'int8': 1000000000000.0}; it must be"),
        (CLUSTER.replace("hosts = 2", "hosts = 20_000"), "hosts x gpus_per_host is 80,000; it must be at most 65,536"),
        ("gpu = ", "which is not TOML"),
        (f"gpu = {'[' * 5000}{']' * 5000}", "which is not TOML (maximum recursion depth exceeded"),
        (CLUSTER.replace("gpu =", "Gpu ="), "cluster.toml: Gpu is not a key; it must be one of gpu, hosts, "),
        (CLUSTER.replace("gpu =", "GPU ="), "source. Did you mean 'gpu'?"),
        ("", "cluster.toml: gpu is missing; it must be one of a100-40gb, "),
        ("hosts = 1\ngpus_per_host = 8\n", "cluster.toml: gpu is missing; it must be one of a100-40gb, "),
        (CLUSTER.replace("hosts = 2", ""), "cluster.toml: hosts is missing; it must be an integer of at least 1"),
        ('gpu = "v100"\nhosts = 1\n', "cluster.toml: gpus_per_host is missing; it must be an integer of at least 1"),
        (CLUSTER.replace("v100", "../gpu.toml"), ": '../gpu.toml' is a path; it must be a regular file of this folder"),
        ("memory_bytes = 1\n", "cluster.toml has no table xla"),  # may be the file of a kind of GPU
    ],
)
def test_invalid_clusters(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(content)
    with pytest.raises(UserError, match=re.escape(message)):
        clusters_of(str(path))


def test_a_cluster_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which is a directory; it must be the path of a TOML file"):
        jaxpar.cluster.gpus.read_toml(tmp_path, "--cluster")


def clusters_of(text: str) -> Cluster:
    return find_named(text, "--cluster")[1]


def test_a_gpu_without_links(tmp_path: Path) -> None:
    """The links of a kind of GPU can be unknown; then a cluster file must have those that it needs."""
    gpu = (Path(jaxpar.cluster.gpus.__file__).parent / "t4.toml").read_text().partition("[links]")[0]
    (tmp_path / "gpu.toml").write_text(gpu)
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.replace("v100", "gpu.toml"))
    with pytest.raises(UserError, match="has no table network; it must have one with bandwidth and latency"):
        clusters_of(str(path))


def test_clusters(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("network_cards = 2\n" + CLUSTER + NETWORK_LINK + "[peak_flops]\nfloat32 = 1e13\n")
    cluster = clusters_of(str(path))
    assert (cluster.num_devices, cluster.num_processes) == (8, 2)
    assert (cluster.send_rates, cluster.network_cards) == ({"host": 1e11, "network": 1e9}, 2)
    assert cluster.latencies == {"host": 1e-6, "network": 1e-5}
    assert cluster.peak_flops["float32"] == 1e13
    assert clusters_of("h100:2x8") == H100
    assert clusters_of("elsewhere/8xa100.toml").num_devices == 8  # like configs
    shipped = sorted((configs.config_folder() / "clusters").glob("*.toml"))
    assert len(shipped) >= 5
    assert all(clusters_of(str(each)).num_devices > 1 for each in shipped)
    assert clusters_of("configs/clusters/8xv100_nvlink.toml").memory_bytes == 16e9  # not the 32 GB of the other model


def test_what_would_make_the_own_config_faster(space: Space) -> None:
    """The settings in which the fastest candidate of the same strategy differs are named, with its time."""
    work = report.work_of(space)
    costs = StepCosts(1.0, 1.0, 0.0, 0.0, 0.0, 1e9)
    best = Candidate("zero2", {"model.scan_layers": False}, costs, fits=True)
    fast = best._replace(name="ddp", costs=costs._replace(seconds=1.1, compute=1.1))
    own = Candidate("ddp", {"model.scan_layers": "auto", "model.remat": "none"}, costs._replace(seconds=1.5), fits=True)
    told = report.explain_own(own, best, work, [best, fast])
    assert told.endswith("With config.model.scan_layers=False, it takes 10.0% longer.")
    assert "ddp takes 50.0% longer" in told
    assert "With" not in report.explain_own(fast, best, work, [best, fast])


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The table, the JSON, and the config file that can be trained."""
    out = tmp_path / "best.py"
    assert run_script(monkeypatch, command, *PERCEPTRON, "--cluster=h100:4", f"--out={out}") == 0
    printed = capsys.readouterr().out
    assert re.search(r"^mlp of size tiny, .*layers .*\n4 x NVIDIA H100 80GB HBM3: \d+ candidates in", printed)
    assert "Your config: " in printed
    assert "Without stages" not in printed
    assert "tensor cores" not in printed
    assert re.search(r"^ .* [mu]?s +[\d,]+ +\d\.\d\d +\d .*  async, 4 workers$", printed, re.MULTILINE)
    config = configs.load_config(str(out))
    assert config.mesh.data * config.mesh.stage == 4
    odd = ("--config.batch_size=6", "--config.exchange_options.bucket_bytes=1000", "--config.model.dtype=bfloat16")
    priced = tmp_path / "priced.toml"
    priced.write_text("price_per_hour = 2.5\n" + (configs.config_folder() / "clusters/8xv100_nvlink.toml").read_text())
    assert run_script(monkeypatch, command, *PERCEPTRON, *odd, f"--cluster={priced}") == 0
    of_v100s = capsys.readouterr().out
    [rate] = re.findall(r"^ 1 +\S+ \S+ +([\d,]+) ", of_v100s, re.MULTILINE)  # examples/s
    [price] = re.findall(
        r"^The cluster costs 20 an hour; with the first one, a million examples cost (\S+)\.$", of_v100s, re.MULTILINE
    )
    assert float(price) == pytest.approx(20 / 3600 * 1e6 / float(rate.replace(",", "")), rel=0.01)
    assert "\n8 x v100 with 16 GB: " in of_v100s
    advice = "no tensor cores; products are up to 8 times as fast with config.model.dtype='float16'.\n"  # 125 / 15.7
    assert advice in of_v100s
    no_replicas = "No strategy without stages is possible: config.batch_size is 6, which is not a multiple of 8."
    assert f"\n{no_replicas}\n" in of_v100s
    assert "must be 'ddp' without options" not in of_v100s  # the options do not count for workers and peers


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON has the candidates of `jaxpar.plan`, and then the strategies that are not ranked."""
    assert run_script(monkeypatch, command, *PERCEPTRON, "--cluster=h100:2", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    ranked = [one for one in listed if one["ranked"]]
    config = configs.load_config(PERCEPTRON[0].removeprefix("--config="))
    configs.override(config, PERCEPTRON[1:])
    before = config.to_json_best_effort()
    of_python = jaxpar.plan(config, "h100:2")
    assert [one.costs.seconds for one in of_python] == [one["seconds"] for one in ranked]
    assert of_python[0].fits
    assert config.to_json_best_effort() == before
    assert listed[0]["seconds"] == min(one["seconds"] for one in ranked if one["fits"])
    unranked = [one["name"].split(",")[0] for one in listed[len(ranked) :]]
    assert unranked == ["async", "ssp with bound 3", "swarm", "swarm"]


def test_runs_that_continue_without_a_lost_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only exchanges that leave the whole state on every replica are possible, and devices hold two states."""
    flags = (*PERCEPTRON, "--config.strategy=data_parallel", "--cluster=h100:2x2")
    elastic = "--config.elastic_seconds=5"

    def needed(*more: str) -> dict[str, int]:
        assert run_script(monkeypatch, command, *flags, *more, "--json") == 0
        return {one["name"]: one["bytes"] for one in json.loads(capsys.readouterr().out) if one["ranked"]}

    before, after = needed(), needed(elastic)
    assert set(after) == {"ddp", "horovod", "byteps"}
    assert run_script(monkeypatch, command, *flags, elastic) == 0
    of_two_hosts = capsys.readouterr().out
    assert "\n  --config.mesh.data=-1\n" in of_two_hosts
    [size] = re.findall(r"^config.elastic_seconds: (\S+) kB of the memory are", of_two_hosts, re.MULTILINE)
    for name, needs in after.items():
        assert needs - before[name] == pytest.approx(1e3 * float(size), rel=0.01)
    assert run_script(monkeypatch, command, *flags, elastic, "--cluster=h100:2") == 0
    assert f"each device also keeps the state before a step, {size} kB." in capsys.readouterr().out
    assert run_script(monkeypatch, command, *flags, elastic, "--cluster=h100:3") == 2
    message = "config.batch_size is 8; it must be a multiple of the 3 devices for the planner, with config.elastic"
    assert message in capsys.readouterr().err


def test_a_missing_cudnn_is_found_before_the_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_target", lambda *_: Target(H100, [], 70e9, 50e9))
    monkeypatch.setattr(planning, "cluster_of", lambda *_: H100)
    monkeypatch.setattr(planner, "find_candidates", lambda _: pytest.fail("it searched"))
    bert = "--config=configs/quickstart.py", "--config.data.source=synthetic", "--config.model.dtype=bfloat16"
    cudnn = "--config.model.attention=cudnn", "--config.model.hidden_size=256", "--config.model.num_heads=4"
    assert run_script(monkeypatch, command, *bert, *cudnn, "--cluster=h100:2x8", "--verify=1") == 2
    assert "config.model.attention selects cuDNN attention, but cuDNN is not installed" in capsys.readouterr().err


def test_compiled_candidates_are_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that does not fit according to the compiler comes after those that fit. The one written was compiled."""
    compiled: list[Candidate] = []

    def compile_one(one: Candidate, space: Space, target: Any) -> Any:
        assert (target.usable_bytes, space.usable_bytes) == (50e9, 50e9)
        compiled.append(one)
        needed = 2 * space.usable_bytes if len(compiled) < 3 else one.costs.nbytes
        fits = needed <= space.usable_bytes
        return planning.Verified(one, one._replace(costs=one.costs._replace(nbytes=needed), fits=fits), 0.5)

    monkeypatch.setattr(planning, "_compiled", compile_one)
    monkeypatch.setattr(command, "find_target", lambda *_: Target(H100, [], 70e9, 50e9))
    monkeypatch.setattr(planning, "cluster_of", lambda *_: H100)
    out, config = tmp_path / "best.py", (*PERCEPTRON, "--config.batch_size=16")
    assert run_script(monkeypatch, command, *config, "--cluster=h100:2x8", "--verify=1", f"--out={out}", "--json") == 0
    captured = capsys.readouterr()
    listed = json.loads(captured.out)
    lines = [line for line in captured.err.splitlines() if line.startswith("compiling")]
    assert [line[:16] for line in lines] == ["compiling 1 of 1", "compiling 2 of 2", "compiling 3 of 3"]
    assert listed[0]["fits"]
    assert listed[0]["settings"] == report.changes(compiled[2].settings)
    assert [one["bytes"] for one in listed if not one["fits"]] == [2 * 50e9] * 2
    assert configs.keys(configs.load_config(str(out)))["exchange"] == listed[0]["settings"].get("exchange", "ddp")


def test_compiled_candidates_have_the_order_of_their_programs(found: list[Candidate]) -> None:
    """Candidates that were not compiled, do not fit or have no time keep their places."""
    first, second, third, fourth, fifth, *others = found

    def compiled(one: Candidate, seconds: float | None, *, fits: bool = True) -> planning.Verified:
        return planning.Verified(one, one if fits else one._replace(fits=False), seconds)

    too_large = compiled(fourth, 0.1, fits=False)
    listed = [first, second, third, too_large.corrected, fifth, *others]
    times = [compiled(first, 3.0), compiled(second, None), compiled(third, 2.0), too_large, compiled(fifth, 1.0)]
    ordered = planning.by_programs(listed, times)
    assert ordered == [fifth, second, third, too_large.corrected, first, *others]
    faster = first._replace(costs=first.costs._replace(seconds=0.9 * fifth.costs.seconds))
    text = report.explain(faster, fifth, report.StepWork(64, 64, 1e9, 8e12, 1e12))
    assert f"{first.name} is predicted to take 10.0% less; it needs " in text


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(planning, "cluster_of", lambda *_: replace(H100, memory_bytes=1000))
    config = (*PERCEPTRON, "--config.batch_size=16")
    out, message = script_error(monkeypatch, capsys, command, *config, "--cluster=h100:2x8")
    assert out.startswith("mlp of size tiny, but config.model has hidden_size=16 (not 128), layers embed .. ")
    assert message.startswith("--cluster is 'h100:2x8', but nothing fits on it; it must have more devices or memory: ")
    end = "JAX takes 750 B of the 1 kB of a GPU (XLA_CLIENT_MEM_FRACTION=0.75); a larger fraction gives a run more."
    assert message.endswith(f"{end}\n")


def test_a_state_that_is_too_large_for_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """8e9 parameters with Adam's moments in float32 need 96 GB; no batch size is to blame."""
    small = ("--config.data.source=synthetic", "--config.data.synthetic_examples=64", "--config.batch_size=8")
    config = ("--config=configs/gpt.py:llama_8b", *small)
    _, message = script_error(monkeypatch, capsys, command, *config, "--cluster=h100:1")
    assert message.startswith("config.strategy is 'single', which needs 96.4 GB on device 0 (parameters 32.1 GB, ")


def test_steps_without_a_predicted_time(found: list[Candidate]) -> None:
    """The time of `dp` is that of the planner alone: its programs lack the copies between devices."""
    one = next(one for one in found if one.name == "dp")
    line = str(planning.Verified(one, one, None))
    assert line.endswith(f"; not predicted from programs (predicted {one.costs.seconds * 1e3:.3g} ms)")
    assert str(planning.Verified(one, one, 0.25)).endswith(f"; 250 ms (predicted {one.costs.seconds * 1e3:.3g} ms)")


def test_the_path_of_a_config_is_absolute(
    found: list[Candidate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config file that loads one of the user works in every folder."""
    (tmp_path / "mine.py").write_text((configs.config_folder() / "quickstart.py").read_text())
    monkeypatch.chdir(tmp_path)
    Path("best.py").write_text(report.config_file("mine.py", [], found[0], "h100:8"))
    monkeypatch.chdir("/")
    assert configs.load_config(str(tmp_path / "best.py")).num_epochs == 2.0


@pytest.mark.parametrize("n", [2, 3, 5])
def test_collectives_that_are_measured_can_be_divided(n: int) -> None:
    shapes = [shape for name, (_, shape) in calibrate._programs(n).items() if " " in name]
    assert len(shapes) == 8
    assert all(size % n == 0 for (size,) in shapes)


def test_measured_layers_add_up_to_the_whole_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: each call takes 2 s for 8 examples and 1 s for 2, of which 0.5 s are the start of a program.

    The 5 layers of 8 examples add up to 5 x 2 x 1.5 s = 15 s, and the gradient takes 24.5 - 0.5 s, so all times are
    scaled by 1.6. With 4 examples, a layer is a third of the way between 0.8 and 2.4 s.
    """
    task = Task("mlp", "classification", layers=3)
    problem, batch = make_problem(make_config(task), task), make_batch(task, 0)

    def of_calls(calls: dict[Any, Any], rounds: int) -> dict[Any, float]:
        assert rounds == 1
        jax.block_until_ready([call() for call in calls.values()])
        return {name: 24.5 if name == "all" else 2.0 if name[0] else 1.0 for name in calls}

    monkeypatch.setattr(calibrate, "seconds_in_turn", of_calls)
    layers = calibrate.MeasuredLayers(problem, batch, (2, 8), repeats=1, started=0.5)
    of_eight, of_four = layers.profile(8, "none"), layers.profile(4, "none")
    assert len(of_eight) == 5
    for few, many in zip(of_four, of_eight, strict=True):
        assert (many.forward_s, many.backward_s) == pytest.approx((2.4, 2.4))
        assert (few.forward_s, few.backward_s) == pytest.approx((0.8 + 1.6 / 3,) * 2)


MISTAKES = {
    "--cluster=h100:7": "config.batch_size is 8; on 7 devices it must be",
    "--config.strategy=foo": "config.strategy is 'foo'; it must be one of single, data_parallel",
    "--out=configs/default.py": "--out is 'configs/default.py'; it must be another file than that of --config",
    "--out=configs.py/x.py": "--out is 'configs.py/x.py'; it must be the path of a .py file in a folder that exists",
    "--cluster=h10:8": "--cluster is 'h10'; it must be one of",
    "--cluster=h100:0": "--cluster is 'h100:0'; it must have between 1 and",
    "--cluster=v100:8,l4:4": "--cluster is 'v100:8,l4:4'; it must be one cluster, unless --train_tokens is set",
    "--cluster=no.toml": "--cluster is 'no.toml', which does not exist",
    "--out=x.txt": "--out is 'x.txt'; it must be the path of a .py file in a folder that exists",
    "--config.model.size=gigantic": "config.model.size is 'gigantic'; it must be tiny",
}


@pytest.mark.parametrize("flag", MISTAKES)
def test_mistakes(flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [flag] if "cluster" in flag else ["--cluster=h100:8", flag]
    assert run_script(monkeypatch, command, *PERCEPTRON, *flags) == 2
    assert MISTAKES[flag] in capsys.readouterr().err


def test_updates(space: Space) -> None:
    """An update of AdamW moves 8 times the bytes of the parameters; ZeRO moves an eighth of some of them."""
    params = nbytes(space.problem.model.shapes)
    whole = updates.update_bytes(space.problem) / params
    assert whole == pytest.approx(2 + 4 + 2, rel=0.01)  # parameters, two moments, gradients and their norm
    of_exchange = {}
    for name in ("ddp", "zero1", "zero3"):
        settings = {"strategy": "data_parallel", "exchange": name}
        plan = plan_of(space, settings)
        assert not isinstance(plan, str)
        moved = update_of(space, with_settings(space.config, settings), plan)
        of_exchange[name] = UpdateWork(moved.exchange / params, moved.update / params)
    assert of_exchange["ddp"][:2] == pytest.approx((0.0, whole))
    assert [of_exchange[name].update for name in ("zero1", "zero3")] == pytest.approx([whole / 8] * 2, rel=0.05)
    # Shards are packed, scattered, gathered and unpacked.
    assert 4 < of_exchange["zero1"].exchange < 9
    assert of_exchange["zero3"].exchange == pytest.approx(of_exchange["zero1"].exchange, rel=0.05)
