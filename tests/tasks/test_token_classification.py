"""Tests the entities against the rules of conlleval, and the alignment of tags from JSON lines with tokens."""

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxpar import data, tasks
from jaxpar.config import default_config
from jaxpar.data import Batches, Labels
from jaxpar.errors import UserError
from jaxpar.tasks.token_classification import TASK

NAMES = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
Entity = tuple[str, int, int]


def conlleval(tags: list[str]) -> set[Entity]:
    """Return (type, first word, last word), by startOfChunk and endOfChunk of conlleval for tags B, I and O."""
    found, begin = set(), 0
    before, type_before = "O", ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        ends = (before in "BI" and prefix in "BO") or (before != "O" and type_before != kind)
        starts = prefix == "B" or (before == "O" and prefix == "I") or (prefix != "O" and type_before != kind)
        if ends:
            found.add((type_before, begin, place - 1))
        if starts:
            begin = place
        before, type_before = prefix, kind
    return found


def test_the_reference_is_right_where_it_is_known() -> None:
    """The example of seqeval's README, and entities that begin with I."""
    tags = ["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O", "B-PER", "I-PER"]
    assert conlleval(tags) == {("MISC", 3, 5), ("PER", 7, 8)}
    assert conlleval(["I-A", "I-A", "I-B", "B-B", "O", "I-A"]) == {("A", 0, 1), ("B", 2, 2), ("B", 3, 3), ("A", 5, 5)}


@pytest.mark.parametrize("seed", range(4))
def test_entities_equal_conlleval(seed: int) -> None:
    """Words start at random tokens and have random tags, so most entities are not well-formed."""
    rng = np.random.default_rng(seed)
    shape = (16, 20)
    actual, weights = rng.integers(0, 5, shape), rng.integers(0, 2, shape).astype(np.float32)
    predicted = np.where(rng.random(shape) < 0.7, actual, rng.integers(0, 5, shape))
    weights[5] = 0  # a padding example
    logits = 9 * np.eye(5, dtype=np.float32)[predicted]
    batch = {"labels": jnp.asarray(actual), "weights": jnp.asarray(weights)}
    sums = jax.device_get(jax.jit(TASK.sums)(jnp.asarray(logits), batch))
    counts = np.zeros(3)
    for row in range(len(actual)):
        words = weights[row] > 0
        ours, theirs = (conlleval([NAMES[tag] for tag in tags[row][words]]) for tags in (actual, predicted))
        counts += [len(ours), len(theirs), len(ours & theirs)]
    assert [float(sums.terms[name]) for name in ("actual", "predicted", "matched")] == counts.tolist()
    metrics = TASK.all_metrics(tasks.add_up([sums]))
    assert metrics["precision"] == pytest.approx(counts[2] / counts[1])
    assert metrics["recall"] == pytest.approx(counts[2] / counts[0])
    assert metrics["f1"] == pytest.approx(2 * counts[2] / (counts[0] + counts[1]))
    assert 0.1 < metrics["f1"] < 0.9
    right = ((actual == predicted) * weights).sum() / weights.sum()
    assert metrics["accuracy"] == pytest.approx(right)
    # The counts of two halves add up to the counts of the batch.
    halves = [TASK.sums(jnp.asarray(logits[i::2]), {k: x[i::2] for k, x in batch.items()}) for i in range(2)]
    assert tasks.add_up(halves).terms == {name: float(x) for name, x in sums.terms.items()}


SENTENCES = [
    (["Ada", "Lovelace", "lived", "in", "London", "."], ["B-PER", "I-PER", "O", "O", "B-LOC", "O"]),
    (["Unforgettable", "Paris", "!"], ["O", "I-LOC", "O"]),
]


def config_of(folder: Path, sentences: list[Any], **changes: Any) -> Any:
    lines = [json.dumps({"tokens": words, "tags": tags}) for words, tags in sentences]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    config = default_config()
    config.task, config.cache_dir = "token_classification", str(folder / "cache")
    config.data.source, config.data.train = "jsonl", str(folder / "a.jsonl")
    config.data.text_columns, config.data.label_column = ("tokens",), "tags"
    config.data.validation_fraction = config.data.test_fraction = 0.0
    config.data.vocab_size, config.data.max_length = 40, 32
    config.update_from_flattened_dict({f"data.{key}": value for key, value in changes.items()})
    return config


