"""config.pipeline.schedule=auto chooses the schedule that is cheapest for the executor by the times of the stages."""

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar import cluster, strategies
from jaxpar.choose import stages
from jaxpar.choose.costs.layers import Layers
from jaxpar.choose.costs.machine import machine_of
from jaxpar.choose.costs.pipeline_steps import actions_seconds
from jaxpar.choose.costs.profile import LayerProfile, write_profile
from jaxpar.choose.costs.rates import EFFICIENCY
from jaxpar.choose.search.lockstep_search import search_lockstep
from jaxpar.cluster import Cluster
from jaxpar.config import default_config
from jaxpar.core.plan import Plan
from jaxpar.core.step import Problem
from jaxpar.errors import UserError
from jaxpar.strategies import Strategy
from jaxpar.strategies.pipeline.schedules import EXECUTORS
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, make_table
from jaxpar.strategies.pipeline.tables.simulate import Times, lockstep, simulate_table
from jaxpar.strategies.pipeline.tables.table import Table, W
from jaxpar.strategies.pipeline.tables.validate import check_table, peak_stashed
from tests.strategies.pipelines import (
    BATCH,
    NUM_MICROBATCHES,
    Task,
    advance,
    make_config,
    make_problem,
    outcome,
    pipeline,
    plan_of,
    plan_on,
    shared,
    start,
)
from tests.strategies.test_pipeline import assert_equal

DEEP = Task("bert", "classification", "sgd", layers=4)
MLP = Task("mlp", "classification", "sgd", layers=6)
SPLIT = ("zb_h1", "zb_h2")
PEAK = 1e6  # FLOP/s, so that the host never waits


def auto(stages: int, *more: str) -> tuple[str, ...]:
    return pipeline("auto", stages, *more)


def gpus(number: int, memory_bytes: float | None = None) -> Cluster:
    """Return GPUs on which only matrix products take time."""
    known = cluster.named_cluster("H100", number)
    return replace(
        known,
        memory_bytes=memory_bytes,
        peak_flops=dict.fromkeys(("float32", "bfloat16"), PEAK),
        memory_bandwidth=1e30,
        launch_seconds=0.0,
        send_rates={"host": 1e30},
        latencies={"host": 0.0},
    )


@functools.cache
def problem_of(task: Task) -> Problem:
    """Return the problem of a task, whose stages are traced once for all plans."""
    return make_problem(make_config(task), task)


def plan_for(there: Cluster, task: Task, *overrides: str) -> Plan[Any]:
    return plan_on(make_config(task, *overrides), problem_of(task), there)


@pytest.fixture(autouse=True)
def _trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace the layers of a task once for each cluster."""
    monkeypatch.setattr(stages, "layers_of", traced)


LAYERS: dict[Any, Any] = {}
LAYERS_OF = stages.layers_of


def traced(problem: Problem, there: Cluster, profile: Any) -> Layers:
    key = str(problem.model.shapes), str(replace(there, memory_bytes=None)), str(profile)
    if key not in LAYERS:
        LAYERS[key] = LAYERS_OF(problem, there, profile)
    layers: Layers = LAYERS[key]
    return layers


def has_split_backward(plan: Plan[Any]) -> bool:
    return bool((plan.details.table.actions["kind"] == W).any())


def build_split(task: Task, *overrides: str) -> Strategy[Any]:
    """Build on CPU devices what is planned for GPUs, which do not share their processors."""
    plan = plan_for(gpus(2), task, *overrides)
    assert has_split_backward(plan)
    return strategies.build(plan, make_problem(make_config(task, *overrides), task), jax.devices())


def test_the_executor_that_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the work of a stage on CPU devices, whose actions cost time on the host; by the predicted time on a GPU."""
    assert default_config().pipeline.executor == "auto"
    config = make_config(MLP, *pipeline("1f1b", 2), "--config.pipeline.executor=auto")
    on_gpus, cpus = gpus(2), cluster.find_cluster()

    def executor(there: Cluster) -> str:
        choice = stages.choose_stages(config, problem_of(MLP), there, tmp_path)
        assert choice.reasons[-1].startswith(f"executor {choice.settings['pipeline.executor']}: ")
        return str(choice.settings["pipeline.executor"])

    assert executor(cpus) == "lockstep"
    monkeypatch.setattr(stages, "CPU_FLOPS", 1.0)
    assert executor(cpus) == "dispatch"
    assert executor(on_gpus) == "dispatch"
    assert executor(replace(on_gpus, num_processes=2)) == "lockstep"


