"""config.pipeline.partition=auto divides the model by a profile of its layers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpar import cluster, strategies
from jaxpar.choose import pipedream
from jaxpar.choose.costs.profile import LayerProfile, write_profile
from jaxpar.choose.partition import check_unset
from jaxpar.choose.stages import choose_stages, until_chosen, with_stages
from jaxpar.core.mesh import STAGE
from jaxpar.core.plan import Plan
from jaxpar.errors import UserError
from tests.strategies.pipelines import Task, make, make_config, make_problem, outcome, plan_on, relative_error

TASK = Task("mlp", "classification", "sgd", layers=4)
LAYERS = ("embed", "block_0", "block_1", "block_2", "block_3", "head")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile whose first five layers take three times as long as the last one, which alone states its weights."""
    seconds, weights = [0.1, 0.1, 0.1, 0.1, 0.5, 0.3], [0, 0, 0, 0, 0, sizes()["head"]]
    layers = [
        LayerProfile(*of, 2 * of[1], 10, 10, w)
        for of, w in zip(zip(LAYERS, seconds, strict=True), weights, strict=True)
    ]
    write_profile(layers, tmp_path / "profile.json")
    return tmp_path / "profile.json"


def sizes() -> dict[str, int]:
    """Return the bytes of the weights of each layer of the model, in float32."""
    shapes = make_problem(make_config(TASK), TASK).model.shapes
    return {name: sum(4 * leaf.size for leaf in jax.tree.leaves(layer)) for name, layer in shapes.items()}


def settings(path: Path | str, schedule: str, *more: str, stages: int = 4) -> tuple[str, ...]:
    return (
        "--config.strategy=pipeline",
        f"--config.mesh.stage={stages}",
        "--config.pipeline.partition=auto",
        f"--config.pipeline.schedule={schedule}",
        f"--config.pipeline.profile={path}",
        "--config.pipeline.bandwidth=1e9",
        *more,
    )


def make_plan(bandwidth: float, *overrides: str) -> Plan[Any]:
    """Plan the pipeline for links of this bandwidth, in bytes per second."""
    config = make_config(TASK, *overrides)
    links = {STAGE: cluster.Link(bandwidth=bandwidth, latency=0.0)}
    return plan_on(config, make_problem(make_config(TASK), TASK), replace(cluster.find_cluster(), links=links))


@pytest.mark.parametrize(
    ("schedule", "batch_size", "number", "replicas", "cuts"),
    [
        ("pipedream", 16, 0, (1, 2, 1), "block_2,head"),
        ("pipedream", 15, 0, (3, 1), "head"),
        ("pipedream", 15, 5, (), "block_1,block_3,head"),
        ("1f1b", 16, 0, (2, 2), "block_3"),
        ("auto", 16, 0, (2, 2), "block_3"),
    ],
)
def test_replicas_share_the_batch(
    profile: Path, schedule: str, batch_size: int, number: int, replicas: tuple[int, ...], cuts: str, tmp_path: Path
) -> None:
    """Each device has 0.9 of 3.6 s, by hand, if the replicas are divisors of the examples or microbatches.

    With a flush, the stage with the fewest replicas determines the number of clocks, so both stages have two.
    """
    sizes = f"--config.batch_size={batch_size}", f"--config.pipeline.num_microbatches={number}"
    config = make_config(TASK, *settings(profile, schedule, *sizes))
    problem = make_problem(make_config(TASK, *sizes[:1]), TASK)
    with_cuts = with_stages(config, problem, cluster.find_cluster(), tmp_path)
    assert with_cuts.pipeline.replicas == (",".join(map(str, replicas)) if replicas else "")
    assert with_cuts.pipeline.partition == cuts


def test_replicas_that_an_evaluation_batch_allows(profile: Path) -> None:
    """Evaluation batches of 5 examples cannot be split into two or four microbatches, so a batch has one."""
    plan = make_plan(1e9, *settings(profile, "pipedream", "--config.eval.batch_size=5"))
    assert plan.details.table.num_microbatches == 1
    assert plan.details.table.replicas == ()


def test_no_replicas_are_possible() -> None:
    """Replicas cannot share 11 microbatches, so 8 devices are 8 stages, but there are only 6 layers."""
    model, here = make_problem(make_config(TASK), TASK).model, cluster.find_cluster()
    config = make_config(TASK, *settings("", "pipedream", "--config.pipeline.num_microbatches=11", stages=8))
    config.batch_size = 22
    with pytest.raises(
        UserError, match=r"mesh\.stage is 8; it must be at most 6, the number of layers, because config"
    ):
        until_chosen(config, here, model)


