"""Compares PipeDream's partitioner with all plans of small instances, and with examples computed by hand."""

import itertools
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxpar.choose.costs.profile import LayerProfile, read_profile, write_profile
from jaxpar.choose.pipedream import COMMUNICATION_MODELS, Level, PlannedStage, StagePlan, StageSearch
from jaxpar.commands import partition
from jaxpar.errors import UserError
from tests.runs import run_script, script_error

ROOT = Path(__file__).parents[3]
Stages = list[tuple[int, int, int]]


def layer(forward: float, weights: float = 0, output: float = 0, stash: float = 0) -> LayerProfile:
    """Return a layer whose backward pass takes twice as long as its forward pass."""
    return LayerProfile("layer", forward, 2 * forward, output, stash, weights)


class Brute:
    """All plans of an instance, by the definitions in ALGORITHMS: contiguous stages, replicas that use all workers."""

    def __init__(
        self,
        layers: Sequence[LayerProfile],
        levels: Sequence[Level],
        *,
        model: str,
        memory_limit: float = math.inf,
        straight: bool = False,
        transfers: bool = True,
    ):
        self.layers, self.levels, self.model, self.limit = layers, levels, model, memory_limit
        self.straight, self.transfers = straight, transfers
        self.sizes = [math.prod(level.size for level in levels[:k]) for k in range(len(levels) + 1)]

    def best(self) -> tuple[float, Stages]:
        whole = self.plans(len(self.levels), 0, len(self.layers) - 1, copies=1, later=0)
        return min(whole, default=(math.inf, []))

    def plans(self, level: int, first: int, last: int, copies: int, later: int) -> Iterator[tuple[float, Stages]]:
        """Yield the time and the stages of all plans of a span on a group of a level.

        copies: replicas of the group; later: workers of the stages after it.
        """
        span = self.layers[first : last + 1]
        if level == 0:
            versions = math.ceil((copies + later) / copies)
            if versions * sum(one.weight_bytes + one.stash_bytes for one in span) <= self.limit:
                yield sum(one.forward_s + one.backward_s for one in span), [(first, last, copies)]
            return
        size, bandwidth = self.levels[level - 1]
        for num in range(1, min(size, len(span)) + 1):
            divisions = [parts for parts in itertools.product(range(1, size + 1), repeat=num) if sum(parts) == size]
            for cuts in itertools.combinations((n for n in range(first, last) if self.layers[n].can_cut), num - 1):
                for parts in divisions:
                    if self.straight and max(parts) > 1:
                        continue
                    bounds, times, stages = [first - 1, *cuts, last], [], []
                    for n, m in enumerate(parts):
                        following = sum(parts[n + 1 :]) * copies * self.sizes[level - 1]
                        inner = self.plans(
                            level - 1, bounds[n] + 1, bounds[n + 1], copies=copies * m, later=later + following
                        )
                        time, found = min(inner, default=(math.inf, []))
                        times.append(self.replicated(time, bounds[n] + 1, bounds[n + 1], m, bandwidth))
                        stages += found
                    sent = [2 * self.layers[cut].output_bytes / bandwidth * self.transfers for cut in cuts]
                    if (slowest := max([*times, *sent])) < math.inf:
                        yield slowest, stages

    def replicated(self, time: float, first: int, last: int, m: int, bandwidth: float) -> float:
        nbytes = sum(one.weight_bytes for one in self.layers[first : last + 1])
        if m == 1:
            return time
        if self.model == "ring":
            return max(time, 2 * (m - 1) / m * nbytes / bandwidth) / m
        if self.model == "paper":
            return max(time, 2 * (m - 1) * nbytes / bandwidth) / m
        return (time + 4 * (m - 1) * nbytes / (m * bandwidth)) / m


def random_layers(rng: random.Random, num: int) -> list[LayerProfile]:
    has_weights = [rng.random() < 0.7 for _ in range(num)]
    layers = []
    for n, has in enumerate(has_weights):
        sizes = rng.random(), 2 * rng.random(), 3 * rng.random(), rng.random(), 4 * rng.random() * has
        layers.append(LayerProfile(f"l{n}", *sizes, rng.random() < 0.9))
    return layers


