"""Tests that checkpoints are written atomically and that damage to real files is detected."""

import asyncio
import itertools
import logging
import math
import multiprocessing
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import checkpoint
from jaxpar.checkpoint import checksums, reader, writer
from jaxpar.checkpoint.late_errors import hide_late_errors
from jaxpar.errors import UserError
from tests.runs import change_info


def tree(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {
        "step": jnp.asarray(step, jnp.int32),
        "params": {"block_0": {"kernel": jnp.asarray(rng.normal(size=(256, 128)), jnp.float32)}},
        "optimizer": {"0": {"mu": jnp.asarray(rng.normal(size=(5,)), jnp.bfloat16)}, "1": {}},
    }


LIKE = jax.eval_shape(lambda: tree(0))


def save(directory: Path, steps: dict[int, float | None], *, keep: int = 2, keep_best: bool = True) -> None:
    saver = checkpoint.Saver(directory, keep=keep, keep_best=keep_best)
    for step, loss in steps.items():
        saver.save(tree(step), {"data": "abc"}, loss)
    saver.close()


def restored_step(directory: Path) -> int:
    found, _ = restore(directory)
    assert found is not None
    return found.step


def restore(directory: Path) -> tuple[checkpoint.Checkpoint | None, list[str]]:
    logged: list[str] = []
    return checkpoint.restore(directory, LIKE, logged.append), logged


@pytest.mark.parametrize("in_event_loop", [False, True], ids=["script", "notebook"])
def test_nothing_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, in_event_loop: bool) -> None:
    """In a program of the user, unlike in the command line, warnings of orbax are visible."""

    def save_and_restore() -> None:
        save(tmp_path, {1: 0.5, 2: 0.75, 3: None, 4: None})
        assert restored_step(tmp_path) == 4
        assert checkpoint.steps(tmp_path) == [1, 3, 4]  # the best and the last two

    async def run() -> None:
        save_and_restore()

    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.WARNING, logger="absl")
    if in_event_loop:
        asyncio.run(run())
    else:
        save_and_restore()
    assert [record.getMessage() for record in caplog.records] == []


def test_round_trip_is_bitwise(tmp_path: Path) -> None:
    save(tmp_path / "c", {7: None})
    found, logged = restore(tmp_path / "c")
    assert found is not None
    assert (found.step, found.info["data"], logged) == (7, "abc", [])
    for expected, got in zip(jax.tree.leaves(tree(7)), jax.tree.leaves(found.tree), strict=True):
        assert got.dtype == expected.dtype
        assert np.asarray(expected).tobytes() == np.asarray(got).tobytes()
    alone = checkpoint.read(tmp_path / "c" / "7")  # without `like`
    np.testing.assert_array_equal(alone.tree["params"]["block_0"]["kernel"], tree(7)["params"]["block_0"]["kernel"])


@pytest.mark.parametrize("recorded", [False, True])
def test_a_loss_of_nan_is_never_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool) -> None:
    """recorded: NaN is in the checkpoint, as version 0.1 wrote it."""
    if recorded:
        anything = SimpleNamespace(isfinite=lambda _: True, isnan=math.isnan, inf=math.inf)
        monkeypatch.setattr(writer, "math", anything)
    save(tmp_path / "c", {1: 0.5, 2: math.nan, 3: 0.7, 4: 0.8}, keep=1)
    assert checkpoint.steps(tmp_path / "c") == [1, 4]


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    save(tmp_path / "c", {1: 0.9, 2: 0.3, 3: 0.5, 4: None, 5: None})
    assert checkpoint.steps(tmp_path / "c") == [2, 4, 5]
    save(tmp_path / "d", {1: 0.9, 2: 0.3, 3: 0.5, 4: None}, keep=1, keep_best=False)
    assert checkpoint.steps(tmp_path / "d") == [4]


def test_the_best_is_kept_across_processes(tmp_path: Path) -> None:
    """A saver reads the losses of checkpoints written by earlier savers."""
    save(tmp_path / "c", {1: 0.9, 2: 0.3, 3: 0.5, 4: None})
    save(tmp_path / "c", {5: 0.6, 6: None, 7: None})
    assert checkpoint.steps(tmp_path / "c") == [2, 6, 7]
    save(tmp_path / "c", {8: 0.2, 9: None, 10: None})
    assert checkpoint.steps(tmp_path / "c") == [8, 9, 10]


def test_an_empty_directory(tmp_path: Path) -> None:
    assert restore(tmp_path / "c") == (None, [])


def array_file(folder: Path) -> Path:
    """Return the file with the data of the largest array."""
    return max(folder.glob("state/**/d/*"), key=lambda path: path.stat().st_size)


