"""`swarm` trains like one device, even if peers fail; with delayed updates, it follows a plain recurrence."""

import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar import cluster, strategies
from jaxpar.core import state as states
from jaxpar.core import step as steps
from jaxpar.core.plan import Plan
from jaxpar.core.state import Canonical
from jaxpar.errors import UserError
from jaxpar.inspect import audit
from jaxpar.strategies import Strategy
from jaxpar.strategies.swarm import run as run_module
from jaxpar.strategies.swarm import strategy as strategy_module
from jaxpar.strategies.swarm.availability import JOIN, LEAVE, PeerEvent, RandomTrace, SwarmPeer, events_before
from jaxpar.strategies.swarm.costs import SwarmSettings, Workload
from jaxpar.strategies.swarm.executor import EmulatedStep, SwarmExecutor
from jaxpar.strategies.swarm.progress import BACKWARD_PASS, COUNTED, FORWARD_PASS, LOST, REPEATED
from jaxpar.strategies.swarm.record import FAILURE, RECEIVE, SwarmAction, SwarmRun
from jaxpar.strategies.swarm.run import run_swarm
from jaxpar.strategies.swarm.scenario import RunActions, read_scenario
from jaxpar.strategies.swarm.stage_passes import SwarmPrograms
from jaxpar.strategies.swarm.strategy import SwarmDetails
from jaxpar.tasks.classification import TASK
from tests.strategies.pipelines import (
    NUM_MICROBATCHES,
    Task,
    assert_bitwise_equal,
    make,
    make_batch,
    make_config,
    make_problem,
    named,
    relative_error,
    shared,
    start,
)

MLP, GPT = Task("mlp", "classification", layers=2), Task("gpt", "causal_lm", "sgd", layers=1)
NUM_PEERS, NUM_STEPS = 7, 4
PEERS = [SwarmPeer(f"p{n}", bandwidth=4.0, latency=0.05) for n in range(NUM_PEERS)]


def swarm(*settings: str, stages: int = 4, devices: int = 1) -> tuple[str, ...]:
    """Return the config overrides of a swarm."""
    own = (f"stages={stages}", f"peers={NUM_PEERS}", f"num_microbatches={NUM_MICROBATCHES}", *settings)
    return "--config.strategy=swarm", f"--config.mesh.data={devices}", *(f"--config.swarm.{one}" for one in own)


def details_of(strategy: Strategy[Any]) -> SwarmDetails:
    assert isinstance(strategy.plan.details, SwarmDetails)
    return strategy.plan.details


def simulate(trace: Sequence[PeerEvent], *, stages: int = 4, delayed: bool = False) -> SwarmRun:
    """Simulate a run whose messages and averagings take about as long as passes."""
    workload = Workload((1.0,) * stages, (3.0,) * stages, activation_bytes=1.0, gradient_bytes=8.0, state_bytes=8.0)
    settings = SwarmSettings(NUM_STEPS, NUM_MICROBATCHES, delayed=delayed, rebalance_seconds=20.0, rule="balance")
    return run_swarm(PEERS, workload, trace, settings)


def middle_of(phase: int) -> Callable[[SwarmRun, int], tuple[float, set[int]]]:
    def pick(run: SwarmRun, step: int) -> tuple[float, set[int]]:
        table = run.table
        row = np.flatnonzero((table.step == step) & (table.phase == phase) & (table.stage == 1))[5]
        return float(table.start[row] + table.finish[row]) / 2, {int(table.peer[row])}

    return pick


