"""The contract of a task: the sums that a program returns, and the metrics that follow from them.

Programs return sums, not means: sums over replicas, microbatches and batches add up exactly, whatever their sizes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.data import DataInfo, Labels

Readable: TypeAlias = "str | int | float | list[Readable] | dict[str, Readable]"  # as JSON has it
Prediction: TypeAlias = "dict[str, Readable]"  # of one example
Scalar = Any  # a float, or an array without dims of JAX or NumPy
Terms = dict[str, Any]  # arrays by name
# What the last layer returns: numbers for each example, or token; logits of each hidden, or next, token.
Head = Literal["example", "token", "masked_lm", "causal_lm"]


class Sums(NamedTuple):
    """Sums over examples, or over what is predicted of them; float32 in programs, float64 on the host.

    Attributes:
      loss: of weight x loss. Scalar.
      terms: what else the metrics of the task follow from; shapes as in `Task.terms`.
      weight: of the weights. Scalar.
    """

    loss: Scalar
    terms: Terms
    weight: Scalar


class Score(NamedTuple):
    """The metric by which runs of a task are compared.

    Attributes:
      key: its name in result.json.
      format: how it is printed, as a format specification.
      is_exponential: what is compared is its logarithm.
    """

    key: str
    format: str
    is_exponential: bool = False


class Names(NamedTuple):
    """Names that turn the numbers of an output into words.

    Attributes:
      info: of the data: the names of classes and targets.
      decode: token ids -> text, as a tokenizer does.
    """

    info: DataInfo
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True, eq=False)  # a key of what is traced for it
class Task:
    """A purpose that a model is trained for.

    Attributes:
      name: its key in TASKS.
      labels: what it learns from; a data source that lacks them is refused.
      head: of the model; a model that has none of the kind is refused. It makes DataInfo.num_outputs numbers, or
        logits of tokens.
      terms: the shape of each of `Sums.terms`, by name.
      sums: (outputs of the model, batch) -> Sums of the batch's examples. Those of weight 0 do not reach the sums.
      metrics: sums on the host, of positive weight -> metrics by name, besides the loss.
      curve: the metric that is logged and drawn beside the loss.
      loss_unit: for the label of its axis.
      headline: format of the last line of a run, of the keys of result.json.
      score: what runs are compared by.
      predictions: (outputs of the model, batch, names) -> what they predict for each example, in order. On the host,
        in NumPy; a batch as for `sums`, whose labels are not read.
      result_keys: metric of the test split -> its name in result.json, where that is not test_METRIC.
    """

    name: str
    labels: Labels
    head: Head
    terms: Mapping[str, tuple[int, ...]]
    sums: Callable[[jax.Array, Mapping[str, jax.Array]], Sums]
    metrics: Callable[[Sums], dict[str, float]]
    curve: str
    loss_unit: str
    headline: str
    score: Score
    predictions: Callable[[np.ndarray, Mapping[str, np.ndarray], Names], list[Prediction]]
    result_keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_sums(self) -> int:
        """Number of scalars in `Sums`."""
        return 2 + sum(math.prod(shape) for shape in self.terms.values())

    def results(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the test split by their names in result.json."""
        return {self.result_keys.get(name, f"test_{name}"): value for name, value in metrics.items()}

    def zeros(self) -> Sums:
        """Return the sums of no example."""
        terms = {name: np.zeros(shape, np.float32) for name, shape in self.terms.items()}
        return Sums(np.zeros((), np.float32), terms, np.zeros((), np.float32))

    def all_metrics(self, sums: Sums) -> dict[str, float]:
        """Return the loss and the metrics of sums on the host, of positive weight, over any batches."""
        return {"loss": float(mean_loss(sums.loss, sums.weight)), **self.metrics(sums)}


def mean_loss(loss: Scalar, weight: Scalar) -> Scalar:
    """Return loss / weight: 0 where nothing is predicted, as may be in a batch. Scalars, in programs or on the host."""
    maximum = jnp.maximum if isinstance(weight, jax.Array) else np.maximum
    return loss / maximum(weight, 1e-30)


def add_up(parts: Sequence[Sums]) -> Sums:
    """Return the total of sums on the host, in float64."""
    total: Sums = jax.tree.map(lambda *x: np.sum(np.asarray(x, np.float64), axis=0), *parts)
    return total
