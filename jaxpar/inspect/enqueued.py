"""Simulates a step of several programs that the host enqueues on different devices, as a dispatched pipeline does.

The host of each process enqueues the calls on its devices one after the other, and waits for none of them. A device
runs its calls in this order, each as soon as its inputs have arrived. A result is sent when it is complete, while its
device runs the next call. What a device sends to different devices does not share a link: in a pipeline, activations
and their gradients go to different neighbours.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.strategies.strategy import CompiledProgram

STEPS_TO_FILL = 20  # steps until all devices of a pipeline that never drains are busy


class Interval(NamedTuple):
    """The time in which a program runs, from its first device to its last, since the host began to enqueue the step."""

    program: int  # its index
    start: float  # seconds
    end: float


class Costs(NamedTuple):
    """The costs of the parts of a step."""

    seconds: Sequence[float]  # of each program
    # ids of the devices of each program that wait for each other, because they communicate. Others run alone.
    groups: Sequence[Sequence[Sequence[int]]]
    # (sender, receiver, bytes) -> seconds until a result has arrived. Devices are their ids.
    send: Callable[[int, int, int], float]
    enqueue: float  # seconds of the host for each call on its devices
    devices_per_process: int  # number of devices whose calls one host enqueues


def simulate_calls(programs: Sequence[CompiledProgram], costs: Costs, num_steps: int = 1) -> list[Interval]:
    """Return when each call runs, in order. An input of an earlier step has a negative number; it is there at first."""
    devices = [ids(program) for program in programs]
    calls = {call.number: (index, call.inputs) for index, program in enumerate(programs) for call in program.calls}
    host: dict[int, float] = {}
    free: dict[int, float] = {}
    intervals: list[Interval] = []
    ends: list[dict[int, float]] = []  # by device
    for step in range(num_steps):
        for _, (index, inputs) in sorted(calls.items()):
            for process in {device // costs.devices_per_process for device in devices[index]}:
                host[process] = host.get(process, 0.0) + costs.enqueue
            starts = {}
            for place, device in enumerate(devices[index]):
                start = max(host[device // costs.devices_per_process], free.get(device, 0.0))
                for arrival in inputs:
                    made = step * len(calls) + arrival.call
                    if made < 0:
                        continue
                    if arrival.nbytes:
                        sender = sender_of(programs[intervals[made].program], programs[index], place)
                        start = max(start, ends[made][sender] + costs.send(sender, device, arrival.nbytes))
                    else:
                        start = max(start, ends[made].get(device, 0.0))
                starts[device] = start
            for group in costs.groups[index]:
                starts |= dict.fromkeys(group, max(starts[device] for device in group))
            ends.append({device: start + costs.seconds[index] for device, start in starts.items()})
            intervals.append(Interval(index, min(starts.values()), max(ends[-1].values())))
            free |= ends[-1]
    return intervals


def copies(programs: Sequence[CompiledProgram]) -> Iterator[tuple[str, int, int]]:
    """Yield what a device sends for a call of a step: dtype, id of the sender, and bytes."""
    made_by = {call.number: program for program in programs for call in program.calls}
    for program in programs:
        for call in program.calls:
            for made in call.inputs:
                sender = made_by[made.call % len(made_by)]  # of a negative number, the same call of this step
                for dtype, nbytes in made.by_dtype.items():
                    for place in range(len(ids(program))):
                        if nbytes:
                            yield dtype, sender_of(sender, program, place), nbytes


def sender_of(made_by: CompiledProgram, program: CompiledProgram, place: int) -> int:
    """Return the id of the device of the same replica that sends a result to a place in the mesh of another program."""
    assert made_by.mesh is not None
    assert program.mesh is not None
    replica, column, *rest = np.unravel_index(place, program.mesh.devices.shape)
    senders = made_by.mesh.devices[replica]
    return int(senders[column % len(senders), *rest].id)


def simulated_step(programs: Sequence[CompiledProgram], costs: Costs) -> float:
    """Return the seconds of a step; if it continues earlier ones, those of a step in a long run."""
    continues = any(one.call < 0 for program in programs for call in program.calls for one in call.inputs)
    few, many = (STEPS_TO_FILL, 2 * STEPS_TO_FILL) if continues else (0, 1)
    last = [max((one.end for one in simulate_calls(programs, costs, n)), default=0.0) for n in (few, many)]
    return (last[1] - last[0]) / (many - few)


def busy(programs: Sequence[CompiledProgram], seconds: Sequence[float]) -> Mapping[int, float]:
    """Return the seconds in which each device runs programs, by id."""
    total: dict[int, float] = {}
    for program, of_program in zip(programs, seconds, strict=True):
        for device in ids(program):
            total[device] = total.get(device, 0.0) + program.runs * of_program
    return total


def ids(program: CompiledProgram) -> list[int]:
    """Return the ids of the devices of a program with calls, in the order of its mesh."""
    assert program.mesh is not None
    return [device.id for device in program.mesh.devices.flat]
