"""The ledger records which examples each step used, to prove that every epoch used each example exactly once.

    workdir/ledger/PROCESS.jsonl  {"from": 0, "to": 7, "epoch": 0, "rows": [0, 24], "examples": 160, "digest": "9f.."}

A line covers the steps from .. to - 1 of one epoch and one shard of their batches, and is computed from the ids of the
examples that were passed to the strategy. A process writes its lines before each checkpoint or, in a run that continues
without lost processes, before each step. A run that resumes removes the lines of later steps. What the ledger proves is
in docs/explanation/checkpoints.md.

The digest is the sum mod 2^64 of a hash of each example id. It does not depend on the order of examples, on restarts or
on how batches are sharded between processes, and it changes if an example is replaced by another or used twice.
"""

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar import files
from jaxpar.data import Batches
from jaxpar.errors import TrainingError, UserError, format_count


class Line(NamedTuple):
    """One line of the ledger: the steps [start, stop) of one epoch, counted from 0, for one shard of their batches."""

    start: int
    stop: int
    shard: tuple[int, int]  # first and last + 1 of the positions in the batch
    epoch: int
    examples: int  # number of examples
    digest: int


def digest_examples(examples: np.ndarray) -> int:
    """Return the sum mod 2^64 of the splitmix64 hash of each id (Steele et al., "Fast Splittable PRNGs", 2014)."""
    mixed = (examples.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


class Ledger:
    """Writes the ledger lines of one process."""

    def __init__(self, directory: Path, *, steps_per_epoch: int, shard: slice, first: int):
        """Create the ledger of this process.

        shard: the examples of a batch that this process counts; empty if another process counts them.
        first: position in the batch of the first example that this process reads.
        """
        self._path = directory / f"{jax.process_index()}.jsonl"
        self._steps_per_epoch = steps_per_epoch
        self._shard = (shard.start, shard.stop)
        self._counted = slice(shard.start - first, shard.stop - first) if shard.stop > shard.start else slice(0)
        self._open: list[Line] = []  # lines that are not written yet, one per epoch
        self._is_synced = True  # whether written lines survive a failure of the machine

    def add(self, step: int, examples_R: np.ndarray) -> None:
        """Add the example ids of a step, counted from 0. Padding examples have the id -1."""
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

    def write(self, *, sync: bool = True) -> None:
        """Write the lines of the steps since the last call. sync: wait until all lines so far are on the disk."""
        if not self._open and (self._is_synced or not sync):
            return
        self._path.parent.mkdir(exist_ok=True)
        with files.naming(self._path), self._path.open("a") as file:
            file.writelines(map(_text, self._open))
            file.flush()
            if sync:
                os.fsync(file.fileno())
        self._open, self._is_synced = [], sync


def cut(directory: Path, after: int) -> None:
    """Remove the lines of all steps after the first `after` steps, in the files of all processes and earlier starts.

    Raises UserError for an invalid line, a line of steps before and after this step, and a ledger of files without
    lines, which no run leaves after a checkpoint.
    """
    lines = {path: _read(path) for path in directory.glob("*.jsonl")}
    if after and lines and not any(lines.values()):  # lines are written before a checkpoint
        raise UserError(f"{next(iter(lines))} is damaged, because it has no lines; {_anew(directory)}")
    for path, line in ((path, line) for path, found in lines.items() for line in found):
        if line.start < after < line.stop:
            covered = f"one line covers the steps {line.start + 1} to {line.stop}, before and after the checkpoint of"
            raise UserError(f"{path} is damaged, because {covered} step {after}; {_anew(directory)}")
    for path, found in lines.items():
        if remaining := [line for line in found if line.stop <= after]:
            files.write_text(path, "".join(map(_text, remaining)))
        else:
            path.unlink()


def begin(directory: Path, step: int, steps_per_epoch: int) -> None:
    """Record in a ledger without lines that it begins after the first `step` steps, if there are any.

    Without this record, which is a line of no steps, a ledger that begins later than the run is damaged.
    """
    if step and not _read_all(directory):
        directory.mkdir(exist_ok=True)
        files.write_text(directory / "0.jsonl", _text(Line(step, step, (0, 0), step // steps_per_epoch, 0, 0)))


def check_ledger(directory: Path, batches: Batches, num_steps: int) -> None:
    """Verify the ledger before a run resumes. Raises UserError if it does not prove the completed steps."""
    try:
        verify(directory, batches, num_steps)
    except TrainingError as error:
        raise UserError(f"{error}; {_anew(directory)}") from error


def verify(
    directory: Path,
    batches: Batches,
    num_steps: int,
    *,
    in_flight: int = 0,
    discarded: Sequence[Mapping[str, Any]] = (),
    skipped: int = 0,
) -> str:
    """Verify the ledger of the steps [0, num_steps) and return a text that states what it proves.

    If the ledger begins later than the run (see `begin`), the text contains the first step that it covers. It also
    contains the number of the last batches that are `in_flight`, which do not contribute to all weights yet, the
    `batches` up to a `step` that were `discarded` in flight, and the number of `skipped` steps. Raises TrainingError if
    examples or steps are missing or were used more than once.
    """
    lines = sorted(_read_all(directory))
    if not lines or lines[0].start == num_steps:
        return "no steps recorded"
    first_step, size = lines[0].start, batches.steps_per_epoch
    is_begun_later = lines[0].stop == first_step
    check_steps(lines[is_begun_later:], first_step if is_begun_later else 0, num_steps, batches.batch_size)
    used = _by_epoch(lines)
    every = np.arange(batches.examples_per_epoch)
    digest_of_every = digest_examples(every)
    for epoch in range(first_step // size, -(-num_steps // size)):
        start, stop = max(first_step, epoch * size), min(num_steps, (epoch + 1) * size)
        whole = stop - start == size
        expected = every if whole else batches.planned(start, stop)
        count, got = used.get(epoch, (0, 0))
        used_count = f"ledger: epoch {epoch} used {count} examples"
        if count != len(expected):
            raise TrainingError(f"{used_count}; it must have used {len(expected)}")
        if got != (digest_of_every if whole else digest_examples(expected)):
            raise TrainingError(f"{used_count}, but some of them twice and others never")
    since = f", since step {first_step + 1}" if first_step else ""
    epochs, steps = divmod(num_steps - first_step, size)
    covered = [format_count(number, noun) for number, noun in ((epochs, "epoch"), (steps, "step")) if number]
    number = min(in_flight, num_steps)
    last = f"the last {number} batches are" if number > 1 else "the last batch is"
    still = f"; {last} still in flight" if number else ""
    verb = "read" if (lost := _describe_lost(discarded, skipped)) else "used"
    return f"every example of {' and '.join(covered)} was {verb} exactly once{since}{lost}{still}"


def _describe_lost(discarded: Sequence[Mapping[str, Any]], skipped: int) -> str:
    """Return which batches did not update the weights, as the end of a sentence; empty if all did."""
    ranges = [(one["step"] - one["batches"] + 1, one["step"]) for one in discarded if one["batches"]]
    text = f"; {format_count(skipped, 'batch')} skipped" if skipped else ""
    if ranges:
        number = sum(last - first + 1 for first, last in ranges)
        steps = ", ".join(f"{first} to {last}" if first < last else str(first) for first, last in ranges)
        where = f"step{'s' if number > 1 else ''} {steps}"
        text += f"; {format_count(number, 'batch')} discarded in flight ({where}), which did not update all weights"
    return text


def used_examples(directory: Path) -> dict[int, tuple[int, int]]:
    """Return the number of examples that each epoch used, and their digest. Raises UserError for invalid lines."""
    return _by_epoch(_read_all(directory))


def _by_epoch(lines: list[Line]) -> dict[int, tuple[int, int]]:
    total: dict[int, tuple[int, int]] = {}
    for line in lines:
        count, digest = total.get(line.epoch, (0, 0))
        total[line.epoch] = (count + line.examples, (digest + line.digest) % 2**64)
    return total


def check_steps(lines: list[Line], first_step: int, num_steps: int, batch_size: int) -> None:
    """Raise TrainingError unless the sorted lines cover each position of the batches [first_step, num_steps) once."""
    at = first_step
    for (start, stop), group in itertools.groupby(lines, key=lambda line: line[:2]):
        if start != at:
            what = "are missing" if start > at else "were recorded twice"
            raise TrainingError(f"ledger: steps {min(start, at) + 1} to {max(start, at)} {what}")
        ends = [0, *itertools.chain(*(line.shard for line in group)), batch_size]
        if any(end != begin for end, begin in zip(ends[::2], ends[1::2], strict=True)):
            slices = ", ".join(f"{begin} to {end}" for begin, end in zip(ends[1:-1:2], ends[2:-1:2], strict=True))
            covered = f"steps {start + 1} to {stop} cover examples {slices} of a batch of {batch_size}"
            raise TrainingError(f"ledger: {covered}; they must cover each once")
        at = stop
    if at != num_steps:
        raise TrainingError(f"ledger: the last step is {at}; it must be {num_steps}")


def _anew(directory: Path) -> str:
    return f"delete {directory} to start a new ledger"


def _text(line: Line) -> str:
    row = {"from": line.start, "to": line.stop, "epoch": line.epoch, "rows": line.shard, "examples": line.examples}
    return json.dumps(row | {"digest": f"{line.digest:016x}"}) + "\n"


def _read_all(directory: Path) -> list[Line]:
    return [line for path in directory.glob("*.jsonl") for line in _read(path)]


def _read(path: Path) -> list[Line]:
    """Read the lines of a file, ignoring a last line cut short by a crash. Raises UserError for invalid lines."""
    lines = []
    try:
        texts = files.regular(path).read_text(errors="replace").split("\n")[:-1]
    except OSError as error:
        raise UserError(f"{path}, {files.path_error(error)}; it must be a file of a ledger, or not exist") from None
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(_line(files.parse_json(text)))
        except (ValueError, KeyError, TypeError) as error:
            wrong = f"{path}:{number} is not a valid line of a ledger ({error})"
            raise UserError(f"{wrong}; {_anew(path.parent)}") from error
    return lines


def _line(row: Any) -> Line:
    """Return the line that `_text` wrote. Raises ValueError, KeyError or TypeError if it is invalid."""
    first, last = row["rows"]
    start, stop, epoch, examples = (row[name] for name in ("from", "to", "epoch", "examples"))
    named = [("from", start), ("to", stop), ("epoch", epoch), ("examples", examples), ("rows", first), ("rows", last)]
    for name, value in named:
        if type(value) is not int or not 0 <= value < 2**63:
            raise ValueError(f"{name} is {value!r:.40}; it must be a non-negative integer")
    if stop < start or last < first:
        raise ValueError("it ends before it begins")
    if not re.fullmatch("[0-9a-f]{16}", row["digest"]):
        raise ValueError(f"digest is {row['digest']!r:.40}; it must have 16 hexadecimal digits")
    return Line(start, stop, (first, last), epoch, examples, int(row["digest"], 16))
