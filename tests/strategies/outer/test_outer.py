"""Workers of an outer step follow the recurrence of DiLoCo in NumPy, whatever is sent, lost or repeated."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar import cluster, strategies
from jaxpar.errors import TrainingError, UserError
from jaxpar.launch.signals import Stopped
from jaxpar.strategies.outer import options
from jaxpar.strategies.outer.options import OuterSettings
from jaxpar.strategies.outer.recorded import LocalLink, RecordedServer, Turns
from jaxpar.strategies.outer.server import Anchor, Difference, OuterAnswer, OuterServer
from jaxpar.strategies.outer.table import Contribution, OuterEvent
from tests.strategies.outer import together
from tests.strategies.outer.together import MLP, NUM_STEPS, recurrence, sent_by_int8, sent_by_topk, train_all
from tests.strategies.pipelines import assert_bitwise_equal, make_config, named, relative_error

STREAMING = {"fragments": 2, "overlap_steps": 1, "mix": 0.25}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "diloco": ({}, {}),
    "local SGD": ({"policy": "local_sgd"}, {"lr": 1.0, "momentum": 0.0}),
    "int8": ({"compression": "int8"}, {"send": sent_by_int8}),
    "topk": ({"compression": "topk", "ratio": 0.1}, {"send": partial(sent_by_topk, ratio=0.1)}),
    "streaming": (STREAMING, {"fragments": 2, "overlap": 1, "mix": 0.25}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_recurrence(name: str) -> None:
    """Three rounds of two workers with Adam and dropout. The bytes of each message are those of the plan."""
    settings, options = CASES[name]
    trees, server = train_all(settings)
    for tree, expected in zip(trees, recurrence(2, 4, **options), strict=True):
        got, reference = named(tree["params"]), named(expected)
        assert max(relative_error(got[path], x) for path, x in reference.items()) < 1e-6
    fragments = settings.get("fragments", 1)
    counted = [row for row in server.table if row.event == OuterEvent.COUNTED]
    assert len(counted) == 2 * (3 * fragments + fragments - 1)  # at the end, all fragments
    assert_bitwise_equal(trees[0]["params"], trees[1]["params"])
    sizes = together.details_of(settings).settings.message_bytes
    assert all(row.nbytes == sizes[row.fragment] for row in counted)
    plain = 4 * sum(together.details_of(settings).settings.lengths)
    assert sum(sizes) < (0.3 if "compression" in settings else 1.01) * plain


def test_workers_differ_between_rounds() -> None:
    """The recurrence would also hold if all workers had the same dropout or the same data."""
    first, second = recurrence(2, 4, fragments=2, overlap=1, until=NUM_STEPS - 1)
    layers = sorted(first)
    assert relative_error(together.flat(first, layers), together.flat(second, layers)) > 1e-4


def interrupted_run(settings: dict[str, Any], at: int, *, stops: bool = False) -> list[Contribution]:
    """Train two workers, of which worker 1 starts again after step `at`, and replay them. Return the table.

    Results and replay must be those without a stop. stops: worker 1 stops while it waits, before there is an answer.
    """
    expected, _ = train_all(settings)
    server, turns = together.make_server(settings), Turns(2)
    saved: list[Any] = []

    class Stopping(LocalLink):
        def result(self, fragment: int, step: int) -> OuterAnswer | None:
            assert not server.leave(1, 0, 0.0, fragment, step)
            return None

    def interrupted(server: Any, turns: Turns, *, is_replay: bool) -> Any:
        own = {**settings, "worker": 1}
        strategy = together.worker_of(own, server, turns, Stopping if stops and not is_replay else LocalLink)
        if is_replay:
            server.starts[1] = 0
        state = together.train_worker(strategy, 1, strategy.init(jax.random.key(0)), 0, at)
        assert state.sent is not None
        trees = jax.tree.map(np.array, jax.device_get((strategy.to_canonical(state), strategy.to_private(state))))
        saved.append(trees)
        turns.notify()
        if is_replay:
            server.starts[1] = 1
        strategy = together.worker_of(own, server, turns)
        state = together.train_worker(strategy, 1, strategy.from_canonical(*trees), at, NUM_STEPS)
        return jax.device_get(strategy.to_canonical(state))

    def whole(server: Any, turns: Turns) -> Any:
        if stops:
            turns.wait_for(lambda: saved or None)  # so that there is no answer yet when worker 1 stops
        strategy = together.worker_of({**settings, "worker": 0}, server, turns)
        state = together.train_worker(strategy, 0, strategy.init(jax.random.key(0)), 0, NUM_STEPS)
        return jax.device_get(strategy.to_canonical(state))

    live = [partial(whole, server, turns), partial(interrupted, server, turns, is_replay=False)]
    for got, want in zip(together.together(live, turns), expected, strict=True):
        assert_bitwise_equal(got, want)
    initial = [anchor.vector for anchor in together.make_server(settings).anchors]
    recorded, turns = RecordedServer(server.settings, initial, server.table), Turns(2)
    recorded.starts[0] = 0
    replayed = [partial(whole, recorded, turns), partial(interrupted, recorded, turns, is_replay=True)]
    for got, want in zip(together.together(replayed, turns), expected, strict=True):
        assert_bitwise_equal(got, want)
    assert_bitwise_equal(*saved)
    return server.table


def test_a_worker_that_resumes_between_two_rounds() -> None:
    """A checkpoint has a message in flight. The result and its replay are those without a stop."""
    table = interrupted_run({**STREAMING, "compression": "topk", "ratio": 0.1}, 6)
    events = [row.event for row in table if row.worker == 1]
    assert events.count(OuterEvent.RESUME) == events.count(OuterEvent.REPEATED) == 1
    assert events.count(OuterEvent.COUNTED) == 7


def test_a_worker_that_stops_while_it_waits() -> None:
    """A run saves the step that it has taken. Its difference counts, and the run continues with the answer."""
    table = interrupted_run({"compression": "int8"}, 4, stops=True)
    events = [(row.event, row.start) for row in table if row.worker == 1 and row.step in (-1, 4)]
    left, counted, again = OuterEvent.LEAVE, OuterEvent.COUNTED, OuterEvent.REPEATED
    assert events == [(left, 0), (OuterEvent.RESUME, 1), (counted, 0), (again, 1)]


def test_a_worker_that_stops_at_the_end_saves_nothing() -> None:
    """The result of a run is that of the last averages."""
    settings = {"num_workers": 1, "worker": 0}
    server, turns = together.make_server(settings), Turns(1)

    class Stopping(LocalLink):
        def result(self, fragment: int, step: int) -> OuterAnswer | None:
            return None if step == NUM_STEPS else super().result(fragment, step)

    strategy = together.worker_of(settings, server, turns, Stopping)
    with turns, pytest.raises(Stopped, match="while waiting for the last averages; the same command continues"):
        together.train_worker(strategy, 0, strategy.init(jax.random.key(0)), 0, NUM_STEPS)


def test_parameters_that_are_not_finite_are_not_sent() -> None:
    """All workers would get them."""
    server, turns = together.make_server({}), Turns(1)
    strategy = together.worker_of({"worker": 0}, server, turns)
    tree = jax.device_get(strategy.to_canonical(strategy.init(jax.random.key(0))))
    [layer, *_] = [name for name, arrays in tree["params"].items() if jax.tree.leaves(arrays)]

    def train(state: Any) -> None:
        for number in range(4):
            state, _ = strategy.step(state, strategy.place(together.own_batch(0, number)))

    with turns:
        state, _ = strategy.begin(strategy.init(jax.random.key(0)), 0, Path())
        tree["params"][layer] = jax.tree.map(lambda x: np.full_like(x, np.nan), tree["params"][layer])
        state = state._replace(inner=strategy.from_canonical(tree).inner)
        with pytest.raises(TrainingError, match="worker 0 has parameters that are not finite after step 4; they are"):
            train(state)
    assert not any(row.event == OuterEvent.COUNTED for row in server.table)


# ---- the server alone: fragments of one element, which are sent as they are -----------------------------------------


def settings_of(**changes: Any) -> OuterSettings:
    base = OuterSettings(3, 2, 4, 40, 0.5, 0.5, "none", 0.1, 0, 0.5, 10.0, 0, (1,))
    return base._replace(**changes)


def difference(value: float, step: int, read: int = 0, start: int = 0) -> Difference:
    return Difference(start, step, read, np.array([value], np.float32).view(np.uint8))


def anchor(version: int, value: float) -> OuterAnswer:
    return OuterAnswer(version, np.float32(value))  # type: ignore[arg-type]  # equal to a vector of one element


def server_of(**changes: Any) -> OuterServer:
    settings = settings_of(**changes)
    return OuterServer(settings, [Anchor(settings, np.array([10.0], np.float32))])


def test_a_late_contribution_counts_once() -> None:
    """A silent worker's difference counts in the round that is open when it arrives, and not when it comes again."""
    server = server_of()
    for worker in (0, 1):
        server.join(worker, None, 0, 0.0)
    server.offer(0, difference(2.0, 4), 1.0)
    server.tick(9.0)
    assert server.answer(0, 0, 0, 4) is None
    server.alive(0, 0, 9.5)
    server.tick(11.0)  # worker 1 is silent
    # m = 2, 10 - 0.5 (2 + 0.5 * 2)
    assert server.answer(0, 0, 0, 4) == anchor(1, 8.5)
    server.offer(0, difference(1.0, 8, read=1), 12.0)
    # m = 0.5 * 2 + 1 = 2, 8.5 - 0.5 (1 + 0.5 * 2)
    assert server.answer(0, 0, 0, 8) == anchor(2, 7.5)
    server.offer(1, difference(4.0, 4), 13.0)  # of round 0, in round 2, which waits for both again
    assert server.answer(1, 0, 0, 4) is None
    server.offer(0, difference(2.0, 12, read=2), 14.0)
    # mean 3, m = 0.5 * 2 + 3 = 4, 7.5 - 0.5 (3 + 0.5 * 4)
    assert server.answer(1, 0, 0, 4) == server.answer(0, 0, 0, 12) == anchor(3, 5.0)
    assert server.join(1, 0, 0, 15.0).start == 1  # from its checkpoint of step 0
    server.offer(1, difference(4.0, 4, start=1), 16.0)
    assert server.answer(1, 1, 0, 4) == anchor(3, 5.0)
    assert server.answer(1, 1, 0, 4) is None  # it is no longer in memory
    with pytest.raises(TrainingError, match="another process has taken the place of worker 1"):
        server.answer(1, 0, 0, 4)
    assert server.anchors[0].version == 3
    rows = [(row.event, row.worker, row.start, row.step, row.read, row.counted, row.got) for row in server.table]
    counted, again = OuterEvent.COUNTED, OuterEvent.REPEATED
    assert [row for row in rows if row[0] in (counted, again)] == [
        (counted, 0, 0, 4, 0, 0, 1),
        (counted, 0, 0, 8, 1, 1, 2),
        (counted, 0, 0, 12, 2, 2, 3),
        (counted, 1, 0, 4, 0, 2, 3),
        (again, 1, 1, 4, 0, -1, 3),
    ]
    assert [row.event for row in server.table if row.worker == 1][1:3] == [OuterEvent.SILENT, OuterEvent.RETURN]
    with pytest.raises(TrainingError, match="another process has taken the place of worker 1"):
        server.offer(1, difference(1.0, 8), 17.0)
    server.tick(30.0)
    assert not server.leave(1, 1, 31.0, 0, 8)  # of a silent one
    assert [row.event for row in server.table if row.worker == 1][-2:] == [OuterEvent.SILENT, OuterEvent.LEAVE]


