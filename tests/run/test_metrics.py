"""Tests of the files that a run writes while it trains, and of the metrics of a log interval."""

import errno
import fcntl
import json
import math
import os
import pty
import re
import struct
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.core.step import Metrics
from jaxpar.errors import TrainingError, UserError
from jaxpar.measure.phases import Phases
from jaxpar.models import Context, Model
from jaxpar.run import metrics, report
from jaxpar.run.meter import Meter
from jaxpar.tasks import Sums
from jaxpar.tasks.classification import TASK
from jaxpar.tasks.language_models import CAUSAL_LM


def test_metrics_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = metrics.Log(tmp_path, first_step=0, tensorboard=False)
    log.close()
    monkeypatch.setattr(log, "_file", SimpleNamespace(write=full))
    with pytest.raises(OSError, match="No space left") as caught:
        log.write(2, "train", {"loss": 1.0})
    assert caught.value.filename == str(tmp_path / "metrics.jsonl")


def test_log_continues_at_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = metrics.Log(tmp_path, first_step=0, tensorboard=True)
    for step in (2, 4, 6):
        log.write(step, "train", {"loss": 1.0 / step, "grad_norm": math.nan})
    log.write(6, "test", {"loss": 0.5})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "spl')  # the process was killed during this write
    log = metrics.Log(tmp_path, first_step=4, tensorboard=False)
    assert [row["step"] for row in log.rows("train")] == [2, 4]
    log.write(6, "train", {"loss": 0.25})
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 2, "split": "train", "loss": 0.5, "grad_norm": None},
        {"step": 4, "split": "train", "loss": 0.25, "grad_norm": None},
        {"step": 6, "split": "train", "loss": 0.25},
    ]
    assert list((tmp_path / "tensorboard").iterdir())
    assert not caplog.records  # TensorBoard would warn about NaN


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train"}\n{"step"\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2 is not a valid line of metrics"):
        metrics.read_metrics(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": "5", "split": "train"}',
        '{"step": 1e14, "split": "train"}',
        '{"step": 1, "split": null}',
        '{"step": 1, "split": "train", "loss": "low"}',
        '{"step": 1, "split": "train", "loss": [1]}',
        '{"step": 1, "step": 2, "split": "train"}',
        "[" * 100_000,
        "3",
    ],
)
def test_a_line_with_other_values_is_damaged(line: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"metrics.jsonl:1 is not a valid line of metrics \(.*\); delete the line"):
        metrics.read_metrics(tmp_path)


def test_clock_counts_only_its_phases() -> None:
    phases = Phases()
    clock = phases.clock("train", "input")
    phases.seconds["train"] += 2.0
    phases.seconds["eval"] += 5.0
    assert clock() == 2.0
    phases.seconds["input"] += 0.5
    assert clock() == 0.5
    assert clock() == 0.0


def test_trace_covers_the_steps_asked_for(tmp_path: Path) -> None:
    with metrics.ProfilerTrace((2, 3), tmp_path) as trace:
        for step in range(1, 6):
            trace.before(step)
            jax.block_until_ready(jnp.ones(3) * step)
            assert (tmp_path / "profile").is_dir() == (step > 3)  # the profile is written when the trace ends
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