def truncate(folder: Path) -> None:
    path = array_file(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pipe_in_state(folder: Path) -> None:
    array_file(folder).unlink()
    os.mkfifo(array_file(folder).parent / "pipe")


def pipe_as_info(folder: Path) -> None:
    (folder / "info" / "metadata").unlink()
    os.mkfifo(folder / "info" / "metadata")


def flip(folder: Path) -> None:
    path = array_file(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove_array_file(folder: Path) -> None:
    array_file(folder).unlink()


def empty_info(folder: Path) -> None:
    (folder / "info" / "metadata").write_text("")


def another_step(folder: Path) -> None:
    """Change the step in the info."""
    change_info(folder, lambda info: info.update(step=info["step"] + 1))


def another_name(folder: Path) -> None:
    """Change a letter of array names in the checksums."""

    def rename(info: dict[str, Any]) -> None:
        info["checksums"] = {name.replace("params", "paramt"): number for name, number in info["checksums"].items()}

    change_info(folder, rename)


def another_fingerprint(folder: Path) -> None:
    """Change a letter of the data fingerprint. This must not be reported as different data."""
    metadata = folder / "info" / "metadata"
    metadata.write_text(metadata.read_text().replace("abc", "abd"))


def another_name_in_state(folder: Path) -> None:
    """Change a letter of an array name in orbax's metadata. This must not be reported as a different model."""
    metadata = folder / "state" / "_METADATA"
    metadata.write_text(metadata.read_text().replace("kernel", "kernem"))


def remove_state(folder: Path) -> None:
    shutil.rmtree(folder / "state")


DAMAGES = [
    truncate,
    flip,
    remove_array_file,
    empty_info,
    another_step,
    another_name,
    another_fingerprint,
    another_name_in_state,
    remove_state,
    pipe_in_state,
    pipe_as_info,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_falls_back_to_the_newest_intact_checkpoint(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save(tmp_path / "c", {1: None, 2: None})
    damage(tmp_path / "c" / "2")
    found, logged = restore(tmp_path / "c")
    assert found is not None
    assert found.step == 1
    assert len(logged) == 1
    assert "2 is damaged" in logged[0]
    assert "\n" not in logged[0]
    assert checkpoint.steps(tmp_path / "c") == [1, 2]  # reading changes no files
    checkpoint.set_aside(tmp_path / "c", after=found.step)
    assert checkpoint.steps(tmp_path / "c") == [1]
    assert (tmp_path / "c" / "2.damaged").is_dir()
    save(tmp_path / "c", {2: None})  # the step can be written again
    assert restored_step(tmp_path / "c") == 2


@pytest.mark.parametrize(
    "text", ["", '{"validation_loss": 0.1}', "{}", None, "[" * 100_000, f'{{"validation_loss": 1{"0" * 400}}}']
)
def test_a_damaged_validation_loss_is_repaired(text: str | None, tmp_path: Path) -> None:
    """Otherwise orbax fails to open the folder or keeps the wrong checkpoint."""
    save(tmp_path / "c", {1: 0.5, 2: 0.3, 3: None})
    file = tmp_path / "c" / "2" / "metrics" / "metrics"
    if text is None:
        shutil.rmtree(file.parent)
    else:
        file.write_text(text)
    logged: list[str] = []
    checkpoint.repair_metrics(tmp_path / "c", logged.append)
    assert logged == [f"checkpoint {tmp_path}/c/2: the damaged validation loss was restored to 0.3000"]
    checkpoint.repair_metrics(tmp_path / "c", logged.append)
    assert len(logged) == 1
    save(tmp_path / "c", {4: 0.4, 5: None, 6: None})
    assert checkpoint.steps(tmp_path / "c") == [2, 5, 6]


def test_all_damaged_is_an_error(tmp_path: Path) -> None:
    save(tmp_path / "c", {1: None})
    truncate(tmp_path / "c" / "1")
    for _ in range(2):  # the second attempt must not start a new run
        with pytest.raises(UserError, match=r"all checkpoints in .* are damaged: steps \[1\]"):
            restore(tmp_path / "c")


def test_a_checkpoint_that_is_removed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keep=1, a run that is being trained replaces the only checkpoint."""
    save(tmp_path / "c", {1: None}, keep=1)
    shapes = reader._shapes

    def removing(path: Path) -> Any:
        if path.parent.name == "1":
            save(tmp_path / "c", {2: None}, keep=1, keep_best=False)
        return shapes(path)

    monkeypatch.setattr(reader, "_shapes", removing)
    found, logged = restore(tmp_path / "c")
    assert found is not None
    assert (found.step, logged) == (2, [])


def copied_run(folder: Path, losses: dict[int, float | None]) -> Path:
    """Return a workdir whose checkpoints have these validation losses by step."""
    save(folder / "checkpoints", losses, keep=len(losses))
    return folder


def chosen(workdir: Path, **options: Any) -> tuple[int, list[str]]:
    lines: list[str] = []
    found = checkpoint.of_run(workdir, log=lines.append, **options)
    assert int(found.tree["step"]) == found.step
    return found.step, lines


def test_the_best_checkpoint_of_a_run(tmp_path: Path) -> None:
    """The one with the lowest loss, the first of several, and the newest without any loss."""
    run = copied_run(tmp_path / "run", {1: 0.9, 2: 0.3, 3: 0.3, 4: 0.5, 5: None})
    assert chosen(run, best=True) == (2, [])
    assert chosen(run) == (5, [])
    assert chosen(run, step=4, best=True) == (4, [])
    metrics = run / "checkpoints" / "4" / "metrics" / "metrics"
    metrics.write_text('{"validation_loss": 0.1}')  # the info, which has a checksum, is right
    assert chosen(run, best=True) == (2, [])
    change_info(run / "checkpoints" / "4", lambda info: info.pop("validation_loss"))  # as in the first checkpoints
    assert chosen(run, best=True) == (4, [])
    metrics.write_text('{"validation_loss": NaN}')
    assert chosen(run, best=True) == (2, [])
    assert chosen(copied_run(tmp_path / "other", {1: None, 2: None}), best=True) == (2, [])


@pytest.mark.parametrize("damage", [truncate, empty_info, remove_state])
def test_a_damaged_best_checkpoint_is_replaced_by_the_newest(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    run = copied_run(tmp_path / "run", {1: 0.9, 2: 0.3, 3: 0.5, 4: None})
    best = run / "checkpoints" / "2"
    damage(best)
    step, [line] = chosen(run, best=True)
    assert step == 4
    assert line.startswith(f"the best checkpoint, {best}, is damaged: ")
    assert line.endswith("; using that of step 4")
    truncate(run / "checkpoints" / "4")
    step, lines = chosen(run, best=True)
    assert (step, len(lines)) == (3, 2)


def test_a_checkpoint_without_files_is_reported(tmp_path: Path) -> None:
    """The checkpoint may have been the best one."""
    run = copied_run(tmp_path / "run", {1: 0.9, 2: 0.3, 3: 0.5})
    shutil.rmtree(run / "checkpoints" / "2")
    (run / "checkpoints" / "2").mkdir()
    start = f"checkpoint {run}/checkpoints/2 is damaged, and its validation loss is unknown: "
    for step in (3, 1):
        chosen_step, [*_, line] = chosen(run, best=True)
        assert chosen_step == step
        assert line.startswith(start)
        assert line.endswith(f"; using that of step {step}")
        shutil.rmtree(run / "checkpoints" / "3", ignore_errors=True)


def test_late_errors_are_hidden(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str] = []
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: shown.append(str(unraisable.exc_value)))
    for _ in range(2):
        hide_late_errors()
    for text in ("Event loop is closed", "another"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))
    assert shown == ["another"]
    monkeypatch.setattr("sys.excepthook", lambda _kind, value, _trace: shown.append(str(value)))
    hide_late_errors()
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError, match="Event loop is closed") as caught:
        loop.call_soon_threadsafe(print)
    assert caught.tb.tb_next
    sys.excepthook(caught.type, caught.value, caught.tb.tb_next)  # as tensorstore's threads do
    assert shown == ["another"]
    sys.excepthook(caught.type, caught.value, caught.tb)  # from our code
    assert shown == ["another", "Event loop is closed"]
    with caplog.at_level(logging.ERROR, "asyncio"):
        for text in ("Future exception was never retrieved: in OCDBT database", "another"):
            logging.getLogger("asyncio").error(text)
    assert caplog.messages == ["another"]


def test_files_that_may_not_be_read_are_not_damaged(tmp_path: Path) -> None:
    refused = reader._unreadable(tmp_path, ValueError('PERMISSION_DENIED: Error reading "a" in OCDBT database'))
    assert isinstance(refused, PermissionError)
    assert refused.filename == str(tmp_path)
    assert str(reader._unreadable(tmp_path, ValueError('OUT_OF_RANGE: Error reading "a/0" in'))) == "a/0 cannot be read"


def test_a_best_checkpoint_that_is_removed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = copied_run(tmp_path / "run", {1: 0.5})
    shapes = reader._shapes

    def removing(path: Path) -> Any:
        if path.parent.name == "1":
            save(run / "checkpoints", {2: 0.4, 3: None}, keep=1)
        return shapes(path)

    monkeypatch.setattr(reader, "_shapes", removing)
    assert chosen(run, best=True) == (2, [])


def test_half_written_checkpoints_are_ignored(tmp_path: Path) -> None:
    """A killed process leaves a temporary folder of orbax."""
    save(tmp_path / "c", {1: None})
    shutil.copytree(tmp_path / "c" / "1", tmp_path / "c" / "2.orbax-checkpoint-tmp-0")
    assert restored_step(tmp_path / "c") == 1
    save(tmp_path / "c", {3: None})
    assert [path.name for path in sorted((tmp_path / "c").iterdir())] == ["1", "3"]


def write(directory: Path, begun: Event) -> None:
    """Write checkpoints until the process is killed."""
    saver = checkpoint.Saver(directory, keep=2, keep_best=False)
    for step in itertools.count(1):
        saver.save(tree(step), {"data": "abc"})
        if step == 2:  # the first checkpoint is complete
            begun.set()


@pytest.mark.slow
def test_killed_at_random_moments_of_writing(tmp_path: Path) -> None:
    """After each of 20 kills, the newest checkpoint is intact, and the next saver removes the unfinished one."""
    context, draw, unfinished = multiprocessing.get_context("forkserver"), random.Random(0), 0
    context.set_forkserver_preload([__name__])
    for number in range(20):
        directory, begun = tmp_path / str(number), context.Event()
        process = context.Process(target=write, args=(directory, begun))
        process.start()
        assert begun.wait(60)
        time.sleep(draw.uniform(0, 0.3))
        process.kill()
        process.join()
        found, logged = restore(directory)
        assert found is not None
        assert logged == []
        for got, expected in zip(jax.tree.leaves(found.tree), jax.tree.leaves(tree(found.step)), strict=True):
            assert np.asarray(expected).tobytes() == np.asarray(got).tobytes()
        unfinished += any("tmp" in path.name for path in directory.iterdir())
        save(directory, {found.step + 1: None})
        assert [path.name for path in directory.iterdir() if not path.name.isdigit()] == []
        assert restored_step(directory) == found.step + 1
    assert unfinished >= 10  # most processes were killed in the middle of a write


def test_another_structure_is_not_read_as_this_one(tmp_path: Path) -> None:
    save(tmp_path / "c", {1: None})
    other = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), LIKE)
    message = r"different model or optimizer: .* is bfloat16 \(5,\); it must be bfloat16 \(2, 5\)"
    with pytest.raises(UserError, match=message):
        checkpoint.restore(tmp_path / "c", other, lambda _line: None)
    wider = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), LIKE)
    with pytest.raises(UserError, match=r"\['mu'\] is bfloat16 \(5,\); it must be float32 \(5,\)"):
        checkpoint.restore(tmp_path / "c", wider, lambda _line: None)
    change_info(tmp_path / "c" / "1", lambda info: info.update(format=2))
    with pytest.raises(UserError, match=r"format 2; this version of jaxpar reads format 1"):
        restore(tmp_path / "c")
    shutil.move(tmp_path / "c" / "1" / "state", tmp_path / "c" / "1" / "elsewhere")  # a later format could move it
    with pytest.raises(UserError, match=r"format 2; this version of jaxpar reads format 1"):
        restore(tmp_path / "c")
    assert checkpoint.steps(tmp_path / "c") == [1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32", "uint8"])
def test_checksum_is_the_same_on_devices_and_finds_any_changed_element(dtype: str) -> None:
    x = np.random.default_rng(0).integers(0, 200, (7, 5)).astype(jnp.dtype(dtype))
    expected = (
        sum((2 * i + 1) * int.from_bytes(x.reshape(-1)[i : i + 1].tobytes(), "little") for i in range(x.size)) % 2**32
    )
    assert checksums.of_array(x) == expected
    assert checksums.of_tree({"x": jnp.asarray(x)}) == {"['x']": expected}
    for i in range(x.size):
        changed = x.copy()
        changed.reshape(-1).view(f"u{x.dtype.itemsize}")[i] += 1
        assert checksums.of_array(changed) != expected


def test_checksum_of_more_than_a_block() -> None:
    """The host computes the checksum of a large array in several blocks."""
    x = np.random.default_rng(0).normal(size=(3, 50_001)).astype(np.float32)
    assert checksums.of_tree({"x": jnp.asarray(x)}) == checksums.of_tree({"x": x}) == {"['x']": checksums.of_array(x)}
    changed = x.copy()
    changed[2, 40_000] += 1
    assert checksums.of_array(changed) != checksums.of_array(x)
