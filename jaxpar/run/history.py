"""Records each start of a run in workdir/starts.jsonl: when it was, at which step, on which devices, and what changed.

    {"step": 0, "date": "2026-11-23T10:00:00+00:00", "strategy": "pipeline", "devices": 4, "changed": []}

metrics.jsonl and the ledger of a run that was resumed are those of a run that was not, so neither records its starts.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from jaxpar import checkpoint, files
from jaxpar.errors import UserError
from jaxpar.run import resume
from jaxpar.run.build import Run

STARTS = "starts.jsonl"
LOST_PREFIX = "lost "  # prefix of a text in Start.changed that reports lost processes


class Start(NamedTuple):
    """A start of a run."""

    step: int  # the number of completed steps
    date: str  # date and time in UTC, in ISO 8601
    strategy: str  # value of config.strategy
    devices: int  # number of devices of the strategy
    changed: list[str]  # `config.KEY: OLD -> NEW` for each key that differs from the checkpoint, and lost processes


def record_start(run: Run, step: int, lost: str = "") -> None:
    """Add a start after `step` completed steps. What changed is compared with the newest checkpoint.

    lost: which processes were lost, if the others continue without them.
    """
    before = checkpoint.newest_config(run.workdir / "checkpoints") if step else None
    date = datetime.now(UTC).isoformat(timespec="seconds")
    changed = [LOST_PREFIX + lost] if lost else []
    changed += [] if before is None else resume.differences(before, run.config).values()
    start = Start(step, date, run.config.strategy, len(run.strategy.devices), changed)
    rows = [*read_starts(run.workdir), start]
    files.write_text(run.workdir / STARTS, "".join(files.json_text(row._asdict()) + "\n" for row in rows))


def read_starts(workdir: Path) -> list[Start]:
    """Return the starts of a run; none if an earlier version trained it. Raises UserError for invalid lines."""
    path = workdir / STARTS
    starts = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines() if path.is_file() else (), start=1):
        try:
            start = Start(**files.parse_json(line))
            if [*map(type, start)] != [int, str, str, int, list]:
                raise ValueError("a value has another type")
            if not all(isinstance(line, str) for line in start.changed):
                raise ValueError("changed must be a list of strings")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number} is not a valid line of starts ({error!r}); delete the line") from error
        starts.append(start)
    return starts
