"""Partitions the published profiles in scripts/examples/profiles, and compares with docs/pipelines.md."""

import itertools
import re
from pathlib import Path

import pytest

from jaxpar.choose.costs.profile import LayerProfile, read_profile
from jaxpar.choose.pipedream import COMMUNICATION_MODELS, Level, PlannedStage, StageSearch

ROOT = Path(__file__).parents[3]
FILES = {"VGG-16": "vgg16", "AlexNet": "alexnet", "ResNet-50": "resnet50", "GNMT-16": "gnmt16"}
CLUSTERS = {
    "A": [Level(4, 15.75e9), Level(4, 1.25e9)],
    "A, one level": [Level(16, 1.25e9)],
    "B": [Level(8, 25e9), Level(2, 3.125e9)],
    "B, one level": [Level(16, 3.125e9)],
}


def published(name: str) -> list[LayerProfile]:
    return read_profile(ROOT / "scripts" / "examples" / "profiles" / f"{name}.json")


def replicas_in_short(stages: tuple[PlannedStage, ...]) -> str:
    """Return the replicas of the stages, as in 13×1-2-1."""
    parts = []
    for replicas, group in itertools.groupby(stage.replicas for stage in stages):
        count = len(list(group))
        parts += [f"{count}×1"] if replicas == 1 and count > 2 else [str(replicas)] * count
    return "-".join(parts)


def test_the_table_of_the_docs() -> None:
    rows = re.findall(
        r"^\| (.+-\d\d|AlexNet) \| (.+?) \| .+? \| (.+) \|$", (ROOT / "docs/pipelines.md").read_text(), re.M
    )
    assert [(model, cluster) for model, cluster, _ in rows] == list(itertools.product(FILES, CLUSTERS))
    for model, cluster, cells in rows:
        layers, found = published(FILES[model]), []
        for communication_model in COMMUNICATION_MODELS:
            plan = StageSearch(layers, CLUSTERS[cluster], model=communication_model).find()
            assert plan is not None
            speedup = plan.data_parallel_seconds / plan.seconds_per_microbatch
            found.append(f"{replicas_in_short(plan.stages)}, {speedup:.2f}")
        assert cells.split(" | ") == found, (model, cluster)


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
