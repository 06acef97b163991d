"""The training step of a pipeline: one `shard_map` that runs every schedule, even when stages differ in shape.

Schedules are data, so that a new schedule needs a new table and no new engine. The inputs are prepared ahead of time:

    table  -- lower -->        the action and the buffer slots of every device and clock  =  arguments of the program
    layers -- trace, cut -->   the F, B and W programs of every stage                     =  branches of the program
    trees  -- Packing -->      arrays of the same shapes on every device                  =  state of the program

One training step then runs on every device as follows. Comments in the code cite these numbers.

     1. Split the replica's shard of the batch into microbatches.
     2. Start with empty inboxes, empty stashes, and gradients and metrics of zero.

    In every clock of the table (a `scan`), for every phase in order (F, then B, then W):

     3. Select the branch of this device's action. A device without an action in this phase takes an empty branch,
        so an idle device computes nothing.
     4. Read the inputs of the action: the stage's weights, the microbatch, the activation or gradient that has
        arrived in an inbox, and the values that earlier phases of the microbatch stashed.
     5. Run the stage program: F computes the output y, B the input gradient dX, W the weight gradient dW, and
        a fused backward (BW) both gradients.
     6. Store the results: values for later phases go to a stash, y and dX to the send buffers, dW is added to the
        gradients, and the last stage adds the loss and its metrics to the sums.

    At the end of the clock:

     7. Send y and dX along the routes of the table, one `ppermute` per route. The receiver writes each transfer to an
        inbox slot, where it waits for the action that reads it. Collectives between stages stay outside of all
        branches, because every stage must take part in them. Devices that compute a stage together take the same
        branch, which has those of its layers.

    After the last clock:

     8. Sum the metrics over all devices, and average the gradients over the replicas with the configured exchange. If
        it has error feedback, each replica clips its gradient first. With zero1, a replica gets shards of the mean.
     9. Sum the gradients of tied arrays over the stages that use them, and compute the global gradient norm.
    10. Take the optimizer step on the parameters of this device, with zero1 on shards, which are then gathered. If the
        loss or a gradient is not finite, all devices keep their parameters and optimizer state.

Evaluation runs steps 1 to 7 on a table that has only F actions. A pipeline that never drains replaces steps 8 to 10 by
an action of its table, U, which runs at the end of a clock (continuous.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.core import step as steps
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.step import Metrics
from jaxpar.exchange.reduce import psum_small
from jaxpar.models.model import Batch
from jaxpar.strategies.pipeline.executor.lowering import (
    CLOCK,
    DELIVERY,
    INBOXES,
    NONE,
    PHASE,
    Actions,
    ClockShape,
    TableArrays,
    TableShape,
)
from jaxpar.strategies.pipeline.executor.packing import Packed, Packing, at_index, written_at
from jaxpar.strategies.pipeline.executor.stage_programs import StageInputs, StagePrograms
from jaxpar.strategies.pipeline.executor.state import PackedState, StagedState, StageUpdate, kept_if
from jaxpar.strategies.pipeline.executor.timeline import ActionNumbers, Timeline
from jaxpar.tasks import Sums


class Carry(NamedTuple):
    """The values that a device carries from clock to clock."""

    inboxes: dict[str, Packed]  # slots of each inbox
    stashes: dict[tuple[int, int], Packed]  # slots of each stash
    activation: Packed  # send buffer of F: the latest y, packed as a transfer
    gradient: Packed  # send buffer of B: the latest dX, packed as a transfer
    grads: Packed  # the gradients accumulated so far, packed like the parameters
    sums: Sums  # the metric sums accumulated so far; only the last stage adds to them
    weights: Any = None  # the weights that updates in the table change; None if there are none


class StepBatches(NamedTuple):
    """The batches that a step works on: the one of the step, followed by earlier ones whose work is not finished."""

    microbatches: Batch  # [number of batches x m, B, ..] the microbatches of a replica
    keys: Any  # dropout key by batch, an array or a list; None disables dropout
    weights: Any  # by batch, the divisor of the loss: the global batch weight divided by the number of replicas
    scales: Any = None  # by batch, what the loss is multiplied by; None: nothing

    def of(self, microbatch: jax.Array) -> tuple[Batch, jax.Array | None, jax.Array, jax.Array | None]:
        """Return a microbatch, and the dropout key, the divisor and the scale of its batch."""
        chosen: Batch = jax.tree.map(lambda x: at_index(x, microbatch), self.microbatches)
        num_batches = len(self.weights)
        batch: Any = microbatch // (len(self.microbatches["index"]) // num_batches) if num_batches > 1 else 0
        key, scale = (None if of_batches is None else of_batches[batch] for of_batches in (self.keys, self.scales))
        return chosen, key, self.weights[batch], scale


class PipelineEngine:
    """Runs the stage programs as branches of one program for all devices, for any table of a given shape."""

    def __init__(
        self,
        staged: StagedState,
        shape: TableShape,
        microbatches: Batch,
        key: jax.Array | None,
        remat: str,
        timeline: Timeline | None = None,
    ):
        """Trace the stage programs.

        microbatches: [m, B, ..]; arrays, or their shapes. key: as in `StagePrograms`, or an array. remat: none, full or
        dots: which values the forward pass saves for the backward pass. timeline: measures every action.
        """
        microbatch, like = steps.abstract(microbatches, 1), steps.abstract(key)
        scale: Any = None if staged.scaling is None else staged.scaling.scale
        how: dict[str, Any] = {"num_phases": shape.num_phases, "remat": remat, "has_flush": not shape.num_versions}
        self.programs = StagePrograms(staged.stages, microbatch, like, scale, **how)
        self.packing, self.shape, self._timeline = staged.params.packing, shape, timeline
        each = self.programs.programs
        self.transfers = Packing([program.y for program in each])  # of stage outputs, by program that computes them
        stashes = [buffer for buffer, _ in shape.num_slots if isinstance(buffer, tuple)]
        # packing of each stash, by the number of the program that writes to it
        self.stashes = {stash: Packing([program.cut.saved.get(stash, []) for program in each]) for stash in stashes}

    @property
    def activation_bytes(self) -> dict[str, int]:
        """Bytes on each device for stashes, and for in-flight transfers: the inboxes and the two send buffers."""
        slots = dict(self.shape.num_slots)
        stashes = sum(slots[stash] * packing.nbytes for stash, packing in self.stashes.items())
        inboxes = sum(slots.get(inbox, 0) for inbox in INBOXES)
        return {"stashes": stashes, "transfers": (inboxes + len(INBOXES)) * self.transfers.nbytes}

    def run(
        self,
        arrays: TableArrays,
        read: Callable[[Any, Any], Packed],
        batches: StepBatches,
        start: Carry,
        update: Callable[[Carry, jax.Array], Carry] | None = None,
    ) -> Carry:
        """Run all clocks on this device (steps 3 to 7), and return what it carries after the last one.

        Its metric sums are zero except on the device with the last stage.

        Args:
          arrays: this device's part of the table: arrays over clocks.
          read: (Carry.weights, Actions.version) -> the parameters that an action reads, packed.
          batches: the batches of this replica.
          start: the carry before the first clock: `self.start()`, unless the pipeline is not empty.
          update: (carry, entry of TableArrays.updates) -> carry after the update of a clock; None if there are none.
        """
        device, programs, clocks = jax.lax.axis_index(STAGE), self.programs, self.shape.clocks
        phases = range(self.shape.num_phases)
        possible = [[of_clock.programs(phase, programs.numbers) for phase in phases] for of_clock in clocks]
        places = {each: jnp.asarray(np.searchsorted(each, programs.numbers))[device] for each in chain(*possible)}
        shifts = jnp.asarray(programs.stages.shifts)[device]

        def inputs(number: int, action: Actions, carry: Carry) -> StageInputs:
            # 4. All but x and dy, which `_act` adds.
            held = self.packing.unpack(programs.kind(number), read(carry.weights, action.version))
            microbatch, key, weight, scale = batches.of(action.microbatch)
            params, shift = programs.params(number, held), shifts[programs.chunk(number)]
            return StageInputs(params, microbatch, key, shift, weight, scale=scale)

        def clock(carry: Carry, index: int, now: TableArrays) -> Carry:
            for phase, (action, able) in enumerate(zip(now.actions, possible[index], strict=True)):
                # 3. Branch 0 is the empty one; branch 1 + n runs the n-th program that can run in this clock.
                branch = jnp.where(action.chunk == NONE, 0, 1 + places[able][action.chunk])
                acts = [partial(self._act, phase, number, inputs) for number in able]
                idle = [lambda _action, carry, phase=phase: self._touched(phase, carry)]
                with jax.named_scope(PHASE.format(phase)):
                    touched = jax.lax.switch(branch, [*idle, *acts], action, carry)
                carry = carry._replace(**touched | {"stashes": carry.stashes | touched["stashes"]})
            if update is not None and clocks[index].has_update:
                carry = update(carry, now.updates)
            return self._deliver(carry, clocks[index], now)

        def iteration(carry: Carry, nows: Sequence[TableArrays]) -> tuple[Carry, None]:
            for index, now in enumerate(nows):
                with jax.named_scope(CLOCK.format(index)):
                    carry = clock(carry, index, now)
            return carry, None

        size = len(clocks)
        by_clock = [jax.tree.map(lambda x, first=first: x[first::size], arrays) for first in range(size)]
        end, _ = jax.lax.scan(iteration, start, by_clock)
        return end

    def start(self) -> Carry:
        """Step 2: empty buffers, and gradients and sums of zero. In `shard_map`, with the types of what follows."""
        return jax.lax.pcast(self.zeros(), (DATA, STAGE), to="varying")

    def zeros(self) -> Carry:
        """Return the values of `start`, which are equal on all devices."""
        slots = dict(self.shape.num_slots)
        return Carry(
            {inbox: self.transfers.zeros(slots[inbox]) for inbox in INBOXES if inbox in slots},
            {stash: packing.zeros(slots[stash]) for stash, packing in self.stashes.items()},
            self.transfers.zeros(),
            self.transfers.zeros(),
            self.packing.zeros() if self.shape.num_phases > 1 else (),
            jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), self.programs.sums[1]),
        )

    def _touched(self, phase: int, carry: Carry) -> dict[str, Any]:
        """Return the fields of the carry that an action of this phase may change: the outputs of its branches."""
        fields = [["activation"], ["gradient"], []][phase]
        if phase == self.programs.sums[0]:
            fields = [*fields, "sums"]
        if phase == self.shape.num_phases - 1 and phase > 0:
            fields = [*fields, "grads"]
        stashes = {stash: slots for stash, slots in carry.stashes.items() if stash[0] == phase}
        return {"stashes": stashes} | {field: getattr(carry, field) for field in fields}

    def _act(
        self, phase: int, number: int, inputs: Callable[..., StageInputs], action: Actions, carry: Carry
    ) -> dict[str, Any]:
        """Steps 4 to 6: run one action, and return the fields of the carry that it may change."""
        of_action = ActionNumbers(phase, action.microbatch, action.chunk)
        if self._timeline is not None:
            action = self._timeline.begin(of_action, action)
        # 4. Stage 0 has no x, as its input is in the microbatch; the last stage has no dy, as its output is the loss.
        given, sender = inputs(number, action, carry), self.programs.sender(number)
        if phase == 0 and sender is not None:
            given = given._replace(x=self.transfers.read(sender, carry.inboxes["activations"], action.inbox))
        if phase == 1 and self.programs.programs[number].y is not None:
            given = given._replace(dy=self.transfers.read(number, carry.inboxes["gradients"], action.inbox))
        saved = {
            stash: self.stashes[stash].read(number, carry.stashes[stash], slot)
            for stash, slot in action.stash.items()
            if stash[0] < phase
        }
        # 5. Run the stage program.
        outputs, made = self.programs.run(number, phase, given, saved)
        # 6. Stage 0 sends no dX.
        touched = self._touched(phase, carry)
        for stash, slots in touched["stashes"].items():
            values = made.get(stash, [])
            touched["stashes"][stash] = self.stashes[stash].write(number, slots, action.stash[stash], values)
        if outputs.y is not None:
            touched["activation"] = self.transfers.pack(number, outputs.y)
        if outputs.sums is not None:
            touched["sums"] = jax.tree.map(jnp.add, carry.sums, outputs.sums)
        if outputs.dx is not None and sender is not None:
            touched["gradient"] = self.transfers.pack(sender, outputs.dx)
        if outputs.dparams is not None:
            touched["grads"] = self.add_gradients(number, carry.grads, outputs.dparams)
        return touched if self._timeline is None else self._timeline.end(of_action, touched)

    def add_gradients(self, number: int, grads: Packed, dparams: Any) -> Packed:
        """Return a device's accumulated gradients plus those of one action. XLA can do this in place."""
        kind = self.programs.kind(number)
        # The gradients are those of one chunk: find the places of its parameters among those of the device.
        leaves, structure = jax.tree.flatten(self.packing.tree(kind))
        leaf_numbers = jax.tree.unflatten(structure, range(len(leaves)))
        which = jax.tree.leaves(self.programs.params(number, leaf_numbers))
        return self.packing.add(kind, grads, jax.tree.leaves(dparams), which)

    def _deliver(self, carry: Carry, of_clock: ClockShape, now: TableArrays) -> Carry:
        """Step 7: send the outputs of a clock, and store them in the inboxes of their receivers."""
        actions, arrivals = now.actions, now.arrivals
        outputs = (carry.activation, carry.gradient)
        inboxes = dict(carry.inboxes)

        def store(phase: int, where: str | int, slot: jax.Array, transfer: Packed) -> None:
            inbox = INBOXES[phase]

            with jax.named_scope(DELIVERY.format(phase, where)):
                write = partial(written_at, transfer, slot)
                inboxes[inbox] = jax.lax.cond(slot == NONE, lambda slots: slots, write, inboxes[inbox])

        for phase in self.shape.local_phases:
            store(phase, "local", actions[phase].local_inbox, outputs[phase])
        num_devices = len(self.programs.stages.placement)
        for number, (route, arrival) in enumerate(zip(of_clock.routes, arrivals, strict=True)):
            if not route.senders:
                continue
            transfer = outputs[route.phases[0]]
            if len(route.phases) == 2:  # both send over this distance, but a device at most one of them in a clock
                is_forward = actions[0].route == number
                transfer = tuple(jnp.where(is_forward, x, dx) for x, dx in zip(*outputs, strict=True))
            pairs = [(sender, (sender + route.offset) % num_devices) for sender in route.senders]
            transfer = tuple(jax.lax.ppermute(part, STAGE, pairs) for part in transfer)
            for phase in route.phases:
                store(phase, number, arrival[phase], transfer)
        return carry._replace(inboxes=inboxes)


