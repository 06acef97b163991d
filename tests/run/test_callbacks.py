"""Tests of callbacks and early stopping: what they receive, when they end a run, and that resuming changes nothing."""

import asyncio
import json
import math
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxpar
from jaxpar import checkpoint, training
from jaxpar.config import default_config
from jaxpar.errors import TrainingError, UserError
from jaxpar.launch import processes
from jaxpar.launch.signals import SIGNALS
from jaxpar.run import metrics
from jaxpar.run.callbacks import Callbacks, EarlyStopping, Measurement
from jaxpar.tasks import Sums
from tests.runs import refused, small_config
from tests.selection import slow
from tests.test_train import assert_bitwise_equal, stop_at

EVERY = "--config.eval.every_steps=3"
PATIENCE = "--config.early_stop.patience=2"


def measurement(step: int, loss: float) -> Measurement:
    return Measurement(step, 100, "validation", {"loss": loss})


def stops_at(losses: Sequence[float], patience: int, min_delta: float, resumed: int = 0) -> int | None:
    """Return the number of evaluations after which a run stops that was resumed after `resumed` evaluations."""
    before = [(step, loss) for step, loss in enumerate(losses[:resumed], start=1)]
    stopping = EarlyStopping(patience, min_delta, before)
    if stopping.reason:
        return resumed
    for step, loss in enumerate(losses[resumed:], start=resumed + 1):
        if stopping(measurement(step, loss)):
            return step
    return None


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_stops_when_the_last_evaluations_have_no_new_minimum(patience: int) -> None:
    """The step is the same wherever the run was resumed."""
    rng = np.random.default_rng(patience)
    ends = set()
    for _ in range(100):
        losses = rng.integers(0, 30, 12).astype(float).tolist()
        ends_here = (n for n in range(patience + 1, 13) if min(losses[n - patience : n]) >= min(losses[: n - patience]))
        expected = next(ends_here, None)
        assert stops_at(losses, patience, 0.0) == expected
        for resumed in range(1, expected or 12):
            assert stops_at(losses, patience, 0.0, resumed) == expected
        ends.add(expected)
    assert len(ends) > 3


@pytest.mark.parametrize(
    ("losses", "min_delta", "end"),
    [
        ([4.0, 3.5, 3.0, 2.5, 2.0], 0.5, None),  # exactly min_delta is enough
        ([4.0, 3.75, 3.625, 3.0], 0.5, 3),
        ([4.0, 3.75, 3.5, 3.5, 3.25, 3.25], 0.5, 5),  # small decreases add up: 3.5 is 0.5 less than 4
        ([math.nan, math.nan, 1.0], 0.0, 2),
        ([1.0, math.nan, 0.5, math.inf, 0.25], 0.0, None),
    ],
)
def test_improvements_by_hand(losses: list[float], min_delta: float, end: int | None) -> None:
    assert stops_at(losses, 2, min_delta) == end


def test_the_reason_names_the_lowest_loss() -> None:
    """The lowest loss of all is that of the best checkpoint, even if it was less than min_delta lower."""
    stopping = EarlyStopping(2, 0.5, [(5, 1.0), (10, 0.75)])
    reason = stopping(measurement(15, 0.875))
    assert reason == "the validation loss has not improved by 0.5 for 2 evaluations; the lowest, 0.7500, is of step 10"
    assert EarlyStopping(1, 0.0, [(5, None)]).reason == (
        "the validation loss has not improved for 1 evaluation; none was finite"
    )


def test_the_other_processes_follow_process_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others call nothing, and receive the reason, or that a callback failed."""
    monkeypatch.setattr(processes, "is_first", lambda: False)
    monkeypatch.setattr(processes, "from_first", lambda _: json.dumps(["enough", False]))
    calls: list[Measurement] = []
    callbacks = Callbacks([calls.append])
    callbacks(measurement(1, 1.0))
    assert (callbacks.reason, calls) == ("enough", [])
    monkeypatch.setattr(processes, "from_first", lambda _: json.dumps([None, True]))
    with pytest.raises(TrainingError, match="a callback failed in process 0; see the error of that process"):
        callbacks(measurement(1, 1.0))


# ---- whole runs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give evaluations these losses, by step. The lowest is of step 6; two evaluations later, it is step 12."""
    losses = {3: 3.0, 6: 1.0, 9: 2.0, 12: 1.5, 15: 0.5, 16: 4.0}
    terms = {"correct": 0.0, "examples": 1.0}
    monkeypatch.setattr(
        training, "evaluate_split", lambda _run, state, _split: Sums(losses[int(state.step)], terms, 1.0)
    )


