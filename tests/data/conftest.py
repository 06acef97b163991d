"""Configs and files shared by the tests of the data package."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ml_collections import ConfigDict

from jaxpar import data, tasks
from jaxpar.config import default_config
from jaxpar.data import Dataset

Records = Sequence[dict[str, str]]


@pytest.fixture
def config(tmp_path: Path) -> ConfigDict:
    config = default_config()
    config.cache_dir = str(tmp_path / "cache")
    config.data.vocab_size = 300
    config.data.max_length = 32
    return config


def load(config: ConfigDict, workdir: Path) -> Dataset:
    """Load the data set for the task of the config."""
    return data.load(config, tasks.find_task(config).labels, workdir)


def check(config: ConfigDict) -> None:
    """Validate the data keys of a config for its task."""
    data.check_data(config, tasks.find_task(config).labels)


def write_csv(path: Path, records: Records) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def write_tsv(path: Path, records: Records) -> None:
    lines = [list(records[0]), *(list(record.values()) for record in records)]
    path.write_text("".join("\t".join(fields) + "\n" for fields in lines), "utf-8")


def write_jsonl(path: Path, records: Records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")


def write_parquet(path: Path, records: Records) -> None:
    pq.write_table(pa.Table.from_pylist(list(records)), path)


WRITERS: dict[str, Callable[[Path, Records], None]] = {
    "csv": write_csv,
    "tsv": write_tsv,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
}


def reviews(count: int) -> list[dict[str, str]]:
    """Return distinct texts of 1 to 12 words, with commas, quotes and non-ASCII letters, in three classes."""
    words = ["good", 'the "best"', "naïve", "bad,", "film", "中文", "unendurable", "plot", "of", "it"]
    texts = [" ".join(words[(i * j + j) % 10] for j in range(1 + i % 12)) + f" {i}" for i in range(count)]
    return [
        {"id": str(i), "text": text, "label": ["pos", "neg", "mixed"][i * i % 7 % 3]} for i, text in enumerate(texts)
    ]