def test_the_default_equals_single() -> None:
    """The overrides do not name a schedule."""
    assert default_config().pipeline.schedule == "auto"
    overrides = [text for text in auto(2) if "schedule" not in text]
    assert_equal(outcome(MLP, *overrides), outcome(MLP))


def test_a_split_schedule_continues_a_run_of_1f1b() -> None:
    """A checkpoint of 1f1b after 5 steps continues with separate B and W, and trains like a single device."""
    single = outcome(MLP)
    before = advance(shared(MLP, *pipeline("1f1b", 2)), MLP, start(MLP), last=5)
    after = advance(build_split(MLP, *auto(2)), MLP, before.tree, first=5)
    assert_equal(
        after._replace(
            losses=before.losses + after.losses, norms=before.norms + after.norms, gradients=before.gradients
        ),
        single,
    )


def times_of(
    task: Task,
    there: Cluster | None = None,
    schedule: str = "zb_h1",
    remat: str = "none",
    executor: str = "lockstep",
) -> Times:
    """Return the times of F, B and W by stage of a pipeline of 4 stages."""
    config = make_config(task, *pipeline(schedule, 4, remat=remat))
    problem, there = problem_of(task), there or gpus(4)
    return stages._stages(config, problem, there, stages.layers_of(problem, there, ()), executor).times


def test_seconds_of_dense_layers() -> None:
    """F, B and W of a square layer are one product each; rematerialization adds F to the backward pass.

    The 6 hidden layers of width 16 and 2 examples are in the middle stages; there are 8 layers on 4 devices.
    """
    product = 2 * 2 * 16 * 16 / (EFFICIENCY["float32"] * PEAK)
    forward, backward, weight = (np.array(of_phase) for of_phase in times_of(MLP))
    assert forward[1:3] == pytest.approx(2 * product, rel=0.01)
    assert backward[1:3] == pytest.approx(2 * product, rel=0.01)
    assert weight[1:3] == pytest.approx(2 * product, rel=0.01)
    again = times_of(MLP, remat="full")
    assert again.forward[1:3] == pytest.approx(forward[1:3], rel=0.01)  # type: ignore[index]
    assert again.backward[1] + again.weight[1] > backward[1] + weight[1]  # type: ignore[index]
    fused = times_of(MLP, schedule="1f1b")
    assert np.add(fused.backward, fused.weight)[1:3] == pytest.approx(4 * product, rel=0.01)


def write_times(path: Path, forward: list[float]) -> str:
    """Write a profile with these times of forward passes, and a backward pass of twice the time. Return the flags."""
    names = ("embed", "block_0", "block_1", "block_2", "block_3", "head")
    layers = [LayerProfile(name, time, 2 * time, 0, 0, 0) for name, time in zip(names, forward, strict=True)]
    write_profile(layers, path)
    return str(path)


def profiled(path: str, *more: str) -> Plan[Any]:
    flags = ["partition=auto", f"profile={path}", "bandwidth=1e30", *more]
    return plan_for(gpus(3), DEEP, *auto(3, *(f"--config.pipeline.{flag}" for flag in flags)))


def test_times_of_a_profile(tmp_path: Path) -> None:
    """Stages of embed and block_0, block_1 and block_2, and block_3 and head take 2, 4 and 3 s."""
    plan = profiled(write_times(tmp_path / "profile.json", [1, 1, 2, 2, 1, 2]))
    assert "(cut at block_1, block_3)" in plan.summary
    table, times = plan.details.table, Times([2, 4, 3], [2, 4, 3], [2, 4, 3])
    check_table(table)
    named = [make_table(name, num_devices=3, num_microbatches=8, num_chunks=1) for name in ("1f1b", "zb_h1", "zb_h2")]
    assert lockstep(table, times) < min(lockstep(of, times) for of in named)
    assert lockstep(table, times) >= 2 + 8 * 12  # the second stage waits for the first one, and then works
    assert re.match(r"/.*/schedule\.csv, 8 microbatches, 3 stages", plan.summary)


