"""Small trained models of every task, which the tests of this folder share."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpar import training
from tests.runs import WORDS, small_config

TrainedRun = Callable[[str], Path]
OVERRIDES = ("checkpoint.keep=3", "data.length_buckets=8,16")
SHORT = ("num_steps=2", "mesh.data=1", "data.length_buckets=8,16", "data.validation_fraction=0")
TABLE = (*SHORT, "data.train={folder}/train.csv", "data.test={folder}/test.csv")
RUNS: dict[str, tuple[str, ...]] = {
    "pairs": (*TABLE, "data.text_columns=text,other"),
    "regression": (*TABLE, "task=regression", "data.target_columns=stars,price"),
    "token_classification": (
        *SHORT,
        "task=token_classification",
        "data.source=jsonl",
        *("data.train={folder}/train.jsonl", "data.test={folder}/test.jsonl"),
        *("data.text_columns=words", "data.label_column=tags"),
    ),
    "masked_lm": (*TABLE, "task=masked_lm"),
    "causal_lm": (*TABLE, "task=causal_lm", "model.name=gpt", "model.mlp_size=32", "data.vocab_size=300"),
    "image": (
        *("num_steps=2", "mesh.data=1", "data.source=synthetic", "data.train=", "data.synthetic_examples=64"),
        *("model.name=vit", "model.patch_size=16"),
    ),
}


def records(number: int, seed: int) -> list[dict[str, Any]]:
    """Return examples of random words, with the labels of all tasks; their lengths cross a bucket."""
    rng = np.random.default_rng(seed)
    found: list[dict[str, Any]] = []
    for _ in range(number):
        words = [WORDS[i] for i in rng.integers(0, len(WORDS), rng.integers(2, 13))]
        found.append({"words": words, "text": " ".join(words), "other": words[-1]})
        found[-1]["tags"] = ["B-COLOUR" if word in WORDS[:3] else "O" for word in words]
        found[-1]["label"] = words[0] if words[0] in WORDS[:3] else "none"
        found[-1] |= {"stars": len(words) / 4, "price": words.count("cat") - 0.5}
    return found


def write_tables(folder: Path, name: str, examples: list[dict[str, Any]]) -> None:
    """Write the examples as `name`.csv and `name`.jsonl."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in examples))
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "other", "label", "stars", "price"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(examples)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the workdir of a run of the task classification, with several checkpoints."""
    folder = tmp_path_factory.mktemp("inference")
    training.train(small_config(folder, *(f"--config.{one}" for one in OVERRIDES)), folder / "run")
    return folder / "run"


@pytest.fixture(scope="session")
def trained_run(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Return the function that trains a run of RUNS, once, and returns its workdir. Its files are in ../."""
    folder = tmp_path_factory.mktemp("runs")
    write_tables(folder, "train", records(72, seed=0))
    write_tables(folder, "test", records(53, seed=1))

    def run(name: str) -> Path:
        if name == "classification":
            return classifier
        if not (folder / name).exists():
            overrides = [f"--config.{one.format(folder=folder)}" for one in RUNS[name]]
            training.train(small_config(folder, *overrides), folder / name)
        return folder / name

    return run
