"""Exchanges in strategies. tests/strategies/test_cases.py shows that exact ones train like one device."""

import functools
import itertools
import math
import re
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpar import layout
from jaxpar.core import mesh as meshes
from jaxpar.core import state as states
from jaxpar.core.groups import ReplicaGroup
from jaxpar.core.step import Problem, batch_weight, gradients
from jaxpar.exchange.exchange import Exchange, Rule
from jaxpar.exchange.named import EXCHANGES, make_exchange
from jaxpar.exchange.reduce import Axis
from jaxpar.exchange.scatter_layers import scattering
from jaxpar.models.model import Batch, Model
from jaxpar.strategies.data_parallel.shard_map import ReplicaDetails, ReplicaState, make_layouts, train_step
from tests.strategies.pipelines import (
    Outcome,
    Task,
    advance,
    make,
    make_batch,
    make_config,
    make_problem,
    named,
    outcome,
    pipeline,
    plan_of,
    relative_error,
    shared,
    start,
)
from tests.strategies.test_pipeline import assert_equal

NUM_STEPS, N = 20, 4
BERT, SGD = Task("bert", "classification", layers=2), Task("bert", "classification", "sgd", layers=2)
GPT, RESNET = Task("gpt", "causal_lm", layers=2), Task("resnet", "classification", "sgd")
MLP, MLP_SGD = Task("mlp", "classification", layers=2), Task("mlp", "classification", "sgd", layers=2)
TWICE = "--config.optimizer.accumulation_steps=2"


def option(name: str, value: Any) -> str:
    return f"--config.exchange_options.{name}={value}"


def replicated(exchange: str, *overrides: str, n: int = N) -> tuple[str, ...]:
    """Return the overrides of replicas. Compressors compress all arrays, however small, unless overridden."""
    by = "--config.data_parallel.implementation=shard_map"
    every = [option("min_compress_bytes", 0)] if "min_compress_bytes" in EXCHANGES[exchange].options else []
    chosen = f"--config.mesh.data={n}", f"--config.exchange={exchange}", by, *every
    return "--config.strategy=data_parallel", *chosen, *overrides


@functools.cache
def trained(task: Task, *overrides: str) -> Outcome:
    """Train some steps with a strategy; half as many for a ResNet, whose convolutions are slow."""
    num_steps = NUM_STEPS // 2 if task.model == "resnet" else NUM_STEPS
    return advance(shared(task, *overrides), task, start(task), 0, num_steps)


def traced_step(problem: Problem, exchange: Exchange) -> Any:
    """Return the jaxpr of a training step of N replicas, before XLA."""
    axes, like = {"data": N, "stage": 1}, states.abstract_state(problem.model, problem.optimizer)
    mesh = meshes.make_mesh(axes, jax.devices())
    base = {part: layout.replicated(axes, tree) for part, tree in like._asdict().items()}
    placed = ReplicaState(problem, mesh, exchange, make_layouts(exchange, base))
    details = ReplicaDetails(
        exchange, ReplicaGroup(problem, axes), unrolled=False, last_apart=False, spans_hosts=False, scatter_layers=None
    )
    step = train_step(problem, details, placed.layout, N)
    in_specs, out_specs = (placed.layout.specs, PartitionSpec("data")), (placed.layout.specs, PartitionSpec())
    mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.make_jaxpr(mapped)(placed.abstract, problem.batch)


def test_replicas_of_pipelines_clip_their_whole_gradients() -> None:
    """Stages clip by the norm over all stages. Top-k of all elements loses nothing, so only clipping differs."""
    clip = "--config.optimizer.clip_norm=0.5"
    every = (option("ratio", 1.0), option("min_compress_bytes", 0))
    got = outcome(MLP_SGD, *pipeline("1f1b", 2, "--config.exchange=byteps_topk", *every, clip, replicas=2))
    assert_equal(got, outcome(MLP_SGD, *replicated("byteps_topk", *every, clip, n=2)))
    exact = outcome(MLP_SGD, *replicated("ddp", clip, n=2))
    assert abs(got.losses[-1] / exact.losses[-1] - 1) > 1e-4


