"""The interface between the server and transports works for a transport that is not part of the package."""

import functools
import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import cluster
from jaxpar.core.state import State
from jaxpar.strategies.asynchronous import options
from jaxpar.strategies.asynchronous.layouts import DeviceNumbers
from jaxpar.strategies.asynchronous.programs import Chunk, SentGradient
from jaxpar.strategies.asynchronous.server import ServerEngine
from jaxpar.strategies.asynchronous.table import validate
from jaxpar.strategies.asynchronous.transport import (
    Assignment,
    BeginTransport,
    Delivery,
    LiveTransport,
    Workers,
)
from jaxpar.strategies.asynchronous.virtual_time import VirtualTime
from tests.strategies.asynchronous import reference
from tests.strategies.asynchronous.test_engines import (
    BATCHES,
    PLAIN,
    RATES,
    RULES,
    TASKS,
    assert_close,
    asynchronous,
    dc_asgd,
)
from tests.strategies.pipelines import NUM_STEPS, make_batch, make_config, make_problem, named, start

TASK, WORKERS = TASKS["sgd"], 4


class Queue(LiveTransport):
    """A third transport: workers compute immediately, in the server's thread, and their gradients wait in a queue."""

    def __init__(self, workers: Workers, state: State):
        super().__init__(workers, state, bound=math.inf)
        self._queue = deque[tuple[Assignment, SentGradient]]()

    def deliver(self, chunks: Mapping[int, Chunk], *, drain: bool) -> Iterator[Delivery]:
        if chunks:
            self.give_out(chunks)
        while True:
            while (assignment := self.assign()) is not None:
                read = jax.device_put(self._params, self._workers.device_of(assignment.worker))
                made = self._workers.compute(assignment.worker, read, assignment.chunk)
                self._queue.append((assignment, self._workers.send(made, self._params)))
            if self.is_over(drain=drain):
                return
            assignment, sent = self._queue.popleft()
            yield self.arrived(assignment), sent
            self.applied(assignment)

    def close(self) -> None:
        assert not self._queue


def make_engine(begin: BeginTransport, *mitigations: str, num_devices: int = 2) -> tuple[ServerEngine, State]:
    """Return an engine with that transport, and the initial state of training."""
    overrides = (*PLAIN, *RULES["momentum"][1], *asynchronous("mode=live", *mitigations, workers=WORKERS))
    config, devices = make_config(TASK, *overrides), cluster.devices()[:num_devices]
    problem, made = options.build_mitigations(config, make_problem(config, TASK), None)
    numbers = DeviceNumbers(WORKERS, num_devices, server=0)
    engine = ServerEngine(problem, made, numbers, devices, devices[0], begin, is_grouped=False)
    tree = start(TASK, *PLAIN, *RULES["momentum"][1])
    params = jax.device_put(tree["params"], devices[0])
    state = State(jnp.int32(0), jnp.asarray(tree["key"]), params, problem.optimizer.init(params))
    return engine, jax.device_put(state, devices[0])


def train(engine: ServerEngine, run: Any, first: int = 0, last: int = NUM_STEPS) -> float:
    """Train on batches first to last, excluding last, and return the sum of the weights of their examples."""
    total = 0.0
    for step in range(first, last):
        run, metrics = engine.step(run, make_batch(TASK, step))
        total += float(metrics.sums.weight)
    return total


@pytest.mark.parametrize("strength", [None, 0.5])
def test_a_third_transport(strength: float | None) -> None:
    """Its run equals the plain loop over its table, and virtual time replays that table bitwise."""
    settings = () if strength is None else ("mitigations=dc_asgd", f"dc_strength={strength}")
    engine, state = make_engine(Queue, *settings)
    begun = named(state.params)
    run = engine.start(state)
    assert train(engine, run) == pytest.approx(sum(float(batch["weights"].sum()) for batch in BATCHES))
    end, table = named(engine.params(run)), engine.table(run)
    assert table is not None
    validate(table)
    assert sorted(table.chunk) == list(range(WORKERS * NUM_STEPS))
    assert table.staleness.max() == WORKERS - 1
    mitigations = () if strength is None else (dc_asgd,)
    expected = reference.to_server(table, begun, BATCHES, RULES["momentum"][2], RATES, mitigations=mitigations)
    assert_close(end, expected, begun)
    again, state = make_engine(functools.partial(VirtualTime, table), *settings, num_devices=1)
    run = again.start(state)
    train(again, run)
    for path, x in named(again.params(run)).items():
        np.testing.assert_array_equal(x, end[path], path)