@pytest.mark.parametrize("seed", range(100))
def test_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    if seed % 3:
        layers, levels = random_layers(rng, rng.randint(1, 7)), [Level(rng.randint(1, 6), 0.5 + 10 * rng.random())]
    else:
        sizes = rng.choice([(2, 2), (2, 3), (3, 2), (1, 3), (4, 1)])
        layers, levels = random_layers(rng, rng.randint(1, 5)), [Level(size, 0.2 + 8 * rng.random()) for size in sizes]
    options: dict[str, Any] = {"model": rng.choice(COMMUNICATION_MODELS), "straight": rng.random() < 0.2}
    options |= {"transfers": rng.random() < 0.8, "memory_limit": rng.choice([math.inf, 20 * rng.random()])}
    given = Brute(layers, levels, **options)
    time, _ = given.best()
    plan = StageSearch(layers, levels, **options).find()
    if plan is None:
        assert time == math.inf
        return
    assert plan.seconds_per_microbatch == pytest.approx(time, rel=1e-12)
    check(plan, layers, levels)
    if len(levels) == 1:  # the time of the stages that the plan names
        [level] = levels
        sent = [2 * layers[stage.last_layer].output_bytes / level.bandwidth for stage in plan.stages[:-1]]
        times = [
            given.replicated(sum(one.forward_s + one.backward_s for one in layers[a : b + 1]), a, b, m, level.bandwidth)
            for a, b, m in plan.stages
        ]
        assert max([*times, *(sent if options["transfers"] else [])]) == pytest.approx(time, rel=1e-12)


def check(plan: StagePlan, layers: Sequence[LayerProfile], levels: Sequence[Level]) -> None:
    """Check that the stages have all layers in order, and all workers."""
    bounds = [bound for stage in plan.stages for bound in (stage.first_layer, stage.last_layer + 1)]
    assert [0, *bounds[1:-1:2]] == bounds[::2]
    assert bounds[-1] == len(layers)
    assert sum(stage.replicas for stage in plan.stages) == math.prod(level.size for level in levels)
    assert plan.num_in_flight == math.ceil(sum(stage.replicas for stage in plan.stages) / plan.stages[0].replicas)


@pytest.mark.slow
def test_equals_brute_force_with_ten_layers_and_six_workers() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        layers, levels = random_layers(rng, 10), [Level(6, 0.5 + 10 * rng.random())]
        for model in COMMUNICATION_MODELS:
            time, _ = Brute(layers, levels, model=model).best()
            plan = StageSearch(layers, levels, model=model).find()
            assert plan is not None
            assert plan.seconds_per_microbatch == pytest.approx(time, rel=1e-12)


def test_a_replicated_stage() -> None:
    """By hand: 3 workers, of which 2 share the layers without weights; the layer with weights is on one worker."""
    layers = [layer(1), layer(1), layer(1, weights=1e9)]
    plan = StageSearch(layers, [Level(3, 1e6)]).find()
    assert plan is not None
    assert plan.stages == (PlannedStage(0, 1, 2), PlannedStage(2, 2, 1))
    assert plan.seconds_per_microbatch == 3
    assert plan.data_parallel_seconds == pytest.approx(2 * 2 / 3 * 1e9 / 1e6 / 3)
    assert plan.model_parallel_seconds == 9
    assert plan.num_in_flight == 2


def test_the_hierarchy_keeps_replicas_within_a_node() -> None:
    """By hand: of 2 nodes of 2 workers with fast links inside, each holds the replicas of one stage."""
    layers = [layer(1, weights=1e6, output=1e3), layer(1, weights=1e6, output=1e3)]
    plan = StageSearch(layers, [Level(2, 1e9), Level(2, 1e5)]).find()
    assert plan is not None
    assert plan.stages == (PlannedStage(0, 0, 2), PlannedStage(1, 1, 2))
    assert plan.seconds_per_microbatch == 1.5
    assert plan.model_parallel_seconds == pytest.approx(6 + 2 * 1e3 / 1e5)


def test_versions_of_early_stages_count() -> None:
    """By hand: the first of 2 stages holds 2 versions of its weights and 2 stashes, the last one 1."""
    layers = [layer(1, weights=10, stash=5), layer(1, weights=20, stash=9)]
    for limit, expected in ((30, True), (29.9, False)):
        found = StageSearch(layers, [Level(2, 1e9)], straight=True, memory_limit=limit).find()
        assert (found is not None) == expected


