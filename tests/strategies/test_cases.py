"""Every strategy of the table of cases trains like one device, resumes, and has its arrays where its plan has them.

Any strategy can resume from the checkpoint of any other: the canonical state of each equals that of one device, and
each continues from that of one device. Certificates compare each step with one device, layer by layer.
"""

from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.exchange import EXCHANGES
from jaxpar.inspect import audit
from jaxpar.layout import HELD, PER_REPLICA, REPLICATED, SHARDED, LeafLayout
from jaxpar.strategies import STRATEGIES
from jaxpar.strategies.data_parallel import IMPLEMENTATIONS
from jaxpar.strategies.pipeline.tables.schedule import SCHEDULES
from tests.selection import slow_except
from tests.strategies import cases, pipelines
from tests.strategies.cases import CASES, EXACT, LOSSY, NUM_STEPS, STALE, Trained, batch, single
from tests.strategies.layouts import assert_state_is_where_plan_says
from tests.strategies.pipelines import assert_bitwise_equal, assert_survives, filled, make, named, relative_error

# The kinds of layout of parameters and optimizer state of replicas.
KINDS = {
    "dp": (HELD, HELD),
    **dict.fromkeys(("zero1", "zero2", "zero2, offload", "zero3", "zero3, scan", "hsdp"), (SHARDED, SHARDED)),
    "horovod_adasum": (REPLICATED, PER_REPLICA),
    **{name: (PER_REPLICA, PER_REPLICA) for name in LOSSY if "decentralized" in name or "average" in name},
}
# How training differs from one device.
DELAYED = "swarm, delayed"  # its certificate compares it with its recurrence
ONEBIT, LOCAL = "byteps_onebit compresses gradients lossily", "of 8 workers computes gradients of local weights"
DIFFERS = {
    **{name: ONEBIT for name in LOSSY if "byteps_onebit" in name},
    "byteps_topk": "byteps_topk sends only part of the gradients in each step",
    "byteps_randomk": "byteps_randomk sends only part of the gradients in each step",
    "byteps_dithering": "byteps_dithering compresses gradients lossily",
    "bagua_bytegrad": "bagua_bytegrad compresses gradients lossily",
    "horovod_adasum": "horovod_adasum combines updates with Adasum instead of averaging gradients",
    "dispatched 1f1b, quantized zero3": "zero3 sends weights and gradients with 8 bits per element",
    "horovod, 2 passes": "horovod takes one optimizer step for every 2 training steps",
    "bagua_qadam": "bagua_qadam compresses momentum lossily after its warm-up",
    **dict.fromkeys(
        ("onebit_adam", "onebit_adam in groups"), "onebit_adam compresses momentum lossily after its warm-up"
    ),
    **{
        name: f"{name} has different weights on different replicas"
        for name in LOSSY
        if KINDS.get(name) == 2 * (PER_REPLICA,)
    },
    "powersgd": "powersgd sends low-rank approximations of gradients after its warm-up",
    "async": "async of 8 workers with adaptive_dc_asgd, staleness_aware computes gradients of stale weights",
    "softsync": "softsync of 2 workers computes gradients of stale weights",
    **{name: f"{name} {LOCAL}" for name in ("local_sgd", "diloco", "model_average")},
    DELAYED: "delayed updates use weights one step older",
}
PRIVATE = LOSSY.keys() - {"bagua_bytegrad", "dispatched 1f1b, quantized zero3"} | STALE.keys()
LAYERS = ("embed", "mix_0", "mix_1", "mix_2", "mix_3", "head")
REPLICAS = ("single", "data_parallel")
# One case of every way to create a state on devices, and to evaluate it. A further exchange or schedule adds none.
INITIAL = {
    *("single", "single, scan, remat", "sharding", "pmap", "dp", "zero2, offload", "zero3", "zero3, scan", "hsdp"),
    *("one stage", "1f1b", "zb_v, remat", "1f1b, 1,2,1 devices", "dispatched zb_v", "dispatched 1f1b, 1,3 devices"),
    *("1f1b, zero1", "dispatched 1f1b, zero1", "dispatched zb_v, zero3", "dispatched 1f1b, hsdp"),
    *("byteps_onebit", "onebit_adam", "horovod_adasum", "bagua_decentralized", "powersgd"),
    *("zb_v, byteps_onebit", "dispatched 1f1b, byteps_onebit", "sync", "softsync", "swarm", "swarm, delayed"),
}


