"""The memory of a step on a CPU: sums by hand, and the compiled step."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar import cluster as clusters
from jaxpar import models, strategies
from jaxpar.analysis.planner import cpu_memory, search
from jaxpar.choose.candidates import Space
from jaxpar.choose.costs.layers import TracedLayers, of_share
from jaxpar.choose.costs.step import StateBytes
from jaxpar.choose.replicas import of_replicas
from jaxpar.measure.early_memory import PassMemory
from jaxpar.state import nbytes
from jaxpar.tasks import Sums, classification
from jaxpar.tasks.token_logits import TokenLogits
from scripts.bench import planned_memory as script
from tests.models.small import CPU, TEXT, small_config
from tests.strategies.pipelines import Task, make

PASSES = [PassMemory(5, 6), PassMemory(10, 40), PassMemory(0, 33)]
WEIGHTS = [3.0, 2.0, 1.0]


def test_the_backward_pass() -> None:
    """Last layer: 5 + 10 held, and its peak. The one before: 5 held, its peak of 40, the gradient of the last one."""
    assert cpu_memory.backward_bytes(PASSES, WEIGHTS) == 15 + 33
    assert cpu_memory.backward_bytes([*PASSES[:2], PassMemory(0, 20)], WEIGHTS) == 5 + 40 + 1
    assert cpu_memory.backward_bytes([PassMemory(5, 60), *PASSES[1:]], WEIGHTS) == 60 + 2 + 1


@pytest.mark.parametrize(
    ("is_accumulated", "updated", "expected"),
    [
        (False, 7, 10 + 20 + (100 + 48)),
        (True, 7, 10 + 20 + (7 + 100 + 48)),  # besides the gradients of other microbatches
        (False, 500, 10 + 20 + (7 + 500)),  # the update needs more than the backward pass
    ],
)
def test_replicas(is_accumulated: bool, updated: float, expected: float) -> None:
    state = StateBytes(10, 20, 7)
    nbytes = cpu_memory.cpu_replica_bytes(
        PASSES, WEIGHTS, state, is_accumulated=is_accumulated, copies=100, updated=updated
    )
    assert nbytes == expected


def test_pipelines() -> None:
    """Stages of one and two layers; in the second one, a layer keeps 10 while the other needs 33, or 4 and 40."""
    state = StateBytes(10, 20, 7)
    assert cpu_memory.cpu_pipeline_bytes(PASSES, [5, 10, 4], WEIGHTS, (0, 1, 3), 1000, state) == 37 + 1000 + 44 + 3


def test_copies_of_parameters() -> None:
    """A scan stacks the three blocks; zero3 copies arrays from vectors, but not those that fill one."""
    model = models.build(small_config("gpt", "causal_lm"), TEXT._replace(num_classes=0), CPU)
    blocks = sum(nbytes(model.shapes[f"block_{number}"]) for number in range(3))
    assert cpu_memory.stacked_bytes(model) == 2 * blocks
    whole, table = nbytes(model.shapes), nbytes(model.shapes["embed"]["tokens"])
    large = [nbytes(array) for array in jax.tree.leaves(model.shapes) if nbytes(array) >= table]
    assert cpu_memory.gathered_bytes(model, 10**9) == 2 * whole
    assert cpu_memory.gathered_bytes(model, table) == 2 * whole - sum(large)


def test_tied_embeddings_need_no_zeros() -> None:
    model = models.build(small_config("gpt", "causal_lm"), TEXT._replace(num_classes=0), CPU)
    table = nbytes(model.shapes["embed"]["tokens"])
    before = [PassMemory(table + 5, table + 7)] + [PassMemory(1, 2)] * (len(model.layers) - 1)
    assert cpu_memory.without_zeros(before, model) == [PassMemory(5, 7), *before[1:]]


def test_the_loss_of_a_share_is_computed_in_the_chunks_of_the_batch() -> None:
    """A share of 2 texts of 256 tokens has logits of 102 MB, and the batch of 8 shares 819 MB, in chunks of 268 MB."""
    tokens, seen = jnp.zeros((50_000, 1)), list[int]()

    def sums(outputs: TokenLogits, _batch: Any) -> Sums:
        seen.append(outputs.num_chunks)
        return Sums(0, {}, 0)

    task = dataclasses.replace(classification.TASK, sums=sums)
    for number in (1, 8, 1):
        of_share(task, number).sums(TokenLogits(jnp.zeros((2, 256, 1)), tokens), {})
    assert seen == [1, 4, 1]


def test_moments_are_updated_in_place() -> None:
    """The update of a step copies no moments, so that they are not in memory twice."""
    for settings in ((), ("--config.exchange=zero1",)):
        strategy = make(Task("mlp", "classification", "adamw", layers=2), "--config.strategy=data_parallel", *settings)
        (program,) = strategy.compile()
        text = program.compiled.as_text()
        assert text is not None
        assert not re.findall(r" = f32\[\d+,\d+\]\S* copy\(", text.partition("ENTRY")[2])


def test_a_config_of_the_user_needs_what_the_same_candidate_needs() -> None:
    cluster, case = clusters.find_cluster(), script.Case(64, 16, 512, ("model.size=tiny",))
    problem = script.make_problem(script.configured(case, ()), case, cluster)
    layers = TracedLayers(problem, clusters.named_cluster("h100", cluster.num_devices))  # times are not compared
    for name in ("ddp", "zero1", "zero3"):
        config = script.configured(case, script.CONFIGS[name])
        space = Space(config, problem, layers, script.cpu_machine(cluster), 1e12, {"model.remat": "none"})
        own = search.candidate_of_plan(space, config, strategies.plan(config, problem, cluster))
        assert own.costs.nbytes in [one.costs.nbytes for one in of_replicas(space) if one.name == name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "ddp, remat full", "zero1", "1f1b 2 x 4", "zb_h1 2 x 4"])
def test_equals_the_compiled_step(name: str) -> None:
    """The error is that of documented benchmarks, with another model."""
    cluster, devices = clusters.find_cluster(), clusters.devices()
    case = script.Case(64, 64, 2048, ("model.size=tiny", "model.num_layers=3"))
    predicted, needed = script.compare(case, script.CONFIGS[name], cluster, devices, script.cpu_machine(cluster))
    assert predicted == pytest.approx(sum(needed.values()), rel=0.12)
