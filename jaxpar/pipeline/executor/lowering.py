"""A table in the form that the engine runs: for each device and clock, which buffers every action reads and writes.

A device has stashes, of what one of its actions keeps for a later one, and two inboxes, where what arrived
(activations for F, their gradients for B) waits for its action. A buffer has as many slots as the fullest device
needs at its fullest clock, and no more. The stash between F and B has the table's own slots.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpar import layout
from jaxpar.layout import Layout
from jaxpar.mesh import STAGE
from jaxpar.pipeline.tables.table import PHASE_OF_KIND, Table, device_of_stage, receiver
from jaxpar.step import abstract

NONE = -1
# The buffers: the inboxes of F and of B, and stashes by (phase that writes, last phase that reads), where the phase of
# an action is its order within a clock: F 0, B or BW 1, W 2.
Buffer = str | tuple[int, int]
INBOXES = ("activations", "gradients")


class _Life(NamedTuple):
    """The first and the last clock in which a value must be in its buffer."""

    device: int
    first: int
    last: int


class Actions(NamedTuple):
    """The actions of one phase: int32 [device, clock]; on a device in the engine [clock], in a clock scalars.

    Attributes:
      chunk: NONE where the device has no action of this phase in the clock.
      microbatch: of the action.
      inbox: slot of its input.
      stash: slot in each stash that it reads or writes.
      local_inbox: where the receiver of its output is on the same device: slot there; else NONE.
      route: number of the route that takes its output; NONE where it stays on the device.
    """

    chunk: Any
    microbatch: Any
    inbox: Any
    stash: dict[tuple[int, int], Any]
    local_inbox: Any
    route: Any


class Arrivals(NamedTuple):
    """The deliveries of one route at the end of a clock, int32 [device, clock]: slot in each inbox, or NONE."""

    activations: Any
    gradients: Any


class Route(NamedTuple):
    """A way from each sender to the device `offset` further on, round the ring; phases: of the actions that use it."""

    offset: int
    senders: tuple[int, ...]
    phases: tuple[int, ...]


class TableShape(NamedTuple):
    """All of a table that its compiled program depends on.

    Attributes:
      num_microbatches: of a replica's share of the batch.
      routes: the ways between devices.
      num_slots: of each buffer.
      num_phases: 1: F alone; 2: F and BW; 3: F, B and W.
      local_phases: phases whose output may have its receiver on the same device.
    """

    num_microbatches: int
    routes: tuple[Route, ...]
    num_slots: tuple[tuple[Buffer, int], ...]
    num_phases: int
    local_phases: tuple[int, ...]


class LoweredTable(NamedTuple):
    """The engine's form of a table."""

    shape: TableShape
    actions: tuple[Actions, ...]  # by phase
    arrivals: tuple[Arrivals, ...]  # by route


def table_layout(axes: Mapping[str, int], arrays: Any) -> Layout:
    """Return the layout of a table's arrays, [device, clock]: each device of the stage axis has its own, [clock]."""
    return layout.per_replica(axes, abstract(arrays, 1), STAGE)


class _Transfer(NamedTuple):
    """A value that one device sends another, or itself, at the end of a clock."""

    offset: int  # of the receiver, round the ring
    phase: int  # of the action that made it
    clock: int
    sender: int
    receiver: int
    slot: int  # in the receiver's inbox