class Line(nnx.Module):
    """A model that is a single matrix product: 2 * B * 5 * 7 FLOPs."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(5, 7, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        return self.linear(x)


def step_metrics(loss: float, *, correct: float = 3.0, weight: float = 4.0) -> Metrics:
    """Return the metrics of a step of 5 examples."""
    terms = {"correct": jnp.asarray(correct), "examples": jnp.asarray(5.0)}
    sums = Sums(jnp.asarray(loss), terms, jnp.asarray(weight))
    return Metrics(sums, jnp.asarray(0.5), jnp.asarray(math.isfinite(loss)))


def rows(weights: list[float]) -> dict[str, np.ndarray]:
    return {"inputs": np.zeros((len(weights), 5), np.float32), "weights": np.asarray(weights, np.float32)}


def test_metrics_by_hand() -> None:
    meter = Meter(Model({"line": Line}), task=TASK, peak_flops=1e6, max_skipped=0)
    batch = rows([1, 1, 1, 1, 0, 0])
    assert meter.is_new(batch)
    meter.add(1, batch, step_metrics(8.0))
    assert not meter.is_new(batch)
    assert [meter.loss] == [None]  # step 1 may still be computing
    meter.add(2, batch, step_metrics(4.0, correct=1.0))
    assert meter.loss == 2.0
    meter.read()
    metrics = meter.metrics(seconds=0.5)
    # Rates exclude step 1, which was compiled.
    flops_per_second = 3 * (2 * 6 * 5 * 7) / 0.5
    assert metrics == {
        "loss": 12 / 8,
        "accuracy": 4 / 10,
        "grad_norm": 0.5,
        "skipped_steps": 0,
        "examples_per_second": 4 / 0.5,
        "model_flops_per_second": flops_per_second,
        "mfu": flops_per_second / 1e6,
    }


def test_a_step_without_examples_has_no_loss() -> None:
    meter = Meter(Model({"line": Line}), task=TASK, peak_flops=None, max_skipped=0)
    for step, weight in enumerate((0.0, 4.0, 0.0), start=1):
        meter.add(step, rows([1]), step_metrics(2 * weight, weight=weight))
        meter.read()
        assert meter.loss == (None if step == 1 else 2.0)


@pytest.mark.parametrize("max_skipped", [0, 2])
def test_meter_names_the_step_that_is_not_finite(max_skipped: int) -> None:
    meter = Meter(Model({"line": Line}), task=TASK, peak_flops=None, max_skipped=max_skipped)
    meter.add(1, rows([1]), step_metrics(1.0))
    meter.add(2, rows([1]), step_metrics(math.inf))
    if not max_skipped:
        with pytest.raises(TrainingError, match=r"^step 2 has loss inf"):
            meter.read()
        return
    meter.read()
    assert meter.metrics(1.0)["skipped_steps"] == 1
    meter.add(3, rows([1]), step_metrics(math.nan))
    meter.read()
    skipped = meter.metrics(1.0)
    assert "loss" not in skipped
    assert math.isnan(skipped["grad_norm"])  # null in metrics.jsonl
    for step, loss in ((4, 1.0), (5, math.nan), (6, math.nan), (7, math.nan)):
        meter.add(step, rows([1]), step_metrics(loss))
    with pytest.raises(TrainingError, match=r"^steps 5 to 7 were skipped.*config.optimizer.max_skipped_steps"):
        meter.read()


def test_a_loss_scale_falls_before_a_run_stops() -> None:
    meter = Meter(Model({"line": Line}), task=TASK, peak_flops=None, max_skipped=0)
    for step, scale in enumerate((4.0, 2.0), start=1):
        meter.add(step, rows([1]), step_metrics(math.inf)._replace(loss_scale=jnp.asarray(scale)))
        meter.read()
    metrics = meter.metrics(1.0)
    assert (metrics["skipped_steps"], metrics["loss_scale"]) == (2, 2.0)
    meter.add(3, rows([1]), step_metrics(math.inf)._replace(loss_scale=jnp.asarray(1.0)))
    pattern = r"^step 3 has loss inf .* has fallen to its floor, 1; set config.model.dtype to bfloat16 or float32 "
    with pytest.raises(TrainingError, match=pattern):
        meter.read()


def test_an_interval_continues_after_a_stop() -> None:
    """The metrics are those without the stop, bitwise, and so is the number of steps skipped in a row."""

    def meter() -> Meter:
        return Meter(Model({"line": Line}), task=TASK, peak_flops=None, max_skipped=2)

    def take(one: Meter, *losses: float) -> Meter:
        for step, loss in enumerate(losses, start=1):
            one.add(step, rows([1]), step_metrics(loss, correct=loss / 3, weight=1 / 7))
        one.read()
        return one

    first, last = [0.1, 0.2, math.nan, math.inf], [0.3, 0.7, 1e-8]
    resumed = meter()
    resumed.resume(json.loads(json.dumps(take(meter(), *first).interval())))
    with pytest.raises(
        TrainingError, match=r"steps -1 to 1 were skipped"
    ):  # 3 in a row, of which one is after the stop
        take(resumed, math.nan)
    resumed = meter()
    resumed.resume(json.loads(json.dumps(take(meter(), *first).interval())))
    names = ("loss", "accuracy", "grad_norm", "skipped_steps")
    got, expected = (take(one, *losses).metrics(1.0) for one, losses in ((resumed, last), (meter(), [*first, *last])))
    assert [got[name] for name in names] == [expected[name] for name in names]
    assert got["skipped_steps"] == 2
    empty = meter()
    empty.resume(json.loads(json.dumps(meter().interval())))
    nothing = empty.metrics(1.0)
    assert "loss" not in nothing
    assert math.isnan(nothing["grad_norm"])


def strict(text: str) -> dict[str, object]:
    """Parse JSON, without the NaN and Infinity that Python accepts."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    parsed: dict[str, object] = json.loads(text, parse_constant=refuse)
    return parsed


