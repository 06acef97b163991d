"""Tests of runs with private state of an exchange, which is saved, checked for damage, and discarded if unusable."""

import json
import os
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxpar import checkpoint, training
from jaxpar.core.plan import format_private_key
from tests.runs import change_info, small_config
from tests.test_train import assert_bitwise_equal, final_params, stop_at

VALUES = {
    "data.source": "synthetic",
    "data.train": "",
    "data.synthetic_examples": 400,
    "model.name": "mlp",
    "model.num_heads": "None",
    "model.mlp_size": "None",
    "num_steps": 8,
}
ONEBIT = "--config.exchange=byteps_onebit", "--config.exchange_options.min_compress_bytes=0"
NAME = "byteps_onebit block=128 group=1 min_compress_bytes=0 momentum=0.0 on 2 replicas"
DISCARDED = f"discarded private state of {NAME}; this run uses "


def config(*overrides: str) -> ConfigDict:
    """Return a config of eight steps with checkpoints after steps 3, 6 and 8."""
    folder = Path(os.environ["JAXPAR_CACHE"])  # a temporary folder in tests; `small_config` writes a data file there
    return small_config(folder, *(f"--config.{key}={value}" for key, value in VALUES.items()), *overrides)


def run_to(step: int, workdir: Path, *overrides: str) -> Path:
    """Train until a signal stops the run after `step` more steps."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, step, signal.SIGTERM)
        with pytest.raises(training.Stopped):
            training.train(config(*overrides), workdir)
    return workdir


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("private") / "uninterrupted"
    training.train(config(*ONEBIT), workdir)
    return workdir


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after 5 steps, with checkpoints of steps 3 and 5. Tests copy it."""
    return run_to(5, tmp_path_factory.mktemp("private") / "stopped", *ONEBIT)


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "run")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with exchange ddp, stopped after 5 steps."""
    return run_to(5, tmp_path_factory.mktemp("private") / "plain", "--config.exchange=ddp")


def test_stopped_and_resumed_ends_bitwise_equal(
    run: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoint.steps(run / "checkpoints") == [3, 5]
    training.train(config(*ONEBIT), run)
    assert "discarded" not in capsys.readouterr().out
    assert_bitwise_equal(run, uninterrupted)
    last = [checkpoint.read(path / "checkpoints" / "8") for path in (run, uninterrupted)]
    for got, expected in zip(*(jax.tree.leaves(found.private) for found in last), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_the_private_state_differs_between_replicas(run: Path) -> None:
    found = checkpoint.read(run / "checkpoints" / "5")
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(found.private)]
    assert leaves
    assert all(leaf.shape[0] == 2 for leaf in leaves)
    assert any((leaf[0] != leaf[1]).any() for leaf in leaves)
    assert format_private_key(found.info["private_key"]) == NAME


def test_the_result_depends_on_the_private_state(run: Path, uninterrupted: Path) -> None:
    """Otherwise the test above would pass without restoring the private state."""
    change_info(run / "checkpoints" / "5", lambda info: info["private_key"].update(replicas=3))
    training.train(config(*ONEBIT), run)
    got, expected = final_params(run), final_params(uninterrupted)
    assert any((got[name] != leaf).any() for name, leaf in expected.items() if "params" in name)


@pytest.mark.parametrize(
    "change",
    [
        "--config.exchange=ddp",
        "--config.exchange_options.momentum=0.5",
        "--config.exchange_options.bucket_bytes=1000",  # the parameters have 3,744 bytes
    ],
)
def test_another_exchange_discards_the_private_state(
    run: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = training.train(config(*(() if "ddp" in change else ONEBIT), change), run)
    assert any(line.startswith(DISCARDED) for line in capsys.readouterr().out.splitlines())
    assert result["steps"] == 8
    assert checkpoint.steps(run / "checkpoints")[-1] == 8
    assert (run / "checkpoints" / "8" / "private").is_dir() == ("ddp" not in change)
    assert result["discarded"] == [{"step": 5, "private_state": NAME, "batches": 0}]
    training.train(config(*(() if "ddp" in change else ONEBIT), change), run)  # a later start still knows it
    assert json.loads((run / "result.json").read_text())["discarded"] == result["discarded"]


def test_a_bucket_size_without_effect_keeps_the_private_state(run: Path, uninterrupted: Path) -> None:
    """All parameters are in one bucket of any of the two sizes."""
    result = training.train(config(*ONEBIT, "--config.exchange_options.bucket_bytes=4000"), run)
    assert result["discarded"] == []
    assert_bitwise_equal(run, uninterrupted)


def test_damage_falls_back_to_the_previous_checkpoint(
    run: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "5" / "private" / "manifest.ocdbt").write_bytes(b"")
    training.train(config(*ONEBIT), run)
    output = capsys.readouterr().out
    assert "checkpoints/5 is damaged" in output
    assert "resumed   from step 3" in output
    assert (run / "checkpoints" / "5.damaged").is_dir()
    assert_bitwise_equal(run, uninterrupted)


def test_a_changed_bit_is_damage(run: Path) -> None:
    largest = max((run / "checkpoints" / "5" / "private").glob("**/d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(checkpoint.Damaged):
        checkpoint.read(run / "checkpoints" / "5")


def test_a_missing_folder_is_damage(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "5" / "private")
    with pytest.raises(checkpoint.Damaged):
        checkpoint.read(run / "checkpoints" / "5")


def test_an_exchange_without_private_state_saves_none(plain: Path) -> None:
    for step in checkpoint.steps(plain / "checkpoints"):
        assert not (plain / "checkpoints" / str(step) / "private").exists()
        assert checkpoint.read(plain / "checkpoints" / str(step)).private == {}


def test_an_exchange_resumes_without_private_state(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = training.train(config(*ONEBIT), plain)
    output = capsys.readouterr().out
    assert "resumed   from step 5" in output
    assert "discarded" not in output
    assert result["steps"] == 8
    assert jax.tree.leaves(checkpoint.read(plain / "checkpoints" / "8").private)
