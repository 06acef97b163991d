"""Strategy auto: what it keeps, chooses and refuses, for absent GPUs and in runs on CPU devices."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from jaxpar import cluster as clusters
from jaxpar import config as configs
from jaxpar import strategies, training
from jaxpar.choose import auto, planner
from jaxpar.choose.auto import choose
from jaxpar.choose.candidates import Candidate, Settings, Space, gpu_space, load_problem, ranked
from jaxpar.choose.costs.machine import CpuMachine
from jaxpar.choose.costs.step import StepCosts
from jaxpar.choose.costs.traced_layers import TracedLayers
from jaxpar.cluster.target import Target
from jaxpar.commands import plan as command
from jaxpar.errors import UserError
from tests.choose.test_planner import PERCEPTRON
from tests.launch.test_processes import finished, launch
from tests.runs import refused, run_script
from tests.selection import slow_except

H100 = clusters.named_cluster("h100", 8)


AUTO = ("--config.strategy=auto", "--config.batch_size=24")
PROBLEMS: dict[str, Any] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def load(config: ConfigDict, *args: Any) -> Any:
    """Make one problem, whose layers are traced once, of all configs with an equal model and data."""
    parts = config.model.to_json(), config.data.to_json(), config.optimizer.to_json(), config.num_steps
    key = str((parts, config.batch_size, config.eval.batch_size))
    return PROBLEMS[key] if key in PROBLEMS else PROBLEMS.setdefault(key, load_problem(config, *args))


@pytest.fixture(autouse=True)
def _load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "load_problem", load)


def auto_config(*overrides: str) -> ConfigDict:
    """Return the config of a perceptron on generated vectors."""
    config = configs.default_config()
    configs.override(config, [*PERCEPTRON[1:], *AUTO, *overrides])
    return config


def absent(number: int, memory_bytes: float = 80e9) -> Target:
    """Return GPUs to choose for, on which nothing is compiled."""
    cluster = replace(clusters.named_cluster("h100", number), memory_bytes=memory_bytes)
    return Target(cluster, [], memory_bytes, memory_bytes)


def test_other_strategies_are_unchanged(tmp_path: Path) -> None:
    config = auto_config("--config.strategy=data_parallel", "--config.mesh.data=2")
    assert choose(config, tmp_path) == (config, None)


def test_the_fastest_that_fits_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The search of the planner has no faster candidate that fits, in a memory that does not hold all of them."""
    config = auto_config()
    loaded = load(config, H100, tmp_path)
    found = planner.candidates(gpu_space(config, loaded.problem, clusters.named_cluster("h100", 4), 80e9, {}))
    least, most = (f(one.costs.nbytes for one in found) for f in (min, max))
    target = absent(4, (least + most) / 2)
    resolved, _ = choose(config, tmp_path, target)
    fitting = [one for one in found if one.costs.nbytes <= target.usable_bytes]
    best = min(fitting, key=lambda one: one.costs.seconds)
    assert len(fitting) < len(found)
    flat = configs.keys(resolved)
    assert {key: flat[key] for key in best.settings} == best.settings
    assert resolved.planned_for == "4 x NVIDIA H100 80GB HBM3, 1 process"
    assert resolved.batch_size == config.batch_size
    assert config.strategy == "auto"
    assert re.match(rf"{best.name} computes \d+% of the time, and .*", resolved.chosen)
    assert f"chosen    {resolved.chosen}\n" in capsys.readouterr().out


KEPT: dict[str, tuple[str, ...]] = {
    "stages": ("mesh.stage=2",),
    "replicas": ("mesh.data=2",),
    "replicas, stages and microbatches": ("mesh.data=2", "mesh.stage=2", "pipeline.num_microbatches=3"),
    "a schedule": ("pipeline.schedule=zb_h1", "pipeline.remat=full"),
    "an exchange": ("exchange=zero3",),
    "remat and accumulation": ("model.remat=dots", "optimizer.accumulation_steps=3"),
    "a scan": ("model.scan_layers=true",),
}


FEW = ("replicas, stages and microbatches", "remat and accumulation")


@pytest.mark.parametrize("name", slow_except(FEW, KEPT))
def test_settings_of_the_user_are_kept(name: str, tmp_path: Path) -> None:
    config = auto_config(*(f"--config.{setting}" for setting in KEPT[name]))
    resolved, _ = choose(config, tmp_path, absent(4))
    own, flat = configs.keys(config), configs.keys(resolved)
    for setting in KEPT[name]:
        key = setting.partition("=")[0]
        assert flat[key] == own[key], key
    assert flat["mesh.data"] * flat["mesh.stage"] == 4
    strategies.decide(resolved, absent(4).cluster)
    assert resolved.strategy == (
        "pipeline" if "replicas" in name or "stage" in name or "schedule" in name else "data_parallel"
    )