def test_it_cuts_only_where_the_model_allows_it(tmp_path: Path) -> None:
    """The profile states that the second layer has an output without a gradient. With one stage, nothing is cut."""
    layers, path = [LayerProfile(name, 1, 2, 0, 0, 0, name != "block_1") for name in LAYERS], tmp_path / "profile.json"
    write_profile(layers, path)
    plan = make_plan(1e9, *settings(path, "zb_h1", stages=2))
    assert plan.details.stages.bounds in ((0, 2, 6), (0, 4, 6))
    write_profile([layer._replace(can_cut=False) for layer in layers], path)
    with pytest.raises(UserError, match=r"config\.mesh\.stage is 2; it must be smaller, because the 6 layers"):
        make_plan(1e9, *settings(path, "zb_h1", stages=2))


def test_advice_where_data_parallelism_is_faster(profile: Path) -> None:
    """Transfers of 1 GB over links of 1 MB per second take longer than the computation."""
    layers = [LayerProfile(name, 1, 2, 1e9, 0, 0) for name in LAYERS]
    write_profile(layers, profile)
    config = make_config(TASK, *settings(profile, "pipedream", "--config.pipeline.bandwidth=1e6"))
    problem = make_problem(make_config(TASK), TASK)
    choice = choose_stages(config, problem, cluster.find_cluster(), profile.parent, layers)
    assert choice.advice.startswith("by the profile, config.strategy='data_parallel' on these 4 devices would take ")


def test_every_chunk_is_a_stage(profile: Path) -> None:
    """By hand: of four stages, the slowest has the fifth layer alone."""
    plan = make_plan(100, *settings(profile, "zb_v", "--config.pipeline.num_microbatches=8", stages=2))
    assert len(plan.details.stages.bounds) == 5
    assert plan.details.stages.bounds[-3:] == (4, 5, 6)


def test_two_devices_have_no_replicas(profile: Path) -> None:
    plan = make_plan(100, *settings(profile, "1f1b", stages=2))
    assert plan.details.table.replicas == ()
    assert plan.details.stages.bounds == (0, 4, 6)


def test_it_trains_as_one_device(profile: Path) -> None:
    overrides = (*settings(profile, "zb_h1", stages=2), "--config.pipeline.num_microbatches=8")
    got, expected = outcome(TASK, *overrides), outcome(TASK)
    for name, value in expected.params.items():
        assert "['key']['bias']" in name or relative_error(got.params[name], value) < 1e-6, name


def test_a_memory_limit(tmp_path: Path) -> None:
    """By hand: each of two stages allocates 2 stashes per layer. Without a limit, the first one has 4 of the layers."""
    seconds, path = [0.1, 0.1, 0.1, 0.1, 0.2, 0.2], tmp_path / "profile.json"
    write_profile([LayerProfile(*of, 0, 0, 5, 0) for of in zip(LAYERS, seconds, strict=True)], path)
    for limit, first in {0: 4, 40: 4, 39: 3}.items():
        plan = make_plan(100, *settings(path, "zb_h1", f"--config.pipeline.memory_limit={limit}", stages=2))
        assert plan.details.stages.bounds == (0, first, 6), limit


def test_an_unknown_bandwidth(profile: Path) -> None:
    with pytest.raises(UserError, match=r"config\.pipeline\.bandwidth is 0\.0; it must be the bandwidth between two"):
        make(TASK, *settings(profile, "1f1b", "--config.pipeline.bandwidth=0"))


def test_a_search_that_would_take_too_long(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipedream, "MAX_WORKERS", 3)
    message = r"mesh\.stage is 4, with 4 stages; there must be at most 3 for 6 layers, because the search"
    with pytest.raises(UserError, match=message):
        make_plan(100, *settings(profile, "1f1b"))


def test_too_few_layers_are_refused_before_they_are_measured() -> None:
    config = make_config(TASK, *settings("", "zb_h1", "--config.batch_size=32", stages=8))
    model, here = make_problem(make_config(TASK), TASK).model, cluster.find_cluster()
    with pytest.raises(
        UserError, match=r"config\.mesh\.stage is 8, with 8 stages; there must be at most 6, the number"
    ):
        until_chosen(config, here, model)
    stand_in = until_chosen(make_config(TASK, *settings("", "1f1b", "--config.batch_size=32")), here, model)
    assert (stand_in.pipeline.partition, stand_in.pipeline.replicas) == ("uniform", "")
    strategies.decide(stand_in, here, model)
    several = until_chosen(make_config(TASK, *settings("", "1f1b", stages=8)), here, model)
    assert several.pipeline.replicas == "1,1,1,1,2,2"  # there are 6 layers


