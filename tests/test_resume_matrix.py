"""Tests that every strategy can resume from the checkpoint of every other strategy.

For each pair, the first strategy trains 4 of 9 steps with the loop of a run, which saves a checkpoint on a signal. The
second strategy resumes from this checkpoint, as `train` does, and trains to the end with the same loop. Between
synchronous strategies, the result must equal that of an uninterrupted run on one device: parameters, optimizer state,
RNG key, step and the examples read. An epoch has 5 steps, one of them with padding examples. Each strategy is compiled
once for all of its pairs. Every run of the suite has the pairs with `single`, `-m slow` the rest.
"""

import functools
import itertools
import shutil
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxpar import checkpoint, strategies
from jaxpar import config as configs
from jaxpar.core.plan import format_private_key
from jaxpar.core.state import Canonical
from jaxpar.launch.signals import Interrupt
from jaxpar.measure.phases import Phases
from jaxpar.run import build, metrics
from jaxpar.run.build import Run
from jaxpar.run.restore import start
from jaxpar.training import Loop, Stopped
from tests.runs import change_info
from tests.selection import slow_except
from tests.strategies.pipelines import named, relative_error

NUM_STEPS, STOP, EXAMPLES, BATCH, MICROBATCHES = 9, 4, 72, 16, 4
PIPELINE, ASYNCHRONOUS, SWARM = "strategy=pipeline", "strategy=async_data_parallel", "strategy=swarm"

# Every form of a state on devices, and every way to sum gradients.
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
    "hsdp 2 x 2": ["mesh.data=4", "exchange=hsdp", "exchange_options.group=2"],
    "gpipe 4": [PIPELINE, "mesh.data=1", "mesh.stage=4", "pipeline.schedule=gpipe"],
    "1f1b 2 x 2": [PIPELINE, "mesh.data=2", "mesh.stage=2", "pipeline.schedule=1f1b"],
    "interleaved 2": [PIPELINE, "mesh.data=1", "mesh.stage=2", "pipeline.schedule=interleaved_1f1b"],
    "zb_v 2 x 2": [PIPELINE, "mesh.data=2", "mesh.stage=2", "pipeline.schedule=zb_v"],
    "zero1 in 1f1b 2 x 2": [PIPELINE, "mesh.data=2", "mesh.stage=2", "pipeline.schedule=1f1b", "exchange=zero1"],
    "hsdp in 1f1b 4 x 2": [
        *(PIPELINE, "mesh.data=4", "mesh.stage=2", "pipeline.schedule=1f1b", "pipeline.executor=dispatch"),
        *("exchange=hsdp", "exchange_options.group=2"),
    ],
    "sync of 4": [ASYNCHRONOUS, "mesh.data=2", "asynchronous.policy=sync"],
    "swarm of 4": [SWARM, "mesh.data=2"],
}
# With a partitioned optimizer, whose state has a different tree structure than the parameters.
MUON = ["optimizer.name=muon", "optimizer.momentum=0.9"]
PARTITIONED = {
    f"{name}, muon": [*SYNCHRONOUS[name], *MUON]
    for name in ("single", "data_parallel 4 pmap", "dp 2", "horovod 4", "1f1b 2 x 2", "zb_v 2 x 2", "sync of 4")
}
# With texts, whose model can be divided: neither the words nor the positions are a multiple of the devices.
TEXTS = [
    *("model.name=gpt", "model.num_layers=1", "model.num_heads=2", "model.mlp_size=32", "model.norm=rmsnorm"),
    *("data.max_length=9", "data.vocab_size=33", "optimizer.eps=1e-4"),  # more than the rounding of gradients
]
GROUPS = ["tensor 2", "context 2", "tensor 2 x zero2 2"]
DIVIDED = {
    name: [*settings, *TEXTS]
    for name, settings in {
        "single of texts": ["strategy=single"],
        "tensor 2": ["strategy=single", "mesh.tensor=2"],
        "context 2": ["strategy=single", "mesh.context=2"],
        "tensor 2 x zero2 2": ["mesh.data=2", "mesh.tensor=2", "exchange=zero2"],
        "context 2 x tensor 2 x zero3 2": ["mesh.data=2", "mesh.context=2", "mesh.tensor=2", "exchange=zero3"],
        "zero1 of texts 2": ["mesh.data=2", "exchange=zero1"],
        "1f1b 2 x tensor 2": [PIPELINE, "mesh.data=1", "mesh.stage=2", "mesh.tensor=2", "pipeline.schedule=1f1b"],
    }.items()
}
ONEBIT = ["exchange=byteps_onebit", "exchange_options.min_compress_bytes=0"]
# Strategies with private state, such as stale weights and residuals.
PRIVATE = {
    "async of 4": [ASYNCHRONOUS, "mesh.data=2", "asynchronous.policy=async", "asynchronous.delays.slowdown=3"],
    "diloco of 4": [ASYNCHRONOUS, "mesh.data=2", "asynchronous.policy=diloco", "asynchronous.interval=3"],
    "onebit 2": ["mesh.data=2", *ONEBIT],
    "onebit 2, momentum": ["mesh.data=2", *ONEBIT, "exchange_options.momentum=0.5"],
    "onebit in 1f1b 2 x 2": [PIPELINE, "mesh.data=2", "mesh.stage=2", "pipeline.schedule=1f1b", *ONEBIT],
    "swarm of 4, delayed": [SWARM, "mesh.data=2", "swarm.delayed=True"],
}
SOME = ["single", "zero3 8", "zb_v 2 x 2"]


