"""Pipelines that never drain, in lock step: their training step, and their state between two steps.

Their tables are periodic (jaxpar/strategies/pipeline/tables/periodic.py): a step runs the clocks of one period, in
which a batch enters, and every stage works on the batches that are in flight. Between two steps, stashes, inboxes,
gradients, the batches themselves, and earlier versions of the weights, which their backwards need, are in flight. They
are in ring buffers, with slots for microbatches and for versions of the weights. The newest weights of each stage and
its optimizer state are the canonical state.

The update of a stage is an action of the table, U. At the end of a clock with a U, the stage exchanges its gradient
with its replicas and takes an optimizer step, while other stages are at other batches. So nothing can be computed over
all stages: the gradient norm, which clips the gradient, is that of the stage, a gradient that is not finite skips the
update of its stage, and arrays on different stages cannot be tied.
"""

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax.sharding import Mesh, PartitionSpec

from jaxpar import layout
from jaxpar.core import step as steps
from jaxpar.core.mesh import CONTEXT, DATA, STAGE
from jaxpar.core.state import Canonical, State
from jaxpar.core.step import Metrics
from jaxpar.exchange.reduce import psum_small
from jaxpar.layout import Layout
from jaxpar.models.model import Batch
from jaxpar.strategies.pipeline.executor.engine import Carry, PipelineEngine, StepBatches
from jaxpar.strategies.pipeline.executor.lowering import (
    INBOXES,
    NONE,
    Actions,
    Buffer,
    LoweredTable,
    TableArrays,
    TableShape,
)
from jaxpar.strategies.pipeline.executor.packing import Packed, at_index, written_at
from jaxpar.strategies.pipeline.executor.state import PackedState, StagedState, StageUpdate, kept_if
from jaxpar.strategies.pipeline.executor.timeline import ActionNumbers, Timeline
from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS, U

UPDATE = "update"  # name of the loops in which stages are updated
BUFFERS = ("inboxes", "stashes", "activation", "gradient", "grads")  # fields of Carry that are in flight between steps


class WorkInFlight(NamedTuple):
    """The private state: what is in flight between two steps."""

    num_entered: Any  # the number of batches that have entered the pipeline since it was empty
    residuals: Any  # private state of the gradient exchange
    buffers: Any  # the fields of `Carry` that hold values of batches in flight
    batches: Any  # the microbatches of the batches in flight, the latest batch first; empty if there are none
    scales: Any = ()  # what the losses of the batches in flight are multiplied by, the latest first; (): nothing


class Weights(NamedTuple):
    """The values that the update of a stage changes, on one device."""

    versions: Packed  # the versions of the parameters, packed, with a leading dim over the versions
    optimizer: Packed  # state of the optimizer, packed
    residuals: Any  # private state of the gradient exchange
    squared_norm: jax.Array  # sum of the squared gradient of the last update
    nonfinite: jax.Array  # 1.0 if the gradient of an update in this step was not finite, otherwise 0.0
    # the scale of the loss of an update in this step whose gradient was not finite, otherwise inf; None: not scaled
    failed_scale: Any


def read_version(versions: Packed, slot: jax.Array) -> Packed:
    """Return the version of the parameters in a slot."""
    return tuple(at_index(x, slot) for x in versions)


def version_slot(version: jax.Array, num_versions: jax.Array) -> jax.Array:
    """Return the slot of a version of the weights on a device that keeps `num_versions`. There is none before 0."""
    return jnp.maximum(version, 0) % num_versions


def arrays_at_step(shape: TableShape, arrays: TableArrays, device: jax.Array, num_entered: jax.Array) -> TableArrays:
    """Return the arrays of a device for one step of a periodic table, without actions on batches before the first one.

    arrays: the device's part, over clocks. num_entered: batches that entered the pipeline before this step.
    """
    sizes, m = dict(shape.num_slots), shape.num_microbatches
    num_versions, num_own = (jnp.asarray(of_devices)[device] for of_devices in (shape.num_versions, shape.num_own))

    def slot(first: Any, buffer: Buffer) -> Any:
        if buffer not in sizes:
            return first
        # A batch advances the slots of a device by as many microbatches as the device runs of it.
        return jnp.where(first == NONE, NONE, (first + num_own * num_entered) % sizes[buffer])

    def of_phase(phase: int, now: Actions) -> Actions:
        has_begun = now.microbatch // m <= num_entered
        return now._replace(
            chunk=jnp.where(has_begun, now.chunk, NONE),
            inbox=slot(now.inbox, INBOXES[phase]),
            stash={stash: slot(array, stash) for stash, array in now.stash.items()},
            local_inbox=slot(now.local_inbox, INBOXES[phase]),
            version=version_slot(num_entered - now.version, num_versions),
        )

    actions = tuple(of_phase(phase, now) for phase, now in enumerate(arrays.actions))
    arrivals = tuple((slot(first, INBOXES[0]), slot(second, INBOXES[1])) for first, second in arrays.arrivals)
    return TableArrays(actions, arrivals, jnp.where(arrays.updates > num_entered, NONE, arrays.updates))


