"""A pipeline's step, and its engine: one `shard_map` that runs any table, whatever the stages.

All devices step through the table's clocks in a scan. In a clock a device takes the branch of its action of each
phase (F, then B, then W) or an empty one, so that an idle device computes nothing. At the end of the clock outputs go
over the table's routes to their receivers, into an inbox; what an action saves for a later one lies in a stash.

    table  -- lower -->        which action, which slots: by device and clock  =  arguments of the program
    layers -- trace, cut -->   what F, B and W compute: by kind and chunk      =  branches of the program
    trees  -- Packing -->      one form of arrays for stages that differ       =  its state
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar import step as steps
from jaxpar.exchange.reduce import psum_small
from jaxpar.mesh import DATA, STAGE
from jaxpar.models.model import Batch
from jaxpar.pipeline.executor.lowering import INBOXES, NONE, Actions, Arrivals, TableShape
from jaxpar.pipeline.executor.packing import Packed, Packing
from jaxpar.pipeline.executor.programs import StageInputs, StagePrograms
from jaxpar.pipeline.executor.state import PackedState, StagedState, StageUpdate
from jaxpar.pipeline.executor.timeline import Timeline
from jaxpar.step import Metrics
from jaxpar.tasks import Sums


class Carry(NamedTuple):
    """The values that a device carries from clock to clock.

    Attributes:
      inboxes: by inbox, its slots.
      stashes: by stash, its slots.
      activation: what F made last, packed as a transfer.
      gradient: what B made last, likewise.
      grads: added up so far, packed as the parameters.
      sums: likewise, on the last stage.
    """

    inboxes: dict[str, Packed]
    stashes: dict[tuple[int, int], Packed]
    activation: Packed
    gradient: Packed
    grads: Packed
    sums: Sums


class PipelineEngine:
    """Runs the stages' programs as branches of one program for all devices, by any table of one shape.

    Attributes:
      programs: what the branches compute.
      packing: of the parameters that devices hold, by kind.
      shape: of the table.
      transfers: packing of what goes to the next stage, by the number of the program that makes it.
      stashes: packing of what is saved between phases, by stash and by number of the program.
    """

    def __init__(self, programs: StagePrograms, packing: Packing, shape: TableShape, timeline: Timeline | None = None):
        """See the attributes; timeline: takes the time of every action."""
        self.programs, self.packing, self.shape, self._timeline = programs, packing, shape, timeline
        each = programs.programs
        self.transfers = Packing([program.y for program in each])
        stashes = [buffer for buffer, _ in shape.num_slots if isinstance(buffer, tuple)]
        self.stashes = {stash: Packing([program.cut.saved.get(stash, []) for program in each]) for stash in stashes}

    @property
    def activation_bytes(self) -> dict[str, int]:
        """Bytes on each device of what phases save for later ones, and of what is in flight between devices."""
        slots = dict(self.shape.num_slots)
        stashes = sum(slots[stash] * packing.nbytes for stash, packing in self.stashes.items())
        inboxes = sum(slots.get(inbox, 0) for inbox in INBOXES)
        return {"stashes": stashes, "transfers": (inboxes + len(INBOXES)) * self.transfers.nbytes}

    def run(
        self,
        plan: tuple[tuple[Actions, ...], tuple[Arrivals, ...]],
        params: Packed,
        microbatches: Batch,
        key: jax.Array | None,
        weight: jax.Array,
    ) -> tuple[Packed, Sums]:
        """Run this device's part of all clocks: return its gradients, and sums where it has the last stage.

        Args:
          plan: this device's part of LoweredTable.actions and LoweredTable.arrivals: arrays over clocks.
          params: what the device holds, packed.
          microbatches: [m, B, ..] all microbatches of this replica.
          key: of the step's dropout.
          weight: of the global batch.
        """
        device, programs = jax.lax.axis_index(STAGE), self.programs
        numbers, shifts = jnp.asarray(programs.numbers)[device], jnp.asarray(programs.stages.shifts)[device]

        def inputs(number: int, action: Actions) -> StageInputs:
            """Without x and dy."""
            part = programs.params(number, self.packing.unpack(programs.kind(number), params))
            taken = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, action.microbatch, 0, keepdims=False), microbatches
            )
            return StageInputs(part, taken, key, shifts[programs.chunk(number)], weight)

        def clock(carry: Carry, now: tuple[tuple[Actions, ...], tuple[Arrivals, ...]]) -> tuple[Carry, None]:
            for phase, action in enumerate(now[0]):
                branch = jnp.where(action.chunk == NONE, 0, 1 + numbers[action.chunk])
                acts = [partial(self._act, phase, number, inputs) for number in range(len(programs.programs))]
                with jax.named_scope(f"phase_{phase}"):
                    touched = jax.lax.switch(branch, [partial(self._idle, phase), *acts], action, carry)
                carry = carry._replace(**touched | {"stashes": carry.stashes | touched["stashes"]})
            return self._deliver(carry, *now), None

        end, _ = jax.lax.scan(clock, self._start(), plan)
        return end.grads, end.sums

    def _start(self) -> Carry:
        slots = dict(self.shape.num_slots)
        return Carry(
            {inbox: self.transfers.zeros(slots[inbox]) for inbox in INBOXES if inbox in slots},
            {stash: packing.zeros(slots[stash]) for stash, packing in self.stashes.items()},
            self.transfers.zeros(),
            self.transfers.zeros(),
            self.packing.zeros() if self.shape.num_phases > 1 else (),
            self.programs.stages.task.zeros(),
        )

    def _touched(self, phase: int, carry: Carry) -> dict[str, Any]:
        """What an action of this phase may change: the results of its branches."""
        fields = [["activation", "sums"], ["gradient"], []][phase]
        if phase == self.shape.num_phases - 1 and phase > 0:
            fields = [*fields, "grads"]
        stashes = {stash: slots for stash, slots in carry.stashes.items() if stash[0] == phase}
        return {"stashes": stashes} | {field: getattr(carry, field) for field in fields}

    def _idle(self, phase: int, action: Actions, carry: Carry) -> dict[str, Any]:
        return self._touched(phase, carry)

    def _act(
        self, phase: int, number: int, inputs: Callable[..., StageInputs], action: Actions, carry: Carry
    ) -> dict[str, Any]:
        """One action: what it touched."""
        if self._timeline is not None:
            action = self._timeline.begin(phase, action)
        given, sender = inputs(number, action), self.programs.sender(number)
        if phase == 0 and sender is not None:
            given = given._replace(x=self.transfers.read(sender, carry.inboxes["activations"], action.inbox))
        if phase == 1 and self.programs.programs[number].y is not None:
            given = given._replace(dy=self.transfers.read(number, carry.inboxes["gradients"], action.inbox))
        saved = {
            stash: self.stashes[stash].read(number, carry.stashes[stash], slot)
            for stash, slot in action.stash.items()
            if stash[0] < phase
        }
        outputs, made = self.programs.run(number, phase, given, saved)
        touched = self._touched(phase, carry)
        for stash, values in made.items():
            touched["stashes"][stash] = self.stashes[stash].write(
                number, touched["stashes"][stash], action.stash[stash], values
            )
        if outputs.y is not None:
            touched["activation"] = self.transfers.pack(number, outputs.y)
        if outputs.sums is not None:
            touched["sums"] = jax.tree.map(jnp.add, carry.sums, outputs.sums)
        if outputs.dx is not None and sender is not None:
            touched["gradient"] = self.transfers.pack(sender, outputs.dx)
        if outputs.dparams is not None:
            touched["grads"] = self.add_gradients(number, carry.grads, outputs.dparams)
        return touched if self._timeline is None else self._timeline.end(phase, action, touched)

    def add_gradients(self, number: int, grads: Packed, dparams: Any) -> Packed:
        """Return a device's gradients plus those of a program; in place where XLA can."""
        kind = self.programs.kind(number)
        leaves, structure = jax.tree.flatten(self.packing.tree(kind))
        leaf_numbers = jax.tree.unflatten(structure, range(len(leaves)))
        which = jax.tree.leaves(self.programs.params(number, leaf_numbers))
        return self.packing.add(kind, grads, jax.tree.leaves(dparams), which)

    def _deliver(self, carry: Carry, actions: tuple[Actions, ...], arrivals: tuple[Arrivals, ...]) -> Carry:
        """Puts the outputs of a clock into the inboxes of their receivers."""
        outputs = (carry.activation, carry.gradient)
        inboxes = dict(carry.inboxes)

        def store(inbox: str, slot: jax.Array, transfer: Packed) -> None:
            def write(slots: Packed) -> Packed:
                update = jax.lax.dynamic_update_index_in_dim
                return tuple(update(old, new, slot, 0) for old, new in zip(slots, transfer, strict=True))

            inboxes[inbox] = jax.lax.cond(slot == NONE, lambda slots: slots, write, inboxes[inbox])

        for phase in self.shape.local_phases:
            store(INBOXES[phase], actions[phase].local_inbox, outputs[phase])
        num_devices = len(self.programs.stages.placement)
        for number, (route, arrival) in enumerate(zip(self.shape.routes, arrivals, strict=True)):
            transfer = outputs[route.phases[0]]
            if len(route.phases) == 2:
                is_forward = actions[0].route == number
                transfer = tuple(jnp.where(is_forward, x, dx) for x, dx in zip(*outputs, strict=True))
            pairs = [(sender, (sender + route.offset) % num_devices) for sender in route.senders]
            transfer = tuple(jax.lax.ppermute(part, STAGE, pairs) for part in transfer)
            for phase in route.phases:
                store(INBOXES[phase], arrival[phase], transfer)
        return carry._replace(inboxes=inboxes)


