"""Tests loading the model of a run: the best checkpoint, onto any number of devices, and errors."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxpar import checkpoint
from jaxpar.errors import UserError
from jaxpar.use.inference.load import load_trained


def losses(workdir: Path) -> dict[int, float]:
    """Return the validation loss by step, from the files of the checkpoints."""
    found = {}
    for path in (workdir / "checkpoints").glob("*/metrics/metrics"):
        found[int(path.parts[-3])] = json.loads(path.read_text())["validation_loss"]
    return found


def set_loss(workdir: Path, step: int, loss: float) -> None:
    """Make `loss` the validation loss of a checkpoint, as a checkpoint without a loss in its info has it."""
    folder = workdir / "checkpoints" / str(step)
    info = json.loads((folder / "info" / "metadata").read_text())
    info.pop("validation_loss", None)
    info.pop("checksum")
    (folder / "info" / "metadata").write_text(json.dumps(info))
    (folder / "metrics").mkdir(exist_ok=True)
    (folder / "metrics" / "metrics").write_text(json.dumps({"validation_loss": loss}))


def test_the_best_checkpoint_on_all_devices(classifier: Path, tmp_path: Path) -> None:
    found = losses(classifier)
    best = load_trained(classifier)
    assert best.step == min(found, key=found.__getitem__)
    workdir = shutil.copytree(classifier, tmp_path / "run")
    other = next(step for step in checkpoint.steps(workdir / "checkpoints") if step != best.step)
    set_loss(workdir, other, 0.001)
    loaded = load_trained(workdir)
    assert loaded.step == other
    saved = checkpoint.read(workdir / "checkpoints" / str(other)).tree["params"]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded.params), saved)
    for leaf in jax.tree.leaves(loaded.params):
        assert len(leaf.addressable_shards) == 8
        assert leaf.is_fully_replicated
    assert loaded.info.class_names == ("blue", "green", "none", "red")
    assert loaded.tokenizer is not None
    assert loaded.names.decode(loaded.tokenizer.encode("red cat").ids) == "red cat"


def test_one_step_on_one_device(classifier: Path) -> None:
    step = checkpoint.steps(classifier / "checkpoints")[0]
    loaded = load_trained(str(classifier), step, jax.devices()[3:4])
    assert loaded.step == step
    assert {device for leaf in jax.tree.leaves(loaded.params) for device in leaf.devices()} == {jax.devices()[3]}


def test_a_damaged_best_checkpoint(classifier: Path, tmp_path: Path) -> None:
    workdir = shutil.copytree(classifier, tmp_path / "run")
    first, *_, newest = checkpoint.steps(workdir / "checkpoints")
    set_loss(workdir, first, 0.001)
    (workdir / "checkpoints" / str(first) / "state" / "manifest.ocdbt").write_bytes(b"")
    lines: list[str] = []
    assert load_trained(workdir, log=lines.append).step == newest
    [line] = lines
    assert line.startswith(f"the best checkpoint, {workdir}/checkpoints/{first}, is damaged: ")


def test_mistakes(classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"contains no run: .*config.json does not exist"):
        load_trained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="contains no checkpoint yet"):
        load_trained(tmp_path)
    workdir = shutil.copytree(classifier, tmp_path / "run")
    info = json.loads((workdir / "data.json").read_text())
    (workdir / "data.json").write_text(json.dumps(info | {"num_classes": 3, "class_names": ["a", "b", "c"]}))
    with pytest.raises(UserError, match=r"is from a different model: \['head'\].* is \(.*4.*; it must be \(.*3"):
        load_trained(workdir)
    (workdir / "data.json").write_text(json.dumps(info))
    other = Tokenizer.from_file(str(workdir / "tokenizer.json"))
    other.add_tokens(["another"])
    other.save(str(workdir / "tokenizer.json"))
    size = info["vocab_size"]
    with pytest.raises(UserError, match=rf"json has {size + 1} tokens; it must be that of the run, which has {size}"):
        load_trained(workdir)
    (workdir / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer.json cannot be read \(No such file"):
        load_trained(workdir)