def test_a_tag_is_at_the_first_token_of_its_word(tmp_path: Path) -> None:
    config = config_of(tmp_path, SENTENCES)
    dataset = data.load(config, Labels.TAGS, tmp_path / "run")
    assert dataset.info.class_names == NAMES
    made = Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json"))
    batch = Batches(dataset.train, batch_size=3, seed=0, shuffle=False).batch(0)
    rows = {tuple(row[row > 0].tolist()): i for i, row in enumerate(batch["inputs"]) if batch["weights"][i].any()}
    assert len(rows) == 2  # the third example is padding
    for words, tags in SENTENCES:
        pieces = [made.encode(word, add_special_tokens=False).ids for word in words]
        tokens = [made.token_to_id("[CLS]"), *itertools.chain(*pieces), made.token_to_id("[SEP]")]
        assert len(tokens) > len(words) + 2  # some words have several tokens
        labels, weights = batch["labels"][rows[tuple(tokens)]], batch["weights"][rows[tuple(tokens)]]
        first = 1 + np.cumsum([0, *map(len, pieces[:-1])])
        assert [NAMES[i] for i in labels[first]] == tags
        np.testing.assert_array_equal(np.flatnonzero(weights), first)


@pytest.mark.parametrize("word", [" ", "\u200b", "\a"])
def test_words_without_tokens_have_labels_and_numbers(word: str, tmp_path: Path) -> None:
    """Words can be spaces, zero-width characters or control characters, as in CoNLL files."""
    tags = ["O", "B-PER", "O", "I-LOC"]
    dataset = data.load(config_of(tmp_path, [([word, "Ada", word, "London"], tags)]), Labels.TAGS, tmp_path / "run")
    batch = Batches(dataset.train, batch_size=1, seed=0, shuffle=False).batch(0)
    at = np.flatnonzero(batch["weights"][0])
    assert [dataset.info.class_names[label] for label in batch["labels"][0, at]] == tags
    assert batch["mask"][0, at].all()
    made = Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json"))
    assert [made.id_to_token(token) == "[UNK]" for token in batch["inputs"][0, at]] == [True, False, True, False]
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    assert TASK.sums(jnp.zeros((*batch["weights"].shape, len(NAMES))), arrays).weight == 4
    logits = jnp.eye(dataset.info.num_outputs)[batch["labels"]]
    readout = jax.device_get(TASK.readout(logits, arrays, 1))
    [found] = TASK.predictions(readout, batch, tasks.Names(dataset.info, made.decode))
    assert found["tags"] == tags
    assert found["entities"] == [{"type": "PER", "start": 1, "stop": 2}, {"type": "LOC", "start": 3, "stop": 4}]


def test_words_that_are_cut_off_have_no_label(tmp_path: Path) -> None:
    config = config_of(tmp_path, SENTENCES[:1], max_length=8, length_buckets=(8,))
    batch = Batches(data.load(config, Labels.TAGS, tmp_path / "run").train, batch_size=1, seed=0, shuffle=False).batch(
        0
    )
    assert batch["inputs"].shape == (1, 8)
    assert 1 <= batch["weights"].sum() < 6


MISTAKES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "tag": (["DET"], {}, "a.jsonl:3: a tag is 'DET'; it must be O, B-TYPE or I-TYPE"),
    "number": (["O", "O"], {}, "a.jsonl:3 has 1 words, but 2 tags"),
    "list": ("O", {}, "a.jsonl:3: column 'tags' must be a non-empty list of non-empty strings"),
    "csv": (["O"], {"source": "csv"}, "source is 'csv'; for task token_classification it must be one of jsonl"),
    "pair": (["O"], {"text_columns": ("tokens", "more")}, "it must name one column for task token_classification"),
    "label": (["O"], {"label_column": ""}, "it must name the label column for task token_classification"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, tmp_path: Path) -> None:
    tags, changes, message = MISTAKES[name]
    config = config_of(tmp_path, [*SENTENCES, (["the"], tags)], **changes)
    with pytest.raises(UserError, match=message):
        data.load(config, Labels.TAGS, tmp_path / "run")


def test_without_any_entity(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.data.train is '.*a.jsonl', in which all tags are 'O'"):
        data.load(config_of(tmp_path, [(["the", "end"], ["O", "O"])]), Labels.TAGS, tmp_path / "run")


def test_a_type_that_training_lacks(tmp_path: Path) -> None:
    other = tmp_path / "test.jsonl"
    other.write_text(json.dumps({"tokens": ["IBM"], "tags": ["B-ORG"]}) + "\n")
    with pytest.raises(UserError, match=r"test.jsonl:1: the label 'ORG' is not one of the 2 labels in the"):
        data.load(config_of(tmp_path, SENTENCES, test=str(other)), Labels.TAGS, tmp_path / "run")
