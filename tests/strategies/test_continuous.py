"""Pipelines that never drain equal an explicit recurrence of delayed updates, computed without any pipeline."""

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.core import step as steps
from jaxpar.core.state import Canonical
from jaxpar.core.step import Problem
from jaxpar.errors import UserError
from jaxpar.strategies import Strategy
from jaxpar.strategies.pipeline.schedules import stage_delays
from jaxpar.strategies.pipeline.tables.periodic import CONTINUOUS, fewest_microbatches, periodic_table
from jaxpar.strategies.strategy import CompiledProgram
from tests.selection import slow, slow_except
from tests.strategies.pipelines import (
    LENGTH,
    Task,
    assert_bitwise_equal,
    assert_survives,
    make,
    make_batch,
    make_config,
    make_problem,
    named,
    plan_of,
    relative_error,
    shared,
    staged_state,
    start,
)

SGD, ADAMW = (Task("bert", "classification", name, layers=6) for name in ("sgd", "adamw"))
# For tests of what does not depend on the layers, because they compile faster.
MLP, SHALLOW = SGD._replace(model="mlp"), ADAMW._replace(model="mlp", layers=2)
BERT = ADAMW._replace(layers=2)
BATCHES = 50
DISPATCH = "--config.pipeline.executor=dispatch"


def settings(
    schedule: str, stages: int | tuple[int, ...], per_batch: int, replicas: int = 1, *more: str
) -> tuple[str, ...]:
    """Return the overrides of a pipeline. stages: their number, or the number of devices of each."""
    devices = (1,) * stages if isinstance(stages, int) else stages
    return (
        "--config.strategy=pipeline",
        f"--config.pipeline.schedule={schedule}",
        f"--config.mesh.stage={sum(devices)}",
        f"--config.pipeline.replicas={','.join(map(str, devices)) if max(devices) > 1 else ''}",
        f"--config.pipeline.num_microbatches={per_batch}",
        f"--config.mesh.data={replicas}",
        *more,
    )


def in_flight(stages: int | tuple[int, ...]) -> list[int]:
    """Return the number of microbatches that each stage works on: by hand if stages have replicas."""
    by_hand = {(2, 1): [4, 1], (1, 2, 1): [6, 4, 1]}
    return list(range(stages, 0, -1)) if isinstance(stages, int) else by_hand[stages]


class Recurrence:
    """Delayed updates on one device: gradients of a microbatch at given versions of the weights of each stage.

    Attributes:
      versions: by stage, all versions of its parameters, {layer: ...}.
      loss: sum of the losses of all microbatches.
    """

    def __init__(self, problem: Problem, bounds: tuple[int, ...], tree: Canonical, per_batch: int):
        self.problem, self.m, self.step = problem, per_batch, int(tree["step"])
        names = [layer.name for layer in problem.model.layers]
        self.layers = [names[begin:end] for begin, end in itertools.pairwise(bounds)]
        self.versions = [[{name: tree["params"][name] for name in layers}] for layers in self.layers]
        self.optimizers = [problem.optimizer.init(of[0]) for of in self.versions]
        self.key, self.losses = jnp.asarray(tree["key"]), [np.float32(0)] * 0

    def batch(self, version: Any, batch: Mapping[str, np.ndarray]) -> None:
        """Apply the gradient of a batch. version: (microbatch, counted from the start, and stage) -> version."""
        number = len(self.versions[0]) - 1
        total: Any = None
        key, weight = steps.dropout_key(self.key, jnp.asarray(self.step + number)), batch["weights"].sum()
        for j in range(self.m):
            k = number * self.m + j
            params = {
                name: self.versions[s][max(version(k, s), 0)][name]
                for s, layers in enumerate(self.layers)
                for name in layers
            }
            part = {name: x[j :: self.m] for name, x in batch.items()}  # as the examples of a microbatch are chosen
            loss, grads = _gradient(self.problem.model, self.problem.task, params, part, weight, key)
            self.losses.append(loss)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        for stage, layers in enumerate(self.layers):
            newest = self.versions[stage][-1]
            grads = {name: total[name] for name in layers}
            updates, self.optimizers[stage] = _update(self.problem.optimizer, grads, self.optimizers[stage], newest)
            self.versions[stage].append(optax.apply_updates(newest, updates))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradient(model: Any, task: Any, params: Any, batch: Any, weight: Any, key: Any) -> Any:
    def loss(params: Any) -> Any:
        return task.sums(model.apply(params, batch, steps.example_keys(key, batch)), batch).loss / weight

    return jax.value_and_grad(loss)(params)


