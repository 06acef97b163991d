"""The training step of pipelines that never drain.

Their tables are periodic (jaxpar/strategies/pipeline/tables/periodic.py): a step runs the clocks of one period, in
which a batch enters, and every stage works on the batches that are in flight (continuous_state.py).

The update of a stage is an action of the table, U. At the end of a clock with a U, the stage exchanges its gradient
with its replicas and takes an optimizer step, while other stages are at other batches. So nothing can be computed over
all stages: the gradient norm, which clips the gradient, is that of the stage, a gradient that is not finite skips the
update of its stage, and arrays on different stages cannot be tied.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.core import step as steps
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.step import Metrics
from jaxpar.exchange.clip import clipped
from jaxpar.exchange.reduce import psum_small
from jaxpar.models.model import Batch
from jaxpar.strategies.pipeline.executor.continuous_state import (
    BUFFERS,
    ContinuousState,
    WorkInFlight,
    arrays_at_step,
    version_slot,
)
from jaxpar.strategies.pipeline.executor.engine import Carry, StepBatches, make_engine
from jaxpar.strategies.pipeline.executor.lowering import NONE, TableArrays, TableShape
from jaxpar.strategies.pipeline.executor.packing import Packed
from jaxpar.strategies.pipeline.executor.state import PackedState, StagedState, StageUpdate
from jaxpar.strategies.pipeline.executor.timeline import ActionNumbers, Timeline
from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS, U

UPDATE = "update"  # name of the loops in which stages are updated


class Weights(NamedTuple):
    """The values that the update of a stage changes, on one device."""

    versions: Packed  # the versions of the parameters, packed, with a leading dim over the versions
    optimizer: Packed  # state of the optimizer, packed
    residuals: Any  # private state of the gradient exchange
    squared_norm: jax.Array  # sum of the squared gradient of the last update
    nonfinite: jax.Array  # 1.0 if the gradient of an update in this step was not finite, otherwise 0.0


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
        end = engine.run(
            now, read_version, batches, start, partial(update_stage, staged, shape, update, state, timeline)
        )
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
    staged: StagedState,
    shape: TableShape,
    update: StageUpdate,
    before: PackedState,
    timeline: Timeline | None,
    carry: Carry,
    age: jax.Array,
) -> Carry:
    """Run the update of a clock, if the table has one.

    Args:
      staged: distribution of the state.
      shape: shape of the table.
      update: the optimizer step.
      before: the state before the step, in local form.
      timeline: measures the update; None: no measurement.
      carry: what the device carries.
      age: entry of TableArrays.updates.
    """

    def apply(_: jax.Array, values: tuple[Packed, Weights]) -> tuple[Packed, Weights]:
        of_action = ActionNumbers(ACTION_KINDS[U].phase, (age + 1) * shape.num_microbatches - 1, 0)
        if timeline is not None:
            values = timeline.begin(of_action, values)
        accumulated, weights = values
        weights = updated_weights(staged, shape, update, before, accumulated, weights, age)
        values = jax.tree.map(jnp.zeros_like, accumulated), weights
        if timeline is not None:
            values = timeline.end(of_action, values)
        return values

    has_update = age != NONE
    with jax.named_scope(UPDATE):
        # A loop with at most one iteration: XLA copies all weights in the empty branch of a conditional.
        grads, weights = jax.lax.fori_loop(0, jnp.where(has_update, 1, 0), apply, (carry.grads, carry.weights))
    carry = carry._replace(grads=grads, weights=weights)
    has_collectives = staged.packed.axes[DATA] > 1 or bool(staged.stages.groups)
    if not has_collectives:
        return carry
    # On the CPU, nothing orders collectives inside a loop relative to those outside of it, so devices could deadlock.
    # So the transfers at the end of the clock must start after those of the update.
    activation, gradient = computed_after(weights.nonfinite, (carry.activation, carry.gradient))
    return carry._replace(activation=activation, gradient=gradient)


def updated_weights(
    staged: StagedState,
    shape: TableShape,
    update: StageUpdate,
    before: PackedState,
    accumulated: Packed,
    weights: Weights,
    age: jax.Array,
) -> Weights:
    """Exchange the gradient of a batch with the replicas of the stage, and write the next version of the weights.

    Args:
      staged: distribution of the state.
      shape: shape of the table.
      update: the optimizer step.
      before: the state before the step, in local form.
      accumulated: the gradient of the batch on this device.
      weights: the weights before the update.
      age: number of batches that have entered since this one.
    """
    kept = jnp.asarray(shape.num_versions)[jax.lax.axis_index(STAGE)]
    version = before.private.num_entered - age
    # 1. Exchange the gradient. A compressor may hide infinities and NaNs, so count them before.
    grads = update.over_replicas(accumulated)
    nonfinite_count = jax.lax.psum(steps.nonfinite_count(grads), DATA)
    if staged.all_reduce.clip_norm:
        grads = clipped(grads, optax.tree.norm(grads), staged.all_reduce.clip_norm)
    grads, residuals = staged.all_reduce.mean(grads, weights.residuals)
    # 2. Take the optimizer step from the newest version. With a gradient norm of NaN it keeps that version.
    norm = optax.tree.norm(grads)
    newest = read_version(weights, version_slot(version, kept))
    state = PackedState(before.step - age, before.key, newest, weights.optimizer)  # the learning rate is the batch's
    checked_norm = jnp.where(nonfinite_count == 0, norm, jnp.nan)
    after, metrics = update(state, grads, staged.problem.task.zeros(), checked_norm)
    # 3. Write the version that follows it.
    slot = version_slot(version + 1, kept)
    versions = tuple(
        jax.lax.dynamic_update_index_in_dim(x, new, slot, 0)
        for x, new in zip(weights.versions, after.params, strict=True)
    )
    residuals = jax.tree.map(lambda new, old: jnp.where(metrics.finite, new, old), residuals, weights.residuals)
    nonfinite = jnp.maximum(weights.nonfinite, 1.0 - metrics.finite)
    return Weights(versions, after.optimizer, residuals, jnp.square(norm), nonfinite)


def computed_after(flag: jax.Array, values: Any) -> Any:
    """Return the values, which depend on `flag` now, so that nothing can use them before it is known.

    flag: a number that is at least 0. The compiler does not know this, so it cannot remove the dependence.
    """
    return jax.tree.map(lambda x: jnp.where(flag >= 0, x, jnp.zeros_like(x)), values)


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