def pipeline_step(
    staged: StagedState, remat: str, timeline: Timeline | None = None
) -> Callable[..., tuple[PackedState, Metrics]]:
    """Return the function that runs one training step on a device, inside `shard_map`: steps 1 to 10.

    Its arguments are the table's shape, and this device's shards of the state, the batch and the table's arrays.
    """
    group = staged.group

    def step(shape: TableShape, state: PackedState, batch: Batch, arrays: TableArrays) -> tuple[PackedState, Metrics]:
        state = staged.packed.local(state)
        # 1. Split the batch.
        microbatches = steps.microbatches(batch, shape.num_microbatches)
        key = steps.dropout_key(state.key, state.step)
        # so that the gradient is the mean over replicas
        weight = jax.lax.pmean(group.divisor(steps.batch_weight(batch)), DATA)
        # 2. to 7. Run the clocks.
        engine = PipelineEngine(staged, shape, microbatches, key, remat, timeline)
        scaling = staged.find_scale(state.optimizer)
        batches = StepBatches(microbatches, [key], [weight], None if scaling is None else [scaling.scale])
        end = engine.run(arrays, lambda _weights, _version: state.params, batches, engine.start())
        update = StageUpdate(staged, jax.lax.axis_index(STAGE))
        grads_unreduced, replica_norm = update.over_copies(end.grads), None
        # 8. Check for infinities and NaNs before the exchange: a compressor may hide them. Not before the sum over
        # copies, whose branches have collectives: on CPUs, nothing else orders those relative to others.
        nonfinite_count = steps.nonfinite_count(grads_unreduced)
        sums, nonfinite_count = psum_small((end.sums, nonfinite_count), (*group.batch_axes, STAGE))
        if group.axes:
            nonfinite_count = jax.lax.psum(nonfinite_count, group.axes)
        if staged.all_reduce.clip_norm:
            # The gradients of a tied array on different stages count separately, because they are sent separately.
            replica_norm = jnp.sqrt(jax.lax.psum(update.counted(update.norm(grads_unreduced) ** 2), STAGE))
        if staged.all_reduce.shards:
            grads, residuals = update.scattered(grads_unreduced), state.private
        else:
            grads, residuals = staged.exchanged(grads_unreduced, state.private, replica_norm)
        # 9. The gradient of an array that several devices use is the sum of their gradients.
        for tie in staged.stages.copied:
            grads = update.replace(tie, grads, jax.lax.psum(update.part(tie, grads), STAGE))
        grad_norm = jnp.sqrt(jax.lax.psum(update.squares(grads), update.summed_over))
        # 10. With a gradient norm of NaN the update keeps the old parameters.
        after, metrics = update(state, grads, sums, jnp.where(nonfinite_count == 0, grad_norm, jnp.nan))
        private = kept_if(metrics.finite, residuals, state.private)
        return staged.packed.out(after._replace(private=private)), metrics

    return step


def pipeline_evaluation(staged: StagedState) -> Callable[..., Sums]:
    """Return the function that runs the forward pass on a device, without dropout: steps 1 to 7.

    Its arguments are those of `pipeline_step`, with the parameters instead of the state.
    """

    def evaluate(shape: TableShape, params: Packed, batch: Batch, arrays: TableArrays) -> Sums:
        microbatches, held = steps.microbatches(batch, shape.num_microbatches), staged.params.packed.local(params)
        engine = PipelineEngine(staged, shape, microbatches, None, "none")
        batches = StepBatches(microbatches, None, [jnp.ones(())])
        end = engine.run(arrays, lambda _weights, _version: held, batches, engine.start())
        return jax.lax.psum(end.sums, (*staged.group.batch_axes, STAGE))

    return evaluate
