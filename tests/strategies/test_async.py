"""`async_data_parallel` gives bitwise equal results on any number of devices, and when stopped and resumed."""

import functools
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.core.plan import Traffic
from jaxpar.core.state import nbytes
from jaxpar.inspect import audit
from jaxpar.strategies import Strategy
from jaxpar.strategies.asynchronous import server, table
from jaxpar.strategies.asynchronous.virtual_time import VirtualTime
from tests.selection import slow, slow_except
from tests.strategies.asynchronous.test_engines import RANDOM, asynchronous, table_of
from tests.strategies.pipelines import (
    NUM_STEPS,
    Outcome,
    Task,
    advance,
    make,
    make_batch,
    make_config,
    named,
    outcome,
    shared,
    start,
)

MLP, BERT = Task("mlp", "classification", layers=1), Task("bert", "classification", layers=1)
GPT = Task("gpt", "causal_lm", "sgd", layers=1)
SINGLE = ("--config.strategy=single",)
POLICIES = {
    "sync": ("policy=sync",),
    "async": ("policy=async",),
    "ssp": ("policy=ssp", "bound=1"),
    "softsync": ("policy=softsync", "groups=3"),  # with 8 workers: 2 gradients per update
    "mitigations": ("policy=async", "mitigations=adaptive_dc_asgd,staleness_aware"),
    "local_sgd": ("policy=local_sgd", "interval=3"),
    "diloco": ("policy=diloco", "interval=3"),
    "model_average": ("policy=model_average", "interval=2"),
}


def stepped(strategy: Strategy[Any], state: Any, first: int = 0, last: int = NUM_STEPS) -> Any:
    """Return the state after steps `first` to `last`, excluding `last`."""
    for step in range(first, last):
        state, _ = strategy.step(state, strategy.place(make_batch(MLP, step)))
    return state


def assert_same(got: Outcome, expected: Outcome) -> None:
    assert (got.losses, got.norms) == (expected.losses, expected.norms)
    for name, x in named(expected.tree).items():
        np.testing.assert_array_equal(named(got.tree)[name], x, name)


ONE_WORKER = list(itertools.product([MLP, BERT, GPT], [("policy=async",), ("policy=local_sgd", "interval=1")]))


@pytest.mark.parametrize(("task", "settings"), slow_except([ONE_WORKER[0], ONE_WORKER[2], ONE_WORKER[1]], ONE_WORKER))
def test_one_worker_is_the_single_device(task: Task, settings: tuple[str, ...]) -> None:
    assert_same(outcome(task, *asynchronous(*settings, workers=1, devices=1)), outcome(task, *SINGLE))


@functools.cache
def on(devices: int, name: str, task: Task = MLP) -> Outcome:
    return outcome(task, *asynchronous(*POLICIES[name], *RANDOM, workers=8, devices=devices))


ON_DEVICES = [*itertools.product((2, 8), POLICIES)]
# Most runs on 2 devices are also the reference of test_stopped_and_resumed.
FAST = [*itertools.product((2,), ("async", "diloco", "mitigations")), (8, "softsync")]


@pytest.mark.parametrize(("devices", "name"), slow_except(FAST, ON_DEVICES))
def test_the_same_on_any_number_of_devices(devices: int, name: str) -> None:
    assert_same(on(devices, name), on(1, name))


def test_a_transformer_is_the_same_on_any_number_of_devices() -> None:
    assert_same(on(4, "async", BERT), on(1, "async", BERT))


def test_another_seed_is_another_run() -> None:
    """The seed changes the delays. The initial state and the batches are the same."""
    overrides = asynchronous(*POLICIES["async"], *RANDOM, "delays.jitter=1", workers=8, devices=1)
    losses = [outcome(MLP, *overrides, f"--config.seed={seed}").losses for seed in (0, 1)]
    assert losses[0][0] == losses[1][0]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("name", slow_except(("diloco", "mitigations"), POLICIES))
