"""A table in the form that the engine runs: for each device and clock, which buffers every action reads and writes.

A device has stashes, of what one of its actions keeps for a later one, and two inboxes, where what arrived
(activations for F, their gradients for B) waits for its action. A buffer has as many slots as the fullest device
needs at its fullest clock, and no more. The stash between F and B has the table's own slots.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxpar.pipeline.tables.table import ORDER_IN_CLOCK, Table, homes, receiver

NONE = -1
# The buffers: the inboxes of F and of B, and stashes by (rank that writes, last rank that reads), where the rank of
# an action is its order within a clock: F 0, B or BW 1, W 2.
Buffer = str | tuple[int, int]
INBOXES = ("activations", "gradients")


class _Life(NamedTuple):
    """Of a value in a buffer: the first and the last clock in which it must be there."""

    device: int
    first: int
    last: int


class Actions(NamedTuple):
    """The actions of one rank: int32 [device, clock]; on a device in the engine [clock], in a clock scalars.

    Attributes:
      chunk: NONE where the device has no action of this rank in the clock.
      microbatch: of the action.
      inbox: slot of its input.
      stash: slot in each stash that it reads or writes.
      own_inbox: where the receiver of its output is on the same device: slot there; else NONE.
      wire: number of the wire that takes its output; NONE where it stays on the device.
    """

    chunk: Any
    microbatch: Any
    inbox: Any
    stash: dict[tuple[int, int], Any]
    own_inbox: Any
    wire: Any


class Arrivals(NamedTuple):
    """What one wire brings at the end of a clock, int32 [device, clock]: slot in each of the inboxes, or NONE."""

    activations: Any
    gradients: Any


class Route(NamedTuple):
    """A way from each sender to the device `offset` further on, round the ring; ranks: of the actions that use it."""

    offset: int
    senders: tuple[int, ...]
    ranks: tuple[int, ...]


class Shape(NamedTuple):
    """All of a table that its compiled program depends on.

    Attributes:
      num_microbatches: of a replica's share of the batch.
      wires: the ways between devices.
      num_slots: of each buffer.
      num_ranks: 1: F alone; 2: F and BW; 3: F, B and W.
      stays: ranks whose output may have its receiver on the same device.
    """

    num_microbatches: int
    wires: tuple[Route, ...]
    num_slots: tuple[tuple[Buffer, int], ...]
    num_ranks: int
    stays: tuple[int, ...]


class Lowered(NamedTuple):
    """The engine's form of a table."""

    shape: Shape
    actions: tuple[Actions, ...]  # by rank
    arrivals: tuple[Arrivals, ...]  # by wire


class _Transfer(NamedTuple):
    """What one device sends another, or itself, at the end of a clock."""

    offset: int  # of the receiver, round the ring
    rank: int  # of the action that made it
    clock: int
    sender: int
    receiver: int
    slot: int  # in the receiver's inbox


