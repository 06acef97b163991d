"""Clipping before compression, for BytePS's compressors and 1-bit Adam.

Error feedback sends later what compression leaves out now, so the vector that replicas agree on also has gradients of
earlier steps in it. Clipping that vector would discard them for good, because no residual holds what is clipped. So
each replica clips its local gradient by its own norm, before error feedback. This is what DeepSpeed does with 1-bit
Adam, and "local gradient clipping" in Lin et al., "Deep Gradient Compression", 2018, section 3.2.

The norm of the mean gradient is not known at that point: computing it would take an exact all-reduce. PowerSGD instead
clips the approximate mean, as users of PyTorch's hook do.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.layout import Tree


def clipped(grads: Tree, norm: jax.Array, clip_norm: float) -> Tree:
    """Return a gradient of this norm, clipped to clip_norm, or unchanged if clip_norm is 0."""
    scale = jnp.where(norm > clip_norm, clip_norm / norm, 1.0) if clip_norm else jnp.ones(())
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)


def already_clipped(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer for gradients that are clipped already: it gets a `grad_norm` of 0, so it clips nothing."""
    optimizer = optax.with_extra_args_support(optimizer)

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        return optimizer.update(grads, state, params, **{**extra, "grad_norm": jnp.zeros(())})

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
