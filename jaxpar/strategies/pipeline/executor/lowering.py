"""Lowers a table to the arrays that the engine runs: the buffer slots that every action reads and writes.

The lowered arrays are arguments of the compiled program, so tables of the same shape share one compilation.

Every device has stashes, which save values of one phase for a later phase of the same microbatch, and two inboxes,
where transfers (activations for F, gradients for B) wait for the action that reads them. All devices allocate the same
number of slots for a buffer: the largest number that any device needs in any clock. The stash between F and B uses
the slots given in the table.

The values of a periodic table (jaxpar/strategies/pipeline/tables/periodic.py) outlive the step that writes them, so a
buffer is used as a ring: a microbatch has the slot of its number among those of the device, modulo the number of slots.
The arrays hold the slots of the first step; continuous.py converts them to those of any other step.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar import layout
from jaxpar.core.mesh import STAGE
from jaxpar.core.step import abstract
from jaxpar.layout import Layout
from jaxpar.strategies.pipeline.executor.stages import Stages
from jaxpar.strategies.pipeline.tables.periodic import num_in_flight, unroll, versions_kept
from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS, F, StageDevices, Table, U, receiver

NONE = -1
# A buffer is an inbox, of F or of B, or a stash, named by (phase that writes it, last phase that reads it). Phases are
# numbered by their order within a clock: F is 0, B and BW are 1, W is 2.
Buffer = str | tuple[int, int]
INBOXES = ("activations", "gradients")
Slots = dict[Buffer, dict[tuple[int, int], int]]  # slot by buffer and (microbatch, stage)
NumSlots = tuple[tuple[Buffer, int], ...]

# Names of the conditionals of a step, by which an audit finds the branches that devices take.
OF_KIND = "of_kind"  # those whose branch depends on the kind of the device
CLOCK = "clock_{}"  # scope of the other ones, by clock in an iteration of the loop over clocks
PHASE = "phase_{}"  # those that run the actions of a phase
DELIVERY = "deliver_{}_{}"  # those that store a transfer of a phase in an inbox, by route, or `local`


class Actions(NamedTuple):
    """The actions of one phase, as int32 arrays [device, clock].

    In the engine, a device has its own row, [clock], and a scan over clocks sees scalars.
    """

    chunk: Any  # chunk of the action; NONE if the device has no action of this phase in the clock
    microbatch: Any  # microbatch of the action. Microbatches of earlier batches follow those of the batch of the step.
    inbox: Any  # inbox slot of its input
    stash: dict[tuple[int, int], Any]  # slot in each stash that the action reads or writes
    local_inbox: Any  # inbox slot for its output if the receiving stage is on the same device; otherwise NONE
    route: Any  # number of the route that carries its output to another device; otherwise NONE
    # slot of the weights that it reads; in the first step, how many batches have entered since the version was the
    # newest one possible. None if all actions of a step read the same weights.
    version: Any = None


class Route(NamedTuple):
    """A route from every sender to the device `offset` places after it on the ring of devices."""

    offset: int  # distance from sender to receiver
    senders: tuple[int, ...]  # the devices that ever send over the route
    phases: tuple[int, ...]  # phases whose outputs the route carries: 0 activations, 1 gradients


class ClockShape(NamedTuple):
    """The properties of a clock that the compiled program depends on."""

    routes: tuple[Route, ...]  # the routes between devices; one that is not used in the clock has no senders
    # by phase, the devices that have an action in the clock; None: any device can have one
    actors: tuple[tuple[int, ...], ...] | None = None
    has_update: bool = False  # whether a device can have an update at the end of the clock

    @property
    def num_transfers(self) -> int:
        """Number of routes that are used in the clock."""
        return sum(bool(route.senders) for route in self.routes)

    def programs(self, phase: int, numbers: np.ndarray) -> tuple[int, ...]:
        """Return the numbers of the programs that a device can run in a phase of the clock, in ascending order.

        numbers: number of the program that each [device, chunk] runs.
        """
        of_actors = numbers if self.actors is None else numbers[list(self.actors[phase])]
        return tuple(sorted(set(of_actors.ravel().tolist())))


class TableShape(NamedTuple):
    """The properties of a table that the compiled program depends on."""

    num_microbatches: int  # number of microbatches in a replica's shard of the batch
    # the clocks in one iteration of the loop over clocks. A table with a flush has one, whose routes are those of all
    # clocks.
    clocks: tuple[ClockShape, ...]
    num_slots: NumSlots  # number of slots of each buffer
    num_phases: int  # 1: F alone; 2: F and BW; 3: F, B and W
    local_phases: tuple[int, ...]  # phases that have an output whose receiving stage is on the same device
    num_batches: int = 1  # number of batches that a step works on; more than 1 only if the table is periodic
    # by device, the number of versions of the weights that it keeps; empty if the table has no updates
    num_versions: tuple[int, ...] = ()
    # by device, the number of microbatches of a batch that it runs; empty if the table has no updates
    num_own: tuple[int, ...] = ()


class TableArrays(NamedTuple):
    """The arrays of a lowered table."""

    actions: tuple[Actions, ...]  # the actions, by phase
    # by route and phase, the transfers that arrive at the end of a clock, int32 [device, clock]: an inbox slot or NONE
    arrivals: tuple[tuple[Any, Any], ...]
    # int32 [device, clock]: the number of batches that have entered since the batch whose gradient is applied at the
    # end of the clock, or NONE; None if the table has no updates
    updates: Any = None


class LoweredTable(NamedTuple):
    """A table in the form that the engine runs."""

    shape: TableShape
    arrays: TableArrays


def table_layout(axes: Mapping[str, int], arrays: Any) -> Layout:
    """Return the layout of a lowered table's arrays, [device, clock]: every device holds its own row, [clock]."""
    return layout.per_replica(axes, abstract(arrays, 1), STAGE)


