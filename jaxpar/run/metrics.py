"""Reports the progress of a run: a progress bar or log lines, metrics.jsonl, TensorBoard events, profiler traces."""

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import tqdm

from jaxpar import files
from jaxpar.errors import UserError, format_count
from jaxpar.launch import processes
from jaxpar.measure.phases import Phases

# Phases of a run that can last, as the progress bar shows them with their elapsed time.
WAITING = {"compile": "compiling", "input": "waiting for data", "eval": "evaluating", "checkpoint": "saving"}
SHOWN_AFTER = 1.0  # seconds after which the bar shows one of these phases
NARROW = 60  # columns of a terminal; on a narrower one, only the time left and the loss fit
LONG_COMPILATION = 10.0  # seconds after which a line reports a compilation, if there is no bar; each next one doubles
MetricsRow = dict[str, Any]  # step, split and the metrics by name


class Log:
    """Writes metrics.jsonl and the TensorBoard events of a run, in process 0 only.

    A line is {"step": int, "split": "train" | "validation" | "test", metrics...}; those that are not finite are null.
    """

    def __init__(self, workdir: Path, *, first_step: int, tensorboard: bool):
        """Continue the files of an earlier start. Lines of steps after `first_step` are dropped."""
        self._rows = [row for row in read_metrics(workdir) if row["step"] <= first_step and row["split"] != "test"]
        processes.wait("metrics were read")
        self._file = None
        self._board: Any = None
        if not processes.is_first():
            return
        self._path = workdir / "metrics.jsonl"
        files.write_text(self._path, "".join(files.json_text(row) + "\n" for row in self._rows))
        self._file = self._path.open("a")
        if tensorboard:
            import tensorboardX  # imported here because the import takes 0.17 s

            self._board = tensorboardX.SummaryWriter(str(workdir / "tensorboard"), purge_step=first_step + 1)

    def write(self, step: int, split: str, metrics: dict[str, float]) -> None:
        """Record the metrics at the end of `step`."""
        self._rows.append(files.without_nonfinite({"step": step, "split": split, **metrics}))
        if self._file:
            with files.naming(self._path):
                self._file.write(files.json_text(self._rows[-1]) + "\n")
                self._file.flush()
        if self._board:
            for name, value in metrics.items():
                if math.isfinite(value):  # it warns about others
                    self._board.add_scalar(f"{split}/{name}", value, step)

    def rows(self, split: str) -> list[MetricsRow]:
        """Return all rows of `split` so far, including rows from before the run was resumed."""
        return [row for row in self._rows if row["split"] == split]

    def close(self) -> None:
        """Flush and close the files."""
        for opened in (self._file, self._board):
            if opened:
                opened.close()


