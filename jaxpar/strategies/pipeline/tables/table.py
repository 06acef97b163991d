"""Schedule tables. A schedule is data: a NumPy table that is complete before anything runs.

An *action* is one kind of work on one microbatch at one stage. The kinds are F (forward), B (gradient of the input,
dX), W (gradient of the weights, dW), BW (both gradients) and U (update of the weights). A *stage* is a run of
consecutive layers; stages are numbered in the order of computation. A device has one or several stages, called its
*chunks*. A *clock* is one step that all devices take together.

A stage can have *replicas* on several devices. Replica i of a stage with r replicas runs the microbatches k with
k % r = i, forward and backward alike (1F1B-RR in PipeDream, section 3.2).

Most tables have no U: the pipeline drains, and then all stages are updated together. A table with U belongs to a
pipeline that never drains (periodic.py).
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np

FIELDS = ("clock", "device", "kind", "microbatch", "chunk", "stage", "version", "slot")
ACTION = np.dtype([(name, np.int32) for name in FIELDS])


class Kind(NamedTuple):
    """The properties of a kind of action."""

    name: str  # in tables
    title: str  # in pictures
    colour: str  # in pictures; distinct with colour blindness (Okabe and Ito, "Color Universal Design", 2008)
    phase: int  # its place in the order within a clock
    passes: tuple[str, ...]  # out of forward, backward (dX) and weight (dW); their times add up to that of the action
    reads: tuple[tuple[int, int], ...]  # the actions whose results it needs: their phase, and distance of their stage
    sends_to: int  # distance to the stage that receives its result; 0 if no other stage does

    def stashes(self, weight_memory: float = 1.0) -> float:
        """Return the change in the number of stashed microbatches that an action of this kind causes.

        weight_memory: fraction of a microbatch's bytes that W still needs after B. It is less than 1 if W needs only a
        part of the values that F stashed.
        """
        freed = ("backward" in self.passes) * (1 - weight_memory) + ("weight" in self.passes) * weight_memory
        return ("forward" in self.passes) - freed


ACTION_KINDS = (
    Kind("F", "F forward", "#56b4e9", 0, ("forward",), reads=((0, -1),), sends_to=1),
    Kind("B", "B input gradient", "#e69f00", 1, ("backward",), reads=((0, 0), (1, 1)), sends_to=-1),
    Kind("W", "W weight gradient", "#009e73", 2, ("weight",), reads=((1, 0),), sends_to=0),
    Kind("BW", "BW backward", "#d55e00", 1, ("backward", "weight"), reads=((0, 0), (1, 1)), sends_to=-1),
    Kind("U", "U update", "#cc79a7", 3, (), reads=((1, 0),), sends_to=0),
)
F, B, W, BW, U = range(len(ACTION_KINDS))
SENDERS = ("F", "B or BW")  # the kinds whose results others read, by phase


class Table(NamedTuple):
    """A schedule whose actions are assigned to clocks.

    `version` is the version of the weights that an action reads, or that a U writes; version 0 is that of the start.
    The `microbatch` of a U is the last one whose gradient it applies. `slot` is the slot in the device's stash that a
    microbatch occupies from its F to its B or BW; for W, that in a second stash, from its B to its W.
    """

    num_devices: int
    num_chunks: int
    num_microbatches: int
    actions: np.ndarray  # of dtype ACTION, sorted by clock, device and order within the clock
    period: int = 0  # if not 0, the table repeats after this number of clocks, and numbers are relative (periodic.py)
    replicas: tuple[int, ...] = ()  # number of devices of each stage; empty if each stage is on one device

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline: devices x chunks, if no stage has replicas."""
        return len(self.replicas) or self.num_devices * self.num_chunks

    @property
    def num_clocks(self) -> int:
        """Number of clocks up to and including the last one with an action, or the period."""
        return self.period or int(self.actions["clock"].max(initial=-1)) + 1

    @property
    def stages(self) -> np.ndarray:
        """Stage by [device, chunk]."""
        stages = np.full((self.num_devices, self.num_chunks), -1)
        stages[self.actions["device"], self.actions["chunk"]] = self.actions["stage"]
        return stages


class Action(NamedTuple):
    """One action in the order of a device, not yet assigned to a clock."""

    kind: int
    microbatch: int
    chunk: int


