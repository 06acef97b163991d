"""Live swarms on Ray train like one device, whatever happens to their peers.

The peers are processes of this machine. Tests share them: a trainer attaches those of the trainer before, and replaces
those that were killed.
"""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.errors import TrainingError
from jaxpar.strategies import Strategy, ray_cluster
from jaxpar.strategies.swarm.live import cluster, events
from jaxpar.strategies.swarm.live.events import EventKind, LiveEvent
from jaxpar.strategies.swarm.live.trainer import LiveTrainer
from jaxpar.strategies.swarm.progress import BACKWARD_PASS, FORWARD_PASS, LOST, OUTPUT_GRADIENT, STAGE_INPUT
from jaxpar.strategies.swarm.table import check_routing
from tests.selection import slow
from tests.strategies.pipelines import (
    NUM_MICROBATCHES,
    Task,
    assert_bitwise_equal,
    make,
    make_batch,
    named,
    relative_error,
    shared,
    start,
)
from tests.strategies.swarm.hostile_peer import HostilePeer
from tests.strategies.test_swarm import GPT, MLP, NUM_STEPS, assert_close, one_device, swarm

NAMESPACE, NUM_PEERS = "tests", 4


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    """Start Ray for the tests of this file."""
    found = ray_cluster.connect("swarm.address", "", num_cpus=NUM_PEERS)
    yield found
    found.shutdown()


def live(*settings: str, stages: int = 3) -> tuple[str, ...]:
    """Return the config overrides of a live swarm."""
    own = ("mode=live", f"stages={stages}", f"peers={NUM_PEERS}", f"num_microbatches={NUM_MICROBATCHES}")
    more = (f"namespace={NAMESPACE}", "join_seconds=1", *settings)
    return "--config.strategy=swarm", "--config.mesh.data=1", *(f"--config.swarm.{one}" for one in (*own, *more))


class LiveRun:
    """A run whose events are recorded."""

    def __init__(self, task: Task, *overrides: str) -> None:
        self.task, self.events = task, list[LiveEvent]()
        self.strategy: Strategy[Any] = make(task, *overrides)
        self.trainer: LiveTrainer = self.strategy.step.__self__  # type: ignore[attr-defined]
        self.react: Callable[[LiveEvent], None] = lambda _: None
        self.killed: list[int] = []

    def kill(self, peer: int) -> None:
        self.killed.append(peer)
        os.kill(self.pid(peer), signal.SIGKILL)

    def pid(self, peer: int) -> int:
        place = self.trainer.members.peers[peer].place
        assert place is not None
        return place.pid

    def kinds(self, kind: str) -> list[LiveEvent]:
        return [event for event in self.events if event.kind == kind]

    def train(self, num_steps: int = NUM_STEPS, before_step: Callable[[int], None] = lambda _: None) -> Any:
        """Train, and return losses, gradient norms and the final state."""

        def listen(event: LiveEvent) -> None:
            self.events.append(event)
            if os.environ.get("SHOW") and event.kind not in ("sent", "assigned", "computed"):
                print(round(self.trainer.members.now, 2), *event, flush=True)
            self.react(event)

        events.listeners.append(listen)
        try:
            state, metrics = self.strategy.from_canonical(start(self.task)), []
            for step in range(num_steps):
                before_step(step)
                state, of_step = self.strategy.step(state, make_batch(self.task, step))
                metrics.append(of_step)
        finally:
            events.listeners.remove(listen)
        losses = [float(one.sums.loss / one.sums.weight) for one in metrics]
        return losses, [float(one.grad_norm) for one in metrics], jax.device_get(self.strategy.to_canonical(state))

    def check(self, tolerance: float = 1e-5, **train: Any) -> Any:
        """Train, and assert that the result is that of one device, and that peers have the state of the copy."""
        got = self.train(**train)
        assert_close(got, one_device(self.task), tolerance)
        self.check_peers(got)
        return got

    def wait_for(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            self.trainer.members.turn()

    def all_serve(self) -> bool:
        return all(one.status in ("serving", "gone") for one in self.trainer.members.peers)

    def check_peers(self, got: Any) -> None:
        """Assert that the peers have the parameters and the optimizer state of the copy outside the swarm."""
        members = self.trainer.members
        stages = set()
        for peer, one in enumerate(members.peers):
            if one.status == "serving":
                stage, tree = members.ray.get(one.handle.read_state.remote())
                assert stage == members.engine.swarm.stage[peer]
                stages.add(stage)
                for name, array in named(tree).items():
                    if array.dtype.kind == "f":
                        expected = named(got[2])[name]
                        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-7, err_msg=name)
        assert stages == set(range(len(members.engine.queues)))


