"""Lowered periodic tables: every action finds its inputs and its version of the weights, in every step."""

import itertools
from collections import defaultdict
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.strategies.pipeline.executor.continuous import arrays_at_step
from jaxpar.strategies.pipeline.executor.lowering import INBOXES, NONE, ClockShape, lower_table
from jaxpar.strategies.pipeline.tables.periodic import CONTINUOUS, fewest_microbatches, periodic_table, unroll
from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS, StageDevices, Table, U

NUM_STEPS = 12


def taken(arrays: Any, index: int) -> Any:
    """Return the entries of arrays at an index of their first dim."""
    return jax.tree.map(lambda x: x[index], arrays)


class Machine:
    """A reference engine for lowered periodic tables, with buffers of symbols.

    Attributes:
      ledger: the version of the weights that each action read, by (phase, microbatch, stage). Microbatches are counted
        from the start.
    """

    def __init__(self, table: Table):
        self.lowered, self.num_devices, self.m = lower_table(table), table.num_devices, table.num_microbatches
        self.devices, self.stages = StageDevices(table.stages), table.stages[:, 0].tolist()
        self.shape = self.lowered.shape
        self.buffers: list[dict[Any, dict[int, Any]]] = [defaultdict(dict) for _ in range(self.num_devices)]
        self.versions = [{0: 0} for _ in range(self.num_devices)]  # version by slot
        self.gradients: list[list[int]] = [[] for _ in range(self.num_devices)]
        self.outputs: list[list[Any]] = [[None, None] for _ in range(self.num_devices)]
        self.ledger: dict[tuple[int, int, int], int] = {}
        self._at_step = jax.jit(arrays_at_step, static_argnums=0)

    def step(self, entered: int) -> None:
        of_device = [
            jax.device_get(self._at_step(self.shape, taken(self.lowered.arrays, device), device, entered))
            for device in range(self.num_devices)
        ]
        for clock in range(of_device[0].updates.size):
            now = [taken(arrays, clock) for arrays in of_device]
            of_clock = self.shape.clocks[clock % len(self.shape.clocks)]
            for device, phase in itertools.product(range(self.num_devices), (0, 1)):
                if now[device].actions[phase].chunk != NONE:
                    assert of_clock.actors is not None
                    assert device in of_clock.actors[phase]
                    self.act(device, phase, entered, now[device].actions[phase])
            for device in range(self.num_devices):
                if now[device].updates != NONE:
                    assert of_clock.has_update
                    self.update(device, entered - int(now[device].updates))
            self.deliver(of_clock, now)

    def act(self, device: int, phase: int, entered: int, action: Any) -> None:
        age, number = divmod(int(action.microbatch), self.m)
        k = (entered - age) * self.m + number
        stage = self.stages[device]
        assert device == self.devices.device(stage, k)
        sender = stage + (-1, 1)[phase]
        if 0 <= sender <= max(self.stages):
            assert self.buffers[device][INBOXES[phase]][int(action.inbox)] == (phase, k, sender)
        stash, slot = self.buffers[device][0, 1], int(action.stash[0, 1])
        assert slot < dict(self.shape.num_slots)[0, 1]
        if phase == 0:
            stash[slot] = k
        else:
            assert stash.pop(slot) == k
            self.gradients[device].append(k)
        self.ledger[phase, k, stage] = self.versions[device][int(action.version)]
        self.outputs[device][phase] = (phase, k, stage)

    def update(self, device: int, batch: int) -> None:
        """A U applies the gradient of the microbatches of one batch to the newest version."""
        kept = self.shape.num_versions[device]
        numbers, stage = range(self.m * batch, self.m * (batch + 1)), self.stages[device]
        assert self.gradients[device] == [k for k in numbers if self.devices.device(stage, k) == device]
        assert self.versions[device][batch % kept] == batch == max(self.versions[device].values())
        self.versions[device][(batch + 1) % kept] = batch + 1
        self.gradients[device] = []

    def deliver(self, of_clock: ClockShape, now: list[Any]) -> None:
        for number, route in enumerate(of_clock.routes):
            for sender in route.senders:
                receiver = (sender + route.offset) % self.num_devices
                for phase in route.phases:
                    slot = int(now[receiver].arrivals[number][phase])
                    sent = route.phases[0]
                    if len(route.phases) == 2:
                        sent = 0 if now[sender].actions[0].route == number else 1
                    if slot != NONE and sent == phase:
                        assert slot < dict(self.shape.num_slots)[INBOXES[phase]]
                        self.buffers[receiver][INBOXES[phase]][slot] = self.outputs[sender][phase]


def cases() -> list[tuple[str, tuple[int, ...], int]]:
    """Return schedules, the number of devices of each stage, and the number of microbatches of a batch."""
    replicated = [(2, 1), (1, 2, 1), (1, 3), (2, 2), (4, 2, 1), (2, 3)]
    stages = [*((1,) * n for n in range(2, 9)), *replicated]
    sizes = [(name, of_stages, fewest_microbatches(name, of_stages)) for name in CONTINUOUS for of_stages in stages]
    more = [("pipedream", 3, 2), ("pipedream", 4, 8), ("pipedream_vertical_sync", 3, 4), ("pipedream_2bw", 2, 5)]
    return [*sizes, *((name, (1,) * n, m) for name, n, m in more), ("pipedream", (2, 1), 4)]


@pytest.mark.parametrize(("name", "replicas", "m"), cases())
def test_the_ledger_of_versions(name: str, replicas: tuple[int, ...], m: int) -> None:
    """The buffers give each action the version in the table; test_periodic.py compares tables with papers."""
    table, n = periodic_table(name, replicas, m), sum(replicas)
    machine = Machine(table)
    for entered in range(NUM_STEPS):
        machine.step(entered)
    expected = {
        (ACTION_KINDS[kind].phase, k, stage): version
        for _, _, kind, k, _, stage, version, _ in unroll(table, NUM_STEPS).actions.tolist()
        if kind != U
    }
    assert machine.ledger == {key: expected[key] for key in machine.ledger}
    # Only the batches in flight lack actions.
    assert len(expected) - len(machine.ledger) <= 2 * n * m * machine.shape.num_batches
    assert np.unique([version for _, version in machine.ledger.items()]).size >= min(NUM_STEPS - 2 * n, 3)


def test_a_clock_has_only_its_own_transfers() -> None:
    """Stages take turns, so a stage exchanges with the next one in one clock, and with the one before in the other."""
    even, odd = lower_table(periodic_table("pipedream", (1,) * 4, 3)).shape.clocks
    assert [(route.offset, route.senders) for route in even.routes] == [(1, (0, 2)), (3, (1, 3))]
    assert [(route.offset, route.senders) for route in odd.routes] == [(1, (1,)), (3, (2,))]
    assert even.actors == ((0, 2), (1, 3))
    assert odd.actors == ((1, 3), (0, 2))
    assert even.has_update
    assert odd.has_update
    two_stages = lower_table(periodic_table("pipedream", (1, 1), 3)).shape
    assert [clock.num_transfers for clock in two_stages.clocks] == [1, 0]
