"""Pipelines whose stages are dispatched as programs of their own train like one device, and like lock step."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxpar.choose import stages
from jaxpar.cluster import Cluster, named_cluster
from jaxpar.core.state import nbytes
from jaxpar.errors import UserError
from jaxpar.exchange.exchange import AllReduce
from jaxpar.inspect import audit
from jaxpar.layout import LeafLayout
from jaxpar.strategies import exchanges
from jaxpar.strategies.pipeline.executor.dispatch import dispatch_order
from jaxpar.strategies.pipeline.executor.dispatch_costs import activation_memory, num_calls
from jaxpar.strategies.pipeline.executor.engine import PipelineEngine
from jaxpar.strategies.pipeline.executor.enqueue import ENQUEUE_SECONDS
from jaxpar.strategies.pipeline.strategy import abstract_microbatches
from jaxpar.strategies.pipeline.tables.periodic import versions_kept
from jaxpar.strategies.pipeline.tables.schedule import make_table
from jaxpar.strategies.pipeline.tables.simulate import Times, lockstep, simulate_table
from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS, action_inputs
from jaxpar.tasks.classification import TASK
from tests.strategies.layouts import nbytes_by_device
from tests.strategies.pipelines import (
    NUM_MICROBATCHES,
    Task,
    advance,
    assert_bitwise_equal,
    make,
    make_batch,
    make_config,
    make_problem,
    outcome,
    pipeline,
    plan_of,
    shared,
    start,
)
from tests.strategies.test_continuous import DISPATCH
from tests.strategies.test_continuous import settings as continuous_settings
from tests.strategies.test_pipeline import CASES, Case, assert_equal

MLP = Task("mlp", "classification", "sgd")
BERT, GPT = Task("bert", "masked_lm", layers=4), Task("gpt", "causal_lm", "sgd", layers=2)
ONEBIT = "--config.exchange=byteps_onebit", "--config.exchange_options.min_compress_bytes=0"


@pytest.mark.slow  # tests/strategies/test_cases.py has the executor with each kind of schedule
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_single(case: Case) -> None:
    overrides = (*case.overrides, DISPATCH)
    norm_error = 5e-6 if case.task.model == "resnet" and case.task.layers == 14 else 1e-6
    assert_equal(outcome(case.task, *overrides), outcome(case.task), norm_error)


def test_each_replica_clips_by_its_norm_over_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As lock step does, here before an exact exchange: what a compressor sends depends on how arrays are packed."""
    on_gradients = exchanges.on_gradients

    def clipping(config: ConfigDict, num_replicas: int) -> AllReduce:
        return on_gradients(config, num_replicas)._replace(clip_norm=config.optimizer.clip_norm)

    monkeypatch.setattr(exchanges, "on_gradients", clipping)
    overrides = pipeline("1f1b", 2, replicas=2)
    dispatched, lockstep = (advance(make(GPT, *overrides, *more), GPT, start(GPT)) for more in ((DISPATCH,), ()))
    assert_equal(dispatched, lockstep)
    assert max(lockstep.norms) <= 1 < max(outcome(GPT).norms)  # the mean of what was clipped


def test_a_nonfinite_gradient_changes_nothing() -> None:
    strategy = shared(BERT, *pipeline("1f1b", 2, *ONEBIT, replicas=2), DISPATCH)
    before = start(BERT)
    params = jax.tree.map(np.copy, before["params"])
    params["block_3"]["mlp"]["up"]["kernel"][0, 0] = np.inf
    state, metrics = strategy.step(
        strategy.from_canonical(before | {"params": params}), strategy.place(make_batch(BERT, 0))
    )
    assert not bool(metrics.finite)
    after = strategy.to_canonical(state)
    assert int(after["step"]) == 1
    assert_bitwise_equal(after["params"], params)
    assert_bitwise_equal(after["optimizer"], before["optimizer"])
    assert not any(np.any(x) for x in jax.tree.leaves(jax.device_get(strategy.to_private(state))))


