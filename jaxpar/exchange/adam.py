"""Adam whose momentum is what replicas exchange: 1-bit Adam and QAdam.

A code of the gradient loses what Adam needs, as it is not linear. But once the second moment v is frozen, Adam is
momentum descent with a fixed step for each parameter, and momentum may be coded.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.exchange.exchange import DistributedState, Exchange, Update, shared
from jaxpar.exchange.fuse import AllReduce
from jaxpar.exchange.reduce import Traffic

WARMUP = "warmup"  # names the branch in compiled programs


def momentum_exchange(
    exact: AllReduce,
    lossy: AllReduce,
    optimizer: optax.GradientTransformation,
    *,
    schedule: Any,
    b1: float,
    b2: float,
    eps: float,
    num_steps: int,
    warmup: float,
    weight_decay: float = 0.0,
    mask: Any = None,
    clip_norm: float = 0.0,
) -> Exchange:
    """`optimizer`, which is optax.adamw of these figures; after a share of the steps v is frozen, and m is exchanged.

    In the first stage replicas agree on the gradient, exactly. In the second each makes a momentum of its own gradient,
    m_i = b1 m + (1 - b1) g_i, and `lossy` makes m of them. As v, so its bias correction is frozen. A parameter whose v
    is zero has had no gradient, and has none: what the code makes of its momentum is noise, which nothing would bound.

    With error feedback on both sides and a scale |x|_2 / sqrt(d): 1-bit Adam (Tang et al., 2021, algorithm 1). With
    MinMaxUInt8 and none: QAdam as in Bagua (Gan et al., 2021).

    Args:
      exact: of gradients.
      lossy: of momentum.
      optimizer: its state is this one's, so that either may go on with what the other left.
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

    def init(params: Any) -> DistributedState:
        own = {"exact": exact.init(params), "lossy": lossy.init(params), "frozen_at": jnp.full((), -1, jnp.int32)}
        return DistributedState(optimizer.init(params), own)

    def update(grads: Any, state: DistributedState, params: Any) -> Update:
        adam: optax.ScaleByAdamState = _only(state.optimizer, optax.ScaleByAdamState)
        own = state.own

        def warm() -> tuple[Any, Any, Any]:
            mean, exact_state = exact.mean(grads, own["exact"])
            grad_norm = optax.tree.norm(mean)
            updates, inner = optimizer.update(mean, state.optimizer, params, grad_norm=grad_norm)
            return updates, inner, {**own, "exact": exact_state}

        def frozen() -> tuple[Any, Any, Any]:
            frozen_at = jnp.where(own["frozen_at"] < 0, adam.count, own["frozen_at"])
            scale = clip_scale(optax.tree.norm(grads), clip_norm)
            local = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * scale * g, adam.mu, grads)
            mu, lossy_state = lossy.mean(local, own["lossy"])
            count = adam.count + 1
            direction = jax.tree.map(
                lambda m, v: jnp.where(v > 0, m / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**frozen_at)) + eps), 0.0),
                mu,
                adam.nu,
            )
            decayed = jax.tree.map(lambda p: True, params) if mask is None else mask(params)
            updates = jax.tree.map(
                lambda d, p, yes: -schedule(adam.count) * (d + weight_decay * p * yes), direction, params, decayed
            )
            inner = _next(state.optimizer, optax.ScaleByAdamState(count, mu, adam.nu))
            return updates, inner, {**own, "lossy": lossy_state, "frozen_at": frozen_at}

        with jax.named_scope(WARMUP):
            updates, inner, own = jax.lax.cond(adam.count < warmup_steps, warm, frozen)
        return Update(updates, DistributedState(inner, own), None)

    def traffic(params: Any, num_microbatches: int) -> list[Traffic]:
        return shared(exact.traffic(params), share) + shared(lossy.traffic(params), 1 - share)

    share = min(1.0, warmup_steps / num_steps)
    return Exchange(init, update, traffic, branches={WARMUP: (1 - share, share)})


def clip_scale(norm: jax.Array, clip_norm: float) -> jax.Array:
    """The factor that makes a gradient of this norm one of clip_norm, where it is longer."""
    return jnp.where(norm > clip_norm, clip_norm / norm, 1.0) if clip_norm else jnp.ones(())


def _only(state: Any, kind: type) -> Any:
    """The node of that type in an optimizer's state."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    found = [node for node in nodes if isinstance(node, kind)]
    assert len(found) == 1, (kind, len(found))
    return found[0]


def _next(state: Any, adam: optax.ScaleByAdamState) -> Any:
    """An adamw state, one step on, with another state of Adam in it."""

    def node(old: Any) -> Any:
        if isinstance(old, optax.ScaleByAdamState):
            return adam
        return optax.ScaleByScheduleState(old.count + 1) if isinstance(old, optax.ScaleByScheduleState) else old

    kinds = (optax.ScaleByAdamState, optax.ScaleByScheduleState)
    return jax.tree.map(node, state, is_leaf=lambda node: isinstance(node, kinds))
