"""Resume anywhere: every strategy continues the checkpoint of every other one.

The first of a pair trains 4 of 9 steps, by the run's own loop, which saves it on a signal; the second starts from these
files as `train` does, and trains on to the end by the same loop. Among synchronous strategies that ends as one device
ends that was not interrupted: parameters, optimizer state, RNG key, step, and the rows that were read. An epoch has 5
steps, one with filler rows. Strategies are compiled once for all of their pairs.
"""

import functools
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxpar import checkpoint, strategies
from jaxpar import config as configs
from jaxpar.launch.signals import Interrupt
from jaxpar.measure.phases import Phases
from jaxpar.plan import format_private_key
from jaxpar.run import build, metrics
from jaxpar.run.build import Run
from jaxpar.run.start import start
from jaxpar.state import Canonical
from jaxpar.train import Loop, Stopped
from tests.runs import change_info
from tests.strategies.pipelines import named, relative_error

NUM_STEPS, STOP, EXAMPLES, BATCH, MICROBATCHES = 9, 4, 72, 16, 4
PIPELINE, ASYNCHRONOUS = "strategy=pipeline", "strategy=async_data_parallel"

# In every form that a state may have on devices, and by every way to add gradients up.
SYNCHRONOUS = {
    "single": ["strategy=single"],
    "data_parallel 2": ["mesh.data=2"],
    "data_parallel 4 pmap": ["mesh.data=4", "data_parallel.implementation=pmap"],
    "data_parallel 8 shard_map": ["mesh.data=8", "data_parallel.implementation=shard_map"],
    "dp 2": ["mesh.data=2", "exchange=dp"],
    "horovod 4": ["mesh.data=4", "exchange=horovod"],
    "zero1 2": ["mesh.data=2", "exchange=zero1"],
    "zero2 4": ["mesh.data=4", "exchange=zero2", f"optimizer.accumulation_steps={MICROBATCHES}"],
    "zero3 8": ["mesh.data=8", "exchange=zero3"],
    "gpipe 4": [PIPELINE, "mesh.data=1", "mesh.stage=4", "pipeline.schedule=gpipe"],
    "1f1b 2 x 2": [PIPELINE, "mesh.data=2", "mesh.stage=2", "pipeline.schedule=1f1b"],
    "interleaved 2": [PIPELINE, "mesh.data=1", "mesh.stage=2", "pipeline.schedule=interleaved_1f1b"],
    "zb_v 2 x 2": [PIPELINE, "mesh.data=2", "mesh.stage=2", "pipeline.schedule=zb_v"],
    "sync of 4": [ASYNCHRONOUS, "mesh.data=2", "asynchronous.policy=sync"],
}
# With an optimizer that treats hidden kernels unlike the rest: the tree of its state is not that of the parameters.
MUON = ["optimizer.name=muon", "optimizer.momentum=0.9"]
PARTITIONED = {
    f"{name}, muon": [*SYNCHRONOUS[name], *MUON]
    for name in ("single", "data_parallel 4 pmap", "dp 2", "horovod 4", "1f1b 2 x 2", "zb_v 2 x 2", "sync of 4")
}
# With a state of their own besides: weights that were read, residuals.
PRIVATE = {
    "async of 4": [ASYNCHRONOUS, "mesh.data=2", "asynchronous.policy=async", "asynchronous.delays.slowdown=3"],
    "diloco of 4": [ASYNCHRONOUS, "mesh.data=2", "asynchronous.policy=diloco", "asynchronous.interval=3"],
    "onebit 2": ["mesh.data=2", "exchange=byteps_onebit"],
    "onebit 2, momentum": ["mesh.data=2", "exchange=byteps_onebit", "exchange_options.momentum=0.5"],
    "onebit in 1f1b 2 x 2": [PIPELINE, "mesh.data=2", "mesh.stage=2", "exchange=byteps_onebit"],
}
SOME = ["single", "zero3 8", "zb_v 2 x 2"]


