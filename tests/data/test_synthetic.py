from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxpar.data import Batches, synthetic
from jaxpar.models import MODELS

from .conftest import load


@pytest.fixture
def config(config: ConfigDict) -> ConfigDict:
    config.data.source = "synthetic"
    config.data.synthetic_examples = 2000
    return config


CASES = {
    ("bert", "classification"): ("text", (32,), 8),
    ("gpt", "classification"): ("text", (32,), 8),
    ("my_package.my_model", "classification"): ("text", (32,), 8),
    ("bert", "masked_lm"): ("text", (32,), 0),
    ("gpt", "causal_lm"): ("text", (32,), 0),
    ("resnet", "classification"): ("image", (32, 32, 3), 8),
    ("mlp", "classification"): ("vector", (32,), 8),
    ("vit", "classification"): ("image", (32, 32, 3), 8),
    ("bert", "regression"): ("text", (32,), 0),
    ("mlp", "regression"): ("vector", (32,), 0),
    ("bert", "token_classification"): ("text", (32,), 5),
}


def test_the_kinds_are_those_of_the_models(config: ConfigDict) -> None:
    for name, info in MODELS.items():
        config.model.name = name
        assert synthetic.kind(config) == info.kind, name


@pytest.mark.parametrize(("model", "task"), CASES)
def test_every_task_runs_without_files(model: str, task: str, config: ConfigDict, tmp_path: Path) -> None:
    config.model.name, config.task = model, task
    dataset = load(config, tmp_path)
    assert dataset.info[:3] == CASES[model, task]
    assert dataset.info.vocab_size == (300 if dataset.info.kind == "text" else 0)
    assert dataset.validation is not None
    assert dataset.test is not None
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (1700, 100, 200)
    batch = Batches(dataset.train, batch_size=16, seed=0, shuffle=True).batch(3)
    again = load(config, tmp_path)
    other = Batches(again.train, batch_size=16, seed=0, shuffle=True).batch(3)
    assert all(np.array_equal(batch[key], other[key]) for key in batch)
    assert again.fingerprint == dataset.fingerprint
    config.seed = 1
    assert load(config, tmp_path).fingerprint != dataset.fingerprint
    has_mask = dataset.info.kind == "text" and task != "causal_lm"
    keys = {"inputs", "labels", "weights", "index"} | ({"mask"} if has_mask else set())
    assert set(batch) == keys
    dtypes = {"text": "int32", "image": "uint8", "vector": "float32"}
    assert batch["inputs"].dtype == dtypes[dataset.info.kind]
    if dataset.info.kind == "text":
        assert batch["inputs"].max() < 300
        assert batch["inputs"].shape[1] in (16, 32)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", ["bert", "resnet", "mlp"])
def test_it_can_be_learnt_on_one_split_and_used_on_another(model: str, config: ConfigDict, tmp_path: Path) -> None:
    """A least-squares classifier is accurate on the test split; chance is 12.5%."""
    config.model.name = model
    dataset = load(config, tmp_path)
    assert dataset.test is not None
    features, labels = zip(*(everything(split, model) for split in (dataset.train, dataset.test)), strict=True)
    weights, *_ = np.linalg.lstsq(features[0], np.eye(8)[labels[0]], rcond=None)
    assert ((features[1] @ weights).argmax(1) == labels[1]).mean() > 0.8


def everything(split, model: str) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[no-untyped-def]
    batch = Batches(split, batch_size=len(split), seed=0, shuffle=False).batch(0)
    inputs = batch["inputs"]
    if model == "bert":
        inputs = np.stack([np.bincount(row[row > 4] % 8, minlength=8) for row in inputs])
    elif model == "resnet":
        inputs = inputs[:, ::8, ::8].reshape(len(inputs), -1)
    return np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1), batch["labels"]


def test_a_token_all_but_gives_the_next(config: ConfigDict, tmp_path: Path) -> None:
    config.model.name, config.task = "gpt", "causal_lm"
    batch = Batches(load(config, tmp_path).train, batch_size=1700, seed=0, shuffle=True).batch(0)
    followers: dict[int, set[int]] = {}
    for one, following in zip(batch["inputs"].ravel(), batch["labels"].ravel(), strict=True):
        followers.setdefault(int(one), set()).add(int(following))
    assert len(followers) > 200
    assert max(map(len, followers.values())) == 3
