"""Simulates the cost of a table: every device runs its actions in order, each as soon as its inputs have arrived.

The metrics are those of Qi et al., "Zero Bubble Pipeline Parallelism", 2023. The span of a device is the time from the
start of its first action to the end of its last one. The cost is the longest span, and the bubble rate is the fraction
of that span in which the device waits. If every flush ends in a barrier, a step takes the makespan instead.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpar.strategies.pipeline.tables.periodic import num_in_flight, unroll
from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS, StageDevices, Table, action_inputs
from jaxpar.strategies.pipeline.tables.validate import peak_in_flight, peak_stashed

Time = float  # in any one unit; Fractions stay exact
LARGEST_VALUE = 1e30  # of a time or a size, so that sums stay finite


class Times(NamedTuple):
    """The times of one microbatch on all chunks of a device: one number, or one number per device."""

    forward: Time | Sequence[Time]
    backward: Time | Sequence[Time]  # B alone; a fused backward takes backward + weight
    weight: Time | Sequence[Time]

    def by_kind(self, num_devices: int, num_chunks: int) -> list[tuple[Time, ...]]:
        """Return the time of an action by `[device][kind]`: 1 / num_chunks of the time of the device."""
        spread = []
        for name, times in zip(self._fields, self, strict=True):
            of_devices = list(times) if isinstance(times, Sequence) else [times] * num_devices
            if len(of_devices) != num_devices:
                rule = f"it must have one, or one per device ({num_devices})"
                raise ValueError(f"{name} has {len(of_devices)} times; {rule}")
            spread.append([time / num_chunks for time in of_devices])
        by_device = [dict(zip(self._fields, times, strict=True)) for times in zip(*spread, strict=True)]
        return [tuple(sum(times[one] for one in kind.passes) for kind in ACTION_KINDS) for times in by_device]


class Span(NamedTuple):
    """One action on the time axis, simulated or measured."""

    device: int
    kind: int
    microbatch: int
    chunk: int
    start: Time
    end: Time


class Simulation(NamedTuple):
    """The costs of a table. Tuples are by device. In peaks, a microbatch on one of v chunks counts 1 / v."""

    makespan: Time  # from the first start to the last end on any device
    cost: Time  # the longest of `spans`, which is what a schedule search minimizes
    bubble_rate: Time  # idle fraction of the longest span
    lockstep: Time  # of a step if all devices step through the clocks together
    idle: tuple[Time, ...]  # makespan minus work
    idle_in_span: tuple[Time, ...]  # span minus work
    spans: tuple[Time, ...]  # from the start of the first action to the end of the last one
    peak_in_flight: tuple[float, ...]  # most microbatches between their F and their B or BW
    peak_stashed: tuple[float, ...]  # most microbatches between their F and their W or BW
    timeline: tuple[Span, ...]


class ActionGraph(NamedTuple):
    """The dependency graph of the actions of a table. An action is identified by its index."""

    durations: list[Time]
    inputs: list[list[tuple[int, Time]]]  # the actions whose results each action needs, and their transfer times


def end_times(graph: ActionGraph, orders: Sequence[Sequence[int]]) -> list[Time] | None:
    """Return the end time of each action, given the order of each device; None if the orders deadlock."""
    durations, waits = graph
    ends: list[Time] = [-1] * len(durations)
    free: list[Time] = [0] * len(orders)
    nexts = [0] * len(orders)
    is_moving, devices = True, [*enumerate(orders)]
    while is_moving:
        is_moving = False
        devices.reverse()  # forward and backward passes go in opposite directions
        for device, order in devices:
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
    """Return the dependency graph of a table, whose actions are numbered by row, and the order of each device."""
    devices, durations = StageDevices(table.stages), times.by_kind(table.num_devices, table.num_chunks)
    rows = table.actions[["device", "kind", "microbatch", "stage"]].tolist()
    index = {(ACTION_KINDS[kind].phase, microbatch, stage): i for i, (_, kind, microbatch, stage) in enumerate(rows)}
    waits = []
    orders: list[list[int]] = [[] for _ in range(table.num_devices)]
    for action, (device, kind, microbatch, stage) in enumerate(rows):
        keys = action_inputs(kind, microbatch, stage, table.num_stages)
        delays = (communication if devices.device(sender, k) != device else 0 for _, k, sender in keys)
        waits.append([(index[key], delay) for key, delay in zip(keys, delays, strict=True)])
        orders[device].append(action)
    return ActionGraph([durations[device][kind] for device, kind, *_ in rows], waits), orders


def simulate_table(table: Table, times: Times, communication: Time = 0) -> Simulation:
    """Simulate a valid table. communication: time from the end of an action until another device has its result."""
    actions, orders = action_graph(table, times, communication)
    ends = end_times(actions, orders)
    assert ends is not None, "not a valid table: its devices deadlock"
    starts = [end - duration for end, duration in zip(ends, actions.durations, strict=True)]
    # A replica of a stage has no action if there are fewer microbatches than replicas.
    spans = [ends[order[-1]] - starts[order[0]] if order else 0 for order in orders]
    busy = [sum(actions.durations[action] for action in order) for order in orders]
    makespan, cost = max(ends), max(spans)
    longest = spans.index(cost)
    numbers = table.actions[["device", "kind", "microbatch", "chunk"]].tolist()
    return Simulation(
        makespan=makespan,
        cost=cost,
        bubble_rate=(cost - busy[longest]) / cost if cost else 0,
        lockstep=lockstep(table, times, communication),
        idle=tuple(max(makespan - of_device, 0) for of_device in busy),
        idle_in_span=tuple(max(span - of_device, 0) for span, of_device in zip(spans, busy, strict=True)),
        spans=tuple(spans),
        peak_in_flight=tuple((peak_in_flight(table) / table.num_chunks).tolist()),
        peak_stashed=tuple((peak_stashed(table) / table.num_chunks).tolist()),
        timeline=tuple(
            Span(d, kind, k, c, start, end) for (d, kind, k, c), start, end in zip(numbers, starts, ends, strict=True)
        ),
    )


def steady_bubble_rate(table: Table, times: Times, communication: Time = 0) -> Time:
    """Return the bubble rate of a periodic table once the pipeline is full. Arguments are those of `simulate_table`."""
    few, many = (unroll(table, count * num_in_flight(table)) for count in (4, 8))
    periods = 4 * num_in_flight(table)
    spans = [simulate_table(finite, times, communication).spans for finite in (few, many)]
    # All devices take the same time per period, except for rounding; the busiest one defines the bubble.
    period = max(after - before for before, after in zip(*spans, strict=True)) / periods
    return (period - max(work(table, times))) / period if period else 0


def work(table: Table, times: Times) -> list[Time]:
    """Return the total time of the actions of each device."""
    durations, total = times.by_kind(table.num_devices, table.num_chunks), [0.0] * table.num_devices
    for device, kind in table.actions[["device", "kind"]].tolist():
        total[device] += durations[device][kind]
    return total


def lockstep(table: Table, times: Times, communication: Time = 0, *, sharing: int = 1) -> Time:
    """Return the time of all clocks if all devices step through them together.

    A clock takes as long as its most expensive device, plus `communication` if any device sends.
    sharing: number of neighbouring devices that share a processor, which runs their actions one after the other.
    """
    by_kind = times.by_kind(table.num_devices, table.num_chunks)
    durations = [by_kind[device][kind] for device, kind in table.actions[["device", "kind"]].tolist()]
    devices = StageDevices(table.stages)
    busy: list[dict[int, Time]] = [{} for _ in range(table.num_clocks)]  # by processor
    sends = [False] * table.num_clocks
    for (clock, device, kind, k, _, stage, _, _), duration in zip(table.actions.tolist(), durations, strict=True):
        processor = device // sharing
        busy[clock][processor] = busy[clock].get(processor, 0) + duration
        sends[clock] |= devices.receiver(kind, stage, k) not in (None, device)
    return sum(
        max(of_clock.values(), default=0) + communication * sent for of_clock, sent in zip(busy, sends, strict=True)
    )
