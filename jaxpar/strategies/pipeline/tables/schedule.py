"""The named schedules: the order in which each device runs its actions. `make_table` turns an order into a table.

Arguments of the order functions are the number of devices p, the number of microbatches m, the number of chunks per
device v, and the device d. In the diagrams (draw.py) a row is a device, a column is a clock.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.errors import nearest
from jaxpar.strategies.pipeline.tables.periodic import (
    CONTINUOUS,
    continuous_obstacle,
    fewest_microbatches,
    periodic_table,
    unroll,
)
from jaxpar.strategies.pipeline.tables.table import (
    BW,
    Action,
    B,
    F,
    StageDevices,
    Table,
    W,
    loop_stages,
    place_actions,
    v_stages,
)


def model_parallel(_p: int, m: int, _v: int, _d: int) -> Iterator[Action]:
    """Naive model parallelism: one microbatch at a time goes through all stages, so one device works at a time.

    0:  F0                             BW0  F1                             BW1
    1:      F0                    BW0           F1                    BW1
    2:          F0           BW0                    F1           BW1
    3:              F0  BW0                             F1  BW1
    """
    for k in range(m):
        yield Action(F, k, 0)
        yield Action(BW, k, 0)


def gpipe(_p: int, m: int, _v: int, _d: int) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al., "GPipe", 2019, section 2.3).

    Backwards run in the order of the microbatches, so that gradients are summed in the same order as on a single
    device. The paper draws them in reverse order, which takes the same time and memory.

    0:  F0  F1  F2  F3                             BW0  BW1  BW2  BW3
    1:      F0  F1  F2  F3                    BW0  BW1  BW2  BW3
    2:          F0  F1  F2  F3           BW0  BW1  BW2  BW3
    3:              F0  F1  F2  F3  BW0  BW1  BW2  BW3
    """
    yield from (Action(F, k, 0) for k in range(m))
    yield from (Action(BW, k, 0) for k in range(m))


def one_f_one_b(p: int, m: int, _v: int, d: int) -> Iterator[Action]:
    """PipeDream-Flush (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021, section 3.2).

    Device d has at most p - d microbatches in flight.

    0:  F0  F1  F2  F3                 BW0       BW1       BW2       BW3
    1:      F0  F1  F2            BW0  F3   BW1       BW2       BW3
    2:          F0  F1       BW0  F2   BW1  F3   BW2       BW3
    3:              F0  BW0  F1   BW1  F2   BW2  F3   BW3
    """
    return _alternate(m, warmup=p - d)


def eager_one_f_one_b(p: int, m: int, _v: int, d: int) -> Iterator[Action]:
    """1F1B with almost twice the warm-up.

    Zhuang et al., "On Optimizing the Communication of Model Parallelism", 2022, section 4.
    F of microbatch k runs at clock k + d, and its backward at clock k + 2(p - 1) - d. So in the steady state every
    device runs one F and one backward in every clock, and no device waits for another in lockstep.

    0:  F0  F1  F2  F3                   BW0    BW1  BW2  BW3
    1:      F0  F1  F2     F3     BW0    BW1    BW2  BW3
    2:          F0  F1     F2BW0  F3BW1  BW2    BW3
    3:              F0BW0  F1BW1  F2BW2  F3BW3
    """
    return _alternate(m, warmup=2 * (p - 1 - d) + 1)