@functools.partial(jax.jit, static_argnums=0)
def _update(optimizer: Any, grads: Any, state: Any, params: Any) -> Any:
    return optimizer.update(grads, state, params)


def formula(schedule: str, stages: int | tuple[int, ...], m: int) -> Any:
    """Return (microbatch, stage) -> version, by the rules of the papers, for m microbatches per batch.

    A stage that works on i microbatches at a time has applied the whole batches up to microbatch k - i at its forward
    of microbatch k. Without replicas, i is n - s at stage s of n.
    """
    number = in_flight(stages)
    return {
        "pipedream": lambda k, s: (k - number[s] + 1) // m,
        "pipedream_vertical_sync": lambda k, _s: (k - number[0] + 1) // m,
        "pipedream_2bw": lambda k, _s: k // m - 1,
    }[schedule]


def num_updates(stages: int | tuple[int, ...], m: int, stage: int, num_steps: int) -> int:
    """Return the number of updates of a stage in the first steps, each of which lasts 2 m clocks.

    With i microbatches in flight, the backward of microbatch k is at clock 2 k + s + 2 i - 1.
    """
    first = 2 * (m - 1) + stage + 2 * in_flight(stages)[stage] - 1
    return max((2 * m * num_steps - 1 - first) // (2 * m) + 1, 0)


def train(strategy: Strategy[Any], state: Any, task: Task, first: int, last: int) -> tuple[Any, list[Any]]:
    metrics = []
    for number in range(first, last):
        state, of_step = strategy.step(state, strategy.place(make_batch(task, number)))
        metrics.append(jax.device_get(of_step))
    return state, metrics


def bounds_of(strategy: Strategy[Any]) -> tuple[int, ...]:
    return staged_state(strategy).stages.bounds


def argument_bytes(program: CompiledProgram) -> int:
    analysis = program.compiled.memory_analysis()
    assert analysis is not None
    return int(analysis.argument_size_in_bytes)


def host(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)


@functools.cache
def recurrence(
    schedule: str, n: int | tuple[int, ...], m: int, task: Task, bounds: tuple[int, ...], num_batches: int = BATCHES
) -> Recurrence:
    problem = make_problem(make_config(task, *settings(schedule, n, m)), task)
    result = Recurrence(problem, bounds, start(task), m)
    for number in range(num_batches):
        result.batch(formula(schedule, n, m), make_batch(task, number))
    return result


def errors(got: Canonical, expected: Recurrence, n: int | tuple[int, ...], m: int, num_steps: int) -> dict[str, float]:
    """Return the relative error of each array of the newest weights."""
    result: dict[str, float] = {}
    for stage, versions in enumerate(expected.versions):
        for name, layer in versions[num_updates(n, m, stage, num_steps)].items():
            actual = named(got["params"][name])
            result |= {f"{name}{path}": relative_error(actual[path], x) for path, x in named(layer).items()}
    return {name: of for name, of in result.items() if "['key']['bias']" not in name}  # whose gradients are rounding


CASES: list[tuple[str, int | tuple[int, ...], int, Task, int]] = [
    ("pipedream", 4, 1, SGD, 1),
    ("pipedream", 4, 1, ADAMW, 2),
    ("pipedream", 3, 2, ADAMW, 1),
    ("pipedream_vertical_sync", 4, 1, ADAMW, 1),
    ("pipedream_vertical_sync", 2, 1, SGD, 2),
    ("pipedream_2bw", 4, 4, SGD, 1),
    ("pipedream_2bw", 2, 4, ADAMW, 2),
    ("pipedream", (2, 1), 2, ADAMW, 2),
    ("pipedream", (1, 2, 1), 4, SGD, 1),
    ("pipedream_vertical_sync", (2, 1), 2, MLP, 1),
    ("pipedream_2bw", (2, 1), 4, ADAMW, 1),
    ("pipedream", 4, 1, MLP, 2),
]


FAST = CASES[-3::2]


@pytest.mark.parametrize("more", [(), (DISPATCH,)], ids=["lockstep", "dispatch"])
@pytest.mark.parametrize(
    ("schedule", "n", "m", "task", "replicas"),
    slow_except(FAST, CASES),
    ids=str,
)
def test_equals_the_recurrence(
    schedule: str, n: int | tuple[int, ...], m: int, task: Task, replicas: int, more: tuple[str, ...]
) -> None:
    strategy = make(task, *settings(schedule, n, m, replicas, *more))
    state, metrics = train(strategy, strategy.from_canonical(start(task)), task, 0, BATCHES)
    got = host(strategy.to_canonical(state))
    expected = recurrence(schedule, n, m, task, bounds_of(strategy))
    wrong = {name: of for name, of in errors(got, expected, n, m, BATCHES).items() if of >= 1e-6}
    assert not wrong
    assert got["step"] == BATCHES
    # Each microbatch counts once, in the step in which it reaches the last stage.
    last = [number for number in range(BATCHES * m) if 2 * number + len(in_flight(n)) - 1 < 2 * m * BATCHES]
    weights = np.array([make_batch(task, number)["weights"].sum() for number in range(BATCHES)])
    losses = sum(float(expected.losses[number]) * weights[number // m] for number in last)
    np.testing.assert_allclose(sum(float(of.sums.loss) for of in metrics), losses, rtol=1e-6)
    assert all(of.finite for of in metrics)
    kernels = [of["params"]["head"]["classifier"]["kernel"] for of in (got, start(task))]
    assert relative_error(*kernels) > 1e-3  # the run trains


@pytest.mark.slow
def test_without_stashing_the_gradient_is_wrong() -> None:
    """A backward at newer weights than its forward computes no gradient. Weight stashing makes the difference."""
    found = {}
    for schedule in ("pipedream", "pipedream_without_stashing"):
        strategy = shared(SGD, *settings(schedule, 4, 1))
        state, _ = train(strategy, strategy.from_canonical(start(SGD)), SGD, 0, BATCHES)
        expected = recurrence("pipedream", 4, 1, SGD, bounds_of(strategy))
        by_array = errors(host(strategy.to_canonical(state)), expected, 4, 1, BATCHES)
        found[schedule] = max(of for name, of in by_array.items() if not name.startswith("head"))
    assert found["pipedream"] < 1e-6
    assert found["pipedream_without_stashing"] > 1e-4


@pytest.mark.parametrize(
    ("schedule", "more"),
    [("pipedream", ()), slow(("pipedream_2bw", ())), ("pipedream", (DISPATCH,)), slow(("pipedream_2bw", (DISPATCH,)))],
)
def test_resumes_bitwise(schedule: str, more: tuple[str, ...]) -> None:
    """The batches in flight and the stashed versions are private state."""
    strategy = shared(SHALLOW, *settings(schedule, 2, 2, 1, *more))
    state, _ = train(strategy, strategy.from_canonical(start(SHALLOW)), SHALLOW, 0, 5)
    saved = host((strategy.to_canonical(state), strategy.to_private(state)))
    state, _ = train(strategy, state, SHALLOW, 5, 9)
    whole = host((strategy.to_canonical(state), strategy.to_private(state)))
    again, _ = train(strategy, strategy.from_canonical(*saved), SHALLOW, 5, 9)
    assert_bitwise_equal(host((strategy.to_canonical(again), strategy.to_private(again))), whole)


def test_the_private_state_depends_on_what_is_stashed() -> None:
    """Another kernel of attention saves other values, which cannot be restored."""
    keys = [
        plan_of(SGD, *settings("pipedream", 2, 1, 1, f"--config.model.attention={kernel}")).private_key
        for kernel in ("xla", "batched")
    ]
    assert [name for name in keys[0] if keys[0][name] != keys[1][name]] == ["arrays"]


@pytest.mark.parametrize("more", [(), (DISPATCH,)], ids=["lockstep", "dispatch"])
def test_other_strategies_resume_from_the_newest_weights(more: tuple[str, ...]) -> None:
    strategy, single = shared(SHALLOW, *settings("pipedream", 2, 2, 1, *more)), make(SHALLOW)
    assert_survives(strategy, start(SHALLOW))
    state, _ = train(strategy, strategy.from_canonical(start(SHALLOW)), SHALLOW, 0, 5)
    saved = host(strategy.to_canonical(state))
    expected = recurrence("pipedream", 2, 2, SHALLOW, bounds_of(strategy), 5)
    assert max(errors(saved, expected, 2, 2, 5).values()) < 1e-6
    assert_bitwise_equal(host(single.to_canonical(single.from_canonical(saved))), saved)
    batch = make_batch(SHALLOW, 7)
    sums = [of.evaluate(of.from_canonical(saved), of.place(batch)) for of in (strategy, single)]
    np.testing.assert_allclose(float(sums[0].loss), float(sums[1].loss), rtol=1e-6)
    evaluated = strategy.evaluate(state, strategy.place(batch))
    assert float(evaluated.loss) == float(sums[0].loss)
    # Without its private state, the pipeline starts empty: no stage has an update in the first step.
    state, metrics = train(strategy, strategy.from_canonical(saved), SHALLOW, 5, 6)
    assert float(metrics[0].grad_norm) == 0
    assert_bitwise_equal(host(strategy.to_canonical(state)), saved | {"step": np.array(6, np.int32)})


@pytest.mark.parametrize("more", [(), (DISPATCH,)], ids=["lockstep", "dispatch"])
def test_shorter_batches_are_padded(more: tuple[str, ...]) -> None:
    strategy = shared(BERT, *settings("pipedream", 2, 1, 1, *more))
    states = []
    for short in (False, True):
        state = strategy.from_canonical(start(BERT))
        for number in range(6):
            batch = make_batch(BERT, number)
            batch["mask"][:, LENGTH - 2 :], batch["inputs"][:, LENGTH - 2 :] = False, 0
            if short and number % 2:
                batch |= {name: batch[name][:, : LENGTH - 2] for name in ("mask", "inputs")}
            state, _ = strategy.step(state, strategy.place(batch))
        states.append(host(strategy.to_canonical(state)))
    assert_bitwise_equal(*states)


@pytest.mark.parametrize("more", [(), (DISPATCH,)], ids=["lockstep", "dispatch"])
def test_a_gradient_that_is_not_finite_skips_its_updates(more: tuple[str, ...]) -> None:
    strategy = shared(MLP, *settings("pipedream", 4, 1, 1, *more))
    state, finite = strategy.from_canonical(start(MLP)), []
    for number in range(12):
        batch = make_batch(MLP, number)
        if number == 4:
            batch["weights"][:] = np.nan
        state, metrics = strategy.step(state, strategy.place(batch))
        finite.append(bool(metrics.finite))
    assert finite.count(False) >= 2  # its loss, and the updates of its stages, in several steps
    assert all(finite[:4])
    assert all(finite[-4:])
    assert all(np.isfinite(x).all() for x in named(strategy.to_canonical(state)["params"]).values())


@pytest.mark.parametrize(("schedule", "n", "m", "kept"), [("pipedream", 4, 1, 4), ("pipedream_2bw", 4, 4, 2)])
def test_the_compiled_program_keeps_so_many_versions(schedule: str, n: int, m: int, kept: int) -> None:
    """A device holds as many versions as the stage with the most, because all devices run one program."""
    strategy = shared(MLP, *settings(schedule, n, m))
    [program] = strategy.compile()
    flush = shared(MLP, *settings("1f1b", n, max(m, 2)))
    [flushing] = flush.compile()
    packed = staged_state(strategy).params.packing.nbytes
    extra = argument_bytes(program) - argument_bytes(flushing)
    memory = strategy.plan.memory[0]
    assert memory["parameters"] == kept * packed
    in_flight = memory["gradients"] + memory["stashes"] + memory["transfers"] + memory["batches"]
    assert abs(extra - ((kept - 1) * packed + in_flight)) < 2000  # the arrays of the table


@pytest.mark.parametrize(
    ("task", "overrides", "message"),
    [
        (
            Task("gpt", "causal_lm"),
            settings("pipedream", 2, 1),
            r"config\.pipeline\.schedule is 'pipedream', whose stages are at different batches, so head cannot share",
        ),
        (
            SGD,
            settings("pipedream", 2, 1, 2, "--config.exchange=horovod"),
            r"config\.exchange_options\.algorithm is None; it must be 'psum' with exchange 'horovod' and",
        ),
        (SGD, settings("pipedream", 1, 1), r"config\.mesh\.stage is 1, which is one stage; there must be at least two"),
        (SGD, settings("pipedream_2bw", 4, 2), r"config\.pipeline\.num_microbatches is 2; it must be at least 4"),
        (
            SGD,
            settings("pipedream", 2, 1, 1, "--config.pipeline.num_chunks=2"),
            r"config\.pipeline\.num_chunks is 2; it must be 1 for schedule pipedream",
        ),
    ],
)
def test_refused(task: Task, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(task, *overrides)


@pytest.mark.parametrize(
    ("exchange", "tolerance"),
    [
        slow(("byteps", 1e-6)),
        slow(("horovod --config.exchange_options.group=2", 1e-6)),
        slow(("horovod --config.exchange_options.wire_dtype=float8_e4m3fn", 0.1)),
        slow(("bagua_bytegrad", 0.1)),
        ("byteps_topk --config.exchange_options.min_compress_bytes=0 --config.exchange_options.ratio=0.5", 0.1),
    ],
)
@pytest.mark.parametrize("more", [(), (DISPATCH,)], ids=["lockstep", "dispatch"])
def test_compressed_gradients_between_replicas(exchange: str, tolerance: float, more: tuple[str, ...]) -> None:
    """Every exchange without a ring works, with its residuals."""
    strategy = make(SHALLOW, *settings("pipedream", 2, 1, 2, *f"--config.exchange={exchange}".split(), *more))
    state, metrics = train(strategy, strategy.from_canonical(start(SHALLOW)), SHALLOW, 0, 4)
    assert all(of.finite for of in metrics)
    expected = recurrence("pipedream", 2, 1, SHALLOW, bounds_of(strategy), 4)
    by_array = errors(host(strategy.to_canonical(state)), expected, 2, 1, 4)
    assert max(by_array.values()) < tolerance


def test_every_schedule_has_a_reason() -> None:
    for name in CONTINUOUS:
        per_batch = 2 if name == "pipedream_2bw" else 1
        plan = plan_of(MLP, *settings(name, 2, per_batch))
        assert plan.differs == CONTINUOUS[name].reason
        assert plan.delays is not None
        assert plan.delays.differs == ""
        assert plan.private_key["schedule"] == name
    plan = plan_of(
        MLP,
        *settings(
            "pipedream", 2, 1, 2, "--config.exchange=byteps_topk", "--config.exchange_options.min_compress_bytes=0"
        ),
    )
    assert plan.delays is not None
    assert plan.delays.differs == "byteps_topk sends only part of the gradients in each step"
    assert plan.differs == f"{CONTINUOUS['pipedream'].reason}; {plan.delays.differs}"
    assert plan_of(MLP, *settings("1f1b", 2, 2)).delays is None


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_vertical_sync", "pipedream_2bw"])
def test_delays_are_those_of_the_recurrence(schedule: str) -> None:
    for n, m in itertools.product(range(2, 6), range(1, 9)):
        if m < fewest_microbatches(schedule, [1] * n):
            continue
        version, batch = formula(schedule, n, m), 2 * n  # late enough that all versions exist
        delays = stage_delays(periodic_table(schedule, [1] * n, m), [[f"layer_{stage}"] for stage in range(n)])
        for stage, of in enumerate(delays):
            assert of.layers == (f"layer_{stage}",)
            assert [batch - lag for lag in of.lags] == [version(batch * m + j, stage) for j in range(m)]
            assert list(of.computed_after) == [(2 * j + stage) // (2 * m) for j in range(m)]  # steps of 2 m clocks
            for num_steps in range(4 * n):
                assert num_updates(n, m, stage, num_steps) == max(num_steps - of.updated_after, 0)
