"""The context axis in the planner: which sizes are candidates, and their costs against sums by hand and plans."""

import copy
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar import cluster as clusters
from jaxpar import strategies
from jaxpar.choose import planner, report
from jaxpar.choose.auto import check_kept, kept_settings
from jaxpar.choose.candidates import Candidate, Space, with_settings
from jaxpar.choose.costs.machine import GpuMachine, SharedCores, axis_groups
from jaxpar.choose.costs.step import HIDDEN_BETWEEN_PRODUCTS
from jaxpar.choose.costs.traced_layers import TracedLayers
from jaxpar.choose.groups import LEAST_POSITIONS, context_sizes
from jaxpar.choose.replicas import of_replicas
from jaxpar.cluster import Cluster
from jaxpar.core.context import part_shapes
from jaxpar.core.mesh import CONTEXT, DATA, STAGE, TENSOR
from jaxpar.core.plan import Traffic
from jaxpar.errors import UserError
from jaxpar.measure.operations import ATTENTION_KERNEL, PRODUCT, operations
from tests.choose.test_planner import costs_of_replicas, layer
from tests.choose.test_tensor_plans import GPT, HOST, INNER, TEXTS, TOKENS, WIDTH, space_of

HEADS, KV_WIDTH = 4, WIDTH // 2


@pytest.fixture(scope="module")
def space() -> Space:
    """A GPT with four heads, and two of keys and values, on two hosts of two H100s."""
    return space_of(clusters.named_cluster("h100", 4, num_processes=2))


@pytest.fixture(scope="module")
def found(space: Space) -> list[Candidate]:
    kept = {"mesh.context": 2, "model.remat": "none", "model.scan_layers": False}
    return list(of_replicas(space._replace(kept=kept)))


def with_texts(space: Space, number: int) -> Space:
    """Return a space whose texts have this number of positions."""
    batch = dict(space.problem.batch, inputs=jax.ShapeDtypeStruct((TEXTS, number), np.int32))
    return space._replace(problem=space.problem._replace(batch=batch))


@pytest.mark.parametrize("kernel", ["xla", "cudnn"])
def test_kernel(kernel: str) -> None:
    """Attention to whole texts has the kernel that the config names."""
    space = space_of(clusters.named_cluster("h100", 4), f"model.attention={kernel}", "model.dtype=bfloat16")
    layers = space.layers.in_group(1, 2)
    assert isinstance(layers, TracedLayers)
    kinds = {kind for of in layers._kernels("none", 2).values() for one in of for kind, *_ in one._kinds}
    assert (ATTENTION_KERNEL in kinds) == (kernel == "cudnn")


def test_sizes(space: Space) -> None:
    """Long texts of models that can divide them, on one host."""
    long = with_texts(space, LEAST_POSITIONS)
    assert context_sizes(with_texts(space, LEAST_POSITIONS - 1)) == [1]
    assert context_sizes(long) == [1, 2]
    one_host = replace(space.machine.cluster, num_processes=1)
    assert context_sizes(long._replace(machine=GpuMachine(one_host))) == [1, 2, 4]
    whole = copy.copy(space.problem.model)
    whole.tensor = None
    assert context_sizes(long._replace(problem=long.problem._replace(model=whole))) == [1]
    entities = copy.copy(space.problem.task)
    object.__setattr__(entities, "head", "token")
    assert context_sizes(long._replace(problem=long.problem._replace(task=entities))) == [1]
    cpus = Cluster(num_devices=4, num_processes=1, device_kind="cpu", platform="cpu", memory_bytes=None)
    assert context_sizes(long._replace(machine=SharedCores(cpus))) == [1]


def test_groups_of_all_axes() -> None:
    """The devices of a tensor axis are neighbours, and those of a context axis belong to one replica."""
    assert axis_groups(TENSOR, 2, 1, 2, 2) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert axis_groups(CONTEXT, 2, 1, 2, 2) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert axis_groups(DATA, 2, 1, 2, 2) == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_a_device_has_some_positions(space: Space) -> None:
    batch = part_shapes({**space.problem.batch, "labels": np.zeros(TEXTS), "weights": np.zeros(TEXTS)}, 3)
    assert {name: x.shape for name, x in batch.items()} == {
        "inputs": (TEXTS, 12),  # 32 positions and 4 of padding, for chunks of equal length
        **dict.fromkeys(("index", "labels", "weights"), (TEXTS,)),
    }
    whole, part, both = space.layers, space.layers.in_group(1, 2), space.layers.in_group(2, 2)
    assert part is space.layers.in_group(1, 2)  # what is traced is kept
    for number in (0, 1):
        output, weights = (
            [getattr(layers.profile(4, "none")[number], name) for layers in (whole, part, both)]
            for name in ("output_bytes", "weight_bytes")
        )
        assert output == [output[0], output[0] / 2, output[0] / 4]
        assert weights[0] == weights[1] > weights[2]


