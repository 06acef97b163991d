"""Scaling of the loss in float16, in which small gradients would become 0 and large ones infinite.

The loss is multiplied by a scale, and the gradients, which are float32, are divided by it before anything reads them.
The scale is halved when a gradient is not finite, in which case there is no update, and doubled after many updates in a
row (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2). It is a power of 2, so that it changes no
digit. It is a part of the optimizer state, which every checkpoint has.
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

FIRST_SCALE, LEAST_SCALE, MOST_SCALE = 2.0**15, 1.0, 2.0**24
UPDATES_AT_A_SCALE = 2000  # updates in a row after which the scale is doubled


AVOID_NONFINITE = "lower config.optimizer.lr"
AVOID_OVERFLOW = f"set config.model.dtype to bfloat16 or float32 (float16 overflows above 65,504), {AVOID_NONFINITE}"


class LossScale(NamedTuple):
    """The scale of the next step, and the number of updates since it changed; scalars."""

    scale: jax.Array
    updates: jax.Array


def with_loss_scale(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with a scale in its state, for gradients that are already divided by it."""

    def init(_params: Any) -> LossScale:
        return LossScale(jnp.float32(FIRST_SCALE), jnp.int32(0))

    kept = optax.GradientTransformation(init, lambda grads, state, _params=None: (grads, state))
    return optax.chain(kept, optimizer)


def find_scale(optimizer: Any) -> LossScale | None:
    """Return the scale in an optimizer state; None if it has none."""
    leaves = jax.tree.leaves(optimizer, is_leaf=_is_scale)
    return next((leaf for leaf in leaves if _is_scale(leaf)), None)


def unscaled(grads: Any, scale: jax.Array | None) -> Any:
    """Return the gradients of a loss that was multiplied by a scale, divided by it; None: there is no scale."""
    return grads if scale is None else jax.tree.map(lambda g: g / scale, grads)


def after_step(scaling: LossScale, is_finite: jax.Array, used: jax.Array) -> LossScale:
    """Return the scale after gradients that are finite, or are not.

    used: what the loss was multiplied by. It is another scale if this one has changed since the loss was computed.
    """
    scale, updates = scaling.scale, scaling.updates + 1
    is_due = updates >= UPDATES_AT_A_SCALE
    larger = jnp.where(is_due, jnp.minimum(2 * scale, MOST_SCALE), scale)
    smaller = jnp.maximum(jnp.minimum(scale, used / 2), LEAST_SCALE)
    return LossScale(jnp.where(is_finite, larger, smaller), jnp.where(is_finite & ~is_due, updates, 0))


def with_scale(optimizer: Any, scaling: LossScale) -> Any:
    """Return an optimizer state with another scale."""
    return jax.tree.map(lambda node: scaling if _is_scale(node) else node, optimizer, is_leaf=_is_scale)


def least_scale(scalings: Sequence[Any]) -> Any:
    """Return the smallest of several scales, which are of one optimizer in several places, and number of updates."""
    return reduce(partial(jax.tree.map, jnp.minimum), scalings)


def _is_scale(node: Any) -> bool:
    return isinstance(node, LossScale)
