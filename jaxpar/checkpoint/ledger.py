"""The ledger of a run: which examples every step took, so that the end can prove that each came exactly once an epoch.

    workdir/ledger/PROCESS.jsonl  {"from": 0, "to": 7, "epoch": 0, "rows": [0, 24], "examples": 160, "digest": "9f.."}

A line is of the steps from .. to - 1 of one epoch and of a shard of their batches. It is added up from the numbers of
the examples that were gathered and given to the strategy, not from the plan that says which should be. A process writes
its lines before each checkpoint, and a run that resumes cuts those of later steps: what a killed process
did after its last checkpoint does not count, as it did not happen. docs/checkpoints.md says what this proves.

The digest is a sum modulo 2^64 of a mix of every number, so that neither order, restarts nor the division of batches
between processes matter, and neither one example in the place of another nor one that came twice stays hidden.
"""

import itertools
import json
import os
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import numpy as np

from jaxpar import files
from jaxpar.errors import TrainingError, UserError


class PlannedBatches(Protocol):
    """The members of jaxpar.data.Batches that a ledger reads."""

    batch_size: int
    steps_per_epoch: int
    examples_per_epoch: int

    def planned(self, start: int, stop: int) -> np.ndarray:
        """The examples of the batches [start, stop), of one epoch."""


class Line(NamedTuple):
    """A record of the steps [start, stop), from 0, of one epoch, and of examples [first, last) of their batches."""

    start: int
    stop: int
    shard: tuple[int, int]
    epoch: int
    examples: int  # how many
    digest: int


def digest_examples(examples: np.ndarray) -> int:
    """The sum modulo 2^64 of a mix of each number (Steele et al., "Fast Splittable PRNGs", 2014: splitmix64)."""
    mixed = (examples.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


class Ledger:
    """The lines of one process."""

    def __init__(self, directory: Path, *, steps_per_epoch: int, shard: slice, first: int):
        """shard: of a batch, that this process counts; empty where another does. first: of those that it reads."""
        self._path = directory / f"{jax.process_index()}.jsonl"
        self._steps_per_epoch = steps_per_epoch
        self._shard = (shard.start, shard.stop)
        self._counted = slice(shard.start - first, shard.stop - first) if shard.stop > shard.start else slice(0)
        self._open: list[Line] = []  # since the last checkpoint, one an epoch

    def add(self, step: int, examples_R: np.ndarray) -> None:
        """Take in what a step, counted from 0, was given: the ids of the examples, -1 at fillers."""
        if self._shard[0] == self._shard[1]:
            return
        examples = examples_R[self._counted]
        examples = examples[examples >= 0]
        epoch = step // self._steps_per_epoch
        if not self._open or self._open[-1].epoch != epoch:
            self._open.append(Line(step, step, self._shard, epoch, 0, 0))
        line = self._open[-1]
        self._open[-1] = line._replace(
            stop=step + 1,
            examples=line.examples + len(examples),
            digest=(line.digest + digest_examples(examples)) % 2**64,
        )

    def write(self) -> None:
        """Writes the lines of the steps since it was last called."""
        if not self._open:
            return
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("a") as file:
            file.writelines(map(_text, self._open))
            file.flush()
            os.fsync(file.fileno())
        self._open = []


def cut(directory: Path, after: int) -> None:
    """Drops the lines of later steps than the first `after`, of all processes, those of earlier starts too."""
    for path in directory.glob("*.jsonl"):
        files.write_text(path, "".join(_text(line) for line in _read(path) if line.stop <= after))


def check_ledger(directory: Path, batches: PlannedBatches, num_steps: int) -> None:
    """Before a run goes on: raises UserError where the ledger does not prove the steps behind it."""
    try:
        verify(directory, batches, num_steps)
    except TrainingError as error:
        raise UserError(f"{error}; delete {directory}, and the ledger begins anew") from error


def verify(directory: Path, batches: PlannedBatches, num_steps: int) -> str:
    """Return what the ledger proves of the steps [0, num_steps), as text. Raises TrainingError where it proves less.

    Of steps that a version without a ledger took there is no line; the text then has the first step that it proves.
    """
    lines = sorted(line for path in directory.glob("*.jsonl") for line in _read(path))
    if not lines:
        return "it has no step"
    begun, size = lines[0].start, batches.steps_per_epoch
    check_steps(lines, num_steps, batches.batch_size)
    every = np.arange(batches.examples_per_epoch)
    digest_of_every = digest_examples(every)
    for epoch in range(begun // size, -(-num_steps // size)):
        start, stop = max(begun, epoch * size), min(num_steps, (epoch + 1) * size)
        whole = stop - start == size
        expected = every if whole else batches.planned(start, stop)
        of_epoch = [line for line in lines if line.epoch == epoch]
        count, got = sum(line.examples for line in of_epoch), sum(line.digest for line in of_epoch) % 2**64
        if count != len(expected):
            raise TrainingError(f"ledger: epoch {epoch}: {count} examples were taken, and {len(expected)} are due")
        if got != (digest_of_every if whole else digest_examples(expected)):
            raise TrainingError(f"ledger: epoch {epoch}: of {count} examples some were taken twice and others never")
    since = f", from step {begun + 1} on" if begun else ""
    return f"every example of {(num_steps - begun) / size:.6g} epochs exactly once{since}"


def check_steps(lines: list[Line], num_steps: int, batch_size: int) -> None:
    """Raises TrainingError unless the lines, in order, have every example of every step up to the last exactly once."""
    at = lines[0].start
    for (start, stop), group in itertools.groupby(lines, key=lambda line: line[:2]):
        if start != at:
            what = "are missing" if start > at else "are there twice"
            raise TrainingError(f"ledger: steps {min(start, at) + 1} to {max(start, at)} {what}")
        ends = [0, *itertools.chain(*(line.shard for line in group)), batch_size]
        if any(end != begin for end, begin in zip(ends[::2], ends[1::2], strict=True)):
            slices = ", ".join(f"{begin} to {end}" for begin, end in zip(ends[1:-1:2], ends[2:-1:2], strict=True))
            raise TrainingError(f"ledger: steps {start + 1} to {stop} have examples {slices}, of {batch_size}")
        at = stop
    if at != num_steps:
        raise TrainingError(f"ledger: it ends with step {at}, and there are {num_steps}")


def _text(line: Line) -> str:
    row = {"from": line.start, "to": line.stop, "epoch": line.epoch, "rows": line.shard, "examples": line.examples}
    return json.dumps(row | {"digest": f"{line.digest:016x}"}) + "\n"


def _read(path: Path) -> list[Line]:
    """The lines of a file; a last one that was cut off by a crash is left out. Raises UserError for others."""
    lines = []
    for number, text in enumerate(path.read_text(errors="replace").split("\n")[:-1], start=1):
        try:
            row = json.loads(text)
            first, last = row["rows"]
            lines.append(
                Line(row["from"], row["to"], (first, last), row["epoch"], row["examples"], int(row["digest"], 16))
            )
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}:{number} is not what a run writes ({error}); delete {path.parent}, and the ledger begins anew"
            ) from error
    return lines
