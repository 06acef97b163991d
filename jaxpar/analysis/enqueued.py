"""Simulates a step of several programs that the host enqueues on different devices, as a dispatched pipeline does.

The host of each process enqueues the calls on its devices one after the other, and waits for none of them. A device
runs its calls in this order, each as soon as its inputs have arrived. A result is sent when it is complete, while its
device runs the next call. What a device sends to different devices does not share a link: in a pipeline, activations
and their gradients go to different neighbours.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxpar.strategies.strategy import CompiledProgram


class Interval(NamedTuple):
    """The time in which a program runs, in seconds since the host began to enqueue the step.

    Attributes:
      program: its index.
      start: when its first device starts.
      end: when its last device ends.
    """

    program: int
    start: float
    end: float


class Costs(NamedTuple):
    """The costs of the parts of a step.

    Attributes:
      seconds: of each program.
      send: (sender, receiver, bytes) -> seconds until a result has arrived. Devices are their ids.
      enqueue: seconds of the host for each call on its devices.
      devices_per_process: number of devices whose calls one host enqueues.
    """

    seconds: Sequence[float]
    send: Callable[[int, int, int], float]
    enqueue: float
    devices_per_process: int


def simulate_calls(programs: Sequence[CompiledProgram], costs: Costs) -> list[Interval]:
    """Return when each call of a step runs, in the order of the calls."""
    devices = [ids(program) for program in programs]
    calls = {call.number: (index, call.inputs) for index, program in enumerate(programs) for call in program.calls}
    host: dict[int, float] = {}
    free: dict[int, float] = {}
    intervals: list[Interval] = []
    for _, (index, inputs) in sorted(calls.items()):
        for process in {device // costs.devices_per_process for device in devices[index]}:
            host[process] = host.get(process, 0.0) + costs.enqueue
        starts = []
        for place, device in enumerate(devices[index]):
            start = max(host[device // costs.devices_per_process], free.get(device, 0.0))
            for arrival in inputs:
                made, senders = intervals[arrival.call], devices[intervals[arrival.call].program]
                if arrival.nbytes:
                    sent = costs.send(senders[place % len(senders)], device, arrival.nbytes)
                    start = max(start, made.end + sent)
                elif device in senders:
                    start = max(start, made.end)
            starts.append(start)
        end = max(starts) + costs.seconds[index]
        intervals.append(Interval(index, min(starts), end))
        free |= dict.fromkeys(devices[index], end)
    return intervals


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
