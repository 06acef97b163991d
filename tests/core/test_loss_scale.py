"""The scale of the loss in float16: against a recurrence written here, in every strategy."""

import functools
from collections.abc import Set
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpar.core import loss_scale, state, step
from jaxpar.core.loss_scale import FIRST_SCALE, LEAST_SCALE, MOST_SCALE, LossScale, find_scale, with_loss_scale
from jaxpar.inspect import audit
from jaxpar.models import Context, Model
from jaxpar.strategies import Strategy
from jaxpar.strategies.pipeline.executor.dispatch import dispatch_order
from jaxpar.tasks.classification import TASK
from tests.strategies.pipelines import Task, make, make_batch, named, start

ROWS, FEATURES, CLASSES, STEPS = 8, 5, 3, 24
LARGE = 1000.0  # of inputs, with which products of scaled gradients are too large for float16


class Line(nnx.Module):
    """A linear layer in float16."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(FEATURES, CLASSES, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        return self.linear(x).astype(jnp.float32)


def batch(number: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(number)
    return {
        "inputs": jnp.asarray(LARGE * rng.normal(size=(ROWS, FEATURES)), jnp.float32),
        "labels": jnp.asarray(rng.integers(0, CLASSES, ROWS), jnp.int32),
        "weights": jnp.ones(ROWS),
        "index": jnp.arange(ROWS),
    }


def test_steps_equal_a_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale falls until gradients are finite, and is doubled after three updates in a row."""
    monkeypatch.setattr(loss_scale, "UPDATES_AT_A_SCALE", 3)
    optimizer = with_loss_scale(optax.with_extra_args_support(optax.sgd(1e-7, 0.9)))
    problem = step.Problem(Model({"line": Line}), optimizer, 1, {}, STEPS, TASK)
    current = state.init(problem.model, optimizer, jax.random.key(0))
    weights: dict[str, Any] = current.params["line"]["linear"]
    trace: dict[str, Any] = {"kernel": 0.0, "bias": 0.0}
    scale, updates, finite = FIRST_SCALE, 0, []

    def scaled_loss(weights: Any, rows: Any, scale: float) -> jax.Array:
        narrow = {name: x.astype(jnp.float16) for name, x in weights.items()}
        logits = (rows["inputs"].astype(jnp.float16) @ narrow["kernel"] + narrow["bias"][None]).astype(jnp.float32)
        return scale * optax.softmax_cross_entropy_with_integer_labels(logits, rows["labels"]).mean()

    for number in range(STEPS):
        rows = batch(number)
        grads, sums = step.gradients(problem, current, rows, rows["weights"].sum())
        current, metrics = step.update(problem, current, grads, sums)
        assert metrics.loss_scale == scale
        own = {name: np.asarray(g) / scale for name, g in jax.grad(scaled_loss)(weights, rows, scale).items()}
        finite.append(all(np.isfinite(g).all() for g in own.values()))
        assert metrics.finite == finite[-1]
        if finite[-1]:
            trace = {name: own[name] + 0.9 * trace[name] for name in own}
            weights = {name: weights[name] - np.float32(1e-7) * trace[name] for name in own}
        updates = updates + 1 if finite[-1] else 0
        scale = scale / 2 if not finite[-1] else 2 * scale if updates == 3 else scale
        updates %= 3
        for name, leaf in current.params["line"]["linear"].items():
            np.testing.assert_allclose(leaf, weights[name], rtol=1e-5)
    assert not finite[0]
    assert 8 < sum(finite) < STEPS - 4  # it was too large again later
    last: Any = find_scale(current.optimizer)
    assert tuple(last) == (scale, updates)


@pytest.mark.parametrize(
    ("scale", "is_finite", "after"),
    [(LEAST_SCALE, False, LEAST_SCALE), (MOST_SCALE, True, MOST_SCALE), (4.0, True, 8.0)],
)
def test_limits(scale: float, is_finite: bool, after: float) -> None:
    before = LossScale(jnp.float32(scale), jnp.int32(loss_scale.UPDATES_AT_A_SCALE - 1))
    changed = loss_scale.after_step(before, jnp.asarray(is_finite), before.scale)
    assert (float(changed.scale), int(changed.updates)) == (after, 0)


