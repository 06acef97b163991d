"""The measured timeline of a real run has every action of the table once, in an order that respects dependencies."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxpar import training
from jaxpar.strategies.pipeline.executor.timeline import Timeline, bubble_rate, measured_times
from jaxpar.strategies.pipeline.schedules import EXECUTORS
from jaxpar.strategies.pipeline.tables import draw
from jaxpar.strategies.pipeline.tables.periodic import periodic_table
from jaxpar.strategies.pipeline.tables.schedule import make_table
from jaxpar.strategies.pipeline.tables.simulate import Span
from jaxpar.strategies.pipeline.tables.table import F, U
from tests.html_pages import check_alone
from tests.runs import small_config

PIPELINE = (
    "strategy=pipeline",
    "mesh.stage=2",
    "mesh.data=2",
    "pipeline.num_microbatches=3",
    "pipeline.schedule=zb_h1",
)


def run(folder: Path, trace: int, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[tuple[str, Sequence[Span]]]:
    """Return the charts that a run of three steps draws."""
    drawn: list[tuple[str, Sequence[Span]]] = []

    def save(path: Path, charts: Any, *, axis: str) -> None:
        assert (path.name, axis) == ("timeline.png", "seconds")
        drawn.extend(charts)

    monkeypatch.setattr(draw, "save_charts", save)
    overrides = [*PIPELINE, f"pipeline.trace={trace}", "num_steps=3", *more]
    training.train(small_config(folder, *[f"--config.{override}" for override in overrides]), folder / "run")
    return drawn


@pytest.mark.parametrize("executor", EXECUTORS)
def test_actions_are_measured_in_an_order_that_their_inputs_allow(
    executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned, measured = run(tmp_path, 3, monkeypatch, f"pipeline.executor={executor}")
    assert "planned" in planned[0]
    assert f"bubble {bubble_rate(measured[1]):.1%}" in measured[0]
    assert "timeline.png: planned bubble" in capsys.readouterr().out
    table = make_table("zb_h1", num_devices=2, num_microbatches=3, num_chunks=1)
    actions = table.actions[["device", "kind", "microbatch", "chunk"]].tolist()
    for _, spans in (planned, measured):
        assert sorted(span[:4] for span in spans) == sorted(actions)
        assert all(span.start <= span.end for span in spans)
        assert sum(span.start < span.end for span in spans) > len(spans) / 4  # busy threads lose some lengths
    report = check_alone((tmp_path / "run" / "report.html").read_text())
    seconds = max(span.end for span in measured[1])
    bubble = f"bubble {bubble_rate(measured[1]):.1%}"
    titles = {
        "zb_h1, planned, if F, B and W take equal time: bubble 10.0%",
        f"zb_h1, measured in step 3: {seconds:.3g} s, {bubble}",
    }
    assert titles <= set(report.texts)
    boxes = [re.findall(r"M[\d.]+ \d+h", path or "") for name, path in report.attributes if name == "d"]
    assert len(actions) < sum(map(len, boxes)) <= 2 * len(actions)  # a box without length is not drawn
    ends = {span[:3]: span.end for span in measured[1]}
    last = [0.0, 0.0]
    for device, kind, microbatch, _, start, end in measured[1]:  # in table order
        assert start >= last[device]
        last[device] = end
        if kind == F and device == 1:
            assert start >= ends[0, F, microbatch]


def test_dispatched_updates_are_measured_on_all_replicas_of_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicated = "mesh.stage=3", "mesh.data=1", "pipeline.replicas=2,1", "pipeline.num_microbatches=2"
    more = "pipeline.schedule=pipedream", "pipeline.executor=dispatch", "num_steps=6"
    _, measured = run(tmp_path, 6, monkeypatch, *replicated, *more)
    table = periodic_table("pipedream", (2, 1), 2)
    actions = table.actions[["device", "kind", "microbatch", "chunk"]].tolist()
    assert [span[:4] for span in measured[1]] == actions
    assert sum(kind == U for _, kind, *_ in actions) == 3


def test_a_step_before_the_resumed_ones_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline = Timeline(9, "zb_h1", make_table("zb_h1", num_devices=2, num_microbatches=3, num_chunks=1))
    timeline.steps_before(20)
    assert not timeline.next_step()
    timeline.report(None, tmp_path)
    assert capsys.readouterr().out == "timeline  none: this run did not include step 9\n"
    assert not list(tmp_path.iterdir())


def test_a_pipeline_that_fills_lacks_actions() -> None:
    """In the first step of a pipeline without a flush, its second stage has no batch to work on."""
    table = periodic_table("pipedream", (1, 1), 1)
    timeline = Timeline(1, "pipedream", table)
    timeline._times = {(0, 0, 0, 0): [5.0, 6.0]}
    assert timeline.spans() == [Span(0, F, 0, 0, 0.0, 1.0)]
    assert measured_times(table, timeline.spans()).forward == [1.0, 0.0]


def test_bubble_rate_is_that_of_the_longest_span() -> None:
    spans = [Span(0, F, 0, 0, 0.0, 1.0), Span(0, F, 1, 0, 3.0, 4.0), Span(1, F, 0, 0, 1.0, 2.0)]
    assert bubble_rate(spans) == 0.5
