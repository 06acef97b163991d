"""Tables, and how the orders of devices become one: a schedule is data, made in NumPy before anything runs.

An *action* is one kind of work on one microbatch at one stage: F forward, B gradient of the input (dX), W gradient of
the weights (dW), BW both gradients at once. A *stage* is a run of layers, numbered in the order of computation; a
device has one or several, its *chunks*. A *clock* is one step that all devices take together.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ACTION_KINDS = ("F", "B", "W", "BW")
F, B, W, BW = range(4)
PHASE_OF_KIND = (0, 1, 2, 1)  # the order within a clock: F, then B or BW, then W
FIELDS = ("clock", "device", "kind", "microbatch", "chunk", "stage", "version", "slot")
ACTION = np.dtype([(name, np.int32) for name in FIELDS])


class Table(NamedTuple):
    """A schedule on clocks.

    `actions` has dtype ACTION and is sorted by clock, device and order within the clock. `version` is that of the
    weights. `slot` is the place in the device's stash that the microbatch keeps from its F to its B or BW; that of a W
    is the place, in another stash, of what its B hands to it.
    """

    num_devices: int
    num_chunks: int
    num_microbatches: int
    actions: np.ndarray

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole network: devices x chunks."""
        return self.num_devices * self.num_chunks

    @property
    def num_clocks(self) -> int:
        """Number of clocks up to the last one with an action."""
        return int(self.actions["clock"].max(initial=-1)) + 1

    @property
    def stages(self) -> np.ndarray:
        """Stage by [device, chunk]."""
        stages = np.full((self.num_devices, self.num_chunks), -1)
        stages[self.actions["device"], self.actions["chunk"]] = self.actions["stage"]
        return stages


class Action(NamedTuple):
    """One action of a device, not yet on a clock."""

    kind: int
    microbatch: int
    chunk: int


def loop_stages(num_devices: int, num_chunks: int) -> np.ndarray:
    """Return the stage by [device, chunk] where stages go round the devices."""
    return np.arange(num_devices)[:, None] + num_devices * np.arange(num_chunks)


def v_stages(num_devices: int, num_chunks: int = 2) -> np.ndarray:
    """Return the stage by [device, chunk] where stages go down the devices and up again."""
    assert num_chunks == 2, num_chunks
    down = np.arange(num_devices)
    return np.stack([down, 2 * num_devices - 1 - down], axis=1)


def device_of_stage(stages: np.ndarray) -> list[int]:
    """Return the device of each stage, from stages by [device, chunk]."""
    return [int(device) for device in np.argsort(stages, axis=None) // stages.shape[1]]


def receiver(kind: int, stage: int) -> int:
    """Return the stage that takes what an action made: one that does not exist where none takes it."""
    return stage + (1, -1, 0, -1)[kind]


def action_inputs(kind: int, microbatch: int, stage: int, num_stages: int) -> list[tuple[int, int, int]]:
    """Return the (phase, microbatch, stage) of the actions whose results an action takes."""
    if kind == W:
        return [(1, microbatch, stage)]
    if kind == F:
        return [(0, microbatch, stage - 1)] if stage else []
    return [(0, microbatch, stage)] + ([(1, microbatch, stage + 1)] if stage + 1 < num_stages else [])


def place_actions(
    orders: Sequence[Sequence[Action]], stages: np.ndarray, num_microbatches: int, *, pairs: bool = False
) -> Table:
    """Put every action on the earliest clock that the engine allows, and give it a slot.

    What an action made is usable from the next clock on; within a clock, only the last stage's backward may follow its
    forward. A device sends at most one transfer in a clock over each distance between devices.

    Args:
      orders: by device.
      stages: by [device, chunk].
      pairs: whether a device may run an F and the backward that follows it in one clock; otherwise one action a clock.

    Raises:
      ValueError: the orders wait for each other.
    """
    device_of, last_stage = dict(enumerate(device_of_stage(stages))), stages.size - 1
    made: dict[tuple[int, int, int], int] = {}  # clock by (phase, microbatch, stage)
    nexts = [0] * len(orders)
    rows: list[tuple[int, ...]] = []

    def run(clock: int, device: int) -> None:
        """All that the device may do in the clock."""
        used, offsets = -1, {0}  # its latest phase; distances of its transfers
        for index in range(nexts[device], len(orders[device])):
            kind, microbatch, chunk = orders[device][index]
            stage, phase = int(stages[device, chunk]), PHASE_OF_KIND[kind]
            before = clock + (phase == 1 and stage == last_stage)
            arrived = all(
                made.get(key, before) < before for key in action_inputs(kind, microbatch, stage, last_stage + 1)
            )
            offset = (device_of.get(receiver(kind, stage), device) - device) % len(orders)
            if not arrived or phase <= used or (offset and offset in offsets):
                return
            made[phase, microbatch, stage] = clock
            rows.append((clock, device, kind, microbatch, chunk, stage, 0, 0))
            nexts[device] += 1
            if not pairs:
                return
            used, offsets = phase, offsets | {offset}

    for clock in itertools.count():
        late = [device for device, order in enumerate(orders) if nexts[device] < len(order)]
        if not late:
            break
        before = len(rows)
        for device in late:
            run(clock, device)
        if len(rows) == before:
            kind, microbatch, chunk = orders[late[0]][nexts[late[0]]]
            raise ValueError(
                f"the devices wait for each other: device {late[0]} never gets to {ACTION_KINDS[kind]} of "
                f"microbatch {microbatch}, stage {stages[late[0], chunk]}"
            )
    return with_slots(Table(len(orders), stages.shape[1], num_microbatches, np.array(rows, dtype=ACTION)))


Stash = dict[tuple[int, int], int]  # slot by microbatch and chunk


def with_slots(table: Table) -> Table:
    """Return the table with the fewest slots: an action takes its device's least free one. F alone needs none."""
    # By device that has an action (a wrong table may name number 10^9), slot by (microbatch, chunk): F to B, B to W.
    stashes: defaultdict[int, tuple[Stash, Stash]] = defaultdict(lambda: ({}, {}))
    actions = table.actions.copy()

    def take(stash: Stash, key: tuple[int, int]) -> int:
        taken = set(stash.values())
        stash[key] = next(slot for slot in itertools.count() if slot not in taken)
        return stash[key]

    slots = []
    for kind, device, microbatch, chunk in actions[["kind", "device", "microbatch", "chunk"]].tolist():
        (activations, gradients), key = stashes[device], (microbatch, chunk)
        if kind == F:
            slots.append(take(activations, key))
        elif kind == W:
            slots.append(gradients.pop(key, 0))
        else:
            slots.append(activations.pop(key, 0))
            if kind == B:
                take(gradients, key)
    actions["slot"] = slots if is_training(table) else 0
    return table._replace(actions=actions)


def is_training(table: Table) -> bool:
    """Return whether the table has any backward; one without is a forward pass alone."""
    return bool((table.actions["kind"] != F).any())