def read_metrics(workdir: Path) -> list[MetricsRow]:
    """Read the rows of metrics.jsonl, ignoring a last line cut short by a crash. Raises UserError for invalid lines."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text(errors="replace").split("\n") if path.is_file() else [""]
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = files.parse_json(line, nonfinite=True)  # NaN is from earlier versions
            if type(row["step"]) is not int or not isinstance(row["split"], str):
                raise ValueError("step must be an integer and split a string")
            for name in row.keys() - {"step", "split"}:
                if not (row[name] is None or type(row[name]) in (int, float)):
                    raise ValueError(f"{name} must be a number")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number} is not a valid line of metrics ({error}); delete the line") from error
        rows.append(files.without_nonfinite(row))
    return rows


class Progress:
    """One printed line per log interval and, on a terminal, a progress bar below these lines.

    Within `with`, a thread shows on the bar for how long the run has been compiling, evaluating or saving. Without a
    terminal of known width, there is no bar; lines at growing intervals report compilations.
    """

    def __init__(self, start: int, total: int, phases: Phases):
        """start: the number of completed steps. total: the number of steps of the run."""
        self._total, self._phases = total, phases
        self._time_left = TimeLeft(start, total, phases)
        self._bar = None
        columns = 0  # none or unknown
        with contextlib.suppress(OSError):
            columns = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0
        if columns and start < total:
            bar = "|{bar}| {elapsed}<{remaining}, {rate_fmt}{postfix}"
            self._bar = tqdm.tqdm(
                total=total,
                initial=start,
                unit="step",
                file=sys.stdout,
                dynamic_ncols=True,
                leave=False,  # the lines above it remain
                bar_format="step {n_fmt}/{total_fmt} " + (bar if columns >= NARROW else " {remaining} left{postfix}"),
            )
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.close()

    def advance(self, loss: float | None) -> None:
        """Advance the bar by one step and show its loss, if there is one."""
        if self._bar is not None:
            text = f"loss {loss:.4f}" if loss is not None and math.isfinite(loss) else ""
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()

    def _watch(self) -> None:
        next_line = LONG_COMPILATION
        while not self._done.wait(SHOWN_AFTER):
            phase, seconds = WAITING.get(self._phases.name), time.monotonic() - self._phases.began_at
            if phase is not None and self._bar is not None and seconds >= SHOWN_AFTER:
                self._bar.set_postfix_str(f"{phase} {format_clock(seconds)}")  # until the next step
            elif self._bar is None and self._phases.name == "compile":
                if seconds >= next_line:
                    self.print_line(f"step {self._phases.step}/{self._total}  compiling for {format_clock(seconds)}")
                    next_line *= 2
            else:
                next_line = LONG_COMPILATION

    def log(self, step: int, metrics: dict[str, float], shown: Sequence[str], unit: str = "examples") -> None:
        """Print the metrics of a log interval whose names are in `shown`, the rate in `unit` and the time left."""
        words = format_metrics({name: metrics[name] for name in shown if name in metrics})
        if f"{unit}_per_second" in metrics:
            words += f"  {metrics[f'{unit}_per_second']:,.0f} {unit}/s"
        if unit == "tokens" and "mfu" in metrics:
            words += f"  MFU {metrics['mfu']:.1%}"
        if skipped := metrics.get("skipped_steps"):
            words += f"  {format_count(int(skipped), 'step')} skipped"
            words += f", loss scale {metrics['loss_scale']:,.0f}" if "loss_scale" in metrics else ""
        elif "loss" not in metrics:
            words = f"no loss yet, the pipeline is filling{words}"
        seconds = self._time_left(step)
        left = "" if seconds is None else f"{format_clock(seconds)} left"
        self.print_line("  ".join(filter(None, [f"step {step}/{self._total}", words.strip(), left])))

    def print_line(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)


class TimeLeft:
    """Estimates the time until the last step, without the compilations of the steps that have been taken.

    A remaining step is assumed to take as long as those of the last log interval without a compilation. To this it adds
    the time for evaluations and checkpoints, which not every interval contains: their mean per step since the log line
    after the first evaluation, which compiles programs.
    """

    def __init__(self, start: int, total: int, phases: Phases):
        self._total, self._phases = total, phases
        self._logged, self._compiled = start, phases.counts["compile"]
        self._steps, self._others = phases.clock("train", "input"), phases.clock("eval", "checkpoint")
        self._step_seconds: float | None = None
        self._since, self._other_seconds = start, 0.0  # first step of the evaluations and checkpoints that count
        self._has_evaluated = phases.counts["eval"] > 0

    def __call__(self, step: int) -> float | None:
        """Return the seconds left after `step`, the end of a log interval; None if all steps so far were compiled."""
        seconds, compiled = self._steps(), self._phases.counts["compile"]
        measured = step - self._logged - (compiled - self._compiled)
        if measured > 0:
            self._step_seconds = seconds / measured
        self._logged, self._compiled = step, compiled
        self._other_seconds += self._others()
        if not self._has_evaluated and self._phases.counts["eval"]:
            self._has_evaluated, self._since, self._other_seconds = True, step, 0.0
        if step == self._total:
            return 0.0
        if self._step_seconds is None:
            return None
        others = self._other_seconds / (step - self._since) if step > self._since else 0.0
        return (self._total - step) * (self._step_seconds + others)


class ProfilerTrace(contextlib.ExitStack):
    """A context manager that profiles some steps into workdir/profile, for TensorBoard or Perfetto."""

    def __init__(self, steps: tuple[int, int], workdir: Path):
        """steps: the first and the last step to profile, counted from 1; (0, 0): none."""
        super().__init__()
        (self._first, self._last), self._folder = steps, workdir / "profile"

    def before(self, step: int) -> None:
        """Start or stop the trace as needed. Call before step `step` is dispatched."""
        if step == self._first:
            jax.profiler.start_trace(str(self._folder))
            self.callback(jax.profiler.stop_trace)
        elif step > self._last:
            self.close()  # stops the trace, if there is one


def format_metrics(metrics: dict[str, float]) -> str:
    """Format metrics as `loss 0.1234  accuracy 0.5678`."""
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def format_clock(seconds: float) -> str:
    """Format a duration as `1:23`, or as `1:23:45` from one hour on."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"
