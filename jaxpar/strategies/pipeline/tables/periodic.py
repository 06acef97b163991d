"""Periodic tables: schedules of pipelines that never drain (PipeDream).

A flush, in which a pipeline drains before all stages are updated together, costs a bubble in every step. PipeDream
(Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019) has no flush: each stage
updates its own weights as soon as it has the gradient of a batch, while other batches are in flight. So every stage
is at another version of the weights, and the variants differ in the version that a batch reads.

A periodic table contains the actions of one step, which repeat in every step with the next batch. A number of a
microbatch is relative to the batch that enters in the step: with m microbatches per batch, 0 to m - 1 are those of this
batch, -m to -1 are those of the batch before it, and so on. A version is relative to the batch of the action: version 0
is the result of all earlier batches, -1 lacks the last one of them, and a U writes version 1.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.strategies.pipeline.tables.table import ACTION, BW, F, Table, U, with_slots


class Reads(NamedTuple):
    """Newest versions, relative to the batch of a microbatch, on which the version depends that its action reads."""

    at_entry: int  # that of the first stage when the microbatch enters it
    at_forward: int  # that of the stage when F runs there
    at_action: int  # that of the stage when the action, F or its backward, runs there


class Continuous(NamedTuple):
    """A schedule without flush."""

    version: Callable[[Reads], int]  # the version that an action reads
    whole_batches: bool  # whether a batch must have as many microbatches as the pipeline has devices, or more
    most_behind: int | None  # largest number of versions that an action reads behind the newest one; None: no limit
    reason: str  # why it differs from training on one device, for `Plan.differs`


CONTINUOUS = {
    # PipeDream, section 3.3: a backward reads the weights of its forward, which are stashed in between.
    "pipedream": Continuous(
        lambda reads: reads.at_forward, False, None, "each stage computes a batch with the newest weights that it has"
    ),
    # PipeDream, section 3.3, "vertical sync": a microbatch reads one version at all stages.
    "pipedream_vertical_sync": Continuous(
        lambda reads: reads.at_entry,
        False,
        None,
        "all stages compute a batch with the weights that the first stage had when the batch entered",
    ),
    # Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021, section 3.1: W_t+1 comes from W_t - 1.
    "pipedream_2bw": Continuous(
        lambda _: -1, True, 1, "all stages compute a batch with weights that lack the last update"
    ),
    # PipeDream, section 3.3: what happens without weight stashing. For comparison only: the gradient is wrong.
    "pipedream_without_stashing": Continuous(
        lambda reads: reads.at_action,
        False,
        0,
        "a backward pass reads newer weights than its forward pass, so gradients are wrong",
    ),
}


def continuous_obstacle(name: str, replicas: Sequence[int], *, num_microbatches: int, num_chunks: int) -> str | None:
    """Return an error message in one line if a schedule without flush cannot have these sizes; None if it can.

    replicas: number of devices of each stage; num_microbatches: those of a batch; num_chunks: those of a device.
    """
    if len(replicas) < 2:
        return f"num_devices is {len(replicas)}; it must be at least 2 for schedule {name}"
    if num_chunks != 1:
        return f"num_chunks is {num_chunks}; it must be 1 for schedule {name}"
    fewest, multiple = fewest_microbatches(name, replicas), math.lcm(*replicas)
    if num_microbatches % multiple:
        least = f" of at least {fewest}" if fewest > multiple else ""
        return (
            f"num_microbatches is {num_microbatches}; it must be a multiple of {multiple}{least}, because the replicas "
            f"of a stage take turns, for schedule {name}"
        )
    if num_microbatches < fewest:
        return f"num_microbatches is {num_microbatches}; it must be at least {fewest} for schedule {name}"
    return None


def fewest_microbatches(name: str, replicas: Sequence[int]) -> int:
    """Return the smallest number of microbatches per batch that a schedule without flush can have."""
    multiple = math.lcm(*replicas)
    if not CONTINUOUS[name].whole_batches:
        return multiple
    fewest = max(sum(replicas), microbatches_in_flight(replicas)[0] - 1)
    return -(-fewest // multiple) * multiple


def periodic_table(name: str, replicas: Sequence[int], num_microbatches: int) -> Table:
    """Make the periodic table of a schedule without flush.

    The order of actions is that of 1F1B in its steady state. If a stage has i microbatches in flight, F of microbatch k
    runs in clock 2 k + s at stage s, and its backward in clock 2 k + s + 2 i - 1. Without replicas, a stage has an
    action in every clock. num_microbatches: those of a batch, a multiple of every number of replicas.
    """
    m = num_microbatches
    first_backward = [stage + 2 * number - 1 for stage, number in enumerate(microbatches_in_flight(replicas))]

    def newest(clock: int, stage: int) -> int:
        # relative to the batch that enters at clock 0
        first_update = first_backward[stage] + 2 * (m - 1)
        return 1 + (clock - 1 - first_update) // (2 * m)

    rows = []

    def add(clock: int, device: int, kind: int, microbatch: int, stage: int, version: int) -> None:
        age, in_step = divmod(clock, 2 * m)  # an action in a later period is on a batch that is older by then
        rows.append((in_step, device, kind, microbatch - m * age, 0, stage, version, 0))

    for stage, number in enumerate(replicas):
        first_device = sum(replicas[:stage])
        for k in range(m):
            forward, backward = 2 * k + stage, 2 * k + first_backward[stage]
            for kind, clock in ((F, forward), (BW, backward)):
                reads = Reads(newest(2 * k, 0), newest(forward, stage), newest(clock, stage))
                add(clock, first_device + k % number, kind, k, stage, CONTINUOUS[name].version(reads))
        for replica in range(number):
            add(backward, first_device + replica, U, m - 1, stage, 1)
    rows.sort(key=lambda row: (row[0], row[1], row[2]))  # the kinds of these tables are numbered as their phases
    of_stages = tuple(replicas) if max(replicas) > 1 else ()
    return Table(sum(replicas), 1, m, np.array(rows, ACTION), period=2 * m, replicas=of_stages)


def microbatches_in_flight(replicas: Sequence[int]) -> list[int]:
    """Return the number of microbatches that each stage works on at a time.

    A stage needs one for each device from this stage on (NOAM in PipeDream, section 3.2), and here one more for each
    later pair of neighbours with different numbers of replicas, whose replicas wait for each other otherwise.
    """
    result: list[int] = []
    for number, after in zip(reversed(replicas), [None, *reversed(replicas)], strict=False):
        result.append((result[-1] if result else 0) + number + (after not in (None, number)))
    return result[::-1]


def most_versions(name: str, replicas: Sequence[int], num_microbatches: int) -> int:
    """Return the largest number of versions of the weights that a device keeps. See `versions_kept`."""
    behind = -(-(microbatches_in_flight(replicas)[0] - 1) // num_microbatches)
    most = CONTINUOUS[name].most_behind
    return 1 + (behind if most is None else min(behind, most))


def num_in_flight(table: Table) -> int:
    """Return the number of batches that a step of a periodic table works on."""
    return 1 - int((table.actions["microbatch"] // table.num_microbatches).min())


def unroll(table: Table, num_batches: int) -> Table:
    """Return the finite table of the first batches: the pipeline fills, and drains after the last one.

    Microbatches and versions are counted from the start.
    """
    m, rows = table.num_microbatches, []
    for step in range(num_batches + num_in_flight(table) - 1):
        for clock, device, kind, microbatch, chunk, stage, version, _ in table.actions.tolist():
            number = m * step + microbatch
            batch = number // m
            if 0 <= batch < num_batches:
                at = max(batch + version, 0)
                rows.append((step * table.period + clock, device, kind, number, chunk, stage, at, 0))
    return with_slots(table._replace(num_microbatches=m * num_batches, actions=np.array(rows, ACTION), period=0))


def versions_kept(table: Table) -> list[int]:
    """Return the number of versions of the weights that each device keeps, by device.

    A version is kept from the clock in which it is written until the last clock in which it is read, or until the next
    version is written.
    """
    num_batches = 3 * num_in_flight(table)  # enough for the steady state
    finite = unroll(table, num_batches).actions
    kept = []
    for device in range(table.num_devices):
        written, last = {0: 0}, {0: 0}  # clock by version
        for clock, _, kind, _, _, _, version, _ in finite[finite["device"] == device].tolist():
            last[version] = clock
            if kind == U:
                written[version] = clock
                last[version - 1] = max(last[version - 1], clock)  # the update itself reads it
        # A U writes after all reads of its clock, so a version that is last read in this clock is free by then.
        alive = [
            sum(1 for other, clock in written.items() if clock <= at and (last[other] > at or other == version))
            for version, at in written.items()
            if version <= num_batches - num_in_flight(table)  # the pipeline does not drain yet
        ]
        kept.append(max(alive))
    return kept
