"""The tensor axis in the planner: which sizes are candidates, and their costs against sums by hand and plans."""

import copy
from typing import Any

import numpy as np
import pytest

from jaxpar import cluster as clusters
from jaxpar import strategies
from jaxpar.choose import planner, report
from jaxpar.choose.auto import check_kept, kept_settings
from jaxpar.choose.candidates import Candidate, Space, plan_of, with_settings
from jaxpar.choose.costs import updates
from jaxpar.choose.costs.layers import Layers, PartialLayers
from jaxpar.choose.costs.machine import GpuMachine, SharedCores, axis_groups
from jaxpar.choose.costs.memory import working_bytes
from jaxpar.choose.costs.rates import EFFICIENCY, HOP_SECONDS
from jaxpar.choose.costs.step import HIDDEN_BETWEEN_PRODUCTS, UpdateWork
from jaxpar.choose.costs.traced_layers import HELD_IN_GROUP, TracedLayers
from jaxpar.choose.groups import tensor_sizes
from jaxpar.choose.pipelines import of_pipelines
from jaxpar.choose.replicas import of_replicas, update_of
from jaxpar.cluster import Cluster
from jaxpar.core.mesh import DATA, STAGE, TENSOR
from jaxpar.core.plan import Traffic
from jaxpar.core.state import nbytes
from jaxpar.errors import UserError
from jaxpar.strategies.pipeline.tables.schedule import make_table
from scripts.bench import planned_memory as cases
from tests.choose.test_planner import costs_of_pipeline, costs_of_replicas, layer, work_of

TEXTS, TOKENS, WORDS, WIDTH, INNER = 8, 32, 512, 64, 256
GPT = cases.Case(
    TEXTS,
    TOKENS,
    WORDS,
    (
        *("task=causal_lm", "model.name=gpt", "model.num_layers=2", f"model.hidden_size={WIDTH}", "model.num_heads=4"),
        *("model.num_kv_heads=2", f"model.mlp_size={INNER}", "model.dropout=0.0", "model.attention=xla"),
    ),
)
H100 = clusters.named_cluster("h100", 16, num_processes=2)
HOST, NETWORK = (EFFICIENCY[name] * H100.send_rates[name] for name in ("host", "network"))


def space_of(cluster: Cluster, *settings: str, case: cases.Case = GPT, **kept: Any) -> Space:
    config = cases.configured(case, settings)
    problem = cases.make_problem(config, case, cluster)
    kept = {key.replace("_", ".", 1): value for key, value in kept.items()}
    return Space(config, problem, TracedLayers(problem, cluster), GpuMachine(cluster), 1e12, kept)


@pytest.fixture(scope="module")
def space() -> Space:
    """A GPT with four heads, and two of keys and values, on two hosts of two H100s."""
    return space_of(clusters.named_cluster("h100", 4, num_processes=2))


@pytest.fixture(scope="module")
def found(space: Space) -> list[Candidate]:
    kept = {"model.remat": "none", "model.scan_layers": False}
    return list(of_replicas(space._replace(kept=kept)))


def test_sizes(space: Space) -> None:
    """Groups are on one host, and each device has whole heads. Devices that share cores have none."""
    assert tensor_sizes(space) == [1, 2]

    def sizes(devices: int, hosts: int, *settings: str, case: cases.Case = GPT) -> list[int]:
        return tensor_sizes(
            space_of(clusters.named_cluster("h100", devices, num_processes=hosts), *settings, case=case)
        )

    assert sizes(8, 1) == [1, 2]  # two heads of keys and values
    assert sizes(8, 1, "model.num_kv_heads=4") == [1, 2, 4]
    assert sizes(16, 2, "model.num_heads=16", "model.num_kv_heads=16") == [1, 2, 4, 8]
    assert sizes(6, 2, "model.num_heads=16", "model.num_kv_heads=16") == [1]
    assert sizes(1, 1) == [1]
    without_parts = copy.copy(space.problem.model)
    without_parts.tensor = None
    assert tensor_sizes(space._replace(problem=space.problem._replace(model=without_parts))) == [1]
    cpus = Cluster(num_devices=4, num_processes=1, device_kind="cpu", platform="cpu", memory_bytes=None)
    assert tensor_sizes(space._replace(machine=SharedCores(cpus))) == [1]


