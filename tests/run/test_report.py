"""Tests of the end of a run: the evaluation of the best checkpoint, its environment, and losses that are not finite."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar import checkpoint, data, models, training
from jaxpar import config as configs
from jaxpar.cluster import find_cluster
from jaxpar.errors import TrainingError
from jaxpar.run import report
from tests.checkpoint.test_private import config
from tests.selection import slow_except

STRATEGIES = {
    "zero3": ("--config.exchange=zero3",),
    "pipedream": (
        *("--config.strategy=pipeline", "--config.mesh.stage=2", "--config.mesh.data=1"),
        "--config.pipeline.schedule=pipedream",
    ),
    "async": ("--config.strategy=async_data_parallel", "--config.asynchronous.num_workers=2"),
}
WORSE = "--config.num_steps=40", "--config.eval.every_steps=5", "--config.optimizer.lr=0.5"  # the best is not the last


@pytest.mark.parametrize("name", slow_except(["pipedream"], STRATEGIES))
def test_the_best_checkpoint_is_tested_too(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The results are those of its parameters on one device."""
    result = training.train(config(*WORSE, *STRATEGIES[name]), tmp_path)
    losses = {}
    for step in checkpoint.steps(tmp_path / "checkpoints"):
        path = tmp_path / "checkpoints" / str(step) / "metrics" / "metrics"
        if path.exists():
            losses[json.loads(path.read_text())["validation_loss"]] = step
    best = losses[min(losses)]
    assert result["best_step"] == best < result["steps"]
    loss, accuracy = evaluated(tmp_path, best)
    assert (result["best_test_loss"], result["best_test_accuracy"]) == pytest.approx((loss, accuracy), rel=1e-5)
    assert result["best_test_loss"] != result["test_loss"]
    assert f"\nbest      step {best}: test loss {loss:.4f}  accuracy {accuracy:.4f}" in capsys.readouterr().out
    assert "test loss of the best checkpoint" in (tmp_path / "report.html").read_text()


def evaluated(workdir: Path, step: int) -> tuple[float, float]:
    """Return the loss and the accuracy of a checkpoint on the test split."""
    saved = checkpoint.read(workdir / "checkpoints" / str(step))
    settings = checkpoint.config_of(saved, workdir)
    dataset = data.load(settings, data.Labels.CLASSES, workdir)
    assert dataset.test is not None
    batch = data.Batches(dataset.test, batch_size=len(dataset.test), seed=0, shuffle=False).batch(0)
    model = models.build(settings, dataset.info, find_cluster())
    logits = np.asarray(model.apply(saved.tree["params"], jax.device_put(batch)), np.float64)
    own = logits[np.arange(len(logits)), batch["labels"]]
    losses = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1) - own
    return float(losses.mean()), float((logits.argmax(1) == batch["labels"]).mean())


def test_without_a_validation_split_the_last_step_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config("--config.data.validation_fraction=0", "--config.num_steps=2")
    result = training.train(settings, tmp_path)
    assert "\nbest      step 2, the last one, because no validation loss was measured\n" in capsys.readouterr().out
    assert not [name for name in result if name.startswith("best_")]
    again = training.train(config("--config.num_steps=2", "--config.eval.every_steps=1"), tmp_path / "last")
    assert again["best_step"] == 2
    assert again["best_test_loss"] == again["test_loss"]
    assert "\nbest      step 2, the last one\n" in capsys.readouterr().out
    environment = again["environment"]
    assert environment["host"] == socket.gethostname()
    assert f"{os.cpu_count()} cores of " in environment["processor"]
    assert environment["versions"]["jax"] == jax.__version__
    assert again["parameters"] == sum(x.size for x in jax.tree.leaves(parameters(tmp_path / "last")))
    assert sum(again["splits"].values()) == 400
    page = (tmp_path / "last" / "report.html").read_text()
    assert all(text in page for text in (environment["host"], environment["commit"] or "unknown", "training split"))