def ends_of_backward(run: SwarmRun, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the times at which the backward passes of a step end, in order, and their peers."""
    rows = np.flatnonzero((run.table.step == step) & (run.table.phase == BACKWARD_PASS))
    rows = rows[np.argsort(run.table.finish[rows])]
    return run.table.finish[rows], run.table.peer[rows]


def while_accumulating(run: SwarmRun, step: int) -> tuple[float, set[int]]:
    finish, peer = ends_of_backward(run, step)
    return float(finish[-2]), {int(peer[0])}  # it has accumulated, and the batch is not complete


def while_averaging(run: SwarmRun, step: int) -> tuple[float, set[int]]:
    """Return two peers that have computed the same microbatch in stages 1 and 2, so that a whole chain is lost."""
    finish, _ = ends_of_backward(run, step)
    assert run.update_times[step] > finish[-1]
    table = run.table
    is_first = (table.step == step) & (table.microbatch == 0) & (table.outcome == COUNTED) & (table.stage > 0)
    return float(finish[-1] + run.update_times[step]) / 2, set(table.peer[is_first].tolist())


@functools.cache
def failing(stages: int = 4, *, delayed: bool = False) -> tuple[SwarmRun, tuple[PeerEvent, ...]]:
    """Return a run in which a peer fails in forward, backward, accumulation and averaging: one in each step.

    Events before a failure do not depend on it, so each failure is added to the run with the failures before.
    """
    trace: tuple[PeerEvent, ...] = ()
    for step, pick in enumerate(
        [middle_of(FORWARD_PASS), middle_of(BACKWARD_PASS), while_accumulating, while_averaging]
    ):
        time, peers = pick(simulate(trace, stages=stages, delayed=delayed), step)
        for peer in sorted(peers):
            trace = (*trace, PeerEvent(time, peer, LEAVE), PeerEvent(time + 0.5, peer, JOIN))
        trace = tuple(sorted(trace))
    return simulate(trace, stages=stages, delayed=delayed), trace


@functools.cache
def programs_of(task: Task, *overrides: str) -> tuple[Strategy[Any], SwarmPrograms]:
    """Return a strategy, and programs that runs with different failures share."""
    strategy, config = shared(task, *overrides), make_config(task, *overrides)
    details = details_of(strategy)
    programs = SwarmPrograms(make_problem(config, task), details.stages, details.messages, keeps_params=details.delayed)
    return strategy, programs


def repeat(task: Task, run: SwarmRun, *overrides: str, devices: int = 1) -> tuple[list[float], list[float], Canonical]:
    """Train with the actions of a run, and return losses, gradient norms and the final state."""
    strategy, programs = programs_of(task, *overrides)
    executor = SwarmExecutor(
        programs, details_of(strategy).stages, run.actions.__getitem__, NUM_MICROBATCHES, cluster.devices()[:devices]
    )
    state, metrics = strategy.from_canonical(start(task)), []
    for step in range(NUM_STEPS):
        state, of_step = executor.step(state, make_batch(task, step))
        metrics.append(of_step)
    losses = [float(of_step.sums.loss / of_step.sums.weight) for of_step in metrics]
    return losses, [float(of_step.grad_norm) for of_step in metrics], jax.device_get(strategy.to_canonical(state))


@functools.cache
def one_device(
    task: Task, *overrides: str, delay: int = 0, num_steps: int = NUM_STEPS
) -> tuple[list[float], list[float], Canonical]:
    """Train by a plain recurrence: step t applies the gradient at version max(t - delay, 0) of the weights."""
    problem = make_problem(make_config(task, *overrides), task)
    state = states.from_canonical(start(task), states.abstract_state(problem.model, problem.optimizer))

    @jax.jit
    def step(state: Any, read: Any, batch: Any) -> Any:
        grads, sums = steps.gradients(problem, state._replace(params=read), batch, steps.batch_weight(batch))
        return steps.update(problem, state, grads, sums)

    versions, losses, norms = [state.params], [], []
    for number in range(num_steps):
        state, metrics = step(state, versions[max(number - delay, 0)], make_batch(task, number))
        versions.append(state.params)
        losses.append(float(metrics.sums.loss / metrics.sums.weight))
        norms.append(float(metrics.grad_norm))
    return losses, norms, jax.device_get(states.to_canonical(state))


def assert_close(got: Any, expected: Any, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(got[0], expected[0], rtol=tolerance)
    np.testing.assert_allclose(got[1], expected[1], rtol=tolerance)
    for name, array in named(expected[2]["params"]).items():
        assert relative_error(named(got[2]["params"])[name], array) < tolerance, name


def failures_by_kind(run: SwarmRun, trace: Sequence[PeerEvent]) -> list[tuple[int, int]]:
    """Return, for each failure, the number of passes that it interrupted, and of gradients that it lost."""
    table, result = run.table, []
    for time, peer, event in trace:
        if event == LEAVE:
            of_peer = (table.peer == peer) & (table.outcome == LOST) & (table.start < time)
            interrupted = of_peer & (table.finish == time)
            before = max((t for t, other, _ in trace if other == peer and t < time), default=0.0)
            lost = of_peer & (table.finish < time) & (table.finish > before)
            result.append((int(interrupted.sum()), int(lost.sum())))
    return result


@pytest.mark.parametrize("delayed", [False, True])
def test_failures_in_every_phase_change_nothing(delayed: bool) -> None:
    """The loss, the gradient norm and the parameters are those of a plain recurrence on one device, with dropout."""
    run, trace = failing(delayed=delayed)
    interrupted, lost = zip(*failures_by_kind(run, trace), strict=True)
    assert interrupted[:2] == (1, 1)
    assert min(lost[2:]) > 0
    assert {COUNTED, REPEATED, LOST} == set(run.table.outcome.tolist())
    overrides = swarm(*(["delayed=True"] if delayed else []))
    got = repeat(MLP, run, *overrides)
    assert_close(got, one_device(MLP, delay=int(delayed)))
    other = one_device(MLP, delay=1 - int(delayed))[2]["params"]
    assert (
        max(relative_error(x, y) for x, y in zip(*map(jax.tree.leaves, (got[2]["params"], other)), strict=True)) > 5e-4
    )
    if not delayed:  # on several devices, bitwise the same
        assert_bitwise_equal(repeat(MLP, run, *overrides, devices=2)[2], got[2])


def test_arrays_tied_across_stages() -> None:
    run, _ = failing(stages=2)
    assert_close(repeat(GPT, run, *swarm(stages=2)), one_device(GPT), 2e-6)


@pytest.mark.parametrize("kind", ["receive", "failure"])
def test_a_run_without_an_action_is_not_repeated(kind: str) -> None:
    """A missing message is noticed, and so is a gradient that is counted although its peer failed."""
    run, _ = failing()
    number = 0 if kind == "receive" else 2
    actions = [[*of_step] for of_step in run.actions]
    kinds = [one.kind for one in actions[number]]
    del actions[number][kinds.index(FAILURE if kind == "failure" else min(k for k in kinds if k > BACKWARD_PASS))]
    with pytest.raises(KeyError if kind == "receive" else AssertionError):
        repeat(MLP, run._replace(actions=actions), *swarm())


def test_a_run_of_the_config(tmp_path: Path) -> None:
    """The trace of a config is simulated, repeated with the model, and reported."""
    trace = tmp_path / "trace.csv"
    trace.write_text("seconds,peer,event\n1.05,p0,leave\n2,p3,leave\n2.5,p0,join\n6,p3,join\n")
    overrides = swarm(f"trace={trace}", "rebalance_seconds=1", devices=2)
    strategy = make(MLP, *overrides)
    assert strategy.plan.summary.startswith("7 peers in 4 stages, 8 microbatches, 2 failures, 0.")
    state = strategy.from_canonical(start(MLP))
    for step in range(NUM_STEPS):
        state, _ = strategy.step(state, strategy.place(make_batch(MLP, step)))
    got = jax.device_get(strategy.to_canonical(state))["params"]
    for name, array in named(one_device(MLP)[2]["params"]).items():
        assert relative_error(named(got)[name], array) < 1e-6, name
    single = shared(MLP)
    sums, alone = (
        one.evaluate(one.from_canonical(start(MLP)), one.place(make_batch(MLP, 0))) for one in (strategy, single)
    )
    np.testing.assert_allclose(sums.loss, alone.loss, rtol=1e-6)
    results = strategy.report(state, tmp_path)
    json.dumps(results)
    assert results["lost_passes"] == (tmp_path / "routing.csv").read_text().count(",lost\n") > 0
    assert results["table_seconds"] == details_of(strategy).run.update_times[-1]
    assert read_scenario(tmp_path / "scenario.json", "--scenario").run().actions == details_of(strategy).run.actions
    assert 0 < results["efficiency"] < 1
    programs = strategy.compile()
    rows = audit.audit(programs, strategy.plan, TASK)
    assert [(row.kind, row.axis, row.is_explained) for row in rows] == [("copy", "data", True), ("copy", "stage", True)]
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(got))
    first, second = audit.memory(programs, strategy)
    assert first["parameters"] == (nbytes, nbytes)
    assert "optimizer" not in second
    assert 0 < (second["parameters"].theory or 0) <= nbytes


def plan_of(*settings: str, **more: int) -> Plan[Any]:
    """Return the plan of a config of the small MLP."""
    config = make_config(MLP, *swarm(*settings, **more))
    return strategies.plan(config, make_problem(config, MLP), cluster.find_cluster())


def test_failures_at_a_rate() -> None:
    """Rates generate the trace of their seed; the run is that of the same trace in a list, to its end and beyond."""
    rates = ("failures.lifetime=20", "failures.rejoin=2", "failures.groups=2", "failures.group_lifetime=30")
    details = plan_of(*rates, "rebalance_seconds=1").details
    events = events_before(RandomTrace(NUM_PEERS, 20.0, 2.0, 2, 30.0, 0.5, seed=0), 1e3)
    assert sum(event.event == LEAVE and event.seconds < details.run.update_times[-1] for event in events) > 3
    listed = details.scenario._replace(trace=events)
    assert listed.run().actions == details.run.actions
    longer = RunActions(details.scenario, details.run)
    assert [longer(step) for step in range(25)] == listed.run(25).actions


def test_rates_that_prevent_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that fail after a tenth of a pass, on average, are noticed by the number of events."""
    monkeypatch.setattr(run_module, "MOST_EVENTS", 20_000)
    with pytest.raises(UserError) as raised:
        plan_of("failures.lifetime=0.01", "failures.rejoin=0.01")
    assert str(raised.value) == (
        "config.swarm.failures.lifetime is 0.01; it must let each stage have a peer for long enough, but step 0 does "
        "not end within 20,000 events"
    )


def test_a_step_after_the_planned_ones() -> None:
    """A strategy can take more steps than its plan has simulated."""
    strategy = shared(MLP, *swarm())
    last = details_of(strategy).scenario.settings.num_steps
    state = strategy.from_canonical(start(MLP))._replace(step=last)
    state, metrics = strategy.step(state, strategy.place(make_batch(MLP, last)))
    assert state.step == last + 1
    assert metrics.finite


@pytest.mark.parametrize("compress", ["none", "int8"])
def test_traffic_is_what_peers_send(compress: str) -> None:
    """Messages are measured in a repeated run. Without failures, the peers of a stage average in the same ring."""
    overrides = swarm(f"compress={compress}")
    strategy, sent = shared(MLP, *overrides), [0, 0]
    receive = EmulatedStep.act

    def measure(self: EmulatedStep, action: SwarmAction) -> None:
        receive(self, action)
        if action.kind in RECEIVE:
            key = (RECEIVE.index(action.kind), action.stage, action.microbatch)
            sent[0] += sum(array.nbytes for array in jax.tree.leaves(self.peers[action.peer].messages[key]))
            sent[1] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatedStep, "act", measure)
        state = strategy.from_canonical(start(MLP))
        for step in range(10):
            state, _ = strategy.step(state, strategy.place(make_batch(MLP, step)))
    messages, averages = strategy.plan.traffic
    assert (messages.dtype, averages.dtype) == ("float32" if compress == "none" else compress, "float32")
    assert np.array(messages[3:5]) * NUM_PEERS * 10 == pytest.approx(sent)
    details = details_of(strategy)
    sizes = np.bincount([stage for _, stage, *_ in details.run.service], minlength=4)
    assert sizes.sum() == NUM_PEERS
    params = strategy.to_canonical(state)["params"]
    held = [
        sum(leaf.nbytes for name in names for leaf in jax.tree.leaves(params[name])) for names in details.stages.layers
    ]
    assert averages.nbytes * NUM_PEERS == pytest.approx(sum(2 * (sizes - 1) * held))
    assert averages.messages * NUM_PEERS == pytest.approx(sum(2 * (sizes - 1) * sizes))


