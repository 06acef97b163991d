"""Tests reading checkpoints without jaxpar: with the programs of docs/checkpoints.md and after scripts/export.py."""

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxpar import checkpoint, training
from jaxpar.errors import exit_code
from tests.runs import small_config

ROOT = Path(__file__).parent.parent
STEPS = [3, 6, 8]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 8 devices with checkpoints of three steps."""
    folder = tmp_path_factory.mktemp("export")
    overrides = ["mesh.data=8", "exchange=byteps_onebit", "exchange_options.min_compress_bytes=0"]
    overrides += ["num_steps=8", "checkpoint.keep=3", "data.test_fraction=0"]
    training.train(small_config(folder, *(f"--config.{one}" for one in overrides)), folder / "run")
    return folder / "run"


def arrays_of(workdir: Path, step: int) -> dict[str, np.ndarray]:
    tree = checkpoint.read(workdir / "checkpoints" / str(step)).tree
    return {name: np.asarray(x) for name, x in flatten_dict(tree, sep=".").items()}


def python(docs: str, workdir: Path) -> list[str]:
    """Run a Python block of docs/checkpoints.md on `workdir`, with one device and without jaxpar; return its output."""
    [block] = [one.split("```")[0] for one in docs.split("```python\n")[1:]]
    assert "jaxpar" not in block
    block = block.replace("runs/stop/checkpoints/78", str(workdir / "checkpoints" / "8"))
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "XLA_FLAGS")}
    command = [sys.executable, "-c", block]
    result = subprocess.run(
        command, env=environment | {"JAX_PLATFORMS": "cpu"}, cwd=workdir, text=True, capture_output=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def docs(heading: str) -> str:
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    return text.split(heading)[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("export", ROOT / "scripts" / "export.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["export.py", *map(str, arguments)])
    return exit_code(script.main)


def test_orbax_reads_it_as_the_docs_say(workdir: Path) -> None:
    block = docs("### With orbax").split("\n### ")[0]
    body = block.split("def read(folder):\n")[1].split("\n\n")[0].splitlines()
    assert len(body) + 1 <= 6  # `def` and five lines
    shape = arrays_of(workdir, 8)["params.embed.tokens"].shape
    assert python(block, workdir) == [f"8 {shape}"]


def test_safetensors_read_it_as_the_docs_say(
    workdir: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = workdir / "stop.safetensors"
    assert run(script, monkeypatch, workdir, file) == 0
    shape = arrays_of(workdir, 8)["params.embed.tokens"].shape
    assert python(docs("### With safetensors"), workdir) == [f"8 {shape}"]
    file.unlink()


def test_the_readme_predicts(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [block] = [one.split("```")[0] for one in (ROOT / "README.md").read_text().split("```python\n")[1:]]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(workdir)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    predictions = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]
    assert len(predictions) == 2
    for prediction in predictions:
        assert prediction["class"] in {"red", "green", "blue", "none"}
        assert 1 / 4 <= prediction["probability"] <= 1  # the largest of four


@pytest.mark.parametrize("step", [None, *STEPS])
def test_the_file_has_every_array_and_what_the_checkpoint_says(
    step: int | None, workdir: Path, tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(script, monkeypatch, workdir, tmp_path / "a.safetensors", *([f"--step={step}"] if step else [])) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    got, expected = load_file(tmp_path / "a.safetensors"), arrays_of(workdir, step or 8)
    assert got.keys() == expected.keys()
    assert any(name.startswith("optimizer.") for name in got)
    assert {"step", "key"} <= got.keys()
    for name, x in expected.items():
        assert got[name].dtype == x.dtype
        np.testing.assert_array_equal(got[name], x, name)
    with safe_open(tmp_path / "a.safetensors", "numpy") as file:
        metadata = file.metadata()
    info = json.loads((workdir / "checkpoints" / str(step or 8) / "info" / "metadata").read_text())
    assert metadata.keys() == info.keys() - {"checksum", "checksums", "private_checksums"}
    assert (metadata["data"], json.loads(metadata["private_key"])) == (info["data"], info["private_key"])
    for key in ("format", "step", "examples", "config"):
        assert json.loads(metadata[key]) == info[key]


def test_any_layout_and_dtype(tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export arrays in column-major order (which some readers return), in bfloat16, and an empty subtree."""
    columns = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    narrow = np.asarray(jax.numpy.ones(3, jax.numpy.bfloat16))
    tree = {"params": {"a": columns, "b": {"c": narrow}, "empty": {}}, "step": np.int32(4)}
    found = checkpoint.Checkpoint(4, tree, {}, {"step": 4, "checksums": {}})
    monkeypatch.setattr(checkpoint, "of_run", lambda _workdir, _step: found)
    assert run(script, monkeypatch, "anywhere", tmp_path / "a.safetensors") == 0
    got = load_file(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(got["params.a"], columns)
    np.testing.assert_array_equal(got["params.b.c"], narrow)
    assert got["params.b.c"].dtype == narrow.dtype
    assert got["step"] == 4
    assert len(got) == 3


MISTAKES = {
    "no run": (["{tmp}", "{tmp}/a.safetensors"], "{tmp} contains no run: {tmp}/config.json does not exist"),
    "no such step": (
        ["{run}", "{tmp}/a.safetensors", "--step=5"],
        "{run} contains no checkpoint of step 5; its checkpoints are from steps 3, 6, 8",
    ),
    "file exists": (["{run}", "{run}/config.json"], "FILE is '{run}/config.json', which exists; it must be a new file"),
    "no folder": (
        ["{run}", "{tmp}/b/a.safetensors"],
        "FILE is '{tmp}/b/a.safetensors'; it must be in an existing directory, and '{tmp}/b' is not one",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_end_in_one_line(
    name: str,
    workdir: Path,
    tmp_path: Path,
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments, message = MISTAKES[name]
    given = [one.format(run=workdir, tmp=tmp_path) for one in arguments]
    assert run(script, monkeypatch, *given) == 2
    assert capsys.readouterr().err == f"jaxpar: {message.format(run=workdir, tmp=tmp_path)}\n"
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_not_exported(
    workdir: Path,
    tmp_path: Path,
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The previous checkpoint is exported, with a message; if the damaged step was requested, nothing is."""
    own = shutil.copytree(workdir, tmp_path / "run")
    (own / "checkpoints" / "8" / "state" / "manifest.ocdbt").write_bytes(b"")
    assert run(script, monkeypatch, own, tmp_path / "a.safetensors", "--step=8") == 2
    error = capsys.readouterr().err
    assert "checkpoints/8 is damaged" in error
    assert error.count("\n") == 1
    assert run(script, monkeypatch, own, tmp_path / "a.safetensors") == 0
    output = capsys.readouterr().out
    assert "checkpoints/8 is damaged" in output
    assert "arrays of step 6" in output
    for step in STEPS:
        shutil.rmtree(own / "checkpoints" / str(step))
    assert run(script, monkeypatch, own, tmp_path / "b.safetensors") == 2
    assert capsys.readouterr().err == f"jaxpar: {own} contains no checkpoint yet\n"


def test_folders_files_and_keys_are_those_of_the_docs(workdir: Path) -> None:
    folder = workdir / "checkpoints" / "8"
    assert {path.name for path in folder.iterdir()} <= {
        *("state", "private", "info", "metrics", "_CHECKPOINT_METADATA", "commit_success.txt")
    }
    assert (folder / "private").is_dir()
    assert json.loads((folder / "metrics" / "metrics").read_text()).keys() == {"validation_loss"}
    info = json.loads((folder / "info" / "metadata").read_text())
    keys = {line.split("`")[1] for line in docs("### info").split("\n\n")[1].splitlines()[2:]}
    assert info.keys() == keys
    tree = checkpoint.read(folder).tree
    assert tree.keys() == {"step", "key", "params", "optimizer"}
    assert (tree["step"].dtype, tree["step"].shape, tree["key"].dtype, tree["key"].shape) == (
        "int32",
        (),
        "uint32",
        (2,),
    )
    np.testing.assert_array_equal(tree["key"], jax.random.key_data(jax.random.split(jax.random.key(0))[1]))


def test_checksums_are_what_the_docs_say(workdir: Path) -> None:
    info = json.loads((workdir / "checkpoints" / "8" / "info" / "metadata").read_text())
    arrays = arrays_of(workdir, 8)
    assert len(arrays) == len(info["checksums"])
    for name, x in arrays.items():
        path = "".join(f"['{part}']" for part in name.split("."))
        bits = np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint32).tolist()
        assert sum((2 * i + 1) * bit for i, bit in enumerate(bits)) % 2**32 == info["checksums"][path], name