def test_evaluation_equals_single() -> None:
    tree = start(BERT)
    for size in (16, 12):  # with 8 microbatches, and with 4
        sums = [
            strategy.evaluate(strategy.from_canonical(tree), strategy.place(make_batch(BERT, 3, size)))
            for strategy in (shared(BERT), shared(BERT, *pipeline("zb_v", 2), DISPATCH))
        ]
        for expected, got in zip(*map(jax.tree.leaves, sums), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_every_input_precedes_the_action_that_reads_it() -> None:
    for case in CASES:
        table = case.table
        made: set[tuple[int, int, int]] = set()
        order = dispatch_order(table)
        for action, kind in zip(order, table.actions["kind"].tolist(), strict=True):
            assert made.issuperset(action_inputs(kind, action.microbatch, action.stage, table.num_stages))
            assert action.phase == ACTION_KINDS[kind].phase
            made.add((action.phase, action.microbatch, action.stage))


# ---- plans and compiled programs --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "stages", "per_batch"),
    [("pipedream", 4, 1), ("pipedream_vertical_sync", 3, 2), ("pipedream_2bw", (2, 1), 4), ("pipedream", (1, 2), 2)],
)
def test_what_is_in_flight_is_where_the_plan_says(schedule: str, stages: Any, per_batch: int) -> None:
    strategy = shared(MLP, *continuous_settings(schedule, stages, per_batch, 1, DISPATCH))
    state = strategy.init(jax.random.key(0))
    for step in range(7):
        state, _ = strategy.step(state, strategy.place(make_batch(MLP, step)))
    num_devices = len(strategy.devices)
    arrays = [x for x in jax.tree.leaves(state.private) if isinstance(x, jax.Array)]
    assert nbytes_by_device(arrays, num_devices) == strategy.plan.layouts["private"].nbytes_by_device
    details: Any = strategy.plan.details
    kept = versions_kept(details.table)
    for group, columns in enumerate(details.stages.groups):
        # A stage holds most of them right after its update. The newest version is not part of what is in flight.
        most = max(kept[column] for column in columns)
        assert len(state.private.versions[group]) in (most - 1, most - 2)
        params = nbytes_by_device(state.params[group], num_devices)
        for column in columns:
            assert strategy.plan.memory[column]["earlier versions"] == (most - 1) * params[column]


def test_stashes_of_1f1b() -> None:
    """Stage i of p holds p - i microbatches, and the last one none while it waits."""
    p, task = 4, BERT._replace(layers=8)
    cuts = "--config.pipeline.partition=block_1,block_3,block_5"
    overrides = (*pipeline("1f1b", p, cuts), DISPATCH)
    details: Any = plan_of(task, *overrides).details
    microbatches = abstract_microbatches(make_problem(make_config(task, *overrides), task), 1, NUM_MICROBATCHES)
    key = jax.eval_shape(lambda: jax.random.key(0))
    programs = PipelineEngine(details.staged, details.lowered.shape, microbatches, key, "none").programs
    memory = activation_memory(dispatch_order(details.table), programs)
    for column, parts in enumerate(memory):
        saved = programs.programs[int(programs.numbers[column, 0])].cut.saved
        assert parts["stashes"] == (p - column) * nbytes(list(saved.values()))


def test_programs_and_their_audit() -> None:
    strategy = shared(BERT, *pipeline("zb_h1", 2, replicas=2), DISPATCH)
    programs = strategy.compile()
    assert sorted(program.runs for program in programs)[-6:] == [NUM_MICROBATCHES] * 6  # F, B and W of two stages
    num_tied = 1  # the embedding of tokens
    details: Any = strategy.plan.details
    assert sum(program.runs for program in programs) == num_calls(details.table) + num_tied
    assert not any("conditional(" in (program.compiled.as_text() or "") for program in programs)
    rows = audit.audit(programs, strategy.plan, TASK)
    assert [row for row in rows if not row.is_explained] == []
    [gradients] = [row for row in rows if row.dtype == "float32" and row.kind == "all-reduce"]
    [copies] = [row for row in rows if row.kind == "copy"]
    assert (gradients.axis, gradients.ratio, copies.axis) == ("data", 1, "stage")
    assert copies.theory is not None
    assert 0 <= copies.nbytes - copies.theory <= 100  # and scalars: metric sums, norms
    assert not copies._replace(theory=0.5 * copies.theory).is_explained
    assert not copies._replace(nbytes=0.9 * copies.nbytes).is_explained
    measured = audit.memory(programs, strategy)
    for parts in measured:
        for kind in ("parameters", "optimizer"):
            assert parts[kind].nbytes == parts[kind].theory


