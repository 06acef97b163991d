"""The cross-entropy loss over classes or tokens, shared by several tasks.

Dims: B examples, T positions, C classes or tokens; ... is B or B,T.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.tasks.task import Prediction, Readable, Sums, mean_loss
from jaxpar.tasks.token_logits import TokenLogits, chunked_sums, unchunked_sums, weighted_sums

TERMS: dict[str, tuple[int, ...]] = {"correct": ()}


def sums(logits: jax.Array | TokenLogits, batch: Mapping[str, jax.Array]) -> Sums:
    """Return the sums of the cross entropy in nats and of correct answers, weighted by batch["weights"].

    Large `TokenLogits` are computed in chunks. batch: "labels", integers, and "weights", of shape [...].
    """
    labels, weights = batch["labels"], batch["weights"]
    if isinstance(logits, TokenLogits) and logits.num_chunks > 1:
        loss, correct = chunked_sums(logits.num_chunks, logits, labels, weights)
    elif isinstance(logits, TokenLogits):
        loss, correct = unchunked_sums(logits, labels, weights)
    else:
        loss, correct = weighted_sums(logits.astype(jnp.float32), labels, weights)
    return Sums(loss, {"correct": correct}, jnp.sum(weights))


def top_choices(logits: jax.Array, number: int) -> dict[str, jax.Array]:
    """Return the `number` most likely of the classes of logits [..., C], `choices`, and their `probabilities`.

    Both are [..., min(number, C)], the most likely class first.
    """
    logits = logits.astype(jnp.float32)
    if number == 1:  # a maximum is much cheaper than a sort
        choices, values = jnp.argmax(logits, axis=-1, keepdims=True), jnp.max(logits, axis=-1, keepdims=True)
    else:
        values, choices = jax.lax.top_k(logits, min(number, logits.shape[-1]))
    return {"choices": choices, "probabilities": jnp.exp(values - jax.nn.logsumexp(logits, axis=-1, keepdims=True))}


def ranked_choices(key: str, names: Sequence[str], probabilities: np.ndarray) -> Prediction:
    """Return the first choice: `{key: "noun", "probability": 0.9}`. If there are several, `top` lists all."""
    choices: list[Prediction] = [
        {key: name, "probability": probability} for name, probability in zip(names, probabilities.tolist(), strict=True)
    ]
    return {**choices[0], "top": list[Readable](choices)} if len(choices) > 1 else choices[0]


def accuracy(sums: Sums) -> dict[str, float]:
    """Return the fraction of correct answers."""
    return {"accuracy": float(sums.terms["correct"] / sums.weight)}


def accuracy_and_perplexity(sums: Sums) -> dict[str, float]:
    """Return the fraction of correct answers, and the perplexity, exp(loss)."""
    perplexity = math.exp(min(mean_loss(sums.loss, sums.weight), 700.0))
    return {**accuracy(sums), "perplexity": perplexity}