def lower_table(table: Table) -> LoweredTable:
    """Return the engine's form of a valid table."""
    rows = table.actions[["clock", "device", "kind", "microbatch", "chunk", "stage", "slot"]].tolist()
    clocks = {(PHASE_OF_KIND[kind], microbatch, stage): clock for clock, _, kind, microbatch, _, stage, _ in rows}
    slots = {buffer: _share_slots(lives) for buffer, lives in _lives(table, clocks).items()}
    if (0, 1) in slots:
        slots[0, 1] = {(row[3], row[5]): row[6] for row in rows if PHASE_OF_KIND[row[2]] == 0}

    def empty() -> np.ndarray:
        return np.full((table.num_devices, table.num_clocks), NONE, np.int32)

    def actions_of(phase: int) -> Actions:
        stashes = [buffer for buffer in slots if isinstance(buffer, tuple) and buffer[0] <= phase <= buffer[1]]
        return Actions(empty(), empty(), empty(), {stash: empty() for stash in stashes}, empty(), empty())

    actions = [actions_of(phase) for phase in range(1 + max(phase for phase, _, _ in clocks))]
    for clock, device, kind, microbatch, chunk, stage, _ in rows:
        phase, place, key = PHASE_OF_KIND[kind], (device, clock), (microbatch, stage)
        of_phase = actions[phase]
        of_phase.chunk[place], of_phase.microbatch[place] = chunk, microbatch
        of_phase.inbox[place] = slots.get(INBOXES[phase], {}).get(key, NONE) if phase < len(INBOXES) else NONE
        for stash, array in of_phase.stash.items():
            array[place] = slots[stash][key]
    transfers = _transfers(table, slots)
    routes = _routes(transfers)
    arrivals = [Arrivals(empty(), empty()) for _ in routes]
    numbers = {route.offset: number for number, route in enumerate(routes)}
    for transfer in transfers:
        if transfer.offset == 0:
            actions[transfer.phase].local_inbox[transfer.sender, transfer.clock] = transfer.slot
        else:
            number = numbers[transfer.offset]
            actions[transfer.phase].route[transfer.sender, transfer.clock] = number
            arrivals[number][transfer.phase][transfer.receiver, transfer.clock] = transfer.slot
    num_slots = tuple((buffer, max(slot.values()) + 1) for buffer, slot in slots.items())
    local_phases = tuple(sorted({transfer.phase for transfer in transfers if transfer.offset == 0}))
    shape = TableShape(table.num_microbatches, routes, num_slots, len(actions), local_phases)
    return LoweredTable(shape, tuple(actions), tuple(arrivals))


def _transfers(table: Table, slots: dict[Buffer, dict[tuple[int, int], int]]) -> list[_Transfer]:
    device_of, transfers = device_of_stage(table.stages), []
    for clock, device, kind, microbatch, stage in table.actions[
        ["clock", "device", "kind", "microbatch", "stage"]
    ].tolist():
        phase, to = PHASE_OF_KIND[kind], receiver(kind, stage)
        if phase < len(INBOXES) and 0 <= to < table.num_stages:
            offset = (device_of[to] - device) % table.num_devices
            transfers.append(
                _Transfer(offset, phase, clock, device, device_of[to], slots[INBOXES[phase]][microbatch, to])
            )
    return transfers


def _routes(transfers: list[_Transfer]) -> tuple[Route, ...]:
    """One for each distance between devices."""
    routes = []
    for offset in sorted({transfer.offset for transfer in transfers} - {0}):
        of_offset = [transfer for transfer in transfers if transfer.offset == offset]
        senders, phases = {transfer.sender for transfer in of_offset}, {transfer.phase for transfer in of_offset}
        routes.append(Route(offset, tuple(sorted(senders)), tuple(sorted(phases))))
    return tuple(routes)


def _lives(table: Table, clocks: dict[tuple[int, int, int], int]) -> dict[Buffer, dict[tuple[int, int], _Life]]:
    """By buffer and (microbatch, stage): when what lies there is written and last read.

    What arrives is written at the end of a clock, so it lives from the next one on.
    """
    lives: dict[Buffer, dict[tuple[int, int], _Life]] = {}
    device_of = device_of_stage(table.stages)
    num_phases = 1 + max(phase for phase, _, _ in clocks)
    for (phase, microbatch, stage), clock in clocks.items():
        device, key = device_of[stage], (microbatch, stage)
        for later in range(phase + 1, num_phases):
            lives.setdefault((phase, later), {})[key] = _Life(device, clock, clocks[later, microbatch, stage])
        sender = (phase, microbatch, stage - 1 if phase == 0 else stage + 1)
        if phase < 2 and sender in clocks:
            lives.setdefault(INBOXES[phase], {})[key] = _Life(device, clocks[sender] + 1, clock)
    return lives


def _share_slots(lives: dict[tuple[int, int], _Life]) -> dict[tuple[int, int], int]:
    """A slot for each life, so that no two that overlap on a device share one: the least number there can be."""
    free_from: dict[int, list[int]] = {}  # by device: of each slot, the clock from which on it is free
    slots = {}
    for key, life in sorted(lives.items(), key=lambda item: item[1].first):
        times = free_from.setdefault(life.device, [])
        slot = next((slot for slot, time in enumerate(times) if time <= life.first), len(times))
        times[slot : slot + 1] = [life.last + 1]
        slots[key] = slot
    return slots
