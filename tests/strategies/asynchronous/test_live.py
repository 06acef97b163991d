"""Live runs: their tables are valid, and replaying a table gives bitwise the same run."""

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar import training
from jaxpar.errors import UserError
from jaxpar.run.metrics import read_metrics
from jaxpar.strategies import Strategy
from jaxpar.strategies.asynchronous import programs, server, table, threads
from jaxpar.strategies.asynchronous.table import UpdateTable
from tests.checkpoint.test_private import config as small_run
from tests.strategies.asynchronous.test_engines import asynchronous
from tests.strategies.pipelines import NUM_STEPS, Task, make, make_batch, named, start

MLP, BERT = Task("mlp", "classification", layers=1), Task("bert", "classification", layers=1)
RUNS: dict[str, tuple[Task, tuple[str, ...], dict[str, Any]]] = {
    "two devices": (MLP, ("delays.slowdown=5",), {"workers": 4, "devices": 2}),
    "mitigations": (MLP, ("mitigations=dc_asgd,staleness_aware",), {"workers": 8, "devices": 4}),
    "bounded": (MLP, ("policy=ssp", "bound=1", "delays.slowdown=5"), {"workers": 4, "devices": 4}),
    "a transformer": (BERT, (), {"workers": 4, "devices": 2}),
}


def begin(name: str, *more: str) -> Strategy[Any]:
    task, settings, sizes = RUNS[name]
    return make(task, *asynchronous(*settings, *more, **sizes))


def go_on(strategy: Strategy[Any], state: Any, task: Task, first: int, last: int) -> tuple[Any, list[float]]:
    weights = []
    for step in range(first, last):
        state, metrics = strategy.step(state, strategy.place(make_batch(task, step)))
        weights.append(float(metrics.sums.weight))
    return state, weights


def final(strategy: Strategy[Any], state: Any) -> dict[str, np.ndarray]:
    return named(jax.device_get(strategy.to_canonical(state)))


def replayed(name: str, path: Path) -> dict[str, np.ndarray]:
    """Return the final state of a run that replays the table, on another number of devices."""
    task, settings, sizes = RUNS[name]
    emulated = (setting for setting in settings if not setting.startswith(("delays", "bound")))
    strategy = make(task, *asynchronous(*emulated, f"table={path}", workers=sizes["workers"], devices=1))
    state, _ = go_on(strategy, strategy.from_canonical(start(task)), task, 0, NUM_STEPS)
    return final(strategy, state)


def written(strategy: Strategy[Any], state: Any, folder: Path) -> tuple[Path, UpdateTable]:
    reported = strategy.report(state, folder)
    made = table.read_updates(folder / "updates.csv")
    assert reported["updates"] == made.num_updates == len(made.worker)
    assert reported["staleness_max"] == made.staleness.max()
    return folder / "updates.csv", made


