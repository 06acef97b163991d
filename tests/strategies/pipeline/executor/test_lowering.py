"""Lowered tables are run in plain Python, on symbols instead of arrays: every action must read its own input."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar import cluster, strategies
from jaxpar.strategies.pipeline.executor.lowering import INBOXES, NONE, LoweredTable, device_branches, lower_table
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, forward_only
from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS, BW, B, F, Table, W
from jaxpar.strategies.pipeline.tables.validate import check_table, peak_handed, peak_in_flight, peak_stashed
from tests.strategies.pipeline.named_tables import any_tables, make, named_tables
from tests.strategies.pipelines import Task, make_config, make_problem

ZEROS = "the value that ppermute delivers to a device without a sender"
Symbol = Any  # (phase, microbatch, stage) of the action that computed a value; in a stash (buffer, microbatch, stage)


class Machine:
    """A reference engine for lowered tables, with buffers of symbols. `peaks`: the most waiting values per inbox."""

    def __init__(self, table: Table, lowered: LoweredTable):
        self.table, (self.shape, (self.actions, self.arrivals, _)) = table, lowered
        self.stages, self.num_devices = table.stages.tolist(), table.num_devices
        self.slots = dict(self.shape.num_slots)
        self.buffers: list[dict[Any, list[Symbol]]] = [
            {buffer: [None] * number for buffer, number in self.slots.items()} for _ in range(self.num_devices)
        ]
        self.outputs: list[list[Symbol]] = [[None, None, None] for _ in range(self.num_devices)]
        self.waiting = [Counter[str]() for _ in range(self.num_devices)]
        self.peaks = Counter[Any]()
        self.done: list[tuple[int, ...]] = []

    def run(self) -> None:
        for clock in range(self.table.num_clocks):
            for device, waiting in enumerate(self.waiting):
                for inbox, number in waiting.items():
                    self.peaks[inbox] = max(self.peaks[inbox], number)
                for phase in range(self.shape.num_phases):
                    if self.actions[phase].chunk[device, clock] != NONE:
                        self.act(clock, device, phase)
            self.deliver(clock)

    def act(self, clock: int, device: int, phase: int) -> None:
        action, place, buffers = self.actions[phase], (device, clock), self.buffers[device]
        microbatch = int(action.microbatch[place])
        stage = self.stages[device][action.chunk[place]]
        self.done.append((clock, device, phase, microbatch, stage))
        sender = {0: stage - 1, 1: stage + 1, 2: -1}[phase]
        if 0 <= sender < self.table.num_stages:
            slot = self.slot(action.inbox[place], INBOXES[phase])
            assert buffers[INBOXES[phase]][slot] == (phase, microbatch, sender), self.done[-1]
            self.waiting[device][INBOXES[phase]] -= 1
        for (writer, reader), slots in action.stash.items():
            slot, symbol = self.slot(slots[place], (writer, reader)), ((writer, reader), microbatch, stage)
            if writer == phase:
                buffers[writer, reader][slot] = symbol
            elif writer < phase <= reader:
                assert buffers[writer, reader][slot] == symbol, self.done[-1]
        # The lowered action names a slot in every stash that it may read or write.
        assert set(action.stash) == {key for key in self.slots if isinstance(key, tuple) and key[0] <= phase <= key[1]}
        self.outputs[device][phase] = (phase, microbatch, stage)

    def deliver(self, clock: int) -> None:
        for device, phase in itertools.product(range(self.num_devices), range(min(self.shape.num_phases, 2))):
            if self.actions[phase].local_inbox[device, clock] != NONE:
                assert phase in self.shape.local_phases
                self.store(device, phase, self.actions[phase].local_inbox[device, clock], self.outputs[device][phase])
        transfers = self.outputs
        for number, (route, arrival) in enumerate(zip(self.shape.clocks[0].routes, self.arrivals, strict=True)):
            assert 0 < route.offset < self.num_devices
            for device in range(self.num_devices):
                sender, transfer = (device - route.offset) % self.num_devices, ZEROS
                if sender in route.senders:
                    is_forward = self.actions[0].route[sender, clock] == number
                    transfer = transfers[sender][route.phases[0] if len(route.phases) == 1 else 0 if is_forward else 1]
                for phase in (0, 1):
                    if arrival[phase][device, clock] != NONE:
                        assert phase in route.phases
                        self.store(device, phase, arrival[phase][device, clock], transfer)

    def store(self, device: int, phase: int, slot: int, value: Symbol) -> None:
        self.buffers[device][INBOXES[phase]][self.slot(slot, INBOXES[phase])] = value
        self.waiting[device][INBOXES[phase]] += 1

    def slot(self, slot: int, buffer: Any) -> int:
        assert 0 <= slot < self.slots[buffer], (slot, buffer)
        return int(slot)


def run(table: Table) -> None:
    """Lower and run a table. Check its actions, their inputs, and that the buffers are as small as possible."""
    lowered = lower_table(table)
    machine = Machine(table, lowered)
    machine.run()
    expected = table.actions[["clock", "device", "kind", "microbatch", "stage"]].tolist()
    assert machine.done == [(*row[:2], ACTION_KINDS[row[2]].phase, *row[3:]) for row in expected]
    kinds = set(table.actions["kind"].tolist())
    peaks: dict[Any, int] = dict(machine.peaks)
    if B in kinds or BW in kinds:
        peaks[0, 1] = int(peak_in_flight(table).max())
    if B in kinds:
        peaks |= {(0, 2): int(peak_stashed(table).max()), (1, 2): int(peak_handed(table).max())}
    assert dict(lowered.shape.num_slots) == peaks
    assert lowered.shape.num_microbatches == table.num_microbatches
    assert lowered.shape.num_phases == len(lowered.arrays.actions) == (3 if B in kinds else 2 if BW in kinds else 1)
    for array in (array for action in lowered.arrays.actions for array in (action.chunk, action.inbox, action.route)):
        assert array.shape == (table.num_devices, table.num_clocks)
        assert array.dtype == np.int32


@pytest.mark.parametrize("name", SCHEDULES)
@given(data=st.data())
def test_every_action_finds_its_input(name: str, data: st.DataObject) -> None:
    """Forward-only tables run as well."""
    table = data.draw(named_tables(name))
    run(table)
    run(forward_only(table.num_devices, table.num_microbatches, table.stages))


@given(any_tables())
def test_any_table(table: Table) -> None:
    check_table(table)
    run(table)


def test_one_f_one_b_by_hand() -> None:
    """The table is 0: F0 F1 --- BW0 --- BW1 and 1: --- F0 BW0 F1 BW1 ---, on two devices with two microbatches."""
    table = make("1f1b", 2, 2)
    lowered = lower_table(table)
    assert table.num_clocks == 6
    assert [route[:] for route in lowered.shape.clocks[0].routes] == [
        (1, (0, 1), (0, 1))
    ]  # on two devices, both directions have offset 1
    assert dict(lowered.shape.num_slots) == {"activations": 1, "gradients": 1, (0, 1): 2}
    forward, backward = lowered.arrays.actions
    assert forward.microbatch.tolist() == [[0, 1, -1, -1, -1, -1], [-1, 0, -1, 1, -1, -1]]
    assert backward.microbatch.tolist() == [[-1, -1, -1, 0, -1, 1], [-1, -1, 0, -1, 1, -1]]
    assert forward.inbox.tolist() == [[-1] * 6, [-1, 0, -1, 0, -1, -1]]
    assert backward.inbox.tolist() == [[-1, -1, -1, 0, -1, 0], [-1] * 6]
    assert backward.stash[0, 1].tolist() == [[-1, -1, -1, 0, -1, 1], [-1, -1, 0, -1, 0, -1]]
    (arrival,) = lowered.arrays.arrivals
    assert arrival[0].tolist() == [[-1] * 6, [0, 0, -1, -1, -1, -1]]
    assert arrival[1].tolist() == [[-1, -1, 0, -1, 0, -1], [-1] * 6]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_branches_are_those_of_the_table(schedule: str) -> None:
    overrides = ("--config.strategy=pipeline", "--config.mesh.stage=2", f"--config.pipeline.schedule={schedule}")
    task = Task("mlp", "classification", layers=4)
    config = make_config(task, *overrides)
    details: Any = strategies.plan(config, make_problem(config, task), cluster.find_cluster()).details
    found, table = device_branches(details.lowered, details.stages), details.table
    for phase, kinds in enumerate(([F], [B, BW], [W])[: 3 if schedule == "zb_h1" else 2]):
        acts = np.zeros((table.num_clocks, table.num_devices), bool)
        for clock, device, kind in table.actions[["clock", "device", "kind"]].tolist():
            acts[clock, device] |= kind in kinds
        branches = found[f"clock_0/phase_{phase}"]
        assert ((branches.taken > 0) == acts).all()
        assert (branches.taken < branches.number).all()
        # The two devices have stages of different kinds, so they never run the same program.
        assert not set(branches.taken[acts[:, 0], 0]) & set(branches.taken[acts[:, 1], 1])
        assert sum(branches.fractions) == pytest.approx(1)
        assert branches.fractions[0] == pytest.approx(1 - acts.mean())
    # Every transfer is stored once: each device but one receives each microbatch's activation.
    stored = [one for name, one in found.items() if "/deliver_0_" in name]
    assert sum((one.taken == 0).sum() for one in stored) == table.num_microbatches
    assert (found["of_kind"].taken == [details.stages.kinds]).all()