def pairs(firsts: Iterable[str], seconds: Iterable[str], some: Sequence[str]) -> list[Any]:
    """Return all pairs of strategies, those without one of `some` marked as slow."""
    every = list(itertools.product(firsts, seconds))
    return slow_except([pair for pair in every if set(pair) & set(some)], every)


def make_config(name: str) -> ConfigDict:
    """An MLP of 4 layers with dropout on synthetic vectors, with gradient clipping and a learning-rate schedule.

    DIVIDED has a transformer on texts.
    """
    values = [
        *("model.name=mlp", "model.num_layers=2", "model.hidden_size=16", "model.dropout=0.3", "model.activation=gelu"),
        *("data.source=synthetic", "data.validation_fraction=0", "data.test_fraction=0", "data.num_threads=0"),
        f"data.synthetic_examples={EXAMPLES}",
        *(f"batch_size={BATCH}", f"num_steps={NUM_STEPS}", f"pipeline.num_microbatches={MICROBATCHES}"),
        f"swarm.num_microbatches={MICROBATCHES}",
        *("optimizer.lr=0.01", "optimizer.clip_norm=0.5", "log.tensorboard=False", "checkpoint.every_steps=0"),
        "pipeline.executor=lockstep",
    ]
    config = configs.default_config()
    configs.override(
        config, [f"--config.{value}" for value in values + (SYNCHRONOUS | PARTITIONED | DIVIDED | PRIVATE)[name]]
    )
    return config


class Runs:
    """The runs of this module, each in its own folder and built once."""

    def __init__(self, folder: Path):
        self._folder = folder

    @functools.cache  # noqa: B019 - bounded by the number of strategies
    def build(self, name: str) -> Run:
        """Build the run of a strategy."""
        config, workdir = make_config(name), self._folder / name
        workdir.mkdir()
        build.check_run(config, workdir)
        return build.make_run(config, workdir, Phases())

    @functools.cache  # noqa: B019
    def stopped(self, name: str) -> tuple[Path, list[np.ndarray]]:
        """Return the workdir of a run that was stopped and saved, and the inputs it read."""
        workdir = self.build(name).workdir
        saver = checkpoint.Saver(workdir / "checkpoints", keep=1, keep_best=False)
        rows = go(self.build(name), saver, STOP)
        saver.close()
        return workdir, rows

    @functools.cache  # noqa: B019
    def uninterrupted(self, name: str) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        """Return the final state of an uninterrupted run and the inputs it read."""
        return self.goes_on(name, self._folder / f"{name} uninterrupted")

    def goes_on(self, name: str, workdir: Path) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        """Resume the run in `workdir` with a strategy, and return its final state and the inputs it read."""
        workdir.mkdir(exist_ok=True)
        saver = Kept()
        rows = go(self.build(name)._replace(workdir=workdir), saver)
        return named((saver.tree, saver.private)), rows


class Kept(checkpoint.Saver):
    """A saver that keeps the state in memory instead of writing it."""

    def __init__(self) -> None:
        self.tree: Canonical = {}
        self.private: Canonical = {}

    def save(self, tree: Canonical, *rest: Any, private: Canonical | None = None) -> None:
        self.tree, self.private = jax.device_get((tree, private or {}))


def go(run: Run, saver: checkpoint.Saver, stop: int | None = None) -> list[np.ndarray]:
    """Resume the run in its workdir to the end, or stop it after step `stop`, and return the inputs it read."""
    interrupt, read, place = Interrupt(), list[np.ndarray](), run.strategy.place

    def recording(rows: Any) -> Any:
        read.append(rows["inputs"][rows["weights"] > 0])
        if len(read) == stop:
            interrupt.requested = signal.SIGTERM
        return place(rows)

    run = run._replace(strategy=run.strategy._replace(place=recording))
    current, past = start(run)
    log = metrics.Log(run.workdir, first_step=past.step, tensorboard=False)
    try:
        Loop(run, past, saver, log).run(current, interrupt)
    except Stopped:
        assert len(read) == stop
    finally:
        log.close()
    return read


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("matrix"))


def copied(workdir: Path, to: Path, *, with_private: bool = True) -> Path:
    """Copy the checkpoint of a run to another workdir."""
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


@pytest.mark.parametrize(("first", "second"), pairs(SYNCHRONOUS, SYNCHRONOUS, ["single"]))
def test_continues_as_if_never_interrupted(first: str, second: str, runs: Runs, tmp_path: Path) -> None:
    assert_continues(first, second, "single", runs, tmp_path)