def test_the_processor_is_named_by_its_numbers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual machines hide the name. An ARM processor has other lines."""
    monkeypatch.setattr(report, "CPUS", tmp_path / "cpuinfo")
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert report.processor() == "2 cores of aarch64"
    core = "cpu family\t: 25\nmodel\t\t: {}\nmodel name\t: AMD  EPYC\nflags\t\t: fpu {}\n\n"
    report.CPUS.write_text(core.format(17, "avx2 avx512f") + core.format(18, "avx2"))
    assert report.processor() == "2 cores of AMD EPYC (family 25, model 17) with avx512f"
    report.CPUS.write_text(core.format(1, "avx2x avx2"))
    assert report.processor() == "2 cores of AMD EPYC (family 25, model 1) with avx2"
    report.CPUS.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert report.processor() == "2 cores of aarch64"


def test_the_command_finds_the_model_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """scripts/python adds the folder of jaxpar itself."""
    own = config("--config.model.name=my_package.my_model")
    monkeypatch.setenv("PYTHONPATH", f"{report.PROJECT}:.:a b")
    assert report.python_path(own) == "PYTHONPATH='.:a b' "
    assert report.python_path(config()) == ""
    monkeypatch.setenv("PYTHONPATH", str(report.PROJECT))
    assert report.python_path(own) == ""


def parameters(workdir: Path) -> Any:
    return checkpoint.of_run(workdir).tree["params"]


BROKEN = "--config.optimizer.name=sgd", "--config.optimizer.clip_norm=0", "--config.optimizer.warmup=0.5"
OVERFLOW = "--config.optimizer.lr=3e38", "--config.optimizer.weight_decay=100", "--config.checkpoint.every_steps=1"


@pytest.mark.parametrize("name", [*STRATEGIES, "skip"])
def test_parameters_that_overflow_in_the_last_step_are_not_saved(name: str, tmp_path: Path) -> None:
    """The loss and the gradient of the step are finite. The checkpoint of the step before stays."""
    overrides = STRATEGIES.get(name, ("--config.optimizer.nonfinite=skip",))
    overrides = (*overrides, "--config.pipeline.schedule=1f1b") if name == "pipedream" else overrides
    with pytest.raises(TrainingError, match=r"^the parameters are not finite after step 2, and are not saved"):
        training.train(config("--config.num_steps=2", *BROKEN, *OVERFLOW, *overrides), tmp_path)
    assert checkpoint.steps(tmp_path / "checkpoints") == [1]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(parameters(tmp_path)))
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    ("split", "dtype", "remedy"),
    [
        ("validation", "float32", "lower config.optimizer.lr"),
        ("test", "float16", "set config.model.dtype to bfloat16 or float32 "),
    ],
)
def test_a_loss_that_is_not_finite_at_the_end_is_an_error(split: str, dtype: str, remedy: str, tmp_path: Path) -> None:
    """The parameters are finite, but so large that outputs overflow."""
    large = "--config.num_steps=2", *BROKEN, "--config.optimizer.lr=1e30", f"--config.model.dtype={dtype}"
    fractions = ("--config.data.validation_fraction=0",) if split == "test" else ()
    with pytest.raises(TrainingError, match=rf"^the {split} loss after step 2 is not finite; {remedy}"):
        training.train(config(*large, *fractions), tmp_path)
    assert not (tmp_path / "result.json").exists()
    result = training.train(config(*large, *fractions, "--config.optimizer.nonfinite=skip"), tmp_path)
    assert not np.isfinite(result["test_loss"])
    assert json.loads((tmp_path / "result.json").read_text())["test_loss"] is None


def test_a_small_file_is_advised_on_and_then_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An epoch of 237 rows in batches of 256 is one step, which teaches nothing."""
    rows = (f"room {i} was {('good', 'bad')[i % 2]},{i % 2}" for i in range(237))
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]))
    source = "--config.data.source=csv", f"--config.data.train={tmp_path}/rows.csv", "--config.model.name=bert"
    settings = config(*source, "--config.batch_size=256", "--config.num_epochs=1", "--config.num_steps=0")
    settings.model.num_layers, settings.model.hidden_size, settings.model.mlp_size = 1, 32, 64
    settings.data.max_length = 8
    settings.optimizer.lr = 0.0  # so that it learns nothing for sure
    result = training.train(settings, tmp_path / "short")
    assert result["test_accuracy"] <= result["test_majority_accuracy"]
    begins, ends = (line for line in capsys.readouterr().out.splitlines() if line.startswith("advice"))
    flags = [word for word in begins.split() if word.startswith("--")]
    assert ends.endswith(" ".join(flags))
    settings.optimizer.lr = 1e-3
    configs.override(settings, flags)
    assert training.train(settings, tmp_path / "long")["test_accuracy"] > 0.9
    assert "advice" not in capsys.readouterr().out