def test_a_worker_of_another_training_is_refused() -> None:
    """Its anchor is not one of this server, so its difference would move the others anywhere."""
    server = server_of()
    server.join(0, None, 0, 0.0)
    with pytest.raises(TrainingError, match=r"worker 1 continues another training .* and the server knows 0 starts"):
        server.join(1, 2100, 0, 1.0)
    server.join(1, None, 0, 2.0)
    with pytest.raises(TrainingError, match="is from version 20, and the server has 0"):
        server.offer(1, difference(1.0, 4, read=20), 3.0)
    assert server.answer(1, 0, 0, 4) is None


def test_a_worker_joins_at_the_step_of_the_others() -> None:
    """The first round waits for min_workers. Rounds wait for a worker that joins, and for none that leaves."""
    server = server_of()
    server.join(0, None, 0, 0.0)
    server.offer(0, difference(2.0, 4), 1.0)
    assert server.answer(0, 0, 0, 4) is None
    server.join(1, None, 0, 2.0)
    server.offer(1, difference(4.0, 4), 3.0)
    assert server.answer(1, 0, 0, 4) == anchor(1, 7.75)
    server.offer(0, difference(1.0, 8, read=1), 4.0)
    joined = server.join(2, None, 0, 5.0)
    assert (joined.start, joined.step, joined.anchors) == (0, 4, [anchor(1, 7.75)])
    assert server.leave(1, 0, 6.0, 0, 4)
    assert server.answer(0, 0, 0, 8) is None
    server.offer(2, difference(1.0, 8, read=1), 7.0)
    assert server.answer(0, 0, 0, 8) == server.answer(2, 0, 0, 8)
    assert server.join(1, None, 0, 8.0)[:2] == (1, 8)