def test_stopped_and_resumed(name: str) -> None:
    """Resuming with the private state is bitwise exact, also on other devices. Without it, the result differs."""
    overrides = asynchronous(*POLICIES[name], *RANDOM, workers=8, devices=2)
    strategy = make(MLP, *overrides)
    state = strategy.from_canonical(start(MLP))
    state = stepped(strategy, state, 0, 5)
    tree, private = jax.device_get((strategy.to_canonical(state), strategy.to_private(state)))
    assert int(tree["step"]) == 5
    expected = named(on(2, name).tree)
    ends: list[dict[str, Any]] = []
    assert (
        make(MLP, *asynchronous(*POLICIES[name], *RANDOM, workers=8, devices=4)).plan.private_key
        == strategy.plan.private_key
    )
    for given, devices in ((private, 4), (private, 1), (None, 1)):
        other = make(MLP, *asynchronous(*POLICIES[name], *RANDOM, workers=8, devices=devices))
        state = other.from_canonical(tree, given)
        begun = named(other.to_canonical(state)["params"])
        for path, x in named(tree["params"]).items():
            np.testing.assert_allclose(begun[path], x, 1e-6, 1e-7)
        state = stepped(other, state, 5)
        # Convert to the canonical state and back, as `advance` does.
        ends.append(named(jax.device_get(other.to_canonical(other.from_canonical(other.to_canonical(state))))))
    for path, x in expected.items():
        np.testing.assert_array_equal(ends[0][path], x, path)
        np.testing.assert_array_equal(ends[1][path], x, path)
    if name != "sync":  # sync has no in-flight gradients
        assert any((ends[2][path] != x).any() for path, x in expected.items())


def test_another_strategy_goes_on_with_it_and_it_with_another() -> None:
    overrides = asynchronous(*POLICIES["async"], *RANDOM, workers=8, devices=2)
    first = advance(make(MLP, *overrides), MLP, start(MLP), 0, 5)
    then = advance(shared(MLP, *SINGLE), MLP, first.tree, 5)
    back = advance(make(MLP, *overrides), MLP, advance(shared(MLP, *SINGLE), MLP, start(MLP), 0, 5).tree, 5)
    for got in (then, back):
        assert int(got.tree["step"]) == NUM_STEPS
        assert np.all(np.isfinite(got.losses))
        counts = [int(x) for path, x in named(got.tree["optimizer"]).items() if "count" in path]
        assert NUM_STEPS in counts or max(counts) > NUM_STEPS


def test_the_learning_rate_is_that_of_the_steps_of_the_run() -> None:
    """The learning rate schedule counts steps, not updates."""
    got = named(on(1, "async").tree["optimizer"])
    counts = sorted(int(x) for path, x in got.items() if path.endswith("['count']"))
    assert counts == [NUM_STEPS, 8 * NUM_STEPS]  # of the schedule and of Adam


@pytest.mark.parametrize("mitigations", ["", "adaptive_dc_asgd,staleness_aware"])
def test_a_gradient_that_is_not_finite_changes_nothing(mitigations: str) -> None:
    strategy = make(MLP, *asynchronous("policy=async", f"mitigations={mitigations}", workers=8, devices=1))
    state = strategy.from_canonical(start(MLP))
    batch = make_batch(MLP, 0)
    batch["weights"] = np.where(np.arange(len(batch["weights"])) == 3, np.inf, batch["weights"]).astype(np.float32)
    state, metrics = strategy.step(state, strategy.place(batch))
    assert not bool(metrics.finite)
    for path, x in named(strategy.to_canonical(state)["params"]).items():
        np.testing.assert_array_equal(x, named(start(MLP)["params"])[path])
    _, metrics = strategy.step(state, strategy.place(make_batch(MLP, 1)))
    assert bool(metrics.finite)


