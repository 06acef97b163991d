"""Tests of the steps that a run certifies: correct ones pass, and a mistake in a late step stops the run."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar import checkpoint, strategies, training
from jaxpar import config as configs
from jaxpar.core import step as steps
from jaxpar.errors import TrainingError, UserError
from jaxpar.inspect import certified_steps
from jaxpar.measure.phases import Phases
from jaxpar.run import build
from jaxpar.strategies import Strategy
from jaxpar.strategies.data_parallel import shard_map
from tests.inspect.test_certify import MLP, PIPEDREAM, PIPELINE
from tests.runs import refused, small_arguments, small_config, without_texts
from tests.selection import slow_except

EVERY = ["certify_every=4", "num_steps=10", "eval.every_steps=5", "checkpoint.every_steps=3"]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Any]:
    """A function that returns the config of a small run that certifies steps 4 and 8 of 10."""

    def make(*keys: str) -> Any:
        made = configs.default_config()
        arguments = without_texts(small_arguments(tmp_path))
        configs.override(made, [*arguments, *(f"--config.{key}" for key in (*MLP, *EVERY, *keys))])
        return made

    return make


CORRECT = {
    "shard_map": ["data_parallel.implementation=shard_map", "optimizer.accumulation_steps=2"],
    "pipeline": [*PIPELINE, "mesh.data=2"],
    "sgd, bfloat16": ["data_parallel.implementation=shard_map", "model.dtype=bfloat16", "optimizer.name=sgd"],
    "sync": ["strategy=async_data_parallel", "asynchronous.policy=sync", "asynchronous.mitigations="],
}


@pytest.mark.parametrize("name", slow_except(["shard_map", "pipeline"], CORRECT))
def test_correct_steps_pass_and_change_nothing(
    name: str, config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = training.train(config(*CORRECT[name]), tmp_path / "run")
    assert result["certified_steps"] == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("certify ")]
    assert len(lines) == 1
    assert lines[0].startswith(
        "certify   every 4 steps, with the work of 5 more steps on the first device alone, about "
    )
    # 2 * 5 more steps than 10
    assert lines[0].endswith("; 2 certificates in 10 steps, about 50% of the compute of the run")
    if name != "shard_map":
        return
    assert json.loads((tmp_path / "run" / "result.json").read_text())["certified_steps"] == 2
    assert "certified steps" in (tmp_path / "run" / "report.html").read_text()
    assert training.train(config(*CORRECT[name]), tmp_path / "run")["certified_steps"] == 2  # a finished run
    plain = training.train(config(*CORRECT[name], "certify_every=0"), tmp_path / "plain")
    assert "certified_steps" not in plain
    trees = [checkpoint.read(tmp_path / run / "checkpoints" / "10").tree for run in ("run", "plain")]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*map(jax.tree.leaves, trees), strict=True))


def test_a_resumed_run_certifies_the_same_steps(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped after step 6 certifies step 8."""
    certified: list[int] = []
    original = certified_steps.CertifiedSteps._certify

    def certify(self: Any, before: Any, *rest: Any) -> None:
        certified.append(int(before["step"]) + 1)
        original(self, before, *rest)

    monkeypatch.setattr(certified_steps.CertifiedSteps, "_certify", certify)

    def stop(measurement: Any) -> None:
        if measurement.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.train(config(), tmp_path / "run", [stop])
    assert certified == [4]
    assert training.train(config(), tmp_path / "run")["certified_steps"] == 2
    assert certified == [4, 8]