def test_the_order_of_arrival_does_not_matter() -> None:
    """In float32, 1 + 1e8 - 1e8 is 0 or 1."""
    values, results = {0: 1e8, 1: 1.0, 2: -1e8}, set()
    for order in ((0, 1, 2), (0, 2, 1), (2, 1, 0)):
        server = server_of(min_workers=3)
        for worker in order:
            server.join(worker, None, 0, 0.0)
        for worker in order:
            server.offer(worker, difference(values[worker], 4), 1.0)
        results.add(float(server.anchors[0].vector[0]))
    assert results == {10.0}


def test_a_replay_notices_what_is_not_in_the_table() -> None:
    """A replay does not wait for a contribution that nobody makes, or take one from another version."""
    row = Contribution(0.0, OuterEvent.COUNTED, 0, 0, step=4, fragment=0, read=0, counted=0, got=1, nbytes=4)
    server = RecordedServer(settings_of(), [np.zeros(1, np.float32)], [row, row._replace(worker=1)])
    server.starts[0] = 0
    with pytest.raises(
        TrainingError, match=r"worker 0 contributes 4 bytes, from version 1, after step 4; the table has"
    ):
        server.offer(0, difference(1.0, 4, read=1), 0.0)
    with pytest.raises(TrainingError, match=r"^the table has no contribution of worker 0 after step 8$"):
        server.answer(0, 0, 0, 8)
    turns = Turns(1)
    link = LocalLink(server, turns, 0)
    with turns:
        link.offer(difference(1.0, 4))
        with pytest.raises(TrainingError, match="all workers wait for a contribution that nobody makes"):
            link.result(0, 4)