def test_stopped_and_resumed_on_a_third_transport() -> None:
    """The result is one run with one table, and its weights follow from that table."""
    first, state = make_engine(Queue)
    begun, run = named(state.params), first.start(state)
    train(first, run, 0, 4)
    middle, private = jax.device_get((first.canonical(run), first.private(run)))
    assert int(middle.step) == 4
    second, _ = make_engine(Queue)
    run = second.start(jax.device_put(middle, cluster.devices()[0]), private)
    train(second, run, 4)
    table = second.table(run)
    assert table is not None
    assert sorted(table.chunk) == list(range(WORKERS * NUM_STEPS))
    validate(table)
    expected = reference.to_server(table, begun, BATCHES, RULES["momentum"][2], RATES)
    assert_close(named(second.params(run)), expected, begun)


def test_late_gradients_count_in_the_step_that_they_end() -> None:
    """Sums of each step by hand from the table, and bitwise those of the replay. The run is drained after steps 2, 5.

    With this transport, three of four gradients are in flight after every step.
    """
    engine, state = make_engine(Queue)
    run, counted = engine.start(state), []
    for step in range(NUM_STEPS):
        run, early = engine.step(run, make_batch(TASK, step))
        whole = engine.drain(run) if step in (2, 5) else early
        assert whole is not None
        assert (float(early.sums.weight) < float(whole.sums.weight)) == (step in (2, 5))
        counted.append(whole)
    table = engine.table(run)
    assert table is not None
    weights = np.zeros(NUM_STEPS)
    for step, chunk in zip(table.step, table.chunk, strict=True):
        weights[step] += BATCHES[chunk // WORKERS]["weights"][chunk % WORKERS :: WORKERS].sum()
    np.testing.assert_allclose([float(metrics.sums.weight) for metrics in counted], weights, rtol=1e-6)
    again, state = make_engine(functools.partial(VirtualTime, table), num_devices=1)
    run = again.start(state)
    for step, expected in enumerate(counted):
        run, metrics = again.step(run, make_batch(TASK, step))
        for got, x in zip(jax.tree.leaves(metrics), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(got, x, str(step))


def chunks(first: int, last: int) -> dict[int, Chunk]:
    return {number: Chunk({}, None, 0) for number in range(first, last)}


def live_workers(step: int) -> LiveTransport:
    """Return the transport of two workers without programs and devices, from this step on."""
    nothing: Any = None
    workers = Workers(nothing, DeviceNumbers(2, 1, server=0), [], nothing, nothing)
    return LiveTransport(workers, State(jnp.int32(step), nothing, nothing, nothing), bound=1)


def test_the_schedule_of_live_workers() -> None:
    """Workers and chunks are first come, first served. With a bound, workers that are too far ahead must wait."""
    schedule = live_workers(0)
    assert schedule.assign() is None
    assert schedule.is_over(drain=True)
    schedule.give_out(chunks(0, 2))
    first, second = schedule.assign(), schedule.assign()
    assert first is not None
    assert second is not None
    assert [(one.worker, one.number, one.version) for one in (first, second)] == [(0, 0, 0), (1, 1, 0)]
    assert schedule.assign() is None
    assert not schedule.is_over(drain=False)
    schedule.applied(second)
    assert schedule.is_over(drain=False)
    assert not schedule.is_over(drain=True)
    schedule.give_out(chunks(2, 4))
    third = schedule.assign()
    assert third is not None
    assert (third.worker, third.number, third.version) == (1, 2, 1)
    assert schedule.arrived(third)[:4] == (1, 1, 1, 2)
    schedule.applied(third)
    assert schedule.assign() is None  # worker 1 is 2 ahead
    assert not schedule.is_over(drain=False)
    row = schedule.arrived(first)
    assert (row.worker, row.read, row.update, row.staleness, row.mean_share, row.size) == (0, 0, 2, 2, 0.5, 1)
    schedule.applied(first)
    last = schedule.assign()
    assert last is not None
    assert (last.worker, last.number, last.version) == (1, 3, 3)
    table = schedule.table()
    assert table is not None
    assert table.step.tolist() == [0, 1, 1]
    assert table.update.tolist() == [0, 1, 2]
    other = live_workers(2)
    other.restore(schedule.in_flight())
    resumed = other.table()
    assert resumed is not None
    for got, expected in zip(resumed, table, strict=True):
        np.testing.assert_array_equal(got, expected)
    other.give_out(chunks(4, 5))
    after = other.assign()
    assert after is not None
    assert after.worker == 0
    assert after.start >= table.finish[-1]
