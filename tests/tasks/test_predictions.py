"""Tests the predictions that each task makes from model outputs against values computed by hand."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxpar import data, tasks
from jaxpar.config import default_config
from jaxpar.data import DataInfo
from jaxpar.tasks import Names, Task
from jaxpar.tasks.token_classification import read_entities
from tests.tasks.test_token_classification import NAMES as TAGS
from tests.tasks.test_token_classification import SENTENCES, config_of, conlleval

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film"]
INFO = DataInfo("text", (6,), 3, ("neg", "neutral", "pos"), len(WORDS), 0, ("stars", "price"))
LOG3 = math.log(3)


def decode(tokens: Sequence[int]) -> str:
    return " ".join(WORDS[token] for token in tokens if token > 3)


def task_of(name: str) -> Task:
    return tasks.TASKS[name](default_config())


def predict(
    task: Task, outputs: np.ndarray, batch: Mapping[str, np.ndarray], names: Names, top_k: int = 1
) -> list[dict[str, Any]]:
    """Return the predictions for model outputs on the host."""
    if task.positions:
        batch = {**batch, "positions": task.positions(batch)}
    arrays = {name: jax.numpy.asarray(x) for name, x in batch.items()}
    found: list[Any] = task.predictions(
        jax.device_get(task.readout(jax.numpy.asarray(outputs), arrays, top_k)), batch, names
    )
    return found


def logits_of(choices: list[list[int]]) -> np.ndarray:
    """Return logits log 3 at the chosen words and 0 at the other 7, so that a chosen word has probability 3 / 10."""
    return (LOG3 * np.eye(len(WORDS))[choices]).astype(np.float32)


def test_classification() -> None:
    logits_BC = np.array([[0, LOG3, 0], [500, -500, 500 + LOG3]], np.float32)  # exp overflows in the second example
    found = predict(task_of("classification"), logits_BC, {}, Names(INFO, decode))
    assert [one["class"] for one in found] == ["neutral", "pos"]
    assert [one["probability"] for one in found] == pytest.approx([3 / 5, 3 / 4], rel=1e-5)
    assert all("top" not in one for one in found)
    found = predict(task_of("classification"), logits_BC, {}, Names(INFO, decode), top_k=2)
    top = [{"class": "neutral", "probability": 3 / 5}, {"class": "neg", "probability": 1 / 5}]
    for one, expected in zip([found[0], *found[0]["top"]], [top[0], *top], strict=True):
        assert (one["class"], one["probability"]) == (expected["class"], pytest.approx(expected["probability"], 1e-5))
    every = predict(task_of("classification"), logits_BC, {}, Names(INFO, decode), top_k=9)
    assert [len(one["top"]) for one in every] == [3, 3]  # there are only three classes


def test_regression() -> None:
    outputs_BK = np.array([[4.5, 12.25], [-1, 0]], np.float32)
    found = predict(task_of("regression"), outputs_BK, {}, Names(INFO, decode))
    assert found == [{"stars": 4.5, "price": 12.25}, {"stars": -1.0, "price": 0.0}]


def test_token_classification() -> None:
    """Words start where weights are nonzero. "London" has two tokens; the B-PER at the second must be ignored."""
    predicted_BT = np.array([[3, 3, 4, 0, 1, 3], [0, 2, 0, 0, 0, 0]])
    batch = {"weights": np.array([[0, 1, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0]], np.float32)}
    names = Names(INFO._replace(class_names=TAGS), decode)
    assert predict(task_of("token_classification"), np.eye(5)[predicted_BT], batch, names) == [
        {
            "tags": ["B-PER", "I-PER", "O", "B-LOC"],
            "entities": [{"type": "PER", "start": 0, "stop": 2}, {"type": "LOC", "start": 3, "stop": 4}],
        },
        {"tags": ["I-LOC"], "entities": [{"type": "LOC", "start": 0, "stop": 1}]},
    ]


@pytest.mark.parametrize("seed", range(4))
def test_entities_equal_conlleval(seed: int) -> None:
    tags = [TAGS[number] for number in np.random.default_rng(seed).integers(0, len(TAGS), 200)]
    found = read_entities(tags)
    assert {(one["type"], one["start"], int(str(one["stop"])) - 1) for one in found} == conlleval(tags)
    assert len(found) == len(conlleval(tags)) > 50


def test_masked_lm() -> None:
    inputs = np.array([[1, 4, 3, 7, 2, 0], [1, 3, 3, 2, 0, 0]], np.int32)  # [CLS] a [MASK] film [SEP]
    weights = (inputs == 3).astype(np.float32)
    weights[1, 1] = 0  # a [MASK] without a prediction
    batch = {"inputs": inputs, "mask": inputs > 0, "weights": weights}
    logits_BTV = logits_of([[6, 6, 5, 6, 6, 6], [6, 6, 7, 6, 6, 6]])
    found = predict(task_of("masked_lm"), logits_BTV, batch, Names(INFO, decode))
    assert [one["text"] for one in found] == ["a good film", "film"]
    expected = [[{"position": 2, "token": "good"}], [{"position": 2, "token": "film"}]]
    for one, tokens in zip(found, expected, strict=True):
        assert one["tokens"] == [token | {"probability": pytest.approx(0.3, rel=1e-6)} for token in tokens]
    assert inputs[0, 2] == 3  # the batch is not modified
    [first, second] = predict(task_of("masked_lm"), logits_BTV * 2, batch, Names(INFO, decode), top_k=2)
    assert [one["token"] for one in first["tokens"][0]["top"]] == ["good", ""]  # the others are equal
    assert first["text"] == "a good film"
    assert len(second["tokens"]) == 1


def test_causal_lm() -> None:
    logits_BTV = logits_of([[6, 6, 5], [7, 6, 6]])
    task, names = task_of("causal_lm"), Names(INFO, decode)
    found = predict(task, logits_BTV, {"mask": np.ones((2, 3), bool)}, names)
    assert [one["next"] for one in found] == ["good", "bad"]
    found = predict(task, logits_BTV, {"mask": np.array([[1, 1, 1], [1, 0, 0]], bool)}, names)
    assert [one["next"] for one in found] == ["good", "film"]
    assert [one["probability"] for one in found] == pytest.approx([0.3, 0.3], rel=1e-6)


def test_the_labels_of_files_read_as_the_files_have_them(tmp_path: Path) -> None:
    """Model outputs that match all labels, with batches and a tokenizer from the data package."""
    sentences = {" ".join(words): tags for words, tags in SENTENCES}
    config = config_of(tmp_path, SENTENCES)
    for task in (task_of(name) for name in ("token_classification", "masked_lm")):
        config.task = task.name
        if task.name == "masked_lm":
            (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences))
            config.data.train, config.data.text_columns = str(tmp_path / "b.jsonl"), ("text",)
        dataset = data.load(config, task.labels, tmp_path / task.name)
        made = Tokenizer.from_file(str(tmp_path / task.name / "tokenizer.json"))
        batch = data.Batches(dataset.train, batch_size=2, seed=0, shuffle=False).batch(0)
        logits = np.eye(max(dataset.info.vocab_size, dataset.info.num_outputs))[batch["labels"]]
        found = predict(task, logits, batch, Names(dataset.info, made.decode))
        if task.name == "masked_lm":
            whole = {made.decode(made.encode(text).ids) for text in sentences}
            assert {one["text"] for one in found} == whole
            assert all(one["tokens"] for one in found)
        else:
            assert sorted(map(str, (one["tags"] for one in found))) == sorted(map(str, sentences.values()))


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_task_is_read_here_and_has_a_score(name: str) -> None:
    assert f"test_{name}" in globals()
    task = task_of(name)
    ones = tasks.Sums(np.ones(()), {term: np.ones(shape) for term, shape in task.terms.items()}, np.ones(()))
    results = task.results(task.all_metrics(ones))
    assert format(results[task.score.key], task.score.format)
    assert task.headline.format(**results)
    assert task.score.is_exponential == (task.score.key == "perplexity")
    assert task.num_sums == sum(np.size(leaf) for leaf in (ones.loss, *ones.terms.values(), ones.weight))