def late(change: Callable[[Strategy[Any]], Callable[..., Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the step of the strategy of a run from step 7 on."""
    original = strategies.build

    def build(plan: Any, problem: Any, devices: Any) -> Any:
        made = original(plan, problem, devices)
        if plan.strategy == "single":
            return made
        changed = change(made)

        def step(state: Any, batch: Any) -> Any:
            return (changed if int(made.to_canonical(state)["step"]) >= 6 else made.step)(state, batch)

        return made._replace(step=step)

    monkeypatch.setattr(strategies, "build", build)


def scaled_layer(made: Strategy[Any]) -> Callable[..., Any]:
    """Take a step whose update of the first moment of one layer is too large by 1e-5 of it."""

    def step(state: Any, batch: Any) -> Any:
        before = jax.tree.map(np.array, made.to_canonical(state))
        state, metrics = made.step(state, batch)
        after = jax.tree.map(np.array, made.to_canonical(state))
        paths = jax.tree_util.tree_leaves_with_path(after["optimizer"])
        leaves = []
        for (path, new), old in zip(paths, jax.tree.leaves(before["optimizer"]), strict=True):
            name = jax.tree_util.keystr(path)
            leaves.append(new + np.float32(1e-5) * (new - old) if "'mu'" in name and "'head'" in name else new)
        optimizer = jax.tree.unflatten(jax.tree.structure(after["optimizer"]), leaves)
        return made.from_canonical({**after, "optimizer": optimizer}), metrics

    return step


def lost_update(made: Strategy[Any]) -> Callable[..., Any]:
    """Take a step that keeps the parameters of one layer."""

    def step(state: Any, batch: Any) -> Any:
        before = jax.tree.map(np.array, made.to_canonical(state))
        state, metrics = made.step(state, batch)
        after = jax.tree.map(np.array, made.to_canonical(state))
        params = {**after["params"], "block_0": before["params"]["block_0"]}
        return made.from_canonical({**after, "params": params}), metrics

    return step


@pytest.mark.parametrize(
    ("change", "named"),
    [(scaled_layer, "moments of head: "), (lost_update, "update of block_0: 1.0e+00, tolerance")],
)
def test_a_mistake_in_a_late_step_stops_the_run(
    change: Any,
    named: str,
    config: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error names the step. The checkpoint of step 6 is not certified, so the run continues from that of step 3."""
    late(change, monkeypatch)
    with pytest.raises(TrainingError) as error:
        training.train(config("data_parallel.implementation=shard_map"), tmp_path / "run")
    assert str(error.value).startswith(f"step 8 differs from the same step on one device: {named}")
    assert str(error.value).count("tolerance ") == 1  # nothing else is reported
    assert str(error.value).endswith(
        "; the state after it is not saved. The last certified step is 4, so the checkpoints of step 5, 6 are renamed "
        "to STEP.uncertified. `jaxpar certify` finds the cause; if the run is started again, it continues from the "
        "checkpoint of step 3"
    )
    checkpoints = tmp_path / "run" / "checkpoints"
    assert checkpoint.steps(checkpoints) == [3]
    assert (checkpoints / "6.uncertified" / "state").is_dir()
    capsys.readouterr()
    monkeypatch.undo()  # repairs the mistake
    assert training.train(config("data_parallel.implementation=shard_map"), tmp_path / "run")["certified_steps"] == 2
    assert "resumed   from step 3\n" in capsys.readouterr().out


def test_a_replica_that_misses_an_update_is_named(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The canonical state is that of replica 0, which is right. Step 4 is the first one that is certified."""

    def apply(state: Any, updates: Any, *rest: Any) -> Any:
        share = jax.numpy.where((jax.lax.axis_index("data") == 1) & (state.step == 3), 0, 1)
        return steps.apply(state, jax.tree.map(lambda x: x * share, updates), *rest)

    monkeypatch.setattr(shard_map, "steps", SimpleNamespace(**{**vars(steps), "apply": apply}))
    where = (
        r"^step 4 differs .* copy at data=1: params of [^;]* differ from data=0, by up to [^;]*, lacks the last update;"
    )
    with pytest.raises(TrainingError, match=where):
        training.train(config("data_parallel.implementation=shard_map"), tmp_path / "run")


def test_a_wrong_gradient_shows_in_the_moments(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moments show a gradient of one layer that is larger by a factor of 1 + 1e-4."""

    def gradients(*arguments: Any, **options: Any) -> Any:
        grads, sums = steps.gradients(*arguments, **options)
        return {**grads, "block_1": jax.tree.map(lambda g: g * (1 + 1e-4), grads["block_1"])}, sums

    monkeypatch.setattr(shard_map, "steps", SimpleNamespace(**{**vars(steps), "gradients": gradients}))
    with pytest.raises(
        TrainingError, match=r"^step 4 differs .*moments of block_1: .* certified step is none, .* begins at step 0$"
    ):
        training.train(config("data_parallel.implementation=shard_map"), tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == []


def test_checkpoints_before_the_first_certificate_are_kept(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is certified from the step at which it continues with `certify_every`, also if it is killed before one."""

    def stop_at(number: int) -> Callable[[Any], None]:
        def stop(measurement: Any) -> None:
            if measurement.step == number:
                raise KeyboardInterrupt

        return stop

    for number, every in ((6, 0), (7, 4)):
        with pytest.raises(KeyboardInterrupt):
            training.train(config(f"certify_every={every}", "log.every_steps=1"), tmp_path / "run", [stop_at(number)])
    late(lost_update, monkeypatch)
    with pytest.raises(TrainingError, match=r"The last certified step is 6, so the checkpoints of step 7 are renamed "):
        training.train(config(), tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] == 6


def test_a_step_that_is_not_finite_is_followed_by_a_certified_one(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 4 is skipped, so that step 5 is certified instead."""
    certified: list[int] = []
    monkeypatch.setattr(
        certified_steps.CertifiedSteps,
        "_certify",
        lambda _self, before, *_: certified.append(int(before["step"]) + 1),
    )
    original = strategies.build

    def build(*arguments: Any) -> Any:
        made = original(*arguments)

        def step(state: Any, batch: Any) -> Any:
            number = int(made.to_canonical(state)["step"])
            state, metrics = made.step(state, batch)
            return state, metrics._replace(finite=metrics.finite & (number != 3))

        return made._replace(step=step)

    monkeypatch.setattr(strategies, "build", build)
    training.train(config("optimizer.nonfinite=skip"), tmp_path / "run")
    assert certified == [5, 8]


def test_the_memory_is_that_of_the_compiled_programs(tmp_path: Path) -> None:
    run = build.make_run(small_config(tmp_path, "--config.certify_every=1", "--config.mesh.data=1"), tmp_path, Phases())
    run.config.certify_every = run.num_steps + 1
    with pytest.raises(UserError, match=rf"certify_every is {run.num_steps + 1}; it must be at most {run.num_steps}"):
        certified_steps.check_comparable(run)
    run.config.certify_every = 1
    certified = certified_steps.CertifiedSteps(run)
    reference, problem = certified._compared.single, run.problem
    state, scalar = reference._like, partial(jax.ShapeDtypeStruct, ())
    sums = jax.eval_shape(problem.task.zeros)
    needed = [
        needed_bytes(program.lower(*arguments).compile())
        for program, *arguments in (
            (reference._gradients, state, problem.batch, scalar(np.float32), scalar(np.uint32)),
            (reference._update, state, state.params, sums, scalar(np.float32)),
        )
    ]
    assert 0.95 * max(needed) < certified.device_bytes() < 1.6 * max(needed)


def needed_bytes(compiled: Any) -> int:
    found = compiled.memory_analysis()
    return int(found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["exchange=bagua_bytegrad"], "because the steps differ from those of one device: bagua_bytegrad compresses"),
        (PIPEDREAM, "because the steps differ from those of one device: each stage computes a batch with the newest"),
    ],
)
def test_steps_that_differ_are_refused(keys: list[str], message: str, config: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        training.train(config(*keys), tmp_path / "run")
    assert str(error.value).startswith(f"config.certify_every is 4; it must be 0, {message}")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_several_processes_are_refused(config: Any) -> None:
    plan = SimpleNamespace(differs="")
    run: Any = SimpleNamespace(config=config(), plan=plan, num_steps=10, cluster=SimpleNamespace(num_processes=2))
    with pytest.raises(UserError, match=r"it must be 0 in a run of 2 processes, each of which has a part of a batch"):
        certified_steps.check_comparable(run)


def test_a_negative_number_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(tmp_path, tmp_path, ["--config.certify_every=-1"], capsys)
    assert "config.certify_every is -1; it must be at least 0" in line