def test_a_resumed_run_is_bitwise_the_same() -> None:
    strategy = shared(MLP, *swarm("delayed=True"))
    ends = []
    for stop in (0, 2):
        state = strategy.from_canonical(start(MLP))
        for step in range(NUM_STEPS):
            if step == stop:
                saved = jax.device_get((strategy.to_canonical(state), strategy.to_private(state)))
                state = strategy.from_canonical(*saved)
            state, _ = strategy.step(state, strategy.place(make_batch(MLP, step)))
        ends.append(jax.device_get((strategy.to_canonical(state), strategy.to_private(state))))
    assert_bitwise_equal(*ends)


def test_messages_in_8_bits() -> None:
    """Messages in 8 bits change the gradients a little, and are a quarter as large."""
    run = simulate([])
    exact, rounded = (repeat(MLP, run, *swarm(*more)) for more in ([], ["compress=int8"]))
    errors = [
        relative_error(named(rounded[2]["params"])[name], array) for name, array in named(exact[2]["params"]).items()
    ]
    assert 1e-5 < max(errors) < 0.02
    np.testing.assert_allclose(rounded[0], exact[0], rtol=2e-3)
    assert "int8 messages are lossy" in shared(MLP, *swarm("compress=int8")).plan.differs
    sizes = ("--config.model.hidden_size=256", f"--config.batch_size={64 * NUM_MICROBATCHES}")
    config = make_config(MLP, *swarm(), *sizes)
    sent = []
    for config.swarm.compress in ("none", "int8"):
        traffic, _ = strategies.plan(config, make_problem(config, MLP), cluster.find_cluster()).traffic
        sent.append(traffic.nbytes)
    assert sent[1] / sent[0] == pytest.approx(1 / 4 + 1 / 4096, rel=1e-6)
    assert sent[1] / sent[0] < 0.2525


