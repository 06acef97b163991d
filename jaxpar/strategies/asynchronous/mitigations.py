"""Mitigations of staleness: optax transformations, which compose by `optax.chain`.

Transformations of a gradient run before the optimizer: update(grads, state, params, staleness=, read=, mean_share=),
where `params` are the weights that the gradient is applied to and `read` those that it was computed from.
Transformations of an update run after the optimizer: update(updates, state, params, mean_share=). `mean_share` is the
mean of 1 / max(staleness, 1) over the gradients of the update. `corrected_momentum` replaces the optimizer.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar.layout import Tree


class Mitigations(NamedTuple):
    """The mitigations of a run."""

    gradients: optax.GradientTransformationExtraArgs  # transformation of gradients, before the optimizer
    updates: optax.GradientTransformationExtraArgs  # transformation of updates, after the optimizer
    needs_read: bool  # whether `gradients` needs the weights that a gradient was computed from

    def init(self, params: Tree) -> tuple[Tree, Tree]:
        """Return the initial states of both."""
        return self.gradients.init(params), self.updates.init(params)


def _stateless(update: Callable[..., Tree]) -> optax.GradientTransformationExtraArgs:
    """Return the transformation that maps gradients or updates to update(them, params, **details)."""

    def with_state(grads: Tree, state: Tree, params: Tree = None, **details: Any) -> tuple[Tree, Tree]:
        return update(grads, params, **details), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, with_state)


def dc_asgd(strength: float) -> optax.GradientTransformationExtraArgs:
    """Return g + lambda g g (w - w_read): the gradient at w, to first order, with g g in place of the Hessian.

    Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017, equation 10.
    """

    def compensated(grads: Tree, params: Tree, *, read: Tree, **_rest: Any) -> Tree:
        return jax.tree.map(lambda g, w, r: g + strength * g * g * (w - r), grads, params, read)

    return _stateless(compensated)


def adaptive_dc_asgd(strength: float) -> optax.GradientTransformationExtraArgs:
    """Return dc_asgd with lambda / sqrt(the running mean of g g + 1e-7), element by element.

    Zheng et al., 2017, section 5: DC-ASGD-a.
    """

    def update(grads: Tree, state: Tree, params: Tree = None, *, read: Tree, **_rest: Any) -> tuple[Tree, Tree]:
        squares = jax.tree.map(lambda s, g: 0.95 * s + (1 - 0.95) * g * g, state, grads)

        def corrected(g: jax.Array, s: jax.Array, w: jax.Array, r: jax.Array) -> jax.Array:
            return g + strength / jnp.sqrt(s + 1e-7) * g * g * (w - r)

        return jax.tree.map(corrected, grads, squares, params, read), squares

    return optax.GradientTransformationExtraArgs(optax.tree.zeros_like, update)


def clip_by_staleness(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Clip gradients by their global norm to max_norm / max(staleness, 1)."""

    def clipped(grads: Tree, _params: Tree, *, staleness: jax.Array, **_rest: Any) -> Tree:
        limit, norm = max_norm / jnp.maximum(staleness, 1), optax.tree.norm(grads)
        return jax.tree.map(lambda g: jnp.where(norm < limit, g, g / norm * limit), grads)

    return _stateless(clipped)


def staleness_aware() -> tuple[optax.GradientTransformationExtraArgs, optax.GradientTransformationExtraArgs]:
    """Return transformations of gradients and updates that divide a gradient's learning rate by max(staleness, 1).

    The first weights the gradients of an update by 1 / max(staleness, 1), relative to their mean weight. The second
    multiplies the update by that mean weight, after the optimizer, because optimizers such as Adam would cancel it.

    Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", 2016, section 3. With SGD, an update of c
    gradients is rate / c * sum(gradient / max(staleness, 1)), as there.
    """

    def weighted(grads: Tree, _params: Tree, *, staleness: jax.Array, mean_share: jax.Array, **_rest: Any) -> Tree:
        weight = 1 / jnp.maximum(staleness, 1) / mean_share
        return jax.tree.map(lambda g: g * weight.astype(g.dtype), grads)

    def scaled(updates: Tree, _params: Tree, *, mean_share: jax.Array, **_rest: Any) -> Tree:
        return jax.tree.map(lambda u: u * mean_share.astype(u.dtype), updates)

    return _stateless(weighted), _stateless(scaled)


def corrected_momentum(
    optimizer: Callable[..., optax.GradientTransformation], momenta: Mapping[str, float], mean_staleness: float
) -> optax.GradientTransformation:
    """Return the optimizer with its momentum reduced by the momentum that staleness adds.

    optimizer: builds it from keyword arguments; `partial(optax.lion, rate)`, for example. momenta: the total momentum
    wanted, by the argument that sets it. Optimizers that treat parameters differently, such as Muon, have several.
    """
    # with a momentum of 0, the optimizer state would have another structure
    left = {key: max(momentum_left(momentum, mean_staleness), 1e-6) for key, momentum in momenta.items()}
    return optimizer(**left)


def momentum_left(momentum: float, mean_staleness: float) -> float:
    """Return the momentum to configure, so that asynchronous updates have about the total momentum wanted.

    Updates with a mean staleness of n - 1 act as if there were a momentum of 1 - 1/n (Mitliagkas et al., "Asynchrony
    begets Momentum, with an Application to Deep Learning", 2016, theorem 2). The result is the m with
    1 - momentum = (1 - m) / n, or 0 if that m is negative.
    """
    return max(0.0, 1 - (1 - momentum) * (1 + mean_staleness))
