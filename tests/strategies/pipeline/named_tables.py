"""Tables for tests: named schedules of any size, and random tables that obey the rules and nothing else."""

import itertools
import random

import numpy as np
from hypothesis import strategies as st

from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES, make_table
from jaxpar.strategies.pipeline.tables.table import (
    ACTION,
    ACTION_KINDS,
    BW,
    B,
    F,
    StageDevices,
    Table,
    W,
    action_inputs,
    with_slots,
)


def make(name: str, p: int, m: int, v: int | None = None) -> Table:
    """Make the table of a named schedule for p devices and m microbatches, by default with its number of chunks."""
    return make_table(name, num_devices=p, num_microbatches=m, num_chunks=v or SCHEDULES[name].num_chunks)


def named_tables(name: str, most_devices: int = 8, most_microbatches: int = 16) -> st.SearchStrategy[Table]:
    """Return the tables of a schedule on 1 to 8 devices with 1 to 16 microbatches, and any number of chunks up to 3."""
    p, m = st.integers(1, most_devices), st.integers(1, most_microbatches)
    if not SCHEDULES[name].any_chunks:
        return st.builds(make, st.just(name), p, m)

    def of(p: int, m: int, v: int) -> Table:  # a multiple of the devices
        return make(name, p, max(m // p, 1) * p, v)

    return st.builds(of, p, m, st.integers(1, 3))


def any_tables(most_devices: int = 5, most_chunks: int = 3, most_microbatches: int = 5) -> st.SearchStrategy[Table]:
    """Return valid tables of any stage placement, with several actions per clock and idle devices."""
    sizes = (st.integers(1, most) for most in (most_devices, most_chunks, most_microbatches))
    return st.builds(random_table, st.builds(random.Random, st.integers(0, 2**32 - 1)), *sizes, st.booleans())


def random_table(rng: random.Random, p: int, v: int, m: int, fused: bool) -> Table:
    """Return a valid table in which every device runs a random subset of its possible actions in each clock."""
    stages = np.array(rng.sample(range(p * v), p * v)).reshape(p, v)
    last = p * v - 1
    device_of = [StageDevices(stages).device(stage, 0) for stage in range(last + 1)]
    kinds = (F, BW) if fused else (F, B, W)
    todo = [(kind, k, stage) for kind in kinds for k in range(m) for stage in range(p * v)]
    made: dict[tuple[int, int, int], int] = {}
    rows: list[tuple[int, ...]] = []
    for clock in itertools.count():
        if not todo:
            break
        busy: set[tuple[int, int]] = set()  # device, phase
        sent: set[tuple[int, int]] = set()  # device, offset
        for device, phase in itertools.product(range(p), range(3)):
            mine = [a for a in todo if device_of[a[2]] == device and ACTION_KINDS[a[0]].phase == phase]
            rng.shuffle(mine)
            for kind, k, stage in mine:
                shares = kind == W or (phase == 1 and stage == last)  # may share the clock of its F or B
                needed = action_inputs(kind, k, stage, p * v)
                is_ready = all(made.get(key, clock) < clock + (shares and made.get(key) == clock) for key in needed)
                to = stage + {F: 1, W: 0}.get(kind, -1)
                offset = (device_of[to] - device) % p if 0 <= to <= last else 0
                if (
                    not is_ready
                    or (device, phase) in busy
                    or (offset and (device, offset) in sent)
                    or rng.random() < 0.3
                ):
                    continue
                busy.add((device, phase))
                sent.add((device, offset))
                made[phase, k, stage] = clock
                chunk = stages[device].tolist().index(stage)
                rows.append((clock, device, kind, k, chunk, stage, 0, 0))
                todo.remove((kind, k, stage))
    return with_slots(Table(p, v, m, np.array(rows, ACTION)))
