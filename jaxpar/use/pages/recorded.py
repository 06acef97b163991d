"""Reads what a run recorded in its workdir: config, result, metrics, starts, and the verdict of a certificate."""

from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from jaxpar import checkpoint, files, tasks
from jaxpar import config as configs
from jaxpar.choose.planner import AUTO_STRATEGY
from jaxpar.errors import UserError, format_count
from jaxpar.run import resume
from jaxpar.run.build import Result
from jaxpar.run.history import Start, read_starts
from jaxpar.run.metrics import MetricsRow, read_metrics
from jaxpar.tasks import Task

CERTIFICATE = "certificate.json"
SECTION_READERS = {  # strategies that read a section of the config; all strategies read the other sections
    "asynchronous": ("async_data_parallel",),
    "pipeline": ("pipeline", "swarm", AUTO_STRATEGY),
    "swarm": ("swarm",),
}


class RecordedRun(NamedTuple):
    """A run in a workdir."""

    workdir: Path
    config: ConfigDict
    result: Result  # contents of result.json; empty if the run is not finished
    rows: list[MetricsRow]  # rows of metrics.jsonl
    starts: list[Start]  # its starts, the first one first

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
    """Return the run in a workdir. Raises UserError if there is none, or it has no metrics or a damaged file."""
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


def different_settings(before: configs.Values, config: ConfigDict) -> dict[str, str]:
    """Return `resume.differences` without the sections that the strategy of the config does not read."""
    ignored = [section for section, readers in SECTION_READERS.items() if config.strategy not in readers]
    changed = resume.differences(before, config)
    return {key: text for key, text in changed.items() if key.partition(".")[0] not in ignored}


def read_verdict(path: Path, config: ConfigDict) -> str:
    """Return the verdict of a certificate; empty if there is none. Raises UserError if the file is damaged.

    It is that of a run with the same settings, except for its length.
    """
    if not path.is_file():
        return ""
    try:
        certified = files.parse_json(path.read_text())
        outside, steps = certified["outside"], len(certified["batches"])
        others = different_settings(certified["config"], config).keys() - {"num_steps"}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: it is not a certificate ({error!r}); delete it") from error
    if others:
        return "of other settings"
    if outside:
        return f"failed: {format_count(len(outside), 'error')} outside the tolerance"
    return f"passed, {format_count(steps, 'step')}" if certified["tolerance"] else "no tolerance applies"