@pytest.mark.parametrize(("schedule", "stages", "per_batch"), [("pipedream", 4, 1), ("pipedream_2bw", (2, 1), 4)])
def test_audit_without_a_flush(schedule: str, stages: Any, per_batch: int) -> None:
    strategy = shared(MLP, *continuous_settings(schedule, stages, per_batch, 1, DISPATCH))
    programs = strategy.compile()
    details: Any = strategy.plan.details
    if stages == 4:  # no stage has replicas
        assert sum(program.runs for program in programs) == num_calls(details.table)
    rows = audit.audit(programs, strategy.plan, TASK)
    assert [row for row in rows if not row.is_explained] == []
    [copies] = [row for row in rows if row.kind == "copy" and row.dtype == "float32"]
    assert copies.theory is not None
    assert 0 <= copies.nbytes - copies.theory <= 100


def test_refused() -> None:
    with pytest.raises(UserError, match="must be one of lockstep, dispatch, auto"):
        plan_of(BERT, *pipeline("1f1b", 2), "--config.pipeline.executor=dispatched")


# ---- shards -----------------------------------------------------------------------------------------


def sharded(exchange: str, *overrides: str, schedule: str = "1f1b") -> tuple[str, ...]:
    return (*pipeline(schedule, 2, *overrides, replicas=2), f"--config.exchange={exchange}", DISPATCH)