def interleaved_1f1b(p: int, m: int, v: int, d: int) -> Iterator[Action]:
    """1F1B with v chunks per device.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, section 2.2.
    Microbatches run in groups of p, and a group runs on all chunks of a device before the next group
    starts. m must be a multiple of p. The letters a, b, ... are the chunks:

    0:  F0a  F1a  F0b  F1b      F2a      BW0b  F3a   BW1b  F2bBW0a  F3bBW1a  BW2b     BW3b  BW2a  BW3a
    1:       F0a  F1a  F0bBW0b  F1bBW1b  F2a   BW0a  F3a   BW1a     F2bBW2b  F3bBW3b  BW2a  BW3a
    """
    warmup = min(2 * (p - d - 1) + (v - 1) * p, m * v)
    in_order = [(j // (p * v) * p + j % p, j // p % v) for j in range(m * v)]  # microbatch, chunk
    for j in range(m * v + warmup):
        if j < m * v:
            microbatch, chunk = in_order[j]
            yield Action(F, microbatch, chunk)
        if j >= warmup:
            microbatch, chunk = in_order[j - warmup]
            yield Action(BW, microbatch, v - 1 - chunk)


def zb_h1(p: int, m: int, _v: int, d: int) -> Iterator[Action]:
    """1F1B with separate B and W, where W is delayed to fill the cool-down.

    Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.1.

    0:  F0  F1  F2  F3              B0  W0  B1  W1  B2  W2  B3  W3
    1:      F0  F1  F2          B0  F3  B1  W0  B2  W1  B3  W2  W3
    2:          F0  F1      B0  F2  B1  F3  B2  W0  B3  W1  W2  W3
    3:              F0  B0  F1  B1  F2  B2  F3  B3  W0  W1  W2  W3
    """
    return _alternate_split(m, warmup=p - d, delay=d)


def zb_h2(p: int, m: int, _v: int, d: int) -> Iterator[Action]:
    """zb_h1 with more forwards, which also fill the warm-up, at almost twice the memory (Qi et al., section 2.2).

    0:  F0  F1  F2  F3  F4  F5  F6  B0  W0  B1  W1  B2  W2  B3  W3  B4  W4  B5  W5  B6  W6
    1:      F0  F1  F2  F3  F4  B0  F5  B1  F6  B2  W0  B3  W1  B4  W2  B5  W3  B6  W4  W5  W6
    2:          F0  F1  F2  B0  F3  B1  F4  B2  F5  B3  F6  B4  W0  B5  W1  B6  W2  W3  W4  W5  W6
    3:              F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  F5  B5  F6  B6  W0  W1  W2  W3  W4  W5  W6
    """
    return _alternate_split(m, warmup=2 * (p - d) - 1, delay=2 * d)


def zb_v(p: int, m: int, _v: int, d: int) -> Iterator[Action]:
    """Two chunks per device, placed in a V: no bubble, at the memory of 1F1B, if F, B and W take the same time.

    Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 6. The pattern needs 2p - 1 microbatches. With fewer
    microbatches, the actions of the missing ones are left out. The letters a and b are the chunks:

    0:  F0a  F1a  F2a  F0b  B0b  W0b  F1b  B1b  W1b  B0a  W0a  F2b  B2b  W2b  B1a  W1a  B2a  W2a
    1:       F0a  F0b  F1a  F1b  B0b  W0b  F2a  B0a  W0a  F2b  B1b  W1b  B1a  B2b  B2a  W1a  W2b  W2a
    """
    pattern_m = max(m, 2 * p - 1)
    order = [(F, 0)] * (2 * (p - d) - 1) + [(F, 1), (F, 0)] * d + [(F, 1), (B, 1), (W, 1)] * (p - d)
    late = pattern_m - (2 * p - 1 - d)  # remaining forwards of chunk 0
    for k in range(pattern_m - p):
        order += [(F, 0)] * (k < late) + [(B, 0), (W, 0), (F, 1), (B, 1), (W, 1)]
    order += [(B, 0), (B, 1)] * d + [(B, 0), (W, 0)] * (p - d) + [(W, 1)] * d + [(W, 0)] * d
    microbatches = {action: iter(range(pattern_m)) for action in set(order)}
    for kind, chunk in order:
        microbatch = next(microbatches[kind, chunk])
        if microbatch < m:
            yield Action(kind, microbatch, chunk)


def _alternate(m: int, warmup: int) -> Iterator[Action]:
    """Yield `warmup` forwards, then alternate backwards and forwards, then the remaining backwards."""
    for k in range(m + warmup):
        if k >= warmup:
            yield Action(BW, k - warmup, 0)
        if k < m:
            yield Action(F, k, 0)


def _alternate_split(m: int, warmup: int, delay: int) -> Iterator[Action]:
    """Yield `warmup` forwards, then alternate B, W and F. The first W follows the first B and `delay` more."""
    for k in range(m + warmup + delay):
        if warmup <= k < m + warmup:
            yield Action(B, k - warmup, 0)
        if k >= warmup + delay:
            yield Action(W, k - warmup - delay, 0)
        if k < m:
            yield Action(F, k, 0)


class Schedule(NamedTuple):
    """The definition of a named schedule."""

    order: Callable[[int, int, int, int], Iterator[Action]]  # (p, m, v, d) -> the order of actions on device d
    stages: Callable[[int, int], np.ndarray] = loop_stages  # (p, v) -> stage by [device, chunk]
    num_chunks: int = 1  # number of chunks per device; the default number if `any_chunks`
    any_chunks: bool = False  # whether any number of chunks is allowed
    # An F and the BW after it share a clock, so that every clock of the steady state has one of each. Other schedules
    # run one action per device and clock, because in lockstep all devices wait for a device that runs two.
    pairs: bool = False


SCHEDULES = {
    "model_parallel": Schedule(model_parallel),
    "gpipe": Schedule(gpipe),
    "1f1b": Schedule(one_f_one_b),
    "eager_1f1b": Schedule(eager_one_f_one_b, pairs=True),
    "interleaved_1f1b": Schedule(interleaved_1f1b, num_chunks=2, any_chunks=True, pairs=True),
    "zb_h1": Schedule(zb_h1),
    "zb_h2": Schedule(zb_h2),
    "zb_v": Schedule(zb_v, v_stages, num_chunks=2),
}


MAX_TABLE_SIZE = 500_000  # microbatches x stages: making and simulating a table of this size takes about 20 s


def schedule_obstacle(name: str, *, num_devices: int, num_microbatches: int, num_chunks: int) -> str | None:
    """Return an error message in one line if a schedule cannot have these sizes; None if it can."""
    schedule = SCHEDULES[name]
    sizes = {"num_devices": num_devices, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    for size, value in sizes.items():
        if value < 1:
            return f"{size} is {value}; it must be at least 1"
    if reason := size_obstacle(num_devices, num_microbatches, num_chunks):
        return reason
    if not schedule.any_chunks and num_chunks != schedule.num_chunks:
        return f"num_chunks is {num_chunks}; it must be {schedule.num_chunks} for schedule {name}"
    if name == "interleaved_1f1b" and num_microbatches % num_devices:
        return (
            f"num_microbatches is {num_microbatches}; it must be a multiple of {num_devices}, the number of devices, "
            f"for schedule {name}"
        )
    return None


def size_obstacle(num_devices: int, num_microbatches: int, num_chunks: int) -> str | None:
    """Return an error message in one line if a table would have too many actions; None if it would not."""
    stages = num_devices * num_chunks
    if stages * num_microbatches <= MAX_TABLE_SIZE:
        return None
    if stages > MAX_TABLE_SIZE:
        most = MAX_TABLE_SIZE // num_chunks
        return f"num_devices is {num_devices}; it must be at most {most:,} with num_chunks={num_chunks}"
    return (
        f"num_microbatches is {num_microbatches}; it must be at most {MAX_TABLE_SIZE // stages} with {stages} stages, "
        f"because a table can have at most {MAX_TABLE_SIZE} actions of each kind"
    )


def unknown_schedule(key: str, name: str, others: Sequence[str] = ()) -> str:
    """Return the error message if `key` names a schedule that does not exist. others: more values that `key` can be."""
    known = (*SCHEDULES, *CONTINUOUS, *others)
    hint, names = nearest(name, known), ", ".join(known)
    return f"{key} is {name!r}; it must be one of {names}, or the path of a CSV table{hint and '.' + hint}"


def make_table(name: str, *, num_devices: int, num_microbatches: int, num_chunks: int) -> Table:
    """Make the table of a named schedule. One without flush is unrolled, and drains after the last microbatch.

    Raises ValueError with one line if the schedule does not exist, or cannot have these sizes.
    """
    p, m, v = num_devices, num_microbatches, num_chunks
    if name in CONTINUOUS:
        if reason := continuous_obstacle(name, [1] * p, num_microbatches=m, num_chunks=v):
            raise ValueError(reason)
        return unrolled_table(name, [1] * p, fewest_microbatches(name, [1] * p), m)
    if name not in SCHEDULES:
        raise ValueError(unknown_schedule("schedule", name))
    if reason := schedule_obstacle(name, num_devices=p, num_microbatches=m, num_chunks=v):
        raise ValueError(reason)
    schedule = SCHEDULES[name]
    orders = [list(schedule.order(p, m, v, device)) for device in range(p)]
    return place_actions(orders, schedule.stages(p, v), m, pairs=schedule.pairs)


def unrolled_table(name: str, replicas: Sequence[int], per_batch: int, num_microbatches: int) -> Table:
    """Make the table of the first microbatches of a schedule without flush, which drains after the last one.

    Raises ValueError with one line if num_microbatches is not a multiple of per_batch, the microbatches of a batch, or
    too large.
    """
    if reason := size_obstacle(sum(replicas), num_microbatches, 1):
        raise ValueError(reason)
    if num_microbatches % per_batch:
        raise ValueError(
            f"num_microbatches is {num_microbatches}; it must be a multiple of {per_batch}, the microbatches of a "
            f"batch, for schedule {name}"
        )
    return unroll(periodic_table(name, replicas, per_batch), num_microbatches // per_batch)


def forward_only(num_devices: int, num_microbatches: int, stages: np.ndarray) -> Table:
    """Make a forward-only table, for evaluation, with the stage placement of another table.

    A microbatch advances by one stage per clock. It enters at the first clock from which it never needs a device at the
    same time as an earlier microbatch.
    """
    busy: set[tuple[int, int]] = set()  # device, clock
    clocks: list[list[tuple[int, Action]]] = [[] for _ in range(num_devices)]
    entry, devices = 0, StageDevices(stages)
    for k in range(num_microbatches):
        places = [(d, c, int(stage)) for (d, c), stage in np.ndenumerate(stages) if devices.device(stage, k) == d]
        while any((d, entry + stage) in busy for d, _, stage in places):
            entry += 1
        for d, c, stage in places:
            busy.add((d, entry + stage))
            clocks[d].append((entry + stage, Action(F, k, c)))
    orders = [[action for _, action in sorted(of_device)] for of_device in clocks]
    return place_actions(orders, stages, num_microbatches)


# ---- stages with replicas: several devices that take turns with the microbatches -----------------
#
# Replica i of r runs the microbatches k with k mod r = i, forward and backward alike (1F1B-RR in Narayanan et al.,
# "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, section 3.2).

WITH_REPLICAS = ("gpipe", "1f1b")  # besides the schedules without flush (periodic.py)


def parse_replicas(text: str) -> tuple[int, ...] | None:
    """Return the numbers of devices that a text such as `2,1,1` lists; None if it does not list any."""
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isascii() and number.isdigit() and len(number) < 10 and int(number) > 0 for number in numbers):
        return None
    return tuple(map(int, numbers))


def noam(num_workers: int, num_replicas: int) -> int:
    """Return the microbatches that 1F1B has in flight on each replica of a stage (NOAM in PipeDream, section 3.2).

    num_workers: the number of workers of this stage and all later ones.
    """
    return -(-num_workers // num_replicas)


def replicated_table(name: str, replicas: Sequence[int], num_microbatches: int) -> Table:
    """Make the table of a schedule, one of WITH_REPLICAS. replicas: number of devices of each stage.

    Each replica runs its microbatches in the order of the schedule.
    """
    orders = []
    for stage, number in enumerate(replicas):
        in_flight = noam(sum(replicas[stage:]), number)
        for replica in range(number):
            own = range(replica, num_microbatches, number)
            order = gpipe(1, len(own), 1, 0) if name == "gpipe" else one_f_one_b(in_flight, len(own), 1, 0)
            orders.append([action._replace(microbatch=own[action.microbatch]) for action in order])
    stages = np.repeat(np.arange(len(replicas)), replicas)[:, None]  # devices of a stage are next to each other
    return place_actions(orders, stages, num_microbatches)
