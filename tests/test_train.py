"""Tests of whole runs: their output files, and that stopping and resuming does not change the result."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from sklearn.metrics import classification_report, confusion_matrix, f1_score

from jaxpar import checkpoint, data, models, training
from jaxpar.cluster import find_cluster
from jaxpar.errors import TrainingError, UserError
from jaxpar.run import metrics, report
from jaxpar.run.history import read_starts
from tests.html_pages import check_alone
from tests.runs import small_config, write_csv
from tests.selection import slow, slow_except


def final_params(workdir: Path) -> dict[str, np.ndarray]:
    newest = checkpoint.steps(workdir / "checkpoints")[-1]
    tree = checkpoint.read(workdir / "checkpoints" / str(newest)).tree
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_bitwise_equal(got: Path, expected: Path) -> None:
    got_leaves, expected_leaves = final_params(got), final_params(expected)
    assert got_leaves.keys() == expected_leaves.keys()
    for name, leaf in expected_leaves.items():
        np.testing.assert_array_equal(got_leaves[name], leaf, err_msg=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Path:
    training.train(small_config(folder, "--config.log.curves=true"), folder / "uninterrupted")
    return folder / "uninterrupted"


def test_result(uninterrupted: Path) -> None:
    result = json.loads((uninterrupted / "result.json").read_text())
    rows = metrics.read_metrics(uninterrupted)
    counts = {"train": 0, "validation": 0, "test": 0} | {
        split: sum(row["split"] == split for row in rows) for split in ("train", "validation", "test")
    }
    num_steps = result["steps"]
    assert num_steps == 2 * -(-result["examples"] // 2 // 24)
    assert counts["train"] == -(-num_steps // 2)
    assert counts["validation"] == 2
    assert counts["test"] == 1
    assert result["test_accuracy"] == rows[-1]["accuracy"]
    assert result["strategy"] == "data_parallel"
    assert len(result["devices"]) == 2
    assert {"setup", "compile", "train", "eval", "checkpoint"} <= result["seconds"].keys()
    assert result["train_loss"] < rows[0]["loss"]
    report = check_alone((uninterrupted / "report.html").read_text())
    tested = [value for name, value in result.items() if name.startswith("test_") and isinstance(value, float)]
    assert {*tested, result["train_loss"], num_steps, *filter(None, result["seconds"].values())} <= set(report.values)
    assert (uninterrupted / "curves.png").stat().st_size > 10_000
    assert len(checkpoint.steps(uninterrupted / "checkpoints")) <= 3


def test_classes_equal_the_predictions_of_one_device(uninterrupted: Path) -> None:
    """The test split is smaller than a batch, so the run evaluated padding examples too."""
    result = json.loads((uninterrupted / "result.json").read_text())
    config, params = checkpoint.restore_params(uninterrupted)
    dataset = data.load(config, data.Labels.CLASSES, uninterrupted)
    assert dataset.test is not None
    batch = data.Batches(dataset.test, batch_size=len(dataset.test), seed=0, shuffle=False).batch(0)
    logits = models.build(config, dataset.info, find_cluster()).apply(params, jax.device_put(batch))
    predicted, names = np.asarray(logits).argmax(axis=1), dataset.info.class_names
    assert result["test_confusion"] == confusion_matrix(batch["labels"], predicted, labels=range(4)).tolist()
    expected = classification_report(
        batch["labels"], predicted, labels=range(4), target_names=names, output_dict=True, zero_division=0
    )
    for name in names:
        scores = {"count" if key == "support" else key.replace("-score", ""): x for key, x in expected[name].items()}
        assert result["test_classes"][name] == pytest.approx(scores)
    assert result["test_macro_f1"] == pytest.approx(f1_score(batch["labels"], predicted, average="macro"))
    assert result["test_majority_accuracy"] == np.bincount(batch["labels"]).max() / len(predicted)
    assert (uninterrupted / "confusion.png").stat().st_size > 10_000


def test_metrics_contain_rates(uninterrupted: Path) -> None:
    row = metrics.read_metrics(uninterrupted)[0]
    # FLOPs of the forward pass, with T = D = 16 and M = 32: 4 D^2 of attention, 2 D M of the MLP and 2 T D of scores
    # and sums per token; D^2 of the pooler and 4 D of the classifier per text; 2 FLOPs each, times 3 for training.
    flops = 3 * 2 * (16 * (4 * 16**2 + 2 * 16 * 32 + 2 * 16 * 16) + 16**2 + 4 * 16)
    assert row["model_flops_per_second"] == pytest.approx(flops * row["examples_per_second"])
    assert row["tokens_per_second"] > row["examples_per_second"] > 0
    assert 0 <= row["learning_rate"] <= 0.01


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Send the signal to this process once the loop has dispatched `step` more steps."""
    left = step
    advance = metrics.Progress.advance

    def counted(self: metrics.Progress, loss: float) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), number)
        advance(self, loss)

    monkeypatch.setattr(metrics.Progress, "advance", counted)


