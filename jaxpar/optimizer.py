"""Optimizer and learning-rate schedule from the config: names of optax, nothing of our own."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from jaxpar.addresses import layer_name
from jaxpar.errors import Refusals, UserError, accepted, refuse_choice

LearningRateSchedule = Callable[[Any], Any]  # step -> learning rate


def _adamw(o: ConfigDict, schedule: LearningRateSchedule) -> optax.GradientTransformation:
    return optax.adamw(schedule, o.b1, o.b2, o.eps, weight_decay=o.weight_decay, mask=decayed)


def _lamb(o: ConfigDict, schedule: LearningRateSchedule) -> optax.GradientTransformation:
    return optax.lamb(schedule, o.b1, o.b2, o.eps, weight_decay=o.weight_decay, mask=decayed)


def _sgd(o: ConfigDict, schedule: LearningRateSchedule) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(o.weight_decay, mask=decayed)
    return optax.chain(decay, optax.sgd(schedule, o.momentum or None))


def _adafactor(o: ConfigDict, schedule: LearningRateSchedule) -> optax.GradientTransformation:
    # optax.adafactor's own decay comes after the learning rate, which would not scale it.
    return optax.chain(
        optax.adafactor(None),
        optax.scale(-1.0),  # it gives a descent direction; the decay and the rate take gradients
        optax.add_decayed_weights(o.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(schedule),
    )


def _lion(o: ConfigDict, schedule: LearningRateSchedule) -> optax.GradientTransformation:
    return optax.lion(schedule, o.b1, o.b2, weight_decay=o.weight_decay, mask=decayed)


def _muon(o: ConfigDict, schedule: LearningRateSchedule) -> optax.GradientTransformation:
    """Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) for the kernels of hidden
    layers, AdamW for the rest. Its updates have the root mean square of Adam's, so that both take one learning rate
    (Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.2).
    """
    muon = optax.contrib.muon(
        schedule, beta=o.momentum, weight_decay=o.weight_decay, weight_decay_mask=decayed, consistent_rms=0.2
    )
    return optax.partition({"muon": muon, "adamw": _adamw(o, schedule)}, _by_muon_or_adamw)


def _by_muon_or_adamw(params: Any) -> Any:
    """Return by leaf which of the two updates it.

    Muon is for matrices that map one hidden state to another; its author has AdamW update embeddings, the layers of
    the input and of the output, biases and gains (Jordan et al., 2024). So it takes kernels with two dims, but not a
    classifier's, nor those of a layer named embed, which maps the input: by a matrix in an MLP.
    """

    def label(path: tuple[Any, ...], leaf: Any) -> str:
        layer, *names = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
        is_kernel = jnp.ndim(leaf) == 2 and names[-1:] == ["kernel"]
        return "muon" if is_kernel and "classifier" not in names and layer_name(layer) != "embed" else "adamw"

    return jax.tree_util.tree_map_with_path(label, params)


class OptimizerKind(NamedTuple):
    """An optimizer, and what exchanges and mitigations must know of it.

    Attributes:
      make: (config.optimizer, learning rate by step) -> the optimizer.
      elementwise: it computes each element of an update from that element's gradient and state alone, so its arrays can
        be divided. Others look at whole arrays: their norms (lamb), rows and columns (adafactor), matrices (muon).
      momentum: the key of config.optimizer that is its momentum; None: it has none.
      is_adamw: exchanges that compute AdamW's update themselves, from momentum that they exchange, can do so for it.
    """

    make: Callable[[ConfigDict, LearningRateSchedule], optax.GradientTransformation]
    elementwise: bool
    momentum: str | None
    is_adamw: bool = False


OPTIMIZERS = {
    "adamw": OptimizerKind(_adamw, elementwise=True, momentum="b1", is_adamw=True),
    "lamb": OptimizerKind(_lamb, elementwise=False, momentum="b1"),
    "sgd": OptimizerKind(_sgd, elementwise=True, momentum="momentum"),
    "adafactor": OptimizerKind(_adafactor, elementwise=False, momentum=None),
    "lion": OptimizerKind(_lion, elementwise=True, momentum="b1"),
    "muon": OptimizerKind(_muon, elementwise=False, momentum="momentum"),
}
LR_SCHEDULES = ("constant", "cosine", "linear")


def check_optimizer(config: ConfigDict) -> None:
    """Raise UserError for an optimizer setting that cannot work."""
    accepted(refuse_optimizer(config))


def refuse_optimizer(config: ConfigDict) -> Refusals[None]:
    """Refuse an optimizer setting that cannot work."""
    o = config.optimizer
    yield from refuse_choice("optimizer.name", o.name, OPTIMIZERS)
    yield from refuse_choice("optimizer.schedule", o.schedule, LR_SCHEDULES)
    yield from refuse_choice("optimizer.nonfinite", o.nonfinite, ("stop", "skip"))
    for key in ("warmup", "final_lr", "b1", "b2", "momentum"):
        if not 0 <= o[key] <= 1:
            yield UserError(f"config.optimizer.{key} is {o[key]}; it must be 0 to 1")
    for key in ("lr", "weight_decay", "eps"):
        if not 0 <= o[key] < math.inf:
            yield UserError(f"config.optimizer.{key} is {o[key]}; it must be finite and 0 or more")
    if not o.clip_norm >= 0:  # no norm is more than inf, which clips nothing, as 0 does
        yield UserError(f"config.optimizer.clip_norm is {o.clip_norm}; it must be 0 or more")
    if o.accumulation_steps < 1:
        yield UserError(f"config.optimizer.accumulation_steps is {o.accumulation_steps}; it must be 1 or more")


def build_schedule(config: ConfigDict, num_steps: int) -> LearningRateSchedule:
    """Learning rate by step: linear warm-up from 0, then as config.optimizer.schedule says until num_steps."""
    o = config.optimizer
    warmup_steps = int(o.warmup * num_steps)
    rest = max(num_steps - warmup_steps, 1)
    after = {
        "constant": optax.constant_schedule(o.lr),
        "cosine": optax.cosine_decay_schedule(o.lr, rest, alpha=o.final_lr),
        "linear": optax.linear_schedule(o.lr, o.lr * o.final_lr, rest),
    }[o.schedule]
    if warmup_steps == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, o.lr, warmup_steps), after], [warmup_steps])


def make_optimizer(config: ConfigDict, schedule: LearningRateSchedule) -> optax.GradientTransformationExtraArgs:
    """The optimizer, behind clipping by the global norm where config.optimizer.clip_norm is not 0.

    Its update(grads, state, params, grad_norm=) computes each array's step from that array alone: a device that
    holds some of the layers updates them as one that holds all would.
    """
    passes = config.exchange_options.backward_passes_per_step or 1  # steps of the run for one of the optimizer
    rate = schedule if passes == 1 else (lambda count: schedule(count * passes))
    transform = optax.with_extra_args_support(OPTIMIZERS[config.optimizer.name].make(config.optimizer, rate))
    if config.optimizer.clip_norm == 0:
        return transform
    return optax.chain(clip_by_norm(config.optimizer.clip_norm), transform)


def clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm` where the global norm may be given: update(..., grad_norm=), a scalar."""

    def update(
        grads: Any, state: Any, _params: Any = None, *, grad_norm: jax.Array | None = None, **_rest: Any
    ) -> tuple[Any, Any]:
        norm = optax.tree.norm(grads) if grad_norm is None else grad_norm
        return jax.tree.map(lambda g: jnp.where(norm < max_norm, g, g / norm * max_norm), grads), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def decayed(params: Any) -> Any:
    """True where weight decay applies: matrices and kernels, never biases, norm scales or other vectors."""

    def is_decayed(path: tuple[Any, ...], leaf: Any) -> bool:
        return jnp.ndim(leaf) > 1 and path[-1].key not in ("bias", "scale")

    return jax.tree_util.tree_map_with_path(is_decayed, params)
