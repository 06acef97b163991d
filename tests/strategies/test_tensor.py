"""A group of devices on the tensor axis, the context axis or both trains like one device.

So do groups that are the replicas of an exchange, with rematerialization, a scan over layers, and chunks of the loss.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpar.core import mesh as meshes
from jaxpar.core.mesh import CONTEXT, TENSOR
from jaxpar.core.step import Metrics
from jaxpar.inspect import audit
from jaxpar.models.model import Context
from jaxpar.strategies import Strategy
from jaxpar.strategies.pipeline.executor.state import PackedState
from jaxpar.tasks import Sums
from tests.selection import slow_except
from tests.strategies import tensors
from tests.strategies.layouts import assert_state_is_where_plan_says
from tests.strategies.pipelines import assert_bitwise_equal, assert_survives, filled, named
from tests.strategies.tensors import CHUNKS, MODELS, NUM_STEPS, Case, TensorTraining, make_batch, single_of

SINGLE, TWO, FOUR = "strategy=single", "mesh.data=2 mesh.tensor=2", "mesh.data=2 mesh.tensor=4"
TWICE = "optimizer.accumulation_steps=2"
ADAM = "optimizer.name=adamw optimizer.lr=0.001 optimizer.weight_decay=0.1 optimizer.eps=0.001"
SCAN = "model.scan_layers=True"
STAGES = "strategy=pipeline pipeline.num_microbatches=3 mesh.data=1 mesh.stage=2"
DISPATCH = "pipeline.executor=dispatch"
ONEBIT = "exchange=byteps_onebit exchange_options.min_compress_bytes=0"
ALL = "exchange=byteps_topk exchange_options.ratio=1 exchange_options.min_compress_bytes=0"  # a compressor without loss
# Cases of every run of the suite.
FAST = [
    Case("bert", f"{FOUR} exchange=horovod {ADAM}"),
    Case("masked bert", f"{TWO} exchange=zero2 {TWICE} chunks"),
    Case("gpt", f"{SINGLE} mesh.tensor=4 {SCAN} model.remat=full"),
    Case("gpt", "mesh.data=4 mesh.tensor=2 exchange=hsdp exchange_options.group=2 chunks"),
    Case("llama", f"{FOUR} exchange=zero3 {SCAN} model.remat=dots {ADAM}"),
    Case("vit", f"{FOUR} exchange=zero1"),
    Case("albert", f"{TWO} model.remat=full"),
    Case("gpt", "mesh.data=2 mesh.context=2 mesh.tensor=2 exchange=zero1"),
    Case("bert", f"{SINGLE} mesh.context=4"),
    Case("tied llama", f"{SINGLE} mesh.context=2"),
    Case("gpt", f"{STAGES} mesh.context=2 mesh.tensor=2 pipeline.schedule=1f1b"),
    Case("masked bert", f"{STAGES} mesh.data=2 mesh.tensor=2 pipeline.schedule=1f1b {DISPATCH} exchange=zero2"),
]
CASES = [
    *FAST,
    Case("bert", f"{SINGLE} mesh.context=2"),
    Case("gpt", f"{SINGLE} mesh.tensor=2"),
    Case("gpt", f"{SINGLE} mesh.context=2"),
    Case("gpt", f"{SINGLE} mesh.context=4"),
    Case("tied llama", f"{SINGLE} mesh.tensor=2"),
    Case("tied llama", f"{SINGLE} mesh.tensor=4"),
    Case("tied llama", f"{SINGLE} mesh.context=4"),
    Case("tied llama", f"{SINGLE} mesh.context=2 mesh.tensor=2"),
    Case("bert", f"{SINGLE} mesh.tensor=2 model.remat=full"),
    Case("bert", f"{TWO} exchange=zero3 {TWICE}"),
    Case("bert, mean", f"{TWO} exchange=zero3"),
    Case("bert of tokens", f"{TWO} exchange=ddp {ADAM}"),
    Case("masked bert", f"{FOUR} exchange=zero1 {ADAM} {SCAN}"),
    Case("masked bert", f"{SINGLE} mesh.tensor=4 model.remat=dots chunks"),
    Case("albert", f"{FOUR} exchange=zero3 {SCAN} {ADAM}"),
    Case("gpt", f"{TWO} exchange=ddp exchange_options.bucket_bytes=1000 {ADAM}"),
    Case("gpt", f"{FOUR} exchange=byteps {TWICE}"),
    Case("gpt of texts", f"{SINGLE} mesh.tensor=2 {TWICE}"),
    Case("bottlenecks", f"{FOUR} exchange=zero2 {ADAM}"),
    Case("llama", f"{SINGLE} mesh.tensor=4 chunks"),
    Case("llama", f"{TWO} exchange=zero2 model.remat=full {TWICE}"),
    Case("llama", "mesh.data=1 mesh.tensor=2 exchange=ddp optimizer.name=lion optimizer.lr=0.001"),
    Case("vit, mean", f"{SINGLE} mesh.tensor=4"),
    Case("vit", f"{TWO} exchange=hsdp exchange_options.group=2 {SCAN} model.remat=dots"),
    Case("vit, mean", f"{TWO} exchange=zero3 {TWICE} {ADAM}"),
    Case("bert, mean", f"{SINGLE} mesh.context=2 mesh.tensor=2 model.remat=full"),
    Case("masked bert", f"mesh.data=4 mesh.context=2 {TWICE}"),
    Case("masked bert", f"mesh.data=2 mesh.context=4 exchange=horovod {ADAM}"),
    Case("gpt of texts", f"{SINGLE} mesh.context=4 {SCAN}"),
    Case("llama", f"mesh.data=2 mesh.context=2 mesh.tensor=2 exchange=zero3 {SCAN} model.remat=full {ADAM}"),
    Case("llama", f"mesh.data=2 mesh.context=4 exchange=zero2 {TWICE} chunks"),
    Case("albert", f"{SINGLE} mesh.context=2 {ADAM}"),
    Case("bert", f"{STAGES} mesh.context=2 mesh.tensor=2 pipeline.schedule=gpipe {ADAM}"),
    Case("bert", f"{STAGES} mesh.data=2 mesh.tensor=2 pipeline.schedule=1f1b {DISPATCH} exchange=zero3"),
    Case(
        "masked bert", f"{STAGES} mesh.data=2 mesh.tensor=2 pipeline.schedule=1f1b exchange=zero1 pipeline.remat=full"
    ),
    Case("masked bert", f"{STAGES} mesh.context=2 mesh.tensor=2 pipeline.schedule=zb_h1 {DISPATCH}"),
    Case("llama", f"{STAGES} mesh.tensor=4 pipeline.schedule=zb_h1 {ADAM}"),
    Case("llama", f"{STAGES} mesh.data=2 mesh.context=2 pipeline.schedule=zb_v pipeline.remat=dots exchange=horovod"),
    Case("vit", f"{STAGES} mesh.tensor=4 pipeline.schedule=interleaved_1f1b pipeline.num_microbatches=2 {DISPATCH}"),
]
# Pipelines that never drain, or clip the gradient of each replica, which train as they do without a group: settings,
# and those of the group.
UNLIKE_ONE_DEVICE = [
    ("vit", f"{STAGES} pipeline.schedule=pipedream", "mesh.tensor=2"),
    ("bert", f"{STAGES} pipeline.schedule=pipedream {DISPATCH}", "mesh.context=2 mesh.tensor=2"),
    ("gpt of texts", f"{STAGES} mesh.data=2 pipeline.schedule=pipedream_2bw {DISPATCH} {ADAM}", "mesh.tensor=2"),
    ("bert of tokens", f"{STAGES} mesh.data=2 pipeline.schedule=pipedream_2bw {ALL}", "mesh.tensor=2"),
    ("vit", f"{STAGES} mesh.data=2 pipeline.schedule=pipedream {DISPATCH} {ALL}", "mesh.tensor=2"),
    ("gpt of texts", f"{STAGES} mesh.data=2 pipeline.schedule=pipedream exchange=byteps", "mesh.context=2"),
    ("masked bert", f"{STAGES} mesh.data=2 pipeline.schedule=1f1b {ALL}", "mesh.tensor=2"),
    ("gpt", f"{STAGES} mesh.data=2 pipeline.schedule=gpipe {DISPATCH} {ALL}", "mesh.tensor=2"),
    ("llama", "strategy=pipeline mesh.stage=3 pipeline.schedule=pipedream pipeline.replicas=2,1", "mesh.tensor=2"),
]
LOSSY = [
    Case("gpt", f"{TWO} {ONEBIT}"),
    Case("gpt", f"{STAGES} mesh.data=2 mesh.tensor=2 pipeline.schedule=1f1b {ONEBIT}"),
    Case("llama", f"{STAGES} mesh.data=2 mesh.tensor=2 pipeline.schedule=1f1b {DISPATCH} {ONEBIT}"),
    Case("vit", f"{STAGES} mesh.data=2 mesh.tensor=2 pipeline.schedule=zb_h1 exchange=bagua_bytegrad"),
    Case("gpt", f"mesh.data=2 mesh.context=2 mesh.tensor=2 {ONEBIT}"),
    Case("llama", f"{FOUR} {ONEBIT} exchange_options.momentum=0.5"),
    Case("bert", f"{TWO} exchange=bagua_bytegrad"),
    Case("masked bert", f"{FOUR} exchange=byteps_topk exchange_options.min_compress_bytes=0"),
]


@pytest.fixture(scope="module", params=slow_except(FAST, CASES), ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    """All tests of a case run one after another."""
    made: Case = request.param
    return made


@pytest.fixture(scope="module")
def trained(case: Case) -> TensorTraining:
    return tensors.train(case)


def has_no_gradient(case: Case, path: str) -> bool:
    """Return whether a gradient is zero in exact arithmetic, so that its values are rounding errors.

    The bias of a key adds the same number to the scores of all keys, unless it is rotated by its position.
    """
    return "['key']['bias']" in path and "llama" not in case.model


def assert_near(case: Case, got: Any, expected: Any) -> None:
    """Assert equality up to rounding: of each array, relative to its largest value.

    Gradients, which the optimizer state contains, are small sums of many large terms.
    """
    got, expected = named(got), named(expected)
    assert got.keys() == expected.keys()
    for path, x in expected.items():
        if has_no_gradient(case, path) and "['optimizer']" in path:
            continue
        if x.dtype.kind == "f":
            tolerance = 1e-6 if "['params']" in path else 2e-5
            assert np.abs(got[path] - x).max() <= tolerance * np.abs(x).max(), path
        else:  # step, key, counters
            np.testing.assert_array_equal(got[path], x, path)


def assert_metrics_near(got: Metrics | Sums, expected: Metrics | Sums) -> None:
    for one, like in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, like, rtol=5e-6)


def test_trains_like_one_device(case: Case, trained: TensorTraining) -> None:
    """Every step does: its sums, gradient norm and state. So does an evaluation."""
    single = single_of(case)
    assert {TENSOR, CONTEXT} & trained.strategy.plan.axes.keys()
    assert not trained.strategy.plan.differs
    for got, expected in zip(trained.metrics, single.metrics, strict=True):
        assert got.grad_norm > 0.2  # clipping is active
        assert_metrics_near(got, expected)
    for tree, of_single in zip(trained.trees, single.trees, strict=True):
        assert_near(case, tree, of_single)
    both = [one.strategy for one in (trained, single)]
    evaluated, like = (tensors.evaluate(case, one, one.from_canonical(single.trees[-1])) for one in both)
    assert_metrics_near(evaluated, like)


def test_many_steps(case: Case, trained: TensorTraining) -> None:
    """After 20 steps, each array still differs by at most 1e-6 of its largest value from that of one device."""
    got, expected = (
        tree["params"]
        for tree in (
            tensors.after_many_steps(case, trained),
            tensors.end_of_single(case.model, tensors.optimizer_of(case)),
        )
    )
    for path, x in named(expected).items():
        assert np.abs(named(got)[path] - x).max() <= 1e-6 * np.abs(x).max(), path


def test_resumes_from_and_to_one_device(case: Case, trained: TensorTraining) -> None:
    strategy, single = trained.strategy, single_of(case)
    assert_survives(strategy, filled(single.trees[0]))
    for first, second in ((single, trained), (trained, single)):
        batch = second.strategy.place(make_batch(case.model, 1))
        state, _ = second.strategy.step(second.strategy.from_canonical(first.trees[0]), batch)
        assert_near(case, second.strategy.to_canonical(state), single.trees[1])


def test_arrays_are_where_the_plan_says(trained: TensorTraining) -> None:
    """A device has its part of each array of a layer that is split, and of its optimizer state."""
    strategy = trained.strategy
    assert_copies_are_equal((trained.state.params, trained.state.optimizer))
    for state in (strategy.from_canonical(trained.trees[-1]), trained.state):
        assert_state_is_where_plan_says(strategy, state)
    split = {path for path, leaf in named_leaves(strategy.plan.layouts["params"]) if TENSOR in axes_of(leaf)}
    of_block = {f"['block_0']['{a}']['{b}']" for a, b in SPLIT_KERNELS}
    assert split >= of_block if TENSOR in strategy.plan.axes else not split
    assert not any("norm" in path or "['out']['bias']" in path or "['down']['bias']" in path for path in split)


@pytest.mark.parametrize("case", slow_except([FAST[8]], CASES), indirect=True, scope="module", ids=str)
def test_initial_state(case: Case) -> None:
    strategy, single = tensors.build(case), single_of(case).strategy
    state = strategy.init(jax.random.key(5))
    assert_state_is_where_plan_says(strategy, state)
    assert_bitwise_equal(strategy.to_canonical(state), single.to_canonical(single.init(jax.random.key(5))))


SPLIT_KERNELS = [("attention", f"{name}']['kernel") for name in ("query", "key", "value", "out")]
SPLIT_KERNELS += [("mlp", f"{name}']['kernel") for name in ("up", "down")]


def named_leaves(layout: Any) -> list[tuple[str, Any]]:
    is_leaf = lambda leaf: hasattr(leaf, "splits")  # noqa: E731
    paths = jax.tree_util.tree_leaves_with_path(layout.leaves, is_leaf=is_leaf)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in paths]


def axes_of(leaf: Any) -> list[str]:
    return [split.axis for split in leaf.splits]


def test_a_fault_on_one_device_changes_nothing(case: Case, trained: TensorTraining) -> None:
    """Neither does an infinite weight of an example, nor a parameter that only the last device of a group has."""
    strategy = trained.strategy
    rows = make_batch(case.model, 1)
    rows["weights"].flat[0] = np.inf
    assert_unchanged(strategy, trained.trees[0], rows)
    tree = jax.tree.map(np.array, trained.trees[0])
    tree["params"]["block_1"]["mlp"]["down"]["kernel"][-1, 0] = np.inf
    assert_unchanged(strategy, tree, make_batch(case.model, 1))


def assert_unchanged(strategy: Any, tree: Any, rows: Any) -> None:
    state = strategy.from_canonical(tree)
    before = named(jax.device_get(strategy.to_canonical(state)))
    state, metrics = strategy.step(state, strategy.place(rows))
    assert not metrics.finite
    after = named(jax.device_get(strategy.to_canonical(state)))
    assert [path for path, x in before.items() if not np.array_equal(after[path], x)] == ["['step']"]


# Without chunks, of which collectives are so small here that the audit counts them as scalars.
AUDITED = [case for case in CASES if CHUNKS not in case.settings.split()]


@pytest.mark.parametrize("case", slow_except([FAST[2], FAST[4]], AUDITED), indirect=True, scope="module", ids=str)
def test_programs_send_what_theory_says(case: Case) -> None:
    strategy, problem = tensors.build(case), tensors.make_problem(case)
    rows = audit.audit(strategy.compile(), strategy.plan, problem.task)
    assert {row.axis for row in rows} >= strategy.plan.axes.keys() & {TENSOR, CONTEXT}
    assert [row for row in rows if not row.is_explained] == []


@pytest.mark.parametrize("case", slow_except(LOSSY[:2], LOSSY), ids=str)
def test_private_state_resumes_bitwise(case: Case) -> None:
    """A compressor changes whole arrays in the same way on all devices of a group, and no padding matters."""
    strategy = tensors.build(case)
    state, trees, privates = strategy.from_canonical(tensors.start(case.model)), [], []
    for step in range(4):
        state, _ = strategy.step(state, strategy.place(make_batch(case.model, step)))
        assert_copies_are_equal(state.params)
        if isinstance(state, PackedState):
            assert_unpacked_copies_are_equal(strategy, state)
        trees.append(jax.device_get(strategy.to_canonical(state)))
        privates.append(jax.device_get(strategy.to_private(state)))
    state = strategy.from_canonical(trees[1], privates[1])
    assert_state_is_where_plan_says(strategy, state)
    for step in (2, 3):
        state, _ = strategy.step(state, strategy.place(make_batch(case.model, step)))
    assert_bitwise_equal(strategy.to_canonical(state), trees[-1])
    assert_bitwise_equal(strategy.to_private(state), privates[-1])
    assert ("tensor" in strategy.plan.private_key) == bool(jax.tree.leaves(privates[-1]))


@pytest.mark.parametrize(("model", "settings", "group"), slow_except(UNLIKE_ONE_DEVICE[:1], UNLIKE_ONE_DEVICE), ids=str)
def test_pipelines_train_as_without_a_group(model: str, settings: str, group: str) -> None:
    """A group computes what one device does, also after a resume with what is in flight."""
    alone, case = Case(model, settings), Case(model, f"{settings} {group}")
    expected, trained = tensors.train(alone), tensors.train(case)
    for got, like in zip(trained.metrics, expected.metrics, strict=True):
        assert_metrics_near(got, like)
    for tree, of_device in zip(trained.trees, expected.trees, strict=True):
        assert_near(case, tree, of_device)
    strategy = trained.strategy
    state = strategy.from_canonical(tensors.start(model, tensors.make_config(case).optimizer.name))
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - 1:
            private = jax.device_get(strategy.to_private(state))
            state = strategy.from_canonical(jax.device_get(strategy.to_canonical(state)), private)
        state, _ = strategy.step(state, strategy.place(make_batch(model, step)))
    assert_bitwise_equal(strategy.to_canonical(state), trained.trees[-1])
    rows = audit.audit(strategy.compile(), strategy.plan, tensors.make_problem(case).task)
    assert [row for row in rows if not row.is_explained] == []


def assert_copies_are_equal(tree: Any) -> None:
    """Assert that devices with the same part of an array have the same numbers."""
    for path, array in named_arrays(tree):
        parts: dict[str, np.ndarray] = {}
        for shard in array.addressable_shards:
            mine = np.array(shard.data)
            np.testing.assert_array_equal(mine, parts.setdefault(str(shard.index), mine), path)


def assert_unpacked_copies_are_equal(strategy: Strategy[Any], state: PackedState) -> None:
    """Assert that the devices of a stage have the same numbers of the arrays that are not split."""
    details: Any = strategy.plan.details
    staged, arrays = details.staged, [np.array(array) for array in details.state.newest(state).params]
    for device, kind in enumerate(staged.stages.kinds):
        canonical = staged.stages.select(staged.stages.model.shapes, staged.stages.examples[kind])
        trees = [staged.params.packing.unpack(kind, [array[i, device] for array in arrays]) for i in range(2)]
        for (path, like), one, other in zip(named_arrays(canonical), *map(jax.tree.leaves, trees), strict=True):
            if one.shape == like.shape:
                np.testing.assert_array_equal(one, other, path)


def named_arrays(tree: Any) -> list[tuple[str, jax.Array]]:
    return [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_logits(model: str) -> None:
    """The logits of a language model are those of the same model on one device, for each device of the group."""
    case, batch = Case(model, f"{SINGLE} mesh.tensor=4"), jax.tree.map(jnp.asarray, make_batch(model, 0))
    tensor, params = tensors.replica_group(case), tensors.start(model)["params"]
    mesh = meshes.make_mesh(tensor.params.axes, jax.devices())

    def logits(params: Any) -> Any:
        return tensor.problem.model.apply(params, batch)[None]

    placed = jax.tree_util.tree_map_with_path(padded, params, tensor.params.abstract(mesh))
    mapped = jax.shard_map(logits, mesh=mesh, in_specs=(tensor.params.specs,), out_specs=PartitionSpec(TENSOR))
    got, expected = jax.jit(mapped)(placed), tensors.make_problem(Case(model, SINGLE)).model.apply(params, batch)
    assert got.shape == (4, *expected.shape)
    for one in got:
        np.testing.assert_allclose(one, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def padded(path: Any, x: np.ndarray, like: Any) -> np.ndarray:
    """Pad an array with zeros, and the vocabulary with large numbers, which nothing may read."""
    values = 100 if path[-1].key == "tokens" else 0
    return np.pad(x, [(0, a - b) for a, b in zip(like.shape, x.shape, strict=True)], constant_values=values)


def test_a_block_by_hand() -> None:
    """Each device has the heads and features of its columns, and its positions of the sum of all products of rows."""
    size, case = 4, Case("gpt", f"{SINGLE} mesh.tensor=4 model.dropout=0")
    tensor, batch = tensors.replica_group(case), jax.tree.map(jnp.asarray, make_batch("gpt", 0))
    weights = tensors.start("gpt")["params"]["block_1"]
    rng, (B, T, D) = np.random.default_rng(2), (tensors.SIZE, tensors.LENGTH, 16)
    x_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
    mesh, layer = meshes.make_mesh(tensor.params.axes, jax.devices()), tensor.problem.model.layers[2]
    assert layer.name == "block_1"
    context = Context(batch, None, group=tensor.group)

    def block(weights: Any, x_BTD: Any) -> Any:
        return layer.apply(weights, tensor.group.own(x_BTD, 1), context)

    specs = (tensor.params.specs["block_1"], PartitionSpec())
    mapped = jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(None, TENSOR), check_vma=False)
    got = jax.jit(mapped)(weights, x_BTD)
    assert got.shape == (B, 2 * size, D)
    np.testing.assert_allclose(got[:, :T], block_by_hand(weights, x_BTD.astype(np.float64), size), rtol=0, atol=2e-5)


def block_by_hand(weights: Any, x_BTD: np.ndarray, size: int) -> np.ndarray:
    """Return the output of a pre-norm block with causal attention of 4 heads, the sum over devices written out."""

    def normal(x: np.ndarray, norm: Any) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * norm["scale"] + norm["bias"]

    def columns(x: np.ndarray, linear: Any, device: int) -> np.ndarray:
        kernel, bias = (np.split(linear[name], size, axis=-1)[device] for name in ("kernel", "bias"))
        return x @ kernel + bias

    def rows(y: np.ndarray, linear: Any, device: int) -> np.ndarray:
        return y @ np.split(linear["kernel"], size)[device]

    T, attention, mlp = x_BTD.shape[1], weights["attention"], weights["mlp"]
    normal_BTD, total = normal(x_BTD, weights["attention_norm"]), np.zeros_like(x_BTD)
    for device in range(size):  # each has one head
        q, k, v = (columns(normal_BTD, attention[name], device) for name in ("query", "key", "value"))
        scores_BTS = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]), -np.inf)
        powers_BTS = np.exp(scores_BTS - scores_BTS.max(-1, keepdims=True))
        total = total + rows(powers_BTS / powers_BTS.sum(-1, keepdims=True) @ v, attention["out"], device)
    x_BTD = x_BTD + total + attention["out"]["bias"]
    normal_BTD, total = normal(x_BTD, weights["mlp_norm"]), np.zeros_like(x_BTD)
    for device in range(size):
        u = columns(normal_BTD, mlp["up"], device)
        gelu = u / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
        total = total + rows(gelu, mlp["down"], device)
    return np.asarray(x_BTD + total + mlp["down"]["bias"])


def test_the_cases_cover_the_features() -> None:
    assert {case.model for case in CASES} == MODELS.keys()
    assert NUM_STEPS > 1
    for case in FAST:
        before = named(tensors.start(case.model)["params"])
        changed = named(single_of(case).trees[-1]["params"])
        for path, x in before.items():
            if "['key']['bias']" not in path:
                assert np.abs(changed[path] - x).max() > 1e-5 * np.abs(x).max(), path