def loop_stages(num_devices: int, num_chunks: int) -> np.ndarray:
    """Return the stage of every [device, chunk] if stages are assigned to devices round-robin."""
    return np.arange(num_devices)[:, None] + num_devices * np.arange(num_chunks)


def v_stages(num_devices: int, num_chunks: int = 2) -> np.ndarray:
    """Return the stage of every [device, chunk] if stages go down the devices and up again, in a V."""
    assert num_chunks == 2, num_chunks
    down = np.arange(num_devices)
    return np.stack([down, 2 * num_devices - 1 - down], axis=1)


class StageDevices:
    """The devices of each stage. stages: stage by [device, chunk]."""

    def __init__(self, stages: np.ndarray):
        in_order = np.argsort(stages, axis=None, kind="stable")
        self._devices: list[list[int]] = [[] for _ in range(int(stages.max()) + 1)]
        for place in in_order.tolist():
            self._devices[stages.flat[place]].append(place // stages.shape[1])

    def of(self, stage: int) -> list[int]:
        """Return the devices of a stage."""
        return self._devices[stage]

    def device(self, stage: int, microbatch: int) -> int:
        """Return the device that runs a microbatch at a stage."""
        devices = self._devices[stage]
        return devices[microbatch % len(devices)]

    def receiver(self, kind: int, stage: int, microbatch: int) -> int | None:
        """Return the device that receives the result of an action; None if no stage does."""
        to = receiver(kind, stage)
        return self.device(to, microbatch) if 0 <= to < len(self._devices) else None


def receiver(kind: int, stage: int) -> int:
    """Return the stage that receives the result of an action; a stage that does not exist if there is none."""
    return stage + ACTION_KINDS[kind].sends_to


def action_inputs(kind: int, microbatch: int, stage: int, num_stages: int) -> list[tuple[int, int, int]]:
    """Return the (phase, microbatch, stage) of the actions whose results an action needs."""
    senders = ((phase, stage + distance) for phase, distance in ACTION_KINDS[kind].reads)
    return [(phase, microbatch, sender) for phase, sender in senders if 0 <= sender < num_stages]


def place_actions(
    orders: Sequence[Sequence[Action]], stages: np.ndarray, num_microbatches: int, *, pairs: bool = False
) -> Table:
    """Place every action on the earliest clock that the engine allows, and assign slots.

    The result of an action is available from the next clock on. The only exception is the backward of the last stage,
    which may run in the same clock as its forward. In a clock, a device sends at most one transfer over each distance
    on the ring of devices. Raises ValueError if the orders deadlock.

    Args:
      orders: order of actions on each device.
      stages: stage by [device, chunk].
      num_microbatches: number of microbatches.
      pairs: allow an F and the backward that follows it on the same device in one clock; otherwise a device runs one
        action per clock.
    """
    devices, last_stage, num_chunks = StageDevices(stages), int(stages.max()), stages.shape[1]
    for device, order in enumerate(orders):
        if wrong := [chunk for *_, chunk in order if not 0 <= chunk < num_chunks]:
            raise ValueError(f"an action of device {device} has chunk {wrong[0]}; it must be less than {num_chunks}")
    made: dict[tuple[int, int, int], int] = {}  # clock by (phase, microbatch, stage)
    nexts = [0] * len(orders)
    rows: list[tuple[int, ...]] = []

    def run(clock: int, device: int) -> None:
        used, offsets = -1, {0}  # latest phase in this clock; distances of its transfers
        for index in range(nexts[device], len(orders[device])):
            kind, microbatch, chunk = orders[device][index]
            stage, phase = int(stages[device, chunk]), ACTION_KINDS[kind].phase
            before = clock + (phase == 1 and stage == last_stage)
            inputs = action_inputs(kind, microbatch, stage, last_stage + 1)
            arrived = all(made.get(key, before) < before for key in inputs)
            to = devices.receiver(kind, stage, microbatch)
            offset = 0 if to is None else (to - device) % len(orders)
            if not arrived or phase <= used or (offset and offset in offsets):
                return
            made[phase, microbatch, stage] = clock
            rows.append((clock, device, kind, microbatch, chunk, stage, 0, 0))
            nexts[device] += 1
            if not pairs:
                return
            used, offsets = phase, offsets | {offset}

    ready = set(range(len(orders)))  # devices that ran an action in the clock before, or received a result
    for clock in itertools.count():
        before = len(rows)
        for device in sorted(ready):
            run(clock, device)
        if len(rows) == before:
            break
        new = [(device, kind, stage, microbatch) for _, device, kind, microbatch, _, stage, *_ in rows[before:]]
        received = {devices.receiver(*action) for _, *action in new}
        ready = {device for device, *_ in new} | {device for device in received if device is not None}
    left = [list(order[number:]) for order, number in zip(orders, nexts, strict=True)]
    if any(left):
        raise ValueError(f"the orders deadlock: {_deadlock(left, stages, made)}")
    replicas = tuple(len(devices.of(stage)) for stage in range(last_stage + 1)) if stages.size > last_stage + 1 else ()
    actions = np.array(rows, dtype=ACTION)
    return with_slots(Table(len(orders), stages.shape[1], num_microbatches, actions, replicas=replicas))


def _deadlock(left: Sequence[Sequence[Action]], stages: np.ndarray, made: Container[tuple[int, int, int]]) -> str:
    """Return why no device runs the next of the actions that are left to it: which of them wait for which.

    made: the (phase, microbatch, stage) of the actions that ran.
    """
    devices, waits, device = StageDevices(stages), list[str](), next(device for device, of in enumerate(left) if of)
    seen = set[int]()
    while device not in seen:
        seen.add(device)
        kind, microbatch, chunk = left[device][0]
        stage = int(stages[device, chunk])
        inputs = action_inputs(kind, microbatch, stage, int(stages.max()) + 1)
        phase, _, sender = next(key for key in inputs if key not in made)
        own_stage, others_stage = (f" in stage {s}" if stages.shape[1] > 1 else "" for s in (stage, sender))
        waiting = f"device {device} waits at {ACTION_KINDS[kind].name} of microbatch {microbatch}{own_stage}"
        device = devices.device(sender, microbatch)
        waits.append(f"{waiting} for {SENDERS[phase]} of device {device}{others_stage}")
        own = ((ACTION_KINDS[kind].phase, number, int(stages[device, chunk])) for kind, number, chunk in left[device])
        if (phase, microbatch, sender) not in own:
            return ", ".join([*waits, "whose order lacks it"])
    return ", ".join(waits)


class Stash:
    """The slots of a device's stash, and the microbatch and chunk in each of them."""

    def __init__(self) -> None:
        self._slot_of: dict[tuple[int, int], int] = {}
        self._free: list[int] = []  # a heap: the slots that hold nothing any more

    def take(self, key: tuple[int, int]) -> int:
        """Return the lowest free slot, which now holds `key`."""
        self.release(key)  # an invalid table may take a slot twice
        slot = self._slot_of[key] = heapq.heappop(self._free) if self._free else len(self._slot_of)
        return slot

    def release(self, key: tuple[int, int]) -> int:
        """Return the slot that holds `key`, which is now free; 0 if there is none, as in an invalid table."""
        if key not in self._slot_of:
            return 0
        slot = self._slot_of.pop(key)
        heapq.heappush(self._free, slot)
        return slot


def with_slots(table: Table) -> Table:
    """Return the table with slots assigned: every action takes the lowest free slot, which uses the fewest slots.

    In a forward-only table all slots are 0.
    """
    # By device, the slots of (microbatch, chunk) in the two stashes: F to B, and B to W. It is a dict, as an invalid
    # table may have a device number of 10^9.
    stashes: defaultdict[int, tuple[Stash, Stash]] = defaultdict(lambda: (Stash(), Stash()))
    actions = table.actions.copy()
    slots = []
    for kind, device, microbatch, chunk in actions[["kind", "device", "microbatch", "chunk"]].tolist():
        (activations, gradients), key = stashes[device], (microbatch, chunk)
        if kind == F:
            slots.append(activations.take(key))
        elif kind == U:
            slots.append(0)
        elif kind == W:
            slots.append(gradients.release(key))
        else:
            slots.append(activations.release(key))
            if kind == B:
                gradients.take(key)
    actions["slot"] = slots if is_training(table) else 0
    return table._replace(actions=actions)


def is_training(table: Table) -> bool:
    """Return whether the table has a backward pass. A table without one is forward-only, for evaluation."""
    return bool((table.actions["kind"] != F).any())