def test_lossy_exchanges_are_near() -> None:
    """The strategies use the lossy exchanges and still train. tests/exchange bounds their errors."""
    expected = trained(MLP)
    float8 = [option("wire_dtype", "float8_e4m3fn")]
    for name, options in {"bagua_bytegrad": [], "byteps_dithering": [], "ddp": float8}.items():
        got = trained(MLP, *replicated(name, *options))
        errors = [relative_error(got.params[k], v) for k, v in expected.params.items() if "['key']['bias']" not in k]
        assert 1e-4 < max(errors) < 0.1, name
        np.testing.assert_allclose(got.losses, expected.losses, rtol=3e-3)


BUCKETED = [name for name, row in EXCHANGES.items() if "bucket_bytes" in row.options]


@pytest.mark.parametrize("name", BUCKETED)
def test_the_private_state_depends_on_buckets_only_if_it_has_any(name: str) -> None:
    """The key of the private state differs between sizes of buckets if and only if its arrays do."""
    optimizer = MLP if EXCHANGES[name].adamw else MLP_SGD
    plans = [plan_of(optimizer, *replicated(name, option("bucket_bytes", size), n=2)) for size in (1000, 2**20, 2**21)]
    shapes = [str(jax.tree.leaves(plan.layouts["private"].shapes)) for plan in plans]
    assert [plan.private_key == plans[1].private_key for plan in plans] == [shape == shapes[1] for shape in shapes]
    assert plans[2].private_key == plans[1].private_key


def test_a_bucket_size_does_not_discard_what_is_in_flight() -> None:
    """Only error feedback has residuals of buckets."""
    settings = "--config.pipeline.num_microbatches=2", "--config.mesh.stage=2", "--config.mesh.data=2"
    pipedream = "--config.strategy=pipeline", "--config.pipeline.schedule=pipedream", *settings
    onebit = "--config.exchange=byteps_onebit", option("min_compress_bytes", 0)
    for exchange, is_same in (((), True), (onebit, False)):
        keys = [
            plan_of(MLP_SGD, *pipedream, *exchange, option("bucket_bytes", size)).private_key for size in (1000, 10**7)
        ]
        assert (keys[0] == keys[1]) == is_same


def test_dp_has_its_state_on_the_first_device_alone() -> None:
    strategy = shared(MLP, *replicated("dp"))
    state, _ = strategy.step(strategy.init(jax.random.key(0)), strategy.place(make_batch(MLP, 0)))
    assert {device for leaf in jax.tree.leaves(state) for device in leaf.devices()} == {jax.devices()[0]}


@pytest.mark.parametrize("name", ["quantized_weights", "quantized_gradients"])
def test_quantized_weights_are_gathered_again_for_the_backward_pass(name: str) -> None:
    """A replica that kept the decompressed weights would hold all parameters at the end of the forward pass."""
    problem = make_problem(make_config(MLP_SGD, "--config.model.scan_layers=True"), MLP_SGD)
    gathers = []
    for options in ({}, {name: True}):
        exchange = make_exchange("zero3", Axis("data", N), Rule(problem.optimizer, None), **options)
        gathers.append(str(traced_step(problem, exchange)).count("all_gather["))
    # Twice for the scanned blocks and for the head. Nothing needs the gradient of the input of the first layer.
    assert gathers == [5, 5]


def test_quantized_zero3_stays_close_to_zero3() -> None:
    quantized = option("quantized_weights", "True"), option("quantized_gradients", "True")
    strategy = shared(MLP, *replicated("zero3", *quantized))
    assert strategy.plan.differs == "zero3 sends weights and gradients with 8 bits per element"
    got, exact = (outcome(MLP, *replicated("zero3", *options)) for options in (quantized, ()))
    np.testing.assert_allclose(got.losses, exact.losses, rtol=3e-3)
    assert np.abs(np.subtract(got.losses, exact.losses)).max() > 1e-7


def test_decentralized_weights_differ_and_the_mean_is_canonical() -> None:
    strategy = shared(MLP, *replicated("bagua_decentralized"))
    state = strategy.from_canonical(start(MLP))
    for step in range(2):
        state, _ = strategy.step(state, strategy.place(make_batch(MLP, step)))
    own, canonical = named(state.params), named(strategy.to_canonical(state)["params"])
    assert any((leaf[0] != leaf[1]).any() for leaf in own.values())
    for name, leaf in own.items():
        np.testing.assert_allclose(canonical[name], leaf.mean(0), rtol=1e-6, atol=1e-9)


