"""Tests the least-squares loss and the regression metrics against NumPy and scikit-learn, and targets from tables."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import r2_score, root_mean_squared_error

from jaxpar import data, tasks
from jaxpar.config import default_config
from jaxpar.data import Batches, Labels
from jaxpar.errors import UserError


def config_of(folder: Path, source: str, **changes: Any) -> Any:
    config = default_config()
    config.task, config.cache_dir = "regression", str(folder / "cache")
    config.data.source, config.data.train = source, str(folder / f"a.{source}")
    config.data.vocab_size, config.data.max_length = 300, 16
    config.data.target_columns = ("stars", "price")
    config.update_from_flattened_dict({f"data.{key}": value for key, value in changes.items()})
    return config


def write(folder: Path) -> dict[str, tuple[float, float]]:
    """Write the same rows as CSV and as JSON lines, and return the targets by text."""
    rows = {f"film number {i}": (round(i / 7, 3), -2.5e3 * i) for i in range(60)}
    lines = [f"{text},{stars},{price}" for text, (stars, price) in rows.items()]
    (folder / "a.csv").write_text("\n".join(["text,stars,price", *lines]) + "\n")
    objects = [{"price": price, "text": text, "stars": stars} for text, (stars, price) in rows.items()]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in objects))
    return rows


def test_sums_and_metrics_equal_numpy() -> None:
    """With two batches: R2 is computed over all examples, not as a mean over batches."""
    config = default_config()
    config.data.target_columns = ("a", "b", "c")
    task, rng = tasks.TASKS["regression"](config), np.random.default_rng(0)
    y = rng.normal([1, -3, 5], [1, 2, 0], (12, 3)).astype(np.float32)
    found = (y + rng.normal(size=y.shape)).astype(np.float32)
    weights = rng.uniform(0, 2, 12).astype(np.float32)
    weights[3] = 0
    parts = [
        task.sums(jnp.asarray(found[i : i + 6]), {"labels": jnp.asarray(y[i : i + 6]), "weights": jnp.asarray(w)})
        for i, w in ((0, weights[:6]), (6, weights[6:]))
    ]
    metrics = task.all_metrics(tasks.add_up(parts))
    errors = np.average((found - y) ** 2, 0, weights)
    spread = np.average((y - np.average(y, 0, weights)) ** 2, 0, weights)
    r2 = [1 - errors[0] / spread[0], 1 - errors[1] / spread[1], 0]  # the last target is constant
    expected = {"loss": errors.mean(), "rmse": np.sqrt(errors.mean()), "r2": np.mean(r2)}
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name
    assert {name: np.shape(x) for name, x in parts[0].terms.items()} == task.terms


def test_metrics_equal_those_of_scikit_learn() -> None:
    config = default_config()
    config.data.target_columns = ("a", "b")
    task, rng = tasks.TASKS["regression"](config), np.random.default_rng(1)
    y = rng.normal([1, -3], [1, 20], (40, 2)).astype(np.float32)
    found, weights = (y + rng.normal(size=y.shape)).astype(np.float32), rng.uniform(0, 2, 40).astype(np.float32)
    batch = {"labels": jnp.asarray(y), "weights": jnp.asarray(weights)}
    metrics = task.all_metrics(tasks.add_up([task.sums(jnp.asarray(found), batch)]))
    by_target = root_mean_squared_error(y, found, sample_weight=weights, multioutput="raw_values")
    assert metrics["rmse"] == pytest.approx(np.sqrt(np.mean(by_target**2)), rel=1e-5)
    assert metrics["r2"] == pytest.approx(r2_score(y, found, sample_weight=weights), rel=1e-4)


@pytest.mark.parametrize("source", ["csv", "jsonl"])
def test_targets_come_from_columns(source: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    rows = write(tmp_path)
    dataset = data.load(config_of(tmp_path, source), Labels.TARGETS, tmp_path / "run")
    assert (dataset.info.targets, dataset.info.num_outputs) == (("stars", "price"), 2)
    made = Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json"))
    expected = {tuple(made.encode(text).ids): targets for text, targets in rows.items()}
    seen = 0
    for split in (dataset.train, dataset.validation, dataset.test):
        assert split is not None
        batch = Batches(split, batch_size=len(split), seed=0, shuffle=False).batch(0)
        assert batch["labels"].dtype == np.float32
        assert batch["weights"].shape == (len(split),)
        for tokens, mask, labels in zip(batch["inputs"], batch["mask"], batch["labels"], strict=True):
            np.testing.assert_array_equal(labels, np.array(expected[tuple(tokens[mask].tolist())], np.float32))
            seen += 1
    assert seen == 60


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "column": ({"target_columns": ("star",)}, r"a.csv:1 has no column 'star'.*'stars'.*config.data.target_columns"),
    "none": (
        {"target_columns": ()},
        r"config.data.target_columns is \(\); it must name at least one column, each once",
    ),
    "twice": ({"target_columns": ("stars", "stars")}, "it must name at least one column, each once"),
    "text": ({"target_columns": ("text",)}, r"target_columns is \('text',\); it must not contain any of text_columns"),
    "word": ({"target_columns": ("stars", "text2")}, r"a.csv:3: column 'text2' is 'two'; it must be a finite number"),
    "wordnet": (
        {"source": "wordnet", "train": ""},
        "source is 'wordnet'; for task regression it must be one of csv",
    ),
    "text file": ({"source": "text"}, "config.data.source is 'text', which has no labels"),
    "images": ({"source": "mnist"}, "which needs text or vector; with mnist it must be classification"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, tmp_path: Path) -> None:
    changes, message = MISTAKES[name]
    (tmp_path / "a.csv").write_text("text,stars,text2\nfilm,2,3\nplay,1,two\n")
    config = config_of(tmp_path, "csv", target_columns=("stars",))
    config.update_from_flattened_dict({f"data.{key}": value for key, value in changes.items()})
    with pytest.raises(UserError, match=message):
        data.load(config, Labels.TARGETS, tmp_path / "run")
