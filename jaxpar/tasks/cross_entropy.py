"""The cross-entropy loss over classes or tokens, shared by several tasks.

Dims: B examples, T positions, C classes or tokens; ... is B or B,T.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.tasks.task import Sums, mean_loss
from jaxpar.tasks.token_logits import TokenLogits, chunked_sums, weighted_sums, whole

TERMS: dict[str, tuple[int, ...]] = {"correct": ()}


def sums(logits: jax.Array | TokenLogits, batch: Mapping[str, jax.Array]) -> Sums:
    """Return the sums of the cross entropy in nats and of correct answers, weighted by batch["weights"].

    Args:
      logits: [..., C], any float dtype; converted to float32. Large `TokenLogits` are computed in chunks.
      batch: "labels", integers, and "weights", of shape [...].
    """
    labels, weights = batch["labels"], batch["weights"]
    if isinstance(logits, TokenLogits) and logits.num_chunks > 1:
        loss, correct = chunked_sums(logits.num_chunks, logits, labels, weights)
    else:
        loss, correct = weighted_sums(whole(logits).astype(jnp.float32), labels, weights)
    return Sums(loss, {"correct": correct}, jnp.sum(weights))


def best_choices(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the most likely class and its probability, on the host: [..., C] -> int [...], float64 [...]."""
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return logits.argmax(axis=-1), 1 / weights.sum(axis=-1)


def accuracy(sums: Sums) -> dict[str, float]:
    """Return the fraction of correct answers."""
    return {"accuracy": float(sums.terms["correct"] / sums.weight)}


def accuracy_and_perplexity(sums: Sums) -> dict[str, float]:
    """Return the fraction of correct answers, and the perplexity, exp(loss)."""
    perplexity = math.exp(min(mean_loss(sums.loss, sums.weight), 700.0))
    return {**accuracy(sums), "perplexity": perplexity}