def test_backward_passes_take_one_step_of_all() -> None:
    """Five passes make one optimizer step. The parameters do not change in between."""
    strategy = shared(MLP, *replicated("horovod", option("backward_passes_per_step", 5)))
    state, params = strategy.from_canonical(start(MLP)), [start(MLP)["params"]]
    for step in range(10):
        state, _ = strategy.step(state, strategy.place(make_batch(MLP, step)))
        params.append(jax.device_get(strategy.to_canonical(state)["params"]))
    moved = [
        any((a != b).any() for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))
        for x, y in itertools.pairwise(params)
    ]
    assert moved == [*[False] * 4, True, *[False] * 4, True]


def test_buckets_are_there_before_the_backward_pass_ends() -> None:
    """Buckets of the last layers are complete before the backward pass ends. On GPUs, they are already being sent."""
    task = BERT._replace(layers=4)
    strategy = make(task, *replicated("ddp", option("bucket_bytes", 4000), "--config.model.scan_layers=False"))
    lines = (strategy.compile()[0].compiled.as_text() or "").split("ENTRY")[1].splitlines()
    products = [number for number, line in enumerate(lines) if "transpose(jvp" in line and "dot_general" in line]
    sent = re.findall(r"all-reduce(?:-start)?\(([^)]*)\)", "\n".join(lines))
    names = {operand.strip().split()[-1] for operands in sent for operand in operands.split(",")}
    vectors = [number for number, line in enumerate(lines) if line.split(" = ")[0].strip() in names]
    assert len(vectors) > 4
    before = [sum(product < vector for product in products) / len(products) for vector in vectors]
    assert min(before) < 0.3
    assert sum(share < 0.8 for share in before) >= len(before) / 2


def test_a_bucket_waits_for_its_own_layers_alone() -> None:
    """In the traced program, a bucket of the last layers depends only on a part of the matrix products."""
    config = make_config(BERT._replace(layers=4), "--config.model.scan_layers=False")
    problem = make_problem(config, BERT._replace(layers=4))
    layers = [layer.name for layer in problem.model.layers]
    exchange = make_exchange("ddp", Axis("data", N), Rule(problem.optimizer, None, layers=layers), bucket_bytes=4000)
    [inner] = [eqn.params["jaxpr"] for eqn in traced_step(problem, exchange).eqns]
    needs: dict[Any, frozenset[int]] = {}  # by variable: the equations with products on which it depends
    products, buckets = set(), []
    for number, eqn in enumerate(inner.eqns):
        inputs = [needs.get(x, frozenset()) for x in eqn.invars if not isinstance(x, jax.extend.core.Literal)]
        own = frozenset().union(*inputs)
        if "dot_general" in str(eqn.params.get("jaxpr", eqn.primitive)):
            products.add(number)
            own |= {number}
        if eqn.primitive.name.startswith("psum") and eqn.invars[0].aval.size > 100:
            buckets.append(len(own))
        needs |= dict.fromkeys(eqn.outvars, own)
    assert len(products) > 40
    assert len(buckets) > 4
    assert all(a <= b + 3 for a, b in itertools.pairwise(buckets))  # buckets of the last layers come first
    assert buckets[0] < 0.75 * buckets[-1]
    assert len(set(buckets)) >= 4


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_an_offloaded_state_is_copied_after_the_backward_pass(name: str) -> None:
    """Each array of the state is copied from a barrier that waits for all gradients. Scalars are copied before."""
    problem = make_problem(make_config(MLP), MLP)
    exchange = make_exchange(name, Axis("data", N), Rule(problem.optimizer, None), offload=True)
    [inner] = [eqn.params["jaxpr"] for eqn in traced_step(problem, exchange).eqns]
    copied = {x for eqn in inner.eqns if eqn.primitive.name == "device_put" for x in eqn.invars}
    arrays = {x for x in copied if x.aval.ndim}
    number = len(jax.tree.leaves(problem.model.shapes))
    assert len(arrays) == 2 * number  # Adam's moments
    barriers = [eqn for eqn in inner.eqns if eqn.primitive.name == "optimization_barrier"]
    [barrier] = [eqn for eqn in barriers if arrays & set(eqn.outvars)]
    assert arrays <= set(barrier.outvars)
    assert len(barrier.invars) >= 3 * number