def test_evaluation_is_that_of_the_single_device() -> None:
    tree, batch = start(MLP), make_batch(MLP, 3)
    sums = []
    for overrides in (SINGLE, asynchronous("policy=async", devices=2), asynchronous("policy=local_sgd", devices=2)):
        strategy = make(MLP, *overrides)
        sums.append(strategy.evaluate(strategy.from_canonical(tree), strategy.place(batch)))
    for other in sums[1:]:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), other, sums[0])


@pytest.mark.parametrize("name", slow_except(("softsync", "mitigations", "diloco"), POLICIES))
def test_what_is_said_of_it(name: str) -> None:
    strategy = make(MLP, *asynchronous(*POLICIES[name], workers=8, devices=2))
    plan = strategy.plan
    assert plan.summary.startswith(f"{POLICIES[name][0].removeprefix('policy=')} of 8 workers")
    assert plan.num_replicas == 2
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(start(MLP)["params"]))
    assert [parts["parameters"] for parts in plan.memory] == [
        4 * size if "interval" in str(POLICIES[name]) else size
    ] * 2
    programs = strategy.compile()
    assert len(programs) == (
        4 if "interval" in str(POLICIES[name]) else 3
    )  # one for the workers of each device, and updates
    held = audit.memory(programs, strategy)
    assert all(parts["parameters"].nbytes == size and (parts["inputs"].nbytes or 0) > 0 for parts in held)
    of_server = [part for part in ("optimizer", "waiting", "mitigations") if part in held[0]]
    assert all(held[0][part].nbytes == held[0][part].theory or "interval" in str(POLICIES[name]) for part in of_server)
    assert ("waiting" in of_server) == (name in ("sync", "softsync"))
    assert ("mitigations" in of_server) == (name == "mitigations")


TO_SERVER = ("policy=async", "policy=softsync", "policy=ssp")
SIZE = sum(leaf.size * 4 for leaf in jax.tree.leaves(start(MLP)["params"]))


@pytest.mark.parametrize("settings", ["policy=softsync", slow("policy=ssp"), "policy=diloco", "policy=model_average"])
def test_memory_is_what_there_is(settings: str) -> None:
    """The planned memory of each part is compared with its largest size after any step."""
    more = ("interval=2",) if settings.endswith(("diloco", "average")) else ("mitigations=adaptive_dc_asgd",)
    strategy = make(MLP, *asynchronous(settings, *more, *RANDOM, workers=8, devices=2))
    state, most = strategy.from_canonical(start(MLP)), dict[str, int]()
    optimizer = nbytes(start(MLP)["optimizer"])
    for step in range(NUM_STEPS):
        state, _ = strategy.step(state, strategy.place(make_batch(MLP, step)))
        if isinstance(state, server.ServerRun):
            assert isinstance(state.transport, VirtualTime)
            there = {
                "waiting": state.server.waiting,
                "mitigations": state.server.mitigations,
                "history": list(state.transport.history.values()),
            }
            there |= {"parameters": (state.params, state.params), "optimizer": state.server.optimizer}
        else:
            there = {"parameters": state.params, "optimizer": [one.optimizer for one in state.servers]}
            there |= {"outer": state.outer, "averages": list(state.averages.values())}
        most = {name: max(nbytes(tree), most.get(name, 0)) for name, tree in there.items()}
    told: dict[str, int] = {}
    for parts in strategy.plan.memory:
        told = {name: told.get(name, 0) + parts.get(name, 0) for name in {**told, **parts}}
    assert told["parameters"] == most["parameters"]
    assert told["optimizer"] in (optimizer, 8 * optimizer)
    for name in ("waiting", "mitigations", "outer"):
        assert told.get(name, 0) == most.get(name, 0), name
    for name in ("history", "averages"):  # the plan has the peak, which may be within a step
        assert most.get(name, 0) <= told.get(name, 0) <= 2 * most.get(name, 0), name
        assert bool(most.get(name)) == bool(told.get(name)), name