@pytest.fixture(scope="module", params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    """The name of a case. All tests of a case run one after another."""
    return str(request.param)


@pytest.fixture(scope="module")
def trained(name: str) -> Trained:
    return cases.train(name)


def assert_near(got: Any, expected: Any) -> None:
    """Assert equality up to rounding: of each array, relative to its norm."""
    got, expected = named(got), named(expected)
    assert got.keys() == expected.keys()
    for path, x in expected.items():
        if x.dtype.kind == "f":
            assert np.linalg.norm(got[path] - x) <= 2e-6 * np.linalg.norm(x), path
        else:  # step, key, counters
            np.testing.assert_array_equal(got[path], x, path)


def test_trains_like_one_device(name: str, trained: Trained) -> None:
    """Every step does: its sums, gradient norm and state. So do the initial state and an evaluation."""
    assert trained.strategy.plan.differs == DIFFERS.get(name, "")
    if name in EXACT:
        assert_near(trained.metrics, single().metrics)
        for tree, like in zip(trained.trees, single().trees, strict=True):
            assert_near(tree, like)
    if name not in INITIAL:
        return
    if name in EXACT:
        assert_near(cases.evaluate(trained.strategy, trained.state), cases.evaluate(single().strategy, single().state))
    initial, expected = (one.to_canonical(one.init(jax.random.key(5))) for one in (trained.strategy, single().strategy))
    assert_near(initial, expected)


def test_the_reference_trains() -> None:
    """The equality of runs that do not train would prove nothing."""
    assert len({float(of.sums.loss / of.sums.weight) for of in single().metrics}) == NUM_STEPS
    assert min(float(of.grad_norm) for of in single().metrics) > 0.2  # clipping is active
    for path, before in named(cases.start()["params"]).items():
        assert relative_error(named(single().trees[-1]["params"])[path], before) > 1e-3, path
    dropped, whole = single().metrics[0].sums, single().strategy
    sums = jax.device_get(whole.evaluate(whole.from_canonical(cases.start()), whole.place(batch(0))))
    assert abs(sums.loss / dropped.loss - 1) > 1e-3  # by dropout


def test_resumes(name: str, trained: Trained) -> None:
    """From the state of one device if it trains like it, and bitwise from its own state, with what is private."""
    strategy, tree = trained.strategy, single().trees[-2]
    assert_survives(strategy, filled(tree))
    if name in EXACT:
        is_private = strategy.plan.strategy == "async_data_parallel"
        assert bool(strategy.plan.private_key) == bool(jax.tree.leaves(trained.private)) == is_private
        state, _ = strategy.step(strategy.from_canonical(tree), strategy.place(batch(NUM_STEPS - 1)))
        assert_near(strategy.to_canonical(state), single().trees[-1])
        return
    saved, end = trained.trees[NUM_STEPS - 1], (trained.trees[-1], trained.private[-1])
    ends = []
    for private in (trained.private[0], None):
        state = strategy.from_canonical(saved, private)
        for step in range(NUM_STEPS, 2 * NUM_STEPS):
            state, _ = strategy.step(state, strategy.place(batch(step)))
        ends.append(jax.device_get((strategy.to_canonical(state), strategy.to_private(state))))
    assert_bitwise_equal(ends[0], end)
    is_private = name in PRIVATE
    assert bool(strategy.plan.private_key) == bool(jax.tree.leaves(trained.private)) == is_private
    without, expected = named(ends[1][0]["params"]), named(end[0]["params"])
    assert any((without[path] != x).any() for path, x in expected.items()) == is_private


@pytest.mark.parametrize("name", [name for name in CASES if name not in STALE], indirect=True, scope="module")
def test_a_fault_on_one_device_changes_nothing(trained: Trained) -> None:
    strategy, state = trained.strategy, trained.strategy.from_canonical(cases.start())
    state, _ = strategy.step(state, strategy.place(batch(0)))
    before = named(jax.device_get((strategy.to_canonical(state), strategy.to_private(state))))
    rows = batch(1)
    rows["weights"][0] = np.inf
    state, metrics = strategy.step(state, strategy.place(rows))
    assert not metrics.finite
    after = named(jax.device_get((strategy.to_canonical(state), strategy.to_private(state))))
    assert [path for path, x in before.items() if not np.array_equal(after[path], x)] == ["[0]['step']"]


def test_arrays_are_where_the_plan_says(name: str, trained: Trained) -> None:
    strategy, layouts = trained.strategy, trained.strategy.plan.layouts
    initial = [strategy.init(jax.random.key(5))] if name in INITIAL else []
    for state in (*initial, strategy.from_canonical(cases.start()), trained.state):
        assert_state_is_where_plan_says(strategy, state)
    if strategy.plan.strategy == "pipeline":
        exchange = name.rpartition(" ")[2]
        whole = exchange in ("zero1", "zero2")  # stages keep the parameters that they gather after an update
        expected = (REPLICATED, SHARDED) if whole else KINDS.get(exchange, (REPLICATED, REPLICATED))
        for part, kind in zip(("params", "optimizer"), expected, strict=True):
            leaves = jax.tree.leaves(layouts[part].leaves, is_leaf=lambda node: isinstance(node, LeafLayout))
            assert {bool(leaf.splits) for leaf in leaves if leaf.shape} == {kind == SHARDED}
    if strategy.plan.strategy in REPLICAS:
        expected = KINDS.get(name, (REPLICATED, REPLICATED))
        assert (layouts["params"].kind, layouts["optimizer"].kind) == expected


def test_arrays_of_live_workers_are_where_the_plan_says() -> None:
    settings = f"{cases.ASYNC} mesh.data=4 asynchronous.policy=async asynchronous.num_workers=4 asynchronous.mode=live"
    strategy = make(cases.TASK, *(f"--config.{setting}" for setting in (f"batch_size={cases.SIZE}", *settings.split())))
    state, _ = strategy.step(strategy.from_canonical(pipelines.start(cases.TASK)), strategy.place(batch(0)))
    assert_state_is_where_plan_says(strategy, state)


COMPILED = {
    *("single", "sharding", "sharding, 2 microbatches", "pmap", "dp", "zero3, scan", "hsdp", "byteps_onebit"),
    *("1f1b, 1,2,1 devices", "zb_v, byteps_onebit", "dispatched 1f1b, 2,1 devices", "dispatched 1f1b, 1,3 devices"),
    *("1f1b, zero1", "dispatched 1f1b, zero1", "dispatched 1f1b, zero2", "dispatched zb_v, zero3"),
    *("dispatched 1f1b, hsdp", "sync", "diloco", "swarm"),
}


@pytest.mark.parametrize("name", slow_except(COMPILED, CASES), indirect=True, scope="module")
def test_programs_compile_without_arrays_and_send_what_theory_says(name: str) -> None:
    strategy = cases.build(name)
    before = {id(array) for array in jax.live_arrays()}
    with jax.transfer_guard("disallow_explicit"):
        programs = strategy.compile()
    assert all(id(array) in before for array in jax.live_arrays())
    rows = audit.audit(programs, strategy.plan, cases.problem(name).task)
    assert programs
    assert [row for row in rows if not row.is_explained] == []


CERTIFIED = {"pmap", "zero3", "1f1b", "dispatched zb_v", "sync", "onebit_adam", "zb_v, byteps_onebit", DELAYED}


@pytest.mark.parametrize("name", slow_except(CERTIFIED, CASES), indirect=True, scope="module")
def test_certificates(name: str) -> None:
    """All steps are correct, except of strategies that differ by design: their drift is large."""
    found, differs = cases.certify(name), "" if name == DELAYED else DIFFERS.get(name, "")
    assert (found["outside"], found["counters"], found["differs"]) == ([], [], differs)
    assert bool(found["tolerance"]) == (not differs)
    assert bool(found["delays"]) == (name == DELAYED)
    assert found["batches"] == [*range(NUM_STEPS)]
    assert {"loss", "gradient norm", "weight", "evaluation loss", "evaluation weight"} <= found["metrics"].keys()
    compared = ["start", "gradient", *([] if differs else ["update", "moments"]), "resume", "drift"]
    assert {layer: list(errors) for layer, errors in found["layers"].items()} == dict.fromkeys(LAYERS, compared)
    assert (max(errors["drift"]["relative"] for errors in found["layers"].values()) > 1e-4) == bool(differs)


def test_every_kind_of_strategy_is_in_the_table() -> None:
    assert CASES.keys() >= INITIAL | COMPILED | CERTIFIED
    assert DIFFERS.keys() == LOSSY.keys() | STALE.keys()
    settings = {setting for case in EXACT.values() for setting in case.split()}
    values = {"strategy": STRATEGIES, "data_parallel.implementation": IMPLEMENTATIONS, "pipeline.schedule": SCHEDULES}
    of_all = {setting for case in CASES.values() for setting in case.split()}
    assert {f"exchange={name}" for name in EXCHANGES} - of_all == set()
    for key, names in values.items():
        missing = {f"{key}={name}" for name in names} - settings
        assert missing <= {f"data_parallel.implementation={name}" for name in ("auto", "shard_map")}  # of exchanges
