"""A small classifier that the tests of this folder share."""

from pathlib import Path

import pytest

from jaxpar import train
from tests.runs import small_config

OVERRIDES = ("checkpoint.keep=3", "data.length_buckets=8,16")


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the workdir of a trained run. Its training file is ../data.csv."""
    folder = tmp_path_factory.mktemp("inference")
    train.train(small_config(folder, *(f"--config.{one}" for one in OVERRIDES)), folder / "run")
    return folder / "run"