@pytest.mark.parametrize(
    ("settings", "devices"),
    slow_except(
        [(f"policy={name}", 4) for name in ("async", "softsync", "local_sgd", "model_average")],
        itertools.product([*TO_SERVER, "policy=sync", "policy=local_sgd", "policy=model_average"], (2, 4)),
    ),
)
def test_bytes_that_are_sent_are_those_that_are_copied(
    settings: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the weights and gradients that `jax.device_put` copies between devices."""
    own = ("interval=2",) if "local" in settings or "average" in settings else ()
    strategy = make(MLP, *asynchronous(settings, *own, *RANDOM, workers=8, devices=devices))
    state, moved, messages = strategy.from_canonical(start(MLP)), 0, 0
    put = jax.device_put
    names = [x.shape for x in jax.tree.leaves(start(MLP)["params"]) if x.size > 50]

    def counting(tree: Any, device: Any = None, **rest: Any) -> Any:
        nonlocal moved, messages
        for x in jax.tree.leaves(tree):
            if isinstance(x, jax.Array) and x.shape in names and x.devices() != {device}:
                moved, messages = moved + x.nbytes, messages + 1
        return put(tree, device, **rest)

    monkeypatch.setattr(jax, "device_put", counting)
    stepped(strategy, state)
    large = sum(x.nbytes for x in jax.tree.leaves(start(MLP)["params"]) if x.size > 50)
    assert moved / NUM_STEPS / large == pytest.approx(strategy.plan.wire_bytes / SIZE, rel=1e-3)
    num_arrays = len(jax.tree.leaves(start(MLP)["params"]))
    [traffic] = strategy.plan.traffic or [Traffic("copy", "float32", "data", 0, 0)]
    assert messages / NUM_STEPS / len(names) == pytest.approx(traffic.messages / num_arrays)


def test_its_table_is_that_of_the_steps_that_it_made(tmp_path: Path) -> None:
    """The table has no rows of steps that another strategy trained before."""
    overrides = asynchronous(*POLICIES["softsync"], *RANDOM, workers=8, devices=2)
    tree = advance(shared(MLP, *SINGLE), MLP, start(MLP), 0, 5).tree
    first = make(MLP, *overrides)
    state = first.from_canonical(tree)
    state = stepped(first, state, 5, 6)
    tree, private = jax.device_get((first.to_canonical(state), first.to_private(state)))
    second = make(MLP, *overrides)
    state = second.from_canonical(tree, private)
    state = stepped(second, state, 6)
    reported = second.report(state, tmp_path)
    whole, part = table_of(make_config(MLP, *overrides)), table.read_updates(tmp_path / "updates.csv")
    rows = whole.step >= 5
    np.testing.assert_array_equal(part.step, whole.step[rows])
    np.testing.assert_array_equal(part.worker, whole.worker[rows])
    assert part.update[0] == 0
    assert part.num_updates == reported["updates"] == whole.num_updates - whole.update[rows][0]
    late = whole.read[rows] >= whole.update[rows][0]  # rows that read weights of this run
    np.testing.assert_array_equal(part.staleness[late], whole.staleness[rows][late])
    assert np.all(part.staleness <= whole.staleness[rows])
    assert np.all(part.read[~late] == 0)
    assert not late.all()
    assert reported["table_seconds"] == pytest.approx(whole.finish[-1] - whole.finish[~rows][-1])


@pytest.mark.parametrize("mode", ["emulated", "live"])
def test_without_a_step_there_is_no_table(mode: str, tmp_path: Path) -> None:
    """Another strategy has finished the run. The existing table in the workdir must not change."""
    strategy = make(MLP, *asynchronous(f"mode={mode}", workers=4, devices=2))
    state = strategy.from_canonical(outcome(MLP, *SINGLE).tree)
    (tmp_path / "updates.csv").write_text("of a run before\n")
    assert strategy.report(state, tmp_path) == {}
    assert (tmp_path / "updates.csv").read_text() == "of a run before\n"
