"""Checks that the engine can run a table, and counts the microbatches that each device holds at its peak."""

import itertools
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from jaxpar.strategies.pipeline.tables.table import (
    ACTION,
    ACTION_KINDS,
    BW,
    FIELDS,
    SENDERS,
    B,
    F,
    Table,
    U,
    W,
    action_inputs,
    is_training,
    receiver,
)

ActionRow = dict[str, int]  # an action, by field
DeviceOf = Callable[[int, int], int | None]  # (stage, microbatch) -> device; None if there is none


class TableError(ValueError):
    """A table breaks a rule. The message names the clock, the device and the rule."""


def check_table(table: Table) -> None:
    """Raise TableError if the table breaks one of these rules.

    - Numbers are in range, and rows are sorted.
    - Every stage is one chunk of one device, or of as many neighbours as it has replicas, which take turns.
    - A device runs at most one action of each phase per clock.
    - Every microbatch has one F at every stage, and one BW, or one B and one W. A forward-only table has no backward.
    - Results are available from the next clock on. Two actions may also run in the same clock as the action that they
      depend on: the backward of the last stage after its F, and W after its B. So may U after a backward.
    - A device sends at most one transfer per clock over each distance on the ring of devices.
    - Microbatches that are stashed on a device at the same time have different slots.
    - Every U writes the version after the newest one of its stage. An action reads a version that a U has written in
      an earlier clock, or version 0.
    """
    rows = [dict(zip(FIELDS, row, strict=True)) for row in table.actions.tolist()]
    _check_rows(table, rows)
    device_of = _check_replicas(table, rows) if table.replicas else _check_stages(rows)
    _check_clocks(table, rows, device_of)
    made = _check_once(rows)
    if is_training(table):
        _check_backward(rows, made)
    _check_inputs(table, rows, made)
    _check_forward(table, rows, made, device_of)
    if is_training(table):
        _check_slots(rows)
    _check_versions(rows)


def _fail(row: ActionRow, rule: str) -> NoReturn:
    raise TableError(f"clock {row['clock']}, device {row['device']}: {rule}")


def _name(row: ActionRow) -> str:
    return f"{ACTION_KINDS[row['kind']].name} of microbatch {row['microbatch']}, stage {row['stage']}"


def _check_rows(table: Table, rows: list[ActionRow]) -> None:
    if not rows:
        raise TableError("the table has no actions; it must have at least one")
    assert table.actions.dtype == ACTION, table.actions.dtype
    ends = {
        "device": table.num_devices,
        "kind": len(ACTION_KINDS),
        "microbatch": table.num_microbatches,
        "chunk": table.num_chunks,
        "stage": table.num_stages,
    }
    for row in rows:
        for field in FIELDS:
            if row[field] < 0 or row[field] >= ends.get(field, np.inf):
                upper = f" and less than {ends[field]}" if field in ends else ""
                _fail(row, f"{field} is {row[field]}; it must be at least 0{upper}")
    for before, row in itertools.pairwise(rows):
        if _place(row) < _place(before):
            order = "order within the clock (F, then B or BW, then W, then U)"
            _fail(row, f"rows must be sorted by clock, device and {order}")


def _place(row: ActionRow) -> tuple[int, int, int]:
    return row["clock"], row["device"], ACTION_KINDS[row["kind"]].phase


def _check_stages(rows: list[ActionRow]) -> DeviceOf:
    """Check the placement of the stages, and return the device of (stage, any microbatch)."""
    chunk_of: dict[int, tuple[int, int]] = {}  # device and chunk by stage
    stage_of: dict[tuple[int, int], int] = {}
    for row in rows:
        stage, where = row["stage"], (row["device"], row["chunk"])
        device, chunk = chunk_of.setdefault(stage, where)
        if device != where[0]:
            _fail(row, f"stage {stage} is also on device {device}; a stage must be on one device")
        if chunk != where[1] or stage_of.setdefault(where, stage) != stage:
            _fail(row, f"chunk {where[1]} is stage {stage}; a chunk must be one stage, and a stage must be one chunk")
    devices = {stage: device for stage, (device, _) in chunk_of.items()}
    return lambda stage, _microbatch: devices.get(stage)


