"""Settings that a tensor axis does not support are refused in one line, before anything is written or compiled."""

import json
from pathlib import Path

import pytest

from jaxpar.commands import certify
from jaxpar.errors import UserError
from jaxpar.strategies.groups import replica_group
from tests.runs import refused, run_script, small_arguments
from tests.selection import slow_except
from tests.strategies import tensors
from tests.strategies.cases import TASK
from tests.strategies.pipelines import Task, plan_of
from tests.strategies.tensors import Case

GPT = Task("gpt", "causal_lm")
MISTAKES: dict[str, tuple[str, str]] = {  # name -> (settings, part of the message)
    "no device": ("mesh.tensor=0", "config.mesh.tensor is 0; it must be at least 1"),
    "too many devices": (
        "mesh.data=2 mesh.tensor=8",
        "config.mesh.tensor is 8 and config.mesh.data is 2; their product must be at most 8, the number of cpu devices",
    ),
    **{
        f"exchange {name}": (f"exchange={name}", f"config.exchange is '{name}', which needs whole arrays; it must be ")
        for name in ("dp", "horovod_adasum", "bagua_qadam", "bagua_decentralized", "onebit_adam", "powersgd")
    },
    **{
        f"{key} of zero3": (
            f"exchange=zero3 exchange_options.{key}=True",
            f"config.exchange_options.{key} is True; it must be False with config.mesh.tensor=2",
        )
        for key in ("quantized_weights", "quantized_gradients")
    },
    **{
        name: (
            f"data_parallel.implementation={name}",
            f"config.data_parallel.implementation is '{name}'; it must be 'auto' or 'shard_map' with config.mesh",
        )
        for name in ("pmap", "sharding")
    },
    **{
        name: (f"strategy={name}", f"config.mesh.tensor is 2; it must be 1 with config.strategy='{name}'")
        for name in ("swarm", "async_data_parallel")
    },
    "a measured step of a pipeline": (
        "strategy=pipeline mesh.stage=2 pipeline.trace=2",
        "config.pipeline.trace is 2; it must be 0 with config.mesh.tensor=2",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_unsupported_settings(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, message = MISTAKES[name]
    arguments = [f"--config.{setting}" for setting in ("mesh.tensor=2", *settings.split())]
    assert message in refused(tmp_path, tmp_path, arguments, capsys)


@pytest.mark.parametrize("key", ["num_heads", "num_kv_heads", "mlp_size"])
def test_sizes(key: str) -> None:
    """With a vocabulary or texts of any length. A compressor would change padding of an MLP, and so its outputs."""
    with pytest.raises(UserError, match=f"config.mesh.tensor is 2; it must divide config.model.{key}, 1$"):
        plan_of(GPT, "--config.mesh.tensor=2", f"--config.model.{key}=1")


@pytest.mark.parametrize("name", ["lamb", "adafactor", "muon"])
def test_optimizers_of_whole_arrays(name: str) -> None:
    with pytest.raises(UserError, match=f"config.optimizer.name is '{name}', which needs whole arrays; it must be one"):
        plan_of(GPT, "--config.mesh.tensor=2", f"--config.optimizer.name={name}")


@pytest.mark.parametrize("task", [Task("mlp", "classification"), Task("resnet", "classification"), TASK], ids=str)
def test_models_of_one_device(task: Task) -> None:
    message = f"config.mesh.tensor is 2; it must be 1 with config.model.name='{task.model}', whose layers compute on"
    with pytest.raises(UserError, match=message):
        plan_of(task, "--config.mesh.tensor=2")


@pytest.mark.parametrize(
    ("task", "setting", "message"),
    [
        (Task("bert", "token_classification"), "", "which counts entities of whole texts"),
        (TASK, "", "whose layers compute on one device only"),
    ],
)
def test_context_axis(task: Task, setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_of(task, "--config.mesh.context=2", *(f"--config.{one}" for one in filter(None, [setting])))


def test_context_axis_of_other_models() -> None:
    axes, images = {"data": 1, "stage": 1, "context": 2}, Case("vit", "strategy=single")
    with pytest.raises(UserError, match="whose inputs are not texts"):
        replica_group(tensors.make_config(images), tensors.make_problem(images), axes)


CERTIFIED = ["mesh.tensor=2 exchange=zero1", "strategy=pipeline mesh.data=1 mesh.stage=2 mesh.tensor=2 mesh.context=2"]


@pytest.mark.parametrize("values", slow_except(CERTIFIED[:1], CERTIFIED))
def test_certificate(values: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of the training of groups is that of one device, which a certificate compares it with."""
    path = tmp_path / "certificate.json"
    own = [f"--config.{value}" for value in values.split()]
    settings = [*small_arguments(tmp_path), *own, "--num_steps=3"]
    assert run_script(monkeypatch, certify, "--config=configs/default.py", *settings, f"--output={path}") == 0
    found = json.loads(path.read_text())
    assert (found["outside"], found["counters"], found["differs"]) == ([], [], "")
