"""Tests reading checkpoints without jaxpar: with the programs of the docs, and from the files of `jaxpar export`."""

import ast
import errno
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from jaxpar import checkpoint, data, models, training
from jaxpar import config as configs
from jaxpar.cluster import find_cluster
from jaxpar.commands import export
from jaxpar.commands.export import completed
from jaxpar.errors import UserError, format_bytes
from jaxpar.use.export import hugging_face
from tests.docs.test_pages import blocks
from tests.models.small import fast_jit
from tests.runs import change_info, run_script, small_config

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
    """Run the Python block of a section on `workdir`, with one device and without jaxpar; return its output."""
    [block] = [one.split("```")[0] for one in docs.split("```python\n")[1:]]
    assert "jaxpar" not in block
    block = block.replace("runs/stop/checkpoints/78", str(workdir / "checkpoints" / "8"))
    block = block.replace("runs/quickstart_program", str(workdir / "program"))
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "XLA_FLAGS")}
    command = [sys.executable, "-c", block]
    result = subprocess.run(
        command, env=environment | {"JAX_PLATFORMS": "cpu"}, cwd=workdir, text=True, capture_output=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def docs(heading: str, page: str = "reference/checkpoint.md") -> str:
    text = (ROOT / "docs" / page).read_text()
    return text.split(heading)[1]


def run(monkeypatch: pytest.MonkeyPatch, workdir: Path, output: Path, *more: str, kind: str = "safetensors") -> int:
    return run_script(monkeypatch, export, f"--workdir={workdir}", f"--output={output}", f"--format={kind}", *more)


def test_orbax_reads_it_as_the_docs_say(workdir: Path) -> None:
    block = docs("## Read a checkpoint without jaxpar")
    body = block.split("def read(folder):\n")[1].split("\n\n")[0].splitlines()
    assert len(body) + 1 <= 6  # `def` and five lines
    shape = arrays_of(workdir, 8)["params.embed.tokens"].shape
    assert python(block, workdir) == [f"8 {shape}"]


def test_a_program_classifies_as_the_docs_say(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of docs/howto/export.md, and the model on one text without padding."""
    assert run(monkeypatch, workdir, workdir / "program", "--step=6", kind="stablehlo") == 0
    lines = python(docs("## StableHLO", "howto/export.md"), workdir)
    config = configs.read_config(workdir)
    tree, info = checkpoint.read(workdir / "checkpoints" / "6").tree, data.read_info(workdir)
    apply = fast_jit(models.build(config, info, find_cluster()).apply)
    tokenizer = Tokenizer.from_file(str(workdir / "tokenizer.json"))
    for text, line in zip(("a small bird with a red breast", "move at great speed"), lines, strict=True):
        inputs = np.array([tokenizer.encode(text).ids], np.int32)
        weights_C = np.exp(apply(tree["params"], {"inputs": inputs, "mask": np.ones_like(inputs, bool)})[0])
        probabilities_C = weights_C / weights_C.sum()
        name, probability = line.split()
        assert name == info.class_names[probabilities_C.argmax()]
        assert abs(float(probability) - probabilities_C.max()) < 1e-4
    shutil.rmtree(workdir / "program")


def test_the_tutorial_predicts(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "docs/tutorials/train.md"
    [block] = [text for language, text in blocks(page) if language == "python" and "jaxpar.load(" in text]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(workdir)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, page, "exec"), {"__name__": "__main__"})
    predictions = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]
    assert len(predictions) == 2
    for prediction in predictions:
        assert prediction["class"] in {"red", "green", "blue", "none"}
        assert 1 / 4 <= prediction["probability"] <= 1  # the largest of four


@pytest.mark.parametrize("flag", ["--checkpoint=newest", *(f"--step={step}" for step in STEPS)])
def test_the_file_has_every_array_and_what_the_checkpoint_says(
    flag: str, workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = int(flag[-1]) if "step" in flag else 8
    assert run(monkeypatch, workdir, tmp_path / "a.safetensors", flag) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    got, expected = load_file(tmp_path / "a.safetensors"), arrays_of(workdir, step)
    assert got.keys() == expected.keys()
    assert any(name.startswith("optimizer.") for name in got)
    assert {"step", "key"} <= got.keys()
    for name, x in expected.items():
        assert got[name].dtype == x.dtype
        np.testing.assert_array_equal(got[name], x, name)
    with safe_open(tmp_path / "a.safetensors", "numpy") as file:
        metadata = file.metadata()
    info = json.loads((workdir / "checkpoints" / str(step) / "info" / "metadata").read_text())
    assert metadata.keys() == info.keys() - {"checksum", "checksums", "private_checksums"}
    assert (metadata["data"], json.loads(metadata["private_key"])) == (info["data"], info["private_key"])
    for key in ("format", "step", "examples", "config"):
        assert json.loads(metadata[key]) == info[key]


def test_any_layout_and_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export arrays in column-major order (which some readers return), in bfloat16, and an empty subtree."""
    columns = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    narrow = np.asarray(jax.numpy.ones(3, jax.numpy.bfloat16))
    tree = {"params": {"a": columns, "b": {"c": narrow}, "empty": {}}, "step": np.int32(4)}
    found = checkpoint.Checkpoint(4, tree, {}, {"step": 4, "checksums": {}})
    monkeypatch.setattr(checkpoint, "of_run", lambda *_arguments, **_options: found)
    assert run(monkeypatch, Path("anywhere"), tmp_path / "a.safetensors") == 0
    got = load_file(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(got["params.a"], columns)
    np.testing.assert_array_equal(got["params.b.c"], narrow)
    assert got["params.b.c"].dtype == narrow.dtype
    assert got["step"] == 4
    assert len(got) == 3


def set_loss(loss: float, info: dict[str, Any]) -> None:
    info["validation_loss"] = loss


def test_the_best_checkpoint_is_exported(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shutil.copytree(workdir, tmp_path / "run")
    for step, loss in {3: 0.7, 6: 0.2, 8: 0.5}.items():
        change_info(own / "checkpoints" / str(step), partial(set_loss, loss))
    for flags, step in ([], 6), (["--checkpoint=best"], 6), (["--checkpoint=newest"], 8), (["--step=3"], 3):
        file = tmp_path / f"{step}{len(flags)}{flags}.safetensors"
        assert run(monkeypatch, own, file, *flags) == 0
        assert load_file(file)["step"] == step
        assert capsys.readouterr().out == f"{file}: step {step}, {format_bytes(file.stat().st_size)}\n"
    assert run(monkeypatch, own, tmp_path / "a.safetensors", "--step=3", "--checkpoint=best") == 2
    assert capsys.readouterr().err == "jaxpar: --step is 3; it must not be set together with --checkpoint\n"
    (own / "checkpoints" / "6" / "state" / "manifest.ocdbt").write_bytes(b"")
    assert run(monkeypatch, own, tmp_path / "a.safetensors") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"the best checkpoint, {own}/checkpoints/6, is damaged: ")
    assert ": step 8, " in second


def test_errors_of_safetensors_leave_nothing(tmp_path: Path) -> None:
    """safetensors raises its own exception when a disk is full."""
    error = r"--output is '.*/a'; it must be a writable file: Error while serializing: I/O error"
    with pytest.raises(UserError, match=error), completed(tmp_path / "a", "file") as path:
        save_file({"a": np.zeros(3)}, path / "b")  # `path` is no directory
    assert not list(tmp_path.iterdir())


# The values of --workdir, --output, --format and other flags, and the message.
MISTAKES = {
    "no run": ("{tmp}", "{tmp}/a", "safetensors", "", "{tmp} contains no run: {tmp}/config.json does not exist"),
    "no such step": (
        *("{run}", "{tmp}/a", "safetensors", "--step=5"),
        "{run} contains no checkpoint of step 5; its checkpoints are from steps 3, 6, 8",
    ),
    "file exists": (
        *("{run}", __file__, "safetensors", ""),
        f"--output is '{__file__}', which exists; it must be a new file",
    ),
    "directory exists": (
        *("{run}", "{run}/..", "stablehlo", ""),
        "--output is '{run}/..', which exists; it must be a new directory",
    ),
    "file in place of a directory": (
        *("{run}", __file__, "hf", ""),
        f"--output is '{__file__}', which exists; it must be a new directory",
    ),
    "no folder": (
        *("{run}", "{tmp}/b/a", "hf", ""),
        "--output is '{tmp}/b/a'; it must be in an existing directory, and '{tmp}/b' is not one",
    ),
    "no format": (
        *("{run}", "{tmp}/a", "onnx", ""),
        "--format is 'onnx'; it must be one of safetensors, hf, stablehlo",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_end_in_one_line(
    name: str, workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output, kind, flags, message = (one.format(run=workdir, tmp=tmp_path) for one in MISTAKES[name])
    assert run(monkeypatch, Path(source), Path(output), *flags.split(), kind=kind) == 2
    assert capsys.readouterr().err == f"jaxpar: {message}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", export.FORMATS)
def test_an_export_that_fails_leaves_nothing(
    kind: str, workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk becomes full while the last file is written."""

    def full(*_arguments: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module, name in ((export, "save_file"), (hugging_face, "save_file"), (shutil, "copyfile")):
        monkeypatch.setattr(module, name, full)
    assert run(monkeypatch, workdir, tmp_path / "out", kind=kind) == 2
    thing = "file" if kind == "safetensors" else "directory"
    cause = f"which cannot be used (No space left on device); it must be a writable {thing}"
    assert capsys.readouterr().err == f"jaxpar: --output is '{tmp_path}/out', {cause}\n"
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_not_exported(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The previous checkpoint is exported, with a message; if the damaged step was requested, nothing is."""
    own = shutil.copytree(workdir, tmp_path / "run")
    (own / "checkpoints" / "8" / "state" / "manifest.ocdbt").write_bytes(b"")
    assert run(monkeypatch, own, tmp_path / "a.safetensors", "--step=8") == 2
    error = capsys.readouterr().err
    assert "checkpoints/8 is damaged" in error
    assert error.count("\n") == 1
    assert run(monkeypatch, own, tmp_path / "a.safetensors", "--checkpoint=newest") == 0
    output = capsys.readouterr().out
    assert "checkpoints/8 is damaged" in output
    assert ": step 6, " in output
    for step in STEPS:
        shutil.rmtree(own / "checkpoints" / str(step))
    assert run(monkeypatch, own, tmp_path / "b.safetensors") == 2
    assert capsys.readouterr().err == f"jaxpar: {own} contains no checkpoint yet\n"


def test_folders_files_and_keys_are_those_of_the_docs(workdir: Path) -> None:
    folder = workdir / "checkpoints" / "8"
    assert {path.name for path in folder.iterdir()} <= {
        *("state", "private", "info", "metrics", "_CHECKPOINT_METADATA", "commit_success.txt")
    }
    assert (folder / "private").is_dir()
    assert json.loads((folder / "metrics" / "metrics").read_text()).keys() == {"validation_loss"}
    info = json.loads((folder / "info" / "metadata").read_text())
    keys = {line.split("`")[1] for line in docs("## info").split("\n\n")[1].splitlines()[2:]}
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