def _check_replicas(table: Table, rows: list[ActionRow]) -> DeviceOf:
    """Check that each microbatch is on its replica of every stage, and return the device of (stage, microbatch)."""
    firsts = [0, *itertools.accumulate(table.replicas)]

    def device_of(stage: int, microbatch: int) -> int | None:
        if not 0 <= stage < len(table.replicas):
            return None
        return firsts[stage] + microbatch % table.replicas[stage]

    for row in rows:
        if row["kind"] == U:
            is_right = firsts[row["stage"]] <= row["device"] < firsts[row["stage"] + 1]
        else:
            is_right = row["device"] == device_of(row["stage"], row["microbatch"])
        if not is_right or row["chunk"]:
            _fail(row, f"{_name(row)} is on another device than its replica of the stage")
    return device_of


def _check_clocks(table: Table, rows: list[ActionRow], device_of: DeviceOf) -> None:
    actions: dict[tuple[int, int, int], ActionRow] = {}
    transfers: dict[tuple[int, int, int], ActionRow] = {}  # by clock, device and distance
    for row in rows:
        other = actions.setdefault(_place(row), row)
        if other is not row:
            both = f"{_name(row)} and {_name(other)}"
            _fail(row, f"{both} are in one clock; it must have at most one F, one B or BW, and one W of a device")
        device = row["device"]
        to = device_of(receiver(row["kind"], row["stage"]), row["microbatch"])
        distance = 0 if to is None else (to - device) % table.num_devices
        if distance:
            other = transfers.setdefault((row["clock"], device, distance), row)
            if other is not row:
                both = f"{_name(other)} and {_name(row)}"
                _fail(row, f"{both} send to device {to}; there must be at most one transfer per clock")


def _check_once(rows: list[ActionRow]) -> dict[tuple[int, int, int], ActionRow]:
    """Check that no action runs twice, and return the actions by (phase, microbatch, stage)."""
    made: dict[tuple[int, int, int], ActionRow] = {}
    updates: dict[tuple[int, int, int], ActionRow] = {}
    for row in rows:
        key = ACTION_KINDS[row["kind"]].phase, row["microbatch"], row["stage"]
        is_update = row["kind"] == U  # each replica of the stage has its own
        other = updates.setdefault((row["device"], *key[1:]), row) if is_update else made.setdefault(key, row)
        if other is not row:
            _fail(row, f"{_name(row)} repeats {_name(other)} at clock {other['clock']}; it must run once")
        if row["kind"] == W and (backward := made.get((1, *key[1:]))) and backward["kind"] == BW:
            part = f"repeats a part of {_name(backward)} at clock {backward['clock']}"
            _fail(row, f"{_name(row)} {part}; there must be either BW, or B and W")
    return made


def _check_inputs(table: Table, rows: list[ActionRow], made: dict[tuple[int, int, int], ActionRow]) -> None:
    last_stage = table.num_stages - 1
    for row in rows:
        for key in action_inputs(row["kind"], row["microbatch"], row["stage"], table.num_stages):
            if key not in made:
                source = f"{SENDERS[key[0]]} of microbatch {key[1]}, stage {key[2]}"
                _fail(row, f"{_name(row)} needs the result of {source}, which the table lacks; it must have it")
            before = made[key]
            shares = row["kind"] in (W, U) or (key[0] == 0 and row["kind"] != F and row["stage"] == last_stage)
            if before["clock"] >= row["clock"] + shares:
                needs = f"{_name(row)} needs the result of {_name(before)}, which runs at clock {before['clock']}"
                _fail(row, f"{needs}; it must run {'no later' if shares else 'earlier'}")


def _check_backward(rows: list[ActionRow], made: dict[tuple[int, int, int], ActionRow]) -> None:
    for row in rows:
        where = row["microbatch"], row["stage"]
        if row["kind"] == F and (1, *where) not in made:
            _fail(row, f"{_name(row)} has no backward; it must have BW, or B and W")
        if row["kind"] == B and (2, *where) not in made:
            _fail(row, f"{_name(row)} has no W; it must have one")