def test_zero_adds_up_shards_from_its_second_stage_on() -> None:
    """From zero2 on, the compiled loops over microbatches carry 1/n of the gradients instead of all of them."""
    carried = {}
    for name in ("zero1", "zero2"):
        text = shared(MLP_SGD, *replicated(name, TWICE)).compile()[0].compiled.as_text() or ""
        loops = [line.split(" while(")[0].split(" = ")[1] for line in text.splitlines() if " while(" in line]
        arrays = [re.findall(r"f32\[([\d,]*)\]", loop) for loop in loops]
        carried[name] = max(4 * sum(math.prod(map(int, dims.split(","))) for dims in loop if dims) for loop in arrays)
    gradients = 4 * sum(leaf.size for leaf in jax.tree.leaves(make_problem(make_config(MLP_SGD), MLP_SGD).model.shapes))
    assert carried["zero1"] - carried["zero2"] == pytest.approx(gradients * (1 - 1 / N), rel=0.05)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scan_scatters_the_gradients_of_its_layers(dtype: str, remat: str) -> None:
    """The shards are those of whole gradients, which are scattered at the end. The loss is the same.

    On one device, because on CPUs devices could deadlock.
    """
    task = Task("gpt", "causal_lm", layers=3, dtype=dtype)
    config = make_config(task, "--config.model.scan_layers=True", f"--config.model.remat={remat}", TWICE)
    problem, batch = make_problem(config, task), make_batch(task, 0)
    exchange = make_exchange("zero2", Axis("data", N), Rule(problem.optimizer, problem.model.shapes))
    assert exchange.scatter is not None
    assert exchange.scatter_layers is not None
    assert problem.model.scanned == ["block_0", "block_1", "block_2"]
    model, whole_scatter = scattering(problem.model, exchange.scatter_layers), exchange.scatter
    params = problem.model.init(jax.random.key(0))
    state = states.State(jnp.zeros((), jnp.int32), jax.random.key_data(jax.random.key(1)), params, ())

    def at_end(batch: Batch) -> Any:
        return gradients(problem, state, batch, weight, scatter=whole_scatter)

    def in_scan(batch: Batch) -> Any:
        scattered = state._replace(params=model.differentiated(params))
        return gradients(problem._replace(model=model), scattered, batch, weight, scatter=model.shards)

    weight = batch_weight({name: jnp.asarray(x) for name, x in batch.items()})
    of_replicas = {name: x.reshape(N, -1, *x.shape[1:]) for name, x in batch.items()}
    expected, got = (jax.jit(jax.vmap(way, axis_name="data"))(of_replicas) for way in (at_end, in_scan))
    errors = jax.tree.map(lambda x, y: relative_error(np.asarray(x), np.asarray(y)), got, expected)
    assert jax.tree.reduce(max, errors) < 1e-6, errors


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-3)])
def test_a_step_scatters_in_its_scan(dtype: str, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole step, of the tied arrays too, is that of gradients that are scattered at its end.

    The axis is that of `jax.vmap` on one device, because on CPUs devices could deadlock.
    """
    monkeypatch.setattr(jax.lax, "pcast", lambda x, *_, **__: x)  # `jax.vmap` has no types
    task = Task("gpt", "causal_lm", layers=3, dtype=dtype)
    config = make_config(task, "--config.model.scan_layers=True", "--config.model.remat=full", TWICE)
    problem, batch = make_problem(config, task), make_batch(task, 0)
    axes, like = {"data": N, "stage": 1}, states.abstract_state(problem.model, problem.optimizer)
    exchange = make_exchange("zero2", Axis("data", N), Rule(problem.optimizer, problem.model.shapes))
    base = {part: layout.replicated(axes, tree) for part, tree in like._asdict().items()}
    placed = ReplicaState(problem, meshes.make_mesh(axes, jax.devices()), exchange, make_layouts(exchange, base))
    state = placed.from_canonical(start(task))
    of_replicas = {name: x.reshape(N, -1, *x.shape[1:]) for name, x in batch.items()}

    def outcome_of(scatter_layers: Any) -> Any:
        group = ReplicaGroup(problem, axes)
        details = ReplicaDetails(
            exchange,
            group,
            unrolled=False,
            last_apart=scatter_layers is not None,
            spans_hosts=False,
            scatter_layers=scatter_layers,
        )
        step = train_step(problem, details, placed.layout, N)
        run = jax.jit(jax.vmap(step, axis_name="data"))
        return run(run(parts, of_replicas)[0], of_replicas)  # at step 0, the learning rate is 0

    def divided(spec: PartitionSpec, x: Any) -> Any:
        x = np.asarray(x)
        return np.stack(np.split(x, N, spec.index("data")) if "data" in spec else [x] * N)

    parts = jax.tree.map(divided, placed.layout.specs, state, is_leaf=lambda x: isinstance(x, PartitionSpec))
    expected, got = outcome_of(None), outcome_of(exchange.scatter_layers)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, tolerance, tolerance / 100), got, expected)
    moved = relative_error(np.asarray(got[0].params["embed"]["tokens"]), np.asarray(parts.params["embed"]["tokens"]))
    assert moved > 1e-3


@pytest.mark.parametrize("passes", [1, 2])
def test_what_overflows_on_the_wire_is_a_fault(passes: int) -> None:
    """Gradients overflow in float16 but not in float32. The step is skipped, and the state stays finite."""
    more = option("wire_dtype", "float16"), option("backward_passes_per_step", passes)
    strategy = shared(MLP_SGD, *replicated("horovod", *more, "--config.optimizer.nonfinite=skip"))
    tree = dict(start(MLP_SGD))
    head = jax.tree.map(lambda x: x * np.float32(3e7), tree["params"]["head"])
    state = strategy.from_canonical(tree | {"params": tree["params"] | {"head": head}})
    before = named(strategy.to_canonical(state)["params"])
    finite = []
    for step in range(4):
        state, metrics = strategy.step(state, strategy.place(make_batch(MLP_SGD, step)))
        finite.append(bool(metrics.finite))
    assert finite == ([False] * 4 if passes == 1 else [True, False, False, False])
    for name, x in named(strategy.to_canonical(state)["params"]).items():
        np.testing.assert_array_equal(x, before[name])


@pytest.mark.parametrize(
    ("name", "sent"), [("zero1", {"uint16"}), ("zero2", {"uint16"}), ("zero3", {"uint16", "float32"})]
)
def test_zero_of_a_bfloat16_model_trains_like_ddp(name: str, sent: set[str]) -> None:
    """Matrices are gathered in bfloat16. If their gradients were added up in bfloat16, they would differ by 1e-3.

    sent: the dtypes of messages. The classifier reads float32, which zero3 sends apart.
    """
    task = MLP_SGD._replace(dtype="bfloat16")
    got, exact = (outcome(task, *replicated(exchange, TWICE)) for exchange in (name, "ddp"))
    assert_equal(got, exact)
    plan = shared(task, *replicated(name, TWICE)).plan
    gathered = [one for one in plan.traffic if one.kind == "all-gather"]
    assert {one.dtype for one in gathered} == sent
    whole = 4 * sum(leaf.size for leaf in jax.tree.leaves(make_problem(make_config(task), task).model.shapes))
    passes = 4 if name == "zero3" else 1  # both passes of two microbatches
    assert sum(one.nbytes for one in gathered) < 0.6 * passes * whole * (N - 1) / N


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_an_evaluation_gathers_in_the_dtype_of_the_layers(name: str) -> None:
    """An evaluation then needs no more memory than a step, the only program that plans and audits describe."""
    task = MLP_SGD._replace(dtype="bfloat16")
    strategy = shared(task, *replicated(name, TWICE))
    state = strategy.from_canonical(start(task))
    traced = str(jax.make_jaxpr(strategy.evaluate)(state, strategy.place(make_batch(task, 0))))
    gathered = re.findall(r":(\w+)\[[\d,]*\] = all_gather\[", traced)
    assert set(gathered) == {"u16"}


def test_zero3_gathers_a_layer_at_a_time_inside_the_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is compiled as on GPUs. It cannot run on CPUs, where collectives have no order."""
    monkeypatch.setattr(Model, "unrolled", lambda model: model)
    strategy = make(BERT._replace(layers=4), *replicated("zero3", "--config.model.scan_layers=True"))
    text = strategy.compile()[0].compiled.as_text() or ""
    gathers = [line for line in text.splitlines() if " all-gather(" in line or " all-gather-start(" in line]
    looped = [line for line in gathers if "/while/body/" in line]
    forward = [line for line in looped if "transpose(" not in line]
    assert (len(forward), len(looped)) == (1, 2)  # and again in the backward pass
    block = sum(leaf.size for leaf in jax.tree.leaves(make_problem(make_config(BERT), BERT).model.shapes["block_0"]))
    assert f"f32[{N},{-(-block // N)}]" in forward[0]  # one block instead of all four
