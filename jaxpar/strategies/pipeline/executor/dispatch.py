"""Runs a table without lock step: every stage has programs of its own, which its devices run as soon as they can.

The host enqueues the programs in the order of the table and waits for none of them. A device runs what is enqueued for
it in this order, each program as soon as its inputs have arrived. So there are no clocks, a device waits only for what
it reads, and no array is as large as the largest stage needs. The numbers are those of engine.py:

    begin      1. and 2.   one program on all devices: splits the batch; dropout key, divisor of the loss
    narrow                 one program for each column: the parameters that all actions read in a narrower dtype
    F, B, W    4. to 6.    one program for each column (enqueue.py), chunk and phase; it donates what it accumulates
    transfer   7.          `jax.device_put` of y or dX to the column that reads it
    finish     8. to 10.   dispatch_update.py; in a pipeline that never drains, dispatch_continuous.py
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.core import mesh as meshes
from jaxpar.core import step as steps
from jaxpar.core.loss_scale import LossScale
from jaxpar.core.plan import NARROW_PARAMETERS
from jaxpar.exchange.exchange import ShardSteps
from jaxpar.models.model import Batch, Params
from jaxpar.strategies.pipeline.executor.enqueue import (
    DEVICES,
    LOCAL,
    ON_ALL,
    Compiler,
    Host,
    MeshColumns,
    Program,
    of_microbatches,
    program_on,
    restricted,
    sharding_on,
    with_leading,
    without_leading,
)
from jaxpar.strategies.pipeline.executor.packing import at_index
from jaxpar.strategies.pipeline.executor.stage_programs import StageInputs, StagePrograms
from jaxpar.strategies.pipeline.executor.state import StagedState
from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS, StageDevices, Table, U, receiver
from jaxpar.strategies.placement import OVERLAP, product_options
from jaxpar.tasks import Sums

Narrow = Mapping[str, Mapping[int, Any]]  # arrays of some layers, by their number among those of the layer


class StepInputs(NamedTuple):
    """The inputs that all actions of a step share."""

    key: Any  # data of the dropout key; None when evaluating
    weight: Any  # divisor of the loss: the weight of the global batch divided by the number of replicas
    microbatches: Batch  # [m, B, ..] the microbatches
    scaling: LossScale | None = None  # scale of the loss; None: it is not scaled


def input_specs(of_batch: Mapping[str, PartitionSpec]) -> StepInputs:
    """Return the partition specs of the inputs of a step. of_batch: those of a batch."""
    return StepInputs(ON_ALL, ON_ALL, of_microbatches(of_batch), ON_ALL)  # type: ignore[arg-type]


class DispatchedAction(NamedTuple):
    """An action of a table as the host enqueues it."""

    column: int  # the column that runs it
    chunk: int  # its chunk
    phase: int  # 0: F; 1: B or BW; 2: W; 3: U
    microbatch: int  # its microbatch
    stage: int  # its stage
    version: int  # the version of the weights that it reads or writes, as in the table
    to: tuple[int, int] | None  # the stage and the column that receive its result; None if no other stage does

    @property
    def is_update(self) -> bool:
        """Whether it is a U."""
        return self.phase == ACTION_KINDS[U].phase


class Work(NamedTuple):
    """The results of actions that later ones read, in the form LOCAL."""

    arrived: dict[tuple[int, int, int], Any]  # what other columns sent, by the phase, stage and microbatch that read it
    # saved values by stage and microbatch, each by the phase that saved it and the last one that reads it
    stashes: dict[tuple[int, int], dict[tuple[int, int], Any]]
    grads: dict[int, list[Params]]  # gradient of the parameters, summed over microbatches, by column, for each chunk
    sums: dict[int, list[Sums]]  # metric sums of each microbatch, by column of the last stage


def dispatch_order(table: Table) -> list[DispatchedAction]:
    """Return the actions of a table in the order of its clocks. An action comes after those whose results it reads."""
    devices, order = StageDevices(table.stages), []
    for _, column, kind, microbatch, chunk, stage, version, _ in table.actions.tolist():
        to = devices.receiver(kind, stage, microbatch) if ACTION_KINDS[kind].sends_to else None
        destination = None if to is None else (receiver(kind, stage), to)
        order.append(DispatchedAction(column, chunk, ACTION_KINDS[kind].phase, microbatch, stage, version, destination))
    return order


def narrow_shapes(programs: StagePrograms, shards: ShardSteps | None) -> list[list[Narrow]]:
    """Return, by column and chunk, the shapes of the parameters that a step narrows before its actions."""
    if shards and shards.stage == 3:  # actions gather narrow ones
        return [[{} for _ in of_column] for of_column in programs.numbers]
    return [[programs.narrowed(number) for number in of_column] for of_column in programs.numbers.tolist()]


def gathered(part: Params, reads: Narrow, shards: ShardSteps) -> Narrow:
    """Return arrays of a chunk, layer by layer from the shards of all replicas, as `reads` has them. For `shard_map`.

    reads: the arrays that an action reads, in the dtypes in which they are sent (`StagePrograms.reads`).
    """
    leaves = {layer: jax.tree.leaves(part[layer]) for layer in reads}
    return {layer: shards.gather(of, {i: leaves[layer][i] for i in of}) for layer, of in reads.items()}


def narrowed(part: Params, shapes: Narrow) -> Narrow:
    """Return copies of arrays of a chunk in the dtypes of these shapes."""
    leaves = {layer: jax.tree.leaves(part[layer]) for layer in shapes}
    return {layer: {i: leaves[layer][i].astype(x.dtype) for i, x in of.items()} for layer, of in shapes.items()}


def with_narrow(part: Params, narrow: Narrow) -> Params:
    """Return a chunk with these copies of its arrays, in its own dtypes: XLA drops casts there and back."""
    part = dict(part)
    for layer, copies in narrow.items():
        leaves, structure = jax.tree.flatten(part[layer])
        for i, x in copies.items():
            leaves[i] = x.astype(leaves[i].dtype)
        part[layer] = jax.tree.unflatten(structure, leaves)
    return part


class StageDispatcher:
    """Enqueues the actions of a table on the columns of a mesh."""

    def __init__(
        self,
        staged: StagedState,
        table: Table,
        columns: MeshColumns,
        of_batch: Mapping[str, PartitionSpec],
        *,
        num_phases: int,
        remat: str,
        programs: StagePrograms | None = None,
    ):
        """of_batch: partition specs of a batch. num_phases and remat: as in `StagePrograms`.

        programs: the same programs; `run` then narrows parameters once, instead of each action.
        """
        self.input_specs, self._has_collectives = input_specs(of_batch), bool(staged.group.axes)
        stages, self._num_phases = staged.stages, num_phases
        # how StagePrograms traces
        self._how: dict[str, Any] = {"num_phases": num_phases, "remat": remat, "has_flush": not table.period}
        self._product_options = product_options(stages.model)
        self._stages, self._columns, self._layouts = stages, columns, staged.params.of_kinds
        # how actions shard what they add up, and gather what they read
        shards = staged.all_reduce.shards
        self._shards = shards if shards and shards.stage > 1 else None
        self._has_collectives |= bool(self._shards)
        self.order, self.num_microbatches = dispatch_order(table), table.num_microbatches
        self._numbers = stages.program_numbers
        self._program = functools.cache(self._make_program)
        self._zeros = functools.cache(self._make_zeros)
        self._narrow = functools.cache(self._make_narrow)
        # by column and chunk, the shapes of the copies of parameters
        self._narrow_shapes: list[list[Narrow]] = [[{} for _ in of_column] for of_column in self._numbers]
        if programs:
            self._narrow_shapes = narrow_shapes(programs, shards)
        self._on_columns: dict[tuple[bool, int, int], Any] = {}

    def run(self, params: Sequence[Params], inputs: Sequence[StepInputs], host: Host = DEVICES) -> Work:
        """Enqueue all actions of a table with a flush, and return their gradients and metric sums.

        params: by group, named as on the example of its kind. inputs: by column.
        """
        parts = {column: of for group, held in enumerate(params) for column, of in self.parts(group, held).items()}
        work, narrow = Work({}, {}, {}, {}), dict(enumerate(self._narrow_shapes))
        for column, of_column in parts.items():
            if any(narrow[column]):
                narrow[column] = host.call(self._narrow(column), of_column)
        for action in self.order:
            column = action.column
            self.act(action, parts[column], inputs[column], work, host, narrow[column])
        return work

    def act(
        self,
        action: DispatchedAction,
        parts: Sequence[Params],
        inputs: StepInputs,
        work: Work,
        host: Host,
        narrow: Sequence[Narrow] = (),
    ) -> None:
        """Enqueue an action that is not a U, which takes its inputs from `work` and adds its results to it.

        action: its microbatch is counted from any batch. parts: `parts` of its column. inputs: of its batch. narrow:
        copies of arrays of `parts` that it reads instead, by chunk.
        """
        column, chunk, phase, microbatch, stage, _, to = action
        stash, accumulated = work.stashes.pop((stage, microbatch), {}), None
        saved = {key: values for key, values in stash.items() if key[0] < phase <= key[1]}
        has_grads = 0 < phase == self._num_phases - 1
        if has_grads:
            if column not in work.grads:
                work.grads[column] = host.call(self._zeros(column), parts)
            accumulated = work.grads[column][chunk]
        # On virtual CPU devices, programs with collectives must not run at the same time (mesh.one_at_a_time).
        settled = meshes.settled if self._has_collectives else lambda x: x
        arguments = settled(
            (
                parts[chunk],
                narrow[chunk] if narrow else {},
                inputs,
                self._on_column(host, column, microbatch % self.num_microbatches),
                self._on_column(host, column, int(self._stages.shifts[column, chunk])),
                work.arrived.pop((phase, stage, microbatch), None),
                saved,
                accumulated,
            )
        )
        result, sums, grads, made, _ = settled(host.call(self._program(column, chunk, phase), *arguments))
        kept = {key: values for key, values in stash.items() if key[1] > phase} | made
        if kept:
            work.stashes[stage, microbatch] = kept
        if has_grads:
            work.grads[column][chunk] = grads
        if sums is not None:
            work.sums.setdefault(column, []).append(sums)
        if to is not None:
            sharding = sharding_on(self._columns.of_column[to[1]], LOCAL)
            work.arrived[phase, to[0], microbatch] = host.send(result, sharding)

    def parts(self, group: int, params: Params) -> dict[int, list[Params]]:
        """Return the parameters of each chunk of the columns of a group, by column."""
        parts = {}
        for column in self._columns.groups[group]:
            held, chunks = restricted(params, self._columns.of_column[column]), range(self._numbers.shape[1])
            example = self._stages.examples[self._stages.kinds[column]]
            parts[column] = [self._stages.part(held, example, chunk) for chunk in chunks]
        return parts

    def _on_column(self, host: Host, column: int, number: int) -> Any:
        """Return an int32 on a column, which it keeps: to send one takes longer than to enqueue a program."""
        is_shape = isinstance(host, Compiler)
        key = is_shape, column, number
        if key not in self._on_columns:
            sharding = NamedSharding(self._columns.of_column[column], ON_ALL)
            self._on_columns[key] = (host if is_shape else DEVICES).send(np.asarray(number, np.int32), sharding)
        return self._on_columns[key]

    def _make_zeros(self, column: int) -> Program:
        def on_device(parts: list[Params]) -> list[Params]:
            if self._shards and self._shards.stage == 2:
                parts = [self._shards.local(part) for part in parts]
            return with_leading(jax.tree.map(jnp.zeros_like, parts))

        specs = [self._specs(column, chunk) for chunk in range(self._numbers.shape[1])]
        return program_on(self._columns.of_column[column], on_device, (specs,), LOCAL, ("parameters",))

    def _make_narrow(self, column: int) -> Program:
        def on_device(parts: list[Params]) -> list[Narrow]:
            return [narrowed(part, shapes) for part, shapes in zip(parts, self._narrow_shapes[column], strict=True)]

        chunks = range(self._numbers.shape[1])
        specs, results = ([of(column, chunk) for chunk in chunks] for of in (self._specs, self._narrow_specs))
        return program_on(self._columns.of_column[column], on_device, (specs,), results, ("parameters",))

    def _narrow_specs(self, column: int, chunk: int) -> Narrow:
        """Return the partition specs of the copies of parameters of a chunk."""
        specs, shapes = self._specs(column, chunk), self._narrow_shapes[column][chunk]
        leaves = {layer: jax.tree.leaves(specs[layer]) for layer in shapes}
        return {layer: {i: leaves[layer][i] for i in of} for layer, of in shapes.items()}

    def _specs(self, column: int, chunk: int) -> Any:
        """Return the partition specs of the parameters of a chunk."""
        kind = self._stages.kinds[column]
        return self._stages.part(self._layouts[kind].specs, self._stages.examples[kind], chunk)

    def _make_program(self, column: int, chunk: int, phase: int) -> Program:
        shards, number, is_first = (
            self._shards,
            int(self._numbers[column, chunk]),
            self._stages.placement[column, chunk] == 0,
        )

        def on_device(
            part: Params,
            narrow: Narrow,
            inputs: StepInputs,
            index: jax.Array,
            shift: jax.Array,
            arrived: Any,
            saved: Any,
            grads: Any,
        ) -> Any:
            arrived, saved, grads = without_leading((arrived, saved, grads))
            part = with_narrow(part, narrow)
            microbatch = {name: at_index(x, index) for name, x in inputs.microbatches.items()}
            key = None if inputs.key is None else jax.random.wrap_key_data(inputs.key)
            x, dy = (arrived if phase == reading else None for reading in (0, 1))
            scale = None if inputs.scaling is None else inputs.scaling.scale
            of_stage = StageInputs(part, microbatch, key, shift, inputs.weight, x, dy, scale)
            programs = StagePrograms(self._stages, *steps.abstract((microbatch, key, scale)), **self._how)
            if shards and shards.stage == 3:
                whole = gathered(part, programs.reads(number, phase), shards)
                of_stage = of_stage._replace(params=with_narrow(part, whole))
            outputs, made = programs.run(number, phase, of_stage, saved)
            if (dparams := outputs.dparams) is not None:
                if shards:  # layer by layer
                    dparams = {layer: shards.scatter(arrays) for layer, arrays in dparams.items()}
                grads = jax.tree.map(jnp.add, grads, dparams)
            result = outputs.y if phase == 0 else None if is_first else outputs.dx
            # The last one is ready when the program has run, and no later program donates it (timeline.py).
            return with_leading((result, outputs.sums, grads, made, jnp.zeros(())))

        weights = self._specs(column, chunk), self._narrow_specs(column, chunk)
        specs = (*weights, self.input_specs, ON_ALL, ON_ALL, LOCAL, LOCAL, LOCAL)
        kinds = ("parameters", NARROW_PARAMETERS, "inputs", "inputs", "inputs", "transfers", "stashes", "gradients")
        of_compiler = self._product_options | (OVERLAP if self._has_collectives else {})
        options = {"donate_argnums": 7, "compiler_options": of_compiler}
        program = program_on(self._columns.of_column[column], on_device, specs, LOCAL, kinds, **options)
        return program._replace(is_action=True)
