import os
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from jaxpar.errors import UserError

from .conftest import check, reviews, write_csv, write_parquet

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "task": ({"task": "clasification"}, r"config.task is 'clasification'; .* Did you mean 'classification'\?"),
    "source": ({"data.source": "cvs"}, r"config.data.source is 'cvs'; it must be one of wordnet.* mean 'csv'\?"),
    "labels of text": ({"data.source": "text"}, "config.data.source is 'text', which has no labels"),
    "tokens of images": ({"task": "masked_lm", "data.source": "mnist"}, "'masked_lm', which needs text; with mnist"),
    "tokens of vectors": (
        {"task": "causal_lm", "data.source": "synthetic", "model.name": "mlp"},
        "'causal_lm', which needs text; with synthetic data for the model mlp it must be classification",
    ),
    "no file named": ({"data.source": "csv"}, "train is empty; it must be a path when config.data.source is 'csv'"),
    "missing": ({"data.train": "good.csw"}, r"train is 'good.csw', which does not exist; .* Did you mean good.csv\?"),
    "missing folder": ({"data.train": "no/such.csv"}, "no/such.csv', which .* The directory no does not exist either"),
    "missing test": ({"data.test": "none"}, "config.data.test is 'none', which does not exist; it must be a file"),
    "empty": ({"data.validation": "empty.csv"}, "config.data.validation is 'empty.csv', which is empty"),
    "directory": ({"data.train": "folder"}, r"train is 'folder', which is a directory; .* a glob such as folder/\*"),
    "suffix": (
        {"data.train": "good.parquet"},
        "'good.parquet', which has the extension of a parquet file; it must be a csv file, because config.data.source",
    ),
    "suffix 2": ({"data.source": "tsv"}, "'good.csv', which has the extension of a csv file; it must be a tsv file"),
    "suffix 3": (
        {"data.source": "parquet", "data.train": "good.txt"},
        "config.data.train is 'good.txt'; it must end in .parquet, because config.data.source is 'parquet'",
    ),
    "shipped": ({"data.source": "wordnet"}, "it must be empty when config.data.source is 'wordnet'"),
    "image file": ({"data.source": "mnist"}, "'good.csv'; it must be the directory that contains the mnist files"),
    "image test": (
        {"data.source": "cifar10", "data.train": "folder", "data.test": "good.csv"},
        "config.data.test is 'good.csv'; it must be empty, because cifar10 has its own test file",
    ),
    "fraction": ({"data.test_fraction": 1.5}, "test_fraction is 1.5; it must be at least 0 and less than 1"),
    "negative": ({"data.validation_fraction": -0.1}, "config.data.validation_fraction is -0.1"),
    "fractions": (
        {"data.validation_fraction": 0.5, "data.test_fraction": 0.5},
        r"validation_fraction \+ test_fraction is 0.5 \+ 0.5; it must be less than 1",
    ),
    "no buckets": ({"data.length_buckets": ()}, r"config.data.length_buckets is \(\); it must be at least one length"),
    "buckets": ({"data.length_buckets": (32, 16)}, r"length_buckets is \(32, 16\); it must be .* in ascending order"),
    "negative length": (
        {"model.max_length": -7},
        "config.model.max_length is -7; for classification it must be at least 8",
    ),
    "length": ({"data.max_length": 2}, "config.data.max_length is 2; for classification it must be at least 8"),
    "positions": (
        {"data.max_length": 600, "model.max_length": 512},
        r"config.data.max_length is 600; it must be at most config.model.max_length \(512\)",
    ),
    "vocabulary": ({"data.vocab_size": 3}, "config.data.vocab_size is 3; it must be at least 32"),
    "mask": ({"task": "masked_lm", "data.mask_fraction": 1.0}, "config.data.mask_fraction is 1.0"),
    "columns": ({"data.text_columns": ("a", "b", "c")}, "it must name one column or two different columns"),
    "same column": ({"data.text_columns": ("a", "a")}, "it must name one column or two different columns"),
    "pair": ({"task": "causal_lm", "data.text_columns": ("a", "b")}, "must name one column for task causal_lm"),
    "pair of one": (
        {"data.source": "wordnet", "data.train": "", "data.text_columns": ("a", "b")},
        "it must name one column for source 'wordnet'",
    ),
    "label is text": ({"data.label_column": "text"}, "label_column is 'text'; it must not be one of text_columns"),
    "no label": ({"data.label_column": ""}, "config.data.label_column is empty; it must name the label column"),
    "tokenizer": ({"data.tokenizer": "tokenizr.json"}, "tokenizer is 'tokenizr.json', which does not exist"),
    "directory without": ({"model.init_from": "folder"}, "no tokenizer.json or vocab.txt; set config.data.tokenizer"),
    "no targets of vectors": (
        {"task": "regression", "data.source": "synthetic", "model.name": "mlp", "data.target_columns": ()},
        r"config.data.target_columns is \(\); it must name at least one column, each once",
    ),
    "threads": ({"data.num_threads": -1}, "config.data.num_threads is -1; it must be at least 0"),
    "prefetch": ({"data.prefetch": 0}, "config.data.prefetch is 0; it must be at least 1"),
    "examples": ({"data.synthetic_examples": 1}, "config.data.synthetic_examples is 1; it must be at least 2"),
}  # fmt: skip


@pytest.fixture
def good(config: ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConfigDict:
    """Return a valid config, in a directory with files."""
    monkeypatch.chdir(tmp_path)
    write_csv(Path("good.csv"), reviews(20))
    write_csv(Path("good.txt"), reviews(20))
    write_parquet(Path("good.parquet"), reviews(20))
    Path("empty.csv").write_text("")
    Path("folder").mkdir()
    config.data.source, config.data.train = "csv", "good.csv"
    return config


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_name_the_key(name: str, good: ConfigDict) -> None:
    changes, message = MISTAKES[name]
    check(good)
    if name == "no file named":
        good.data.train = ""
    good.update_from_flattened_dict(changes)
    with pytest.raises(UserError, match=message) as caught:
        check(good)
    assert "\n" not in str(caught.value)
    assert not Path("cache").exists()


def test_a_file_that_may_not_be_read(good: ConfigDict, monkeypatch: pytest.MonkeyPatch) -> None:
    """os.access is replaced, because the superuser can read any file."""
    monkeypatch.setattr("os.access", lambda path, mode: (Path(path).name, mode) != ("good.csv", os.R_OK))
    with pytest.raises(UserError, match=r"config.data.train is 'good.csv', which is not readable; it must be"):
        check(good)


def test_no_file_of_another_name_is_suggested(good: ConfigDict) -> None:
    Path("nested.jsonl").write_text("{}")
    good.data.train = "nope.json"
    with pytest.raises(UserError, match=r"train is 'nope.json', which does not exist; it must be a file or a glob$"):
        check(good)


def test_globs_and_other_suffixes_are_fine(good: ConfigDict) -> None:
    for train in ("good.txt", "good.c*", "g*d.csv"):
        good.data.train = train
        check(good)