@pytest.mark.parametrize(("used", "after"), [(8.0, 4.0), (16.0, 4.0), (4.0, 2.0)])
def test_a_scale_that_has_fallen_meanwhile(used: float, after: float) -> None:
    """A gradient of a loss that was multiplied by a larger scale, which had already been halved, halves it no more."""
    before = LossScale(jnp.float32(4), jnp.int32(3))
    changed = loss_scale.after_step(before, jnp.asarray(False), jnp.float32(used))
    assert (float(changed.scale), int(changed.updates)) == (after, 0)


MLP = Task("mlp", "classification", "adamw", layers=2, dtype="float16")
REPLICAS = ("strategy=data_parallel", "mesh.data=2")
DDP, PMAP = "exchange=ddp", "data_parallel.implementation=pmap"
# Each way, and one that divides the loss by the same weight before it is scaled: of a replica's shard, or of the batch.
WAYS = {
    **{f"exchange={name}": DDP for name in ("zero1", "zero2", "zero3", "horovod", "byteps")},
    "exchange=dp": PMAP,
}


CLIPPED = "optimizer.clip_norm=0.2"
STAGES = ("strategy=pipeline", "mesh.stage=2", "pipeline.num_microbatches=4", CLIPPED)
SWARM = ("strategy=swarm", "mesh.stage=1", "swarm.num_microbatches=4")
LOCKSTEP, DISPATCH = "pipeline.executor=lockstep", "pipeline.executor=dispatch"
FALLS = 2.0**21  # a first scale with which the first step is not finite


def train(strategy: Strategy[Any], now: Any, steps: range, bad: Set[int] = frozenset()) -> tuple[Any, list[Any]]:
    """Take steps. bad: those whose loss is NaN."""
    trace = []
    for number in steps:
        rows = make_batch(MLP, number)
        rows["weights"] = rows["weights"] * np.float32(np.nan if number in bad else 1)
        now, metrics = strategy.step(now, strategy.place(rows))
        trace.append(jax.device_get(metrics))
    return now, trace


def start_at(scale: float) -> Any:
    """Return a canonical state at step 0 with a scale."""
    tree = jax.tree.map(np.asarray, start(MLP))
    tree["optimizer"]["0"]["scale"] = np.float32(scale)
    return tree


def built(*overrides: str) -> Strategy[Any]:
    return make(MLP, *(f"--config.{one}" for one in overrides))


@functools.cache
def after_steps(*overrides: str, first: float = FALLS) -> tuple[list[bool], dict[str, np.ndarray]]:
    """Return which of four steps were finite, and the state after them. first: the scale before them."""
    strategy = built(*overrides)
    now, trace = train(strategy, strategy.from_canonical(start_at(first)), range(4))
    finite = [bool(metrics.finite) for metrics in trace]
    scales, expected = [float(metrics.loss_scale) for metrics in trace], [first]
    for is_finite in finite[:-1]:
        expected.append(expected[-1] / (1 if is_finite else 2))
    assert scales == expected
    return finite, named(strategy.to_canonical(now))


@pytest.mark.parametrize("way", WAYS)
def test_exchanges(way: str) -> None:
    """Each skips the steps of the other way, and has the same state, with the scale."""
    (finite, tree), (expected, of_other) = after_steps(*REPLICAS, way), after_steps(*REPLICAS, WAYS[way])
    assert finite == expected
    assert (finite[0], finite[-1]) == (False, True)
    for name, leaf in tree.items():
        np.testing.assert_allclose(leaf, of_other[name], rtol=1e-3, atol=2e-5, err_msg=name)


def test_replicas_can_skip_other_steps_than_one_device() -> None:
    """The losses of two replicas are divided by half of the weight, so that their gradients are twice as large."""
    alone, of_replicas = (
        after_steps(*way, first=2.0**20)[0] for way in (("optimizer.accumulation_steps=4", CLIPPED), (*REPLICAS, DDP))
    )
    assert alone == [False, True, True, True]
    assert of_replicas == [False, False, True, True]


def test_the_page_on_gpus_has_the_numbers_of_the_scale() -> None:
    page = " ".join(Path("docs/howto/gpus.md").read_text().split())
    assert f"at first by 2^{np.log2(FIRST_SCALE):.0f}." in page
    assert f"{loss_scale.UPDATES_AT_A_SCALE:,} updates in a row double it, up to 2^{np.log2(MOST_SCALE):.0f}." in page


