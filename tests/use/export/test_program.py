"""Compares exported programs, run in a process that cannot import jaxpar, with the model of the run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import serialization
from jax import export
from ml_collections import ConfigDict

from jaxpar.checkpoint import Checkpoint
from jaxpar.data import DataInfo
from jaxpar.errors import UserError
from jaxpar.models import build
from jaxpar.use.export.program import save_program
from tests.models.small import CPU, IMAGE, LENGTH, LLAMA, TEXT, VECTOR, VOCAB, fast_jit, make_params, small_config

# For each directory in the arguments, computes the outputs of batch_0.npz, batch_1.npz, ... and writes them there.
READER = """
import sys
from pathlib import Path

sys.modules["jaxpar"] = sys.modules["flax"] = None  # importing them would fail

import numpy as np
from jax import export

for directory in map(Path, sys.argv[1:]):
    program = export.deserialize(bytearray((directory / "program.jax_export").read_bytes()))
    parameters = dict(np.load(directory / "parameters.npz"))
    for file in sorted(directory.glob("batch_*.npz")):
        outputs = program.call(parameters, dict(np.load(file)))
        np.save(directory / file.name.replace("batch", "outputs").replace(".npz", ".npy"), outputs)
"""


class Case(NamedTuple):
    model: str
    task: str
    info: DataInfo
    options: dict[str, Any]  # of config.model


NO_CLASSES = TEXT._replace(num_classes=0, class_names=())
CASES = {
    "bert": Case("bert", "classification", TEXT, {"pooling": "mean"}),
    "tags": Case("bert", "token_classification", TEXT, {"dtype": "bfloat16"}),
    "masks": Case("bert", "masked_lm", NO_CLASSES, {"num_applications": 2, "remat": "full", "scan_layers": True}),
    "gpt": Case("gpt", "causal_lm", NO_CLASSES, {"flatten_positions": True}),
    "llama": Case("gpt", "regression", NO_CLASSES._replace(targets=("stars", "price")), LLAMA),
    "resnet": Case("resnet", "classification", IMAGE, {}),
    "vit": Case("vit", "classification", IMAGE, {"num_layers": 1}),
    "mlp": Case("mlp", "classification", VECTOR, {"num_layers": 1}),
}
PAIRS = "bert"  # the case whose data set has pairs of texts
SIZES = ((4, LENGTH), (1, 5))  # examples, and positions of a text


def config_of(name: str) -> ConfigDict:
    case = CASES[name]
    config = small_config(case.model, case.task, **case.options)
    if name == PAIRS:
        config.data.text_columns = ("premise", "hypothesis")
    return config


def make_inputs(name: str, batch_size: int, length: int) -> dict[str, np.ndarray]:
    """Return a batch with the arrays that the training batches of the case have, in the order of jaxpar/data."""
    random, case = np.random.default_rng(batch_size), CASES[name]
    if case.info.kind == "image":
        return {"inputs": random.integers(0, 256, (batch_size, *case.info.input_shape), np.uint8)}
    if case.info.kind == "vector":
        return {"inputs": random.normal(size=(batch_size, *case.info.input_shape)).astype(np.float32)}
    batch = {"inputs": random.integers(1, VOCAB, (batch_size, length), np.int32)}
    if case.task != "causal_lm":
        batch["mask"] = np.arange(length)[None, :] < random.integers(1, length + 1, batch_size)[:, None]
    if name == PAIRS:
        batch["segments"] = (np.arange(length)[None, :] > random.integers(0, length, batch_size)[:, None]).astype(
            np.int32
        )
    return batch


class Exported(NamedTuple):
    directory: Path
    params: Any  # as the model returns them


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    """The directory of each case, with the outputs for batches of SIZES, computed without jaxpar."""
    folder, found = tmp_path_factory.mktemp("programs"), {}
    for name, case in CASES.items():
        config, directory = config_of(name), folder / name
        params = make_params(build(config, case.info, CPU))
        directory.mkdir()
        tokenizer = folder / f"{name}.json"
        if case.info.kind == "text":
            tokenizer.write_text("{}")
        saved = Checkpoint(7, {"params": serialization.to_state_dict(params)}, {}, {})
        save_program(saved, config, case.info, tokenizer, directory)
        for number, size in enumerate(SIZES):
            np.savez(directory / f"batch_{number}.npz", **make_inputs(name, *size))  # type: ignore[arg-type]
        found[name] = Exported(directory, params)
    command = [sys.executable, "-c", READER, *(str(one.directory) for one in found.values())]
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, cwd=folder, text=True, capture_output=True, env=environment)
    assert result.returncode == 0, result.stderr
    return found


@pytest.mark.parametrize("name", CASES)
def test_outputs_equal_the_model(name: str, exported: dict[str, Exported]) -> None:
    """One program computes every batch size and every length."""
    case, (directory, params) = CASES[name], exported[name]
    model = build(config_of(name), case.info, CPU)
    tolerance = 0.03 if case.options.get("dtype") == "bfloat16" else 1e-5
    for number, size in enumerate(SIZES):
        got = np.load(directory / f"outputs_{number}.npy")
        expected = np.asarray(fast_jit(model.apply)(params, make_inputs(name, *size)))
        assert (got.dtype, got.shape) == (np.float32, expected.shape)
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
        assert np.ptp(expected) > 0.05


def program_of(directory: Path) -> export.Exported:
    return export.deserialize(bytearray((directory / "program.jax_export").read_bytes()))


def test_the_description(exported: dict[str, Exported]) -> None:
    contents = {name: json.loads((one.directory / "program.json").read_text()) for name, one in exported.items()}
    text = {"dtype": "int32", "shape": ["batch", "length"]}
    mask = {"dtype": "bool", "shape": ["batch", "length"]}
    assert contents["bert"] == {
        "program": "program.jax_export",
        "parameters": "parameters.npz",
        "tokenizer": "tokenizer.json",
        "platforms": ["cpu", "cuda"],
        "jax_version": jax.__version__,
        "calling_convention_version": program_of(exported["bert"].directory).calling_convention_version,
        "step": 7,
        "task": "classification",
        "inputs": {"inputs": text, "mask": mask, "segments": text},
        "outputs": [{"dtype": "float32", "shape": ["batch", 5]}],
        "max_length": 12,
        "pad_id": 0,
        "class_names": ["a", "b", "c", "d", "e"],
        "targets": [],
    }
    assert all(list(contents[name]["inputs"]) == ["inputs", "mask"] for name in ("tags", "masks", "llama"))
    assert all(list(contents[name]["inputs"]) == ["inputs"] for name in ("gpt", "resnet", "vit", "mlp"))
    assert contents["resnet"]["inputs"] == {"inputs": {"dtype": "uint8", "shape": ["batch", 8, 8, 3]}}
    assert contents["mlp"]["inputs"] == {"inputs": {"dtype": "float32", "shape": ["batch", 6]}}
    assert contents["mlp"]["max_length"] is contents["mlp"]["tokenizer"] is None
    assert [one["shape"] for one in contents["gpt"]["outputs"]] == [["batch", "length", VOCAB]]
    assert contents["llama"]["targets"] == ["stars", "price"]
    assert (exported["bert"].directory / "tokenizer.json").read_text() == "{}"
    assert not (exported["mlp"].directory / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_texts_longer_than_those_of_the_run_are_refused(name: str, exported: dict[str, Exported]) -> None:
    directory = exported[name].directory
    program = program_of(directory)
    parameters = dict(np.load(directory / "parameters.npz"))
    with pytest.raises(ValueError, match=r"length <= 12|refining shapes"):
        program.call(parameters, make_inputs(name, 2, LENGTH + 1))


def test_a_model_that_needs_a_fixed_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fixed").mkdir()
    (tmp_path / "fixed" / "size.py").write_text(FIXED)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = config_of("mlp")
    params = make_params(build(config, VECTOR, CPU))
    config.model.name = "fixed.size"
    message = r"name is 'fixed.size'; its layers must accept a batch and a text of any size: TypeError: .*_DimExpr"
    with pytest.raises(UserError, match=message):
        save_program(Checkpoint(7, {"params": params}, {}, {}), config, VECTOR, tmp_path / "nothing", tmp_path)


FIXED = """
from jaxpar.models import mlp


def build(config, info):
    model = mlp.build(config, info)
    apply = model.apply
    model.apply = lambda params, batch: apply(params, batch)[: len(batch["inputs"])]
    return model
"""