def test_metrics_that_are_not_finite_are_null(tmp_path: Path) -> None:
    log = metrics.Log(tmp_path, first_step=0, tensorboard=False)
    log.write(1, "validation", {"loss": math.nan, "accuracy": 0.5})
    log.close()
    assert strict((tmp_path / "metrics.jsonl").read_text()) == {
        **{"step": 1, "split": "validation"},
        **{"loss": None, "accuracy": 0.5},
    }
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "validation", "loss": NaN}\n')  # of version 0.1
    assert metrics.read_metrics(tmp_path)[0]["loss"] is None
    report.write_result(tmp_path, {"test_loss": math.inf, "seconds": {"train": math.nan}})
    assert strict((tmp_path / "result.json").read_text()) == {"test_loss": None, "seconds": {"train": None}}
    assert report.draw_curves(tmp_path, TASK, "none") is not None


def test_the_progress_of_a_pipeline_that_fills(capsys: pytest.CaptureFixture[str]) -> None:
    metrics.Progress(0, 10, Phases()).log(5, {"skipped_steps": 0.0, "examples_per_second": 3.0}, ["loss"])
    assert "step 5/10  no loss yet, the pipeline is filling  3 examples/s  " in capsys.readouterr().out


def test_the_line_of_a_language_model_has_tokens_and_mfu(capsys: pytest.CaptureFixture[str]) -> None:
    rates = {"examples_per_second": 10.0, "tokens_per_second": 12345.6, "mfu": 0.4125}
    progress = metrics.Progress(0, 10, Phases())
    progress.log(5, {"loss": 1.5, **rates}, ["loss"], CAUSAL_LM.rate_unit)
    assert "step 5/10  loss 1.5000  12,346 tokens/s  MFU 41.2%  " in capsys.readouterr().out
    progress.log(6, {"loss": 1.5, **rates}, ["loss"], TASK.rate_unit)
    assert "step 6/10  loss 1.5000  10 examples/s  " in capsys.readouterr().out


def test_skipped_steps_are_in_the_progress_line(capsys: pytest.CaptureFixture[str]) -> None:
    metrics.Progress(0, 10, Phases()).log(5, {"skipped_steps": 5.0}, ["loss"])
    assert "step 5/10  5 steps skipped  " in capsys.readouterr().out
    metrics.Progress(0, 10, Phases()).log(5, {"skipped_steps": 1.0, "loss_scale": 2.0**14}, ["loss"])
    assert "step 5/10  1 step skipped, loss scale 16,384  " in capsys.readouterr().out


def test_a_result_has_one_line_for_each_item_of_a_table(tmp_path: Path) -> None:
    result = {"loss": 1.5, "devices": ["a", "b"], "classes": {"x": {"f1": 1}, "y": {}}, "matrix": [[1, 2], [3, 4]]}
    report.write_result(tmp_path, {**result, "empty": {}})
    text = (tmp_path / "result.json").read_text()
    assert strict(text) == {**result, "empty": {}}
    assert text.splitlines() == [
        "{",
        '  "loss": 1.5,',
        '  "devices": ["a", "b"],',
        '  "classes": {',
        '    "x": {"f1": 1},',
        '    "y": {}',
        "  },",
        '  "matrix": [',
        "    [1, 2],",
        "    [3, 4]",
        "  ],",
        '  "empty": {}',
        "}",
    ]


