"""A simulated step of several programs: by hand, and a dispatched pipeline against the simulation of its table."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpar.choose.costs.rates import HOP_SECONDS
from jaxpar.inspect import step_time
from jaxpar.inspect.enqueued import Costs, Interval, busy, sender_of, simulate_calls, simulated_step
from jaxpar.inspect.step_time import predict, predict_program
from jaxpar.strategies.pipeline.executor.dispatch import dispatch_order
from jaxpar.strategies.pipeline.executor.enqueue import ENQUEUE_SECONDS, CallInput, ProgramCall
from jaxpar.strategies.pipeline.tables.simulate import Times, simulate_table, steady_bubble_rate, work
from jaxpar.strategies.pipeline.tables.table import W
from jaxpar.strategies.strategy import CompiledProgram
from tests.inspect.test_step_time import cluster, kernel
from tests.strategies.pipelines import Task, pipeline, shared
from tests.strategies.test_continuous import DISPATCH, MLP
from tests.strategies.test_continuous import settings as continuous_settings

GPT = Task("gpt", "causal_lm", "sgd", layers=2)


def program(devices: list[int], *calls: ProgramCall, compiled: Any = None) -> CompiledProgram:
    mesh: Any = SimpleNamespace(devices=np.array([[SimpleNamespace(id=device) for device in devices]]))
    return CompiledProgram(compiled, calls=calls, mesh=mesh)


def action_calls(programs: Sequence[CompiledProgram]) -> list[tuple[int, int]]:
    """Return the calls that are F, B or W, in their order: their number, and the index of their program."""
    calls = [(call.number, index, one.arguments) for index, one in enumerate(programs) for call in one.calls]
    return [(number, index) for number, index, arguments in sorted(calls) if "stashes" in arguments]


STEP = [
    program([0], ProgramCall(0, ()), ProgramCall(2, ())),
    program([1], ProgramCall(1, (CallInput(0, 4000),))),
    program([0, 1], ProgramCall(3, (CallInput(1, 0), CallInput(2, 0)))),
]


def test_a_device_waits_for_its_inputs_and_for_its_host() -> None:
    def send(sender: int, receiver: int, nbytes: int) -> float:
        assert (sender, receiver) == (0, 1)
        return nbytes / 1000

    seconds = [10.0, 5.0, 1.0]
    groups = [[], [], [[0, 1]]]
    one = simulate_calls(STEP, Costs(seconds, groups, send, 1.0, 2))
    # Program 1 starts 4 s after call 0, and program 2 after program 0, which device 0 runs twice.
    assert one == [Interval(0, 1, 11), Interval(1, 15, 20), Interval(0, 11, 21), Interval(2, 21, 22)]
    two = simulate_calls(STEP, Costs(seconds, groups, send, 8.0, 1))  # each device has a host of its own
    assert two == [Interval(0, 8, 18), Interval(1, 22, 27), Interval(0, 18, 28), Interval(2, 28, 29)]
    alone = simulate_calls(STEP, Costs(seconds, [[], [], []], send, 1.0, 2))
    assert alone[-1] == Interval(2, 20, 22)  # device 1 does not wait for device 0
    assert busy(STEP, seconds) == {0: 21, 1: 6}


def test_a_replica_receives_from_its_own_replica() -> None:
    """Two pipelines, devices 0, 1, 2 and 3, 4, 5, have their first stage on two devices each."""

    def on(*rows: list[int]) -> CompiledProgram:
        mesh: Any = SimpleNamespace(devices=np.array([[SimpleNamespace(id=d) for d in row] for row in rows]))
        compiled: Any = None
        return CompiledProgram(compiled, mesh=mesh)

    first, both, end = on([0], [3]), on([0, 1], [3, 4]), on([2], [5])
    assert [sender_of(end, both, place) for place in range(4)] == [2, 2, 5, 5]
    assert [sender_of(first, end, place) for place in range(2)] == [0, 3]


def test_the_predicted_time_is_that_of_the_busiest_device_and_its_waits() -> None:
    def compiled(kilobytes: int) -> Any:
        size = 250 * kilobytes
        text = f"ENTRY %main (x: f32[{size}]) -> f32[{size}] {{\n  %x = f32[{size}]{{0}} parameter(0)\n"
        return SimpleNamespace(as_text=lambda: f"{text}  ROOT %y = f32[{size}]{{0}} negate(%x)\n}}\n")

    sizes = 1000, 800, 100
    programs = [one._replace(compiled=compiled(size)) for one, size in zip(STEP, sizes, strict=True)]
    first, second, last = (kernel(2 * size) for size in sizes)
    assert predict_program(programs[1], cluster()).seconds == pytest.approx(second)
    time = predict(programs, cluster())
    sent = 4e3 / 0.8e9 + HOP_SECONDS["host"]
    assert time.seconds == pytest.approx(ENQUEUE_SECONDS + max(2 * first, first + sent + second) + last)
    assert time.by_kind()["kernel"] == pytest.approx(2 * first + last)
    assert time.exposed == pytest.approx(time.by_kind()[step_time.WAIT])


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 4), ("interleaved_1f1b", 2), ("zb_h1", 2)])
@pytest.mark.parametrize("communication", [0.0, 0.25])
def test_a_dispatched_pipeline_takes_as_long_as_its_table(schedule: str, stages: int, communication: float) -> None:
    """The calls are recorded from the step itself, so they have the order and the dependences of the table."""
    task = GPT._replace(layers=max(2, 2 * stages))
    strategy: Any = shared(task, *pipeline(schedule, stages, "--config.pipeline.executor=dispatch"))
    programs, table = strategy.compile(), strategy.plan.details.table
    forward, backward, weight = 1.0, 1.5, 0.75
    num_phases = 3 if (table.actions["kind"] == W).any() else 2
    of_phase = (forward, backward, weight) if num_phases == 3 else (forward, backward + weight)
    actions, seconds = action_calls(programs), [0.0] * len(programs)
    for (_, index), action in zip(actions, dispatch_order(table), strict=True):
        seconds[index] = of_phase[action.phase]

    def send(_sender: int, _receiver: int, _nbytes: int) -> float:
        return communication

    found = simulate_calls(programs, Costs(seconds, [[] for _ in programs], send, 0.0, stages))
    times = [table.num_chunks * one for one in (forward, backward, weight)]
    expected = simulate_table(table, Times(*times), communication).timeline
    assert [(found[number].start, found[number].end) for number, _ in actions] == [one[-2:] for one in expected]
    last, _ = actions[-1]
    assert {one.end for one in found[last + 1 :]} >= {found[-1].end}


@pytest.mark.parametrize(("schedule", "stages", "per_batch"), [("pipedream", 4, 1), ("pipedream_2bw", 2, 2)])
def test_a_step_without_a_flush_takes_as_long_as_its_period(schedule: str, stages: int, per_batch: int) -> None:
    """A step continues what earlier ones left, so that its time is that of the busiest device and its bubble."""
    strategy: Any = shared(MLP, *continuous_settings(schedule, stages, per_batch, 1, DISPATCH))
    programs, details = strategy.compile(), strategy.plan.details
    of_device = [(1.0 + column % 2, 1.5) for column in range(stages)]
    seconds = [0.0] * len(programs)
    actions = [action for action in dispatch_order(details.table) if not action.is_update]
    for (_, index), action in zip(action_calls(programs), actions, strict=True):
        seconds[index] = of_device[action.column][action.phase]
    costs = Costs(seconds, [[] for _ in programs], lambda *_: 0.25, 0.0, stages)
    forward, backward = (list(of_phase) for of_phase in zip(*of_device, strict=True))
    times = Times(forward, backward, 0.0)
    bubble = steady_bubble_rate(details.table, times, 0.25)
    assert simulated_step(programs, costs) == pytest.approx(max(work(details.table, times)) / (1 - bubble))
