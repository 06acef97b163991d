"""Tests of the config keys that may change when a run resumes, and of runs that resume with another strategy."""

import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpar import checkpoint, training
from jaxpar import config as configs
from jaxpar.errors import UserError
from jaxpar.files import FILES, FOLDERS
from jaxpar.run import evaluate, resume
from jaxpar.run.build import Run
from jaxpar.run.restore import check_continued, saved_private_key
from jaxpar.run.resume import check_paths
from tests.runs import small_arguments, small_config
from tests.selection import slow
from tests.strategies.pipelines import relative_error
from tests.test_main import mistake
from tests.test_train import final_params, stop_at

# ---- what may change ----------------------------------------------------------------------------


HOW = "exchange exchange_options.group mesh.data pipeline.schedule optimizer.accumulation_steps model.remat data.train"
WHAT = "exchange_options.backward_passes_per_step num_steps optimizer.lr model.dtype model.num_layers data.source seed"


def test_every_key_has_a_rule() -> None:
    """A rule of its own, or of its section; and every name of a rule is a key or a section."""
    config = configs.default_config()
    keys, names = configs.keys(config), Counter(name for rule in resume.RESUME_RULES for name in rule.keys)
    sections = {key.partition(".")[0] for key in keys if "." in key}
    assert max(names.values()) == 1
    assert names.keys() <= keys.keys() | sections
    assert all(key in names or key.partition(".")[0] in names.keys() & sections for key in keys)
    assert [resume.may_change(key, config) for key in HOW.split()] == [True] * 7
    assert [resume.may_change(key, config) for key in WHAT.split()] == [False] * 7


@pytest.mark.parametrize("key", configs.keys(configs.default_config()))
def test_every_key_is_accepted_or_refused_with_both_values(key: str, tmp_path: Path) -> None:
    config = configs.default_config()
    configs.save(config, tmp_path)
    before = configs.keys(config)[key]
    after: Any = not before if isinstance(before, bool) else (7, 9) if isinstance(before, tuple) else 7
    with config.unlocked(), config.ignore_type():
        config.update_from_flattened_dict({key: f"{before}x" if isinstance(before, str) else after})
    now = configs.keys(config)[key]
    shown = [list(value) if isinstance(value, tuple) else value for value in (before, now)]
    text = f"config.{key}: {shown[0]!r} -> {shown[1]!r}"
    assert resume.differences(configs.read_saved(tmp_path) or {}, config) == {key: text}
    if resume.may_change(key, config):
        resume.check_resumable(config, tmp_path)
    else:
        with pytest.raises(UserError) as caught:
            resume.check_resumable(config, tmp_path)
        assert str(caught.value) == f"--workdir={tmp_path} contains a different run ({text}); use a new --workdir"


def test_all_refused_keys_are_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config=configs/default.py", f"--workdir={tmp_path}/run", *small_arguments(tmp_path)]
    (tmp_path / "run").mkdir()
    configs.save(small_config(tmp_path), tmp_path / "run")
    line = mistake(capsys, *arguments, "--config.seed=3", "--config.strategy=pipeline", "--config.optimizer.lr=0.5")
    assert "(config.optimizer.lr: 0.01 -> 0.5; config.seed: 0 -> 3)" in line


def test_an_empty_workdir_accepts_any_config(tmp_path: Path) -> None:
    resume.check_resumable(configs.default_config(), tmp_path)


def test_deleted_checkpoints(tmp_path: Path) -> None:
    """A run creates its folder of checkpoints before it writes metrics, and its last checkpoint before the result."""
    config = configs.default_config()
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"which contains metrics.jsonl, but no checkpoint; restore checkpoints/, or"):
        resume.check_resumable(config, tmp_path)
    (tmp_path / "checkpoints").mkdir()
    resume.check_resumable(config, tmp_path)  # the run was killed before its first checkpoint
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(UserError, match=r"which contains result.json, but no checkpoint; restore checkpoints/, or"):
        resume.check_resumable(config, tmp_path)


def test_a_run_that_was_killed_before_its_first_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 2, "split": "train", "loss": 1.0}\n')
    training.train(small_config(tmp_path, "--config.num_steps=1"), tmp_path / "run")
    assert f"\nrestarted from step 0, because {tmp_path}/run/checkpoints contains" in capsys.readouterr().out


def test_keys_of_other_versions() -> None:
    """A key that is missing in the saved config has its default; a key that no longer exists is reported."""
    config = configs.default_config()
    saved = configs.keys(config) | {"optimizer.gone": 1, "log.gone": 1}
    del saved["optimizer.eps"]
    saved = {key: list(value) if isinstance(value, tuple) else value for key, value in saved.items()}
    expected = {key: f"config.{key} no longer exists" for key in ("log.gone", "optimizer.gone")}
    assert resume.differences(saved, config) == expected
    with pytest.raises(UserError, match=r"\(config.optimizer.gone no longer exists\)"):
        resume.check_same_run(saved, config, "this is")