def test_groups_are_neighbours() -> None:
    assert axis_groups(TENSOR, 2, 1, 4) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert axis_groups(DATA, 2, 1, 4) == ((0, 4), (1, 5), (2, 6), (3, 7))
    machine, sent = GpuMachine(H100), Traffic("all-reduce", "float32", DATA, 1e9, 2)
    axes = {DATA: 2, STAGE: 1, TENSOR: 8}
    assert machine.collective(sent, axes) == pytest.approx(1e9 / NETWORK + 2 * HOP_SECONDS["network"])
    within = sent._replace(axis=TENSOR, messages=14)
    assert machine.collective(within, axes) == pytest.approx(1e9 / HOST + 14 * HOP_SECONDS["host"])


def test_a_device_has_a_part_of_each_layer(space: Space) -> None:
    """By hand: columns and then rows of the kernels, half of the positions, and the whole norms and other biases."""
    part = space.layers.in_group(2).profile(4, "none")
    half, split = WIDTH // 2, INNER // 2
    attention = WIDTH * half + half + 2 * (WIDTH * half // 2 + half // 2) + half * WIDTH + WIDTH
    mlp = WIDTH * split + split + split * WIDTH + WIDTH
    assert part[1].weight_bytes == 4 * (attention + mlp + 4 * WIDTH)
    assert part[0].output_bytes == part[1].output_bytes == 4 * 4 * (TOKENS // 2) * WIDTH
    fused = [layers.residuals(4, "none")[1].fused for layers in (space.layers, space.layers.in_group(2))]
    assert fused[1] == pytest.approx(fused[0] / 2, rel=0.15)
    assert space.layers.in_group(1) is space.layers
    assert space.layers.in_group(2) is space.layers.in_group(2)  # what is traced is kept


def test_the_backward_pass_of_a_stage_holds_outputs_of_all_positions(space: Space) -> None:
    """Blocks on a tensor axis do, in float32, unless B computes them again."""
    alone, together = (space.layers.in_group(size).memory(4, "none", is_split=False) for size in (1, 2))
    whole = 4 * 4 * TOKENS * WIDTH
    assert [of.gathered for of in together] == [0.0, HELD_IN_GROUP * whole, HELD_IN_GROUP * whole, 0.0]
    again = space.layers.in_group(2).memory(4, "full", is_split=False)
    in_context = space.layers.in_group(1, 2).memory(4, "none", is_split=False)
    assert not any(of.gathered for of in (*alone, *again, *in_context))
    work = space.layers.in_group(2).work(4, "none", is_split=False)
    without = work._replace(memory=[of._replace(gathered=0.0) for of in work.memory])
    needed, less = (working_bytes(one, [(0, 2), (2, 4)], in_lockstep=True) for one in (work, without))
    assert needed - less == HELD_IN_GROUP * whole  # a stage has one of the blocks


def test_layers_with_large_products_take_their_share() -> None:
    """Products, attention and passes of blocks are divided by two; nothing is repeated."""
    large = cases.Case(16, 512, 4096, (*GPT.settings, "model.hidden_size=2048", "model.mlp_size=8192"))
    space = space_of(clusters.named_cluster("h100", 2), "model.dtype=bfloat16", case=large)
    whole, part = (layers.profile(32, "none")[1] for layers in (space.layers, space.layers.in_group(2)))
    assert part.forward_s == pytest.approx(whole.forward_s / 2, rel=0.15)
    assert part.backward_s == pytest.approx(whole.backward_s / 2, rel=0.15)  # reads gathered positions again


def test_layers_that_are_measured(space: Space) -> None:
    """Their times are divided equally."""

    class Measured(Layers):
        def seconds(self, _size: int, _remat: str) -> list[tuple[float, float]]:
            return [(1.0, 2.0)] * 4

    measured = Measured(space.problem).in_group(2)
    assert isinstance(measured, PartialLayers)
    assert measured.seconds(8, "none") == [(0.5, 1.0)] * 4
    assert measured.profile(8, "none")[1].weight_bytes == space.layers.in_group(2).profile(8, "none")[1].weight_bytes


def test_products_wait_for_three_of_five_collectives() -> None:
    """The backward pass hides at most its own time, and the exchange of gradients has the rest of it."""
    axes, machine = {DATA: 2, STAGE: 1, TENSOR: 4}, GpuMachine(clusters.named_cluster("h100", 8))
    sent = Traffic("all-gather", "float32", TENSOR, 0.05 * HOST, 3)
    between = machine.collective(sent, axes)
    costs = costs_of_replicas([layer(0.01)] * 10, machine, axes, [sent])
    assert costs.exposed == pytest.approx((1 - HIDDEN_BETWEEN_PRODUCTS) * between)
    assert costs.seconds == pytest.approx(0.3 + costs.exposed)
    short = costs_of_replicas([layer(1e-5)], machine, axes, [sent])
    assert short.exposed == pytest.approx(between - 2e-5)
    grads = Traffic("all-reduce", "float32", DATA, 0.19 * HOST, 200)
    both = costs_of_replicas([layer(0.01)] * 10, machine, axes, [sent, grads])
    hidden = HIDDEN_BETWEEN_PRODUCTS * between
    assert both.exposed == pytest.approx(between - hidden + machine.collective(grads, axes) - (0.2 - hidden))


def test_names_and_settings(found: list[Candidate]) -> None:
    names = {one.name for one in found}
    assert {"ddp", "zero3", "hsdp", "ddp, tensor 2 x 2 replicas", "zero3, tensor 2 x 2 replicas"} <= names
    assert "hsdp, tensor 2 x 2 replicas" not in names  # a replica has a host of its own
    of_groups = [one for one in found if "tensor" in one.name]
    assert {(one.settings["mesh.tensor"], one.settings["mesh.data"]) for one in of_groups} == {(2, 2)}
    assert not any("mesh.tensor" in one.settings for one in found if "tensor" not in one.name)
    assert report.changes(of_groups[0].settings)["mesh.tensor"] == 2
    one_host = space_of(clusters.named_cluster("h100", 2), model_remat="none", model_scan_layers=False, mesh_tensor=2)
    of_two = [one.name for one in of_replicas(one_host)]
    assert of_two == [f"{name}, tensor 2" for name in ("single", "zero2, offload", "zero3, offload")]
    assert list(of_pipelines(one_host)) == []


def test_candidates_need_what_their_plans_need(space: Space, found: list[Candidate]) -> None:
    """The costs are those of the plan, whose layouts have the bytes of the state, and split arrays update less."""
    by_name = {one.name: one for one in found}
    moved = {}
    for name in ("ddp", "zero1", "zero3"):
        one = by_name[f"{name}, tensor 2 x 2 replicas"]
        plan = strategies.plan(with_settings(space.config, one.settings), space.problem, space.machine.cluster)
        again = planner.candidate_of_plan(space, with_settings(space.config, one.settings), plan)
        assert (again.name, again.costs) == (one.name, one.costs)
        assert sum(plan.memory[0].values()) < one.costs.nbytes < by_name[name].costs.nbytes or name == "zero3"
        moved[name] = update_of(space, space.config, plan)
    whole = plan_of(space, {"strategy": "data_parallel", "exchange": "ddp"})
    assert not isinstance(whole, str)
    params, local = nbytes(space.problem.model.shapes), nbytes(space.layers.in_group(2).problem.model.shapes)
    assert 0.5 < local / params < 0.6
    assert moved["ddp"].update / update_of(space, space.config, whole).update == pytest.approx(local / params, rel=0.02)
    assert moved["zero1"].update == pytest.approx(moved["ddp"].update / 2, rel=0.05)


def test_updates_of_deep_models_follow_from_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_zero1() -> UpdateWork:
        space = space_of(clusters.named_cluster("h100", 4), "model.num_layers=9", "mesh.tensor=2", "exchange=zero1")
        plan = strategies.plan(space.config, space.problem, space.machine.cluster)
        return update_of(space, space.config, plan)

    estimate = of_zero1()
    monkeypatch.setattr(updates, "LONGEST_TRACED", 9)
    assert estimate == pytest.approx(of_zero1(), rel=0.01)


def test_pipelines_whose_stages_are_groups() -> None:
    """A candidate sends what a formula gives, and its plan what the traces of its stages do: nearly the same."""
    kept: dict[str, Any] = {"pipeline_schedule": "1f1b", "pipeline_num_microbatches": 4, "pipeline_remat": "none"}
    space = space_of(clusters.named_cluster("h100", 4), "pipeline.executor=dispatch", **kept)
    found = {one.name: one for one in of_pipelines(space)}
    two = "1f1b, 2 stages x 2 replicas"
    assert found.keys() == {two, f"{two}, zero1", "1f1b, 4 stages", "1f1b, 2 stages, tensor 2"}
    one, alone = found["1f1b, 2 stages, tensor 2"], found["1f1b, 2 stages x 2 replicas"]
    assert one.settings["mesh.tensor"] == 2
    assert "mesh.tensor" not in alone.settings
    assert one.costs.nbytes < alone.costs.nbytes
    config = with_settings(space.config, one.settings)
    plan = strategies.plan(config, space.problem, space.machine.cluster)
    again = planner.candidate_of_plan(space, config, plan)
    assert again.name == one.name
    assert again.costs.seconds == pytest.approx(one.costs.seconds, rel=0.1)
    assert again.costs.nbytes == pytest.approx(one.costs.nbytes, rel=0.05)
    # Of all stages on average, and of one of them; each has a block.
    assert again.costs.exposed == pytest.approx(one.costs.exposed, rel=0.25)


def test_actions_wait_for_the_devices_of_a_group() -> None:
    """Waiting slows all actions of a pipeline down, so that the others wait longer, too."""
    axes, machine = {DATA: 1, STAGE: 2, TENSOR: 4}, GpuMachine(clusters.named_cluster("h100", 8))
    table = make_table("1f1b", num_devices=2, num_microbatches=4, num_chunks=1)
    layers = [layer(0.01)] * 4
    sent = Traffic("all-gather", "float32", TENSOR, 0.05 * HOST, 3)
    alone, together = (
        costs_of_pipeline(work_of(layers), machine, axes, table, (0, 2, 4), traffic) for traffic in ([], [sent])
    )
    waits = (1 - HIDDEN_BETWEEN_PRODUCTS) * machine.collective(sent, axes)
    assert together.compute == alone.compute == pytest.approx(4 * 2 * 0.03)
    assert together.exposed - alone.exposed == pytest.approx(waits)
    assert together.waiting == pytest.approx(alone.waiting * (1 + waits / alone.compute), rel=1e-3)  # and clocks


def test_rematerialization_sends_again(space: Space) -> None:
    kept = {"mesh.tensor": 2, "model.scan_layers": False, "exchange": "zero1"}
    of_remat = {one.settings["model.remat"]: one.costs for one in of_replicas(space._replace(kept=kept))}
    assert of_remat["none"].exposed < of_remat["full"].exposed
    assert of_remat["full"].compute > of_remat["none"].compute


def test_a_model_whose_activations_fit_in_groups_only() -> None:
    """Each of two replicas has one text, which cannot be divided further. A group computes one after the other."""
    case = cases.Case(2, 2048, WORDS, (*GPT.settings, "model.dtype=bfloat16"))
    space = space_of(clusters.named_cluster("h100", 2), case=case, model_remat="none")
    alone = min(one.costs.nbytes for one in of_replicas(space) if "tensor" not in one.name)
    fitting = [one for one in of_replicas(space._replace(usable_bytes=0.7 * alone)) if one.fits]
    assert {one.settings["mesh.tensor"] for one in fitting} == {2}
    accumulated = {(one.name, one.settings["optimizer.accumulation_steps"]) for one in fitting}
    assert accumulated == {(f"{name}, tensor 2", 2) for name in ("single", "zero2, offload", "zero3, offload")}


def test_what_the_user_set_is_kept(space: Space) -> None:
    config = copy.deepcopy(space.config)
    config.mesh.tensor = 2
    assert kept_settings(config)["mesh.tensor"] == 2
    check_kept({"mesh.data": 2, "mesh.tensor": 2}, 4)
    check_kept({"mesh.tensor": 2}, 4)
    with pytest.raises(UserError, match=r"^config\.mesh\.tensor is 3; it must divide 4, the number of devices, with"):
        check_kept({"mesh.tensor": 3}, 4)
    with pytest.raises(
        UserError, match=r"^config\.mesh\.data is 1 and config\.mesh\.tensor is 2; their product must be 4,"
    ):
        check_kept({"mesh.data": 1, "mesh.tensor": 2}, 4)
    kept = {"mesh.tensor": 2, "model.remat": "none", "model.scan_layers": False}
    assert {one.settings["mesh.tensor"] for one in planner.candidates(space._replace(kept=kept))} == {2}
    conflict = planner.no_candidate(space._replace(kept={"mesh.tensor": 2, "mesh.stage": 2}))
    assert "config.mesh.tensor is 2 and config.mesh.stage is 2; together they must allow a strategy" in str(conflict)


def test_shared_cores_compute_a_group_one_after_another() -> None:
    """If the user sets it, a tensor axis of virtual devices is predicted: they share the cores."""
    cpus = Cluster(num_devices=4, num_processes=1, device_kind="cpu", platform="cpu", memory_bytes=None)
    machine = SharedCores(cpus)
    assert machine.collective(Traffic("all-gather", "float32", TENSOR, 1e9, 1), {DATA: 2, TENSOR: 2}) == 0
    assert machine.together(np.ones((1, 4))).tolist() == [4.0]