class Terminal:
    """A terminal as the standard output, and what it shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, rows: int = 24, columns: int = 60):
        self._reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._writer = open(writer, "w")  # noqa: PTH123, SIM115
        monkeypatch.setattr(sys, "stdout", self._writer)

    def lines(self) -> list[str]:
        """Close the terminal and return the lines that remain visible, and the last one before it was erased."""
        os.write(self._writer.fileno(), b"END")
        text = b""
        while not text.endswith(b"END"):
            text += os.read(self._reader, 10_000)
        self._writer.close()
        os.close(self._reader)
        self.states = text.decode().replace("\n", "\r").split("\r")
        return [line.split("\r")[-1] for line in text.decode().removesuffix("END").replace("\r\n", "\n").split("\n")]


def test_intervals_stay_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    with metrics.Progress(0, 4, Phases()) as bar:
        for step in range(1, 5):
            bar.advance(None if step == 1 else math.nan if step == 2 else 1 / step)
            if step % 2 == 0:
                bar.log(step, {"loss": 1 / step, "skipped_steps": 0.0}, ["loss"])
        bar.print_line("step 4/4  validation loss 0.2500")
    *lines, last = terminal.lines()
    assert [line[: len("step 4/4  loss 0.2500")] for line in lines] == [
        *("step 2/4  loss 0.5000", "step 4/4  loss 0.2500", "step 4/4  validation "),
    ]
    assert last.strip() == ""  # the bar has been erased
    bars = [state for state in terminal.states if "|" in state]
    assert max(map(len, bars)) <= 60
    assert bars[0].startswith("step 0/4 |")
    assert bars[-1].startswith("step 4/4 |")
    assert "loss 0.2500" in bars[-1]
    assert not any("nan" in state for state in bars)


def test_the_bar_shows_for_how_long_a_program_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SHOWN_AFTER", 0.01)
    terminal, phases = Terminal(monkeypatch), Phases()
    with metrics.Progress(0, 4, phases) as bar:
        with phases("compile"):
            for seconds in (65, 66):
                phases.began_at = time.monotonic() - seconds
                time.sleep(0.1)
        bar.advance(0.5)
        with phases("train"):
            time.sleep(0.1)
    terminal.lines()
    shown = [state for state in terminal.states if "|" in state]
    compiling = [number for number, state in enumerate(shown) if "compiling 1:0" in state]
    assert {shown[number].rpartition(" ")[2].strip() for number in compiling} == {"1:05", "1:06"}
    assert compiling == list(range(1, len(compiling) + 1))  # from the first tick until the first step
    assert all(len(state) <= 60 for state in shown)


def test_lines_report_long_compilations_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "SHOWN_AFTER", 0.01)
    phases = Phases()
    with metrics.Progress(0, 4, phases):
        for step, times in ((1, (5,)), (1, (12, 15, 22)), (2, (12,))):
            phases.step = step
            with phases("compile"):
                for seconds in times:
                    phases.began_at = time.monotonic() - seconds
                    time.sleep(0.1)
            time.sleep(0.1)
    lines = ["step 1/4  compiling for 0:12", "step 1/4  compiling for 0:22", "step 2/4  compiling for 0:12"]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_narrow_terminal_shows_the_time_left_and_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SHOWN_AFTER", 0.01)
    terminal, phases = Terminal(monkeypatch, columns=40), Phases()
    with metrics.Progress(0, 60_000, phases) as bar:
        with phases("compile"):
            phases.began_at = time.monotonic() - 65
            time.sleep(0.1)
        bar.advance(0.5)
    terminal.lines()
    assert "step 0/60000  ? left, compiling 1:05" in [state.strip() for state in terminal.states]
    assert re.fullmatch(
        r"step 1/60000  [\d:]+ left, loss 0.5000", [s.strip() for s in terminal.states if "loss" in s][-1]
    )
    assert max(map(len, terminal.states)) <= 40


def test_a_terminal_without_a_size_has_lines_instead_of_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some CI systems, containers and `script` without a terminal have."""
    monkeypatch.setattr(metrics, "SHOWN_AFTER", 0.01)
    terminal, phases = Terminal(monkeypatch, rows=0, columns=0), Phases()
    phases.step = 1
    with metrics.Progress(0, 4, phases) as bar:
        with phases("compile"):
            phases.began_at = time.monotonic() - 12
            time.sleep(0.1)
        bar.advance(0.5)
        bar.print_line("step 1/4  loss 0.5")
    assert terminal.lines() == ["step 1/4  compiling for 0:12", "step 1/4  loss 0.5", ""]
    assert not any("|" in state for state in terminal.states)


def test_the_time_left_has_no_compilation(capsys: pytest.CaptureFixture[str]) -> None:
    """Two of the first four steps are compiled, and the others take 3 s each. The first evaluation is compiled, too."""
    phases = Phases()
    phases.seconds |= {"compile": 50.0, "train": 70.0}  # before the loop
    phases.counts["compile"] = 5
    bar = metrics.Progress(10, 110, phases)

    def left(step: int, compiled: int = 0, evaluated: int = 0, **seconds: float) -> str:
        phases.seconds |= {name: phases.seconds[name] + more for name, more in seconds.items()}
        phases.counts["compile"] += compiled
        phases.counts["eval"] += evaluated
        bar.log(step, {"loss": 1.0}, ["loss"])
        return capsys.readouterr().out.rpartition("  ")[2]

    assert left(14, compiled=2, compile=400.0, train=5.0, input=1.0) == "4:48 left\n"  # 96 x 3 s
    assert left(18, train=8.0, checkpoint=4.0) == "3:50 left\n"  # 92 x (2 s + 4 s / 8 steps)
    assert left(22, train=8.0, evaluated=1, eval=90.0) == "2:56 left\n"  # 88 x 2 s
    assert left(26, train=4.0, evaluated=1, eval=3.0, checkpoint=1.0) == "2:48 left\n"  # 84 x (1 s + 4 s / 4 steps)
    assert left(30, compiled=4, compile=400.0) == "2:00 left\n"  # 80 x (1 s + 4 s / 8 steps); all were compiled
    assert left(110, train=8.0) == "0:00 left\n"


def test_no_time_left_is_known_while_all_steps_are_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases()
    bar = metrics.Progress(0, 3, phases)
    with phases("compile"):
        pass
    bar.log(1, {"loss": 1.0}, ["loss"])
    assert capsys.readouterr().out == "step 1/3  loss 1.0000\n"