@pytest.mark.parametrize(
    ("text", "policy", "workers", "mitigations"),
    [
        ("live ssp of 3 workers with dc_asgd, clip_by_staleness", "ssp", 3, ["dc_asgd", "clip_by_staleness"]),
        ("local_sgd of 12 workers", "local_sgd", 12, []),
    ],
)
def test_private_keys_whose_policy_is_a_text(text: str, policy: str, workers: int, mitigations: list[str]) -> None:
    key = {"policy": policy, "workers": workers, "mitigations": mitigations, "table": "0123"}
    assert saved_private_key({"private_key": {"policy": text, "table": "0123"}}) == key
    assert saved_private_key({"private_key": key}) == key


# ---- whole runs ---------------------------------------------------------------------------------

# A GPT, whose head is tied to its embedding, with SGD, which does not amplify rounding errors of gradients.
MODEL = [
    "task=causal_lm",
    "model.name=gpt",
    "model.num_layers=2",
    "optimizer.name=sgd",
    "num_steps=10",
    "batch_size=16",
]
MODEL += [
    "data.max_length=8",
    "data.vocab_size=300",
    "data.validation_fraction=0",
    "data.test_fraction=0",
    "pipeline.num_microbatches=4",
]
SINGLE = ["strategy=single", "mesh.data=1"]
ZERO3 = ["mesh.data=4", "exchange=zero3"]
ZB_H1 = ["strategy=pipeline", "mesh.stage=2", "mesh.data=2", "pipeline.schedule=zb_h1"]
PMAP = ["mesh.data=8", "data_parallel.implementation=pmap"]
GPIPE = ["strategy=pipeline", "mesh.stage=2", "mesh.data=1", "pipeline.schedule=gpipe"]
SYNC = ["strategy=async_data_parallel", "asynchronous.policy=sync"]
PAIRS = {"zero3 to zb_h1": (ZERO3, ZB_H1), "gpipe to pmap": (GPIPE, PMAP), "sync to zero3": (SYNC, ZERO3)}


class Recorded:
    """Records the examples that runs read for training, step by step."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []
        self.load = evaluate.load_batches

    def __call__(
        self, run: Run, batches: Any, start: int, stop: int, **options: bool
    ) -> Iterator[dict[str, np.ndarray]]:
        for rows in self.load(run, batches, start, stop, **options):
            if batches is run.batches:
                self.rows.append(np.concatenate([rows["inputs"], rows["labels"]], axis=1))
            yield rows


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    record = Recorded()
    monkeypatch.setattr(training, "load_batches", record)
    return record


def trained(folder: Path, workdir: Path, overrides: list[str], stop: int | None = None) -> None:
    """Train in `workdir`, resuming if possible, to the end or until a signal after `stop` steps."""
    config = small_config(folder, *(f"--config.{one}" for one in MODEL + overrides))
    with pytest.MonkeyPatch.context() as patch:
        if stop is None:
            training.train(config, workdir)
            return
        stop_at(patch, stop, signal.SIGTERM)
        with pytest.raises(training.Stopped):
            training.train(config, workdir)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> tuple[Path, list[np.ndarray]]:
    """An uninterrupted run on one device, and the examples it read."""
    record = Recorded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "load_batches", record)
        trained(folder, folder / "uninterrupted", SINGLE)
    return folder / "uninterrupted", record.rows


@pytest.mark.parametrize("pair", ["zero3 to zb_h1", slow("gpipe to pmap"), slow("sync to zero3")])
def test_a_run_that_changes_its_strategy_equals_an_uninterrupted_run(
    pair: str,
    folder: Path,
    tmp_path: Path,
    uninterrupted: tuple[Path, list[np.ndarray]],
    recorded: Recorded,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = PAIRS[pair]
    trained(folder, tmp_path / "run", first, 4)
    capsys.readouterr()
    trained(folder, tmp_path / "run", second)
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("resumed   from step 4")
    assert any(line.startswith("changed   config.") for line in lines[at + 1 :])
    expected, rows = uninterrupted
    assert len(recorded.rows) == len(rows) == 10
    for step, own in enumerate(rows):
        np.testing.assert_array_equal(recorded.rows[step], own, f"step {step}")
    got, wanted = final_params(tmp_path / "run"), final_params(expected)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if value.dtype.kind in "iu":
            np.testing.assert_array_equal(got[name], value, name)
        elif "['key']['bias']" not in name:  # whose gradient is rounding error
            assert relative_error(got[name], value) < 1e-6, name


def test_changes_since_the_checkpoint_are_printed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The changes since the checkpoint are printed, even if config.json was overwritten since or is missing."""
    trained(folder, tmp_path / "run", SINGLE, 4)
    configs.save(small_config(folder, *(f"--config.{one}" for one in MODEL + ZERO3)), tmp_path / "run")
    capsys.readouterr()
    trained(folder, tmp_path / "run", [*SINGLE, "log.every_steps=3"], 2)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("changed ")] == ["changed   config.log.every_steps: 2 -> 3"]
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(UserError, match=r"contains a different run \(config.seed: 0 -> 5\)"):
        trained(folder, tmp_path / "run", [*SINGLE, "seed=5"])
    (tmp_path / "run" / "config.json").write_text('{"batch_si')  # the checkpoint also contains the config
    trained(folder, tmp_path / "run", SINGLE, 2)
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] == 8
    assert configs.keys(configs.read_config(tmp_path / "run"))["strategy"] == "single"


