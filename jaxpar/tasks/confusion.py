"""The confusion matrix of a classifier, which programs sum up, and the metrics of each class that follow from it.

As scikit-learn does with zero_division=0, precision is 0 for a class that is never predicted, and recall is 0 for a
class without examples.

Dims: B examples, C classes. In confusion_CC, the first dim is the actual class and the second the predicted class.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CONFUSION = "confusion"  # name of the matrix in the terms of `Sums`
MAX_CLASSES = 256  # a matrix of more classes would be larger than the programs should sum up for every batch


class ClassMetrics(NamedTuple):
    """Metrics by class, float64 [C], and the number of examples of each class, int64 [C]."""

    precision_C: np.ndarray
    recall_C: np.ndarray
    f1_C: np.ndarray
    count_C: np.ndarray


def count_confusions(logits_BC: jax.Array, labels_B: jax.Array, is_real_B: jax.Array) -> jax.Array:
    """Return the number of examples by actual and predicted class, float32 [C, C].

    Args:
      logits_BC: float32.
      labels_B: integers.
      is_real_B: bool, False at padding examples, which are not counted.
    """
    num_classes = logits_BC.shape[-1]
    actual_BC = jax.nn.one_hot(labels_B, num_classes) * is_real_B[:, None]
    predicted_BC = jax.nn.one_hot(jnp.argmax(logits_BC, axis=-1), num_classes)
    return jnp.einsum("ba,bp->ap", actual_BC, predicted_BC)


def class_metrics(confusion_CC: np.ndarray) -> ClassMetrics:
    """Return the metrics of each class."""
    matched_C, actual_C, predicted_C = np.diag(confusion_CC), confusion_CC.sum(axis=1), confusion_CC.sum(axis=0)
    precision_C, recall_C = matched_C / np.maximum(predicted_C, 1), matched_C / np.maximum(actual_C, 1)
    f1_C = 2 * matched_C / np.maximum(actual_C + predicted_C, 1)
    return ClassMetrics(precision_C, recall_C, f1_C, actual_C.astype(np.int64))


def occurring_classes(confusion_CC: np.ndarray) -> np.ndarray:
    """Return the indices of the classes that have examples or were predicted, in ascending order."""
    return np.flatnonzero(confusion_CC.sum(axis=0) + confusion_CC.sum(axis=1))


def macro_f1(confusion_CC: np.ndarray) -> float:
    """Return the unweighted mean of the F1 of the classes that occur."""
    return float(class_metrics(confusion_CC).f1_C[occurring_classes(confusion_CC)].mean())


def majority(confusion_CC: np.ndarray) -> tuple[int, float]:
    """Return the class with the most examples, and the accuracy of predicting it for every example."""
    count_C = confusion_CC.sum(axis=1)
    return int(count_C.argmax()), float(count_C.max() / count_C.sum())
