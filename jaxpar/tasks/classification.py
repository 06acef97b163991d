"""Classification: predicts one of several classes for each example.

The weights of the examples, such as class weights, apply to the loss alone. All other metrics count examples. As in
scikit-learn with zero_division=0, precision is 0 for a class that is never predicted, and recall is 0 for a class
without examples.

Dims: B examples, C classes, K classes of a prediction. The first dim of confusion_CC is the actual class.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.data import Labels
from jaxpar.tasks import cross_entropy
from jaxpar.tasks.task import Names, Prediction, Score, Sums, Task, Terms

CONFUSION = "confusion"  # name of the matrix in the terms of `Sums`
MAX_CLASSES = 256  # a matrix of more classes would be larger than the programs should sum up for every batch


def sums(logits_BC: jax.Array, batch: Mapping[str, jax.Array]) -> Sums:
    """Return the weighted sum of the cross entropy in nats, and the numbers of correct answers and of examples.

    batch: "labels", integers, and "weights", both [B].
    """
    is_real_B = batch["weights"] > 0
    is_correct_B = jnp.argmax(logits_BC.astype(jnp.float32), axis=-1) == batch["labels"]
    correct = jnp.sum(is_real_B & is_correct_B, dtype=jnp.float32)
    terms = {"correct": correct, "examples": jnp.sum(is_real_B, dtype=jnp.float32)}
    return cross_entropy.sums(logits_BC, batch)._replace(terms=terms)


def evaluation_terms(logits_BC: jax.Array, batch: Mapping[str, jax.Array]) -> Terms:
    """Return the numbers of examples by actual and predicted class, unless there are more than MAX_CLASSES classes."""
    num_classes = logits_BC.shape[-1]
    if num_classes > MAX_CLASSES:
        return {}
    actual_BC = jax.nn.one_hot(batch["labels"], num_classes) * (batch["weights"] > 0)[:, None]
    predicted_BC = jax.nn.one_hot(jnp.argmax(logits_BC.astype(jnp.float32), axis=-1), num_classes)
    return {CONFUSION: jnp.einsum("ba,bp->ap", actual_BC, predicted_BC)}


def metrics(sums: Sums) -> dict[str, float]:
    """Return the fraction of correct answers and, for an evaluation, the macro-averaged F1."""
    results = {"accuracy": float(sums.terms["correct"] / sums.terms["examples"])}
    if CONFUSION in sums.terms:
        results["macro_f1"] = macro_f1(sums.terms[CONFUSION])
    return results


def predictions(readout: Mapping[str, np.ndarray], _batch: Mapping[str, np.ndarray], names: Names) -> list[Prediction]:
    """Return the most likely class of each example: `{"class": "noun", "probability": 0.93}`.

    If the readout has several classes, `top` lists them in the same form, the most likely first.
    """
    classes = names.info.class_names
    return [
        cross_entropy.ranked_choices("class", [classes[number] for number in choices_K], probabilities_K)
        for choices_K, probabilities_K in zip(readout["choices"], readout["probabilities"], strict=True)
    ]


TASK = Task(
    name="classification",
    labels=Labels.CLASSES,
    head="example",
    terms={"correct": (), "examples": ()},
    sums=sums,
    metrics=metrics,
    curve="accuracy",
    loss_unit="nats",
    headline="test accuracy {test_accuracy:.2%}",
    score=Score("test_accuracy", ".2%"),
    readout=lambda logits_BC, _batch, top_k: cross_entropy.top_choices(logits_BC, top_k),
    predictions=predictions,
    ranks_choices=True,
    evaluation_terms=evaluation_terms,
    logged_only=("macro_f1",),  # a run prints it at the end, in the table of the classes
)


class ClassMetrics(NamedTuple):
    """Metrics by class, float64 [C], and the number of examples of each class, int64 [C]."""

    precision_C: np.ndarray
    recall_C: np.ndarray
    f1_C: np.ndarray
    count_C: np.ndarray


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