def test_equals_one_device() -> None:
    """The losses, gradient norms and parameters are those of a plain recurrence on one device, with dropout."""
    run = LiveRun(MLP, *live())
    run.check(1e-6)
    table = run.trainer.routing_table()
    check_routing(table)
    assert LOST not in table.outcome
    assert len(table.step) == NUM_STEPS * NUM_MICROBATCHES * 3 * 2


@pytest.mark.slow
def test_arrays_tied_across_stages() -> None:
    LiveRun(GPT, *live(stages=2)).check(2e-6)


def test_kills_in_every_phase_change_nothing() -> None:
    """A peer is killed in a forward pass, a backward pass, while it holds gradients, and in the averaging."""
    run = LiveRun(MLP, *live())
    moments: list[Callable[[LiveEvent], bool]] = [
        lambda e: (e.kind, e.phase, e.stage) == (EventKind.SENT, FORWARD_PASS, 1),
        lambda e: (e.kind, e.phase, e.stage) == (EventKind.SENT, BACKWARD_PASS, 1),
        lambda e: (e.kind, e.phase, e.stage, e.number) == (EventKind.COMPUTED, BACKWARD_PASS, 2, 3),
        lambda e: e.kind == EventKind.AVERAGING,
    ]

    def kill(event: LiveEvent) -> None:
        step = run.trainer.num_steps
        if len(run.killed) == step < len(moments) and moments[step](event):
            batch: Any = run.trainer.members.batch
            run.kill(max(batch.progress.contributors(0)) if event.peer < 0 else event.peer)

    run.react = kill
    run.check()
    assert len(run.killed) == NUM_STEPS
    assert sorted(event.peer for event in run.kinds(EventKind.FAILED)) == sorted(run.killed)
    lost = {event.peer for event in run.kinds(EventKind.LOST)}
    assert lost >= set(run.killed[2:])
    check_routing(run.trainer.routing_table())


def test_messages_in_8_bits() -> None:
    """Peers send 8 bits per element: the run is that of emulated peers, also if one is killed."""
    run = LiveRun(MLP, *live("compress=int8"))
    sent: list[np.ndarray] = []

    def react(event: LiveEvent) -> None:
        if event.kind != EventKind.COMPUTED:
            return
        batch: Any = run.trainer.members.batch
        target = (STAGE_INPUT, event.stage + 1) if event.phase == FORWARD_PASS else (OUTPUT_GRADIENT, event.stage - 1)
        if run.trainer.num_steps == 0 and (message := batch.messages.get((*target, event.number))):
            sent.extend(run.trainer.members.ray.get(message.reference))
        if not run.killed and (run.trainer.num_steps, event.phase, event.number) == (2, BACKWARD_PASS, 3):
            run.kill(event.peer)

    run.react = react
    got = run.train()
    assert {array.dtype.name for array in sent} == {"int8", "float32"}
    messages = run.strategy.plan.traffic[0]
    assert messages.dtype == "int8"
    assert sum(array.nbytes for array in sent) == pytest.approx(messages.nbytes * NUM_PEERS)
    emulated = shared(MLP, *swarm("compress=int8", stages=3))
    state, losses, norms = emulated.from_canonical(start(MLP)), [], []
    for step in range(NUM_STEPS):
        state, metrics = emulated.step(state, emulated.place(make_batch(MLP, step)))
        losses.append(float(metrics.sums.loss / metrics.sums.weight))
        norms.append(float(metrics.grad_norm))
    expected = losses, norms, jax.device_get(emulated.to_canonical(state))
    assert_close(got, expected, 1e-5)
    exact = named(one_device(MLP)[2]["params"])
    assert max(relative_error(named(got[2]["params"])[name], array) for name, array in exact.items()) > 1e-3
    run.check_peers(got)
    assert run.killed
    assert {event.peer for event in run.kinds(EventKind.FAILED)} == set(run.killed)


@pytest.mark.slow
def test_many_random_kills_change_nothing() -> None:
    """50 peers are killed at random moments of a run."""
    constant, num_steps = "--config.optimizer.schedule=constant", 60
    run = LiveRun(MLP, *live("join_seconds=0.5", "rebalance_seconds=2"), constant)
    rng = np.random.default_rng(0)

    def kill(event: LiveEvent) -> None:
        kinds = (EventKind.SENT, EventKind.COMPUTED, EventKind.AVERAGING, EventKind.UPDATED)
        if event.kind in kinds and rng.random() < 0.02 and len(run.killed) < 50:
            peers = enumerate(run.trainer.members.peers)
            serving = [peer for peer, one in peers if one.status == "serving" and peer not in run.killed]
            if serving:
                run.kill(int(rng.choice(serving)))

    run.react = kill
    got = run.train(num_steps)
    assert len(run.killed) == 50
    assert_close(got, one_device(MLP, constant, num_steps=num_steps), 1e-5)
    check_routing(run.trainer.routing_table())


