"""Simulates what a table costs: every device runs its list in order, and an action starts when its inputs have arrived.

Metrics are those of Qi et al., "Zero Bubble Pipeline Parallelism", 2023: the cost is the time of the device that takes
longest from the start of its first action to the end of its last one, and the bubble rate is the share of it in which
that device waits. Where every flush ends in a barrier, the makespan is what a step takes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpar.pipeline.tables.table import PHASE_OF_KIND, Table, action_inputs, device_of_stage, receiver
from jaxpar.pipeline.tables.validate import peak_in_flight, peak_stashed

Time = float  # in any one unit; Fractions stay exact


class Times(NamedTuple):
    """The time of one microbatch through all of a device: one number, or one by device."""

    forward: Time | Sequence[Time]
    backward: Time | Sequence[Time]  # B alone; a fused backward takes that and the weight's
    weight: Time | Sequence[Time]

    def by_kind(self, num_devices: int, num_chunks: int) -> list[tuple[Time, Time, Time, Time]]:
        """Time of an action, by [device][kind]: on one chunk it takes 1 / num_chunks of the time of its device."""
        spread = []
        for name, times in zip(self._fields, self, strict=True):
            of_devices = list(times) if isinstance(times, Sequence) else [times] * num_devices
            if len(of_devices) != num_devices:
                raise ValueError(f"{name} has {len(of_devices)} times for {num_devices} devices")
            spread.append([time / num_chunks for time in of_devices])
        return [(f, b, w, b + w) for f, b, w in zip(*spread, strict=True)]


class Span(NamedTuple):
    """One action on the time axis, planned or measured."""

    device: int
    kind: int
    microbatch: int
    chunk: int
    start: Time
    end: Time


class Simulation(NamedTuple):
    """The costs of a table. Tuples are by device; microbatches are those of a whole device: a chunk's counts 1 / v.

    Args:
      makespan: from the first start to the last end.
      cost: the longest of `spans`.
      bubble_rate: share of the cost in which the device with that span waits.
      lockstep: the time where all devices step through the clocks together, so that each clock costs what its
        most expensive device has in it, and the communication if any device sends.
      idle: makespan less work.
      idle_in_span: span less work.
      spans: from the start of the first action to the end of the last.
      peak_in_flight: most microbatches between their F and their B or BW.
      peak_stashed: most microbatches between their F and their W or BW.
      timeline: every action.
    """

    makespan: Time
    cost: Time
    bubble_rate: Time
    lockstep: Time
    idle: tuple[Time, ...]
    idle_in_span: tuple[Time, ...]
    spans: tuple[Time, ...]
    peak_in_flight: tuple[float, ...]
    peak_stashed: tuple[float, ...]
    timeline: tuple[Span, ...]


class ActionGraph(NamedTuple):
    """Actions and what they wait for, whatever the order in which devices run them; an action is its index."""

    durations: list[Time]
    inputs: list[list[tuple[int, Time]]]  # the actions whose results it takes, and the delay until each arrives


def end_times(graph: ActionGraph, orders: Sequence[Sequence[int]]) -> list[Time] | None:
    """Return when each action ends, given the order of each device; None where the orders wait for each other."""
    durations, waits = graph
    ends: list[Time] = [-1] * len(durations)
    free: list[Time] = [0] * len(orders)
    nexts = [0] * len(orders)
    is_moving = True
    while is_moving:
        is_moving = False
        for device, order in enumerate(orders):
            now = free[device]
            for position in range(nexts[device], len(order)):
                action = order[position]
                start = now
                for source, delay in waits[action]:
                    end = ends[source]
                    if end < 0:
                        break
                    start = max(start, end + delay)
                else:
                    now = ends[action] = start + durations[action]
                    nexts[device] = position + 1
                    is_moving = True
                    continue
                break
            free[device] = now
    return ends if all(count == len(order) for count, order in zip(nexts, orders, strict=True)) else None


def action_graph(table: Table, times: Times, communication: Time) -> tuple[ActionGraph, list[list[int]]]:
    """Return the actions of a table, by row, and the order of each device."""
    device_of = device_of_stage(table.stages)
    durations = times.by_kind(table.num_devices, table.num_chunks)
    rows = [(kind, microbatch, stage) for _, _, kind, microbatch, _, stage, _, _ in table.actions.tolist()]
    index = {(PHASE_OF_KIND[kind], microbatch, stage): i for i, (kind, microbatch, stage) in enumerate(rows)}
    waits = [
        [
            (index[key], communication if device_of[key[2]] != device_of[stage] else 0)
            for key in action_inputs(*row, table.num_stages)
        ]
        for row in rows
        for stage in row[2:]
    ]
    orders: list[list[int]] = [[] for _ in range(table.num_devices)]
    for action, (_, _, stage) in enumerate(rows):
        orders[device_of[stage]].append(action)
    return ActionGraph([durations[device_of[stage]][kind] for kind, _, stage in rows], waits), orders


def simulate_table(table: Table, times: Times, communication: Time = 0) -> Simulation:
    """Simulate a valid table.

    Args:
      communication: from the end of an action to the arrival of what it made on another device.
    """
    actions, orders = action_graph(table, times, communication)
    ends = end_times(actions, orders)
    assert ends is not None, "not a valid table: its devices wait for each other"
    starts = [end - duration for end, duration in zip(ends, actions.durations, strict=True)]
    spans = [ends[order[-1]] - starts[order[0]] for order in orders]
    work = [sum(actions.durations[action] for action in order) for order in orders]
    makespan, cost = max(ends), max(spans)
    longest = spans.index(cost)
    rows = table.actions[["device", "kind", "microbatch", "chunk"]].tolist()
    return Simulation(
        makespan=makespan,
        cost=cost,
        bubble_rate=(cost - work[longest]) / cost if cost else 0,
        lockstep=_lockstep(table, actions.durations, communication),
        idle=tuple(max(makespan - busy, 0) for busy in work),
        idle_in_span=tuple(max(span - busy, 0) for span, busy in zip(spans, work, strict=True)),
        spans=tuple(spans),
        peak_in_flight=tuple((peak_in_flight(table) / table.num_chunks).tolist()),
        peak_stashed=tuple((peak_stashed(table) / table.num_chunks).tolist()),
        timeline=tuple(
            Span(d, kind, k, c, start, end) for (d, kind, k, c), start, end in zip(rows, starts, ends, strict=True)
        ),
    )


def _lockstep(table: Table, durations: Sequence[Time], communication: Time) -> Time:
    device_of = dict(enumerate(device_of_stage(table.stages)))
    work: list[dict[int, Time]] = [{} for _ in range(table.num_clocks)]  # by device
    sends = [False] * table.num_clocks
    for (clock, device, kind, _, _, stage, _, _), duration in zip(table.actions.tolist(), durations, strict=True):
        work[clock][device] = work[clock].get(device, 0) + duration
        sends[clock] |= device_of.get(receiver(kind, stage), device) != device
    return sum(
        max(of_clock.values(), default=0) + communication * sent for of_clock, sent in zip(work, sends, strict=True)
    )