def test_tied_ends_are_refused_before_layers_are_measured() -> None:
    task = Task("gpt", "causal_lm", layers=4)
    config, here = make_config(task, *settings("", "pipedream")), cluster.find_cluster()
    model = make_problem(make_config(task), task).model
    stand_in = until_chosen(config, here, model)
    with pytest.raises(UserError, match=r"whose stages are at different batches, so head cannot share its array"):
        strategies.decide(stand_in, here, model)


def checked_plan(*overrides: str) -> Plan[Any]:
    check_unset(make_config(TASK, *overrides))
    return make_plan(1e6, *overrides)


def test_mistakes(profile: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    write_profile([LayerProfile("stem", 1, 2, 0, 0, 1e10), LayerProfile("head", 1, 2, 0, 0, 1e10)], other)
    few = tmp_path / "few.json"
    write_profile([LayerProfile("embed", 1, 2, 0, 0, 0), LayerProfile("block_0", 1, 2, 0, 0, 0)], few)
    larger = tmp_path / "larger.json"
    write_profile([LayerProfile(name, 1, 2, 0, 0, 1.02 * size) for name, size in sizes().items()], larger)
    wider = tmp_path / "wider.json"
    write_profile([LayerProfile(name, 1, 2, 8 if name == "block_1" else 4, 0, 0) for name in LAYERS], wider)
    of_profile, with_partition = r"config\.pipeline\.profile is", r"config\.pipeline\.partition='auto'"
    limit = "--config.pipeline.memory_limit="
    for overrides, message in (
        (
            settings("", "1f1b"),
            rf"{of_profile} ''; it must be the path of a profile, which `jaxpar .*` writes, for a plan",
        ),
        (settings(tmp_path / "none.json", "1f1b"), rf"{of_profile} '.*none\.json', .*; it must be the path"),
        (settings(other, "1f1b"), rf"{of_profile} '.*', whose layer 0 is stem; it must be embed, as in this model"),
        (settings(few, "zb_h1"), r"whose layer 2 is missing; it must be block_1, as in this model"),
        (settings(few, "1f1b"), r"whose layer 2 is missing; it must be block_1, as in this model"),
        (
            settings(larger, "1f1b"),
            rf"whose layer embed has {1.02 * sizes()['embed']:.10g} bytes of weights; it must have {sizes()['embed']},",
        ),
        (settings(wider, "1f1b"), r"whose layer block_1 has 8 bytes of output; it must have 4, in proportion to"),
        (
            settings(profile, "zb_h1", stages=8),
            r"config\.mesh\.stage is 8, with 8 stages; there must be at most 6, the",
        ),
        (
            settings(profile, "1f1b", f"{limit}-1"),
            r"config\.pipeline\.memory_limit is -1\.0; it must be the bytes of a device, or 0 for no limit",
        ),
        (
            settings(profile, "1f1b", f"{limit}9"),
            r"config\.pipeline\.memory_limit is 9; it must be larger, because no division of the 6 layers",
        ),
        (settings(profile, "1f1b", stages=1), r"config\.mesh\.stage is 1; it must be at least 2 with config"),
        (
            settings(profile, "1f1b", "--config.pipeline.replicas=2,2"),
            rf"config\.pipeline\.replicas is '2,2'; it must be empty with {with_partition}",
        ),
        (
            settings(profile, "1f1b", "--config.pipeline.partition=flops"),
            rf"{of_profile} '.*'; it must be '' without {with_partition}",
        ),
    ):
        with pytest.raises(UserError, match=message):
            checked_plan(*overrides)


@pytest.mark.parametrize("key", ["partition", "schedule", "executor"])
def test_strategies_refuse_what_nobody_has_chosen(key: str) -> None:
    config = make_config(TASK, *settings("", "1f1b"))
    config.pipeline.partition = "flops"
    config.pipeline[key] = "auto"
    with pytest.raises(UserError, match=rf"^config\.pipeline\.{key} is 'auto'; it must be replaced"):
        strategies.decide(config, cluster.find_cluster())
