"""Tests that class weights reach the training batches, and only these, and that the loss is their weighted mean."""

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from sklearn.metrics import log_loss
from sklearn.utils.class_weight import compute_class_weight

from jaxpar import data, tasks
from jaxpar.config import default_config, override
from jaxpar.data import Batches, Labels
from jaxpar.data.class_weights import balanced_weights
from jaxpar.data.examples import Dataset
from jaxpar.errors import UserError
from jaxpar.tasks.classification import TASK

WEIGHTS_C = np.array([1, 1, 1, 5, 1, 1, 1, 0.25], np.float32)
JSON = '{"3": 5, "7": 0.25}'


def load(kind: str, weights: str) -> Dataset:
    """Load synthetic data of 8 classes, which a model of this name can read."""
    config = default_config()
    config.data.synthetic_examples, config.data.class_weights = 400, weights
    override(config, [f"--config.model.name={kind}", "--config.data.source=synthetic"])
    return data.load(config, Labels.CLASSES, None)  # type: ignore[arg-type]  # synthetic data needs no workdir


def everything(split: data.Split, shard: slice = slice(None), *, shuffle: bool = True) -> dict[str, np.ndarray]:
    """Return all examples of a split in one batch, with 3 padding examples."""
    return Batches(split, batch_size=len(split) + 3, seed=0, shuffle=shuffle).batch(0, shard)


@pytest.mark.parametrize("kind", ["bert", "vit", "mlp"])
def test_training_examples_have_the_weights_of_their_classes(kind: str) -> None:
    dataset, plain = load(kind, JSON), load(kind, "")
    batch, of_plain = everything(dataset.train), everything(plain.train)
    assert (batch["weights"] == 0).sum() == 3
    np.testing.assert_array_equal(batch["weights"], WEIGHTS_C[batch["labels"]] * of_plain["weights"])
    for name in batch.keys() - {"weights"}:
        np.testing.assert_array_equal(batch[name], of_plain[name])
    np.testing.assert_array_equal(everything(dataset.train, slice(2, 5))["weights"], batch["weights"][2:5])
    for split in (dataset.validation, dataset.test):
        assert split is not None
        assert set(everything(split, shuffle=False)["weights"]) == {0, 1}


def test_balanced_weights_equal_those_of_scikit_learn() -> None:
    dataset = load("mlp", "balanced")
    batch = everything(dataset.train)
    labels = batch["labels"][batch["weights"] > 0]
    expected = compute_class_weight("balanced", classes=np.arange(8), y=labels)
    assert len(set(expected)) > 2
    is_real = batch["weights"] > 0
    np.testing.assert_allclose(batch["weights"][is_real], expected[labels], rtol=1e-6)


def test_a_class_without_examples_changes_only_the_scale() -> None:
    weights_C = balanced_weights(np.array([0, 0, 0, 2]), 3)
    assert weights_C[2] / weights_C[0] == 3
    assert np.isfinite(weights_C).all()


def test_the_loss_is_the_weighted_mean_and_accuracy_counts_examples() -> None:
    """Over two batches of different total weight, as torch.nn.CrossEntropyLoss(weight=...) is over one."""
    rng = np.random.default_rng(0)
    labels = np.repeat([3, 0, 1, 2, 4, 5, 6, 7], 4)
    logits = rng.normal(size=(32, 8)).astype(np.float32)
    logits[:10, 3] += 5  # class 3, of weight 5, is mostly correct
    weights = WEIGHTS_C[labels]
    halves = [
        TASK.sums(
            jnp.asarray(logits[half]), {"labels": jnp.asarray(labels[half]), "weights": jnp.asarray(weights[half])}
        )
        for half in (slice(0, 16), slice(16, 32))
    ]
    found = TASK.all_metrics(tasks.add_up(halves))
    probabilities = np.exp(logits.astype(np.float64))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    assert found["loss"] == pytest.approx(log_loss(labels, probabilities, sample_weight=weights), rel=1e-6)
    assert found["accuracy"] == (logits.argmax(axis=1) == labels).mean()
    assert abs(found["accuracy"] - np.average(logits.argmax(axis=1) == labels, weights=weights)) > 0.1


MISTAKES = {
    "blanced": r"is 'blanced', which is not JSON \(.*\); it must be empty, 'balanced' or JSON such as \{\"spam\": 5",
    '{"3": 2, "3": 1}': "the key '3' occurs twice",
    "[1, 2]": r"is '\[1, 2\]'; it must be empty, 'balanced' or JSON such as",
    '{"3": -1}': "config.data.class_weights is -1 for class '3'; it must be a number from 1e-6 to 1e6",
    '{"3": 0}': "is 0 for class '3'",
    '{"3": 1e7}': "is 10000000.0 for class '3'",
    '{"3": true}': "is True for class '3'",
    '{"3": "2"}': "is '2' for class '3'",
}


@pytest.fixture
def config() -> ConfigDict:
    config = default_config()
    config.data.source = "synthetic"
    return config


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_found_before_data_is_read(text: str, config: ConfigDict) -> None:
    config.data.class_weights = text
    with pytest.raises(UserError, match=MISTAKES[text]) as caught:
        data.check_data(config, Labels.CLASSES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("labels", [one for one in Labels if one is not Labels.CLASSES])
def test_other_tasks_have_no_class_weights(labels: Labels, config: ConfigDict) -> None:
    config.task, config.data.class_weights = labels.value, "balanced"
    message = f"class_weights is 'balanced'; it must be empty, because task {labels.value} has no classes of examples"
    with pytest.raises(UserError, match=message):
        data.check_data(config, labels)


def test_a_class_that_does_not_exist() -> None:
    with pytest.raises(UserError, match=r"with the class '33'; it must be one of '0', '1', '2', '3', '4', \.\.\."):
        load("mlp", '{"33": 2}')
