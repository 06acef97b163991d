"""The state of a pipeline: its placement, its canonical form, and resuming from it."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import serialization

from jaxpar.core.optimizer import OPTIMIZERS
from jaxpar.layout import LeafLayout
from jaxpar.strategies.pipeline.executor.state import PackedState, StagedState
from tests.selection import slow, slow_except
from tests.strategies import cases
from tests.strategies.pipelines import (
    LEARNING_RATES,
    NUM_STEPS,
    Task,
    advance,
    assert_bitwise_equal,
    assert_survives,
    filled,
    make,
    make_batch,
    named,
    outcome,
    pipeline,
    shared,
    staged_state,
    start,
)
from tests.strategies.test_pipeline import CASES, Case

SMALL = cases.TASK
TINY = SMALL._replace(layers=2)


RESNETS = [case for case in CASES if case.task.model == "resnet"]


@pytest.mark.parametrize("case", slow_except(RESNETS[1:2], RESNETS), ids=str)
def test_canonical_state_survives(case: Case) -> None:
    """tests/strategies/test_cases.py tests a small model."""
    assert_survives(make(case.task, *case.overrides), filled(start(case.task)))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - LEARNING_RATES.keys()))
def test_canonical_state_of_every_optimizer_survives(name: str) -> None:
    overrides = (f"--config.optimizer.name={name}", "--config.optimizer.lr=0.01")
    assert_survives(make(TINY, *pipeline("zb_v", 2), *overrides), filled(start(TINY, *overrides)))


@pytest.mark.parametrize(
    "case",
    [
        slow(Case("1f1b", 8, 1, Task("bert", "masked_lm"), "none")),  # equal stages
        Case("zb_v", 2, 2, Task("gpt", "causal_lm", layers=3), "none"),  # two chunks, embedding and head on one device
        slow(Case("interleaved_1f1b", 4, 1, Task("resnet", "classification"), "none")),  # all stages differ
    ],
    ids=str,
)
def test_training_starts_as_on_one_device(case: Case) -> None:
    single, piped = shared(case.task), shared(case.task, *case.overrides)
    key = jax.random.key(5)
    assert_bitwise_equal(piped.to_canonical(piped.init(key)), single.to_canonical(single.init(key)))


def test_resuming_is_bitwise() -> None:
    overrides = pipeline("zb_h1", 2)
    strategy = shared(TINY, *overrides)
    half = advance(strategy, TINY, start(TINY), 0, 4)
    assert_bitwise_equal(advance(strategy, TINY, half.tree, 4).tree, outcome(TINY, *overrides).tree)


def local_params(staged: StagedState, state: PackedState, device: int) -> Any:
    """Return the parameters in the memory of a device."""
    arrays = [next(s.data[0] for s in x.addressable_shards if s.index[0].start == device) for x in state.params]
    return staged.params.packing.unpack(staged.stages.kinds[device], jax.device_get(arrays))


def nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


LAYOUTS = [
    Case("1f1b", 4, 2, SMALL, "none"),
    Case("interleaved_1f1b", 2, 1, SMALL, "none"),
    Case("zb_v", 2, 1, SMALL, "none"),
    slow(Case("1f1b", 4, 1, Task("resnet", "classification"), "none")),
    slow(Case("1f1b", 8, 1, Task("resnet", "classification"), "none", "parameters")),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_a_device_holds_its_layers_and_no_more(case: Case) -> None:
    """Each device allocates at most 5% more than the layers and copies on the most heavily loaded device need."""
    strategy = shared(case.task, *case.overrides)
    staged, layout = staged_state(strategy), strategy.plan.layouts["params"]
    tree = filled(start(case.task))
    state = strategy.from_canonical(tree)
    stages, model = staged.stages, staged.stages.model
    expected_bytes: list[int] = []
    on: dict[str, Any] = {}
    for device, chunks in enumerate(stages.placement):
        spans = [stages.bounds[stage : stage + 2] for stage in chunks]
        names = {layer.name for begin, end in spans for layer in model.layers[begin:end]}
        copies = [tie for tie in model.ties if tie.layer in names and tie.source not in names]
        expected_bytes.append(nbytes([tree["params"][name] for name in names]))
        expected_bytes[-1] += nbytes([tree["params"][tie.source][tie.source_name] for tie in copies])
        on |= dict.fromkeys(names, device)
    by_device = [0] * len(expected_bytes)
    for array in state.params:
        for shard in array.addressable_shards:
            by_device[shard.index[0].start or 0] += shard.data.nbytes // case.replicas
    assert max(by_device) <= 1.05 * max(expected_bytes)
    assert max(by_device) == staged.params.packing.nbytes
    assert layout.nbytes_by_device == expected_bytes * case.replicas
    devices = serialization.to_state_dict(
        jax.tree.map(
            lambda leaf: set(leaf.holders.numbers), layout.leaves, is_leaf=lambda node: isinstance(node, LeafLayout)
        )
    )
    # All numbers are different, so this finds any number of a layer that is on a wrong device.
    for device in range(case.stages):
        numbers = np.concatenate(
            [
                np.asarray(shard.data).ravel()
                for array in state.params
                for shard in array.addressable_shards
                if (shard.index[0].start or 0) == device
            ]
        )
        for name, layer in tree["params"].items():
            for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
                is_copy = any(
                    (name, path[0].key) == (tie.source, tie.source_name) and on[tie.layer] == device
                    for tie in model.ties
                )
                is_here, expected = np.isin(leaf, numbers), on[name] == device or is_copy
                planned = functools.reduce(lambda node, key: node[key.key], path, devices[name])
                assert (device in planned) == expected
                assert is_here.all() if expected else not is_here.any(), (name, path, device)


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", 3, 1, Task("bert", "masked_lm", layers=4), "full", "block_0,block_2"),
        slow(Case("eager_1f1b", 4, 2, Task("gpt", "causal_lm"), "dots", "block_1,block_2,block_5")),
    ],
    ids=str,
)
def test_copies_of_tied_arrays_stay_equal(case: Case) -> None:
    """The copies remain bitwise equal over several training steps."""
    strategy = shared(case.task, *case.overrides)
    staged, state = staged_state(strategy), strategy.from_canonical(start(case.task))
    before = local_params(staged, state, 0)["embed"]["tokens"]
    for step in range(3):
        state, _ = strategy.step(state, strategy.place(make_batch(case.task, step)))
    first, last = local_params(staged, state, 0), local_params(staged, state, case.stages - 1)
    assert list(last["embed"]) == ["tokens"]
    np.testing.assert_array_equal(last["embed"]["tokens"], first["embed"]["tokens"])
    assert np.abs(first["embed"]["tokens"] - before).min() > 0


@functools.cache
def evaluators(task: Task) -> tuple[Any, Any, Any, Any]:
    """Return `single` and its state, and a pipeline with two replicas and 8 microbatches and its state."""
    single, piped = shared(task), shared(task, *pipeline("interleaved_1f1b", 2, replicas=2))
    return single, single.from_canonical(start(task)), piped, piped.from_canonical(start(task))


@pytest.mark.parametrize("size", [2, 10, 24])
def test_evaluation_of_any_batch_size(size: int) -> None:
    """The number of microbatches need not divide the examples of a replica, which are 1, 5 or 12."""
    task = SMALL
    single, state, piped, packed = evaluators(task)
    batch = make_batch(task, 1, size)
    batch["weights"][:] = np.maximum(batch["weights"], 0.5)
    expected, got = single.evaluate(state, single.place(batch)), piped.evaluate(packed, piped.place(batch))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), jax.device_get(got), jax.device_get(expected)
    )


@pytest.mark.slow
def test_batches_of_another_length() -> None:
    """Texts are padded to several lengths. Each length has its own program, and all programs train the same state."""

    def shortened(step: int) -> dict[str, np.ndarray]:
        batch = make_batch(TINY, step)
        return {key: value[:, :4] if value.ndim == 2 else value for key, value in batch.items()}

    params = []
    for overrides in (("--config.optimizer.accumulation_steps=8",), pipeline("1f1b", 2)):
        strategy = shared(TINY, *overrides)
        state = strategy.from_canonical(start(TINY))
        for batch in (make_batch(TINY, 0), shortened(1), make_batch(TINY, 2), shortened(NUM_STEPS)):
            state, _ = strategy.step(state, strategy.place(batch))
        params.append(named(strategy.to_canonical(state)["params"]))
    for name, expected in params[0].items():
        if "['key']['bias']" not in name:
            assert np.linalg.norm(params[1][name] - expected) < 1e-6 * np.linalg.norm(expected), name