@pytest.mark.parametrize(
    ("step", "number"), [slow((1, signal.SIGTERM)), (5, signal.SIGINT), slow((9, signal.SIGTERM))], ids=["1", "5", "9"]
)
def test_stopped_by_a_signal_and_resumed_ends_bitwise_equal(
    folder: Path,
    tmp_path: Path,
    uninterrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    step: int,
) -> None:
    handler = signal.getsignal(number)
    stop_at(monkeypatch, step, number)
    with pytest.raises(training.Stopped, match=f"{number.name}: stopped after step {step} of"):
        training.train(small_config(folder), tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] == step
    assert signal.getsignal(number) is handler
    assert all(row["step"] <= step for row in metrics.read_metrics(tmp_path / "run"))
    monkeypatch.undo()
    training.train(small_config(folder), tmp_path / "run")
    assert_bitwise_equal(tmp_path / "run", uninterrupted)
    assert not (tmp_path / "run" / "curves.png").exists()  # log.curves is off
    assert [(start.step, start.devices, start.changed) for start in read_starts(tmp_path / "run")] == [
        (0, 2, []),
        (step, 2, []),
    ]
    got, expected = (
        [{name: value for name, value in row.items() if "per_second" not in name} for row in metrics.read_metrics(run)]
        for run in (tmp_path / "run", uninterrupted)
    )
    assert got == expected
    results = [json.loads((run / "result.json").read_text()) for run in (tmp_path / "run", uninterrupted)]
    differ = {name for name in results[1] if results[0][name] != results[1][name]}
    assert differ == {name for name in results[1] if "per_second" in name} | {"seconds"}


def test_a_signal_after_the_last_step_stops_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps are done, so the result is still written."""
    write = report.write_result

    def signalled(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        write(*arguments)

    monkeypatch.setattr(report, "write_result", signalled)
    result = training.train(small_config(folder), tmp_path / "run")
    assert result["steps"] == 16
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("change", ["--config.strategy=single", slow("--config.data_parallel.implementation=pmap")])
def test_resumes_under_another_strategy(
    folder: Path, tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    stop_at(monkeypatch, 5, signal.SIGTERM)
    with pytest.raises(training.Stopped):
        training.train(small_config(folder), tmp_path / "run")
    monkeypatch.undo()
    mesh = ["--config.mesh.data=1"] if "single" in change else []
    training.train(small_config(folder, change, *mesh), tmp_path / "run")
    got, expected = final_params(tmp_path / "run"), final_params(uninterrupted)
    for name, leaf in expected.items():
        if "params" in name and "['key']['bias']" not in name:  # whose gradient is rounding error
            assert np.linalg.norm(got[name] - leaf) <= 1e-5 * np.linalg.norm(leaf), name


def test_a_finished_run_is_evaluated_again_without_changes(
    folder: Path, tmp_path: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(uninterrupted, tmp_path / "run"))  # other tests read the results of the first time
    before = json.loads((run / "result.json").read_text())
    rows = metrics.read_metrics(run)
    after = training.train(small_config(folder), run)
    assert after["test_accuracy"] == before["test_accuracy"]
    assert metrics.read_metrics(run) == rows
    shown = capsys.readouterr().out
    assert "\nfinished  this run took all of its 16 steps; to train again, use a new --workdir\n" in shown
    assert "resumed" not in shown


def test_a_damaged_checkpoint_falls_back(
    folder: Path,
    tmp_path: Path,
    uninterrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop_at(monkeypatch, 8, signal.SIGTERM)
    with pytest.raises(training.Stopped):
        training.train(small_config(folder), tmp_path / "run")
    monkeypatch.undo()
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-2:] == [6, 8]
    (tmp_path / "run" / "checkpoints" / "8" / "state" / "manifest.ocdbt").write_bytes(b"")
    training.train(small_config(folder), tmp_path / "run")
    assert "checkpoints/8 is damaged" in capsys.readouterr().out
    assert_bitwise_equal(tmp_path / "run", uninterrupted)


def test_a_damaged_last_checkpoint_is_written_again(folder: Path, tmp_path: Path, uninterrupted: Path) -> None:
    """The run resumes from an older checkpoint, and keeps the same number of intact checkpoints as before."""
    arguments = ["--config.checkpoint.keep_best=False", "--config.checkpoint.keep=3"]
    training.train(small_config(folder, *arguments), tmp_path / "run")
    there = checkpoint.steps(tmp_path / "run" / "checkpoints")
    assert there == [12, 15, 16]  # every 3 steps and the last step; keep_best is off
    for _ in range(2):
        (tmp_path / "run" / "checkpoints" / "16" / "state" / "manifest.ocdbt").write_bytes(b"")
        training.train(small_config(folder, *arguments), tmp_path / "run")
        assert checkpoint.steps(tmp_path / "run" / "checkpoints") == there
        assert_bitwise_equal(tmp_path / "run", uninterrupted)
    assert (tmp_path / "run" / "checkpoints" / "16.damaged").is_dir()


OTHERS = {
    "gpt": ["--config.task=causal_lm", "--config.model.name=gpt", "--config.optimizer.accumulation_steps=2"],
    "llama in bfloat16": [
        "--config.task=causal_lm",
        "--config.model.name=gpt",
        "--config.model.dtype=bfloat16",
        "--config.model.norm=rmsnorm",
        "--config.model.activation=swiglu",
        "--config.model.positions=rotary",
        "--config.model.num_kv_heads=1",
        "--config.model.remat=full",
    ],
    "masked_lm": ["--config.task=masked_lm", "--config.model.remat=dots"],
    "regression": ["--config.task=regression", "--config.data.target_columns=('a', 'b')"],
    "token_classification": ["--config.task=token_classification"],
    "vit": [
        "--config.model.name=vit",
        "--config.data.source=synthetic",
        "--config.model.patch_size=16",
    ],
    "mlp": ["--config.model.name=mlp", "--config.model.num_heads=None", "--config.model.mlp_size=None"],
}


@pytest.mark.parametrize("name", slow_except(["masked_lm", "token_classification", "mlp"], OTHERS))
def test_other_models_and_tasks(name: str, tmp_path: Path) -> None:
    arguments = ["--config.data.source=synthetic", "--config.data.train=", "--config.data.synthetic_examples=400"]
    config = small_config(tmp_path, *arguments, "--config.num_steps=3", *OTHERS[name])
    result = training.train(config, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result
    assert result["steps"] == 3
    assert result["examples"] == 3 * 24
    if config.task == "regression":
        assert result["test_rmse"] == pytest.approx(np.sqrt(result["test_loss"]))
        assert result["test_r2"] < 0.9  # after 3 steps
    elif config.task == "token_classification":
        assert 0 <= result["test_f1"] < 0.9
        assert 0 <= result["test_accuracy"] <= 1
    elif config.task == "classification":
        assert 0 <= result["test_accuracy"] <= 1
    else:
        assert result["perplexity"] == pytest.approx(np.exp(result["test_loss"]))
        assert 1 < result["perplexity"] < 2 * 128  # a fresh model is about as good as a guess among 128 tokens


def poison(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Set the example weights of the batch of step `step` to NaN, so that its loss and gradient are NaN."""
    from jaxpar.data import Batches

    batch = Batches.batch

    def poisoned(self: Batches, index: int, shard: slice = slice(None), **options: bool) -> dict[str, np.ndarray]:
        made = batch(self, index, shard, **options)
        if self._shuffle and index == step - 1:
            made["weights"] = made["weights"] * np.float32(np.nan)
        return made

    monkeypatch.setattr(Batches, "batch", poisoned)