def lower(table: Table) -> Lowered:
    """The engine's form of a valid table."""
    rows = table.actions[["clock", "device", "kind", "microbatch", "chunk", "stage", "slot"]].tolist()
    clocks = {(ORDER_IN_CLOCK[kind], microbatch, stage): clock for clock, _, kind, microbatch, _, stage, _ in rows}
    slots = {buffer: _share(lives) for buffer, lives in _lives(table, clocks).items()}
    if (0, 1) in slots:
        slots[0, 1] = {(row[3], row[5]): row[6] for row in rows if ORDER_IN_CLOCK[row[2]] == 0}

    def empty() -> np.ndarray:
        return np.full((table.num_devices, table.num_clocks), NONE, np.int32)

    def actions_of(rank: int) -> Actions:
        stashes = [buffer for buffer in slots if isinstance(buffer, tuple) and buffer[0] <= rank <= buffer[1]]
        return Actions(empty(), empty(), empty(), {stash: empty() for stash in stashes}, empty(), empty())

    actions = [actions_of(rank) for rank in range(1 + max(rank for rank, _, _ in clocks))]
    for clock, device, kind, microbatch, chunk, stage, _ in rows:
        rank, place, key = ORDER_IN_CLOCK[kind], (device, clock), (microbatch, stage)
        own = actions[rank]
        own.chunk[place], own.microbatch[place] = chunk, microbatch
        own.inbox[place] = slots.get(INBOXES[rank], {}).get(key, NONE) if rank < len(INBOXES) else NONE
        for stash, array in own.stash.items():
            array[place] = slots[stash][key]
    packets = _packets(table, slots)
    wires = _wires(packets)
    arrivals = [Arrivals(empty(), empty()) for _ in wires]
    numbers = {wire.offset: number for number, wire in enumerate(wires)}
    for packet in packets:
        if packet.offset == 0:
            actions[packet.rank].own_inbox[packet.sender, packet.clock] = packet.slot
        else:
            number = numbers[packet.offset]
            actions[packet.rank].wire[packet.sender, packet.clock] = number
            arrivals[number][packet.rank][packet.receiver, packet.clock] = packet.slot
    num_slots = tuple((buffer, max(slot.values()) + 1) for buffer, slot in slots.items())
    stays = tuple(sorted({packet.rank for packet in packets if packet.offset == 0}))
    shape = Shape(table.num_microbatches, wires, num_slots, len(actions), stays)
    return Lowered(shape, tuple(actions), tuple(arrivals))


def _packets(table: Table, slots: dict[Buffer, dict[tuple[int, int], int]]) -> list[_Transfer]:
    home, packets = homes(table.stages), []
    for clock, device, kind, microbatch, stage in table.actions[
        ["clock", "device", "kind", "microbatch", "stage"]
    ].tolist():
        rank, to = ORDER_IN_CLOCK[kind], receiver(kind, stage)
        if rank < len(INBOXES) and 0 <= to < table.num_stages:
            offset = (home[to] - device) % table.num_devices
            packets.append(_Transfer(offset, rank, clock, device, home[to], slots[INBOXES[rank]][microbatch, to]))
    return packets


def _wires(packets: list[_Transfer]) -> tuple[Route, ...]:
    """One for each distance between devices."""
    wires = []
    for offset in sorted({packet.offset for packet in packets} - {0}):
        own = [packet for packet in packets if packet.offset == offset]
        senders, ranks = {packet.sender for packet in own}, {packet.rank for packet in own}
        wires.append(Route(offset, tuple(sorted(senders)), tuple(sorted(ranks))))
    return tuple(wires)


def _lives(table: Table, clocks: dict[tuple[int, int, int], int]) -> dict[Buffer, dict[tuple[int, int], _Life]]:
    """By buffer and (microbatch, stage): when what lies there is written and last read.

    What arrives is written at the end of a clock, so it lives from the next one on.
    """
    lives: dict[Buffer, dict[tuple[int, int], _Life]] = {}
    home = homes(table.stages)
    num_ranks = 1 + max(rank for rank, _, _ in clocks)
    for (rank, microbatch, stage), clock in clocks.items():
        device, key = home[stage], (microbatch, stage)
        for later in range(rank + 1, num_ranks):
            lives.setdefault((rank, later), {})[key] = _Life(device, clock, clocks[later, microbatch, stage])
        sender = (rank, microbatch, stage - 1 if rank == 0 else stage + 1)
        if rank < 2 and sender in clocks:
            lives.setdefault(INBOXES[rank], {})[key] = _Life(device, clocks[sender] + 1, clock)
    return lives


def _share(lives: dict[tuple[int, int], _Life]) -> dict[tuple[int, int], int]:
    """A slot for each life, so that no two that overlap on a device share one: the least number there can be."""
    free_from: dict[int, list[int]] = {}  # by device: of each slot, the clock from which on it is free
    slots = {}
    for key, life in sorted(lives.items(), key=lambda item: item[1].first):
        times = free_from.setdefault(life.device, [])
        slot = next((slot for slot, time in enumerate(times) if time <= life.first), len(times))
        times[slot : slot + 1] = [life.last + 1]
        slots[key] = slot
    return slots
