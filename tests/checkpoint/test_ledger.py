"""Tests of the ledger: what it proves, and that it detects planted errors."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpar import training
from jaxpar.checkpoint import ledger
from jaxpar.data import Batches
from jaxpar.errors import TrainingError, UserError
from jaxpar.launch import processes
from tests.checkpoint.test_private import config, run_to
from tests.data.test_batches import batches

SOURCE = batches("texts")  # 103 examples: 12 batches of 8 and one of 7
ALL = slice(0, 8)
HALVES = (slice(0, 4), slice(4, 8))


def record(
    directory: Path,
    start: int,
    stop: int,
    shares: Sequence[slice] = (ALL,),
    *,
    taken: dict[int, int] | None = None,
    read: Sequence[slice] | None = None,
) -> None:
    """Write the ledgers of several processes that save every 5 steps.

    Args:
      directory: folder of the ledger.
      start: first step, from 0.
      stop: last step + 1.
      shares: the shard of the batch that each process records.
      taken: {step: batch used instead of the batch of that step}.
      read: the shard that each process actually reads; None: `shares`.
    """
    for process, (rows, own) in enumerate(zip(shares, read or shares, strict=True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "process_index", lambda process=process: process)
            books = ledger.Ledger(directory, steps_per_epoch=SOURCE.steps_per_epoch, shard=rows, first=rows.start)
        for step in range(start, stop):
            books.add(step, SOURCE.batch((taken or {}).get(step, step), own, with_example_ids=True)["example_ids"])
            if (step + 1) % 5 == 0 or step + 1 == stop:
                books.write()


def verified(directory: Path, num_steps: int) -> str:
    return ledger.verify(directory, SOURCE, num_steps)


@pytest.mark.parametrize(
    ("num_steps", "covered"), [(13, "1 epoch"), (26, "2 epochs"), (30, "2 epochs and 4 steps"), (7, "7 steps")]
)
def test_every_example_once(tmp_path: Path, num_steps: int, covered: str) -> None:
    record(tmp_path, 0, num_steps)
    assert verified(tmp_path, num_steps) == f"every example of {covered} was used exactly once"


def test_batches_in_flight_are_in_the_text(tmp_path: Path) -> None:
    record(tmp_path, 0, 2)
    text = "every example of 2 steps was used exactly once; the last "
    for number, last in ((1, "batch is"), (2, "2 batches are"), (3, "2 batches are")):
        assert ledger.verify(tmp_path, SOURCE, 2, in_flight=number) == f"{text}{last} still in flight"


@pytest.mark.parametrize(
    ("discarded", "text"),
    [
        ([(9, 0)], "used exactly once"),
        ([(9, 3)], "read exactly once; 3 batches discarded in flight (steps 7 to 9), which did not update all weights"),
        (
            [(4, 1), (9, 2)],
            "read exactly once; 3 batches discarded in flight (steps 4, 8 to 9), which did not update all weights",
        ),
    ],
)
def test_discarded_batches_are_in_the_text(tmp_path: Path, discarded: list[tuple[int, int]], text: str) -> None:
    record(tmp_path, 0, 10)
    starts = [{"step": step, "private_state": "", "batches": batches} for step, batches in discarded]
    assert ledger.verify(tmp_path, SOURCE, 10, discarded=starts) == f"every example of 10 steps was {text}"


def test_skipped_steps_are_in_the_text(tmp_path: Path) -> None:
    record(tmp_path, 0, 10)
    text = "every example of 10 steps was read exactly once; 2 batches skipped; the last batch is still in flight"
    assert ledger.verify(tmp_path, SOURCE, 10, in_flight=1, skipped=2) == text


def test_discarded_batches_are_in_the_result(tmp_path: Path) -> None:
    """PipeDream's first of two stages gets the gradient of batch 5 in step 6, which is a step on one device."""
    pipedream = "--config.strategy=pipeline", "--config.mesh.stage=2", "--config.pipeline.schedule=pipedream"
    run_to(5, tmp_path, *pipedream, "--config.mesh.data=1")
    result = training.train(config("--config.strategy=single", "--config.mesh.data=1"), tmp_path)
    [discarded] = result["discarded"]
    assert (discarded["step"], discarded["batches"], result["in_flight"]) == (5, 1, 0)
    assert "pipedream" in discarded["private_state"]
    text = "every example of 8 steps was read exactly once; 1 batch discarded in flight (step 5), which did not update"
    assert result["ledger"] == f"{text} all weights"
    assert result["ledger"] in (tmp_path / "report.html").read_text()


