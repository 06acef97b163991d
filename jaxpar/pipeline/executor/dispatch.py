"""Runs a table without lock step: every stage has programs of its own, which its devices run as soon as they can.

The host enqueues the programs in the order of the table and waits for none of them. A device runs what is enqueued for
it in this order, each program as soon as its inputs have arrived. So there are no clocks, a device waits only for what
it reads, and no array is as large as the largest stage needs. The numbers are those of engine.py:

    begin      1. and 2.   one program on all devices: splits the batch; dropout key, divisor of the loss
    F, B, W    4. to 6.    one program for each column (columns.py), chunk and phase; it donates what it accumulates
    transfer   7.          `jax.device_put` of y or dX to the column that reads it
    finish     8. to 10.   dispatch_update.py
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxpar import step as steps
from jaxpar.models.model import Batch, Params
from jaxpar.pipeline.executor.columns import DIVIDED, LOCAL, ON_ALL, MeshColumns, with_leading, without_leading
from jaxpar.pipeline.executor.enqueue import DEVICES, Host, Program, program_on
from jaxpar.pipeline.executor.programs import StageInputs, StagePrograms
from jaxpar.pipeline.executor.stages import Stages
from jaxpar.pipeline.tables.table import ACTION_KINDS, StageDevices, Table, receiver
from jaxpar.tasks import Sums


class StepInputs(NamedTuple):
    """The inputs that all actions of a step share.

    Attributes:
      key: data of the dropout key; None when evaluating.
      weight: divisor of the loss: the weight of the global batch divided by the number of replicas.
      microbatches: [m, B, ..] the microbatches.
    """

    key: Any
    weight: Any
    microbatches: Batch


SHARED_SPECS: Any = StepInputs(ON_ALL, ON_ALL, DIVIDED)  # type: ignore[arg-type]


class DispatchedAction(NamedTuple):
    """An action of a table as the host enqueues it.

    Attributes:
      column: the column that runs it.
      chunk: its chunk.
      phase: 0: F; 1: B or BW; 2: W.
      microbatch: its microbatch.
      stage: its stage.
      to: the stage and the column that receive its result; None if no other stage does.
    """

    column: int
    chunk: int
    phase: int
    microbatch: int
    stage: int
    to: tuple[int, int] | None


class StepTotals(NamedTuple):
    """The results of the actions of a step, in the form LOCAL.

    Attributes:
      grads: gradient of the parameters, summed over microbatches, by [column][chunk]; empty without a backward pass.
      sums: metric sums of each microbatch, by column of the last stage.
    """

    grads: list[list[Params]]
    sums: dict[int, list[Sums]]


def dispatch_order(table: Table) -> list[DispatchedAction]:
    """Return the actions of a table in the order of its clocks. An action comes after those whose results it reads."""
    devices, order = StageDevices(table.stages), []
    for _, column, kind, microbatch, chunk, stage, _, _ in table.actions.tolist():
        to = devices.receiver(kind, stage, microbatch) if ACTION_KINDS[kind].sends_to else None
        destination = None if to is None else (receiver(kind, stage), to)
        order.append(DispatchedAction(column, chunk, ACTION_KINDS[kind].phase, microbatch, stage, destination))
    return order


class StageDispatcher:
    """Enqueues the actions of a table on the columns of a mesh."""

    def __init__(self, stages: Stages, table: Table, columns: MeshColumns, *, num_phases: int, remat: str):
        """num_phases and remat: as in `StagePrograms`."""
        self._stages, self._columns, self._num_phases, self._remat = stages, columns, num_phases, remat
        self._order, self._numbers = dispatch_order(table), stages.program_numbers
        self._program = functools.cache(self._make_program)
        self._zeros = functools.cache(self._make_zeros)
        self._on_columns: dict[tuple[Host, int, int], Any] = {}

    def run(self, params: Sequence[Params], inputs: Sequence[StepInputs], host: Host = DEVICES) -> StepTotals:
        """Enqueue all actions.

        Args:
          params: parameters by column, named as on the example of its kind.
          inputs: inputs of the step by column.
          host: enqueues the programs.
        """
        parts = [self._parts(column, held) for column, held in enumerate(params)]
        totals = StepTotals([host.call(self._zeros(column), chunks) for column, chunks in enumerate(parts)], {})
        arrived: dict[tuple[int, int, int], Any] = {}  # by (phase, stage, microbatch)
        stashes: defaultdict[tuple[int, int], dict[tuple[int, int], Any]] = defaultdict(dict)  # by (stage, microbatch)
        for column, chunk, phase, microbatch, stage, to in self._order:
            stash, accumulated = stashes[stage, microbatch], None
            saved = {key: values for key, values in stash.items() if key[0] < phase <= key[1]}
            for key in [key for key in saved if key[1] == phase]:
                del stash[key]  # so that its memory is free after its last use
            has_grads = 0 < phase == self._num_phases - 1
            if has_grads:
                accumulated = totals.grads[column][chunk]
            result, sums, grads, made, _ = host.call(
                self._program(column, chunk, phase),
                parts[column][chunk],
                inputs[column],
                self._number(host, column, microbatch),
                self._number(host, column, int(self._stages.shifts[column, chunk])),
                arrived.pop((phase, stage, microbatch), None),
                saved,
                accumulated,
            )
            stash.update(made)
            if has_grads:
                totals.grads[column][chunk] = grads
            if sums is not None:
                totals.sums.setdefault(column, []).append(sums)
            if to is not None:
                sharding = NamedSharding(self._columns.of_column[to[1]], LOCAL)
                arrived[phase, to[0], microbatch] = host.send(result, sharding)
        return totals

    def _parts(self, column: int, held: Params) -> list[Params]:
        """Return the parameters of each chunk of a column."""
        example = self._stages.examples[self._stages.kinds[column]]
        return [self._stages.part(held, example, chunk) for chunk in range(self._numbers.shape[1])]

    def _number(self, host: Host, column: int, number: int) -> Any:
        """Return an int32 on a column, which it keeps: to send one takes longer than to enqueue a program."""
        key = host, column, number
        if key not in self._on_columns:
            sharding = NamedSharding(self._columns.of_column[column], ON_ALL)
            self._on_columns[key] = host.send(np.asarray(number, np.int32), sharding)
        return self._on_columns[key]

    def _make_zeros(self, column: int) -> Program:
        def on_device(parts: list[Params]) -> list[Params]:
            return with_leading(jax.tree.map(jnp.zeros_like, parts if self._num_phases > 1 else []))

        return program_on(self._columns.of_column[column], on_device, (ON_ALL,), LOCAL, ("parameters",))

    def _make_program(self, column: int, chunk: int, phase: int) -> Program:
        """Return the program of a phase.

        Its results are the transfer to send, metric sums, gradients, values to stash, and a zero, which is ready when
        the program has run.
        """
        number, is_first = int(self._numbers[column, chunk]), self._stages.placement[column, chunk] == 0

        def on_device(
            part: Params, inputs: StepInputs, index: jax.Array, shift: jax.Array, arrived: Any, saved: Any, grads: Any
        ) -> Any:
            arrived, saved, grads = without_leading((arrived, saved, grads))
            microbatch = {
                name: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
                for name, x in inputs.microbatches.items()
            }
            key = None if inputs.key is None else jax.random.wrap_key_data(inputs.key)
            x, dy = (arrived if phase == reading else None for reading in (0, 1))
            of_stage = StageInputs(part, microbatch, key, shift, inputs.weight, x, dy)
            outputs, made = self.programs(*steps.abstract((microbatch, key))).run(number, phase, of_stage, saved)
            if outputs.dparams is not None:
                grads = jax.tree.map(jnp.add, grads, outputs.dparams)
            result = outputs.y if phase == 0 else None if is_first else outputs.dx
            return with_leading((result, outputs.sums, grads, made, jnp.zeros(())))

        specs = (ON_ALL, SHARED_SPECS, ON_ALL, ON_ALL, LOCAL, LOCAL, LOCAL)
        kinds = ("parameters", "inputs", "inputs", "inputs", "transfers", "stashes", "gradients")
        program = program_on(self._columns.of_column[column], on_device, specs, LOCAL, kinds, donate_argnums=6)
        return program._replace(is_action=True)

    def programs(self, microbatch: Batch, key: Any) -> StagePrograms:
        """Return the stage programs for a microbatch and a key of these shapes."""
        return StagePrograms(self._stages, microbatch, key, num_phases=self._num_phases, remat=self._remat)
