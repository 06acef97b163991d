"""Partitions the published profiles in scripts/examples/profiles into the configurations of the paper."""

from pathlib import Path

import pytest

from jaxpar.choose.costs.profile import LayerProfile, read_profile
from jaxpar.choose.pipedream import StageSearch
from scripts.bench.papers.pipedream import CLUSTERS

ROOT = Path(__file__).parents[3]


def published(name: str) -> list[LayerProfile]:
    return read_profile(ROOT / "scripts" / "examples" / "profiles" / f"{name}.json")


@pytest.mark.parametrize("model", ["ring", "released"])
@pytest.mark.parametrize("name", ["vgg16", "alexnet"])
def test_the_configuration_of_the_paper(name: str, model: str) -> None:
    """15 replicas of the convolutions and one worker for the rest, with times computed by hand."""
    layers = published(name)
    plan = StageSearch(layers, CLUSTERS["A, one level"], model=model).find()
    assert plan is not None
    assert [layers[stage.first_layer].name for stage in plan.stages] == [layers[0].name, "fc6"]
    assert [stage.replicas for stage in plan.stages] == [15, 1]

    def stage_time(first: int, last: int, replicas: int) -> float:
        compute = sum(one.forward_s + one.backward_s for one in layers[first:last])
        exchange = sum(one.weight_bytes for one in layers[first:last]) * (replicas - 1) / replicas / 1.25e9
        return (max(compute, 2 * exchange) if model == "ring" else compute + 4 * exchange) / replicas

    first_fc = len(layers) - 3
    times = (
        stage_time(0, first_fc, 15),
        2 * layers[first_fc - 1].output_bytes / 1.25e9,
        stage_time(first_fc, first_fc + 3, 1),
    )
    assert plan.seconds_per_microbatch == pytest.approx(max(times), rel=1e-12)
    assert plan.data_parallel_seconds == pytest.approx(stage_time(0, first_fc + 3, 16), rel=1e-12)


def test_the_hybrid_configuration_of_gnmt() -> None:
    """The stages of hybrid_conf.json for 16 workers in PipeDream's repository, by their first layers."""
    layers = published("gnmt16")
    plan = StageSearch(layers, CLUSTERS["B, one level"], model="released").find()
    assert plan is not None
    assert [(layers[stage.first_layer].name, stage.replicas) for stage in plan.stages] == [
        ("encoder_embed", 1),
        *((f"encoder_{n}", 1) for n in (1, 2, 4, 6)),
        ("decoder_embed", 1),
        *((f"decoder_{n}", 1) for n in range(1, 7)),
        ("decoder_7", 3),
        ("classifier", 1),
    ]