@functools.cache
def plan_with(memory_limit: float, memory_bytes: float | None = None) -> Plan[Any]:
    """Plan 4 stages for GPUs with this memory."""
    return plan_for(gpus(4, memory_bytes), DEEP, *auto(4, f"--config.pipeline.memory_limit={memory_limit}"))


def test_memory() -> None:
    """The stashes fit. Without a limit they are those of zb_h2 at most, and those of 1f1b if the memory is unknown."""
    state = max(sum(parts.values()) for parts in plan_with(1e12).memory) - activations(plan_with(1e12))
    most = {peak(plan_with(1e12)), peak(plan_with(0, 80e9))}
    assert most <= set(range(5, 8))
    assert peak(plan_with(0)) == 4
    peaks: list[int] = []
    for nbytes in (40_000, 80_000, 160_000):
        plan = plan_with(state + nbytes)
        assert activations(plan) <= nbytes
        peaks.append(peak(plan))
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]
    assert peak(plan_with(least_limit())) == 1


@pytest.mark.parametrize("room", [2, 3])
def test_little_memory(room: int) -> None:
    """With memory for a few microbatches, several are computed at a time, and what JAX takes of the memory suffices.

    A GPU needs the state, its gradients, stashes and transfers, and as much as one microbatch for the backward pass.
    """
    one = plan_with(least_limit())
    assert peak(one) == 1
    state = max(sum(parts.values()) for parts in one.memory) - activations(one)
    gradients = max(parts["parameters"] for parts in one.memory)
    usable = state + gradients + activations(one) * (room + 1)
    plan = plan_with(0, usable / 0.75)
    assert 1 < peak(plan) <= room
    assert state + gradients + activations(plan) * (peak(plan) + 1) / peak(plan) <= usable
    slowest = make_table("model_parallel", num_devices=4, num_microbatches=NUM_MICROBATCHES, num_chunks=1)
    assert lockstep(plan.details.table, times_of(DEEP)) < 0.7 * lockstep(slowest, times_of(DEEP))


def least_limit() -> float:
    """Return the smallest config.pipeline.memory_limit."""
    with pytest.raises(UserError) as raised:
        plan_with(1)
    found = re.search(r"at least ([\d,]+) with", str(raised.value))
    assert found
    return float(found[1].replace(",", ""))


def peak(plan: Plan[Any]) -> int:
    return int(peak_stashed(plan.details.table).max())


def activations(plan: Plan[Any]) -> int:
    return plan.memory[0]["stashes"] + plan.memory[0]["transfers"]


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
def test_never_slower_than_a_named_schedule(executor: str) -> None:
    plan = plan_for(gpus(4, 80e9), DEEP, *auto(4, f"--config.pipeline.executor={executor}"))
    times = times_of(DEEP)

    def cost(table: Table) -> Any:
        return lockstep(table, times) if executor == "lockstep" else simulate_table(table, times).cost

    for name in ("1f1b", "eager_1f1b", "gpipe", "zb_h1", "zb_h2"):
        table = make_table(name, num_devices=4, num_microbatches=NUM_MICROBATCHES, num_chunks=1)
        if peak_stashed(table).max() <= 7:
            assert cost(plan.details.table) <= cost(table) * (1 + 1e-9)