REFUSED = {
    "outer.num_workers=-1": "config.outer.num_workers is -1; it must be between 0 and 1000",
    "outer.worker=2": "config.outer.worker is 2; it must be between 0 and 1 with config.outer.num_workers=2",
    "outer.min_workers=3": "config.outer.min_workers is 3; it must be between 0 and 2",
    "outer.every_steps=0": "config.outer.every_steps is 0; it must be at least 1",
    "outer.policy=average": "config.outer.policy is 'average'; it must be one of diloco, local_sgd",
    "outer.lr=0": "config.outer.lr is 0.0; it must be finite and greater than 0",
    "outer.momentum=1": "config.outer.momentum is 1.0; it must be at least 0 and less than 1",
    "outer.compression=int4": "config.outer.compression is 'int4'; it must be one of none, int8, topk",
    "outer.ratio=0": "config.outer.ratio is 0.0; it must be greater than 0 and at most 1",
    "outer.fragments=3": "config.outer.fragments is 3; it must be a divisor of 4 (config.outer.every_steps)",
    "outer.overlap_steps=4": "config.outer.overlap_steps is 4; it must be at least 0 and less than 4, the steps",
    "outer.mix=2": "config.outer.mix is 2.0; it must be between 0 and 1",
    "outer.silence_seconds=0": "config.outer.silence_seconds is 0.0; it must be finite and at least 1",
    "watchdog_seconds=5": "config.watchdog_seconds is 5.0; it must be 0 or more than 30.0 (config.outer.silence_sec",
    "outer.name=": "config.outer.name is ''; it must be the name of the run on the Ray cluster",
    "outer.address=": "config.outer.address is ''; it must be HOST:PORT or auto",
    "num_steps=10": "config.num_steps is 10; it must be a positive multiple of 4 (config.outer.every_steps)",
    "elastic_seconds=2": "config.elastic_seconds is 2; it must be 0 with config.outer.num_workers=2",
    "strategy=swarm": "config.strategy is 'swarm'; it must be a synchronous strategy with config.outer.num_workers=2",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_invalid_outer_settings(setting: str) -> None:
    base = together.overrides({})
    if setting == "elastic_seconds=2":
        base += ["--config.strategy=data_parallel", "--config.mesh.data=-1"]
    config = make_config(MLP, *base, f"--config.{setting}")
    with pytest.raises(UserError, match=re.escape(REFUSED[setting])):
        strategies.decide(config, cluster.find_cluster())


def test_what_cannot_be_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[tuple[list[str], str]] = [
        (
            ["outer.every_steps=12", "outer.fragments=6"],
            "outer.fragments is 6; it must be at most 4, the number of laye",
        ),
        (["strategy=data_parallel", "mesh.data=2", "exchange=bagua_model_average"], "all replicas have the same param"),
        (
            ["strategy=pipeline", "mesh.stage=2", "pipeline.schedule=pipedream"],
            "no update is delayed, with config.oute",
        ),
    ]
    for changes, message in refused:
        config = make_config(MLP, *together.overrides({}), *(f"--config.{one}" for one in changes))
        with pytest.raises(UserError, match=re.escape(message)):
            strategies.plan(config, together.problem(), cluster.find_cluster())
    config = make_config(MLP, *together.overrides({}))
    with pytest.raises(UserError, match="num_workers=2 runs in a single process, but there are 2 processes"):
        strategies.decide(config, cluster.named_cluster("cpu", 2, num_processes=2))
    strategy = together.worker_of({"worker": 0}, None, Turns(1))
    state = strategy.from_canonical({**together.initial_tree(), "step": np.int32(4)})
    with pytest.raises(UserError, match="worker is 0, whose checkpoint of step 4 has no anchors for the changed"):
        strategy.begin(state, 4, None)  # type: ignore[arg-type]
    monkeypatch.setattr(options, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"num_workers is 2; it must be 0 without Ray, which `pip install"):
        strategies.decide(config, cluster.find_cluster())
