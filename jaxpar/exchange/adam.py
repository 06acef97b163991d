"""Variants of Adam that exchange momentum instead of gradients: 1-bit Adam and QAdam.

Adam is not linear in the gradient, so it does not tolerate lossy gradient compression. But once the second moment v is
frozen, Adam is momentum descent with a fixed step size for each parameter, and momentum can be compressed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.core.plan import Traffic
from jaxpar.exchange.clip import clipped
from jaxpar.exchange.compress import Compressor
from jaxpar.exchange.exchange import DistributedState, Exchange, ExchangeUpdate, Rule, shared
from jaxpar.exchange.fuse import fused, in_layer_order
from jaxpar.exchange.gradients import lossy
from jaxpar.exchange.reduce import Axis, psum
from jaxpar.layout import Tree

ADAM_WARMUP = "warmup"  # name of the conditional in compiled programs


def momentum_exchange(
    axis: Axis, rule: Rule, compressor: Compressor, *, bucket_bytes: int, group: int, warmup: float
) -> Exchange:
    """Wrap optax.adamw in an exchange of momentum: after a warm-up, v is frozen and replicas exchange m.

    During the warm-up, replicas average gradients exactly. Afterwards each replica updates the momentum with its local
    gradient, m_i = b1 m + (1 - b1) g_i, and their compressed m_i are averaged into m. The frozen quantity is the
    bias-corrected v, so optax.adamw can continue from the state at any step. A parameter with v = 0 has never had a
    gradient: its momentum stays zero, because it would hold only compression noise, which nothing would bound. The
    warm-up starts at the step at which the run switches to this exchange.

    With error feedback on both sides and the scale |x|_2 / sqrt(d), this is 1-bit Adam (Tang et al., 2021,
    algorithm 1). With MinMaxUInt8 and no error feedback, it is QAdam as in Bagua (Gan et al., 2021).

    The optimizer state is that of optax.adamw, so either can continue from the other. After the warm-up, each replica's
    local gradient is clipped to the norm of `rule`. group: as in `lossy`. warmup: the share of the steps until v is
    frozen.
    """
    assert rule.adamw is not None
    learning_rate, b1, b2, eps, weight_decay, mask = rule.adamw
    reducers = psum(axis), lossy(axis, group, compressor, compressor)
    exact, momentum = (in_layer_order(fused(reducer, bucket_bytes), rule.layers) for reducer in reducers)
    optimizer = optax.with_extra_args_support(rule.optimizer)
    warmup_steps = max(1, round(warmup * rule.num_steps))  # without a warm-up, v would stay zero

    def init(params: Tree) -> DistributedState:
        private = {"exact": exact.init(params), "lossy": momentum.init(params), "steps": jnp.zeros((), jnp.int32)}
        return DistributedState(optimizer.init(params), private)

    def warm(grads: Tree, state: DistributedState, params: Tree) -> tuple[Tree, DistributedState]:
        mean, exact_state = exact.mean(grads, state.private["exact"])
        updates, inner = optimizer.update(mean, state.optimizer, params, grad_norm=optax.tree.norm(mean))
        return updates, DistributedState(inner, {**state.private, "exact": exact_state})

    def frozen(grads: Tree, state: DistributedState, params: Tree) -> tuple[Tree, DistributedState]:
        adam, schedule = (optax.tree.get(state.optimizer, key) for key in ("ScaleByAdamState", "ScaleByScheduleState"))
        grads = clipped(grads, optax.tree.norm(grads), rule.clip_norm)
        local = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, adam.mu, grads)
        mean, lossy_state = momentum.mean(local, state.private["lossy"])
        count = adam.count + 1
        mu = jax.tree.map(lambda m, v: jnp.where(v > 0, m, 0), mean, adam.nu)
        growth = (1 - b2**count) / (1 - b2**adam.count)  # keeps the bias-corrected v constant
        nu = jax.tree.map(lambda v: v * growth, adam.nu)
        direction = jax.tree.map(lambda m, v: m / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + eps), mu, nu)
        rate = learning_rate(schedule.count)
        updates = jax.tree.map(
            lambda d, p, is_decayed: -rate * (d + weight_decay * p * is_decayed), direction, params, mask(params)
        )
        schedule = optax.ScaleByScheduleState(schedule.count + 1)
        adam = optax.ScaleByAdamState(count, mu, nu)
        inner = optax.tree.set(state.optimizer, ScaleByAdamState=adam, ScaleByScheduleState=schedule)
        return updates, DistributedState(inner, {**state.private, "lossy": lossy_state})

    def update(grads: Tree, state: DistributedState, params: Tree, **_extra: Any) -> ExchangeUpdate:
        with jax.named_scope(ADAM_WARMUP):
            is_warm = state.private["steps"] < warmup_steps
            updates, after = jax.lax.cond(is_warm, warm, frozen, grads, state, params)
        private = {**after.private, "steps": state.private["steps"] + 1}
        return ExchangeUpdate(updates, after._replace(private=private), None)

    def traffic(params: Tree, _num_microbatches: int) -> list[Traffic]:
        return shared(exact.traffic(params), share) + shared(momentum.traffic(params), 1 - share)

    share = min(1.0, warmup_steps / rule.num_steps)
    return Exchange(init, update, traffic, branches={ADAM_WARMUP: (1 - share, share)})