def test_a_line_by_hand(tmp_path: Path) -> None:
    """The digests of 0, 1 and 2 are the published first outputs of splitmix64 with seed 0."""
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [ledger.digest_examples(np.array([number])) for number in range(3)] == outputs
    books = ledger.Ledger(tmp_path, steps_per_epoch=1, shard=slice(0, 4), first=0)
    books.add(0, np.array([2, 0, -1, 1]))
    books.write()
    assert json.loads((tmp_path / "0.jsonl").read_text()) == {
        "from": 0,
        "to": 1,
        "epoch": 0,
        "rows": [0, 4],
        "examples": 3,
        "digest": f"{sum(outputs) % 2**64:016x}",
    }


# A start: the processes, the steps that it records, how many checkpoints it loses, and the torn line that it leaves.
START = st.tuples(
    st.sampled_from([(ALL,), HALVES]), st.integers(1, 17), st.integers(0, 2), st.sampled_from(["", '{"from": 20, "to'])
)


@settings(max_examples=25)
@given(st.lists(START, max_size=5))
@example([(HALVES, 15, 1, ""), ((ALL,), 10, 0, '{"from": 20, "to'), (HALVES, 6, 0, "")])
def test_any_history_of_crashes(starts: list[tuple[Sequence[slice], int, int, str]]) -> None:
    """Lines of steps after the last checkpoint are cut in all files, also those of processes that no longer exist."""
    at = 0
    with tempfile.TemporaryDirectory() as folder:
        for shares, number, lost, torn in starts:
            directory, stop = Path(folder), at + number
            record(directory, at, stop, shares)
            with (directory / "0.jsonl").open("a") as file:
                file.write(torn)  # the process was killed during this write
            saved = [at, *(step for step in range(at + 1, stop) if step % 5 == 0), stop]
            at = saved[max(0, len(saved) - 1 - lost)]
            ledger.cut(directory, after=at)
            epochs, steps = divmod(at, 13)
            parts = [f"{n} {noun}{'s' * (n > 1)}" for n, noun in ((epochs, "epoch"), (steps, "step")) if n]
            text = f"every example of {' and '.join(parts)} was used exactly once" if at else "no steps recorded"
            assert verified(directory, at) == text


@pytest.mark.parametrize("shares", [(ALL,), HALVES])
@given(line=st.integers(0, 99), key=st.sampled_from(["", "twice", "from", "to", "epoch", "rows", "examples", "digest"]))
def test_any_lost_repeated_or_changed_line_is_found(
    shares: Sequence[slice], line: int, key: str, tmp_path: Path
) -> None:
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    if not whole.exists():
        record(whole, 0, 26, shares)
    shutil.copytree(whole, damaged, dirs_exist_ok=True)
    path = damaged / f"{len(shares) - 1}.jsonl"
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    at = line % len(rows)
    if key == "rows":
        rows[at]["rows"][line % 2] += 1
    elif key == "digest":
        rows[at]["digest"] = f"{int(rows[at]['digest'], 16) ^ 1 << line % 64:016x}"
    elif key in rows[at]:
        rows[at][key] += 1
    else:
        rows[at : at + 1] = [rows[at]] * (2 if key else 0)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises((TrainingError, UserError)):
        verified(damaged, 26)


def test_a_ledger_that_begins_later(tmp_path: Path) -> None:
    ledger.begin(tmp_path, 4, SOURCE.steps_per_epoch)
    assert verified(tmp_path, 4) == "no steps recorded"
    record(tmp_path, 4, 26)
    ledger.begin(tmp_path, 26, SOURCE.steps_per_epoch)  # does nothing, because there are lines
    assert verified(tmp_path, 26) == "every example of 1 epoch and 9 steps was used exactly once, since step 5"
    assert verified(tmp_path / "nowhere", 26) == "no steps recorded"