def test_devices_that_share_processors_do_not_split_the_backward_pass() -> None:
    """By hand: on shared processors, both schedules take 8 x 4 x (1 + 1 + 1), and 1f1b is preferred.

    Devices of four processes wait for each other, so a split backward pass is faster.
    """
    split, fused = (make_table(name, num_devices=4, num_microbatches=8, num_chunks=1) for name in ("zb_h1", "1f1b"))
    assert lockstep(split, Times(1, 1, 1), sharing=4) == lockstep(fused, Times(1, 1, 1), sharing=4) == 8 * 4 * 3
    assert lockstep(split, Times(1, 1, 1)) == 3 * 8 + 3
    cpus = cluster.named_cluster("cpu", 4)
    assert plan_for(cpus, DEEP, *auto(4)).summary.startswith("1f1b")
    assert not has_split_backward(plan_for(cpus, DEEP, *auto(4, "--config.pipeline.memory_limit=1e12")))
    times, table = Times([1.0] * 4, [1.0] * 4, [1.0] * 4), split
    seconds = [
        actions_seconds(table, times, 1.0, machine_of(replace(cpus, num_processes=number)))[0] for number in (1, 2, 4)
    ]
    assert seconds == [lockstep(table, Times(1, 1, 1), sharing=sharing) for sharing in (4, 2, 1)]


def test_the_bytes_of_stashes_count() -> None:
    """With separate B and W, what B hands to W is written and read once more, here without the copies of lockstep."""
    slow = replace(gpus(4), memory_bandwidth=1e3)
    fused, split = (times_of(DEEP, slow, schedule, executor="dispatch") for schedule in ("1f1b", "zb_h1"))
    layers = stages.layers_of(problem_of(DEEP), slow, ())
    by_layer = [of.stashes[2] for of in layers.memory(BATCH // NUM_MICROBATCHES, "none", is_split=True)]
    handed = sum(sum(of_layer.values()) for of_layer in by_layer) / (EFFICIENCY["memory"] * 1e3)
    assert handed > 0.01 * np.sum(fused)
    more = np.sum(split) - np.sum(fused)
    assert more == pytest.approx(2 * handed, rel=0.2)  # and both read some gradients that one pass reads once


@pytest.mark.parametrize(
    "there",
    [cluster.named_cluster("cpu", 3), gpus(3), gpus(3, 80e9), gpus(3, 1e6)],
    ids=["cpu", "unknown memory", "80 GB", "1 MB"],
)
def test_replicated_stages(there: Cluster) -> None:
    """Stages can have replicas with the default, on all devices and with too little memory for any schedule."""
    plan = plan_for(there, DEEP, *auto(3, "--config.pipeline.replicas=2,1"))
    table = plan.details.table
    assert table.replicas == (2, 1)
    check_table(table)
    assert not has_split_backward(plan)


@pytest.mark.parametrize(("num_microbatches", "more"), [(1, ()), (1, ("remat=full",)), (2, ()), (2, ("replicas=1,1",))])
def test_few_microbatches(num_microbatches: int, more: tuple[str, ...]) -> None:
    more = tuple(f"--config.pipeline.{one}" for one in more)
    plan = plan_for(gpus(2), MLP, *auto(2, f"--config.pipeline.num_microbatches={num_microbatches}", *more))
    check_table(plan.details.table)
    assert plan.details.table.num_microbatches == num_microbatches


def test_one_stage() -> None:
    """Nothing waits on one device, so the backward pass is fused."""
    assert plan_for(gpus(1, 80e9), MLP, *auto(1)).summary.startswith("1f1b, 8 microbatches, 1 stage")


def test_large_tables_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times([1, 1.3, 1.1, 1.2], [1.2, 1.1, 1.3, 1], [0.9, 1, 1.2, 1.1])
    assert search_lockstep(times, 0, 7, 4, 8, width=0).policy in SPLIT
    monkeypatch.setattr(stages, "LARGEST_SEARCH", 4 * NUM_MICROBATCHES - 1)
    for executor in EXECUTORS:
        plan = plan_for(gpus(4, 80e9), DEEP, *auto(4, f"--config.pipeline.executor={executor}"))
        assert any(plan.summary.startswith(name) for name in SPLIT)


def test_the_choice_does_not_depend_on_a_file_of_this_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "auto").write_text("clock,device,kind,microbatch,chunk\n")
    monkeypatch.chdir(tmp_path)
    assert plan_of(MLP, *auto(2)).summary.startswith("1f1b")
    assert "auto" not in SCHEDULES
