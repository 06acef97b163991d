"""config.pipeline.schedule=auto chooses the schedule that is cheapest in lockstep by the times of the stages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpar import cluster, strategies
from jaxpar.pipeline.executor.programs import StagePrograms
from jaxpar.pipeline.search.layer_profile import LayerProfile, write_profile
from jaxpar.pipeline.tables.schedule import SCHEDULES, make_table
from jaxpar.pipeline.tables.simulate import Times, lockstep
from jaxpar.pipeline.tables.validate import check_table, peak_stashed
from jaxpar.plan import Plan
from jaxpar.step import abstract
from jaxpar.strategies import auto_schedule
from tests.strategies.pipelines import (
    BATCH,
    NUM_MICROBATCHES,
    Task,
    make_batch,
    make_config,
    make_problem,
    outcome,
    pipeline,
    plan_of,
)
from tests.strategies.test_pipeline import assert_equal

TASK = Task("gpt", "causal_lm", "sgd", layers=2)
DEEP = Task("bert", "classification", layers=4)
MLP = Task("mlp", "classification", "sgd", layers=6)


def auto(stages: int, *more: str) -> tuple[str, ...]:
    return pipeline("auto", stages, *more)


def test_equals_single() -> None:
    assert_equal(outcome(TASK, *auto(2)), outcome(TASK))


def programs_of(task: Task, remat: str) -> StagePrograms:
    """Return the F, B and W programs of a pipeline of 4 stages."""
    details, key = plan_of(task, *pipeline("zb_h1", 4)).details, jax.eval_shape(lambda: jax.random.key(0))
    microbatch = abstract(make_batch(task, 0, size=BATCH // NUM_MICROBATCHES))
    return StagePrograms(details.stages, microbatch, key, num_phases=3, remat=remat)


def test_flops_of_dense_layers() -> None:
    """F, B and W of a square layer are one product each; rematerialization adds F to the backward pass.

    The 6 hidden layers of width 16 and 2 examples are in the middle stages; there are 8 layers on 4 devices.
    """
    product = 2 * 2 * 16 * 16
    forward, backward, weight = auto_schedule.flops_of_programs(programs_of(MLP, "none"))
    layers = [time / product for time in forward[1:3]]  # type: ignore[index]
    assert layers == [round(number) for number in layers]
    assert min(layers) >= 1
    assert forward[1:3] == backward[1:3] == weight[1:3]  # type: ignore[index]
    again = auto_schedule.flops_of_programs(programs_of(MLP, "full"))
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
    return plan_of(DEEP, *auto(3, *(f"--config.pipeline.{flag}" for flag in flags)))


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


def plan_with(memory_limit: float, memory_bytes: float | None = None) -> Plan[Any]:
    """Plan 4 stages for GPUs with this memory."""
    config = make_config(DEEP, *auto(4, f"--config.pipeline.memory_limit={memory_limit}"))
    gpus = replace(cluster.named_cluster("H100", 4), memory_bytes=memory_bytes)
    return strategies.plan(config, make_problem(make_config(DEEP), DEEP), gpus)


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
    assert peak(plan_with(1)) == 1


def peak(plan: Plan[Any]) -> int:
    return int(peak_stashed(plan.details.table).max())


def activations(plan: Plan[Any]) -> int:
    return plan.memory[0]["stashes"] + plan.memory[0]["transfers"]


def test_never_slower_in_lockstep_than_a_named_schedule() -> None:
    plan = plan_of(DEEP, *auto(4))
    times = auto_schedule.flops_of_programs(programs_of(DEEP, "none"))
    for name in ("1f1b", "eager_1f1b", "gpipe", "zb_h1", "zb_h2"):
        table = make_table(name, num_devices=4, num_microbatches=NUM_MICROBATCHES, num_chunks=1)
        if peak_stashed(table).max() <= 7:
            assert lockstep(plan.details.table, times) <= lockstep(table, times) * (1 + 1e-9)


def test_the_choice_does_not_depend_on_a_file_of_this_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "auto").write_text("clock,device,kind,microbatch,chunk\n")
    monkeypatch.chdir(tmp_path)
    assert plan_of(TASK, *auto(2)).summary.startswith("auto (")
    assert "auto" not in SCHEDULES
