"""Classification: predicts one of several classes for each example.

Dims: B examples, C classes, K classes of a prediction.
"""

from collections.abc import Mapping

import numpy as np

from jaxpar.data import Labels
from jaxpar.tasks import cross_entropy
from jaxpar.tasks.task import Names, Prediction, Score, Task


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
    terms=cross_entropy.TERMS,
    sums=cross_entropy.sums,
    metrics=cross_entropy.accuracy,
    curve="accuracy",
    loss_unit="nats",
    headline="test accuracy {test_accuracy:.2%}",
    score=Score("test_accuracy", ".2%"),
    readout=lambda logits_BC, _batch, top_k: cross_entropy.top_choices(logits_BC, top_k),
    predictions=predictions,
    ranks_choices=True,
)
