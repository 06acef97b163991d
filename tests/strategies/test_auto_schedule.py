"""config.pipeline.schedule=auto chooses the schedule that is cheapest for the executor by the times of the stages."""

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpar import cluster, strategies
from jaxpar.cluster import Cluster
from jaxpar.config import default_config
from jaxpar.errors import UserError
from jaxpar.pipeline.executor.programs import StagePrograms
from jaxpar.choose.costs.profile import LayerProfile, write_profile
from jaxpar.pipeline.search.lockstep_search import search_lockstep
from jaxpar.pipeline.tables.schedule import SCHEDULES, make_table
from jaxpar.pipeline.tables.simulate import Times, lockstep, simulate_table
from jaxpar.pipeline.tables.table import Table, W
from jaxpar.pipeline.tables.validate import check_table, peak_stashed
from jaxpar.plan import Plan
from jaxpar.step import abstract
from jaxpar.strategies import Strategy, auto_schedule
from jaxpar.strategies.schedules import AUTO_EXECUTOR, EXECUTORS
from tests.strategies.pipelines import (
    BATCH,
    NUM_MICROBATCHES,
    Task,
    advance,
    make_batch,
    make_config,
    make_problem,
    outcome,
    pipeline,
    plan_of,
    shared,
    start,
)
from tests.strategies.test_pipeline import assert_equal

TASK = Task("gpt", "causal_lm", "sgd", layers=2)
DEEP = Task("bert", "classification", layers=4)
MLP = Task("mlp", "classification", "sgd", layers=6)
SPLIT = ("zb_h1", "zb_h2")


def auto(stages: int, *more: str) -> tuple[str, ...]:
    return pipeline("auto", stages, *more)


def gpus(number: int, memory_bytes: float | None = None) -> Cluster:
    """Return H100s whose rates are not known, so that stages have the times of their FLOPs."""
    known = cluster.named_cluster("H100", number)
    return replace(known, memory_bytes=memory_bytes, peak_flops={}, memory_bandwidth=None)


def plan_for(there: Cluster, task: Task, *overrides: str) -> Plan[Any]:
    config = make_config(task, *overrides)
    return strategies.plan(config, make_problem(make_config(task), task), there)


def has_split_backward(plan: Plan[Any]) -> bool:
    return bool((plan.details.table.actions["kind"] == W).any())


def build_split(task: Task, *overrides: str) -> Strategy[Any]:
    """Build on CPU devices what is planned for GPUs, which do not share their processors."""
    plan = plan_for(gpus(2), task, *overrides)
    assert has_split_backward(plan)
    return strategies.build(plan, make_problem(make_config(task, *overrides), task), jax.devices())


def test_the_default_equals_single() -> None:
    """The overrides do not name a schedule."""
    assert default_config().pipeline.schedule == "auto"
    overrides = [text for text in auto(2) if "schedule" not in text]
    assert_equal(outcome(TASK, *overrides), outcome(TASK))


def test_a_split_schedule_continues_a_run_of_1f1b() -> None:
    """A checkpoint of 1f1b after 5 steps continues with separate B and W, and trains like a single device."""
    single = outcome(TASK)
    before = advance(shared(TASK, *pipeline("1f1b", 2)), TASK, start(TASK), last=5)
    after = advance(build_split(TASK, *auto(2)), TASK, before.tree, first=5)
    assert_equal(
        after._replace(
            losses=before.losses + after.losses, norms=before.norms + after.norms, gradients=before.gradients
        ),
        single,
    )


