"""Complete runs of a pipeline: their results, and that stopping and resuming does not change them."""

import json
import signal
from pathlib import Path

import jax
import pytest
from ml_collections import ConfigDict

from jaxpar import checkpoint, training
from jaxpar.run import metrics
from tests.runs import small_config
from tests.test_train import assert_bitwise_equal, stop_at

PIPELINE = ["strategy=pipeline", "mesh.stage=2", "pipeline.num_microbatches=4", "pipeline.schedule=zb_h1"]
SINGLE = ["strategy=single", "mesh.data=1", "optimizer.accumulation_steps=4"]


def config(folder: Path, overrides: list[str]) -> ConfigDict:
    """Return a config with layers embed, block_0 and head, cut before block_0, and texts of two lengths."""
    lengths = ["data.length_buckets=8,16", "pipeline.partition=block_0"]
    return small_config(folder, *[f"--config.{override}" for override in lengths + overrides])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline_runs")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Path:
    training.train(config(folder, PIPELINE), folder / "uninterrupted")
    return folder / "uninterrupted"


def test_result(uninterrupted: Path) -> None:
    result = json.loads((uninterrupted / "result.json").read_text())
    rows = metrics.read_metrics(uninterrupted)
    assert result["strategy"] == "pipeline"
    assert len(result["devices"]) == 4  # 2 stages x 2 replicas
    assert result["train_loss"] < rows[0]["loss"]
    assert 0 <= result["test_accuracy"] <= 1
    tree = checkpoint.read(uninterrupted / "checkpoints" / str(result["steps"])).tree
    sizes = {layer: sum(leaf.nbytes for leaf in jax.tree.leaves(own)) for layer, own in tree["params"].items()}
    fullest = max(sizes["embed"], sizes["block_0"] + sizes["head"])
    assert fullest < 0.8 * sum(sizes.values())
    # The parameters, and the two moments of AdamW.
    assert 3 * fullest <= result["state_bytes"] <= 3 * fullest * 1.05
    # 3 examples of 16 positions and 16 features over each route in each clock, and gradients to the other replica.
    clocks = 3 * 4 + (2 - 1) * 2 - (2 - 1)
    transferred = clocks * 3 * 16 * 16 * 4
    assert transferred + fullest <= result["wire_bytes"] <= transferred + fullest * 1.05


@pytest.mark.slow
def test_stopped_and_resumed_ends_bitwise_equal(
    folder: Path, tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = 5
    stop_at(monkeypatch, step, signal.SIGTERM)
    with pytest.raises(training.Stopped, match=f"SIGTERM: stopped after step {step} of"):
        training.train(config(folder, PIPELINE), tmp_path / "run")
    monkeypatch.undo()
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] == step
    training.train(config(folder, PIPELINE), tmp_path / "run")
    assert_bitwise_equal(tmp_path / "run", uninterrupted)
