"""The loss and its figures against NumPy."""

import jax.numpy as jnp
import numpy as np

from jaxpar import tasks


def test_sums_equal_numpy_and_ignore_filler_rows() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 3, 7)).astype(np.float32)
    labels = rng.integers(0, 7, (4, 3))
    weights = rng.uniform(0, 2, (4, 3)).astype(np.float32)
    weights[1] = 0
    logits[1] = 1e6  # whatever a filler row computes must not reach the sums
    got = tasks.sums(jnp.asarray(logits), {"labels": jnp.asarray(labels), "weights": jnp.asarray(weights)})
    loss = correct = 0.0
    for i, j in np.ndindex(4, 3):
        if weights[i, j]:
            p = np.exp(logits[i, j].astype(np.float64))
            loss -= weights[i, j] * np.log(p[labels[i, j]] / p.sum())
            correct += weights[i, j] * (logits[i, j].argmax() == labels[i, j])
    expected = np.array([loss, correct, weights.sum()])
    np.testing.assert_allclose([got.loss, got.correct, got.weight], expected, rtol=1e-5)


def test_figures() -> None:
    assert tasks.figures("classification", 6.0, 3.0, 4.0) == {"loss": 1.5, "accuracy": 0.75}
    assert np.isclose(tasks.figures("causal_lm", 6.0, 3.0, 4.0)["perplexity"], np.exp(1.5))