def pipeline_step(
    staged: StagedState, remat: str, timeline: Timeline | None = None
) -> Callable[..., tuple[PackedState, Metrics]]:
    """Return a device's part of a step: all actions of the table, then the exchange of gradients and the update.

    It takes the table's shape, the state, the batch and the table's arrays, all but the state local.
    """

    def step(
        shape: TableShape, state: PackedState, batch: Batch, actions: Any, arrivals: Any
    ) -> tuple[PackedState, Metrics]:
        state = staged.packed.local(state)
        microbatches = steps.microbatches(batch, shape.num_microbatches)
        key = steps.dropout_key(state.key, state.step)
        weight = jax.lax.pmean(steps.batch_weight(batch), DATA)  # so that gradients are replicas' means
        engine = make_engine(staged, shape, microbatches, key, remat, timeline)
        local_grads, local_sums = engine.run((actions, arrivals), state.params, microbatches, key, weight)
        nonfinite_count = steps.nonfinite_count(local_grads)  # which a compressor may hide
        sums, nonfinite_count = psum_small((local_sums, nonfinite_count), (DATA, STAGE))
        grads, residuals = staged.all_reduce.mean(local_grads, state.private)
        update = StageUpdate(staged, jax.lax.axis_index(STAGE))
        for tie in update.copied:  # the gradient of an array that several devices use is the sum of theirs
            grads = update.replace(tie, grads, jax.lax.psum(update.part(tie, grads), STAGE))
        grad_norm = jnp.sqrt(jax.lax.psum(update.squares(grads), STAGE))
        after, metrics = update(state, grads, sums, jnp.where(nonfinite_count == 0, grad_norm, jnp.nan))
        residuals = jax.tree.map(lambda new, old: jnp.where(metrics.finite, new, old), residuals, state.private)
        return staged.packed.out(after._replace(private=residuals)), metrics

    return step