class ContinuousState:
    """The distribution of a problem's state over a pipeline that never drains. It can be computed without devices.

    It has the interface of StagedState. In its PackedState, `params` has a dim over the versions of the weights after
    the one over devices.
    """

    def __init__(self, staged: StagedState, lowered: LoweredTable, engine: PipelineEngine, microbatches: Batch):
        """microbatches: shapes of the microbatches of a replica's shard of one batch, [m, B, ..]."""
        self.staged = staged  # distribution of the newest weights and the optimizer state
        self._shape, axes, group = lowered.shape, staged.packed.axes, staged.group
        # By device: the number of batches that have entered since the one whose gradient was applied last.
        self._age_of_update = np.asarray(lowered.arrays.updates).max(axis=1)
        num_earlier = (lowered.shape.num_batches - 1) * lowered.shape.num_microbatches
        carried = jax.eval_shape(engine.zeros)
        earlier = {name: jax.ShapeDtypeStruct((num_earlier, *x.shape[1:]), x.dtype) for name, x in microbatches.items()}
        ages = max(lowered.shape.num_batches - 1, self._age_of_update.max(), 1)
        in_flight = WorkInFlight(
            layout.replicated(axes, jax.ShapeDtypeStruct((), jnp.int32)),
            staged.private,
            layout.per_replica(axes, {name: getattr(carried, name) for name in BUFFERS}, STAGE, *group.axes, DATA),
            layout.per_replica(axes, earlier if num_earlier else {}, DATA, *([CONTEXT] if CONTEXT in axes else [])),
            layout.replicated(axes, jax.ShapeDtypeStruct((ages,), jnp.float32) if staged.scaling else ()),
        )
        versions = [
            jax.ShapeDtypeStruct((max(lowered.shape.num_versions), *array.shape), array.dtype)
            for array in staged.params.packing.shapes
        ]
        self.versions = layout.per_replica(axes, tuple(versions), *group.split_axes, STAGE)
        joined = layout.join(in_flight)
        self.layouts = staged.layouts._replace(private=joined)
        self.packed_layouts = staged.packed_layouts._replace(params=self.versions, private=joined)
        self.packed = layout.join(self.packed_layouts)
        self.purposes: Mapping[str, Layout] = {  # stashes and transfers are not part of the state
            **self.packed_layouts._replace(private=self.staged.private)._asdict(),
            "gradients": Layout(axes, in_flight.buffers.leaves["grads"]),
            "batches": in_flight.batches,
        }

    def init(self, key: jax.Array, mesh: Mesh) -> PackedState:
        """Return the state at step 0. The pipeline is empty."""
        return self._begin(mesh)(self.staged.init(key, mesh))

    def distribute(self, state: State, private: Canonical | None, mesh: Mesh) -> PackedState:
        """Distribute a canonical state over the mesh.

        private: what `private_state` returned; None or empty: the pipeline is empty.
        """
        fresh = self._begin(mesh)(self.staged.distribute(state, None, mesh))
        if not private:
            return fresh
        private = {**private, "in_flight": {"scales": {}, **private["in_flight"]}}  # earlier versions had no scales
        like = self._private_parts(fresh)
        placed = jax.device_put(serialization.from_state_dict(like, private), jax.tree.map(lambda x: x.sharding, like))
        return fresh._replace(params=placed["versions"], optimizer=placed["optimizer"], private=placed["in_flight"])

    def private_state(self, state: PackedState) -> Canonical:
        """Return the private state: the canonical state lacks earlier versions, and what is in flight."""
        return serialization.to_state_dict(self._private_parts(state))

    def _private_parts(self, state: PackedState) -> dict[str, Any]:
        # The whole optimizer state too, because the optimizer's counters differ between stages.
        return {"versions": state.params, "optimizer": state.optimizer, "in_flight": state.private}

    def gather(self, state: PackedState) -> State:
        """Return the canonical state of the newest weights, as NumPy arrays."""
        return self.staged.gather(self.newest(state))

    def newest(self, state: PackedState) -> PackedState:
        """Return the state with the newest weights alone, in the form of StagedState."""
        [mesh] = {array.sharding.mesh for array in state.params}
        return state._replace(params=self._take_newest(mesh)(state.params, state.private.num_entered), private=())

    @functools.cache  # noqa: B019 - a plan has one state, and it lives as long as the plan
    def _begin(self, mesh: Mesh) -> Callable[[PackedState], PackedState]:
        """Return the function that adds versions and an empty pipeline to a state of StagedState."""

        def begin(state: PackedState) -> PackedState:
            like = zip(state.params, self.versions.shapes, strict=True)
            place = 1 + len(self.staged.group.split_axes)  # of the dim over versions
            params = tuple(jnp.broadcast_to(jnp.expand_dims(x, place), of.shape) for x, of in like)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.packed_layouts.private.shapes)
            return state._replace(params=params, private=zeros._replace(residuals=state.private))

        return jax.jit(begin, out_shardings=self.packed.shardings(mesh))

    @functools.cache  # noqa: B019
    def _take_newest(self, mesh: Mesh) -> Callable[[Packed, jax.Array], Packed]:
        def take(versions: Packed, num_entered: jax.Array) -> Packed:
            device = jax.lax.axis_index(STAGE)
            kept, age = jnp.asarray(self._shape.num_versions)[device], jnp.asarray(self._age_of_update)[device]
            newest = read_version(self.versions.local(versions), version_slot(num_entered - age, kept))
            return self.staged.params.packed.out(newest)

        specs = {"in_specs": (self.versions.specs, PartitionSpec()), "out_specs": self.staged.params.packed.specs}
        return jax.jit(jax.shard_map(take, mesh=mesh, check_vma=False, **specs))


