"""Reads what a run recorded in its workdir: its config, result, metrics and starts."""

from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from jaxpar import checkpoint, files, tasks
from jaxpar import config as configs
from jaxpar.errors import UserError
from jaxpar.run.build import Result
from jaxpar.run.metrics import MetricsRow, read_metrics
from jaxpar.run.starts import Start, read_starts
from jaxpar.tasks import Task


class RecordedRun(NamedTuple):
    """A run in a workdir.

    Attributes:
      workdir: directory of the run.
      config: the config of the run.
      result: contents of result.json; empty if the run is not finished.
      rows: rows of metrics.jsonl.
      starts: its starts, the first one first.
    """

    workdir: Path
    config: ConfigDict
    result: Result
    rows: list[MetricsRow]
    starts: list[Start]

    @property
    def task(self) -> Task:
        """The task that the model is trained for."""
        return tasks.find_task(self.config)

    @property
    def steps(self) -> int:
        """Number of completed steps whose state or metrics exist."""
        if self.result:
            return int(self.result["steps"])
        return max(int(self.rows[-1]["step"]), *checkpoint.steps(self.workdir / "checkpoints"), 0)

    def points(self, split: str, name: str) -> list[tuple[float, float]]:
        """Return (step, metric) for each row of a split with this metric."""
        return [(row["step"], row[name]) for row in self.rows if row["split"] == split and row.get(name) is not None]

    def tested(self) -> dict[str, float | None]:
        """Return the metrics of the test split, by their names in result.json; empty if there are none."""
        names = {*self.task.result_keys.values(), *(name for name in self.result if name.startswith("test_"))}
        values = {name: value for name, value in self.result.items() if name in names}
        return {name: value for name, value in values.items() if value is None or isinstance(value, int | float)}


def read_run(workdir: Path) -> RecordedRun:
    """Return the run in a workdir.

    Raises:
      UserError: the workdir contains no run, or a run without metrics, or a damaged file.
    """
    config, rows = configs.read_config(workdir), read_metrics(workdir)
    if not rows:
        raise UserError(f"{workdir} contains a run without metrics; train it until its first log line")
    path = workdir / "result.json"
    try:
        result = files.parse_json(path.read_text()) if path.is_file() else {}
        if not isinstance(result, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it and start the run again") from error
    return RecordedRun(workdir, config, result, rows, read_starts(workdir))
