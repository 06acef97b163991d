"""Tests of the parts of a run: the profile for config.pipeline.partition=auto, and the advice on short runs."""

import json
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxpar import config as configs
from jaxpar.choose.auto import choose
from jaxpar.choose.costs.layer_programs import LayerPrograms
from jaxpar.choose.costs.profile import LayerProfile, read_profile, write_profile
from jaxpar.errors import UserError
from jaxpar.measure.phases import Phases
from jaxpar.run import build
from jaxpar.strategies.pipeline.details import PipelineDetails
from tests.runs import small_config


def auto_config(folder: Path) -> ConfigDict:
    return small_config(
        folder,
        "--config.strategy=pipeline",
        "--config.mesh.data=1",
        "--config.mesh.stage=2",
        "--config.pipeline.schedule=zb_h1",
        "--config.pipeline.partition=auto",
        "--config.pipeline.bandwidth=1e30",
    )


def make_run(config: ConfigDict, workdir: Path) -> build.Run:
    config, dataset = choose(config, workdir)
    return build.make_run(config, workdir, Phases(), build.check_run(config, workdir), dataset)


def stage_bounds(run: build.Run) -> tuple[int, ...]:
    assert isinstance(run.plan.details, PipelineDetails)
    return tuple(run.plan.details.stages.bounds)


def test_a_run_measures_its_layers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that resumes reads the file in its workdir again. One that never began measures again.

    The microbatch has 24 / 8 examples.
    """
    seconds, sizes = {"embed": 1.0, "block_0": 2.0, "head": 3.0}, []

    def measure(_: LayerPrograms, microbatch: dict[str, np.ndarray], **_repeats: int) -> list[LayerProfile]:
        sizes.append({len(x) for x in microbatch.values()})
        return [LayerProfile(name, time, time, 0, 0, 0) for name, time in seconds.items()]

    monkeypatch.setattr(LayerPrograms, "measure", measure)
    config, workdir = auto_config(tmp_path), tmp_path / "run"
    workdir.mkdir()
    run = make_run(config, workdir)
    assert sizes == [{3}]
    assert [layer.forward_s for layer in read_profile(workdir / "profile.json")] == [1, 2, 3]
    assert stage_bounds(run) == (0, 2, 3)
    assert run.config.pipeline.profile == str(workdir / "profile.json")
    assert not config.pipeline.profile
    seconds["embed"] = 9.0
    assert stage_bounds(make_run(config, workdir)) == (0, 1, 3)  # nothing was saved: measured again
    configs.save(run.config, workdir)
    seconds["embed"] = 1.0
    assert stage_bounds(make_run(config, workdir)) == (0, 1, 3)
    assert len(sizes) == 2


def test_the_profile_of_a_run_is_measured(tmp_path: Path) -> None:
    run = make_run(auto_config(tmp_path), tmp_path)
    layers = json.loads((tmp_path / "profile.json").read_text())["layers"]
    assert [layer["name"] for layer in layers] == [layer.name for layer in run.problem.model.layers]
    assert all(layer["forward_s"] > 0 for layer in layers)


def test_a_refused_run_leaves_no_profile(tmp_path: Path) -> None:
    """The search itself refuses this run, after the layers were measured. A run that has started keeps its profile."""
    config, workdir = auto_config(tmp_path), tmp_path / "run"
    config.pipeline.memory_limit = 1.0
    workdir.mkdir()
    with pytest.raises(UserError, match=r"config\.pipeline\.memory_limit is 1; it must be larger"):
        make_run(config, workdir)
    assert not (workdir / "profile.json").exists()
    profile = [LayerProfile(name, 1.0, 1.0, 0, 0, 1) for name in ("embed", "block_0", "head")]
    write_profile(profile, workdir / "profile.json")
    configs.save(config, workdir)
    with pytest.raises(UserError, match=r"config\.pipeline\.memory_limit is 1; it must be larger"):
        make_run(config, workdir)
    assert read_profile(workdir / "profile.json") == profile


# (examples, batch size, divisor of the batch): the advised batch size and epochs
ADVISED = {
    (210, 256, 1): (16, 20),
    (210, 256, 24): (24, 30),
    (10_000, 256, 1): (256, 10),
    (7, 8, 1): (8, 250),
    (700, 480, 1): (32, 15),
    (25_600, 256, 1): (256, None),
}


@pytest.mark.parametrize(("examples", "batch_size", "divisor"), ADVISED)
def test_advice_on_the_length_of_short_runs(examples: int, batch_size: int, divisor: int) -> None:
    """The advised flags give 250 steps or more, and no further advice."""
    config, (size, epochs) = configs.default_config(), ADVISED[examples, batch_size, divisor]
    config.batch_size = batch_size
    advice = build.advise_length(config, examples, -(-examples // batch_size), divisor)
    if epochs is None:
        assert not advice
        return
    flags = [word for word in advice.split() if word.startswith("--")]
    assert flags[-1] == f"--config.num_epochs={epochs}"
    assert flags[:-1] == ([f"--config.batch_size={size}"] if size < batch_size else [])
    configs.override(config, flags)
    assert size % divisor == 0
    num_steps = epochs * -(-examples // size)
    assert num_steps >= 250
    assert not build.advise_length(config, examples, num_steps, divisor)
    config.model.init_from = "weights"  # fine-tuning takes fewer steps
    assert not build.advise_length(config, examples, 40, divisor)
    fewer = int(build.advise_length(config, examples, 39, divisor).rpartition("=")[2])
    assert fewer < epochs
    assert fewer * -(-examples // size) >= 80
    config.num_steps = 1  # as the user wants it
    assert not build.advise_length(config, examples, 1, divisor)