@pytest.mark.parametrize("start", [0, 4])
def test_a_missing_first_line(start: int, tmp_path: Path) -> None:
    ledger.begin(tmp_path, start, SOURCE.steps_per_epoch)
    record(tmp_path, start, 26)
    lines = (tmp_path / "0.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "0.jsonl").write_text("".join(lines[1 + (start > 0) :]))
    with pytest.raises(TrainingError, match="ledger: steps 1 to 5 are missing"):
        verified(tmp_path, 26)


PLANTED: dict[str, tuple[dict[str, Any], str]] = {
    "a repeated batch": ({"taken": {9: 8}}, "epoch 0 used 103 examples, but some of them twice and others never"),
    "one of another epoch": ({"taken": {9: 20}}, "epoch 0 used 103 examples, but some of them twice and others never"),
    "a short one twice": ({"taken": {20: 25}}, "epoch 1 used "),
    "a skipped one": ({"taken": {step: step + 1 for step in range(9, 26)}}, "epoch 0 used "),
    "a wrong row slice": ({"shares": HALVES, "read": (HALVES[0], HALVES[0])}, "epoch 0 used "),
    "a missing shard": ({"shares": HALVES[:1]}, "steps 1 to 5 cover examples 0 to 4 of a batch of 8"),
    "overlapping shards": ({"shares": (ALL, HALVES[1])}, "steps 1 to 5 cover examples 0 to 8, 4 to 8 of a batch of 8"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_finds_planted_errors(tmp_path: Path, name: str) -> None:
    options, message = PLANTED[name]
    record(tmp_path, 0, 26, **options)
    with pytest.raises(TrainingError, match="ledger: ") as error:
        verified(tmp_path, 26)
    assert message in str(error.value)


def test_finds_missing_and_repeated_steps(tmp_path: Path) -> None:
    record(tmp_path, 0, 10)
    for start, message in ((15, "steps 11 to 15 are missing"), (8, "steps 9 to 10 were recorded twice")):
        whole = (tmp_path / "0.jsonl").read_text()
        record(tmp_path, start, 26)
        with pytest.raises(TrainingError, match=message):
            verified(tmp_path, 26)
        (tmp_path / "0.jsonl").write_text(whole)
    with pytest.raises(TrainingError, match="the last step is 10; it must be 26"):
        verified(tmp_path, 26)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    record(tmp_path, 0, 26)
    text = (tmp_path / "0.jsonl").read_text().replace('"rows"', '"row"', 1)
    (tmp_path / "0.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"0\.jsonl:1 is not a valid line of a ledger"):
        ledger.cut(tmp_path, after=26)


LINE = {"from": 0, "to": 5, "epoch": 0, "rows": [0, 8], "examples": 40, "digest": "0123456789abcdef"}
DAMAGED: dict[str, Any] = {
    "to is 100000000000000.0; it must be a non-negative integer": {"to": 1e14},
    "one line covers the steps 1 to 100000000000000, before and after the checkpoint of step 5": {"to": 10**14},
    "from is -1; it must be": {"from": -1},
    "rows is True; it must be": {"rows": [0, True]},
    "epoch is '0'; it must be": {"epoch": "0"},
    "examples is None; it must be": {"examples": None},
    "it ends before it begins": {"rows": [8, 0]},
    "digest is '-1'; it must have 16 hexadecimal digits": {"digest": "-1"},
    "nested more than 100 levels deep": {"rows": "[" * 100_000},
}


@pytest.mark.parametrize("message", DAMAGED)
def test_damaged_values_are_reported(message: str, tmp_path: Path) -> None:
    """A line with a value like this is neither taken for one of later steps nor does it end in a traceback."""
    text = json.dumps(LINE | DAMAGED[message]).replace('"[', "[").replace('["', "[") + "\n"
    (tmp_path / "0.jsonl").write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        ledger.cut(tmp_path, after=5)
    assert (tmp_path / "0.jsonl").read_text() == text


def test_a_ledger_that_lost_its_lines(tmp_path: Path) -> None:
    """A run writes its lines before a checkpoint, so a file without lines is damaged, unless the run starts over."""
    record(tmp_path, 0, 5)
    for text in ("", '{"from": 0, "t'):
        (tmp_path / "0.jsonl").write_text(text)
        with pytest.raises(UserError, match=r"0\.jsonl is damaged, because it has no lines; delete .* to start a new"):
            ledger.cut(tmp_path, after=5)
    ledger.cut(tmp_path, after=0)
    assert not list(tmp_path.iterdir())
    (tmp_path / "0.jsonl").mkdir()
    with pytest.raises(UserError, match=r"0\.jsonl, which is a directory; it must be a file of a ledger, or not exist"):
        ledger.cut(tmp_path, after=5)
    (tmp_path / "0.jsonl").rmdir()
    os.mkfifo(tmp_path / "0.jsonl")
    with pytest.raises(UserError, match=r"0\.jsonl, which cannot be used \(not a regular file\); it must be a file"):
        ledger.cut(tmp_path, after=5)


@pytest.mark.parametrize(
    ("num_replicas", "of_process", "rows"),
    [
        (4, [0, 0, 1, 1], [slice(0, 12), slice(12, 24)]),
        (1, [0, 0, 1, 1], [slice(0, 24), slice(0, 0)]),  # one replica on both processes: only one counts
        (2, [0, 1, 2, 3], [slice(0, 12), slice(0, 0), slice(12, 24), slice(0, 0)]),
        (2, [0, 0, 1, 1, 2, 2], [slice(0, 12), slice(12, 24), slice(0, 0)]),  # process 1 reads both halves
    ],
)
def test_an_example_is_counted_by_one_process(
    num_replicas: int, of_process: list[int], rows: list[slice], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: Any = tuple(SimpleNamespace(process_index=process) for process in of_process)
    for process, expected in enumerate(rows):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert processes.counted_shard(devices, num_replicas, 24) == expected


# ---- whole runs ---------------------------------------------------------------------------------

EPOCHS = "--config.num_steps=45"  # three epochs


def test_a_run_that_changes_its_strategy(tmp_path: Path) -> None:
    run_to(5, tmp_path, EPOCHS)
    run_to(9, tmp_path, EPOCHS, "--config.mesh.data=4", "--config.exchange=zero3")
    result = training.train(config(EPOCHS, "--config.strategy=single", "--config.mesh.data=1"), tmp_path)
    assert result["ledger"] == "every example of 3 epochs was used exactly once"
    rows = [json.loads(line) for line in (tmp_path / "ledger" / "0.jsonl").read_text().splitlines()]
    assert rows[0]["from"] == 0
    assert rows[-1]["to"] == 45
    assert sum(row["examples"] for row in rows) == result["examples"]


@pytest.mark.parametrize("text", [b'{"from": 0, "to": 3\n', b"", b"\xff\xfe\n"])
def test_a_damaged_ledger_is_reported_at_the_start(text: bytes, tmp_path: Path) -> None:
    """The error is raised at the start. After the ledger is deleted, a new one covers the remaining steps."""
    run_to(5, tmp_path, EPOCHS)
    file = tmp_path / "ledger" / "0.jsonl"
    file.write_bytes(text or file.read_bytes().replace(b'"to": 5', b'"to": 4'))
    with pytest.raises(UserError, match=r"delete .*ledger to start a new ledger"):
        training.train(config(EPOCHS), tmp_path)
    shutil.rmtree(file.parent)
    result = training.train(config(EPOCHS), tmp_path)
    assert result["ledger"] == "every example of 2 epochs and 10 steps was used exactly once, since step 6"


def test_a_batch_that_a_run_takes_twice_fails_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batches.batch

    def repeated(self: Batches, step: int, shard: slice = slice(None), **options: bool) -> dict[str, np.ndarray]:
        return batch(self, 4 if step == 5 and self._shuffle else step, shard, **options)

    monkeypatch.setattr(Batches, "batch", repeated)
    with pytest.raises(TrainingError, match="ledger: epoch 0 used 152 examples; it must have used 172"):
        training.train(config(), tmp_path)
    assert not (tmp_path / "result.json").exists()
