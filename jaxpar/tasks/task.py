"""The contract of a task: the sums that a compiled program returns, and the metrics computed from them.

Programs return sums rather than means, because sums over replicas, microbatches and batches of any size can be added.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.data import DataInfo, Labels

Readable: TypeAlias = "str | int | float | list[Readable] | dict[str, Readable]"  # a JSON value
Prediction: TypeAlias = "dict[str, Readable]"  # for one example
Scalar = Any  # a float, or a JAX or NumPy array of shape ()
Terms = dict[str, Any]  # arrays by name
# Output of the last layer: numbers per example; numbers per token; logits of the masked tokens; logits of the next
# tokens.
Head = Literal["example", "token", "masked_lm", "causal_lm"]


class Sums(NamedTuple):
    """Sums over examples, or over their predicted positions; float32 in programs, float64 on the host."""

    loss: Scalar  # sum of weight x loss
    terms: Terms  # further sums for the metrics: `Task.terms` and, in an evaluation, also `Task.evaluation_terms`
    weight: Scalar  # sum of the weights


class Score(NamedTuple):
    """The metric that ranks the runs of a task."""

    key: str  # name of the metric in result.json
    format: str  # format specification for printing the metric
    is_exponential: bool = False  # whether to compare runs by the logarithm of the metric


class Names(NamedTuple):
    """Names that make model outputs readable."""

    info: DataInfo  # properties of the data set, with the names of classes and targets
    decode: Callable[[Sequence[int]], str]  # token ids -> text, such as a tokenizer's


@dataclass(frozen=True, eq=False)  # hashed by identity, as a key of traced functions
class Task:
    """A task that a model can be trained for. `outputs` are those of the model's last layer."""

    name: str  # key of the task in TASKS
    labels: Labels  # kind of labels to learn from; data sources without them are rejected
    # kind of head of the model; models without it are rejected. The head returns DataInfo.num_outputs numbers, or
    # logits over the vocabulary.
    head: Head
    terms: Mapping[str, tuple[int, ...]]  # shape of each of `Sums.terms`, by name
    # (outputs, batch) -> sums over the examples of the batch. Examples of weight 0 do not contribute.
    sums: Callable[[Any, Mapping[str, jax.Array]], Sums]
    # sums on the host, of positive weight -> metrics by name, without the loss. An evaluation can have more metrics
    # than a training step.
    metrics: Callable[[Sums], dict[str, float]]
    curve: str  # the metric that is logged and plotted next to the loss
    loss_unit: str  # unit of the loss, for the axis label
    headline: str  # format string of the last line of a run; its fields are keys of result.json
    score: Score  # the metric that ranks runs
    # (outputs, batch, number of choices to rank) -> arrays by name, with B examples in dim 0: what `predictions` needs
    # of the outputs. Part of a program, so that little is copied to the host. The batch has the same keys as for
    # `sums`, and `positions`; its labels are not read.
    readout: Callable[[Any, Mapping[str, jax.Array], int], dict[str, jax.Array]]
    # (readout, batch, names) -> predictions for the examples, in order. Runs on the host in NumPy.
    predictions: Callable[[Mapping[str, np.ndarray], Mapping[str, np.ndarray], Names], list[Prediction]]
    # batch -> batch["positions"] for `readout`, int32 [B, P], the positions of the predicted tokens. None: the task
    # predicts examples or all positions.
    positions: Callable[[Mapping[str, np.ndarray]], np.ndarray] | None = None
    ranks_choices: bool = False  # whether a prediction is the most likely of several choices, so top_k can exceed 1
    rate_unit: str = "examples"  # what a log line counts per second: examples, or tokens, with the MFU if it is known
    # name in result.json of a metric of the test split, if it is not test_METRIC
    result_keys: Mapping[str, str] = field(default_factory=dict)
    # (outputs, batch) -> sums that are added to `Sums.terms` in an evaluation. They can be larger than those of `sums`,
    # which pass between devices in every training step.
    evaluation_terms: Callable[[Any, Mapping[str, jax.Array]], Terms] | None = None
    logged_only: tuple[str, ...] = ()  # metrics that metrics.jsonl contains, but not the printed lines

    @property
    def num_sums(self) -> int:
        """Number of scalars in the `Sums` of a training step."""
        return 2 + sum(math.prod(shape) for shape in self.terms.values())

    def results(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the test split under their names in result.json."""
        return {self.result_keys.get(name, f"test_{name}"): value for name, value in metrics.items()}

    def evaluation_sums(self, outputs: Any, batch: Mapping[str, jax.Array]) -> Sums:
        """Return `sums` with `evaluation_terms`."""
        sums = self.sums(outputs, batch)
        more = self.evaluation_terms(outputs, batch) if self.evaluation_terms else {}
        return sums._replace(terms={**sums.terms, **more})

    def printed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a printed line."""
        return {name: value for name, value in metrics.items() if name not in self.logged_only}

    def zeros(self) -> Sums:
        """Return the sums of a training step over zero examples."""
        terms = {name: np.zeros(shape, np.float32) for name, shape in self.terms.items()}
        return Sums(np.zeros((), np.float32), terms, np.zeros((), np.float32))

    def all_metrics(self, sums: Sums) -> dict[str, float]:
        """Return the loss and the metrics computed from sums on the host; their weight must be positive."""
        assert sums.weight > 0, "nothing was predicted"
        return {"loss": float(mean_loss(sums.loss, sums.weight)), **self.metrics(sums)}


def mean_loss(loss: Scalar, weight: Scalar) -> Scalar:
    """Return loss / weight for scalars, in programs or on the host; 0 if a batch has no predicted positions."""
    maximum = jnp.maximum if isinstance(weight, jax.Array) else np.maximum
    return loss / maximum(weight, 1e-30)


def add_up(parts: Sequence[Sums]) -> Sums:
    """Return the total of several `Sums`, computed on the host in float64."""
    return jax.tree.map(lambda *x: np.sum(np.asarray(x, np.float64), axis=0), *parts)