def make_config(name: str) -> ConfigDict:
    """A perceptron of 4 layers with dropout on synthetic vectors; clipped, with a schedule."""
    values = [
        *("model.name=mlp", "model.num_layers=2", "model.hidden_size=16", "model.dropout=0.3", "model.activation=gelu"),
        *("data.source=synthetic", "data.validation_fraction=0", "data.test_fraction=0", "data.num_threads=0"),
        f"data.synthetic_examples={EXAMPLES}",
        *(f"batch_size={BATCH}", f"num_steps={NUM_STEPS}", f"pipeline.num_microbatches={MICROBATCHES}"),
        *("optimizer.lr=0.01", "optimizer.clip_norm=0.5", "log.tensorboard=False", "checkpoint.every_steps=0"),
    ]
    config = configs.default_config()
    configs.override(config, [f"--config.{value}" for value in values + (SYNCHRONOUS | PARTITIONED | PRIVATE)[name]])
    return config


class Runs:
    """Those of a test session, each in a folder of its own."""

    def __init__(self, folder: Path):
        self._folder = folder

    @functools.cache  # noqa: B019 - as many as there are strategies
    def build(self, name: str) -> Run:
        """The run of a strategy."""
        config, workdir = make_config(name), self._folder / name
        workdir.mkdir()
        build.check_run(config, workdir)
        return build.make_run(config, workdir, Phases())

    @functools.cache  # noqa: B019
    def stopped(self, name: str) -> tuple[Path, list[np.ndarray]]:
        """The workdir of a run that was stopped and saved, and what it read."""
        workdir = self.build(name).workdir
        saver = checkpoint.Saver(workdir / "checkpoints", keep=1, keep_best=False)
        rows = go(self.build(name), saver, STOP)
        saver.close()
        return workdir, rows

    @functools.cache  # noqa: B019
    def uninterrupted(self, name: str) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        """What a run ends with, and what it read."""
        return self.goes_on(name, self._folder / f"{name} uninterrupted")

    def goes_on(self, name: str, workdir: Path) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        """What a strategy ends with, and what it reads, when it goes on with what is in `workdir`."""
        workdir.mkdir(exist_ok=True)
        saver = Kept()
        rows = go(self.build(name)._replace(workdir=workdir), saver)
        return named((saver.tree, saver.private)), rows


class Kept(checkpoint.Saver):
    """Keeps what the loop gives to save, in the place of writing it."""

    def __init__(self) -> None:
        self.tree: Canonical = {}
        self.private: Canonical = {}

    def save(self, tree: Canonical, *rest: Any, private: Canonical | None = None) -> None:
        self.tree, self.private = jax.device_get((tree, private or {}))


def go(run: Run, saver: checkpoint.Saver, stop: int | None = None) -> list[np.ndarray]:
    """The run goes on with what is in its workdir, to the end or to step `stop`. The inputs that it read."""
    interrupt, read, place = Interrupt(), list[np.ndarray](), run.strategy.place

    def recording(rows: Any) -> Any:
        read.append(rows["inputs"][rows["weights"] > 0])
        if len(read) == stop:
            interrupt.requested = signal.SIGTERM
        return place(rows)

    run = run._replace(strategy=run.strategy._replace(place=recording))
    current, first_step = start(run)
    log = metrics.Log(run.workdir, first_step=first_step, tensorboard=False)
    try:
        Loop(run, first_step, saver, log).run(current, interrupt)
    except Stopped:
        assert len(read) == stop
    finally:
        log.close()
    return read


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("matrix"))


def copied(workdir: Path, to: Path, *, with_private: bool = True) -> Path:
    """The checkpoint of a run in another workdir."""
    there = shutil.copytree(workdir / "checkpoints", to / "checkpoints") / str(STOP)
    if not with_private:
        shutil.rmtree(there / "private")
        change_info(there, lambda info: info.pop("private_checksums"))
    return to


