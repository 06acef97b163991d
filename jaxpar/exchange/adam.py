"""Adam whose momentum is what replicas exchange: 1-bit Adam and QAdam.

Compression loses of the gradient what Adam needs, as Adam is not linear. But once the second moment v is frozen, Adam
is momentum descent with a fixed step for each parameter, and momentum can be compressed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.exchange.exchange import DistributedState, Exchange, ExchangeUpdate, shared
from jaxpar.exchange.fuse import AllReduce
from jaxpar.layout import Tree
from jaxpar.plan import Traffic

WARMUP = "warmup"  # names the branch in compiled programs


def momentum_exchange(
    exact: AllReduce,
    lossy: AllReduce,
    optimizer: optax.GradientTransformation,
    *,
    schedule: optax.Schedule,
    b1: float,
    b2: float,
    eps: float,
    num_steps: int,
    warmup: float,
    weight_decay: float = 0.0,
    mask: Callable[[Tree], Tree] | None = None,
    clip_norm: float = 0.0,
) -> Exchange:
    """Put an exchange of momentum around optax.adamw: after a share of the steps v is frozen, and m is exchanged.

    In the first stage replicas agree on the gradient, exactly. In the second each makes a momentum of its own gradient,
    m_i = b1 m + (1 - b1) g_i, and `lossy` makes m of them. What is frozen is v without its bias, so that Adam can go on
    with the state at any step. A parameter whose v is zero has had no gradient, and its momentum is zero: what
    compression makes of it is noise, which nothing would bound. The warm-up counts from the step at which the run takes
    on the exchange.

    With error feedback on both sides and a scale |x|_2 / sqrt(d): 1-bit Adam (Tang et al., 2021, algorithm 1). With
    MinMaxUInt8 and none: QAdam as in Bagua (Gan et al., 2021).

    Args:
      exact: of gradients.
      lossy: of momentum.
      optimizer: optax.adamw of the arguments below. Its state is this one's: either continues from the other's.
      schedule: step -> learning rate.
      b1: of m.
      b2: of v.
      eps: added to the root of v.
      num_steps: of the run.
      warmup: share of them until v is frozen.
      weight_decay: as optax.adamw's.
      mask: as optax.adamw's: params -> tree of booleans.
      clip_norm: in the second stage, of each replica's own gradient; 0: none.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    warmup_steps = max(1, round(warmup * num_steps))  # without any, v would be zero for ever

    def init(params: Tree) -> DistributedState:
        private = {"exact": exact.init(params), "lossy": lossy.init(params), "steps": jnp.zeros((), jnp.int32)}
        return DistributedState(optimizer.init(params), private)

    def warm(grads: Tree, state: DistributedState, params: Tree) -> tuple[Tree, DistributedState]:
        mean, exact_state = exact.mean(grads, state.private["exact"])
        updates, inner = optimizer.update(mean, state.optimizer, params, grad_norm=optax.tree.norm(mean))
        return updates, DistributedState(inner, {**state.private, "exact": exact_state})

    def frozen(grads: Tree, state: DistributedState, params: Tree) -> tuple[Tree, DistributedState]:
        adam: optax.ScaleByAdamState = _only(state.optimizer, optax.ScaleByAdamState)
        scale = clip_scale(optax.tree.norm(grads), clip_norm)
        local = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * scale * g, adam.mu, grads)
        mean, lossy_state = lossy.mean(local, state.private["lossy"])
        after, direction = frozen_adam(adam, mean, b1=b1, b2=b2, eps=eps)
        decayed = jax.tree.map(lambda _p: True, params) if mask is None else mask(params)
        rate = schedule(adam.count)
        updates = jax.tree.map(
            lambda d, p, is_decayed: -rate * (d + weight_decay * p * is_decayed), direction, params, decayed
        )
        inner = _next(state.optimizer, after)
        return updates, DistributedState(inner, {**state.private, "lossy": lossy_state})

    def update(grads: Tree, state: DistributedState, params: Tree, **_extra: Any) -> ExchangeUpdate:
        with jax.named_scope(WARMUP):
            is_warm = state.private["steps"] < warmup_steps
            updates, after = jax.lax.cond(is_warm, warm, frozen, grads, state, params)
        private = {**after.private, "steps": state.private["steps"] + 1}
        return ExchangeUpdate(updates, after._replace(private=private), None)

    def traffic(params: Tree, _num_microbatches: int) -> list[Traffic]:
        return shared(exact.traffic(params), share) + shared(lossy.traffic(params), 1 - share)

    share = min(1.0, warmup_steps / num_steps)
    return Exchange(init, update, traffic, branches={WARMUP: (1 - share, share)})


def frozen_adam(
    adam: optax.ScaleByAdamState, momentum: Tree, *, b1: float, b2: float, eps: float
) -> tuple[optax.ScaleByAdamState, Tree]:
    """Return Adam's next state with this momentum and v as it is, without its bias; and the direction of the step."""
    count = adam.count + 1
    mu = jax.tree.map(lambda m, v: jnp.where(v > 0, m, 0), momentum, adam.nu)
    growth = (1 - b2**count) / (1 - b2**adam.count)  # so that v without its bias stays the same
    nu = jax.tree.map(lambda v: v * growth, adam.nu)
    direction = jax.tree.map(lambda m, v: m / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + eps), mu, nu)
    return optax.ScaleByAdamState(count, mu, nu), direction


def clip_scale(norm: jax.Array, clip_norm: float) -> jax.Array:
    """The factor that makes a gradient of this norm one of clip_norm, where it is longer."""
    return jnp.where(norm > clip_norm, clip_norm / norm, 1.0) if clip_norm else jnp.ones(())


def _only(state: Tree, kind: type) -> Tree:
    """The node of that type in an optimizer's state."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    matches = [node for node in nodes if isinstance(node, kind)]
    assert len(matches) == 1, (kind, len(matches))
    return matches[0]


def _next(state: Tree, adam: optax.ScaleByAdamState) -> Tree:
    """An adamw state, one step on, with another state of Adam in it."""

    def node(old: Tree) -> Tree:
        if isinstance(old, optax.ScaleByAdamState):
            return adam
        return optax.ScaleByScheduleState(old.count + 1) if isinstance(old, optax.ScaleByScheduleState) else old

    kinds = (optax.ScaleByAdamState, optax.ScaleByScheduleState)
    return jax.tree.map(node, state, is_leaf=lambda node: isinstance(node, kinds))