@pytest.mark.slow
def test_any_other_strategy_resumes() -> None:
    """A checkpoint of a live swarm is canonical: one device continues it, and the other way round."""
    run, single = LiveRun(MLP, *live()), shared(MLP)
    for first, second in ((run.strategy, single), (single, run.strategy)):
        state: Any = first.from_canonical(start(MLP))
        for step in range(NUM_STEPS):
            if step == 2:
                state = second.from_canonical(jax.device_get(first.to_canonical(state)))
            one = first if step < 2 else second
            state, _ = one.step(state, one.place(make_batch(MLP, step)))
        tree, expected = named(jax.device_get(second.to_canonical(state))), named(one_device(MLP)[2])
        assert tree.keys() == expected.keys()
        for name, array in expected.items():
            assert relative_error(tree[name], array) < 1e-6, name


def test_a_silent_peer_is_given_up_and_returns() -> None:
    """A stopped process does not answer. Its work goes to others, and what it answers later is ignored."""
    run = LiveRun(MLP, *live("patience=5"))
    stopped: list[int] = []

    def stop(event: LiveEvent) -> None:
        if not stopped and run.trainer.num_steps == 1 and (event.kind, event.phase) == (EventKind.SENT, BACKWARD_PASS):
            queues = run.trainer.members.engine.queues
            if len(queues[event.stage]) > 1:
                stopped.append(event.peer)
                os.kill(run.pid(event.peer), signal.SIGSTOP)
        if event.kind == EventKind.GIVEN_UP and event.peer in stopped:
            os.kill(run.pid(event.peer), signal.SIGCONT)

    def wait(step: int) -> None:
        if step in (1, 3):
            run.wait_for(run.all_serve)

    run.react = stop
    run.check(before_step=wait)
    of_peer = [event for event in run.kinds(EventKind.GIVEN_UP) if event.peer in stopped]
    [given_up] = [event for event in of_peer if event.stage >= 0]  # on a busy machine, also while peers start
    assert given_up.text.startswith("silent: no answer for ")
    assert len([event for event in run.kinds(EventKind.SERVING) if event.peer in stopped]) == 2
    check_routing(run.trainer.routing_table())


def test_idle_peers_are_watched() -> None:
    """A peer that ends or stops while it has nothing to do is found before it is called again."""
    run = LiveRun(MLP, *live("patience=5"))

    def fail(step: int) -> None:
        if step == 2:
            run.wait_for(run.all_serve)
            ended, stopped = (queue[0].peer for queue in run.trainer.members.engine.queues[:2])
            run.kill(ended)
            run.wait_for(lambda: ended in {event.peer for event in run.kinds(EventKind.FAILED)})
            os.kill(run.pid(stopped), signal.SIGSTOP)
            run.wait_for(lambda: stopped in {event.peer for event in run.kinds(EventKind.GIVEN_UP)})
            os.kill(run.pid(stopped), signal.SIGCONT)

    assert_close(run.train(before_step=fail), one_device(MLP), 1e-5)


@pytest.mark.slow
def test_a_peer_that_stays_silent_is_replaced() -> None:
    """A stopped process does not even see that it shall end."""
    run = LiveRun(MLP, *live("patience=2"))
    stopped: list[int] = []

    def stop(event: LiveEvent) -> None:
        if not stopped and run.trainer.num_steps == 1 and event.kind == EventKind.SENT:
            stopped.append(event.peer)
            os.kill(run.pid(event.peer), signal.SIGSTOP)

    def wait(step: int) -> None:
        if step == 2:
            run.wait_for(lambda: bool(run.kinds(EventKind.FAILED)))

    run.react = stop
    got = run.train(before_step=wait)
    assert_close(got, one_device(MLP), 1e-5)
    assert [event.text[:7] for event in run.kinds(EventKind.FAILED) if event.peer in stopped] == ["silent:"]
    with pytest.raises(ProcessLookupError):
        os.kill(run.pid(stopped[0]), 0)