FLUSHED = {
    "lockstep": ("pipeline.schedule=1f1b", LOCKSTEP),
    "lockstep, B and W": ("pipeline.schedule=zb_h1", LOCKSTEP),
    "dispatched": ("pipeline.schedule=interleaved_1f1b", DISPATCH),
    "dispatched, zero3": ("pipeline.schedule=1f1b", DISPATCH, "mesh.data=2", "exchange=zero3"),
    "swarm": SWARM,
}


@pytest.mark.parametrize("name", FLUSHED)
def test_pipelines_train_like_one_device(name: str) -> None:
    """Also with clipping, which reads the norm of gradients that are divided by the scale."""
    # The losses of replicas are divided by a smaller weight, so that they overflow in other steps.
    first = 2.0**12 if "mesh.data=2" in FLUSHED[name] else FALLS
    finite, expected = after_steps("optimizer.accumulation_steps=4", CLIPPED, first=first)
    got = after_steps(*STAGES, *FLUSHED[name], first=first)
    assert got[0] == finite
    assert (finite[0], finite[-1]) == (first < FALLS, True)
    for leaf, array in got[1].items():
        np.testing.assert_allclose(array, expected[leaf], rtol=1e-3, atol=2e-5, err_msg=leaf)


def test_the_scale_moves_between_strategies() -> None:
    """Steps that a pipeline, one device and a swarm take in turn, and the first of which is not finite."""
    tree = start_at(FALLS)
    for number, overrides in enumerate(
        [(*STAGES, DISPATCH), ("optimizer.accumulation_steps=4", CLIPPED), (*STAGES, *SWARM)]
    ):
        strategy = built(*overrides)
        now, _ = train(strategy, strategy.from_canonical(tree), range(number, number + 1))
        tree = jax.device_get(strategy.to_canonical(now))
    strategy = built(*STAGES, LOCKSTEP)
    now, _ = train(strategy, strategy.from_canonical(tree), range(3, 4))
    got, (_, expected) = named(strategy.to_canonical(now)), after_steps("optimizer.accumulation_steps=4", CLIPPED)
    for leaf, array in got.items():
        np.testing.assert_allclose(array, expected[leaf], rtol=1e-3, atol=2e-5, err_msg=leaf)