REASON = "the validation loss has not improved for 2 evaluations; the lowest, 1.0000, is of step 6"


@pytest.mark.usefixtures("scripted")
def test_early_stopping_ends_the_run_and_resuming_does_not_change_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(folder, EVERY, PATIENCE)
    result = training.train(config, tmp_path / "run")
    assert (result["steps"], result["stopped_early"]) == (12, REASON)
    lines = [json.loads(line) for path in (tmp_path / "run").glob("ledger/*") for line in path.read_text().splitlines()]
    assert result["examples"] == sum(line["examples"] for line in lines)
    assert result["ledger"] == "every example of 1 epoch and 4 steps was used exactly once"
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [6, 9, 12]  # the best one, and the last two
    assert f"stopped   after step 12 of 16: {REASON}" in capsys.readouterr().out
    rows = metrics.read_metrics(tmp_path / "run")
    assert (rows[-1]["split"], rows[-1]["step"]) == ("test", 12)

    with monkeypatch.context() as patch:
        stop_at(patch, 10, signal.SIGTERM)
        with pytest.raises(training.Stopped):
            training.train(config, tmp_path / "resumed")
    again = training.train(config, tmp_path / "resumed")
    assert (again["steps"], again["stopped_early"]) == (12, REASON)
    assert_bitwise_equal(tmp_path / "resumed", tmp_path / "run")

    capsys.readouterr()
    again = training.train(config, tmp_path / "run")
    assert (again["steps"], again["stopped_early"]) == (12, REASON)
    assert again["test_loss"] == result["test_loss"]
    assert metrics.read_metrics(tmp_path / "run") == rows
    shown = capsys.readouterr().out
    end = f"stopped early after step 12 of 16: {REASON}"
    advice = "to continue, raise config.early_stop.patience; to train again, use a new --workdir"
    assert f"\nfinished  this run {end}; {advice}\n" in shown

    patient = small_config(folder, EVERY, "--config.early_stop.patience=3")
    result = training.train(patient, tmp_path / "run")
    assert result["steps"] == 16
    assert "stopped_early" not in result


PIPELINE = ("strategy=pipeline", "mesh.stage=2", "mesh.data=1", "model.num_layers=2")
STRATEGIES = {
    "zero3": ("exchange=zero3",),
    "pipeline": PIPELINE,
    "pipedream": (*PIPELINE, "pipeline.schedule=pipedream"),
    "live": ("strategy=async_data_parallel", "asynchronous.mode=live", "mesh.data=4"),
    "local_sgd": ("strategy=async_data_parallel", "asynchronous.policy=local_sgd", "mesh.data=-1"),
    "swarm": ("strategy=swarm", "mesh.data=1", "model.num_layers=2"),
}


