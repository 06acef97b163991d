"""Mitigations of staleness: transformations as in optax, which compose by `optax.chain`.

Of a gradient, before the optimizer: update(grads, state, params, staleness=, read=), `params` being the weights that
it is applied to and `read` those that it was computed from. Of an update, after the optimizer: update(updates, state,
params, staleness=). `corrected_momentum` is an optimizer in the place of another.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar.layout import Tree


class Mitigations(NamedTuple):
    """The mitigations of a run.

    Attributes:
      gradients: transformation of gradients, before the optimizer.
      updates: transformation of updates, after the optimizer.
      needs_read: whether `gradients` takes the weights that a gradient was computed from.
    """

    gradients: optax.GradientTransformationExtraArgs
    updates: optax.GradientTransformationExtraArgs
    needs_read: bool

    def init(self, params: Tree) -> tuple[Tree, Tree]:
        """Return the states of both."""
        return self.gradients.init(params), self.updates.init(params)


def dc_asgd(strength: float) -> optax.GradientTransformationExtraArgs:
    """g + lambda g g (w - w_read): the gradient at w, to first order, with g g for the Hessian.

    Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017, equation 10.
    """

    def update(grads: Tree, state: Tree, params: Tree = None, *, read: Tree, **_rest: Any) -> tuple[Tree, Tree]:
        return jax.tree.map(lambda g, w, r: g + strength * g * g * (w - r), grads, params, read), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def adaptive_dc_asgd(strength: float, decay: float = 0.95) -> optax.GradientTransformationExtraArgs:
    """dc_asgd with lambda / sqrt(the running mean of g g + 1e-7) for each element.

    Zheng et al., 2017, section 5: DC-ASGD-a.
    """

    def update(grads: Tree, state: Tree, params: Tree = None, *, read: Tree, **_rest: Any) -> tuple[Tree, Tree]:
        squares = jax.tree.map(lambda s, g: decay * s + (1 - decay) * g * g, state, grads)

        def corrected(g: jax.Array, s: jax.Array, w: jax.Array, r: jax.Array) -> jax.Array:
            return g + strength / jnp.sqrt(s + 1e-7) * g * g * (w - r)

        return jax.tree.map(corrected, grads, squares, params, read), squares

    return optax.GradientTransformationExtraArgs(optax.tree.zeros_like, update)


def clip_by_staleness(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Clip gradients by their global norm to max_norm / max(staleness, 1)."""

    def update(
        grads: Tree, state: Tree, _params: Tree = None, *, staleness: jax.Array, **_rest: Any
    ) -> tuple[Tree, Tree]:
        limit, norm = max_norm / jnp.maximum(staleness, 1), optax.tree.norm(grads)
        return jax.tree.map(lambda g: jnp.where(norm < limit, g, g / norm * limit), grads), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def staleness_aware() -> optax.GradientTransformationExtraArgs:
    """The learning rate divided by max(staleness, 1); of an update of several gradients, by that of their mean.

    Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", 2016, section 3.
    """

    def update(
        updates: Tree, state: Tree, _params: Tree = None, *, staleness: jax.Array, **_rest: Any
    ) -> tuple[Tree, Tree]:
        return jax.tree.map(lambda u: u / jnp.maximum(staleness, 1).astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def corrected_momentum(
    optimizer: Callable[[float], optax.GradientTransformation], momentum: float, mean_staleness: float
) -> optax.GradientTransformation:
    """An optimizer whose momentum leaves room for what staleness adds to it.

    Args:
      optimizer: by its momentum, as `optax.lion` is by b1.
      momentum: asked for in all.
      mean_staleness: of its updates.
    """
    left = momentum_left(momentum, mean_staleness)
    return optimizer(max(left, 1e-6))  # without any, the state of an optimizer would have another form


def momentum_left(momentum: float, mean_staleness: float) -> float:
    """The momentum with which asynchronous updates have about the momentum asked for in all.

    Updates that are stale by n - 1 on average act as if there were a momentum of 1 - 1/n (Mitliagkas et al.,
    "Asynchrony begets Momentum, with an Application to Deep Learning", 2016, theorem 2); what is left of the one asked
    for is m with 1 - momentum = (1 - m) / n, or none.
    """
    return max(0.0, 1 - (1 - momentum) * (1 + mean_staleness))
