"""What a model is trained for: the loss and the figures that are reported.

Every task here is a softmax over classes or tokens, so the loss is one function. It returns
sums, not means: sums over replicas and microbatches add up exactly, whatever their sizes.

Dims: B examples, T positions, C classes or tokens; ... is B or B,T.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar.models.model import Batch


class Sums(NamedTuple):
    """Weighted sums over examples (or predicted tokens); scalars, float32."""

    loss: jax.Array
    correct: jax.Array
    weight: jax.Array


def sums(logits: jax.Array, batch: Batch) -> Sums:
    """Cross entropy in nats and right answers, weighted by batch["weights"].

    Args:
      logits: [..., C], any float dtype; computed in float32.
      batch: "labels" and "weights" of shape [...].
    """
    logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    correct = (jnp.argmax(logits, axis=-1) == batch["labels"]).astype(jnp.float32)
    weights = batch["weights"]
    return Sums(jnp.sum(losses * weights), jnp.sum(correct * weights), jnp.sum(weights))


def figures(task: str, loss: float, correct: float, weight: float) -> dict[str, float]:
    """The figures of `task` from sums over any batches: loss, accuracy, and perplexity of a language model."""
    mean = loss / weight
    result = {"loss": mean, "accuracy": correct / weight}
    if task != "classification":
        result["perplexity"] = math.exp(min(mean, 700.0))
    return result
