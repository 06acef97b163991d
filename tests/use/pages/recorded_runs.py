"""Workdirs of runs that were not trained: files with known numbers."""

import json
from pathlib import Path
from typing import Any

from jaxpar import config as configs

NAMES = ("plain", '<b>&"')
ROWS: list[dict[str, Any]] = [
    {"step": 20, "split": "train", "loss": 0.75, "accuracy": 0.4375, "mfu": 0.3125, "examples_per_second": 1234.5},
    {"step": 20, "split": "validation", "loss": 0.8125, "accuracy": 0.40625},
    {"step": 30, "split": "train", "loss": None, "loss_scale": 8192.0},
    {"step": 40, "split": "train", "loss": 0.5625, "accuracy": 0.6875, "mfu": 0.328125, "examples_per_second": 1250.5},
    {"step": 40, "split": "validation", "loss": None, "accuracy": 0.65625},
    {"step": 40, "split": "test", "loss": 0.609375, "accuracy": 0.671875},
]
RESULT: dict[str, Any] = {
    "test_loss": 0.609375,
    "test_accuracy": 0.671875,
    "test_majority_accuracy": 0.515625,
    "test_classes": {
        NAMES[0]: {"precision": 0.875, "recall": 0.765625, "f1": 0.8125, "count": 33},
        NAMES[1]: {"precision": 0.25, "recall": 0.28125, "f1": 0.265625, "count": 31},
    },
    "test_confusion": [[27, 6], [11, 20]],
    "train_loss": 0.5625,
    "steps": 40,
    "skipped_steps": 3,
    "loss_scale": 4096.0,
    "examples": 1280,
    "in_flight": 2,
    "discarded": [{"step": 20, "private_state": "byteps_onebit <on> 2 replicas", "batches": 0}],
    "parameters": 12345,
    "splits": {"training": 640, "validation": 32, "test": 64},
    "best_step": 30,
    "best_test_loss": 0.59375,
    "best_test_accuracy": 0.6875,
    "environment": {
        **{"host": "node<7>", "processor": "2 cores of <x>", "command": "scripts/train 'a b'", "commit": None},
        "versions": {"jax": "9.8.7"},
    },
    "examples_per_second": 1242.5,
    "mfu": 0.3203125,
    "strategy": "data_parallel",
    "devices": ["cpu:0", "cpu:1"],
    "device_kind": "cpu",
    "state_bytes": 3000,
    "wire_bytes": 2500,
    "stopped_early": "the validation loss <did> not improve",
    "seconds": {"setup": 1.25, "train": 6.5, "compile": 2.25},
    "ledger": "every example of 40 steps was used exactly once",
}
STARTS = [
    {"step": 0, "date": "2026-11-01T10:00:00+00:00", "strategy": "single", "devices": 1, "changed": []},
    {
        **{"step": 20, "date": "2026-11-02T10:00:00+00:00", "strategy": "data_parallel", "devices": 2},
        "changed": ["config.strategy: 'single' -> 'data_parallel'"],
    },
]


def write_run(workdir: Path, *overrides: str, finished: bool = True) -> Path:
    """Write the files of a run of configs/default.py with overrides."""
    workdir.mkdir()
    config = configs.default_config()
    configs.override(config, [f"--config.{override}" for override in overrides])
    configs.save(config, workdir)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (workdir / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in STARTS))
    if finished:
        (workdir / "result.json").write_text(json.dumps(RESULT))
    return workdir
