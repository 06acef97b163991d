"""Tests the confusion matrix and the metrics of each class against scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.dummy import DummyClassifier
from sklearn.metrics import confusion_matrix, f1_score, precision_recall_fscore_support

from jaxpar import tasks
from jaxpar.tasks import classification
from jaxpar.tasks.classification import TASK
from jaxpar.tasks.task import Sums

NUM_CLASSES = 6


def examples(seed: int, num: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits, labels and weights of examples, a quarter of them padding.

    Class 4 has no examples, class 5 is never predicted, and class 0 is neither.
    """
    rng = np.random.default_rng(seed)
    logits_BC = rng.normal(size=(num, NUM_CLASSES)).astype(np.float32)
    logits_BC[:, [0, 5]] = -10
    labels_B = rng.choice([1, 2, 3, 5], num, p=[0.5, 0.2, 0.2, 0.1]).astype(np.int32)
    weights_B = np.where(rng.random(num) < 0.25, 0, rng.uniform(0.1, 5, num)).astype(np.float32)
    return logits_BC, labels_B, weights_B


@pytest.fixture(scope="module")
def sums() -> Sums:
    """Return the evaluation sums of the batches of seeds 1 and 2."""
    evaluate = jax.jit(TASK.evaluation_sums)
    batches = [examples(seed, 80) for seed in (1, 2)]
    return tasks.add_up(
        [jax.device_get(evaluate(logits, {"labels": labels, "weights": w})) for logits, labels, w in batches]
    )


@pytest.fixture(scope="module")
def answers() -> tuple[np.ndarray, np.ndarray]:
    """Return the labels and the predictions of the same examples, without padding."""
    logits_NC, labels_N, weights_N = map(np.concatenate, zip(examples(1, 80), examples(2, 80), strict=True))
    is_real_N = weights_N > 0
    return labels_N[is_real_N], logits_NC[is_real_N].argmax(axis=1)


def test_sums_equal_the_matrix_of_scikit_learn(sums: Sums, answers: tuple[np.ndarray, np.ndarray]) -> None:
    """Weights do not count, except that examples of weight 0 are left out."""
    expected = confusion_matrix(*answers, labels=range(NUM_CLASSES))
    np.testing.assert_array_equal(sums.terms["confusion"], expected)
    assert sums.terms["examples"] == len(answers[0]) < 160
    assert sums.terms["correct"] == np.trace(expected)


def test_metrics_of_classes_equal_scikit_learn(sums: Sums, answers: tuple[np.ndarray, np.ndarray]) -> None:
    """The fixture has a class without examples, one that is never predicted, and one that is neither."""
    expected = precision_recall_fscore_support(*answers, labels=range(NUM_CLASSES), zero_division=0)
    for got, of_class in zip(classification.class_metrics(sums.terms["confusion"]), expected, strict=True):
        np.testing.assert_allclose(got, of_class, rtol=1e-12)
    assert list(classification.occurring_classes(sums.terms["confusion"])) == [1, 2, 3, 4, 5]


def test_macro_f1_and_baseline_equal_scikit_learn(sums: Sums, answers: tuple[np.ndarray, np.ndarray]) -> None:
    labels_N, predicted_N = answers
    assert TASK.all_metrics(sums)["macro_f1"] == pytest.approx(f1_score(labels_N, predicted_N, average="macro"))
    baseline = DummyClassifier(strategy="most_frequent").fit(labels_N[:, None], labels_N)
    common, accuracy = classification.majority(sums.terms["confusion"])
    assert common == baseline.predict([[0]])[0]
    assert accuracy == pytest.approx(baseline.score(labels_N[:, None], labels_N))


@pytest.mark.parametrize("extra", [0, 1])
def test_only_evaluations_of_few_classes_have_a_matrix(extra: int) -> None:
    num_classes = classification.MAX_CLASSES + extra
    batch = {"labels": jnp.zeros(3, jnp.int32), "weights": jnp.ones(3)}
    logits = jnp.zeros((3, num_classes))
    shapes = jax.eval_shape(TASK.evaluation_sums, logits, batch).terms
    assert ("confusion" in shapes) == (extra == 0)
    assert {name: x.shape for name, x in jax.eval_shape(TASK.sums, logits, batch).terms.items()} == TASK.terms
    if extra:
        total = tasks.add_up([TASK.evaluation_sums(logits, batch)])
        assert TASK.all_metrics(total).keys() == {"loss", "accuracy"}