def assert_same_rows(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(got) == len(expected)
    for step, rows in enumerate(expected):
        np.testing.assert_array_equal(got[step], rows, f"step {step}")


def assert_bitwise_equal(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, name)


@pytest.mark.parametrize("second", SYNCHRONOUS)
@pytest.mark.parametrize("first", SYNCHRONOUS)
def test_continues_as_if_never_interrupted(first: str, second: str, runs: Runs, tmp_path: Path) -> None:
    assert_continues(first, second, "single", runs, tmp_path)


@pytest.mark.parametrize("second", PARTITIONED)
@pytest.mark.parametrize("first", PARTITIONED)
def test_continues_with_a_partitioned_optimizer(first: str, second: str, runs: Runs, tmp_path: Path) -> None:
    assert_continues(first, second, "single, muon", runs, tmp_path)


def assert_continues(first: str, second: str, reference: str, runs: Runs, tmp_path: Path) -> None:
    """That stopping `first` and going on with `second` ends as `reference` ends that was not interrupted."""
    workdir, before = runs.stopped(first)
    got, after = runs.goes_on(second, copied(workdir, tmp_path))
    expected, rows = runs.uninterrupted(reference)
    assert_same_rows(before + after, rows)
    canonical = {name: value for name, value in got.items() if name.startswith("[0]")}  # of sync, also when it began
    assert canonical.keys() == expected.keys()
    for name, value in expected.items():
        if value.dtype.kind in "iu":  # step, key, counters
            np.testing.assert_array_equal(canonical[name], value, name)
        else:
            assert relative_error(canonical[name], value) < 1e-6, name


@pytest.mark.parametrize("reference", ["single", "single, muon"])
def test_the_uninterrupted_run_is_worth_comparing_with(reference: str, runs: Runs) -> None:
    """All examples once in each epoch; the key is that of the seed; all but constants move, in the optimizer too."""
    end, rows = runs.uninterrupted(reference)
    for epoch in (rows[:5], rows[5:]):
        examples = np.concatenate(epoch)
        assert len(np.unique(examples, axis=0)) == len(examples)
    sizes = [len(inputs) for inputs in rows[:5]]
    assert sum(sizes) == EXAMPLES
    assert min(sizes) < BATCH
    tree, _ = runs.stopped(reference)
    saved = named((checkpoint.read(tree / "checkpoints" / str(STOP)).tree, {}))
    assert int(saved["[0]['step']"]) == STOP
    assert int(end["[0]['step']"]) == NUM_STEPS
    for name, value in end.items():
        assert np.array_equal(value, saved[name]) == name.endswith(("['key']", "['ns_coeffs']")), name
        assert np.any(value), name


def test_every_strategy_is_here() -> None:
    names = {make_config(name).strategy for name in SYNCHRONOUS}
    assert names == set(strategies.STRATEGIES)


@pytest.mark.parametrize("name", PRIVATE)
def test_private_state_continues_bitwise_under_its_own_strategy(
    name: str, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir, before), (expected, rows) = runs.stopped(name), runs.uninterrupted(name)
    got, after = runs.goes_on(name, copied(workdir, tmp_path))
    assert "left behind" not in capsys.readouterr().out
    assert_bitwise_equal(got, expected)
    assert_same_rows(before + after, rows)
    (tmp_path / "without").mkdir()
    other, _ = runs.goes_on(name, copied(workdir, tmp_path / "without", with_private=False))
    assert any(not np.array_equal(other[path], value) for path, value in expected.items() if "params" in path)


@pytest.mark.parametrize("second", [*SOME, *PRIVATE])
@pytest.mark.parametrize("first", PRIVATE)
def test_another_strategy_goes_on_without_the_private_state(
    first: str, second: str, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the newest weights: as where the checkpoint had never had one."""
    if first == second:
        return
    (workdir, before), (_, rows) = runs.stopped(first), runs.uninterrupted("single")
    runs.build(second)
    capsys.readouterr()
    got, after = runs.goes_on(second, copied(workdir, tmp_path))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("private ")]
    assert len(said) == 1
    assert f"state of {format_private_key(runs.build(first).plan.private_key)} is left behind" in said[0]
    (tmp_path / "without").mkdir()
    expected, _ = runs.goes_on(second, copied(workdir, tmp_path / "without", with_private=False))
    assert_bitwise_equal(got, expected)
    assert_same_rows(before + after, rows)
    assert int(got["[0]['step']"]) == NUM_STEPS
    assert all(np.isfinite(value).all() for value in got.values())


@pytest.mark.parametrize("first", PRIVATE)
def test_exact_strategies_agree_on_where_another_one_went(first: str, runs: Runs, tmp_path: Path) -> None:
    """What they take over is the same, and is what the stopped run had as its weights."""
    workdir, _ = runs.stopped(first)
    ends = []
    for second in SOME:
        folder = tmp_path / second
        folder.mkdir()
        ends.append(runs.goes_on(second, copied(workdir, folder))[0])
    for end in ends[1:]:
        for name, value in ends[0].items():
            if value.dtype.kind == "f":
                assert relative_error(end[name], value) < 1e-6, name