@pytest.mark.parametrize("name", ["pipedream", *(slow(name) for name in STRATEGIES if name != "pipedream")])
def test_every_strategy_stops_early(name: str, folder: Path, tmp_path: Path) -> None:
    """No update changes a float32 weight, so the second and the third evaluation are no improvements."""
    options = [f"--config.{one}" for one in STRATEGIES[name]]
    options += ["--config.optimizer.lr=1e-30", "--config.optimizer.weight_decay=0"]
    config = small_config(folder, EVERY, PATIENCE, *options)
    for _ in range(2):  # the second time, nothing is trained
        result = training.train(config, tmp_path / "run")
        assert result["steps"] == 9
        assert result["ledger"].startswith("every example of 1 epoch and 1 step was used exactly once")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.early_stop.patience=-1"], "config.early_stop.patience is -1; it must be at least 0"),
        (["--config.early_stop.min_delta=-0.5"], "config.early_stop.min_delta is -0.5; it must be finite and at least"),
        ([PATIENCE, "--config.checkpoint.keep_best=false"], "config.checkpoint.keep_best is False; it must be True"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(folder, tmp_path, arguments, capsys)


def test_early_stopping_needs_validation_data(folder: Path, tmp_path: Path) -> None:
    config = small_config(folder, PATIENCE, "--config.data.validation_fraction=0")
    with pytest.raises(UserError, match=r"config.early_stop.patience is 2; it must be 0, because the validation split"):
        training.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_callbacks_receive_all_metrics(folder: Path, tmp_path: Path) -> None:
    """The measurements are the rows of metrics.jsonl."""
    received: list[Measurement] = []
    config = small_config(folder, EVERY)
    before = config.to_json()
    jaxpar.train(config, str(tmp_path / "run"), callbacks=[received.append])
    assert config.to_json() == before
    rows = [{"step": one.step, "split": one.split, **one.metrics} for one in received]
    assert rows == metrics.read_metrics(tmp_path / "run")
    assert {one.num_steps for one in received} == {16}


def test_a_callback_ends_a_run(folder: Path, tmp_path: Path) -> None:
    """Started again, the run continues, because nothing but its metrics and its checkpoints is kept."""

    def enough(one: Measurement) -> str | None:
        one.metrics.clear()  # the callbacks that follow have metrics of their own
        return "it is late" if one.step >= 6 else None

    seen: list[float] = []
    result = jaxpar.train(
        small_config(folder), tmp_path / "run", [enough, lambda one: seen.append(one.metrics["loss"])]
    )
    assert (result["steps"], result["stopped_early"]) == (6, "it is late")
    assert len(seen) == 4  # steps 2, 4, 6 and the test split
    result = jaxpar.train(small_config(folder), tmp_path / "run")
    assert (result["steps"], "stopped_early" in result) == (16, False)


def test_the_state_is_saved_before_the_error_of_a_callback(folder: Path, tmp_path: Path) -> None:
    def fails(one: Measurement) -> None:
        if one.step == 8:
            raise ConnectionError("no server")

    with pytest.raises(ConnectionError, match="no server"):
        jaxpar.train(small_config(folder), tmp_path / "run", [fails])
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] == 8
    wrong: Any = lambda one: one.step  # noqa: E731
    with pytest.raises(TypeError, match="a callback returned 10; it must return None, or a reason to stop"):
        jaxpar.train(small_config(folder), tmp_path / "run", [wrong])
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] == 10


def test_keyboard_interrupts_of_a_notebook(folder: Path, tmp_path: Path) -> None:
    """Ctrl-C ends the run with its state saved, also if a callback receives it, and handlers are as before."""
    handlers = [signal.getsignal(number) for number in SIGNALS]

    def presses(one: Measurement) -> None:
        if one.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    def raises(one: Measurement) -> None:
        if one.step == 8:
            raise KeyboardInterrupt

    async def in_event_loop() -> None:
        with pytest.raises(training.Stopped, match="SIGINT: stopped after step 5 of 16"):
            jaxpar.train(small_config(folder), tmp_path / "run", [presses])

    asyncio.run(in_event_loop())
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] == 5
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    with pytest.raises(KeyboardInterrupt):
        jaxpar.train(small_config(folder), tmp_path / "run", [raises])
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] == 8
    assert [signal.getsignal(number) for number in SIGNALS] == handlers


def test_training_in_another_thread(folder: Path, tmp_path: Path) -> None:
    """Python handles signals only in the main thread, so a run in another one leaves them alone."""
    handler = signal.getsignal(signal.SIGINT)
    handlers, results = [], []

    def train() -> None:
        on_call = [lambda _: handlers.append(signal.getsignal(signal.SIGINT))]
        results.append(jaxpar.train(small_config(folder, "--config.num_steps=2"), tmp_path / "run", on_call))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert results[0]["steps"] == 2
    assert set(handlers) == {handler}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"a": 1}}, "config is {'a': 1}; it must be a ConfigDict, such as that of jaxpar.load_config"),
        ({"workdir": None}, "workdir is None; it must be the path of a directory"),
        ({"callbacks": print}, "callbacks is <built-in function print>; it must be a list of functions"),
        ({"callbacks": [3]}, "callbacks is [3]; it must be a list of functions"),
    ],
)
def test_arguments_of_train(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        training.train(**{"config": default_config(), "workdir": "run", **arguments})
    assert str(caught.value) == message