def _check_forward(
    table: Table, rows: list[ActionRow], made: dict[tuple[int, int, int], ActionRow], device_of: DeviceOf
) -> None:
    nowhere = {(d, c) for d in range(table.num_devices) for c in range(table.num_chunks)}
    nowhere -= {(row["device"], row["chunk"]) for row in rows}
    for stage in range(table.num_stages):
        for microbatch in range(table.num_microbatches):
            if (0, microbatch, stage) not in made:
                device = device_of(stage, microbatch)
                device = min(nowhere)[0] if device is None else device
                missing = f"F of microbatch {microbatch}, stage {stage}"
                _fail(rows[-1] | {"device": device}, f"the table ends without {missing}; it must have it")


def _check_slots(rows: list[ActionRow]) -> None:
    holders: dict[tuple[bool, int, int], ActionRow] = {}  # by (whether it is the stash from B to W, device, slot)
    slots = {(row["kind"], row["microbatch"], row["stage"]): row["slot"] for row in rows}
    for row in rows:
        kind, device, where = row["kind"], row["device"], (row["microbatch"], row["stage"])
        if kind == U:
            continue
        if kind != F:
            if kind != W and row["slot"] != slots[F, *where]:
                _fail(row, f"{_name(row)} has slot {row['slot']}; it must have the slot of its F, {slots[F, *where]}")
            del holders[kind == W, device, row["slot"]]
        if kind in (F, B):
            slot = slots[W, *where] if kind == B else row["slot"]
            other = holders.setdefault((kind == B, device, slot), row)
            if other is not row:
                stash = "the stash of B" if kind == B else "the stash of F"
                holder = f"microbatch {other['microbatch']}, stage {other['stage']}"
                _fail(row, f"{_name(row)} writes slot {slot} of {stash}, which still holds {holder}; it must be free")


def _check_versions(rows: list[ActionRow]) -> None:
    written: dict[tuple[int, int], list[int]] = {}  # by stage and device, the clocks in which versions were written
    for row in rows:
        clocks, version = written.setdefault((row["stage"], row["device"]), []), row["version"]
        if row["kind"] == U:
            if version != len(clocks) + 1:
                _fail(row, f"{_name(row)} writes version {version}; it must write version {len(clocks) + 1}")
            clocks.append(row["clock"])
        elif version and (version > len(clocks) or clocks[version - 1] >= row["clock"]):
            _fail(row, f"{_name(row)} reads version {version}; it must be a version that a U wrote in an earlier clock")


def peak_in_flight(table: Table, sizes: Sequence[float] | None = None) -> np.ndarray:
    """Return, by device, the peak number of microbatches, counted per chunk, between their F and their B or BW.

    sizes: what a microbatch counts in each stage; None: 1.
    """
    return _peak(table, [kind.stashes(weight_memory=0) for kind in ACTION_KINDS], sizes).astype(int)


def peak_handed(table: Table, sizes: Sequence[float] | None = None) -> np.ndarray:
    """Return, by device, the peak number of microbatches, counted per chunk, between their B and their W.

    sizes: as in `peak_in_flight`.
    """
    changes = [("backward" in kind.passes) - ("weight" in kind.passes) for kind in ACTION_KINDS]
    return _peak(table, changes, sizes).astype(int)


def peak_stashed(table: Table, weight_memory: float = 1.0, sizes: Sequence[float] | None = None) -> np.ndarray:
    """Return, by device, the peak number of microbatches, counted per chunk, between their F and their W or BW.

    weight_memory: as in `Kind.stashes`; sizes: as in `peak_in_flight`.
    """
    return _peak(table, [kind.stashes(weight_memory) for kind in ACTION_KINDS], sizes)


def _peak(table: Table, change_by_kind: Sequence[float], sizes: Sequence[float] | None) -> np.ndarray:
    if not is_training(table):  # a forward-only table stashes nothing
        return np.zeros(table.num_devices)
    change, devices = np.array(change_by_kind, float)[table.actions["kind"]], table.actions["device"]
    if sizes is not None:
        change *= np.array(sizes)[table.actions["stage"]]
    ends = np.bincount(devices, minlength=table.num_devices).cumsum()
    by_device = np.split(change[np.argsort(devices, kind="stable")], ends[:-1])
    return np.array([np.cumsum(of_device).max(initial=0) for of_device in by_device])
