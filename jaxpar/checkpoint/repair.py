"""Puts in order what training goes on from: sets damaged checkpoints aside, and repairs their metrics."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from jaxpar import files
from jaxpar.checkpoint import reader
from jaxpar.checkpoint.reader import Damaged, steps


def set_aside(directory: Path, after: int) -> None:
    """Renames the checkpoints of later steps than `after`, which are damaged, to STEP.damaged."""
    for step in steps(directory):
        if step > after:
            aside = directory / f"{step}.damaged"
            shutil.rmtree(aside, ignore_errors=True)  # of an earlier fall back
            (directory / str(step)).rename(aside)


def repair_metrics(directory: Path, log: Callable[[str], None]) -> None:
    """Makes the validation loss of each checkpoint that of its info: orbax reads all, to know the best one."""
    for step in steps(directory):
        file = directory / str(step) / "metrics" / "metrics"
        there = _measured(file)
        try:
            expected = reader.info_of(directory / str(step)).get("validation_loss", there)  # the first ones lack it
        except Damaged:
            expected = there
        if repr(there) == repr(expected) and (there is not None or not file.parent.exists()):
            continue
        now = "not known" if expected is None else f"{expected:.4f}"
        log(f"checkpoint {directory / str(step)}: its validation loss was damaged, and is {now} now")
        shutil.rmtree(file.parent, ignore_errors=True)
        if expected is not None:
            file.parent.mkdir()
            files.write_text(file, json.dumps({"validation_loss": expected}))


def _measured(file: Path) -> float | None:
    """The validation loss in a file; None where there is none, or what is there cannot be read."""
    try:
        return float(json.loads(file.read_bytes())["validation_loss"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