def programs_of(task: Task, remat: str, schedule: str = "zb_h1") -> StagePrograms:
    """Return the programs of a pipeline of 4 stages."""
    details, key = plan_of(task, *pipeline(schedule, 4)).details, jax.eval_shape(lambda: jax.random.key(0))
    microbatch = abstract(make_batch(task, 0, size=BATCH // NUM_MICROBATCHES))
    num_phases = details.lowered.shape.num_phases
    return StagePrograms(details.stages, microbatch, key, num_phases=num_phases, remat=remat)


def times_of(task: Task, remat: str = "none", there: Cluster | None = None, schedule: str = "zb_h1") -> Times:
    return auto_schedule.phase_times(programs_of(task, remat, schedule), there or gpus(4), "float32")


def test_flops_of_dense_layers() -> None:
    """F, B and W of a square layer are one product each; rematerialization adds F to the backward pass.

    The 6 hidden layers of width 16 and 2 examples are in the middle stages; there are 8 layers on 4 devices.
    """
    product = 2 * 2 * 16 * 16
    forward, backward, weight = times_of(MLP)
    layers = [time / product for time in forward[1:3]]  # type: ignore[index]
    assert layers == [round(number) for number in layers]
    assert min(layers) >= 1
    assert forward[1:3] == backward[1:3] == weight[1:3]  # type: ignore[index]
    again = times_of(MLP, "full")
    assert again.forward == forward
    assert again.backward[1] + again.weight[1] > backward[1] + weight[1]  # type: ignore[index]


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
    assert plan.summary.startswith("auto (searched), 8 microbatches, 3 stages")


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


@pytest.mark.parametrize("executor", [*EXECUTORS, AUTO_EXECUTOR])
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
    assert plan_for(cpus, DEEP, *auto(4)).summary.startswith("auto (1f1b)")
    assert not has_split_backward(plan_for(replace(cpus, memory_bytes=1e12), DEEP, *auto(4)))
    assert has_split_backward(plan_for(replace(cpus, num_processes=4), DEEP, *auto(4)))


def test_the_bytes_of_stashes_count() -> None:
    """A phase that moves n bytes and computes f FLOPs takes n / bandwidth + f / peak seconds.

    On devices with slow memory, the additional stashes cost more time than separate B and W save.
    """
    programs = programs_of(DEEP, "none")
    written = {
        key: sum(x.size * x.dtype.itemsize for x in values) for key, values in programs.programs[1].cut.saved.items()
    }
    flops, rated = times_of(DEEP), replace(gpus(4), peak_flops={"float32": 1e6}, memory_bandwidth=1e3)
    forward, backward, weight = (times[1] for times in times_of(DEEP, there=rated))  # type: ignore[index]
    assert forward == pytest.approx(flops.forward[1] / 1e6 + (written[0, 1] + written[0, 2]) / 1e3)  # type: ignore[index]
    assert backward == pytest.approx(flops.backward[1] / 1e6 + sum(written.values()) / 1e3)  # type: ignore[index]
    assert weight == pytest.approx(flops.weight[1] / 1e6 + (written[0, 2] + written[1, 2]) / 1e3)  # type: ignore[index]
    plans = [plan_for(replace(rated, memory_bandwidth=rate), DEEP, *auto(4)) for rate in (1e3, 1e12)]
    assert [has_split_backward(plan) for plan in plans] == [False, True]
    fused = times_of(DEEP, there=rated, schedule="1f1b")
    assert fused.weight == [0.0] * 4
    table = make_table("1f1b", num_devices=4, num_microbatches=8, num_chunks=1)
    assert lockstep(plans[0].details.table, fused) <= lockstep(table, fused)


@pytest.mark.parametrize("there", [cluster.named_cluster("cpu", 3), gpus(3), gpus(3, 80e9), gpus(3, 1e6)], ids=str)
def test_replicated_stages(there: Cluster) -> None:
    """Stages can have replicas with the default, on all devices and with too little memory for any schedule."""
    plan = plan_for(there, DEEP, *auto(3, "--config.pipeline.replicas=2,1"))
    table = plan.details.table
    assert table.replicas == (2, 1)
    check_table(table)
    assert not has_split_backward(plan)


@pytest.mark.parametrize("more", [(), ("--config.pipeline.replicas=1,1",), ("--config.pipeline.remat=full",)])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_few_microbatches(more: tuple[str, ...], num_microbatches: int) -> None:
    plan = plan_for(gpus(2), TASK, *auto(2, f"--config.pipeline.num_microbatches={num_microbatches}", *more))
    check_table(plan.details.table)
    assert plan.details.table.num_microbatches == num_microbatches


def test_one_stage() -> None:
    """Nothing waits on one device, so the backward pass is fused."""
    assert plan_for(gpus(1, 80e9), TASK, *auto(1)).summary.startswith("auto (1f1b), 8 microbatches, 1 stage")


def test_large_tables_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times([1, 1.3, 1.1, 1.2], [1.2, 1.1, 1.3, 1], [0.9, 1, 1.2, 1.1])
    assert search_lockstep(times, 0, 7, 4, 8, width=0).policy in SPLIT
    monkeypatch.setattr(auto_schedule, "LARGEST_SEARCH", 4 * NUM_MICROBATCHES - 1)
    for executor in EXECUTORS:
        plan = plan_for(gpus(4, 80e9), DEEP, *auto(4, f"--config.pipeline.executor={executor}"))
        assert any(plan.summary.startswith(f"auto ({name})") for name in SPLIT)


def test_the_choice_does_not_depend_on_a_file_of_this_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "auto").write_text("clock,device,kind,microbatch,chunk\n")
    monkeypatch.chdir(tmp_path)
    assert plan_of(TASK, *auto(2)).summary.startswith("auto (1f1b)")
    assert "auto" not in SCHEDULES
