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

from jaxpar.errors import check_choice
from jaxpar.models.model import Batch

TASKS = ("classification", "masked_lm", "causal_lm")


class Sums(NamedTuple):
    """Weighted sums over examples (or predicted tokens); scalars, float32."""

    loss: jax.Array
    correct: jax.Array
    weight: jax.Array


def check(task: str) -> None:
    """Raises UserError for a task that does not exist."""
    check_choice("task", task, TASKS)


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
    # where, not a product alone: a filler row may hold inf, and 0 * inf is nan.
    losses = jnp.where(weights > 0, losses * weights, 0.0)
    return Sums(jnp.sum(losses), jnp.sum(correct * weights), jnp.sum(weights))


def figures(task: str, loss: float, correct: float, weight: float) -> dict[str, float]:
    """The figures of `task` from sums over any batches: loss, accuracy, and perplexity of a language model."""
    mean = loss / weight
    result = {"loss": mean, "accuracy": correct / weight}
    if task != "classification":
        result["perplexity"] = math.exp(min(mean, 700.0))
    return result