def test_the_whole_profile_on_one_worker() -> None:
    plan = StageSearch([layer(1), layer(2)], [Level(1, 1)]).find()
    assert plan is not None
    assert plan[:4] == ((PlannedStage(0, 1, 1),), 9, 9, 9)


# ---- the profile and the script ---------------------------------------------------------------------


LAYERS = [
    LayerProfile("embed", 0.001, 0.002, 1e6, 1e6, 1e8),
    LayerProfile("block", 0.004, 0.008, 1e6, 4e6, 1e7),
    LayerProfile("head", 0.002, 0.004, 100, 1e6, 1e8),
]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_profile(LAYERS, tmp_path / "profile.json")
    return tmp_path / "profile.json"


def test_a_profile_is_read_as_written(profile: Path) -> None:
    assert read_profile(profile) == LAYERS
    assert "can_cut" not in profile.read_text()
    whole = [LAYERS[0]._replace(can_cut=False), *LAYERS[1:]]
    write_profile(whole, profile)
    assert read_profile(profile) == whole


def test_the_script(profile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--profile={profile}", "--num_workers=4"]
    assert run_script(monkeypatch, partition, *flags, "--bandwidth=1.25e9") == 0
    text = capsys.readouterr().out
    assert run_script(monkeypatch, partition, *flags, "--bandwidth=1.25e9", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    found = StageSearch(LAYERS, [Level(4, 1.25e9)]).find()
    assert found is not None
    assert plan == {
        "stages": [stage._asdict() for stage in found.stages],
        "seconds_per_microbatch": found.seconds_per_microbatch,
        "speedup_over_data_parallel": found.data_parallel_seconds / found.seconds_per_microbatch,
        "speedup_over_model_parallel": found.model_parallel_seconds / found.seconds_per_microbatch,
        "num_in_flight": found.num_in_flight,
    }
    assert f"time per microbatch   {found.seconds_per_microbatch:.6g} s" in text
    assert text.splitlines()[1].split() == ["0", "0-0", "1", "embed", "embed"]
    flags += ["--levels=2:1e11,2:1.25e9", "--no_transfers", "--communication_model=paper"]
    assert run_script(monkeypatch, partition, *flags) == 0


WRONG_FLAGS = {
    "--num_workers=4": "--bandwidth is missing; it must be set without --levels",
    "--num_workers=4 --bandwidth=0": "--bandwidth is '0'; it must be at least 1 byte per second",
    "--num_workers=1000000000 --bandwidth=1": "--num_workers is 1000000000; it must be at most 1024 for a profile of",
    "--num_workers=4 --levels=4:1e-300": "--levels is '4:1e-300'; it must be SIZE:BANDWIDTH of each level",
    "--num_workers=0 --bandwidth=1": "--num_workers is 0; it must be at least 1",
    "--num_workers=4 --levels=4": "--levels is '4'; it must be SIZE:BANDWIDTH of each level",
    "--num_workers=4 --levels=0:1": "--levels is '0:1'; it must be SIZE:BANDWIDTH of each level",
    "--num_workers=4 --levels=2:1,3:1": "--num_workers is 4; it must be 6, the product of the sizes in --levels",
    "--num_workers=4 --levels=4:1 --bandwidth=2": "--bandwidth is 2; it must not be set with --levels",
    "--num_workers=4 --bandwidth=1 --straight": "--num_workers is 4; it must be at most 3, the number of stages",
    "--num_workers=2 --bandwidth=1 --memory_limit=9": "--memory_limit is 9; it must be larger, because no plan fits",
    "--num_workers=2 --bandwidth=1 --communication_model=rings": "--communication_model is 'rings'; it must be one of",
}


@pytest.mark.parametrize("flags", WRONG_FLAGS)
def test_wrong_flags(
    flags: str, profile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, message = script_error(monkeypatch, capsys, partition, f"--profile={profile}", *flags.split())
    assert out == ""
    assert message.startswith(WRONG_FLAGS[flags])


GOOD = dict(zip(LayerProfile._fields, LAYERS[0], strict=True))


def with_layers(*changes: dict[str, Any]) -> str:
    """Return the text of a profile whose layers are GOOD with these changes."""
    return json.dumps({"layers": [{**GOOD, **changed} for changed in changes]})


WRONG_PROFILES = {
    "{": "which is not JSON",
    "[]": 'profile.json is []; it must be an object: {"layers": [...]}',
    "{}": "layers is null; it must be a list of 1 to 10000 layers",
    '{"layers": []}': "layers is []; it must be a list of 1 to 10000 layers",
    json.dumps({"layers": [3] * 10_001}): "layers is a list of 10001; it must be a list of 1 to 10000 layers",
    with_layers({}, {"name": "a"}, {}): 'layers[2].name is "embed", which is the name of layers[0]',
    '{"layers": [3]}': "layers[0] is 3; it must be an object with name, forward_s,",
    with_layers({}, {"forward_s": -1}): "layers[1].forward_s is -1; it must be a number between 0 and 1e+30",
    with_layers({"forward_s": "a" * 100}): 'layers[0].forward_s is "aaaaaaaaaaaa',
    with_layers({"backward_s": math.nan}): "layers[0].backward_s is NaN; it must be a number between",
    with_layers({"can_cut": 1}): "layers[0].can_cut is 1; it must be true or false",
    with_layers({"stash_bytes": True}): "layers[0].stash_bytes is true; it must be a number between",
    with_layers({"name": 1}): "layers[0].name is 1; it must be a string",
    with_layers({"name": "\ud800"}): "it must be a string of printable characters",
    with_layers({"weight_bytes": 10**400}): "layers[0].weight_bytes is 1000",
    "[" * 100_000: "which is not JSON",
    '{"layers": [], "layers": []}': "which is not JSON (the key 'layers' occurs twice)",
    with_layers({}).replace("{", '{"name": "a", ', 2): "which is not JSON (the key 'name' occurs twice)",
    with_layers({"weight": 1}): "layers[0].weight is not a key; it must be one of name,",
    json.dumps({"layers": [{"name": "a"}]}): "layers[0].forward_s is missing; it must be set",
}


@pytest.mark.parametrize("text", WRONG_PROFILES, ids=WRONG_PROFILES.get)
def test_wrong_profiles(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_profile(path)
    assert WRONG_PROFILES[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_profile_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"profile.json', which does not exist; it must be the path of a profile"):
        read_profile(tmp_path / "profile.json")


def test_a_search_that_would_take_hours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_profile([LAYERS[1]._replace(name=f"block_{i}") for i in range(400)], tmp_path / "profile.json")
    flags = ["--num_workers=256", "--levels=16:1e11,16:1e9", "--memory_limit=1e12"]
    _, message = script_error(monkeypatch, capsys, partition, f"--profile={tmp_path}/profile.json", *flags)
    seconds = 128 * 400 * (256 / 2) * (400**2 / 2) / 1.2e8
    assert f"2 levels; for 400 layers and 256 workers the search would take about {seconds:,.0f} s, and" in message


def test_a_memory_limit_of_0_is_none(
    profile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script and config.pipeline.memory_limit agree."""
    printed = []
    for flags in ([], ["--memory_limit=0"]):
        arguments = [f"--profile={profile}", "--num_workers=2", "--bandwidth=1e9", *flags]
        assert run_script(monkeypatch, partition, *arguments) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_times_that_overflow_are_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = LAYERS[0]._replace(forward_s=1e-320, backward_s=0.0, weight_bytes=1e9, stash_bytes=0.0)
    layers = [layer, layer._replace(name="b", output_bytes=0.0, weight_bytes=0.0)]
    write_profile([layers[0]._replace(output_bytes=0.0), layers[1]], tmp_path / "profile.json")
    flags = ["--num_workers=2", "--bandwidth=1", "--json"]
    assert run_script(monkeypatch, partition, f"--profile={tmp_path}/profile.json", *flags) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed["speedup_over_data_parallel"] is None


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [("/dev/full", 2, "jaxpar: the standard output cannot be written: No space left on device\n"), ("pipe", 1, "")],
)
def test_an_output_that_cannot_be_written(output: str, code: int, message: str, profile: Path) -> None:
    if output == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(output, os.O_WRONLY)
    flags = [f"--profile={profile}", "--num_workers=2", "--bandwidth=1e9"]
    command = [sys.executable, "-m", "jaxpar", "partition", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (code, message)