class _Transfer(NamedTuple):
    """A value that a device sends to another device, or to itself, at the end of a clock."""

    offset: int  # distance from sender to receiver on the ring
    phase: int  # of the action that computed it
    clock: int
    sender: int
    receiver: int
    slot: int  # in the receiver's inbox


def lower_table(table: Table) -> LoweredTable:
    """Lower a valid table to the form that the engine runs."""
    slots, num_slots = _slots_in_rings(table) if table.period else _slots(table)
    rows = table.actions[table.actions["kind"] != U]
    m, num_phases = table.num_microbatches, 1 + max(ACTION_KINDS[kind].phase for kind in rows["kind"])
    devices = StageDevices(table.stages)

    def empty() -> np.ndarray:
        return np.full((table.num_devices, table.num_clocks), NONE, np.int32)

    actions, transfers = [], []
    for phase in range(num_phases):
        stashes = [buffer for buffer in slots if isinstance(buffer, tuple) and buffer[0] <= phase <= buffer[1]]
        version = empty() if table.period else None
        of_stashes = {stash: empty() for stash in stashes}
        actions.append(Actions(empty(), empty(), empty(), of_stashes, empty(), empty(), version))
    for clock, device, kind, microbatch, chunk, stage, version, _ in rows.tolist():
        phase, place, key = ACTION_KINDS[kind].phase, (device, clock), (microbatch, stage)
        # In a periodic table, microbatches of earlier batches are negative. The engine has those batches behind the
        # batch that enters, the latest first, so that a microbatch of age a is the (a m + its number in its batch)-th.
        of_phase, age = actions[phase], -(microbatch // m)
        of_phase.chunk[place], of_phase.microbatch[place] = chunk, age * m + microbatch % m
        for stash, array in of_phase.stash.items():
            array[place] = slots[stash][key]
        if table.period:
            of_phase.version[place] = age - version
        if phase < len(INBOXES):
            inbox, to = slots.get(INBOXES[phase], {}), devices.receiver(kind, stage, microbatch)
            of_phase.inbox[place] = inbox.get(key, NONE)
            if to is not None:
                slot, offset = inbox[microbatch, receiver(kind, stage)], (to - device) % table.num_devices
                transfers.append(_Transfer(offset, phase, clock, device, to, slot))
    routes = _routes(transfers)
    numbers = {route.offset: number for number, route in enumerate(routes)}
    arrivals = [(empty(), empty()) for _ in routes]
    for transfer in transfers:
        if transfer.offset == 0:
            actions[transfer.phase].local_inbox[transfer.sender, transfer.clock] = transfer.slot
        else:
            number = numbers[transfer.offset]
            actions[transfer.phase].route[transfer.sender, transfer.clock] = number
            arrivals[number][transfer.phase][transfer.receiver, transfer.clock] = transfer.slot
    local_phases = tuple(sorted({transfer.phase for transfer in transfers if transfer.offset == 0}))
    shape = TableShape(m, (ClockShape(routes),), num_slots, num_phases, local_phases)
    if not table.period:
        return LoweredTable(shape, TableArrays(tuple(actions), tuple(arrivals)))
    updates = empty()
    for clock, device, _, microbatch, *_ in table.actions[table.actions["kind"] == U].tolist():
        updates[device, clock] = -(microbatch // m)
    shape = shape._replace(
        clocks=_repeating_clocks(table, transfers, routes),
        num_batches=num_in_flight(table),
        num_versions=tuple(versions_kept(table)),
        num_own=tuple(m // len(devices.of(stage)) for stage in table.stages[:, 0].tolist()),
    )
    return LoweredTable(shape, TableArrays(tuple(actions), tuple(arrivals), updates))


def _routes(transfers: list[_Transfer]) -> tuple[Route, ...]:
    """Return one route for each distance between devices."""
    routes = []
    for offset in sorted({transfer.offset for transfer in transfers} - {0}):
        of_offset = [transfer for transfer in transfers if transfer.offset == offset]
        senders, phases = {transfer.sender for transfer in of_offset}, {transfer.phase for transfer in of_offset}
        routes.append(Route(offset, tuple(sorted(senders)), tuple(sorted(phases))))
    return tuple(routes)


def _repeating_clocks(table: Table, transfers: Sequence[_Transfer], routes: Sequence[Route]) -> tuple[ClockShape, ...]:
    """Return the shortest sequence of clocks of a periodic table whose repetition makes up the period."""
    # Each clock has only its own transfers. If it had those of all clocks, then all devices would wait for each other
    # in every clock, those in a forward for those in a backward.
    sending, acting = defaultdict(set), defaultdict(set)  # devices by (clock, offset) and by (clock, phase)
    for transfer in transfers:
        sending[transfer.clock, transfer.offset].add(transfer.sender)
    for clock, device, kind in table.actions[["clock", "device", "kind"]].tolist():
        acting[clock, ACTION_KINDS[kind].phase].add(device)
    period, update = table.period, ACTION_KINDS[U].phase
    num_phases = 1 + max(phase for _, phase in acting if phase != update)
    clocks = [
        ClockShape(
            tuple(route._replace(senders=tuple(sorted(sending[clock, route.offset]))) for route in routes),
            tuple(tuple(sorted(acting[clock, phase])) for phase in range(num_phases)),
        )
        for clock in range(period)
    ]
    size = next(size for size in range(1, period + 1) if clocks == clocks[:size] * (period // size))
    return tuple(
        clocks[first]._replace(has_update=any(acting[clock, update] for clock in range(first, period, size)))
        for first in range(size)
    )


class _Life(NamedTuple):
    """Lifetime of a value: the first and the last clock in which it must be in its buffer."""

    device: int
    first: int
    last: int


def _lives(table: Table) -> dict[Buffer, dict[tuple[int, int], _Life]]:
    """Return the lifetimes of all values, by buffer and (microbatch, stage)."""
    rows = table.actions[table.actions["kind"] != U][["clock", "kind", "microbatch", "stage"]].tolist()
    clocks = {(ACTION_KINDS[kind].phase, microbatch, stage): clock for clock, kind, microbatch, stage in rows}
    lives: dict[Buffer, dict[tuple[int, int], _Life]] = {}
    devices, num_phases = StageDevices(table.stages), 1 + max(phase for phase, _, _ in clocks)
    for (phase, microbatch, stage), clock in clocks.items():
        device, key = devices.device(stage, microbatch), (microbatch, stage)
        for later in range(phase + 1, num_phases):
            lives.setdefault((phase, later), {})[key] = _Life(device, clock, clocks[later, microbatch, stage])
        sender = (phase, microbatch, stage - 1 if phase == 0 else stage + 1)
        if phase < 2 and sender in clocks:  # a transfer is written at the end of a clock, so it lives from the next one
            lives.setdefault(INBOXES[phase], {})[key] = _Life(device, clocks[sender] + 1, clock)
    return lives


def _slots(table: Table) -> tuple[Slots, NumSlots]:
    """Return the slots of all values, and the number of slots of each buffer."""
    slots: Slots = {buffer: _share_slots(lives) for buffer, lives in _lives(table).items()}
    if (0, 1) in slots:
        rows = table.actions[table.actions["kind"] == F][["microbatch", "stage", "slot"]].tolist()
        slots[0, 1] = {(microbatch, stage): slot for microbatch, stage, slot in rows}
    return slots, tuple((buffer, max(slot.values()) + 1) for buffer, slot in slots.items())


def _share_slots(lives: dict[tuple[int, int], _Life]) -> dict[tuple[int, int], int]:
    """Assign a slot to every lifetime, so that lifetimes that overlap on a device never share one."""
    # The greedy assignment in order of the first clock uses the fewest slots possible.
    free_from: dict[int, list[int]] = {}  # by device: the first clock in which each slot is free again
    slots = {}
    for key, life in sorted(lives.items(), key=lambda item: item[1].first):
        times = free_from.setdefault(life.device, [])
        slot = next((slot for slot, time in enumerate(times) if time <= life.first), len(times))
        times[slot : slot + 1] = [life.last + 1]
        slots[key] = slot
    return slots


def _slots_in_rings(table: Table) -> tuple[Slots, NumSlots]:
    """Return the slots of all values of a periodic table in the first step, and the number of slots of each buffer."""
    devices = StageDevices(table.stages)
    replicas = [len(devices.of(stage)) for stage in range(table.num_stages)]
    lives = _lives(unroll(table, 3 * num_in_flight(table)))  # long enough for the steady state
    sizes = {buffer: _ring_size(of_buffer, replicas) for buffer, of_buffer in lives.items()}
    keys = {(microbatch, stage) for microbatch, stage in table.actions[["microbatch", "stage"]].tolist()}
    keys |= {(microbatch, stage + step) for microbatch, stage in keys for step in (-1, 1)}  # those that are sent there
    keys = {(microbatch, stage) for microbatch, stage in keys if 0 <= stage < table.num_stages}
    # Of r replicas, each runs every r-th microbatch, so k // r numbers those of a device without gaps.
    slots: Slots = {
        buffer: {(k, stage): k // replicas[stage] % size for k, stage in keys} for buffer, size in sizes.items()
    }
    return slots, tuple(sizes.items())


def _ring_size(lives: dict[tuple[int, int], _Life], replicas: Sequence[int]) -> int:
    """Return the largest range of a device's own microbatches that are in a buffer at the same time."""
    by_device: dict[int, list[tuple[int, _Life]]] = {}
    for (microbatch, stage), life in lives.items():
        by_device.setdefault(life.device, []).append((microbatch // replicas[stage], life))
    largest = 1
    for on_device in by_device.values():
        for _, life in on_device:
            numbers = [microbatch for microbatch, other in on_device if other.first <= life.first <= other.last]
            largest = max(largest, max(numbers) - min(numbers) + 1)
    return largest


class DeviceBranches(NamedTuple):
    """The branches that devices take in a conditional of the engine."""

    # int [iteration, device], the number of the branch in each iteration of the loop over clocks; one row if the
    # conditional is not in that loop
    taken: np.ndarray
    number: int  # number of branches

    @property
    def fractions(self) -> tuple[float, ...]:
        """The fraction of iterations and devices in which each branch is taken."""
        return tuple((np.bincount(self.taken.ravel(), minlength=self.number) / self.taken.size).tolist())


def device_branches(lowered: LoweredTable, stages: Stages) -> dict[str, DeviceBranches]:
    """Return the branches that devices take in the conditionals of a training step, by named scope."""
    numbers, kinds = stages.program_numbers, np.array([stages.kinds])
    (shape, arrays), found = lowered, {OF_KIND: DeviceBranches(kinds, len(stages.examples))}
    for index, of_clock in enumerate(shape.clocks):
        nows: TableArrays = jax.tree.map(lambda x, index=index: np.asarray(x)[:, index :: len(shape.clocks)].T, arrays)
        scope = CLOCK.format(index) + "/"
        for phase, action in enumerate(nows.actions):
            able = of_clock.programs(phase, numbers)
            branches = 1 + np.searchsorted(able, numbers[np.arange(len(numbers)), action.chunk])
            taken = np.where(action.chunk == NONE, 0, branches)
            found[scope + PHASE.format(phase)] = DeviceBranches(taken, 1 + len(able))
        slots = {DELIVERY.format(phase, "local"): nows.actions[phase].local_inbox for phase in shape.local_phases}
        for number, (route, arrival) in enumerate(zip(of_clock.routes, nows.arrivals, strict=True)):
            if route.senders:
                slots |= {DELIVERY.format(phase, number): arrival[phase] for phase in route.phases}
        found |= {scope + name: DeviceBranches((slot == NONE).astype(int), 2) for name, slot in slots.items()}
    return found
