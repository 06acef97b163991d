"""The memory and the traffic of a dispatched pipeline, from the order in which the host enqueues its actions.

The host allocates the results of a program when it enqueues it, and frees an array after its last use, so what the
devices hold at a time follows from this order, however fast they are.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax

from jaxpar import layout
from jaxpar.core.groups import ReplicaGroup, SentArrays
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.plan import Traffic, ring_traffic
from jaxpar.core.state import nbytes
from jaxpar.exchange.reduce import added_up
from jaxpar.layout import DimSplit, Holders, Layout, LeafLayout, Tree
from jaxpar.strategies.pipeline.executor.dispatch import DispatchedAction
from jaxpar.strategies.pipeline.executor.dispatch_update import DispatchedState, private_layout
from jaxpar.strategies.pipeline.executor.stage_programs import StagePrograms
from jaxpar.strategies.pipeline.executor.state import StagedState
from jaxpar.strategies.pipeline.tables.periodic import num_in_flight
from jaxpar.strategies.pipeline.tables.table import Table


def num_calls(table: Table) -> int:
    """Return how many programs a host calls in a step, if no stage has replicas and no exchange clips.

    It begins the step, adds up the metrics of the last stage, and agrees on the norm. Each column starts sums of
    gradients; after a flush, it also reduces them and updates, which a table without one has among its actions. Sums of
    tied arrays are not counted.
    """
    return len(table.actions) + 3 + table.num_devices * (1 if table.period else 3)


def activation_memory(order: Sequence[DispatchedAction], programs: StagePrograms) -> list[dict[str, int]]:
    """Return, by column, the most bytes at a time of stashes, and of transfers that are sent or wait to be read."""
    held = [Counter[str]() for _ in programs.numbers]
    most = [Counter[str](stashes=0, transfers=0) for _ in programs.numbers]

    def change(column: int, kind: str, size: int) -> None:
        held[column][kind] += size
        most[column][kind] = max(most[column][kind], held[column][kind])

    for action in order:
        column, chunk, phase, _, _, _, to = action
        if action.is_update:
            continue
        number = int(programs.numbers[column, chunk])
        saved = programs.programs[number].cut.saved
        change(column, "stashes", nbytes([values for key, values in saved.items() if key[0] == phase]))
        if to is not None:
            size = nbytes(programs.sent(number, phase))
            change(column, "transfers", size)
            change(to[1], "transfers", size)
            change(column, "transfers", -size)
        # The inputs of an action exist until it has been enqueued.
        change(column, "stashes", -nbytes([values for key, values in saved.items() if key[1] == phase]))
        change(column, "transfers", -nbytes(programs.received(number, phase)))
    return [dict(of_column) for of_column in most]


def dispatch_traffic(
    order: Sequence[DispatchedAction], programs: StagePrograms, staged: StagedState, *, on_cpu: bool
) -> tuple[Traffic, ...]:
    """Return the traffic of the column that sends most: activations and their gradients, gradients of the weights.

    on_cpu: whether XLA widens what the devices of a stage send.
    """
    stages = programs.stages
    copies: Counter[tuple[str, int]] = Counter()  # bytes by dtype and column
    messages: Counter[tuple[str, int]] = Counter()

    def send(column: int, x: Any) -> None:
        copies[x.dtype.name, column] += nbytes([x])
        messages[x.dtype.name, column] += 1

    for column, chunk, phase, _, _, _, to in order:
        if to is not None and to[1] != column:
            for x in jax.tree.leaves(programs.sent(int(programs.numbers[column, chunk]), phase)):
                send(column, x)
    for columns in stages.groups:  # gradients of tied arrays, to all columns of the owner, and back
        for tie in stages.copies(columns[0]):
            owners = next(other for other in stages.groups if tie.source in stages.layer_names(other[0]))
            x = staged.mean_of(tie.source, tie.source_name)
            for senders, receivers in ((columns, owners), (owners, columns)):
                for place in range(len(receivers)):
                    send(senders[place % len(senders)], x)
    sent = [
        Traffic("copy", dtype, STAGE, *max((copies[key], messages[key]) for key in copies if key[0] == dtype))
        for dtype in sorted({dtype for dtype, _ in copies})
    ]
    held = [staged.params.trees[stages.kinds[columns[0]]] for columns in stages.groups]
    shards, within = staged.all_reduce.shards, []  # within: the sums of the gradients of the replicas of a stage
    for columns, tree in zip(stages.groups, held, strict=True):
        added = staged.means[stages.kinds[columns[0]]].local_shapes if shards and shards.stage > 1 else tree
        size, num_arrays = nbytes(added), len(jax.tree.leaves(tree))
        within.append(ring_traffic("all-reduce", 2, STAGE, len(columns), size, "float32", num_vectors=num_arrays))
    largest = max(within, key=lambda one: one.nbytes)
    of_groups = largest_of(traffic_within_groups(order, programs, staged, on_cpu=on_cpu))
    if shards:
        return (*sent, *shard_traffic(order, programs, staged), largest, *of_groups)
    return (*sent, *staged.all_reduce.traffic(max(held, key=nbytes)), largest, *of_groups)


def traffic_within_groups(
    order: Sequence[DispatchedAction], programs: StagePrograms, staged: StagedState, *, on_cpu: bool
) -> list[list[Traffic]]:
    """Return, by column, what a device sends to those with which it computes the column's stages.

    on_cpu: whether XLA widens what is sent.
    """
    sent: list[list[SentArrays]] = [[] for _ in programs.numbers]
    for column, chunk, phase, *_ in (action for action in order if not action.is_update):
        sent[column] += programs.programs[int(programs.numbers[column, chunk])].cut.sent[phase]
    sizes, shards, by_column = staged.group.sizes, staged.all_reduce.shards, []
    for column, rows in enumerate(sent):
        kind = staged.stages.kinds[column]
        is_shard = shards and shards.stage > 1  # those of the replicas are added up
        grads = staged.means[kind].local_shapes if is_shard else staged.params.trees[kind]
        rows = [*rows, *staged.group.sums_of(grads)]
        widened = [row.widened() if on_cpu else row for row in rows]
        by_column.append(added_up(row.traffic(sizes[row.axis]) for row in widened))
    return by_column


def largest_of(by_column: Sequence[Sequence[Traffic]]) -> list[Traffic]:
    """Return the traffic, of each kind, of the column that sends most."""
    most: dict[Any, Traffic] = {}
    for one in [one for of_column in by_column for one in of_column]:
        key = one.kind, one.axis, one.dtype, one.members
        most[key] = max(one, most.get(key, one), key=lambda one: one.nbytes)
    return list(most.values())


def shard_traffic(order: Sequence[DispatchedAction], programs: StagePrograms, staged: StagedState) -> list[Traffic]:
    """Return, of each kind, what the column that sends most sends to the other replicas, if they shard arrays."""
    shards, stages, sent = staged.all_reduce.shards, programs.stages, {}
    assert shards
    for group in stages.groups:  # once in a step
        for column in group:
            sent[column] = staged.all_reduce.traffic(staged.params.trees[stages.kinds[column]])
    for column, chunk, phase, *_ in order:
        number = int(programs.numbers[column, chunk])
        if shards.stage == 3:
            sent[column] += [shards.gather_traffic(arrays) for arrays in programs.reads(number, phase).values()]
        if shards.stage > 1 and phase == programs.num_phases - 1:
            params = programs.programs[number].inputs.params
            sent[column] += [shards.scatter_traffic(arrays) for arrays in params.values()]
    return largest_of([added_up(of_column) for of_column in sent.values()])


def dispatched_layouts(staged: StagedState, axes: Mapping[str, int]) -> DispatchedState:
    """Return the layouts of the state: who holds each canonical leaf, and the private state of every group."""
    held = []
    for columns in staged.stages.groups:
        params = staged.params.trees[staged.stages.kinds[columns[0]]]
        of_group = private_layout({**axes, STAGE: len(columns)}, staged.all_reduce, params).local_shapes
        held.append(_local(staged.group, of_group, columns))
    return DispatchedState(*staged.layouts[:4], Layout(axes, tuple(held)))


def in_flight_layouts(
    order: Sequence[DispatchedAction], table: Table, programs: StagePrograms, staged: StagedState
) -> dict[str, Layout]:
    """Return the layouts of what is in flight between two steps of a periodic table, when all stages are busy.

    The steps are followed from the first one, as in `ContinuousSteps` (dispatch_continuous.py).
    """
    m, stages, axes = table.num_microbatches, programs.stages, staged.packed.axes
    versions = []
    for columns in stages.groups:
        own = [action for action in order if action.column in columns]
        newest = min(action.microbatch // m for action in own if action.is_update)
        num_earlier = newest - min(action.microbatch // m + action.version for action in own if not action.is_update)
        params = layout.on_some(axes, staged.params.trees[stages.kinds[columns[0]]], STAGE, columns).leaves
        versions.append([params] * num_earlier)
    like = programs.programs[0].inputs
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((m, *x.shape), x.dtype), like.microbatch)
    scalars = like.shift, like.weight, jax.eval_shape(jax.random.key_data, like.key)  # the first has the form of `step`
    of_batch = layout.replicated(axes, scalars).leaves, layout.per_replica(axes, batch, DATA).leaves
    batches = [of_batch] * (num_in_flight(table) - 1)
    work: dict[Any, Tree] = {}
    for step in range(2 * num_in_flight(table)):
        for action in order:
            column, number = [action.column], int(programs.numbers[action.column, 0])
            of_stage = action.stage, step * m + action.microbatch
            if of_stage[1] < 0:
                continue
            if action.is_update:
                work.pop(("grads", action.column))
                continue
            if action.phase == programs.num_phases - 1:
                held = staged.params.trees[stages.kinds[action.column]]
                work["grads", action.column] = _local(staged.group, programs.params(number, held), column)
            work.pop((action.phase, *of_stage), None)
            for key, values in programs.programs[number].cut.saved.items():
                if key[0] == action.phase:
                    work["stash", *of_stage, key] = _local(staged.group, values, column)
                elif key[1] == action.phase:
                    del work["stash", *of_stage, key]
            if action.to is not None:
                work[action.phase, action.to[0], of_stage[1]] = _local(
                    staged.group, programs.sent(number, action.phase), [action.to[1]]
                )
    parts = {"versions": versions, "batches": batches, "work": list(work.values())}
    return {name: Layout(axes, leaves) for name, leaves in parts.items()}


def _local(group: ReplicaGroup, shapes: Tree, columns: Sequence[int]) -> Tree:
    """Return the layout of arrays of the form LOCAL. Of their dims [data, stage, ..], the second is 1 on a device."""
    on, sizes = Holders(STAGE, tuple(columns)), group.sizes
    splits = tuple(DimSplit(dim, axis) for dim, axis in enumerate(sizes, 1))
    leaf = partial(LeafLayout, splits=splits, leading=(DATA,), holders=on)
    return jax.tree.map(lambda x: leaf((1, *sizes.values(), *x.shape), x.dtype), shapes)
