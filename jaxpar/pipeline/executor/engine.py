"""The engine: one `shard_map` that runs any table, whatever the stages.

All devices step through the table's clocks in a scan. In a clock a device takes the branch of its action of each
rank (F, then B, then W) or an empty one, so that an idle device computes nothing. At the end of the clock the wires
carry outputs to their receivers, into an inbox; what an action keeps for a later one lies in a stash.

    table  -- lower -->        which action, which slots: by device and clock  =  arguments of the program
    layers -- trace, cut -->   what F, B and W compute: by kind and chunk      =  branches of the program
    trees  -- Packing -->      one form of arrays for stages that differ       =  its state
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.mesh import STAGE
from jaxpar.models.model import Batch
from jaxpar.pipeline.executor.lowering import INBOXES, NONE, Actions, Arrivals, Shape
from jaxpar.pipeline.executor.packing import Packed, Packing
from jaxpar.pipeline.executor.programs import StageInputs, StageProgram, trace
from jaxpar.pipeline.executor.stages import Stages
from jaxpar.pipeline.executor.timeline import Timeline
from jaxpar.tasks import Sums


class Carry(NamedTuple):
    """What a device carries from clock to clock.

    Attributes:
      inboxes: by inbox, its slots.
      stashes: by stash, its slots.
      activation: what F made last, in the form of the wires.
      gradient: what B made last, likewise.
      grads: added up so far, in the form of the parameters.
      sums: likewise, on the last stage.
    """

    inboxes: dict[str, Packed]
    stashes: dict[tuple[int, int], Packed]
    activation: Packed
    gradient: Packed
    grads: Packed
    sums: Sums


class PipelineEngine:
    """The programs of a pipeline's devices, for one shape of table and of microbatch, and their run."""

    def __init__(
        self,
        stages: Stages,
        packing: Packing,
        shape: Shape,
        remat: str,
        rows: Batch,
        key: jax.Array | None,
        timeline: Timeline | None = None,
    ):
        """Traces the programs.

        Args:
          stages: which layers are where.
          packing: of the parameters that devices hold, by kind.
          shape: of the table.
          remat: what B finds saved: full, none, dots.
          rows: a microbatch, abstract.
          key: of dropout, abstract; None: without.
          timeline: takes the time of every action.
        """
        self._timeline = timeline
        self.stages, self.packing, self.shape = stages, packing, shape
        self._num_chunks = stages.placement.shape[1]
        self._number = np.array(stages.kinds)[:, None] * self._num_chunks + np.arange(self._num_chunks)
        numbers = dict(zip(stages.placement.flat, self._number.flat, strict=True))  # of programs, by stage
        programs: dict[int, StageProgram] = {}
        scalar = partial(jax.ShapeDtypeStruct, ())
        x = None
        for stage in range(stages.num_stages):
            if numbers[stage] not in programs:
                kind, chunk = divmod(int(numbers[stage]), self._num_chunks)
                params = stages.part(packing.tree(kind), stages.examples[kind], chunk)
                given = StageInputs(params, rows, key, scalar(jnp.int32), scalar(jnp.float32), x)
                programs[numbers[stage]] = trace(
                    stages, stages.examples[kind], chunk, given, num_ranks=shape.num_ranks, remat=remat
                )
            x = programs[numbers[stage]].output
        self.programs = [programs[number] for number in range(len(programs))]
        self._sender = [numbers.get(program.stage - 1) for program in self.programs]
        self.wire = Packing([[program.output] if program.output else [] for program in self.programs])
        stashes = [buffer for buffer, _ in shape.num_slots if isinstance(buffer, tuple)]
        self.stashes = {stash: Packing([p.cut.saved.get(stash, []) for p in self.programs]) for stash in stashes}

    def run(
        self,
        plan: tuple[tuple[Actions, ...], tuple[Arrivals, ...]],
        params: Packed,
        rows: Batch,
        key: jax.Array | None,
        weight: jax.Array,
    ) -> tuple[Packed, Sums]:
        """This device's part of all clocks: the gradients of its parameters, and sums where it has the last stage.

        Args:
          plan: this device's part of Lowered.actions and Lowered.arrivals: arrays over clocks.
          params: what the device holds, packed.
          rows: [m, B, ..] all microbatches of this replica.
          key: of the step's dropout.
          weight: of the global batch.
        """
        device = jax.lax.axis_index(STAGE)
        numbers, shifts = jnp.asarray(self._number)[device], jnp.asarray(self.stages.shifts)[device]

        def given(number: int, action: Actions) -> list[Any]:
            """The leaves of `StageInputs`, but for x and dy."""
            kind, chunk = divmod(number, self._num_chunks)
            held = self.packing.unpack(kind, params)
            part = self.stages.part(held, self.stages.examples[kind], chunk)
            own = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, action.microbatch, 0, keepdims=False), rows)
            return jax.tree.leaves(StageInputs(part, own, key, shifts[chunk], weight))

        def clock(carry: Carry, now: tuple[tuple[Actions, ...], tuple[Arrivals, ...]]) -> tuple[Carry, None]:
            for rank, action in enumerate(now[0]):
                branch = jnp.where(action.chunk == NONE, 0, 1 + numbers[action.chunk])
                acts = [partial(self._act, rank, number, given) for number in range(len(self.programs))]
                with jax.named_scope(f"rank_{rank}"):
                    touched = jax.lax.switch(branch, [partial(self._idle, rank), *acts], action, carry)
                carry = carry._replace(**touched | {"stashes": carry.stashes | touched["stashes"]})
            return self._deliver(carry, *now), None

        return jax.lax.scan(clock, self._start(), plan)[0][-2:]

    def _start(self) -> Carry:
        slots = dict(self.shape.num_slots)
        return Carry(
            {inbox: self.wire.zeros(slots[inbox]) for inbox in INBOXES if inbox in slots},
            {stash: packing.zeros(slots[stash]) for stash, packing in self.stashes.items()},
            self.wire.zeros(),
            self.wire.zeros(),
            self.packing.zeros() if self.shape.num_ranks > 1 else (),
            self.stages.task.zeros(),
        )

    def _touched(self, rank: int, carry: Carry) -> dict[str, Any]:
        """What an action of this rank may change: the results of its branches."""
        fields = [["activation", "sums"], ["gradient"], []][rank]
        if rank == self.shape.num_ranks - 1 and rank > 0:
            fields = [*fields, "grads"]
        stashes = {stash: slots for stash, slots in carry.stashes.items() if stash[0] == rank}
        return {"stashes": stashes} | {field: getattr(carry, field) for field in fields}

    def _idle(self, rank: int, action: Actions, carry: Carry) -> dict[str, Any]:
        return self._touched(rank, carry)

    def _act(
        self, rank: int, number: int, given: Callable[..., list[Any]], action: Actions, carry: Carry
    ) -> dict[str, Any]:
        """One action: what it touched."""
        if self._timeline is not None:
            action = self._timeline.begin(rank, action)
        program, sender = self.programs[number], self._sender[number]
        inputs = given(number, action)
        for inbox, packing_kind in ((INBOXES[0], sender), (INBOXES[1], number if program.output else None)):
            if packing_kind is not None:  # what another rank is given, this one does not look at
                is_own = rank < 2 and inbox == INBOXES[rank]
                inputs += self.wire.read(packing_kind, carry.inboxes[inbox], action.inbox) if is_own else [None]
        saved = {
            stash: self.stashes[stash].read(number, carry.stashes[stash], slot)
            for stash, slot in action.stash.items()
            if stash[0] < rank
        }
        outputs, made = program.cut.run[rank](inputs, saved)
        touched = self._touched(rank, carry)
        for stash, values in made.items():
            touched["stashes"][stash] = self.stashes[stash].write(
                number, touched["stashes"][stash], action.stash[stash], values
            )
        if rank == 0 and program.output:
            touched["activation"] = self.wire.pack(number, outputs)
        elif rank == 0:
            touched["sums"] = jax.tree.map(
                jnp.add, carry.sums, jax.tree.unflatten(jax.tree.structure(carry.sums), outputs)
            )
        if rank == 1 and sender is not None:
            touched["gradient"] = self.wire.pack(sender, outputs[:1])
        if "grads" in touched:
            which = self._which(number)
            touched["grads"] = self.packing.add(
                number // self._num_chunks, carry.grads, outputs[len(outputs) - len(which) :], which
            )
        return touched if self._timeline is None else self._timeline.end(rank, action, touched)

    def _which(self, number: int) -> list[int]:
        """The parameters of a program, as numbers of leaves of what its device holds."""
        kind, chunk = divmod(number, self._num_chunks)
        leaves, structure = jax.tree.flatten(self.packing.tree(kind))
        numbered = jax.tree.unflatten(structure, range(len(leaves)))
        return jax.tree.leaves(self.stages.part(numbered, self.stages.examples[kind], chunk))

    def _deliver(self, carry: Carry, actions: tuple[Actions, ...], arrivals: tuple[Arrivals, ...]) -> Carry:
        """Puts the outputs of a clock into the inboxes of their receivers."""
        outputs = (carry.activation, carry.gradient)
        inboxes = dict(carry.inboxes)

        def store(inbox: str, slot: jax.Array, packet: Packed) -> None:
            def write(slots: Packed) -> Packed:
                update = jax.lax.dynamic_update_index_in_dim
                return tuple(update(old, new, slot, 0) for old, new in zip(slots, packet, strict=True))

            inboxes[inbox] = jax.lax.cond(slot == NONE, lambda slots: slots, write, inboxes[inbox])

        for rank in self.shape.stays:
            store(INBOXES[rank], actions[rank].own_inbox, outputs[rank])
        num_devices = len(self.stages.placement)
        for number, (wire, arrival) in enumerate(zip(self.shape.wires, arrivals, strict=True)):
            packet = outputs[wire.ranks[0]]
            if len(wire.ranks) == 2:
                is_forward = actions[0].wire == number
                packet = tuple(jnp.where(is_forward, x, dx) for x, dx in zip(*outputs, strict=True))
            route = [(sender, (sender + wire.offset) % num_devices) for sender in wire.senders]
            packet = tuple(jax.lax.ppermute(part, STAGE, route) for part in packet)
            for rank in wire.ranks:
                store(INBOXES[rank], arrival[rank], packet)
        return carry._replace(inboxes=inboxes)
