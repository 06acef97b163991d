"""The memory and the traffic of a dispatched pipeline, from the order in which the host enqueues its actions.

The host allocates the results of a program when it enqueues it, and frees an array after its last use, so what the
devices hold at a time follows from this order, however fast they are.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxpar.exchange.exchange import AllReduce
from jaxpar.exchange.reduce import ring_traffic
from jaxpar.layout import Holders, Layout, LeafLayout, Tree
from jaxpar.mesh import DATA, STAGE
from jaxpar.pipeline.executor.dispatch import DispatchedAction
from jaxpar.pipeline.executor.dispatch_update import DispatchedState, private_layout
from jaxpar.pipeline.executor.programs import StagePrograms
from jaxpar.pipeline.executor.stages import Stages
from jaxpar.pipeline.executor.state import StagedState
from jaxpar.plan import Traffic
from jaxpar.state import nbytes


def activation_memory(order: Sequence[DispatchedAction], programs: StagePrograms) -> list[dict[str, int]]:
    """Return, by column, the most bytes at a time of stashes, and of transfers that are sent or wait to be read."""
    held = [Counter[str]() for _ in programs.numbers]
    most = [Counter[str](stashes=0, transfers=0) for _ in programs.numbers]

    def change(column: int, kind: str, size: int) -> None:
        held[column][kind] += size
        most[column][kind] = max(most[column][kind], held[column][kind])

    for column, chunk, phase, _, _, to in order:
        number = int(programs.numbers[column, chunk])
        for (made_by, last), values in programs.programs[number].cut.saved.items():
            change(column, "stashes", nbytes(values) * ((made_by == phase) - (last == phase)))
        if to is not None:
            size = nbytes(sent_by(programs, number, phase))
            change(column, "transfers", size)
            change(to[1], "transfers", size)
            change(column, "transfers", -size)
        change(column, "transfers", -nbytes(read_by(programs, number, phase)))
    return [dict(of_column) for of_column in most]


def sent_by(programs: StagePrograms, number: int, phase: int) -> Tree:
    """Return the shapes of what a phase of a program sends: its y, or the gradient of the y that it received."""
    return programs.programs[number].y if phase == 0 else read_by(programs, number, 0)


def read_by(programs: StagePrograms, number: int, phase: int) -> Tree:
    """Return the shapes of what a phase of a program receives."""
    sender = programs.sender(number)
    if phase == 0:
        return None if sender is None else programs.programs[sender].y
    return programs.programs[number].y if phase == 1 else None


def dispatch_traffic(
    order: Sequence[DispatchedAction], programs: StagePrograms, all_reduce: AllReduce
) -> tuple[Traffic, ...]:
    """Return the traffic of the column that sends most: activations and their gradients, gradients of the weights."""
    stages = programs.stages
    copies: Counter[tuple[str, int]] = Counter()  # bytes by dtype and column
    messages: Counter[tuple[str, int]] = Counter()

    def send(column: int, x: Any) -> None:
        copies[x.dtype.name, column] += nbytes([x])
        messages[x.dtype.name, column] += 1

    for column, chunk, phase, _, _, to in order:
        if to is not None and to[1] != column:
            for x in jax.tree.leaves(sent_by(programs, int(programs.numbers[column, chunk]), phase)):
                send(column, x)
    for column in range(len(programs.numbers)):  # gradients of tied arrays, to the owner and back
        for tie in stages.copies(column):
            for x in jax.tree.leaves(stages.model.shapes[tie.source][tie.source_name]):
                send(column, x)
                send(_owner(stages, tie.source), x)
    sent = [
        Traffic("copy", dtype, STAGE, *max((copies[key], messages[key]) for key in copies if key[0] == dtype))
        for dtype in sorted({dtype for dtype, _ in copies})
    ]
    held = max((stages.select(stages.model.shapes, column) for column in stages.examples), key=nbytes)
    most = max((len(group) for group in stages.groups), default=1)
    # The sum of the gradients of the replicas of a stage.
    num_arrays = len(jax.tree.leaves(held))
    within = ring_traffic("all-reduce", 2, STAGE, most, nbytes(held), "float32", num_vectors=num_arrays)
    return (*sent, *all_reduce.traffic(held), within)


def dispatched_layouts(staged: StagedState, axes: Mapping[str, int]) -> DispatchedState:
    """Return the layouts of the state: who holds each canonical leaf, and the private state of every group."""
    stages, held = staged.stages, []
    for columns in stages.groups or [[column] for column in range(len(stages.kinds))]:
        params = staged.params.packing.tree(stages.kinds[columns[0]])
        of_group = private_layout({**axes, STAGE: len(columns)}, staged.all_reduce, params).local_shapes
        on = Holders(STAGE, tuple(columns))
        # Of the leading dims [data, stage], the second one is 1 on each device.
        held.append(
            jax.tree.map(lambda x, on=on: LeafLayout((1, *x.shape), x.dtype, leading=(DATA,), holders=on), of_group)
        )
    return DispatchedState(*staged.layouts[:4], Layout(axes, tuple(held)))


def _owner(stages: Stages, layer: str) -> int:
    return next(column for column in range(len(stages.kinds)) if layer in stages.layer_names(column))
