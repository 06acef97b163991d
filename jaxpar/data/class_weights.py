"""Class weights: the factor by which each training example of a class counts in the loss.

They multiply the weights of the examples in training batches, so that the loss is the weighted mean of
torch.nn.CrossEntropyLoss(weight=...) over a whole batch, however a strategy divides it. Validation and test splits are
not weighted.

Dims: N examples of the split, B examples of the global batch, C classes.
"""

from dataclasses import dataclass

import numpy as np
from ml_collections import ConfigDict

from jaxpar.data.examples import Arrays, Dataset, Labels, SameSize, Split, Texts
from jaxpar.errors import UserError, nearest
from jaxpar.files import parse_json, shortened

BALANCED = "balanced"
LEAST, MOST = 1e-6, 1e6  # float32 holds sums of such weights; a weight of 0 would mark examples as padding


def check_class_weights(config: ConfigDict, labels: Labels) -> None:
    """Raise UserError if config.data.class_weights is invalid. The names of the classes are not known yet."""
    text = config.data.class_weights
    if text and labels is not Labels.CLASSES:
        why = f"because task {config.task} has no classes of examples"
        raise UserError(f"config.data.class_weights is {shortened(text)}; it must be empty, {why}")
    if text not in ("", BALANCED):
        _parse(text)


def weighted(dataset: Dataset, text: str) -> Dataset:
    """Return the data set with class weights on its training split. text: config.data.class_weights.

    Raises UserError for a class that does not exist.
    """
    if not text:
        return dataset
    assert isinstance(dataset.train, Texts | SameSize)
    labels_N = dataset.train.labels_N
    assert labels_N is not None
    names = dataset.info.class_names
    if text == BALANCED:
        weights_C = balanced_weights(labels_N, len(names))
    else:
        weights = _parse(text)
        if unknown := [name for name in weights if name not in names]:
            listed, hint = ", ".join(map(repr, names[:5])) + ", ..." * (len(names) > 5), nearest(unknown[0], names)
            what = f"{shortened(text)}, with the class {shortened(unknown[0])}"
            raise UserError(f"config.data.class_weights is {what}; it must be one of {listed}{hint and '.' + hint}")
        weights_C = np.array([weights.get(name, 1.0) for name in names])
    return dataset._replace(train=Weighted(dataset.train, weights_C.astype(np.float32)))


def balanced_weights(labels_N: np.ndarray, num_classes: int) -> np.ndarray:
    """Return N / (C x examples of the class), float64 [C], as scikit-learn's class_weight="balanced" does.

    A class without examples has the weight of one with a single example, which is never used.
    """
    count_C = np.bincount(labels_N, minlength=num_classes)
    return len(labels_N) / (num_classes * np.maximum(count_C, 1))


@dataclass(frozen=True)
class Weighted:
    """A split whose examples have the weights of their classes."""

    split: Split
    weights_C: np.ndarray  # float32, positive

    @property
    def lengths_N(self) -> np.ndarray | None:
        """See Split."""
        return self.split.lengths_N

    def __len__(self) -> int:
        return len(self.split)

    def gather(self, examples_B: np.ndarray, shard: slice, random: np.random.Generator, *, training: bool) -> Arrays:
        """See Split."""
        batch = self.split.gather(examples_B, shard, random, training=training)
        return {**batch, "weights": batch["weights"] * self.weights_C[batch["labels"]]}


def _parse(text: str) -> dict[str, float]:
    """Return the weights by class name. Raises UserError."""
    example = f'{BALANCED!r} or JSON such as {{"spam": 5, "ham": 1}}'
    try:
        weights = parse_json(text)
    except ValueError as error:
        why = f"which is not JSON ({error})"
        raise UserError(f"config.data.class_weights is {shortened(text)}, {why}; it must be empty, {example}") from None
    if not isinstance(weights, dict) or not weights:
        raise UserError(f"config.data.class_weights is {shortened(text)}; it must be empty, {example}")
    for name, weight in weights.items():
        if type(weight) not in (int, float) or not LEAST <= weight <= MOST:
            what = f"{shortened(weight)} for class {shortened(name)}"
            raise UserError(f"config.data.class_weights is {what}; it must be a number from 1e-6 to 1e6")
    return weights
