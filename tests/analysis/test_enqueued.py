"""A simulated step of several programs: by hand, and a dispatched pipeline against the simulation of its table."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpar.analysis import step_time
from jaxpar.analysis.enqueued import Costs, Interval, busy, simulate_calls
from jaxpar.analysis.rates import ENQUEUE_SECONDS, HOP_SECONDS
from jaxpar.analysis.step_time import predict, predict_program
from jaxpar.pipeline.executor.dispatch import dispatch_order
from jaxpar.pipeline.executor.enqueue import CallInput, ProgramCall
from jaxpar.pipeline.tables.simulate import Times, simulate_table
from jaxpar.pipeline.tables.table import W
from jaxpar.strategies.strategy import CompiledProgram
from tests.analysis.test_step_time import cluster, kernel
from tests.strategies.pipelines import Task, pipeline, shared

GPT = Task("gpt", "causal_lm", "sgd", layers=2)


def program(devices: list[int], *calls: ProgramCall, compiled: Any = None) -> CompiledProgram:
    mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(id=device) for device in devices]))
    return CompiledProgram(compiled, calls=calls, mesh=mesh)


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
    one = simulate_calls(STEP, Costs(seconds, send, 1.0, 2))
    # Program 1 starts 4 s after call 0, and program 2 after program 0, which device 0 runs twice.
    assert one == [Interval(0, 1, 11), Interval(1, 15, 20), Interval(0, 11, 21), Interval(2, 20, 22)]
    two = simulate_calls(STEP, Costs(seconds, send, 8.0, 1))  # each device has a host of its own
    assert two == [Interval(0, 8, 18), Interval(1, 22, 27), Interval(0, 18, 28), Interval(2, 27, 29)]
    assert busy(STEP, seconds) == {0: 21, 1: 6}


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
    program_of = {call.number: index for index, one in enumerate(programs) for call in one.calls}
    actions = [number for number in sorted(program_of) if "stashes" in programs[program_of[number]].arguments]
    order = dispatch_order(table)
    seconds = [0.0] * len(programs)
    for number, action in zip(actions, order, strict=True):
        seconds[program_of[number]] = of_phase[action.phase]

    def send(_sender: int, _receiver: int, _nbytes: int) -> float:
        return communication

    found = simulate_calls(programs, Costs(seconds, send, 0.0, stages))
    times = [table.num_chunks * one for one in (forward, backward, weight)]
    expected = simulate_table(table, Times(*times), communication).timeline
    assert [(found[number].start, found[number].end) for number in actions] == [one[-2:] for one in expected]
    assert {found[number].end for number in program_of if number > actions[-1]} >= {found[-1].end}