@pytest.mark.parametrize(("first", "second"), pairs(PARTITIONED, PARTITIONED, ["single, muon"]))
def test_continues_with_a_partitioned_optimizer(first: str, second: str, runs: Runs, tmp_path: Path) -> None:
    assert_continues(first, second, "single, muon", runs, tmp_path)


IN_EVERY_RUN = [*itertools.pairwise(["single of texts", *GROUPS, "single of texts"])]


@pytest.mark.parametrize(("first", "second"), slow_except(IN_EVERY_RUN, itertools.product(DIVIDED, repeat=2)))
def test_continues_on_other_axes(first: str, second: str, runs: Runs, tmp_path: Path) -> None:
    assert_continues(first, second, "single of texts", runs, tmp_path)


def assert_continues(first: str, second: str, reference: str, runs: Runs, tmp_path: Path) -> None:
    """Assert that stopping `first` and resuming with `second` gives the result of an uninterrupted `reference`."""
    workdir, before = runs.stopped(first)
    got, after = runs.goes_on(second, copied(workdir, tmp_path))
    expected, rows = runs.uninterrupted(reference)
    assert_same_rows(before + after, rows)
    canonical = {name: value for name, value in got.items() if name.startswith("[0]")}  # without the private state
    assert canonical.keys() == expected.keys()
    for name, value in expected.items():
        if value.dtype.kind in "iu":  # step, key, counters
            np.testing.assert_array_equal(canonical[name], value, name)
        else:
            most = 2e-6 if "['nu']" in name else 1e-6  # squares
            assert relative_error(canonical[name], value) < most, name


@pytest.mark.parametrize("reference", ["single", "single, muon", "single of texts"])
def test_the_uninterrupted_run_is_a_valid_reference(reference: str, runs: Runs) -> None:
    """Each epoch reads all examples once; the key does not change, and all other arrays except constants do."""
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


def test_every_strategy_is_tested() -> None:
    names = {make_config(name).strategy for name in SYNCHRONOUS}
    assert names == set(strategies.STRATEGIES)


@pytest.mark.parametrize("name", PRIVATE)
def test_private_state_continues_bitwise_under_its_own_strategy(
    name: str, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir, before), (expected, rows) = runs.stopped(name), runs.uninterrupted(name)
    got, after = runs.goes_on(name, copied(workdir, tmp_path))
    assert "discarded" not in capsys.readouterr().out
    assert_bitwise_equal(got, expected)
    assert_same_rows(before + after, rows)
    (tmp_path / "without").mkdir()
    other, _ = runs.goes_on(name, copied(workdir, tmp_path / "without", with_private=False))
    assert any(not np.array_equal(other[path], value) for path, value in expected.items() if "params" in path)


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize(
    ("name", "policy"),
    [("async of 4", "async of 4 workers with staleness_aware"), ("diloco of 4", "diloco of 4 workers")],
)
def test_private_state_with_an_earlier_form_of_key(
    name: str, policy: str, is_text: bool, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The policy in the key was a text. Before that, the whole key was a text, whose private state is discarded."""
    (workdir, _), (expected, _) = runs.stopped(name), runs.uninterrupted(name)

    def change(info: dict[str, Any]) -> None:
        table = info.pop("private_key")["table"]
        info |= (
            {"private_of": f"{policy} ({table})"} if is_text else {"private_key": {"policy": policy, "table": table}}
        )

    change_info(copied(workdir, tmp_path) / "checkpoints" / str(STOP), change)
    capsys.readouterr()
    got, _ = runs.goes_on(name, tmp_path)
    output = capsys.readouterr().out
    assert (f"discarded private state of {policy} (" in output) == is_text
    if not is_text:
        assert_bitwise_equal(got, expected)


@pytest.mark.parametrize(("first", "second"), pairs(PRIVATE, [*SOME, *PRIVATE], ["zb_v 2 x 2"]))
def test_another_strategy_resumes_without_the_private_state(
    first: str, second: str, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run resumes from the newest weights, as it would if the checkpoint had no private state."""
    if first == second:
        return
    (workdir, before), (_, rows) = runs.stopped(first), runs.uninterrupted("single")
    runs.build(second)
    capsys.readouterr()
    got, after = runs.goes_on(second, copied(workdir, tmp_path))
    discarded = [line for line in capsys.readouterr().out.splitlines() if line.startswith("discarded ")]
    assert len(discarded) == 1
    assert f"private state of {format_private_key(runs.build(first).plan.private_key)}; this run" in discarded[0]
    (tmp_path / "without").mkdir()
    expected, _ = runs.goes_on(second, copied(workdir, tmp_path / "without", with_private=False))
    assert_bitwise_equal(got, expected)
    assert_same_rows(before + after, rows)
    assert int(got["[0]['step']"]) == NUM_STEPS
    assert all(np.isfinite(value).all() for value in got.values())


@pytest.mark.parametrize("first", PRIVATE)
def test_exact_strategies_resume_from_the_same_weights(first: str, runs: Runs, tmp_path: Path) -> None:
    """All exact strategies resume from the same weights, those of the stopped run."""
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