def continuous_step(
    state_of: ContinuousState, remat: str, timeline: Timeline | None = None
) -> Callable[..., tuple[PackedState, Metrics]]:
    """Return the function that runs one training step on a device, inside `shard_map`.

    Its arguments are those of `engine.pipeline_step`. The metrics are those of the microbatches that reached the last
    stage in this step. Their gradient norm is that of the updates of this step, whose batches differ between stages.
    """
    staged = state_of.staged

    def step(shape: TableShape, state: PackedState, batch: Batch, arrays: TableArrays) -> tuple[PackedState, Metrics]:
        state = state_of.packed.local(state)
        in_flight: WorkInFlight = state.private
        device, earlier = jax.lax.axis_index(STAGE), in_flight.batches
        # 1. The batch enters the pipeline; earlier ones follow it.
        entering = steps.microbatches(batch, shape.num_microbatches)
        microbatches = {name: jnp.concatenate([x, earlier[name]]) if earlier else x for name, x in entering.items()}
        keys = jax.vmap(lambda age: steps.dropout_key(state.key, state.step - age))(jnp.arange(shape.num_batches))
        weights = microbatches["weights"].reshape(shape.num_batches, -1).sum(axis=1)
        scaling, scales = staged.find_scale(state.optimizer), None
        if scaling is not None:
            scales = jnp.concatenate([scaling.scale[None], in_flight.scales])
        batches = StepBatches(microbatches, keys, jax.lax.pmean(staged.group.divisor(weights), DATA), scales)
        key = steps.dropout_key(state.key, state.step)
        engine = PipelineEngine(staged, shape, entering, key, remat, timeline)
        # 2. to 7. Continue with what is in flight, and update each stage when its gradient is complete.
        zero, inf = jax.lax.pcast((jnp.zeros(()), jnp.float32(jnp.inf)), STAGE, to="varying")
        none_failed = None if scales is None else inf
        held = Weights(state.params, state.optimizer, in_flight.residuals, zero, zero, none_failed)
        start = engine.start()._replace(**in_flight.buffers, weights=held)
        now = arrays_at_step(shape, arrays, device, in_flight.num_entered)
        stage_update = StageUpdate(staged, device)
        update = update_of_clock(staged, shape, stage_update, state, scales, timeline)
        end = engine.run(now, lambda held, slot: read_version(held.versions, slot), batches, start, update)
        held = end.weights
        sums, nonfinite = psum_small((end.sums, held.nonfinite), (*staged.group.batch_axes, STAGE))
        grad_norm = jnp.sqrt(jax.lax.psum(stage_update.counted(held.squared_norm), STAGE))
        metrics = Metrics(sums, grad_norm, (nonfinite == 0) & jnp.isfinite(sums.loss))
        optimizer, later_scales = held.optimizer, in_flight.scales
        if scaling is not None and scales is not None:
            of_stages = staged.find_scale(optimizer), held.failed_scale
            least, failed = jax.tree.map(partial(jax.lax.pmin, axis_name=STAGE), of_stages)
            metrics = metrics._replace(loss_scale=jnp.where(jnp.isinf(failed), scaling.scale, failed))
            optimizer, later_scales = staged.with_scale(optimizer, least), scales[:-1]
        kept = {name: microbatches[name][: len(x)] for name, x in earlier.items()}
        buffers = {name: getattr(end, name) for name in BUFFERS}
        private = WorkInFlight(in_flight.num_entered + 1, held.residuals, buffers, kept, later_scales)
        after = PackedState(state.step + 1, state.key, held.versions, optimizer, private)
        return state_of.packed.out(after), metrics

    return step