# The stages are updated with the batches of 3 and 2, or of 2 and 1 steps before.
CONTINUOUS = {
    "lockstep": ("pipeline.schedule=pipedream", LOCKSTEP, "mesh.stage=4", "pipeline.num_microbatches=1"),
    "dispatched": ("pipeline.schedule=pipedream", DISPATCH, "mesh.stage=4", "pipeline.num_microbatches=2"),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_pipelines_that_never_drain(name: str) -> None:
    """A batch with NaN halves its own scale once, although the stages meet it in different steps."""
    strategy = built(*STAGES, *CONTINUOUS[name])
    table = strategy.plan.details.table  # type: ignore[attr-defined]
    ages = [-(a.microbatch // table.num_microbatches) for a in dispatch_order(table) if a.is_update]
    assert len(set(ages)) > 1
    now, trace = train(strategy, strategy.from_canonical(start_at(8.0)), range(9), bad={2, 5})
    scale, updates, scales = 8.0, 0, []
    for number, metrics in enumerate(trace):
        scales.append(scale)
        batches = [number - age for age in ages]
        failed = [scales[one] for one in batches if one in (2, 5)]
        assert metrics.loss_scale == min(failed, default=scale)
        assert failed == [] or not metrics.finite
        scale = min([scale, *(one / 2 for one in failed)])
        updates = 0 if failed else updates + all(one >= 0 for one in batches)
    after = strategy.to_canonical(now)["optimizer"]["0"]
    assert (after["scale"], after["updates"]) == (scale, updates)
    assert scale == 2.0
    rows = audit.audit(strategy.compile(), strategy.plan, TASK)
    assert [row for row in rows if not row.is_explained] == []


TOPK = ("exchange=byteps_topk", "exchange_options.min_compress_bytes=0")
UNCLIPPED = "optimizer.clip_norm=1e9"  # clipped gradients would not depend on a factor
WORKERS = ("strategy=async_data_parallel", "asynchronous.num_workers=2", "mesh.data=2", UNCLIPPED)


@pytest.mark.parametrize("policy", ["async", "sync"])
def test_servers_scale(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update changes the scale of the steps that follow, whose shards have the scale at their beginning."""
    monkeypatch.setattr(loss_scale, "UPDATES_AT_A_SCALE", 3)
    strategy = built(*WORKERS, f"asynchronous.policy={policy}")
    now, trace = train(strategy, strategy.from_canonical(start_at(8.0)), range(8), bad={2, 5})
    scale, updates = 8.0, 0
    for number, metrics in enumerate(trace):
        used, is_finite = scale, number not in (2, 5)
        for _ in range(2 if policy == "async" else 1):
            updates = updates + 1 if is_finite else 0
            if not is_finite:
                scale = used / 2
            elif updates == 3:
                scale, updates = 2 * scale, 0
        assert (bool(metrics.finite), metrics.loss_scale) == (is_finite, scale if is_finite else used)
    after = strategy.to_canonical(now)["optimizer"]["0"]
    assert (after["scale"], after["updates"]) == (scale, updates)


def test_the_least_scale_of_local_workers_is_canonical() -> None:
    """The mean of several would be no power of 2."""
    strategy = built(*WORKERS, "asynchronous.policy=local_sgd", "asynchronous.interval=4")
    state = strategy.from_canonical(start_at(8.0))
    first, second = state.servers
    optimizer = loss_scale.with_scale(second.optimizer, LossScale(jnp.float32(2), jnp.int32(5)))
    state = state._replace(servers=(first, second._replace(optimizer=optimizer)))
    assert strategy.to_canonical(state)["optimizer"]["0"] == {"scale": 2, "updates": 0}


DIGITS = {
    "onebit_adam": (*REPLICAS, UNCLIPPED, "exchange=onebit_adam", "exchange_options.warmup=0.3"),
    "bagua_qadam": (*REPLICAS, UNCLIPPED, "exchange=bagua_qadam", "exchange_options.warmup=0.3"),
    "lockstep, residuals": (*STAGES, UNCLIPPED, LOCKSTEP, "mesh.data=2", *TOPK),
    "dispatched, residuals": (*STAGES, UNCLIPPED, DISPATCH, "mesh.data=2", *TOPK),
    "lockstep, never drains": (*STAGES, UNCLIPPED, *CONTINUOUS["lockstep"]),
    "dispatched, never drains": (*STAGES, UNCLIPPED, *CONTINUOUS["dispatched"]),
    "async": (*WORKERS, "asynchronous.policy=async", "asynchronous.mitigations=dc_asgd"),
    "softsync": (*WORKERS, "asynchronous.policy=softsync", "asynchronous.groups=1"),
    "live": (*WORKERS, "asynchronous.policy=async", "asynchronous.mode=live", "asynchronous.num_workers=1"),
    "local_sgd": (*WORKERS, "asynchronous.policy=local_sgd", "asynchronous.interval=4"),
    "swarm, delayed": (*STAGES, UNCLIPPED, *SWARM, "swarm.delayed=True"),
}


@pytest.mark.parametrize("name", DIGITS)
def test_the_scale_changes_no_digit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a scale that two updates double, also while batches are in flight, and after resuming there."""
    strategy, middle, end = built(*DIGITS[name]), 5, 8
    expected, _ = train(strategy, strategy.from_canonical(start_at(2.0**12)), range(end))
    monkeypatch.setattr(loss_scale, "UPDATES_AT_A_SCALE", 2)
    strategy, private = built(*DIGITS[name]), strategy.to_private(expected)
    now, _ = train(strategy, strategy.from_canonical(start_at(2.0**10)), range(middle))
    now = strategy.from_canonical(*jax.device_get((strategy.to_canonical(now), strategy.to_private(now))))
    now, trace = train(strategy, now, range(middle, end))
    assert trace[-1].loss_scale > trace[0].loss_scale > 2.0**10
    got, tree = strategy.to_canonical(now), strategy.to_canonical(expected)
    for leaf, array in named(tree["params"]).items():
        np.testing.assert_allclose(named(got["params"])[leaf], array, rtol=1e-5, atol=1e-6, err_msg=leaf)
    if "residuals" in name:
        for leaf, array in named(private).items():
            np.testing.assert_allclose(named(strategy.to_private(now))[leaf], array, rtol=1e-4, atol=1e-7, err_msg=leaf)
