"""The state of pipelines that never drain: the state of a pipeline, and what is in flight between two steps.

In flight are stashes, inboxes, gradients, the batches themselves, and earlier versions of the weights, which their
backwards need. They are in ring buffers, with slots for microbatches and for versions of the weights. The newest
weights of each stage and its optimizer state are the canonical state.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax.sharding import Mesh, PartitionSpec

from jaxpar import layout
from jaxpar.core.mesh import DATA, STAGE
from jaxpar.core.state import Canonical, State
from jaxpar.layout import Layout
from jaxpar.models.model import Batch
from jaxpar.strategies.pipeline.executor.engine import PipelineEngine
from jaxpar.strategies.pipeline.executor.lowering import (
    INBOXES,
    NONE,
    Actions,
    Arrivals,
    Buffer,
    LoweredTable,
    TableArrays,
    TableShape,
)
from jaxpar.strategies.pipeline.executor.packing import Packed
from jaxpar.strategies.pipeline.executor.state import PackedState, StagedState


def arrays_at_step(shape: TableShape, arrays: TableArrays, device: jax.Array, num_entered: jax.Array) -> TableArrays:
    """Return the arrays of a device for one step of a periodic table.

    Actions on batches before the first one are left out.

    Args:
      shape: shape of the table.
      arrays: the device's part of the arrays, over clocks.
      device: index of the device.
      num_entered: number of batches that entered the pipeline before this step.
    """
    sizes, m = dict(shape.num_slots), shape.num_microbatches
    num_versions, num_own = (jnp.asarray(of_devices)[device] for of_devices in (shape.num_versions, shape.num_own))

    def slot(first: Any, buffer: Buffer) -> Any:
        return (
            jnp.where(first == NONE, NONE, (first + num_own * num_entered) % sizes[buffer])
            if buffer in sizes
            else first
        )

    def of_phase(phase: int, now: Actions) -> Actions:
        has_begun = now.microbatch // m <= num_entered
        inbox, local = (slot(array, INBOXES[phase]) for array in (now.inbox, now.local_inbox))
        return now._replace(
            chunk=jnp.where(has_begun, now.chunk, NONE),
            inbox=inbox,
            stash={stash: slot(array, stash) for stash, array in now.stash.items()},
            local_inbox=local,
            version=version_slot(num_entered - now.version, num_versions),
        )

    actions = tuple(of_phase(phase, now) for phase, now in enumerate(arrays.actions))
    arrivals = tuple(
        Arrivals(*(slot(array, inbox) for array, inbox in zip(arrival, INBOXES, strict=True)))
        for arrival in arrays.arrivals
    )
    return TableArrays(actions, arrivals, jnp.where(arrays.updates > num_entered, NONE, arrays.updates))


def version_slot(version: jax.Array, num_versions: jax.Array) -> jax.Array:
    """Return the slot of a version of the weights on a device that keeps `num_versions`. There is none before 0."""
    return jnp.maximum(version, 0) % num_versions


class WorkInFlight(NamedTuple):
    """The private state: what is in flight between two steps."""

    num_entered: Any  # the number of batches that have entered the pipeline since it was empty
    residuals: Any  # private state of the gradient exchange
    buffers: Any  # the fields of `Carry` that hold values of batches in flight
    batches: Any  # the microbatches of the batches in flight, the latest batch first; empty if there are none


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
