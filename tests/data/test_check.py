from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from jaxpar.errors import UserError

from .conftest import check, reviews, write_csv, write_parquet

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "task": ({"task": "clasification"}, r"config.task is 'clasification'; .* Did you mean 'classification'\?"),
    "source": ({"data.source": "cvs"}, r"config.data.source is 'cvs'; it must be wordnet, csv.* Did you mean 'csv'\?"),
    "labels of text": ({"data.source": "text"}, "config.data.source is 'text', which has no labels"),
    "tokens of images": ({"task": "masked_lm", "data.source": "mnist"}, "'masked_lm', which needs text; with mnist"),
    "tokens of vectors": (
        {"task": "causal_lm", "data.source": "synthetic", "model.name": "mlp"},
        "'causal_lm', which needs text; with synthetic data for the model mlp it must be classification",
    ),
    "no file named": ({"data.source": "csv"}, "config.data.train is empty; source 'csv' needs a path there"),
    "missing": ({"data.train": "good.csw"}, r"config.data.train: there is no file good.csw. Did you mean good.csv\?"),
    "missing folder": ({"data.train": "no/such.csv"}, "no file no/such.csv. There is no directory no either"),
    "missing test": ({"data.test": "none"}, "config.data.test: there is no file none"),
    "empty": ({"data.validation": "empty.csv"}, "config.data.validation: empty.csv is empty"),
    "directory": ({"data.train": "folder"}, r"config.data.train: folder is a directory; .* a glob such as folder/\*"),
    "suffix": ({"data.train": "good.parquet"}, "is a parquet file by its name, but config.data.source is 'csv'"),
    "suffix 2": ({"data.source": "tsv"}, "good.csv is a csv file by its name, but config.data.source is 'tsv'"),
    "suffix 3": (
        {"data.source": "parquet", "data.train": "good.txt"},
        "good.txt does not end in .parquet, but config.data.source is 'parquet'",
    ),
    "shipped": ({"data.source": "wordnet"}, "train is set, but config.data.source is 'wordnet'; it must be csv"),
    "image file": ({"data.source": "mnist"}, "config.data.train: good.csv is not a directory; mnist needs that"),
    "image test": (
        {"data.source": "cifar10", "data.train": "folder", "data.test": "good.csv"},
        "validation and test must be empty: cifar10 has a test file of its own",
    ),
    "fraction": ({"data.test_fraction": 1.5}, "test_fraction is 1.5; it must be at least 0 and less than 1"),
    "negative": ({"data.validation_fraction": -0.1}, "config.data.validation_fraction is -0.1"),
    "fractions": (
        {"data.validation_fraction": 0.5, "data.test_fraction": 0.5},
        r"validation_fraction \+ test_fraction is 0.5 \+ 0.5: nothing is left for training",
    ),
    "no buckets": ({"data.length_buckets": ()}, r"config.data.length_buckets is \(\); it must be ascending"),
    "buckets": ({"data.length_buckets": (32, 16)}, r"length_buckets is \(32, 16\); it must be ascending"),
    "length": ({"data.max_length": 2}, "config.data.max_length is 2; for classification it must be at least 8"),
    "positions": (
        {"data.max_length": 600, "model.max_length": 512},
        "config.data.max_length is 600, more than config.model.max_length, 512",
    ),
    "vocabulary": ({"data.vocab_size": 3}, "config.data.vocab_size is 3; it must be at least 32"),
    "mask": ({"task": "masked_lm", "data.mask_fraction": 1.0}, "config.data.mask_fraction is 1.0"),
    "columns": ({"data.text_columns": ("a", "b", "c")}, "it must name one column, or two different ones"),
    "same column": ({"data.text_columns": ("a", "a")}, "it must name one column, or two different ones"),
    "pair": ({"task": "causal_lm", "data.text_columns": ("a", "b")}, "causal_lm takes one column"),
    "label is text": ({"data.label_column": "text"}, "config.data.label_column is 'text', one of text_columns"),
    "no label": ({"data.label_column": ""}, "config.data.label_column is empty"),
    "tokenizer": ({"data.tokenizer": "tokenizr.json"}, r"config.data.tokenizer: there is no file tokenizr.json"),
    "directory without": ({"model.init_from": "folder"}, "no tokenizer.json or vocab.txt. Set config.data.tokenizer"),
    "threads": ({"data.num_threads": -1}, "config.data.num_threads is -1; it must be at least 0"),
    "prefetch": ({"data.prefetch": 0}, "config.data.prefetch is 0; it must be at least 1"),
    "examples": ({"data.synthetic_examples": 1}, "config.data.synthetic_examples is 1; it must be at least 2"),
    "seed": ({"seed": -1}, "config.seed is -1; it must be at least 0"),
}  # fmt: skip


@pytest.fixture
def good(config: ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConfigDict:
    """A config that is right, in a directory with files around."""
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


def test_globs_and_other_suffixes_are_fine(good: ConfigDict) -> None:
    for train in ("good.txt", "good.c*", "g*d.csv"):
        good.data.train = train
        check(good)
