"""Classification: predicts one of several classes for each example.

Dims: B examples, C classes.
"""

from collections.abc import Mapping

import numpy as np

from jaxpar.data import Labels
from jaxpar.tasks import cross_entropy
from jaxpar.tasks.task import Names, Prediction, Score, Task


def predictions(logits_BC: np.ndarray, _batch: Mapping[str, np.ndarray], names: Names) -> list[Prediction]:
    """Return the most likely class of each example: `{"class": "noun", "probability": 0.93}`."""
    classes_B, probabilities_B = cross_entropy.best_choices(logits_BC)
    return [
        {"class": names.info.class_names[number], "probability": float(probability)}
        for number, probability in zip(classes_B, probabilities_B, strict=True)
    ]


TASK = Task(
    name="classification",
    labels=Labels.CLASSES,
    head="example",
    terms=cross_entropy.TERMS,
    sums=cross_entropy.sums,
    metrics=cross_entropy.accuracy,
    curve="accuracy",
    loss_unit="nats",
    headline="test accuracy {test_accuracy:.2%}",
    score=Score("test_accuracy", ".2%"),
    predictions=predictions,
)