def test_a_checkpoint_without_a_config_is_accepted(folder: Path, tmp_path: Path) -> None:
    """The first checkpoints of format 1 have no config; config.json was compared before."""
    config = small_config(folder)
    run: Any = SimpleNamespace(config=config, workdir=tmp_path, dataset=SimpleNamespace(fingerprint="f"), num_steps=5)
    before = check_continued(run, checkpoint.Checkpoint(4, {}, {}, {"data": "f"}))
    assert resume.differences(before, config) == {}
    with pytest.raises(UserError, match=r"the data has changed since the checkpoint of step 4"):
        check_continued(run, checkpoint.Checkpoint(4, {}, {}, {"data": "g"}))


CONSTANT = [*SINGLE, "optimizer.schedule=constant", "optimizer.warmup=0"]


def test_the_length_may_change_with_a_constant_learning_rate(folder: Path, tmp_path: Path) -> None:
    """The result is that of a run with the new length from the start; it must not be shorter than the steps done."""
    trained(folder, tmp_path / "long", CONSTANT)
    trained(folder, tmp_path / "run", [*CONSTANT, "num_steps=6"])
    with pytest.raises(
        UserError, match=r"config.num_steps is 4 and .* is 4 steps; it must be at least the 6 steps of the checkpoint"
    ):
        trained(folder, tmp_path / "run", [*CONSTANT, "num_steps=4"])
    trained(folder, tmp_path / "run", CONSTANT)
    got, expected = final_params(tmp_path / "run"), final_params(tmp_path / "long")
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, name)
    with pytest.raises(UserError, match=r"config.num_steps: 10 -> 12"):
        trained(folder, tmp_path / "run", [*SINGLE, "num_steps=12"])


@pytest.mark.parametrize("name", [*FOLDERS, *FILES, "result.json.tmp"])
def test_a_path_of_another_kind(name: str, tmp_path: Path) -> None:
    """All paths that a run writes are checked before it starts."""
    wrong, right = ("file", "folder") if name in FOLDERS else ("folder", "file")
    (tmp_path / name).touch() if name in FOLDERS else (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"--workdir is '.*', whose {name} is a {wrong}; it must be a {right}, or not"):
        resume.check_resumable(configs.default_config(), tmp_path)


def test_a_path_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"whose metrics.jsonl is a device or pipe; it must be a file, or not exist"):
        resume.check_resumable(configs.default_config(), tmp_path)


def test_a_folder_that_is_a_broken_link(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path / "nowhere")
    with pytest.raises(
        UserError, match=r"whose checkpoints is a link to '.*nowhere', which does not exist; it must be"
    ):
        resume.check_resumable(configs.default_config(), tmp_path)
    (tmp_path / "nowhere").mkdir()
    resume.check_resumable(configs.default_config(), tmp_path)


def test_a_run_writes_only_paths_that_are_checked(uninterrupted: tuple[Path, list[np.ndarray]]) -> None:
    assert {path.name for path in uninterrupted[0].iterdir()} <= {*FOLDERS, *FILES}


def test_a_checkpoint_that_is_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "4").symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"checkpoints/4 is a symbolic link; it must be a folder, or not exist$"):
        resume.check_resumable(small_config(folder), tmp_path)


def test_files_may_move(folder: Path, tmp_path: Path) -> None:
    """The paths of data and tokenizer may change, but not the contents of the files."""
    trained(folder, tmp_path / "run", SINGLE, 2)
    shutil.copy(tmp_path / "run" / "tokenizer.json", tmp_path / "given.json")
    shutil.copy(folder / "data.csv", tmp_path / "moved.csv")
    moved = [*SINGLE, f"data.train={tmp_path}/moved.csv", f"data.tokenizer={tmp_path}/given.json"]
    trained(folder, tmp_path / "run", moved, 2)
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] == 4
    other = json.loads((tmp_path / "given.json").read_text()) | {"normalizer": {"type": "Lowercase"}}
    (tmp_path / "given.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match=r"tokenizer.json differs from .*given.json"):
        trained(folder, tmp_path / "run", moved)


def test_a_workdir_in_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "ledger").mkdir(parents=True)
    (tmp_path / "run" / "starts.jsonl").touch()
    for name in ("run/ledger", "run/ledger/new"):
        where = re.escape(f"--workdir is '{tmp_path}/{name}', which belongs to the run in {tmp_path}/run; it must be")
        with pytest.raises(UserError, match=where):
            check_paths(tmp_path / name)
    check_paths(tmp_path / "run")
    check_paths(tmp_path / "run" / "new")
