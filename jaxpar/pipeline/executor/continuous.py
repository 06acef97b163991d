"""Pipelines that never drain: their state, and the training step.

Their tables are periodic (jaxpar/pipeline/tables/periodic.py): a step runs the clocks of one period, in which a batch
enters, and every stage works on the batches that are in flight. What is in flight after a step is a part
of the state: stashes, inboxes, gradients, the batches themselves, and earlier versions of the weights, which their
backwards need.

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
import optax
from flax import serialization
from jax.sharding import Mesh, PartitionSpec

from jaxpar import layout
from jaxpar import step as steps
from jaxpar.exchange.clip import clipped
from jaxpar.exchange.reduce import psum_small
from jaxpar.layout import Layout
from jaxpar.mesh import DATA, STAGE
from jaxpar.models.model import Batch
from jaxpar.pipeline.executor.engine import Carry, PipelineEngine, StepBatches, make_engine
from jaxpar.pipeline.executor.lowering import (
    NONE,
    LoweredTable,
    TableArrays,
    TableShape,
    arrays_at_step,
    version_slot,
)
from jaxpar.pipeline.executor.packing import Packed
from jaxpar.pipeline.executor.state import PackedState, StagedState, StageUpdate
from jaxpar.pipeline.executor.timeline import Timeline
from jaxpar.state import Canonical, State
from jaxpar.step import Metrics


class Weights(NamedTuple):
    """The values that the update of a stage changes, on one device.

    Attributes:
      versions: the versions of the parameters, packed, with a leading dim over the versions.
      optimizer: state of the optimizer, packed.
      residuals: private state of the gradient exchange.
      squared_norm: sum of the squared gradient of the last update.
      nonfinite: 1.0 if the gradient of an update in this step was not finite, otherwise 0.0.
    """

    versions: Packed
    optimizer: Packed
    residuals: Any
    squared_norm: jax.Array
    nonfinite: jax.Array


class WorkInFlight(NamedTuple):
    """The private state: what is in flight between two steps.

    Attributes:
      num_entered: the number of batches that have entered the pipeline since it was empty.
      residuals: private state of the gradient exchange.
      buffers: the fields of `Carry` that hold values of batches in flight.
      batches: the microbatches of the batches in flight, the latest batch first; empty if there are none.
    """

    num_entered: Any
    residuals: Any
    buffers: Any
    batches: Any


UPDATE = "update"  # name of the conditional in which stages are updated
BUFFERS = ("inboxes", "stashes", "activation", "gradient", "grads")  # fields of Carry


class ContinuousState:
    """The distribution of a problem's state over a pipeline that never drains. It can be computed without devices.

    It has the interface of StagedState. In its PackedState, `params` has a dim over the versions of the weights after
    the one over devices.

    Attributes:
      staged: distribution of the newest weights and the optimizer state.
      layouts: as in StagedState.
      packed_layouts: as in StagedState.
      packed: layout of the whole state.
    """

    def __init__(self, staged: StagedState, lowered: LoweredTable, engine: PipelineEngine, microbatches: Batch):
        """Plan the state.

        Args:
          staged: distribution of a state without versions.
          lowered: the periodic table.
          engine: the engine that runs the table.
          microbatches: shapes of the microbatches of a replica's shard of one batch, [m, B, ..].
        """
        self.staged, self._shape = staged, lowered.shape
        # By device: the number of batches that have entered since the one whose gradient was applied last.
        self._age_of_update = np.asarray(lowered.arrays.updates).max(axis=1)
        axes = staged.packed.axes
        num_earlier = (lowered.shape.num_batches - 1) * lowered.shape.num_microbatches
        carried = jax.eval_shape(engine.start)
        earlier = {name: jax.ShapeDtypeStruct((num_earlier, *x.shape[1:]), x.dtype) for name, x in microbatches.items()}
        self.in_flight = WorkInFlight(
            layout.replicated(axes, jax.ShapeDtypeStruct((), jnp.int32)),
            staged.private,
            layout.per_replica(axes, {name: getattr(carried, name) for name in BUFFERS}, STAGE, DATA),
            layout.per_replica(axes, earlier if num_earlier else {}, DATA),
        )
        versions = [
            jax.ShapeDtypeStruct((max(lowered.shape.num_versions), *array.shape), array.dtype)
            for array in staged.params.packing.shapes
        ]
        self.versions = layout.per_replica(axes, tuple(versions), STAGE)
        joined = layout.join(self.in_flight)
        self.layouts = staged.layouts._replace(private=joined)
        self.packed_layouts = staged.packed_layouts._replace(params=self.versions, private=joined)
        self.packed = layout.join(self.packed_layouts)

    @property
    def memory(self) -> Mapping[str, Layout]:
        """Layouts of the state by purpose, for `state_memory`, except stashes and transfers."""
        return {
            **self.packed_layouts._replace(private=self.staged.private)._asdict(),
            "gradients": Layout(self.packed.axes, self.in_flight.buffers.leaves["grads"]),
            "batches": self.in_flight.batches,
        }

    def init(self, key: jax.Array, mesh: Mesh) -> PackedState:
        """Return the state at step 0. The pipeline is empty."""
        return self._begin(mesh)(self.staged.init(key, mesh))

    def distribute(self, state: State, private: Canonical | None, mesh: Mesh) -> PackedState:
        """Distribute a canonical state over the mesh.

        Args:
          state: the canonical state.
          private: what `private_state` returned; None or empty: the pipeline is empty.
          mesh: the mesh.
        """
        fresh = self._begin(mesh)(self.staged.distribute(state, None, mesh))
        if not private:
            return fresh
        like = self._private_parts(fresh)
        placed = jax.device_put(serialization.from_state_dict(like, private), jax.tree.map(lambda x: x.sharding, like))
        return fresh._replace(params=placed["versions"], optimizer=placed["optimizer"], private=placed["in_flight"])

    def private_state(self, state: PackedState) -> Canonical:
        """Return the private state: the canonical state lacks earlier versions, and what is in flight.

        It has the whole optimizer state too, because the optimizer's counters differ between stages.
        """
        parts: Canonical = serialization.to_state_dict(self._private_parts(state))
        return parts

    def gather(self, state: PackedState) -> State:
        """Return the canonical state of the newest weights, as NumPy arrays."""
        return self.staged.gather(self.newest(state))

    def newest(self, state: PackedState) -> PackedState:
        """Return the state with the newest weights alone, in the form of StagedState."""
        [mesh] = {array.sharding.mesh for array in state.params}
        return state._replace(params=self._take_newest(mesh)(state.params, state.private.num_entered), private=())

    def _private_parts(self, state: PackedState) -> dict[str, Any]:
        return {"versions": state.params, "optimizer": state.optimizer, "in_flight": state.private}

    @functools.cache  # noqa: B019 - a plan has one state, and it lives as long as the plan
    def _begin(self, mesh: Mesh) -> Callable[[PackedState], PackedState]:
        """Return the function that adds versions and an empty pipeline to a state of StagedState."""

        def begin(state: PackedState) -> PackedState:
            params = tuple(
                jnp.broadcast_to(x[:, None], like.shape)
                for x, like in zip(state.params, self.versions.shapes, strict=True)
            )
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.packed_layouts.private.shapes)
            return state._replace(params=params, private=zeros._replace(residuals=state.private))

        return jax.jit(begin, out_shardings=self.packed.shardings(mesh))

    @functools.cache  # noqa: B019
    def _take_newest(self, mesh: Mesh) -> Callable[[Packed, jax.Array], Packed]:
        def take(versions: Packed, num_entered: jax.Array) -> Packed:
            versions = self.versions.local(versions)
            slot = self.newest_slot(jax.lax.axis_index(STAGE), num_entered)
            newest = tuple(jax.lax.dynamic_index_in_dim(x, slot, 0, keepdims=False) for x in versions)
            out: Packed = self.staged.params.packed.out(newest)
            return out

        specs = {"in_specs": (self.versions.specs, PartitionSpec()), "out_specs": self.staged.params.packed.specs}
        return jax.jit(jax.shard_map(take, mesh=mesh, check_vma=False, **specs))

    def newest_slot(self, device: jax.Array, num_entered: jax.Array) -> jax.Array:
        """Return the slot of the newest version between two steps. num_entered: batches that have entered so far."""
        kept, age = jnp.asarray(self._shape.num_versions)[device], jnp.asarray(self._age_of_update)[device]
        return version_slot(num_entered - age, kept)


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
        device, num_entered = jax.lax.axis_index(STAGE), in_flight.num_entered
        # 1. The batch enters the pipeline; earlier ones follow it.
        entering = steps.microbatches(batch, shape.num_microbatches)
        microbatches = {
            name: jnp.concatenate([x, in_flight.batches[name]]) if in_flight.batches else x
            for name, x in entering.items()
        }
        batches = split_batches(state, microbatches, shape)
        engine = make_engine(staged, shape, entering, steps.dropout_key(state.key, state.step), remat, timeline)
        # 2. to 7. Continue with what is in flight, and update each stage when its gradient is complete.
        zero = jnp.zeros(())
        start = engine.start()._replace(
            **in_flight.buffers, weights=Weights(state.params, state.optimizer, in_flight.residuals, zero, zero)
        )
        update = StageUpdate(staged, device)
        now = arrays_at_step(shape, arrays, device, num_entered)
        end = engine.run(now, read_version, batches, start, partial(update_stage, staged, shape, update, state))
        weights: Weights = end.weights
        sums, nonfinite = psum_small((end.sums, weights.nonfinite), (DATA, STAGE))
        grad_norm = jnp.sqrt(jax.lax.psum(update.counted(weights.squared_norm), STAGE))
        metrics = Metrics(sums, grad_norm, (nonfinite == 0) & jnp.isfinite(sums.loss))
        kept = (
            {name: x[: len(in_flight.batches[name])] for name, x in microbatches.items()} if in_flight.batches else {}
        )
        buffers = {name: getattr(end, name) for name in BUFFERS}
        private = WorkInFlight(num_entered + 1, weights.residuals, buffers, kept)
        after = PackedState(state.step + 1, state.key, weights.versions, weights.optimizer, private)
        return state_of.packed.out(after), metrics

    return step


def split_batches(state: PackedState, microbatches: Batch, shape: TableShape) -> StepBatches:
    """Return the batches of a step, with their dropout keys and the divisors of their losses."""
    keys = jax.vmap(lambda age: steps.dropout_key(state.key, state.step - age))(jnp.arange(shape.num_batches))
    weights = microbatches["weights"].reshape(shape.num_batches, -1).sum(axis=1)
    return StepBatches(microbatches, keys, jax.lax.pmean(weights, DATA))


def read_version(weights: Weights, slot: jax.Array) -> Packed:
    """Return the version of the parameters in a slot."""
    return tuple(jax.lax.dynamic_index_in_dim(x, slot, 0, keepdims=False) for x in weights.versions)


def update_stage(
    staged: StagedState, shape: TableShape, update: StageUpdate, before: PackedState, carry: Carry, age: jax.Array
) -> Carry:
    """Run the update of a clock, if the table has one.

    Args:
      staged: distribution of the state.
      shape: shape of the table.
      update: the optimizer step.
      before: the state before the step, in local form.
      carry: what the device carries.
      age: entry of TableArrays.updates.
    """
    kept = jnp.asarray(shape.num_versions)[jax.lax.axis_index(STAGE)]
    version = before.private.num_entered - age

    def apply(accumulated: Packed, weights: Weights) -> tuple[Packed, Weights]:
        grads = update.over_replicas(accumulated)
        nonfinite = jax.lax.psum(steps.nonfinite_count(grads), DATA)
        if staged.all_reduce.clip_norm:
            grads = clipped(grads, optax.tree.norm(grads), staged.all_reduce.clip_norm)
        grads, residuals = staged.all_reduce.mean(grads, weights.residuals)
        norm = optax.tree.norm(grads)
        newest = read_version(weights, version_slot(version, kept))
        state = PackedState(before.step, before.key, newest, weights.optimizer)
        zeros = staged.problem.task.zeros()
        after, metrics = update(state, grads, zeros, jnp.where(nonfinite == 0, norm, jnp.nan))
        residuals = jax.tree.map(lambda new, old: jnp.where(metrics.finite, new, old), residuals, weights.residuals)
        slot = version_slot(version + 1, kept)
        versions = tuple(
            jax.lax.dynamic_update_index_in_dim(x, new, slot, 0)
            for x, new in zip(weights.versions, after.params, strict=True)
        )
        nonfinite = jnp.maximum(weights.nonfinite, 1.0 - metrics.finite)
        weights = Weights(versions, after.optimizer, residuals, jnp.square(norm), nonfinite)
        return jax.tree.map(jnp.zeros_like, accumulated), weights

    with jax.named_scope(UPDATE):
        grads, weights = jax.lax.cond(age == NONE, lambda *x: x, apply, carry.grads, carry.weights)
    carry = carry._replace(grads=grads, weights=weights)
    if staged.packed.axes[DATA] == 1 and not staged.stages.groups:
        return carry
    # On the CPU, nothing orders collectives inside a branch relative to those outside of it, so devices could deadlock.
    # To order the transfers at the end of the clock after those of the update, make them depend on its result.
    is_done = carry.weights.nonfinite >= 0  # always true
    activation, gradient = jax.tree.map(
        lambda x: jnp.where(is_done, x, jnp.zeros_like(x)), (carry.activation, carry.gradient)
    )
    return carry._replace(activation=activation, gradient=gradient)


def update_branches(shape: TableShape, num_clocks: int) -> dict[str, tuple[float, ...]]:
    """Return the fraction of clocks in which a device takes each branch of the update, for `CompiledProgram`."""
    return {UPDATE: (1 / num_clocks, 1 - 1 / num_clocks)} if shape.num_versions else {}


def padded(batch: Mapping[str, np.ndarray], like: Batch) -> dict[str, np.ndarray]:
    """Pad a batch with zeros to the shapes of the longest batch, because all batches in flight have the same shape.

    The mask or the weights of the padding are zero, so it changes nothing.
    """

    def pad(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return np.pad(x, [(0, 0), *((0, size - have) for size, have in zip(shape[1:], x.shape[1:], strict=True))])

    return {name: pad(x, like[name].shape) for name, x in batch.items()}
