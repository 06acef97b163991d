"""Repairs the checkpoints of a run before it resumes: renames damaged ones and restores damaged metrics."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from jaxpar import files
from jaxpar.checkpoint import reader
from jaxpar.checkpoint.reader import Damaged, steps


def set_aside(directory: Path, after: int) -> None:
    """Rename the checkpoints of steps later than `after`, which are damaged, to STEP.damaged."""
    for step in steps(directory):
        if step > after:
            aside = directory / f"{step}.damaged"
            shutil.rmtree(aside, ignore_errors=True)  # from an earlier repair
            (directory / str(step)).rename(aside)


def repair_metrics(directory: Path, log: Callable[[str], None]) -> None:
    """Restore the validation loss of each checkpoint from its info, because orbax selects the best one by this loss."""
    for step in steps(directory):
        file = directory / str(step) / "metrics" / "metrics"
        found = _measured(file)
        try:
            # The info of the first checkpoints lacks the loss.
            expected = reader.info_of(directory / str(step)).get("validation_loss", found)
        except Damaged:
            expected = found
        if repr(found) == repr(expected) and (found is not None or not file.parent.exists()):
            continue
        result = "removed" if expected is None else f"restored to {expected:.4f}"
        log(f"checkpoint {directory / str(step)}: the damaged validation loss was {result}")
        shutil.rmtree(file.parent, ignore_errors=True)
        if expected is not None:
            file.parent.mkdir()
            files.write_text(file, json.dumps({"validation_loss": expected}))


def _measured(file: Path) -> float | None:
    """Return the validation loss in a file, or None if the file is missing or damaged."""
    try:
        return float(files.parse_json(file.read_bytes(), nonfinite=True)["validation_loss"])
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, KeyError, TypeError, OverflowError):
        return None
