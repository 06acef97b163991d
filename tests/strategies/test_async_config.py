"""Invalid values in config.asynchronous are refused in one line, before anything is written or compiled."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpar import cluster, strategies, training
from jaxpar.config import default_config
from jaxpar.errors import UserError
from jaxpar.measure.phases import Phases
from jaxpar.run import build
from jaxpar.strategies.asynchronous import delays, options, table
from jaxpar.strategies.asynchronous.simulate import POLICIES
from jaxpar.strategies.asynchronous.table import UpdateTable
from tests.checkpoint.test_private import config as small_run
from tests.runs import refused
from tests.strategies.asynchronous.test_engines import asynchronous, table_of
from tests.strategies.pipelines import Task, make_config, make_problem
from tests.test_train import assert_bitwise_equal, stop_at

MISTAKES: dict[str, tuple[str, list[str]]] = {  # name -> (settings, parts of the message)
    "a policy": (
        "policy=asink",
        ["asynchronous.policy is 'asink'; it must be one of sync, async", "Did you mean 'async'?"],
    ),
    "no worker": ("num_workers=0", ["asynchronous.num_workers is 0; it must be at least 1"]),
    "a setting of another policy": ("bound=2", ["asynchronous.bound is 2; it must be None with policy 'async'"]),
    "a bound": ("policy=ssp bound=-1", ["asynchronous.bound is -1; it must be at least 0"]),
    "groups": ("policy=softsync groups=5", ["asynchronous.groups is 5; it must be between 1 and 4"]),
    "an interval": ("policy=local_sgd interval=0", ["asynchronous.interval is 0; it must be at least 1"]),
    "a mode": ("mode=alive", ["asynchronous.mode is 'alive'; it must be one of emulated, live"]),
    "a policy that threads do not have": (
        "mode=live policy=softsync",
        ["asynchronous.policy is 'softsync'; it must be one of async, ssp with config.asynchronous.mode='live'"],
    ),
    "a table of a live run": ("mode=live table=updates.csv", ["asynchronous.table is 'updates.csv'"]),
    "a missing table": (
        "table=no.csv",
        ["config.asynchronous.table is 'no.csv', which does not exist", "it must be the path of a CSV file"],
    ),
    "a momentum before the run": (
        "mode=live mitigations=corrected_momentum",
        ["it must not contain corrected_momentum with config.asynchronous.mode='live'"],
    ),
    "an outer rate": ("policy=diloco outer_lr=-1", ["asynchronous.outer_lr is -1.0; it must be finite and at least 0"]),
    "an infinite outer rate": ("policy=diloco outer_lr=inf", ["asynchronous.outer_lr is inf; it must be finite"]),
    "an outer momentum": ("policy=diloco outer_momentum=1", ["asynchronous.outer_momentum is 1.0", "less than 1"]),
    "a distribution": (
        "delays.distribution=normal",
        ["asynchronous.delays.distribution is 'normal'; it must be one of constant, uniform, lognormal, pareto, trace"],
    ),
    "a time": (
        "delays.compute_time=0",
        ["asynchronous.delays.compute_time is 0.0; it must be between 1e-09 and 1e+09"],
    ),
    "no number": ("delays.slowdown=nan", ["asynchronous.delays.slowdown is nan"]),
    "a spread": (
        "delays.distribution=pareto",
        ["asynchronous.delays.spread is 0.0; it must be finite and greater than 1 with distribution 'pareto'"],
    ),
    "a trace without its distribution": ("delays.trace=times.csv", ["asynchronous.delays.trace is 'times.csv'"]),
    "no trace": ("delays.distribution=trace", ["asynchronous.delays.trace is ''; it must be the path of a CSV file"]),
    "a missing trace": (
        "delays.distribution=trace delays.trace=no.csv",
        ["config.asynchronous.delays.trace is 'no.csv', which does not exist", "it must be the path of a CSV file"],
    ),
    "a jitter of nothing": ("delays.jitter=1", ["delays.jitter is 1.0; it must be 0 if communication_time is 0"]),
    "a spread of nothing": ("delays.spread=1", ["delays.spread is 1.0; it must be 0 with distribution 'constant'"]),
    "delays of a live run": (
        "mode=live delays.distribution=uniform delays.spread=0.5",
        ["asynchronous.delays.distribution is 'uniform'; it must be 'constant' with config.asynchronous.mode='live'"],
    ),
    "delays of a recorded run": (
        "table=updates.csv delays.slowdown=4",
        ["asynchronous.delays.slowdown is 4.0; it must be 1.0 with config.asynchronous.table"],
    ),
    "a policy that a recorded run cannot have had": (
        "table=updates.csv policy=softsync",
        ["asynchronous.policy is 'softsync'; it must be one of async, ssp with config.asynchronous.table"],
    ),
    "a bound of a recorded run": (
        "table=updates.csv policy=ssp bound=2",
        ["asynchronous.bound is 2; it must be None with config.asynchronous.table"],
    ),
    "a former name": ("cures=dc_asgd", ["config.asynchronous.cures was renamed; use config.asynchronous.mitigations"]),
    "a mitigation": (
        "mitigations=dc_sgd",
        ["asynchronous.mitigations is 'dc_sgd'; it must be one of dc_asgd, adaptive", "Did you mean 'dc_asgd'?"],
    ),
    "two of one kind": (
        "mitigations=dc_asgd,adaptive_dc_asgd",
        ["it must contain at most one of dc_asgd, adaptive_dc_asgd"],
    ),
    "mitigations of workers with their own weights": (
        "policy=local_sgd mitigations=dc_asgd",
        ["asynchronous.mitigations is 'dc_asgd'; it must be empty with policy 'local_sgd'"],
    ),
    "a mitigation twice": (
        "mitigations=staleness_aware,staleness_aware",
        ["asynchronous.mitigations is", "it must not repeat a name"],
    ),
    "a comma": ("mitigations=,", ["asynchronous.mitigations is ','; it must be names separated by commas, or empty"]),
    "a comma at the end": ("mitigations=dc_asgd,", ["is 'dc_asgd,'; it must be names separated by commas, or empty"]),
    "a strength": (
        "mitigations=dc_asgd dc_strength=inf",
        ["asynchronous.dc_strength is inf; it must be finite and at least 0"],
    ),
    "no momentum to correct": (
        "mitigations=corrected_momentum optimizer.name=sgd optimizer.momentum=0",
        ["config.optimizer.momentum is 0.0; it must be greater than 0 with corrected_momentum"],
    ),
    "no momentum of AdamW inside muon to correct": (
        "mitigations=corrected_momentum optimizer.name=muon optimizer.b1=0",
        ["config.optimizer.b1 is 0.0; it must be greater than 0 with corrected_momentum"],
    ),
    "a strength without a mitigation": (
        "dc_strength=1",
        ["asynchronous.dc_strength is 1.0; it must be None without dc_asgd"],
    ),
    "a mitigation without its norm": (
        "mitigations=clip_by_staleness",
        ["asynchronous.max_norm is None; it must be greater than 0"],
    ),
    "a norm without its mitigation": (
        "max_norm=1",
        ["asynchronous.max_norm is 1.0; it must be None without clip_by_staleness"],
    ),
    "a norm of 0": (
        "mitigations=clip_by_staleness max_norm=0",
        ["asynchronous.max_norm is 0.0; it must be greater than 0"],
    ),
    "no momentum": (
        "mitigations=corrected_momentum optimizer.name=adafactor",
        ["optimizer.name is 'adafactor'; it must be one of adamw, lamb, sgd, ", " with corrected_momentum"],
    ),
    "a batch": ("num_workers=5", ["batch_size is 24; it must be a multiple of 10: 5 workers", "on 2 devices"]),
    "an exchange": ("exchange=zero1", ["config.exchange is 'zero1'; it must be 'ddp' without options"]),
    "stages": ("mesh.stage=2", ["config.mesh.stage is 2; it must be 1 with config.strategy='async_data_parallel'"]),
}
OTHERS = ("optimizer.", "exchange", "mesh.")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_in_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, messages = MISTAKES[name]
    keys = [key if key.startswith(OTHERS) else f"asynchronous.{key}" for key in settings.split()]
    arguments = ["--config.strategy=async_data_parallel", *(f"--config.{key}" for key in keys)]
    line = refused(tmp_path, tmp_path, arguments, capsys)
    assert all(message in line for message in messages), line


@pytest.mark.parametrize("policy", ["async", "model_average"])
def test_a_run_that_was_stopped(policy: str, tmp_path: Path) -> None:
    """A resumed run is bitwise equal to an uninterrupted one, and writes the same table."""
    strategy = ("--config.strategy=async_data_parallel", f"--config.asynchronous.policy={policy}")
    config = small_run(*strategy)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 5, signal.SIGTERM)
        with pytest.raises(training.Stopped):
            training.train(config, tmp_path / "stopped")
    training.train(config, tmp_path / "stopped")
    result = training.train(config, tmp_path / "run")
    assert_bitwise_equal(tmp_path / "stopped", tmp_path / "run")
    assert result["strategy"] == "async_data_parallel"
    assert result["steps"] == 8
    updates = table.read_updates(tmp_path / "run" / "updates.csv")
    assert len(updates.worker) == 32
    assert updates.num_workers == 4


@pytest.mark.parametrize("key", ["delays.trace", "table"])
def test_a_file_is_read_once_a_start(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config = tmp_path / "file.csv", small_run("--config.strategy=async_data_parallel")
    if key == "table":
        rows = [f"{i % 4},{i},{i},{i},{i // 4},{float(i)},{float(i + 1)}" for i in range(32)]
        path.write_text("\n".join(["# num_workers=4", ",".join(table.COLUMNS), *rows]) + "\n")
        config.asynchronous.table = str(path)
    else:
        path.write_text("worker,seconds\n" + "".join(f"{worker},{worker + 1}\n" for worker in range(4)))
        config.asynchronous.delays.trace, config.asynchronous.delays.distribution = str(path), "trace"
    opened, read_rows = [], table.read_rows

    def counting(file: Any, *rest: Any, **named: Any) -> Any:
        opened.append(file.name)
        return read_rows(file, *rest, **named)

    monkeypatch.setattr(table, "read_rows", counting)
    monkeypatch.setattr(delays, "read_rows", counting)
    workdir = tmp_path / "run"
    workdir.mkdir()
    build.make_run(config, workdir, Phases(), build.check_run(config, workdir))
    assert opened == [str(path)]


def test_default_settings() -> None:
    """Every policy with stale single gradients reduces their learning rates; an empty text means no mitigation."""
    config = default_config()
    for policy in POLICIES:
        config.asynchronous.policy = policy
        expected = ["staleness_aware"] if policy in ("async", "ssp") else []
        assert options.named_mitigations(config) == expected, policy
    config.asynchronous.policy, config.asynchronous.mitigations = "async", ""
    assert options.named_mitigations(config) == []
    # diloco: 100 rounds, of at least 8 steps and at most the 500 of its paper
    lengths = {40: 8, 799: 8, 900: 9, 5000: 50, 50_000: 500, 10**6: 500}
    assert {steps: options.diloco_interval(steps) for steps in lengths} == lengths


def test_the_header_of_a_run_gives_the_advice(tmp_path: Path) -> None:
    """If there is some. Nothing is compiled."""
    config = small_run("--config.strategy=async_data_parallel", "--config.asynchronous.policy=diloco")
    for momentum in (0.9, 0.6):
        config.asynchronous.outer_momentum = momentum
        run = build.make_run(config, tmp_path, Phases(), build.check_run(config, tmp_path))
        assert "memory    0" not in build.describe_run(run)
        advised = [line for line in build.describe_run(run).splitlines() if line.startswith("advice    ")]
        assert ["outer_momentum is 0.9" in line for line in advised] == [True] * (momentum == 0.9)


def test_the_interval_of_diloco_follows_the_length() -> None:
    config = make_config(Task("mlp", "classification", layers=1), *asynchronous("policy=diloco", workers=2))
    for num_steps, interval in ((40, 8), (1200, 12)):
        made = table_of(config, num_steps)
        assert made.num_updates == num_steps // interval
        assert set(np.bincount(made.update)) == {2 * interval}


RECORDED: dict[str, tuple[Callable[[UpdateTable], UpdateTable], int, str]] = {
    "other workers": (lambda table: table, 2, "num_workers is 2; it must be 4, as in {path}"),
    "a later step": (
        lambda table: table._replace(step=table.step + 1),
        4,
        "table is {path!r}, which begins at step 1, where its run switched to this strategy; it must begin at step 0",
    ),
    "a missing chunk": (
        lambda table: table._replace(chunk=table.chunk + 1),
        4,
        "table is {path!r}; it must contain every shard of every batch, and none before the step of its batch",
    ),
    "a chunk before its batch": (
        lambda table: table._replace(chunk=table.chunk[::-1].copy()),
        4,
        "table is {path!r}; it must contain every shard of every batch, and none before the step of its batch",
    ),
    "a step without a row": (
        lambda table: table._replace(step=table.step * 2),
        4,
        "table is {path!r}; it must have a row for every step",
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_table_that_cannot_be_replayed(name: str, tmp_path: Path) -> None:
    change, workers, message = RECORDED[name]
    task, path = Task("mlp", "classification", layers=1), tmp_path / "updates.csv"
    table.write_updates(path, change(table_of(make_config(task, *asynchronous("policy=async")), 3)))
    config = make_config(task, *asynchronous(f"table={path}", workers=workers))
    with pytest.raises(UserError) as error:
        strategies.decide(config, cluster.named_cluster("cpu", 2))
    assert str(error.value) == "config.asynchronous." + message.format(path=str(path))


def test_a_table_of_another_length_is_refused_by_its_plan(tmp_path: Path) -> None:
    task, path = Task("mlp", "classification", layers=1), tmp_path / "updates.csv"
    settings = asynchronous("policy=async")
    table.write_updates(path, table_of(make_config(task, *settings), 3))
    config = make_config(task, *settings, f"--config.asynchronous.table={path}")
    problem = make_problem(config, task)
    with pytest.raises(UserError, match="which has 3 steps and 12 gradients; it must have 10 steps and 40"):
        strategies.plan(config, problem, cluster.named_cluster("cpu", 2))