def test_the_script_compares_the_same_candidates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (*PERCEPTRON, "--cluster=h100:2", "--config.strategy=auto", "--config.pipeline.schedule=gpipe")
    assert run_script(monkeypatch, command, *arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ 1 .*  gpipe, 2 stages", printed, re.MULTILINE)
    assert not re.search(r"ddp|1f1b|Your config", printed)


REFUSED: dict[str, tuple[list[str], str]] = {
    "too few of the devices": (
        ["mesh.data=1", "mesh.stage=2"],
        "config.mesh.data is 1 and config.mesh.stage is 2; their product must be 4, the number of devices, with",
    ),
    "replicas that do not divide": (["mesh.data=3"], "config.mesh.data is 3; it must divide 4, the number"),
    "an exchange that differs": (["exchange=onebit_adam"], "config.exchange is 'onebit_adam'; it must be one of"),
    "no exchange": (["exchange=foo"], "config.exchange is 'foo'; it must be one of ddp, "),
    "no remat": (["model.remat=foo"], "config.model.remat is 'foo'; it must be one of full, none, dots with"),
    "too many devices": (["mesh.stage=8"], "config.mesh.stage is 8; it must be at most 4, the number of gpu"),
    "no stages": (["mesh.stage=0"], "config.mesh.stage is 0; it must be at least 1"),
    "settings of different strategies": (
        [
            *("mesh.stage=2", "exchange=zero3", "model.remat=full", "pipeline.schedule=1f1b"),
            "pipeline.executor=lockstep",
        ],
        "config.mesh.stage is 2 and config.exchange is 'zero3'; together they must allow a strategy on 4 devices that",
    ),
    "a batch that cannot be divided": (
        ["batch_size=23", "model.num_layers=1"],
        "config.batch_size is 23; on 4 devices it must be a multiple of replicas x",
    ),
    "a partition": (["pipeline.partition=uniform"], "config.pipeline.partition is 'uniform'; it must be 'flops'"),
    "an option of no exact exchange": (
        ["exchange_options.ratio=0.1"],
        "config.exchange_options.ratio is 0.1; it must allow a strategy on 4 devices",
    ),
    "microbatches that do not divide": (
        ["pipeline.num_microbatches=5"],
        "config.pipeline.num_microbatches is 5; it must allow a strategy on 4 devices that trains like one device and "
        "divides config.batch_size=24 into replicas x microbatches",
    ),
    "what the plan refuses": (
        ["mesh.data=2", "mesh.stage=2", "eval.batch_size=3"],
        "config.eval.batch_size is 3; it must be a multiple of 2, the number of replicas",
    ),
    "no memory": ([], "config.strategy is 'auto', but nothing fits: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, tmp_path: Path) -> None:
    settings, message = REFUSED[name]
    config = auto_config(*(f"--config.{setting}" for setting in settings))
    with pytest.raises(UserError, match="^" + re.escape(message)) as error:
        choose(config, tmp_path / "run", absent(4, 1e3 if name == "no memory" else 80e9))
    assert not (tmp_path / "run").exists()
    if name == "no memory":
        text = r"needs ([\d.]+) kB of a device, ([\d.]+) kB more than there is; it must fit in 1 kB;"
        needed, missing = map(float, re.findall(text, str(error.value))[0])
        assert needed - missing == pytest.approx(1, abs=0.1)


def test_names_of_strategies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(tmp_path, tmp_path, ["--config.strategy=best"], capsys) == (
        "jaxpar: config.strategy is 'best'; it must be one of single, data_parallel, async_data_parallel, "
        "pipeline, swarm, auto"
    )


def test_the_rates_of_present_gpus() -> None:
    """JAX reports the kind of a GPU, but neither its bandwidth nor its links."""
    present = replace(H100, memory_bandwidth=None, send_rates={}, memory_bytes=60e9)
    assert auto.with_rates(present) == replace(H100, memory_bytes=60e9)
    with pytest.raises(
        UserError, match=r"config\.strategy is 'auto' on GeForce 256, whose rates are unknown; it must be"
    ):
        auto.with_rates(replace(present, device_kind="GeForce 256"))


def test_present_gpus_are_planned_with_the_memory_that_jax_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = replace(H100, memory_bandwidth=None, send_rates={}, memory_bytes=5e3, num_processes=8)
    monkeypatch.setattr(clusters, "find_cluster", lambda: present)
    with pytest.raises(UserError, match=r"but nothing fits: .* it must fit in 5 kB"):
        choose(auto_config(), tmp_path)
    present = replace(present, memory_bytes=60e9)
    assert choose(auto_config(), tmp_path)[0].planned_for.endswith("HBM3, 8 processes")


def test_a_run_keeps_its_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run resumes with the strategy that it chose, and on other devices with another choice and the same result."""
    numbers = []

    def assumed(config: ConfigDict, loaded: Any, cluster: clusters.Cluster, kept: Settings) -> Space:
        numbers.append(cluster.num_devices)
        return gpu_space(config, loaded.problem, clusters.named_cluster("h100", cluster.num_devices), 1e9, kept)

    monkeypatch.setattr(auto, "cpu_space", assumed)
    steps = ("--config.optimizer.schedule=constant", "--config.optimizer.warmup=0.0", "--config.log.curves=False")
    config = auto_config("--config.num_steps=4", "--config.log.tensorboard=False", *steps)
    workdir = tmp_path / "run"
    first = training.train(config, workdir)
    saved = configs.read_config(workdir)
    assert saved.strategy == first["strategy"] != "auto"
    assert saved.planned_for == "8 x cpu, 1 process"
    config.num_steps = 6
    training.train(config, workdir)
    assert numbers == [8]
    printed = capsys.readouterr().out
    assert "chosen    the same strategy as before, for the same devices" in printed
    assert "changed   config.strategy" not in printed
    config.num_steps, config.optimizer.accumulation_steps = 8, 3
    last = training.train(config, workdir)
    assert numbers == [8, 8]
    assert "changed   config.optimizer.accumulation_steps: 1 -> 3" in capsys.readouterr().out
    single = auto_config("--config.strategy=single", "--config.mesh.data=1", "--config.num_steps=8", *steps)
    alone = training.train(single, tmp_path / "single")
    assert last["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-5)


def test_devices_that_share_cores_do_not_wait() -> None:
    """A pipeline whose devices wait comes after all that do not wait, however fast it seems to be."""
    costs = StepCosts(2.0, 2.0, 0.0, 0.0, 0.0, 1e6)
    ddp = Candidate("ddp", {}, costs, fits=True)
    waiting = Candidate("1f1b", {}, costs._replace(seconds=1.0, compute=0.5, waiting=0.5), fits=True, waits=True)
    large = ddp._replace(name="large", fits=False)
    assert ranked([waiting, large, ddp]) == [ddp, waiting, large]
    assert ranked([large, waiting])[0] == waiting  # if the user wants stages


def test_pipelines_of_shared_cores_are_last(tmp_path: Path) -> None:
    """Two devices whose cores are fast for one device: a pipeline of one microbatch would be the fastest."""
    cluster = replace(clusters.named_cluster("cpu", 2), memory_bytes=1e12)
    config = auto_config("--config.mesh.virtual_cpu_devices=0")
    problem = load(config, cluster, tmp_path).problem
    none = {kind: {2: (0.0, 0.0)} for kind in ("all-reduce", "reduce-scatter", "all-gather", "collective-permute")}
    machine = CpuMachine(cluster, {1: 1.0, 2: 3.0}, {1: 0.0, 2: 0.0}, none, 0.0, {1: 0.0, 2: 0.0})
    space = Space(config, problem, TracedLayers(problem, clusters.named_cluster("h100", 2)), machine, 1e12)
    found = planner.candidates(space)
    assert min(found, key=lambda one: one.costs.seconds).settings["strategy"] == "pipeline"
    assert found[0].settings["strategy"] == "data_parallel"
    assert planner.candidates(space._replace(kept={"mesh.stage": 2}))[0].settings["strategy"] == "pipeline"


@pytest.mark.slow
def test_processes_take_the_choice_of_the_first(folder: Path, tmp_path: Path) -> None:
    """Each process has two of the four devices, which only the first one measures."""
    workdir = tmp_path / "run"
    lines, _ = finished(launch(folder, workdir, "data_parallel", "--config.strategy=auto", "--config.mesh.data=-1"))
    assert sum("chosen" in line for line in lines) == 2
    saved = configs.read_config(workdir)
    assert saved.mesh.data * saved.mesh.stage == 4
    assert saved.planned_for == "4 x cpu, 2 processes"
