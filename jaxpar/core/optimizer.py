"""Builds the optax optimizer and the learning rate from the config."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from jaxpar.core.leaf_paths import layer_name
from jaxpar.core.loss_scale import with_loss_scale
from jaxpar.errors import UserError, check_choice

LearningRate = Callable[[Any], Any]  # step -> learning rate
TINY, HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
INPUT_LAYERS = ("embed", "stem")  # names of layers that map the input to the first hidden state


def _adamw(o: ConfigDict, learning_rate: LearningRate) -> optax.GradientTransformation:
    return optax.adamw(learning_rate, o.b1, o.b2, o.eps, weight_decay=o.weight_decay, mask=decayed)


def _lamb(o: ConfigDict, learning_rate: LearningRate) -> optax.GradientTransformation:
    return optax.lamb(learning_rate, o.b1, o.b2, o.eps, weight_decay=o.weight_decay, mask=decayed)


def _sgd(o: ConfigDict, learning_rate: LearningRate) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(o.weight_decay, mask=decayed)
    return optax.chain(decay, optax.sgd(learning_rate, o.momentum or None))


def _adafactor(o: ConfigDict, learning_rate: LearningRate) -> optax.GradientTransformation:
    # The weight decay of optax.adafactor is not used: it is applied after the learning rate and so is not scaled by it.
    return optax.chain(
        optax.adafactor(None),
        optax.scale(-1.0),  # adafactor returns a descent direction; the next two transformations expect a gradient
        optax.add_decayed_weights(o.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(learning_rate),
    )


def _lion(o: ConfigDict, learning_rate: LearningRate) -> optax.GradientTransformation:
    return optax.lion(learning_rate, o.b1, o.b2, weight_decay=o.weight_decay, mask=decayed)


def _muon(o: ConfigDict, learning_rate: LearningRate) -> optax.GradientTransformation:
    """Build Muon for the kernels of hidden layers, with AdamW for all other parameters.

    Muon is from Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Its updates are scaled
    to the root mean square of Adam's updates, so both share one learning rate (Liu et al., "Muon is Scalable for LLM
    Training", 2025, section 2.2).
    """

    def as_matrix(kernel: Any) -> optax.contrib.MuonDimensionNumbers:
        """Return the dims of a kernel as a matrix [in, out]: those of a convolution are [h * w * in, out]."""
        *reduced, output = range(jnp.ndim(kernel))
        return optax.contrib.MuonDimensionNumbers(reduction_axis=tuple(reduced), output_axis=output)

    muon = optax.contrib.muon(
        learning_rate,
        beta=o.momentum,
        weight_decay=o.weight_decay,
        weight_decay_mask=decayed,
        muon_weight_dimension_numbers=lambda kernels: jax.tree.map(as_matrix, kernels),
        consistent_rms=0.2,
    )
    return optax.partition({"muon": muon, "adamw": _adamw(o, learning_rate)}, _by_muon_or_adamw)


def _by_muon_or_adamw(params: Any) -> Any:
    """Label each leaf with the optimizer that updates it, `muon` or `adamw`.

    Muon is designed for matrices that map one hidden state to another. Jordan et al. (2024) flatten the kernels of
    convolutions to matrices, and use AdamW for embeddings, input and output layers, biases and gains. Muon therefore
    updates all kernels with two dims, and with the four of a convolution of images, except those of classifiers and of
    INPUT_LAYERS.
    """

    def label(path: tuple[Any, ...], leaf: Any) -> str:
        layer, *names = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
        is_kernel = jnp.ndim(leaf) in (2, 4) and names[-1:] == ["kernel"]
        is_hidden = "classifier" not in names and layer_name(layer) not in INPUT_LAYERS
        return "muon" if is_kernel and is_hidden else "adamw"

    return jax.tree_util.tree_map_with_path(label, params)


class OptimizerKind(NamedTuple):
    """An optimizer and its properties that exchanges and mitigations depend on."""

    make: Callable[[ConfigDict, LearningRate], optax.GradientTransformation]  # (config.optimizer, learning rate) -> it
    # whether each element of an update depends only on the gradient and state of that element, so that arrays can be
    # sharded. Other optimizers need whole arrays: norms (lamb), rows and columns (adafactor) or matrices (muon)
    elementwise: bool
    momentum: tuple[str, ...]  # the keys of config.optimizer that set the momentum; empty if there is no momentum
    # whether each element of an update, or of some arrays' updates, is divided by the magnitude of its recent
    # gradients, so that noise makes it smaller. Adafactor instead divides by averages over rows and columns
    adaptive: bool
    is_adamw: bool = False  # whether the update is AdamW's, so that exchanges of momentum can compute it themselves


OPTIMIZERS = {
    "adamw": OptimizerKind(_adamw, elementwise=True, momentum=("b1",), adaptive=True, is_adamw=True),
    "lamb": OptimizerKind(_lamb, elementwise=False, momentum=("b1",), adaptive=True),
    "sgd": OptimizerKind(_sgd, elementwise=True, momentum=("momentum",), adaptive=False),
    "adafactor": OptimizerKind(_adafactor, elementwise=False, momentum=(), adaptive=False),
    "lion": OptimizerKind(_lion, elementwise=True, momentum=("b1",), adaptive=False),
    "muon": OptimizerKind(_muon, elementwise=False, momentum=("momentum", "b1"), adaptive=True),
}
LR_SCHEDULES = ("constant", "cosine", "linear")


def check_optimizer(config: ConfigDict) -> None:
    """Raise UserError for an invalid optimizer setting."""
    o = config.optimizer
    check_choice("optimizer.name", o.name, OPTIMIZERS)
    check_choice("optimizer.schedule", o.schedule, LR_SCHEDULES)
    check_choice("optimizer.nonfinite", o.nonfinite, ("stop", "skip"))
    if o.max_skipped_steps < 1:
        raise UserError(f"config.optimizer.max_skipped_steps is {o.max_skipped_steps}; it must be at least 1")
    for key in ("warmup", "final_lr"):
        if not 0 <= o[key] <= 1:
            raise UserError(f"config.optimizer.{key} is {o[key]}; it must be between 0 and 1")
    for key in ("b1", "b2", "momentum"):
        if not 0 <= o[key] <= BELOW_ONE:
            raise UserError(
                f"config.optimizer.{key} is {o[key]}; it must be at least 0 and less than 1, also when it is rounded "
                "to float32"
            )
    for key in ("lr", "weight_decay"):
        if not 0 <= o[key] <= HUGE:
            raise UserError(
                f"config.optimizer.{key} is {o[key]}; it must be at least 0 and at most {HUGE:.7g}, the largest float32"
            )
    if not TINY <= o.eps <= HUGE:  # without it, an update by a gradient of zero is NaN
        raise UserError(
            f"config.optimizer.eps is {o.eps}; it must be in the range of float32, from {TINY:.7g} to {HUGE:.7g}"
        )
    if not o.clip_norm >= 0:  # inf is allowed: like 0, it clips nothing
        raise UserError(f"config.optimizer.clip_norm is {o.clip_norm}; it must be at least 0")
    if o.accumulation_steps < 1:
        raise UserError(f"config.optimizer.accumulation_steps is {o.accumulation_steps}; it must be at least 1")


def check_kernels(config: ConfigDict, params: Any) -> None:
    """Raise UserError for muon if it would update none of these parameters, {layer: ...}, or of these shapes."""
    if config.optimizer.name == "muon" and "muon" not in jax.tree.leaves(_by_muon_or_adamw(params)):
        others = [name for name in OPTIMIZERS if name != "muon"]
        raise UserError(
            f"config.optimizer.name is 'muon'; it must be one of {', '.join(others)} with "
            f"config.model.name={config.model.name!r}, none of whose parameters is a kernel of a hidden layer"
        )


def build_learning_rate(config: ConfigDict, num_steps: int) -> LearningRate:
    """Build the learning rate: linear warm-up from 0, then config.optimizer.schedule until num_steps."""
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


def make_optimizer(config: ConfigDict, learning_rate: LearningRate) -> optax.GradientTransformationExtraArgs:
    """Build the optimizer, preceded by clipping to the global norm unless config.optimizer.clip_norm is 0.

    With a model in float16, its state has the scale of the loss.

    Its update(grads, state, params, grad_norm=) computes the update of each array from that array alone. A device that
    holds only some layers therefore computes the same updates as a device that holds all layers.
    """
    transform = optax.with_extra_args_support(OPTIMIZERS[config.optimizer.name].make(config.optimizer, learning_rate))
    if config.optimizer.clip_norm > 0:
        transform = optax.chain(clip_by_norm(config.optimizer.clip_norm), transform)
    return with_loss_scale(transform) if config.model.dtype == "float16" else transform


def at_step(state: Any, step: Any) -> Any:
    """Return the optimizer state for an update with the learning rate of this step of the run.

    Optax counts updates instead, and a run can have fewer updates than steps (skipped steps, several passes for an
    update, batches that were discarded in flight) or more (asynchronous workers).
    """

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    counted = optax.ScaleByScheduleState(step)
    return jax.tree.map(lambda node: counted if is_schedule(node) else node, state, is_leaf=is_schedule)


def clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Build `optax.clip_by_global_norm` with an optional precomputed norm: update(..., grad_norm=), a scalar."""

    def update(
        grads: Any, state: Any, _params: Any = None, *, grad_norm: jax.Array | None = None, **_rest: Any
    ) -> tuple[Any, Any]:
        norm = optax.tree.norm(grads) if grad_norm is None else grad_norm
        return jax.tree.map(lambda g: jnp.where(norm < max_norm, g, g / norm * max_norm), grads), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def decayed(params: Any) -> Any:
    """Return a mask that is True for weight-decayed leaves: matrices and kernels, but no biases, scales or vectors."""

    def is_decayed(path: tuple[Any, ...], leaf: Any) -> bool:
        return jnp.ndim(leaf) > 1 and path[-1].key not in ("bias", "scale")

    return jax.tree_util.tree_map_with_path(is_decayed, params)
