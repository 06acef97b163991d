"""A run small enough for a test: a one-layer BERT on a CSV file of 200 rows."""

from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from jaxpar import config as configs

WORDS = ("red", "green", "blue", "cat", "dog", "bird", "runs", "sleeps", "eats", "now")


def write_csv(path: Path, *, rows: int = 200, seed: int = 0) -> Path:
    """Texts of random words; the label is the colour among the first three words that comes first, or none."""
    rng = np.random.default_rng(seed)
    lines = ["text,label"]
    for number in range(rows):
        words = [WORDS[i] for i in rng.integers(0, len(WORDS), rng.integers(3, 12))]
        label = next((word for word in words if word in WORDS[:3]), "none")
        lines.append(f"{' '.join(words)} {number},{label}")
    path.write_text("\n".join(lines) + "\n")
    return path


def small_arguments(folder: Path) -> list[str]:
    """Overrides of configs/default.py for 16 steps on `folder`/data.csv, which is written if need be."""
    path = folder / "data.csv"
    if not path.exists():
        write_csv(path)
    values = {
        "data.source": "csv",
        "data.train": path,
        "data.vocab_size": 128,
        "data.max_length": 16,
        "data.length_buckets": "16,",
        "model.num_layers": 1,
        "model.hidden_size": 16,
        "model.num_heads": 2,
        "model.mlp_size": 32,
        "mesh.data": 2,
        "batch_size": 24,
        "num_epochs": 2,
        "log.every_steps": 2,
        "log.tensorboard": False,
        "checkpoint.every_steps": 3,
        "optimizer.lr": 0.01,
    }
    return [f"--config.{key}={value}" for key, value in values.items()]


def small_config(folder: Path, *overrides: str) -> ConfigDict:
    """The config of `small_arguments` with these overrides on top."""
    config = configs.default_config()
    configs.override(config, [*small_arguments(folder), *overrides])
    return config
