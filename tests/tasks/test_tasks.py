"""Tests losses and metrics against NumPy and scikit-learn."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import accuracy_score, log_loss

from jaxpar import tasks
from jaxpar.tasks import cross_entropy, language_models
from jaxpar.tasks.classification import TASK
from jaxpar.tasks.task import Sums


def test_sums_equal_numpy_and_ignore_padding_examples() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 3, 7)).astype(np.float32)
    labels = rng.integers(0, 7, (4, 3))
    weights = rng.uniform(0, 2, (4, 3)).astype(np.float32)
    weights[1] = 0
    logits[1] = 1e6  # the outputs for a padding example must not affect the sums
    got = cross_entropy.sums(jnp.asarray(logits), {"labels": jnp.asarray(labels), "weights": jnp.asarray(weights)})
    loss = correct = 0.0
    for i, j in np.ndindex(4, 3):
        if weights[i, j]:
            p = np.exp(logits[i, j].astype(np.float64))
            loss -= weights[i, j] * np.log(p[labels[i, j]] / p.sum())
            correct += weights[i, j] * (logits[i, j].argmax() == labels[i, j])
    expected = np.array([loss, correct, weights.sum()])
    np.testing.assert_allclose([got.loss, got.terms["correct"], got.weight], expected, rtol=1e-5)


def test_metrics_equal_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=(50, 4)).astype(np.float32), rng.integers(0, 4, 50)
    weights = rng.uniform(0, 2, 50).astype(np.float32)
    batch = {"labels": jnp.asarray(labels), "weights": jnp.asarray(weights)}
    metrics = TASK.all_metrics(tasks.add_up([TASK.sums(jnp.asarray(logits), batch)]))
    probabilities = np.exp(logits.astype(np.float64))
    probabilities /= probabilities.sum(1, keepdims=True)
    assert metrics == {
        "loss": pytest.approx(log_loss(labels, probabilities, sample_weight=weights, labels=range(4)), rel=1e-5),
        "accuracy": accuracy_score(labels, logits.argmax(1)),
    }


def test_metrics() -> None:
    sums = Sums(6.0, {"correct": 3.0, "examples": 5.0}, 4.0)
    assert TASK.all_metrics(sums) == {"loss": 1.5, "accuracy": 0.6}
    metrics = language_models.CAUSAL_LM.all_metrics(sums)
    assert metrics == {"loss": 1.5, "accuracy": 0.75, "perplexity": pytest.approx(np.exp(1.5))}


def test_sums_add_up_in_float64() -> None:
    """float32 cannot represent this number of examples."""
    terms = {"correct": np.float32(0), "examples": np.float32(1)}
    one = Sums(np.float32(1), terms, np.float32(2**24))
    total = tasks.add_up([TASK.zeros(), one, one._replace(weight=np.float32(1))])
    assert total == Sums(2.0, {"correct": 0.0, "examples": 2.0}, 2**24 + 1)


def test_a_batch_without_anything_to_predict_has_no_loss() -> None:
    assert tasks.mean_loss(np.float32(0), np.float32(0)) == 0
    assert tasks.mean_loss(jnp.float32(0), jnp.float32(0)) == 0
