"""The file that records the starts of a run."""

from pathlib import Path

import pytest

from jaxpar.errors import UserError
from jaxpar.run.history import Start, read_starts
from tests.use.pages.recorded_runs import STARTS, write_run


def test_starts_are_read(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == []
    assert [start._asdict() for start in read_starts(write_run(tmp_path / "run"))] == STARTS
    assert Start(**STARTS[0]).step == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"step": 1}', '{"step": "1", "date": "", "strategy": "", "devices": 1, "changed": []}']
)
def test_a_damaged_line_is_refused(line: str, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run") / "starts.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=r"starts.jsonl:3 is not a valid line of starts \(.*\); delete the line$"):
        read_starts(tmp_path / "run")
