"""config.pipeline.partition=auto divides the model by a profile of its layers."""

from pathlib import Path
from typing import Any

import pytest

from jaxpar import cluster, strategies
from jaxpar.errors import UserError
from jaxpar.mesh import STAGE
from jaxpar.pipeline.search.layer_profile import LayerProfile, write_profile
from jaxpar.plan import Plan
from tests.strategies.pipelines import Task, make, make_config, make_problem, outcome, relative_error

TASK = Task("bert", "classification", layers=4)
LAYERS = ("embed", "block_0", "block_1", "block_2", "block_3", "head")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile whose first five layers take three times as long as the last one, which has most of the weights."""
    seconds, weights = [0.1, 0.1, 0.1, 0.1, 0.5, 0.3], [100, 100, 100, 100, 100, 1e10]
    layers = [
        LayerProfile(*of, 2 * of[1], 10, 10, w)
        for of, w in zip(zip(LAYERS, seconds, strict=True), weights, strict=True)
    ]
    write_profile(layers, tmp_path / "profile.json")
    return tmp_path / "profile.json"


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
    here = cluster.find_cluster()
    return strategies.plan(
        config, make_problem(make_config(TASK), TASK), here.__class__(**{**vars(here), "links": links})
    )


def test_stages_and_replicas_of_the_profile(profile: Path) -> None:
    """With fast links, three replicas of a stage balance a layer that takes a third of its time."""
    plan = make_plan(1e9, *settings(profile, "1f1b"))
    assert plan.details.table.replicas == (3, 1)
    assert plan.details.stages.bounds == (0, 5, 6)
    straight = make_plan(1e9, *settings(profile, "zb_h1"))
    assert straight.details.table.replicas == ()
    assert straight.details.stages.bounds[-2:] == (5, 6)


def test_slow_links_have_no_replicas(profile: Path) -> None:
    plan = make_plan(100, *settings(profile, "1f1b", stages=2))
    assert plan.details.table.replicas == ()
    assert plan.details.stages.bounds == (0, 4, 6)


def test_it_trains_as_one_device(profile: Path) -> None:
    overrides = (*settings(profile, "zb_h1", stages=2), "--config.pipeline.num_microbatches=8")
    got, expected = outcome(TASK, *overrides), outcome(TASK)
    for name, value in expected.params.items():
        assert "['key']['bias']" in name or relative_error(got.params[name], value) < 1e-6, name


def test_an_unknown_bandwidth(profile: Path) -> None:
    with pytest.raises(UserError, match=r"config\.pipeline\.bandwidth is 0\.0; it must be the bandwidth between two"):
        make(TASK, *settings(profile, "1f1b", "--config.pipeline.bandwidth=0"))


def test_mistakes(profile: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    write_profile([LayerProfile("stem", 1, 2, 0, 0, 1e10), LayerProfile("head", 1, 2, 0, 0, 1e10)], other)
    light = tmp_path / "light.json"
    write_profile([LayerProfile(name, 1, 2, 1e9, 0, 0) for name in LAYERS], light)
    for overrides, message in (
        (settings("", "1f1b"), r"config\.pipeline\.profile is ''; it must be the path of a profile, which scripts"),
        (
            settings(tmp_path / "none.json", "1f1b"),
            r"config\.pipeline\.profile is '.*none\.json', .*; it must be the path",
        ),
        (
            settings(other, "1f1b"),
            r"which has layers stem, head; it must be a profile of this model, with layers embed",
        ),
        (settings(profile, "zb_h1", stages=8), r"config\.mesh\.stage is 8; it must be at most 6, the number of layers"),
        (
            settings(light, "1f1b"),
            r"config\.strategy is 'pipeline'; it must be 'data_parallel', which is the fastest on 4",
        ),
        (
            settings(profile, "1f1b", "--config.pipeline.replicas=2,2"),
            r"config\.pipeline\.replicas is '2,2'; it must be empty with config\.pipeline\.partition='auto'",
        ),
        (
            (*settings(profile, "1f1b"), "--config.pipeline.partition=flops"),
            r"config\.pipeline\.profile is '.*'; it must be empty without config\.pipeline\.partition='auto'",
        ),
    ):
        with pytest.raises(UserError, match=message):
            make_plan(1e6, *overrides)