@pytest.mark.parametrize("lie", ["nan", slow("shape"), slow("gradient")])
def test_a_hostile_peer_is_banned(lie: str, ray: Any) -> None:
    node = ray.nodes()[0]["NodeID"]
    lasting = {"name": f"peer-{lie}", "namespace": NAMESPACE, "lifetime": "detached"}
    ray.remote(HostilePeer).options(num_cpus=0, **lasting).remote(node, lie)
    run = LiveRun(MLP, *live(stages=2))
    places = [one.handle for one in run.trainer.members.peers]
    hostile = places.index(ray.get_actor(f"peer-{lie}", namespace=NAMESPACE))

    def wait(step: int) -> None:
        if step == 1:
            run.wait_for(run.all_serve)

    run.check(before_step=wait)
    assert [event.peer for event in run.kinds(EventKind.BANNED)] == [hostile]


def test_divergence_bans_nobody() -> None:
    """If all peers compute a loss that is not finite, the step is skipped on all of them."""
    run = LiveRun(MLP, *live(stages=2))
    first, _, state = run.train(1)
    batch = make_batch(MLP, 0)
    batch["weights"][1] = np.nan
    before = run.strategy.from_canonical(state)
    after, metrics = run.strategy.step(before, batch)
    assert not metrics.finite
    skipped = jax.device_get(run.strategy.to_canonical(after))
    assert int(skipped["step"]) == 2
    assert_bitwise_equal((skipped["params"], skipped["optimizer"]), (state["params"], state["optimizer"]))
    assert not run.kinds(EventKind.BANNED)
    after, metrics = run.strategy.step(after, make_batch(MLP, 2))
    assert metrics.finite
    run.wait_for(run.all_serve)
    run.check_peers((None, None, jax.device_get(run.strategy.to_canonical(after))))
    assert len(first) == 1


def test_float16() -> None:
    """All peers compute the infinite gradients of a scale that is too large, and nobody is banned."""
    task, outcomes = MLP._replace(dtype="float16"), list[Any]()
    run = LiveRun(task, *live(stages=2))
    single = shared(task, f"--config.optimizer.accumulation_steps={NUM_MICROBATCHES}")
    tree = jax.tree.map(np.asarray, start(task))
    tree["optimizer"]["0"]["scale"] = np.float32(2**22)
    for strategy in (run.strategy, single):
        state, trace = strategy.from_canonical(tree), []
        for step in range(NUM_STEPS):
            state, metrics = strategy.step(state, strategy.place(make_batch(task, step)))
            trace.append((bool(metrics.finite), metrics.loss_scale))
        outcomes.append((trace, named(strategy.to_canonical(state))))
    (trace, got), (expected_trace, expected) = outcomes
    assert trace == expected_trace
    assert (trace[0], trace[-1][0]) == ((False, 2**22), True)
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-3, atol=2e-5, err_msg=name)
    assert not any(one.is_hostile for one in run.trainer.members.peers)


def test_a_later_trainer_takes_the_peers() -> None:
    """A run resumes from a checkpoint on the same peers, after its trainer is gone. An old trainer is refused."""
    first = LiveRun(MLP, *live())
    state = first.strategy.from_canonical(start(MLP))
    for step in range(2):
        state, _ = first.strategy.step(state, make_batch(MLP, step))
    first.wait_for(first.all_serve)
    saved = jax.device_get(first.strategy.to_canonical(state))
    second = LiveRun(MLP, *live())
    resumed = second.strategy.from_canonical(saved)
    for step in (2, 3):
        resumed, _ = second.strategy.step(resumed, make_batch(MLP, step))
    second.wait_for(second.all_serve)
    pids = [{run.pid(peer) for peer in range(len(run.trainer.members.peers))} for run in (first, second)]
    assert pids[0] >= pids[1]
    got = jax.device_get(second.strategy.to_canonical(resumed))
    for name, array in named(one_device(MLP)[2]["params"]).items():
        assert relative_error(named(got["params"])[name], array) < 1e-6, name
    with pytest.raises(TrainingError, match=r"another trainer has taken the peers of config.swarm.namespace='tests'"):
        first.strategy.step(state, make_batch(MLP, 2))


def test_a_stage_without_peers_ends_the_run(ray: Any) -> None:
    """Without joining, and with one peer per stage, nobody can replace a peer that is killed."""
    for handle in cluster.named_peers(ray, NAMESPACE):  # they take the CPUs
        ray.kill(handle)
    run = LiveRun(MLP, *live("join_seconds=0", "namespace=", "peers=2", stages=2))

    def kill(event: LiveEvent) -> None:
        if event.kind == EventKind.SENT and event.stage == 1 and not run.kinds(EventKind.FAILED):
            run.kill(event.peer)

    run.react = kill
    with pytest.raises(TrainingError, match="stage 1 has no peer, and no other peer can move there or join"):
        run.train()