@pytest.mark.parametrize(
    ("exchange", "divided"),
    [
        ("ddp", ()),
        ("zero1", ("optimizer",)),
        ("zero2", ("optimizer", "gradients")),
        ("zero3", ("optimizer", "gradients", "parameters")),
    ],
)
def test_replicas_divide_the_state_of_a_stage(exchange: str, divided: tuple[str, ...]) -> None:
    """The bytes are those of the plan and of the compiled programs. With SGD, the optimizer state is a momentum."""
    strategy = shared(MLP, *sharded(exchange))
    measured = audit.memory(strategy.compile(), strategy)
    layouts = strategy.plan.layouts["params"].leaves
    for device, parts in enumerate(measured):
        stage = device % 2
        held = [x for x in jax.tree.leaves(layouts, is_leaf=_is_leaf) if stage in x.holders.numbers]
        for kind in ("parameters", "gradients", "optimizer"):
            n = 2 if kind in divided else 1
            sizes = [4 * math.prod(x.shape) // max(x.shape) * -(-max(x.shape) // n) for x in held]
            counter = 4 * (kind == "optimizer")  # of the schedule of the learning rate
            assert parts[kind].nbytes == parts[kind].theory == sum(sizes) + counter, kind


def _is_leaf(node: Any) -> bool:
    return isinstance(node, LeafLayout)


def test_zero3_of_a_bfloat16_model_trains_like_ddp() -> None:
    """Matrices are gathered in bfloat16, and their gradients are added up in float32."""
    task = MLP._replace(dtype="bfloat16")
    got, exact = (outcome(task, *sharded(exchange, schedule="zb_h1")) for exchange in ("zero3", "ddp"))
    assert_equal(got, exact)
    gathered = [one for one in shared(task, *sharded("zero3", schedule="zb_h1")).plan.traffic if "gather" in one.kind]
    assert {one.dtype for one in gathered} == {"uint16", "float32"}  # the classifier reads float32


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_weights_of_a_bfloat16_model_are_narrowed_once_in_a_step(schedule: str) -> None:
    """Actions read the copies: none of their programs has a matrix of weights in float32 among its parameters."""
    task = GPT._replace(dtype="bfloat16")
    strategy = shared(task, *pipeline(schedule, 2, DISPATCH))
    assert_equal(outcome(task, *pipeline(schedule, 2, DISPATCH)), outcome(task, *pipeline(schedule, 2)))
    programs = strategy.compile()
    for parts in audit.memory(programs, strategy):
        copies = parts["narrow parameters"]
        assert copies.nbytes == copies.theory
        assert copies.nbytes
    forward = [one for one in programs if len(one.calls) == NUM_MICROBATCHES and "stashes" in one.arguments]
    width = make_problem(make_config(task), task).model.shapes["block_0"]["mlp"]["up"]["kernel"].shape
    read = set()
    for program in forward:
        text = program.compiled.as_text() or ""
        entry = text.partition("entry_computation_layout={(")[2].partition(")->")[0]
        read |= {array.partition("[")[0] for array in entry.split(", ") if f"[{width[0]},{width[1]}]" in array}
    assert read == {"bf16"}


# ---- executor=auto ----------------------------------------------------------------------------------


def chosen(there: Cluster, *overrides: str, times: Times | None = None, task: Task = BERT) -> str:
    """Return the executor that is chosen for a cluster. times: seconds of the actions."""
    config = make_config(task, *overrides, "--config.pipeline.executor=auto")
    with pytest.MonkeyPatch.context() as patch:
        if times:
            patch.setattr(stages, "stage_times", lambda *_, **__: times)
        choice = stages.choose_stages(config, make_problem(config, task), there, Path())
    assert [reason.partition(":")[0] for reason in choice.reasons] == [
        f"executor {choice.settings['pipeline.executor']}"
    ]
    executor: str = choice.settings["pipeline.executor"]
    return executor


def test_auto_takes_the_shorter_simulated_step() -> None:
    h100s, two = named_cluster("h100", 2), pipeline("1f1b", 2)
    table = make_table("1f1b", num_devices=2, num_microbatches=NUM_MICROBATCHES, num_chunks=1)
    # In lockstep, a stage that computes F waits for the backward pass of the other one.
    times = Times([1.0, 1.0], [4.0, 4.0], [0.0, 0.0])
    longest, host = lockstep(table, times), ENQUEUE_SECONDS * num_calls(table)
    assert simulate_table(table, times).cost < 0.9 * longest
    for factor, expected in ((1.1, "dispatch"), (0.8, "lockstep")):  # besides the launches and transfers of clocks
        scaled = Times(*([factor * host / longest * x for x in of_phase] for of_phase in (*times,)))  # type: ignore
        assert chosen(h100s, *two, times=scaled) == expected
    assert chosen(h100s, *continuous_settings("pipedream", 2, 1), times=scaled, task=MLP) == "lockstep"


def test_auto_takes_the_executor_that_supports_the_exchange() -> None:
    two = pipeline("1f1b", 2, "--config.exchange=zero3", replicas=2)
    for there in (named_cluster("h100", 4), named_cluster("cpu", 4)):
        assert chosen(there, *two, times=Times([1e-9] * 2, [1e-9] * 2, [0.0] * 2)) == "dispatch"
    config = make_config(BERT, *pipeline("auto", 2, "--config.exchange=zero3", replicas=2), DISPATCH)
    choice = stages.choose_stages(config, make_problem(config, BERT), named_cluster("h100", 4), Path())
    assert set(choice.settings) == {"pipeline.schedule"}


def test_auto_on_cpu_devices_depends_on_the_size_of_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus, two = named_cluster("cpu", 2), pipeline("1f1b", 2)
    assert chosen(cpus, *two) == "lockstep"
    enough = 2 * NUM_MICROBATCHES * 1e9 / 3
    monkeypatch.setattr(stages, "layer_flops", lambda model, *_: [enough] * len(model.layers))
    assert chosen(cpus, *two) == "dispatch"
    few = [enough, *[0.0] * 7]  # all in the first stage
    monkeypatch.setattr(stages, "layer_flops", lambda *_: few[: BERT.layers + 2])
    assert chosen(cpus, *two, "--config.pipeline.partition=uniform") == "lockstep"
