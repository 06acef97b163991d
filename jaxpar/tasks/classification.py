"""One of several classes for each example."""

from jaxpar.data import Labels
from jaxpar.tasks import cross_entropy
from jaxpar.tasks.task import Task

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
)