def pipeline_evaluation(staged: StagedState) -> Callable[..., Sums]:
    """Return a device's part of the forward pass without dropout; its arguments: see `pipeline_step`."""

    def evaluate(shape: TableShape, params: Packed, batch: Batch, actions: Any, arrivals: Any) -> Sums:
        microbatches = steps.microbatches(batch, shape.num_microbatches)
        engine = make_engine(staged, shape, microbatches, None, "none")
        _, sums = engine.run((actions, arrivals), staged.params.packed.local(params), microbatches, None, jnp.ones(()))
        return jax.lax.psum(sums, (DATA, STAGE))

    return evaluate


def make_engine(
    staged: StagedState,
    shape: TableShape,
    microbatches: Batch,
    key: jax.Array | None,
    remat: str,
    timeline: Timeline | None = None,
) -> PipelineEngine:
    """Trace the stages' programs, and make the engine that runs them.

    Args:
      microbatches: [m, B, ..] the microbatches, abstract or not.
      key: of dropout, likewise; None: without.
    """
    microbatch, like = steps.abstract(microbatches, 1), steps.abstract(key)
    programs = StagePrograms(staged.stages, microbatch, like, num_phases=shape.num_phases, remat=remat)
    return PipelineEngine(programs, staged.params.packing, shape, timeline)