def assert_bitwise(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, x in expected.items():
        np.testing.assert_array_equal(got[name], x, name)


@pytest.mark.parametrize("name", RUNS)
def test_made_again_from_its_table(name: str, tmp_path: Path) -> None:
    strategy, task = begin(name, "mode=live"), RUNS[name][0]
    state, weights = go_on(strategy, strategy.from_canonical(start(task)), task, 0, NUM_STEPS)
    assert all(weight > 0 for weight in weights)  # some gradient arrived in each step
    end = final(strategy, state)
    path, made = written(strategy, state, tmp_path)
    assert int(end["['step']"]) == NUM_STEPS
    workers = RUNS[name][2]["workers"]
    assert sorted(made.chunk) == list(range(workers * NUM_STEPS))  # nothing is lost
    assert set(made.worker) == set(range(workers))
    assert made.staleness.max() >= 1
    assert_bitwise(replayed(name, path), end)


def test_stopped_and_resumed_it_is_one_run_with_one_table(tmp_path: Path) -> None:
    first = begin("mitigations", "mode=live")
    state, _ = go_on(first, first.from_canonical(start(MLP)), MLP, 0, 4)
    tree, private = jax.device_get((first.to_canonical(state), first.to_private(state)))
    second = begin("mitigations", "mode=live")
    state, _ = go_on(second, second.from_canonical(tree, private), MLP, 4, NUM_STEPS)
    end = final(second, state)
    path, _ = written(second, state, tmp_path)
    assert_bitwise(replayed("mitigations", path), end)


def test_a_replay_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """A replay resumes bitwise, on another number of devices. Without its in-flight state it is refused."""
    live_run = begin("two devices", "mode=live")
    state, _ = go_on(live_run, live_run.from_canonical(start(MLP)), MLP, 0, NUM_STEPS)
    end = final(live_run, state)
    path, made = written(live_run, state, tmp_path)
    [*_, step] = [s for s in range(1, NUM_STEPS) if (made.chunk[made.step >= s] < 4 * s).any()]
    first, second = (make(MLP, *asynchronous(f"table={path}", workers=4, devices=devices)) for devices in (2, 1))
    state, _ = go_on(first, first.from_canonical(start(MLP)), MLP, 0, step)
    tree, private = jax.device_get((first.to_canonical(state), first.to_private(state)))
    with pytest.raises(UserError, match=f"gradients of batches before step {step} only after that step"):
        second.from_canonical(tree)
    state, _ = go_on(second, second.from_canonical(tree, private), MLP, step, NUM_STEPS)
    assert_bitwise(final(second, state), end)


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("resumed", [False, True])
def test_no_worker_is_further_ahead_than_it_may(resumed: bool, bound: int, tmp_path: Path) -> None:
    settings = ("mode=live", "policy=ssp", f"bound={bound}", "delays.slowdown=10")
    strategy = make(MLP, *asynchronous(*settings, workers=4, devices=2))
    half = NUM_STEPS // 2
    state, _ = go_on(strategy, strategy.from_canonical(start(MLP)), MLP, 0, half)
    if resumed:
        tree, private = jax.device_get((strategy.to_canonical(state), strategy.to_private(state)))
        strategy = make(MLP, *asynchronous(*settings, workers=4, devices=2))
        state = strategy.from_canonical(tree, private)
    state, _ = go_on(strategy, state, MLP, half, NUM_STEPS)
    _, made = written(strategy, state, tmp_path)
    ahead = []
    for row in range(len(made.worker)):
        before = (made.finish <= made.start[row]) & (np.arange(len(made.worker)) < row)
        completed = np.bincount(made.worker[before], minlength=4)
        ahead.append(completed[made.worker[row]] - completed.min())
    assert max(ahead) == bound


def test_a_slow_worker_does_less(tmp_path: Path) -> None:
    strategy = make(MLP, *asynchronous("mode=live", "delays.slowdown=50", workers=4, devices=2))
    state, _ = go_on(strategy, strategy.from_canonical(start(MLP)), MLP, 0, NUM_STEPS)
    _, made = written(strategy, state, tmp_path)
    counts = np.bincount(made.worker)
    assert 0 < counts[3] < min(counts[:3])


def test_a_worker_that_hangs_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 3's first gradient hangs until the others have computed all of theirs, for all steps but one."""
    others_are_done = threading.Event()

    class Programs(programs.Programs):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            gradient: Any = self.gradient

            def hanging(*arguments: Any) -> Any:
                if threading.current_thread().name == "worker 3":
                    assert others_are_done.wait(30), "the others wait for worker 3"
                return gradient(*arguments)

            vars(self)["gradient"] = hanging

    monkeypatch.setattr(server, "Programs", Programs)
    strategy = make(MLP, *asynchronous("mode=live", workers=4, devices=2))
    state, _ = go_on(strategy, strategy.from_canonical(start(MLP)), MLP, 0, NUM_STEPS - 1)
    others_are_done.set()
    go_on(strategy, state, MLP, NUM_STEPS - 1, NUM_STEPS)
    _, made = written(strategy, state, tmp_path)
    [first, *_] = np.flatnonzero(made.worker == 3)
    assert first >= 4 * (NUM_STEPS - 1) - 4  # all except in-flight gradients
    assert made.staleness[first] >= 4 * (NUM_STEPS - 1) - 4 - 3


def test_every_gradient_is_in_the_metrics_of_a_step() -> None:
    """Late gradients count in the next step, and those of the last step in the last step."""
    strategy = begin("two devices", "mode=live")
    _, weights = go_on(strategy, strategy.from_canonical(start(MLP)), MLP, 0, NUM_STEPS)
    assert sum(weights) == pytest.approx(sum(make_batch(MLP, step)["weights"].sum() for step in range(NUM_STEPS)))


def test_a_server_with_a_separate_device(tmp_path: Path) -> None:
    strategy = make(MLP, *asynchronous("mode=live", "mitigations=adaptive_dc_asgd", workers=2, devices=3))
    state, _ = go_on(strategy, strategy.from_canonical(start(MLP)), MLP, 0, NUM_STEPS)
    tree = strategy.to_canonical(state)
    assert {x.devices().pop().id for x in jax.tree.leaves((tree["params"], tree["optimizer"]))} == {2}
    plan = strategy.plan
    assert [device.id for device in strategy.devices] == [0, 1, 2]
    assert plan.num_replicas == 2
    server = {"parameters", "optimizer", "mitigations", "history"}
    assert [set(parts) for parts in plan.memory[1:]] == [{"parameters", "history"}, server]
    end = final(strategy, state)
    path, _ = written(strategy, state, tmp_path)
    replay = make(MLP, *asynchronous(f"table={path}", "mitigations=adaptive_dc_asgd", workers=2, devices=1))
    again, _ = go_on(replay, replay.from_canonical(start(MLP)), MLP, 0, NUM_STEPS)
    assert_bitwise(final(replay, again), end)


def test_what_a_worker_raises_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = begin("two devices", "mode=live")
    state = strategy.from_canonical(start(MLP))

    def fail(*_: Any) -> None:
        raise RuntimeError("a device is gone")

    monkeypatch.setattr(threads.Threads, "_compute", fail)
    with pytest.raises(RuntimeError, match="a device is gone"):
        strategy.step(state, strategy.place(make_batch(MLP, 0)))


def test_a_run_of_the_binary_and_its_replay(tmp_path: Path) -> None:
    config = small_run("--config.strategy=async_data_parallel", "--config.asynchronous.mode=live")
    result = training.train(config, tmp_path / "live")
    config.asynchronous.mode, config.asynchronous.table = "emulated", str(tmp_path / "live" / "updates.csv")
    again = training.train(config, tmp_path / "replay")
    assert again["test_loss"] == result["test_loss"]
    assert again["train_loss"] == result["train_loss"]
    losses = [[row["loss"] for row in read_metrics(tmp_path / run)] for run in ("live", "replay")]
    assert losses[0] == losses[1]
    assert (again["staleness_mean"], again["updates"]) == (result["staleness_mean"], result["updates"])