def test_nonfinite_gradients_skip_the_step() -> None:
    strategy = shared(MLP, *swarm("compress=int8"))
    state = strategy.from_canonical(start(MLP))
    before, batch = jax.device_get(strategy.to_canonical(state)), make_batch(MLP, 0)
    batch["weights"][1] = np.nan
    state, metrics = strategy.step(state, strategy.place(batch))
    assert not metrics.finite
    after = jax.device_get(strategy.to_canonical(state))
    assert int(after["step"]) == 1
    assert_bitwise_equal(after["params"], before["params"])


# Overrides, and what the message must contain.
LIVE = "swarm.mode=live"
REFUSED: dict[str, tuple[list[str], str]] = {
    "a mode": (["swarm.mode=life"], "swarm.mode is 'life'; it must be one of emulated, live. Did you mean 'live'?"),
    "a rule": (["swarm.rule=best"], "swarm.rule is 'best'; it must be one of paper, balance"),
    "a compressor": (["swarm.compress=int4"], "swarm.compress is 'int4'; it must be one of none, int8"),
    "no stages": (["swarm.stages=0"], "swarm.stages is 0; it must be at least 1"),
    "more stages than peers": (
        ["swarm.stages=5"],
        "it must be at most 4, the number of peers (config.swarm.peers='4')",
    ),
    "more stages than layers": (
        ["swarm.stages=9", "swarm.peers=9", "swarm.num_microbatches=4"],
        "swarm.stages is 9; it must be at most 4, the number of layers of the model (embed .. head)",
    ),
    "microbatches": (["swarm.num_microbatches=-1"], "swarm.num_microbatches is -1; it must be at least 0"),
    "times": (["swarm.forward_seconds=0"], "swarm.forward_seconds is 0.0; it must be between 1e-09 and 1e+09"),
    "a period": (["swarm.rebalance_seconds=-1"], "rebalance_seconds is -1.0; it must be between 0.1 and 1e+12 or 0"),
    "a short period": (["swarm.rebalance_seconds=1e-9"], "rebalance_seconds is 1e-09; it must be between 0.1 and"),
    "no peers": (["swarm.peers=0"], "config.swarm.peers is 0; it must be between 1 and 5000, or a file of peers"),
    "peers": (["swarm.peers=1000000000"], "config.swarm.peers is 1000000000; it must be between 1 and 5000, or"),
    "lifetimes": (["swarm.failures.lifetime=-1"], "failures.lifetime is -1.0; it must be between 1e-09 and 1e+12 or 0"),
    "a rate": (["swarm.failures.rejoin=nan"], "swarm.failures.rejoin is nan; it must be between 0 and 1e+12"),
    "groups": (["swarm.failures.groups=5"], "swarm.failures.groups is 5; it must be between 1 and 4"),
    "a share": (["swarm.failures.group_share=2"], "swarm.failures.group_share is 2.0; it must be between 0 and 1"),
    "no file of peers": (["swarm.peers=no.csv"], "config.swarm.peers is 'no.csv', which does not exist"),
    "no trace": (["swarm.trace=no.csv"], "config.swarm.trace is 'no.csv', which does not exist"),
    "a profile": (["pipeline.partition=auto"], "config.pipeline.partition is 'auto'; it must be one of uniform,"),
    "stages of the mesh": (["mesh.stage=2"], "mesh.stage is 2; it must be 1 with config.strategy='swarm'"),
    "an exchange": (["exchange=horovod"], "exchange is 'horovod'; it must be 'ddp' without options with"),
    "accumulation": (["optimizer.accumulation_steps=2"], "accumulation_steps is 2; it must be 1 with"),
    "live, a trace": (
        [LIVE, "swarm.trace=a.csv"],
        "swarm.trace is 'a.csv'; it must be '' with config.swarm.mode='l",
    ),
    "live, delayed": ([LIVE, "swarm.delayed=True"], "swarm.delayed is True; it must be False with config.swarm.mode="),
    "live, a time": ([LIVE, "swarm.forward_seconds=1"], "swarm.forward_seconds is 1.0; it must be 0.1 with config"),
    "live, rates": ([LIVE, "swarm.failures.lifetime=9"], "swarm.failures.lifetime is 9.0; it must be 0.0 with config"),
    "emulated, live": (
        ["swarm.namespace=a"],
        "swarm.namespace is 'a'; it must be '' with config.swarm.mode=",
    ),
    "live, a file": ([LIVE, "swarm.peers=a.csv"], "swarm.peers is 'a.csv'; it must be a number, at least 2 (config."),
    "live, few peers": ([LIVE, "swarm.peers=1"], "swarm.peers is '1'; it must be a number, at least 2 (config.swarm.s"),
    "live, address": (
        [LIVE, "swarm.address=ray://a:1"],
        "address is 'ray://a:1'; it must be HOST:PORT, auto, or",
    ),
    "live, CPUs": ([LIVE, "swarm.peer_cpus=-1"], "swarm.peer_cpus is -1.0; it must be between 0 and 10,000"),
    "live, a port": (
        [LIVE, "swarm.address=a:99999"],
        "swarm.address is 'a:99999'; it must be HOST:PORT, auto, or empty",
    ),
    "live, many peers": ([LIVE, "swarm.peers=" + 5000 * "9"], "at least 2 (config.swarm.stages) and at most 1000"),
    "live, digits": ([LIVE, "swarm.peers=\u0663"], "it must be a number, at least 2"),
    "live, units": ([LIVE, "swarm.peer_cpus=1e-5"], "swarm.peer_cpus is 1e-05; it must be a multiple of 0.0001"),
    "live, GPUs": ([LIVE, "swarm.peer_gpus=1.5"], "swarm.peer_gpus is 1.5; it must be a whole number or less than 1"),
    "live, no CPUs": (
        [LIVE, "swarm.peer_cpus=0"],
        "peer_cpus is 0.0; it must be greater than 0 if config.swarm.p",
    ),
    "live, joins": ([LIVE, "swarm.join_seconds=inf"], "swarm.join_seconds is inf; it must be finite and at least 0"),
    "live, patience": ([LIVE, "swarm.patience=1"], "swarm.patience is 1.0; it must be finite and greater than 1"),
    "a batch": (["swarm.num_microbatches=3"], "config.batch_size is 16; it must be a multiple of 3: 3 microbatches"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_settings(name: str) -> None:
    overrides, message = REFUSED[name]
    model = make_problem(make_config(MLP), MLP).model
    config = make_config(MLP, "--config.strategy=swarm", *(f"--config.{one}" for one in overrides))
    with pytest.raises(UserError, match=re.escape(message)):
        strategies.decide(config, cluster.find_cluster(), model)


def test_a_trace_excludes_rates(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("seconds,peer,event\n1,p0,leave\n")
    config = make_config(MLP, *swarm(f"trace={path}", "failures.lifetime=9"))
    with pytest.raises(UserError, match=r"trace is '.*'; it must be empty with config.swarm.failures, which"):
        strategies.decide(config, cluster.find_cluster())


def test_live_mode_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_module, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"swarm.mode is 'live'; it must be 'emulated' without Ray, which `pip install"):
        strategies.decide(make_config(MLP, *swarm(LIVE.removeprefix("swarm."), stages=2)), cluster.find_cluster())


def test_several_processes() -> None:
    with pytest.raises(UserError, match="strategy='swarm' runs in a single process, but there are 2 processes"):
        strategies.decide(make_config(MLP, "--config.strategy=swarm"), cluster.named_cluster("cpu", 2, num_processes=2))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["2,p0,leave", "1,p1,leave"], "line 3: seconds is 1; it must be at least 2, as above"),
        (["2,p9,leave"], "line 2: peer is 'p9'; it must be one of the 7 peers"),
        ([f"1,p{n},leave" for n in range(5)], "stage 1 has no peer from second"),
    ],
)
def test_invalid_traces(rows: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(itertools.chain(["seconds,peer,event"], rows)) + "\n")
    config, problem = make_config(MLP, *swarm(f"trace={path}")), make_problem(make_config(MLP), MLP)
    with pytest.raises(UserError) as raised:
        strategies.plan(config, problem, cluster.find_cluster())
    assert str(raised.value).startswith(f"config.swarm.trace is {str(path)!r}")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_peers_of_a_file(tmp_path: Path) -> None:
    """Two peers share the slower stage in proportion to their speeds, 2 and 1; one peer computes all of the other."""
    path = tmp_path / "peers.csv"
    path.write_text("peer,speed,bandwidth,latency\na,2,1e9,0.001\nb,1,1e9,0.001\nc,1,1e9,0.001\n")
    config = make_config(MLP, *swarm(f"peers={path}", stages=2))
    plan = strategies.plan(config, make_problem(config, MLP), cluster.find_cluster())
    assert plan.summary.startswith("3 peers in 2 stages, 8 microbatches, 0 failures, 0.")
    counts = np.bincount(plan.details.run.table.peer, minlength=3)
    assert counts[1] == counts[0] + counts[2] == 10 * 2 * NUM_MICROBATCHES
    assert counts[0] / counts[2] == pytest.approx(2, abs=0.4)
