"""Ring buffers of periodic tables: the slots of microbatches and of versions of the weights in any step."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.strategies.pipeline.executor.lowering import (
    INBOXES,
    NONE,
    Actions,
    Arrivals,
    Buffer,
    TableArrays,
    TableShape,
)


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