def update_of_clock(
    staged: StagedState,
    shape: TableShape,
    update: StageUpdate,
    before: PackedState,
    scales: jax.Array | None,
    timeline: Timeline | None,
) -> Callable[[Carry, jax.Array], Carry]:
    """Return the function that runs the update of a clock, if the table has one. before: the state before the step.

    scales: of the losses of the batches, the latest first; None: they are not scaled.

    Its second argument is an entry of TableArrays.updates: the number of batches that have entered since the one of
    the gradient, or NONE.
    """

    def updated(accumulated: Packed, weights: Weights, age: jax.Array) -> Weights:
        kept = jnp.asarray(shape.num_versions)[jax.lax.axis_index(STAGE)]
        version = before.private.num_entered - age
        # 1. Exchange the gradient. A compressor may hide infinities and NaNs, so count them before.
        grads_unreduced = update.over_copies(accumulated)
        nonfinite_count = jax.lax.psum(steps.nonfinite_count(grads_unreduced), (DATA, *staged.group.split_axes))
        grads, residuals = staged.exchanged(grads_unreduced, weights.residuals, update.norm(grads_unreduced))
        # 2. Take the optimizer step from the newest version. With a gradient norm of NaN it keeps that version.
        norm = update.norm(grads)
        newest = read_version(weights.versions, version_slot(version, kept))
        state = PackedState(before.step - age, before.key, newest, weights.optimizer)  # learning rate of the batch
        checked_norm = jnp.where(nonfinite_count == 0, norm, jnp.nan)
        scale = None if scales is None else scales[age]
        after, metrics = update(state, grads, staged.problem.task.zeros(), checked_norm, scale)
        # 3. Write the version that follows it.
        versions = written_at(after.params, version_slot(version + 1, kept), weights.versions)
        residuals = kept_if(metrics.finite, residuals, weights.residuals)
        nonfinite = jnp.maximum(weights.nonfinite, 1.0 - metrics.finite)
        failed = None if scale is None else jnp.where(metrics.finite, weights.failed_scale, scale)
        return Weights(versions, after.optimizer, residuals, jnp.square(norm), nonfinite, failed)

    def run(carry: Carry, age: jax.Array) -> Carry:
        def apply(_: jax.Array, values: tuple[Packed, Weights]) -> tuple[Packed, Weights]:
            of_action = ActionNumbers(ACTION_KINDS[U].phase, (age + 1) * shape.num_microbatches - 1, 0)
            if timeline is not None:
                values = timeline.begin(of_action, values)
            accumulated, weights = values
            values = jax.tree.map(jnp.zeros_like, accumulated), updated(accumulated, weights, age)
            return values if timeline is None else timeline.end(of_action, values)

        with jax.named_scope(UPDATE):
            # A loop with at most one iteration: XLA copies all weights in the empty branch of a conditional.
            trips = jnp.where(age != NONE, 1, 0)
            grads, weights = jax.lax.fori_loop(0, trips, apply, (carry.grads, carry.weights))
        carry = carry._replace(grads=grads, weights=weights)
        if staged.packed.axes[DATA] == 1 and not staged.stages.has_replicas and not staged.group.axes:
            return carry
        # On the CPU, nothing orders collectives inside a loop relative to those outside of it, so devices could
        # deadlock. So the transfers at the end of the clock must start after those of the update: they depend on
        # `nonfinite` now, and the compiler does not know that it is never negative.
        is_updated = weights.nonfinite >= 0
        activation, gradient = jax.tree.map(
            lambda x: jnp.where(is_updated, x, jnp.zeros_like(x)), (carry.activation, carry.gradient)
        )
        return carry._replace(activation=activation, gradient=gradient)

    return run


def update_trips(shape: TableShape, num_clocks: int) -> dict[str, tuple[float, ...]]:
    """Return the mean trip count of the loops of the update, for `CompiledProgram`: a device takes one in each step."""
    num_loops = sum(clock.has_update for clock in shape.clocks)
    return {UPDATE: (len(shape.clocks) / (num_clocks * num_loops),)} if num_loops else {}


def padded(batch: Mapping[str, np.ndarray], like: Batch) -> dict[str, np.ndarray]:
    """Pad a batch with zeros to the shapes of the longest batch, because all batches in flight have the same shape.

    The mask or the weights of the padding are zero, so it changes nothing.
    """

    def pad(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return np.pad(x, [(0, 0), *((0, size - have) for size, have in zip(shape[1:], x.shape[1:], strict=True))])

    return {name: pad(x, like[name].shape) for name, x in batch.items()}