@pytest.mark.parametrize("context", [2, 4])
def test_products(space: Space, context: int) -> None:
    """By hand: products of a device's positions, and the scores of 2 c + 1 pairs of chunks, two products of each."""
    layers, texts = space.layers.in_group(1, context), 4
    programs = layers._programs(texts, "none", 2).programs
    count: Any = lambda phase, saved: operations(  # noqa: E731
        lambda inputs, saved: programs.run(1, phase, inputs, saved), programs.programs[1].inputs, saved
    )
    found = layers._traced(count, 0, {})
    chunk, num_pairs = TOKENS // (2 * context), 2 * context + 1
    dense = 2 * texts * (TOKENS // context) * (2 * WIDTH * WIDTH + 2 * WIDTH * KV_WIDTH + 2 * WIDTH * INNER)
    scores = 2 * 2 * texts * num_pairs * chunk * chunk * WIDTH
    assert sum(one.flops * one.calls for one in found if one.kind == PRODUCT) == dense + scores


def test_attention_holds_the_keys_of_whole_texts(space: Space) -> None:
    """By hand: gathered keys and values and their gradients, gradients of a device's positions, scores, and parts."""
    texts, context = 4, 2
    chunk = TOKENS // (2 * context)
    [embed, block, *_, head] = space.layers.in_group(1, context).residuals(texts, "none")
    whole = 4 * texts * (4 * TOKENS * KV_WIDTH + 2 * (TOKENS // context) * WIDTH)
    scores = 4 * texts * HEADS * chunk * chunk
    parts = 4 * texts * chunk * (4 * WIDTH + 8 * KV_WIDTH)  # of queries, and of keys and values
    assert whole + 5 * scores <= block.chunked <= whole + 5 * scores + parts
    assert (embed.chunked, head.chunked) == (0, 0)
    assert block.looped == 0  # unlike a loss over a vocabulary in a loop
    more = space.layers.in_group(1, context).residuals(3 * texts, "none")[1]
    assert more.chunked == pytest.approx(3 * block.chunked, rel=0.01)
    assert not any(of.chunked for of in space.layers.residuals(texts, "none"))


def test_keys_and_values_of_whole_texts_are_kept(space: Space) -> None:
    """By hand, in float32; not if they are gathered again. A lookup gathers none."""
    group, whole = space.layers.in_group(1, 2), 2 * 4 * TEXTS * TOKENS * KV_WIDTH
    assert [group._gathered_texts(TEXTS, number) for number in (0, 1)] == [0, whole]
    for remat, kept in (("none", whole), ("full", 0)):
        found, alone = group.residuals(TEXTS, remat)[1], group._residual(TEXTS, remat, 1)
        assert found.fused - alone.fused == kept


def test_gradients_are_summed_during_the_backward_pass() -> None:
    """Unlike keys and values, for which attention waits."""
    axes, machine = {DATA: 1, STAGE: 1, CONTEXT: 4}, GpuMachine(clusters.named_cluster("h100", 4))
    sent, grads = (
        Traffic("all-gather", "bfloat16", CONTEXT, 0.05 * HOST, 12),
        Traffic("all-reduce", "float32", CONTEXT, 0.05 * HOST, 600),
    )
    between, reduce = (machine.collective(one, axes) for one in (sent, grads))
    costs = costs_of_replicas([layer(0.01)] * 10, machine, axes, [sent, grads])
    assert costs.exposed == pytest.approx((1 - HIDDEN_BETWEEN_PRODUCTS) * between + reduce / 100)
    assert costs.seconds == pytest.approx(0.3 + costs.exposed)


def test_names_and_settings(space: Space, found: list[Candidate]) -> None:
    names = {one.name for one in found}
    assert {"ddp, context 2 x 2 replicas", "zero3, context 2 x 2 replicas"} <= names
    assert not any("tensor" in name for name in names)  # its groups would be on two hosts
    assert {(one.settings["mesh.context"], one.settings["mesh.data"]) for one in found} >= {(2, 2)}
    assert report.changes(found[0].settings)["mesh.context"] == 2
    both = {"mesh.tensor": 2, "mesh.context": 2, "model.remat": "none", "model.scan_layers": False}
    one_host = space._replace(machine=GpuMachine(replace(space.machine.cluster, num_processes=1)))
    of_both = [one.name for one in of_replicas(one_host._replace(kept=both))]
    assert of_both == [f"{name}, tensor 2, context 2" for name in ("single", "zero2, offload", "zero3, offload")]


def test_candidates_need_what_their_plans_need(space: Space, found: list[Candidate]) -> None:
    """The costs are those of the plan, in which a layer gathers two arrays, forward and backward."""
    for one in found:
        config = with_settings(space.config, one.settings)
        plan = strategies.plan(config, space.problem, space.machine.cluster)
        again = planner.candidate_of_plan(space, config, plan)
        assert (again.name, again.costs) == (one.name, one.costs)
        assert sum(plan.memory[0].values()) < one.costs.nbytes
        sent = {of.kind: of for of in plan.traffic if of.axis == CONTEXT}
        keys = TEXTS // plan.num_replicas * TOKENS * KV_WIDTH * 4 // plan.axes.get(TENSOR, 1)
        assert (sent["all-gather"].messages, sent["all-gather"].nbytes) == (2 * 4, 2 * 4 * keys / 2)
        assert (sent["reduce-scatter"].messages, sent["reduce-scatter"].nbytes) == (2 * 2, 2 * 2 * keys / 2)


def test_what_the_user_set_is_kept(space: Space) -> None:
    config = copy.deepcopy(space.config)
    config.mesh.context = 2
    assert kept_settings(config)["mesh.context"] == 2
    check_kept({"mesh.data": 2, "mesh.context": 2}, 4)
    with pytest.raises(UserError, match=r"^config\.mesh\.tensor is 2 and config\.mesh\.context is 3; their product"):
        check_kept({"mesh.tensor": 2, "mesh.context": 3}, 4)
    kept = {"mesh.context": 2, "mesh.tensor": 1, "model.remat": "none", "model.scan_layers": False}
    assert {one.settings["mesh.context"] for one in planner.candidates(space._replace(kept=kept))} == {2}
    assert GPT.length < LEAST_POSITIONS