def test_nonfinite_loss_stops_the_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 8)
    with pytest.raises(TrainingError, match=r"^step 8 has loss nan"):
        training.train(small_config(folder), tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] == 6
    monkeypatch.undo()
    training.train(small_config(folder), tmp_path / "run")
    for name, leaf in final_params(tmp_path / "run").items():
        assert np.isfinite(leaf).all(), name


def test_nonfinite_steps_are_skipped_if_asked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, 8)
    # Each step is a log interval, so one interval has no loss.
    overrides = ["--config.optimizer.nonfinite=skip", "--config.log.every_steps=1"]
    training.train(small_config(folder, *overrides), tmp_path / "run")
    assert sum(row.get("skipped_steps", 0) for row in metrics.read_metrics(tmp_path / "run")) == 1
    assert json.loads((tmp_path / "run" / "result.json").read_text())["skipped_steps"] == 1
    assert "skipped   1 of 16 steps" in capsys.readouterr().out
    for name, leaf in final_params(tmp_path / "run").items():
        assert np.isfinite(leaf).all(), name


def test_a_start_that_is_refused_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """Even if the mistake is found after the data was read, for which a tokenizer was trained."""
    with pytest.raises(UserError, match=r"config.profile is \(1, 1000\); it must be at most \d+, the last step"):
        training.train(small_config(folder, "--config.profile=(1,1000)"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_changed_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_csv(tmp_path / "data.csv")
    stop_at(monkeypatch, 3, signal.SIGTERM)
    with pytest.raises(training.Stopped):
        training.train(small_config(tmp_path), tmp_path / "run")
    monkeypatch.undo()
    path.write_text(path.read_text() + "one more row,none\n")
    before = {file: file.read_bytes() for file in (tmp_path / "run").glob("*.json*")}
    with pytest.raises(UserError, match="the data has changed since the checkpoint of step 3"):
        training.train(small_config(tmp_path, "--config.strategy=single", "--config.mesh.data=1"), tmp_path / "run")
    names = {"config.json", "data.json", "metrics.jsonl", "starts.jsonl", "tokenizer.json"}
    assert {file.name for file in before} == names
    assert {file: file.read_bytes() for file in (tmp_path / "run").glob("*.json*")} == before
