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
        path = directory / str(step)
        file = path / "metrics" / "metrics"
        found = reader.loss_in_metrics(path)
        try:
            # The info of the first checkpoints lacks the loss.
            expected = reader.info_of(path).get("validation_loss", found)
        except Damaged:
            expected = found
        if repr(found) == repr(expected) and (found is not None or not file.parent.exists()):
            continue
        result = "removed" if expected is None else f"restored to {expected:.4f}"
        log(f"checkpoint {path}: the damaged validation loss was {result}")
        shutil.rmtree(file.parent, ignore_errors=True)
        if expected is not None:
            file.parent.mkdir()
            files.write_text(file, json.dumps({"validation_loss": expected}))
