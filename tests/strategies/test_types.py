"""Types of a training step: with check_vma=True, `shard_map` proves which results are equal on all devices.

A value that still owes a sum over replicas varies between them, and its type shows that. So a step in which a sum is
missing cannot return parameters that are equal on all replicas: it fails when it is traced, before anything runs. The
package itself passes check_vma=False, because JAX cannot prove this of all steps (UNTYPED).

Here, every step of the table of cases that is one `shard_map` is traced with types. In pipelines, only the stage
programs are replaced, by functions whose results have the same shapes and depend on all of their inputs: they are
traced without a mesh, before types are known, and contain no collectives.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from jaxpar import cluster, strategies
from jaxpar.core.step import Problem
from jaxpar.exchange import reduce
from jaxpar.strategies.pipeline.executor.stage_programs import StagePrograms
from jaxpar.strategies.pipeline.executor.state import StagedState
from tests.selection import slow_except
from tests.strategies import cases, pipelines
from tests.strategies.cases import CASES, EXACT, LOSSY
from tests.strategies.pipelines import Task

EQUAL = "which require replication which can't be statically inferred"
GROUPS = "JAX has no types for collectives within groups of an axis"
RING = "each replica ends a ring of messages with the same array, but JAX cannot know that"
# Cases of the table whose equal results JAX cannot prove to be equal: the error, and why.
UNTYPED: dict[str, tuple[type[Exception], str | None, str]] = {
    "ddp, groups": (NotImplementedError, None, GROUPS),
    "1f1b, 1,2,1 devices": (NotImplementedError, None, GROUPS),
    "hsdp": (NotImplementedError, None, GROUPS),
    "byteps_onebit in groups": (ValueError, EQUAL, GROUPS),
    "horovod": (ValueError, EQUAL, RING),
    "1f1b, horovod": (ValueError, EQUAL, RING),
    "horovod, 2 passes": (TypeError, "cond branches must have equal output types", RING),
    "horovod_adasum": (ValueError, EQUAL, RING),
    "powersgd": (
        TypeError,
        "cond branches must have equal output types",
        "its factors are equal on all replicas, but private state has the type of values that differ",
    ),
}
# Not one `shard_map`: XLA inserts the sums, they are `pmap`'s, or the programs run one by one.
OTHERS = {"single", "single, 4 microbatches", "single, scan, remat", "sharding", "sharding, 2 microbatches", "pmap"}
OTHERS |= {name for name in EXACT | LOSSY if "dispatched" in name} | {"dp", "async of 1", "sync", "swarm"}
TYPED = (EXACT | LOSSY).keys() - OTHERS - UNTYPED.keys()
PRNG_KEY = jax.dtypes.prng_key


def dependent(self: StagePrograms, number: int, phase: int, inputs: Any, saved: Any) -> Any:
    """Do what `StagePrograms.run` does, but return zeros that depend on all inputs."""
    program = self.programs[number]
    arrays = [x for x in jax.tree.leaves((inputs, list(saved.values()))) if x.size]
    numbers = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, PRNG_KEY) else x for x in arrays]
    zero = sum((x.ravel()[0].astype(jnp.float32) * 0 for x in numbers), jnp.zeros(()))

    def like(x: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(x.dtype, PRNG_KEY):
            return jax.random.wrap_key_data(jnp.zeros((*x.shape, 2), jnp.uint32) + zero.astype(jnp.uint32))
        return (jnp.zeros(x.shape) + zero).astype(x.dtype)

    made = {key: [like(x) for x in values] for key, values in program.cut.saved.items() if key[0] == phase}
    return jax.tree.map(like, program.outputs[phase]), made


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all `shard_map`s check types, and compile nothing."""
    shard_map = jax.shard_map
    monkeypatch.setattr(jax, "shard_map", lambda *args, **options: shard_map(*args, **{**options, "check_vma": True}))
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered, *_, **__: lowered)
    monkeypatch.setattr(StagePrograms, "run", dependent)


def trace(config: ConfigDict, problem: Problem) -> None:
    """Trace a step, from shapes."""
    plan = pipelines.plan_on(config, problem, cluster.find_cluster())
    assert len(strategies.build(plan, problem, cluster.devices()).compile()) == 1


def trace_case(name: str) -> None:
    """Trace the step of a case of the table."""
    trace(cases.config(name), cases.problem(name))


def test_the_table_is_complete() -> None:
    assert set() == UNTYPED.keys() - CASES.keys() == OTHERS - CASES.keys()
    assert len(TYPED) > 20


SOME = ["ddp, 3 replicas", "byteps", "zero1", "zero3", "gpipe", "zb_h1", "1f1b, zero1", "byteps_onebit", "onebit_adam"]


@pytest.mark.usefixtures("typed")
@pytest.mark.parametrize("name", slow_except(SOME, sorted(TYPED)))
def test_equal_results_are_proved_to_be_equal(name: str) -> None:
    trace_case(name)


@pytest.mark.usefixtures("typed")
def test_a_pipeline_that_never_drains_has_types() -> None:
    task = Task("bert", "classification")
    config = pipelines.make_config(task, *pipelines.pipeline("pipedream", 2, replicas=2))
    trace(config, pipelines.make_problem(config, task))


@pytest.mark.usefixtures("typed")
@pytest.mark.parametrize("name", slow_except(["ddp, groups", "horovod", "powersgd"], UNTYPED))
def test_what_jax_cannot_prove(name: str) -> None:
    """If a test fails because the step has types, remove the case from UNTYPED."""
    kind, message, _ = UNTYPED[name]
    with pytest.raises(kind, match=message):
        trace_case(name)


@pytest.mark.usefixtures("typed")
@pytest.mark.parametrize("name", ["ddp, 3 replicas", "gpipe"])
def test_a_missing_sum_has_the_wrong_type(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(_axis: Any, **_options: Any) -> reduce.Reducer:
        return reduce.Reducer(lambda _length, _key: (), lambda x, state: (x, state), lambda _length, _dtype: [])

    monkeypatch.setattr(reduce, "psum", identity)
    with pytest.raises(ValueError, match=EQUAL):
        trace_case(name)


@pytest.mark.usefixtures("typed")
def test_a_gradient_without_an_exchange_has_the_wrong_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedState, "exchanged", lambda _self, grads, residuals, _norm: (grads, residuals))
    with pytest.raises(ValueError, match=EQUAL):
        trace_case("gpipe")
