"""Tests predictions and metrics against the model applied to one example at a time, and against the run itself."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

import jaxpar
from jaxpar import checkpoint
from jaxpar.errors import UserError
from jaxpar.use.inference import api as loaded
from jaxpar.use.inference import inputs
from jaxpar.use.inference.api import InferenceModel
from jaxpar.use.inference.load import Trained, load_trained
from jaxpar.use.inference.predictor import Predictor
from tests.selection import slow_except
from tests.use.inference.conftest import TrainedRun, records

EXAMPLES = records(40, seed=2)
TASKS = ["classification", "pairs", "regression", "token_classification", "masked_lm", "causal_lm"]


def examples_of(name: str) -> list[Any]:
    """Return what `predict` takes for a run of conftest.py."""
    if name == "pairs":
        return [(one["text"], one["other"]) for one in EXAMPLES]
    if name == "token_classification":
        return [one["words"] for one in EXAMPLES]
    if name == "masked_lm":
        return [f"red [MASK] {one['text']} [MASK]" if place % 3 else one["text"] for place, one in enumerate(EXAMPLES)]
    return [one["text"] for one in EXAMPLES]


def tokens_of(name: str, workdir: Path, example: Any) -> dict[str, np.ndarray]:
    """Return the batch of one example without padding, tokenized by the library alone."""
    made = Tokenizer.from_file(str(workdir / "tokenizer.json"))
    made.enable_truncation(16, direction="left" if name == "causal_lm" else "right")
    is_words, is_special = name == "token_classification", name != "causal_lm"
    text, pair = example if name == "pairs" else (example, None)
    encoding = made.encode(text, pair, is_pretokenized=is_words, add_special_tokens=is_special)
    batch = {"inputs": np.array([encoding.ids], np.int32), "mask": np.ones((1, len(encoding.ids)), bool)}
    if name == "pairs":
        batch["segments"] = np.array([encoding.type_ids], np.int32)
    return batch


def expected_of(name: str, trained: Trained, example: Any) -> Any:
    """Return the prediction for one example, computed on the host from the output of the model on one device."""
    batch = tokens_of(name, trained.workdir, example)
    params = checkpoint.read(trained.workdir / "checkpoints" / str(trained.step)).tree["params"]
    output = np.asarray(jax.jit(trained.model.apply)(params, batch), np.float64)[0]
    made = Tokenizer.from_file(str(trained.workdir / "tokenizer.json"))
    if name == "regression":
        return {"stars": output[0], "price": output[1]}
    probabilities = np.exp(output) / np.exp(output).sum(-1, keepdims=True)
    if name in ("classification", "pairs"):
        best = int(probabilities.argmax())
        return {"class": trained.info.class_names[best], "probability": probabilities[best]}
    if name == "causal_lm":
        best = int(probabilities[-1].argmax())
        return {"next": made.decode([best]), "probability": probabilities[-1, best]}
    if name == "token_classification":
        pieces = [made.encode([word], is_pretokenized=True, add_special_tokens=False).ids for word in example]
        first = 1 + np.cumsum([0, *map(len, pieces[:-1])])
        return {"tags": [trained.info.class_names[output[place].argmax()] for place in first if place < 15]}
    tokens = batch["inputs"][0].copy()
    places = np.flatnonzero(tokens == made.token_to_id("[MASK]"))
    tokens[places] = output[places].argmax(-1)
    return {"text": made.decode(tokens.tolist()), "probabilities": probabilities[places].max(-1).tolist()}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected.items():
        is_listed = key == "probabilities"
        got = [one["probability"] for one in found["tokens"]] if is_listed else found[key]
        assert got == (pytest.approx(value, rel=1e-4) if key not in ("class", "text", "tags", "next") else value), key


@pytest.mark.parametrize("name", slow_except(["masked_lm", "token_classification", "pairs"], TASKS))
def test_predictions_equal_those_of_one_unpadded_example(name: str, trained_run: TrainedRun) -> None:
    """40 examples in two buckets on eight devices, in order; the second half of the batch is padding."""
    examples = examples_of(name)
    model = jaxpar.load(trained_run(name))
    found: list[Any] = model.predict(examples)
    assert len(found) == 40
    lengths = {tokens_of(name, model.trained.workdir, one)["inputs"].shape[1] for one in examples}
    assert min(lengths) <= 8 < max(lengths)
    for place in (0, 3, 17, 39):
        assert_equal(found[place], expected_of(name, model.trained, examples[place]))
    assert len({str(one) for one in found}) > 1


@pytest.mark.parametrize("name", ["classification", "masked_lm"])
def test_devices_windows_and_batches_do_not_matter(
    name: str, trained_run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples, workdir = examples_of(name), trained_run(name)
    expected: list[Any] = jaxpar.load(workdir).predict(examples)
    monkeypatch.setattr(loaded, "WINDOW", 2)
    model = jaxpar.load(workdir, devices=jax.devices()[:1])
    model.predictor = Predictor(model.trained, batch_size=3)  # windows of 6 examples
    found: list[Any] = model.predict(examples)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        if name == "masked_lm":
            assert one["text"] == other["text"]
        else:
            assert (one["class"], one["probability"]) == (other["class"], pytest.approx(other["probability"], rel=1e-5))


def test_the_batch_size(classifier: Path) -> None:
    trained = load_trained(classifier)
    assert Predictor(trained).batch_size == 24
    assert Predictor(trained, 25).batch_size == 32
    sizes = {number: Predictor(trained, 64)._size(number) for number in (1, 8, 9, 33, 65, 1000)}
    assert sizes == {1: 8, 8: 8, 9: 32, 33: 64, 65: 64, 1000: 64}


def test_top_k(classifier: Path) -> None:
    model = jaxpar.load(classifier)
    texts = examples_of("classification")[:5]
    for one, first in zip(model.predict(texts, top_k=3), model.predict(texts), strict=True):
        top: Any = one["top"]
        assert len(top) == 3
        assert one["class"] == top[0]["class"] == first["class"]
        assert top[0]["probability"] >= top[1]["probability"] >= top[2]["probability"]
    every: Any = model.predict(texts, top_k=10)
    assert all(math.isclose(sum(choice["probability"] for choice in one["top"]), 1, rel_tol=1e-5) for one in every)


@pytest.mark.parametrize("name", TASKS[1:])
def test_metrics_equal_those_of_the_run(name: str, trained_run: TrainedRun) -> None:
    workdir = trained_run(name)
    result = json.loads((workdir / "result.json").read_text())
    model = jaxpar.load(workdir)
    suffix = "jsonl" if name == "token_classification" else "csv"
    found = model.evaluate(workdir.parent / f"test.{suffix}")
    expected = {key: value for key, value in model.trained.task.results(found).items() if key in result}
    assert len(expected) >= 2
    for key, value in expected.items():
        # The perplexity is the exponential of the loss, which multiplies its relative error by the loss.
        assert value == pytest.approx(result[key], rel=1e-5 if key == "perplexity" else 1e-6), key


def test_metrics_of_a_file_with_few_classes(classifier: Path, tmp_path: Path) -> None:
    """The indices of classes are those of the run, not those of the file."""
    model = jaxpar.load(classifier)
    texts = [text for text in examples_of("classification") if text.split()[0] == "red"][:8]
    classes = [one["class"] for one in model.predict(texts)]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"{text},red\n" for text in texts))
    assert model.evaluate(tmp_path / "a.csv")["accuracy"] == pytest.approx(classes.count("red") / len(classes))


def test_images(trained_run: TrainedRun) -> None:
    trained = load_trained(trained_run("image"))
    images = np.random.default_rng(0).integers(0, 256, (21, *trained.info.input_shape), np.uint8)
    found: list[Any] = InferenceModel(trained).predict(images)
    params = jax.device_get(trained.params)
    logits = np.asarray(jax.jit(trained.model.apply)(params, {"inputs": jnp.asarray(images)}), np.float64)
    assert [one["class"] for one in found] == [trained.info.class_names[best] for best in logits.argmax(-1)]
    assert [one["probability"] for one in found] == pytest.approx(
        (np.exp(logits.max(-1)) / np.exp(logits).sum(-1)).tolist(), rel=1e-4
    )


MISTAKES: dict[str, tuple[str, Any, str]] = {
    "one text": ("classification", "red cat", r"examples is 'red cat'; it must be a non-empty list of texts"),
    "nothing": ("classification", [], r"examples is \[\]; it must be a non-empty list of texts"),
    "a number": ("classification", ["red", 3], r"examples\[1\] is 3; they must be texts"),
    "not Unicode": ("classification", ["red", "\ud800"], r"examples\[1\] is '.ud800'; it must be valid Unicode"),
    "a generator": ("classification", (text for text in ["red"]), r"it must be a non-empty list of texts"),
    "not pairs": ("pairs", ["red"], r"examples\[0\] is 'red'; they must be pairs of texts"),
    "not words": ("token_classification", [["red"], []], r"examples\[1\] is \[\]; they must be lists of words"),
    "an image": ("classification", np.zeros((1, 4, 4, 3), np.uint8), r"examples is a NumPy array; it must be a list"),
    "a text": ("image", ["red"], r"examples is list; it must be a NumPy array of images"),
    "a shape": ("image", np.zeros((1, 4, 4, 3), np.uint8), r"uint8 \[1, 4, 4, 3\]; it must be uint8 \[N, 32, 32, 3\]"),
    "no tokens": ("causal_lm", ["red", ""], r"texts\[1\]: the text has no tokens"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, trained_run: TrainedRun) -> None:
    run, examples, message = MISTAKES[name]
    with pytest.raises(UserError, match=message):
        jaxpar.load(trained_run(run)).predict(examples)


def test_vectors_that_are_not_finite() -> None:
    vectors = np.array([[0.5, 1], [1, 2], [1, np.inf]], np.float32)
    with pytest.raises(UserError, match="example 2 of the array has values that are not finite; they must be finite"):
        list(inputs.arrays_of(vectors, 4))


def test_prompts_of_another_type(classifier: Path) -> None:
    with pytest.raises(UserError, match=r"prompts is \['a', 3\]; it must be a text or a list of texts"):
        jaxpar.load(classifier).generate(["a", 3])  # type: ignore[list-item]


def test_more_choices_than_the_task_has(trained_run: TrainedRun) -> None:
    with pytest.raises(UserError, match="top_k is 2; it must be 1, because the task is 'regression'"):
        jaxpar.load(trained_run("regression")).predict(["red"], top_k=2)
    with pytest.raises(UserError, match="top_k is 0; it must be an integer of at least 1"):
        jaxpar.load(trained_run("classification")).predict(["red"], top_k=0)


def test_files_that_cannot_be_evaluated(trained_run: TrainedRun, tmp_path: Path) -> None:
    model = jaxpar.load(trained_run("classification"))
    with pytest.raises(UserError, match=r"path is .*a.csv', which does not exist; it must be a file"):
        model.evaluate(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text("text,label\nred,purple\n")
    with pytest.raises(UserError, match=r"a.csv has the label 'purple', which the training data of .* lacks"):
        model.evaluate(tmp_path / "a.csv")
    with pytest.raises(UserError, match="has synthetic data; evaluate reads files"):
        jaxpar.load(trained_run("image")).evaluate(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workdir": 3}, "workdir is 3; it must be the path of a directory"),
        ({"step": "8"}, "step is '8'; it must be an integer, or None"),
        ({"devices": "cpu"}, "devices is 'cpu'; it must be a non-empty list of JAX devices, or None"),
        ({"devices": []}, "devices is []; it must be a non-empty list of JAX devices, or None"),
        ({"devices": [0]}, "devices is [0]; it must be a non-empty list of JAX devices, or None"),
    ],
)
def test_types_of_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        jaxpar.load(**{"workdir": "nowhere", **arguments})
    assert str(caught.value) == message


def test_the_path_to_evaluate_must_be_one(classifier: Path) -> None:
    path: Any = 3
    with pytest.raises(UserError, match=r"^path is 3; it must be the path of a file or a directory$"):
        jaxpar.load(classifier).evaluate(path)


def test_predictions_in_one_call(classifier: Path) -> None:
    texts = examples_of("classification")[:3]
    assert jaxpar.predict(classifier, texts, top_k=2) == jaxpar.load(classifier).predict(texts, top_k=2)
