"""Classification: predicts one of several classes for each example.

The weights of the examples, such as class weights, apply to the loss alone. All other metrics count examples.

Dims: B examples, C classes, K classes of a prediction.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.data import Labels
from jaxpar.tasks import confusion, cross_entropy
from jaxpar.tasks.task import Names, Prediction, Score, Sums, Task, Terms


def sums(logits_BC: jax.Array, batch: Mapping[str, jax.Array]) -> Sums:
    """Return the weighted sum of the cross entropy in nats, and the numbers of correct answers and of examples.

    Args:
      logits_BC: any float dtype; converted to float32.
      batch: "labels", integers, and "weights", both [B].
    """
    is_real_B = batch["weights"] > 0
    is_correct_B = jnp.argmax(logits_BC.astype(jnp.float32), axis=-1) == batch["labels"]
    counts = {"correct": is_real_B & is_correct_B, "examples": is_real_B}
    terms = {name: jnp.sum(where, dtype=jnp.float32) for name, where in counts.items()}
    return cross_entropy.sums(logits_BC, batch)._replace(terms=terms)


def evaluation_terms(logits_BC: jax.Array, batch: Mapping[str, jax.Array]) -> Terms:
    """Return the confusion matrix, unless there are more than MAX_CLASSES classes."""
    if logits_BC.shape[-1] > confusion.MAX_CLASSES:
        return {}
    logits_BC = logits_BC.astype(jnp.float32)
    return {confusion.CONFUSION: confusion.count_confusions(logits_BC, batch["labels"], batch["weights"] > 0)}


def metrics(sums: Sums) -> dict[str, float]:
    """Return the fraction of correct answers and, for an evaluation, the macro-averaged F1."""
    results = {"accuracy": float(sums.terms["correct"] / sums.terms["examples"])}
    if confusion.CONFUSION in sums.terms:
        results["macro_f1"] = confusion.macro_f1(sums.terms[confusion.CONFUSION])
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
