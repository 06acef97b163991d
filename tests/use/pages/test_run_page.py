"""The page of a run has the numbers of its files, escapes what users named, and is self-contained."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxpar import config as configs
from jaxpar.core.plan import Decision, Plan, Traffic
from jaxpar.run.build import next_steps
from jaxpar.strategies.pipeline.tables.simulate import Span
from jaxpar.use.pages.html import document, number_cell, table
from jaxpar.use.pages.recorded import read_run
from jaxpar.use.pages.run_page import confusions, metric_label, run_page, traffic_table, write_report
from tests.html_pages import Page, check_alone
from tests.use.pages.recorded_runs import NAMES, RESULT, write_run

PLAN: Plan[None] = Plan(
    strategy="data_parallel",
    decision=Decision({"data": 2}, 2, "2 replicas", 2, None),
    summary="gradients <averaged>",
    layouts={},
    details=None,
    memory=({"parameters": 1024, "optimizer": 2048}, {"parameters": 1025, "activations <": 77}),
    traffic=(
        Traffic("all-reduce", "float32", "data", 2400.0, 4.0),
        Traffic("all-gather", "int8", "data", 100.0, 1.0),
        Traffic("all-reduce", "bfloat16", "stage", 0.0, 0.0),
    ),
)


def page_of(workdir: Path, **timelines: list[Span]) -> tuple[str, Page]:
    text = run_page(read_run(workdir), PLAN, 100, timelines)
    return text, check_alone(text)


def numbers(value: Any) -> list[float]:
    """Return all numbers of a JSON value."""
    if isinstance(value, dict | list):
        return [one for item in (value.values() if isinstance(value, dict) else value) for one in numbers(item)]
    return [value] if isinstance(value, int | float) else []


def test_all_numbers_of_the_result_are_in_the_page(tmp_path: Path) -> None:
    _, page = page_of(write_run(tmp_path / "run"))
    others = ("state_bytes", "wire_bytes", "discarded")
    expected = numbers({key: value for key, value in RESULT.items() if key not in others})
    assert len(expected) > 20
    assert set(expected) <= set(page.values)
    of_rows = {row[0]: row[1:] for row in page.rows if row}
    assert of_rows["test loss"] == ["0.6094"]
    assert of_rows["steps"] == ["40 of 100"]
    assert of_rows["seconds of a step, at these examples per second"] == ["0.206"]  # 256 / 1242.5
    assert of_rows["stopped early"] == ["the validation loss <did> not improve"]
    assert of_rows["ledger"] == [RESULT["ledger"]]
    assert of_rows["skipped steps"] == ["3"]
    assert of_rows["loss scale of the last step"] == ["4,096"]
    assert of_rows["test accuracy of the best checkpoint"] == ["0.6875"]
    assert of_rows["step of the best checkpoint"] == ["30"]
    assert of_rows["discarded after step 20"] == ["byteps_onebit <on> 2 replicas"]
    environment = {
        "host": "node<7>",
        "processor": "2 cores of <x>",
        "command": "scripts/train 'a b'",
        "commit": "unknown",
        "jax": "9.8.7",
    }
    assert {name: of_rows[name] for name in environment} == {name: [text] for name, text in environment.items()}
    assert of_rows["train"] == ["6.5", "65.0%", ""]
    assert [row for row in page.rows if row[0] == NAMES[1]] == [  # classes, then the confusion matrix
        [NAMES[1], "0.25", "0.2812", "0.2656", "31"],
        [NAMES[1], "11", "20"],
    ]
    reached = "Reached test accuracy 67.19% after 40 steps, at 1,242 examples/s on 2 devices."
    spent = "The last start took 10 s: train 65%, compile 22%, setup 12%."
    assert f"{reached} Always predicting the most frequent class: 51.56%. {spent}" in page.texts
    assert "run: bert on wordnet, data_parallel" in page.texts  # the title has the name of the workdir


def test_the_result_is_first_and_advice_follows_from_it(tmp_path: Path) -> None:
    text, page = page_of(write_run(tmp_path / "run"))
    assert re.findall("<h2>(.*?)</h2>", text)[:5] == ["Result", "Curves", "Time", "What to try", "Numbers"]
    assert any("lowest at step 30" in one for one in page.texts)
    assert not any("waited for data" in one for one in page.texts)
    result = json.loads((tmp_path / "run/result.json").read_text())
    changed = {"best_step": 40, "advice": "the model learned nothing", "seconds": {"train": 6.5, "input": 2.25}}
    (tmp_path / "run/result.json").write_text(json.dumps(result | changed))
    _, page = page_of(tmp_path / "run")
    advice = [one for one in page.texts if "lowest at" in one or "learned nothing" in one or "waited for" in one]
    assert [one[:17] for one in advice] == ["The model learned", "The devices waite"]


def test_flags_and_keys_of_advice_are_code(tmp_path: Path) -> None:
    advice = "raise config.num_steps, or try --config.optimizer.lr=0.001, not `config.seed`"
    run = read_run(write_run(tmp_path / "run"))._replace(result=RESULT | {"advice": advice})
    codes = "Raise <code>config.num_steps</code>, or try <code>--config.optimizer.lr=0.001</code>"
    assert f"<p>{codes}, not <code>config.seed</code>.</p>" in run_page(run, PLAN, 40, {})


def test_a_good_result_has_next_steps(tmp_path: Path) -> None:
    """The page has the phrases that the terminal prints."""
    run = read_run(write_run(tmp_path / "run"))._replace(result=RESULT | {"test_accuracy": 0.97, "best_step": 40})
    text = re.sub("</?code>", "", run_page(run, PLAN, 40, {}))
    first, *_ = next_steps(run.config)
    assert f"<p>{first[0].upper()}{first[1:]}.</p>" in text


def test_names_in_cells_stay_whole_on_a_phone() -> None:
    """A column whose cells break anywhere becomes one letter wide; the boxes of wide tables have shadows instead."""
    style = document("t", [])
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", style[style.index("<style>") : style.index("</style>")])
    cells = [rule for selector, rule in rules if set(re.split(r"[\s,]+", selector)) & {"table", "th", "td"}]
    assert len(cells) > 4
    assert not [rule for rule in cells if "anywhere" in rule]
    assert not [selector for selector, rule in rules if "th.number" in selector and "nowrap" in rule]
    [box] = [rule for selector, rule in rules if selector.split()[-1:] == [".scroll"] and "overflow-x" in rule]
    assert box.count("no-repeat local") == box.count("no-repeat scroll") == 2


def test_advice_is_given_only_where_it_helps(tmp_path: Path) -> None:
    """On the length, unless the result is good already; on the interval of evaluations, if there were several."""
    workdir, short = write_run(tmp_path / "run", "num_epochs=5"), RESULT | {"seconds": {"train": 5, "eval": 5}}
    rows = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)

    def advised(accuracy: float) -> tuple[bool, bool]:
        (workdir / "result.json").write_text(json.dumps(short | {"test_accuracy": accuracy}))
        texts = check_alone(run_page(read_run(workdir), PLAN, 40, {})).texts
        return any("are too few" in one for one in texts), any("config.eval.every_steps" in one for one in texts)

    assert advised(0.9) == (True, True)
    assert advised(0.97) == (False, True)
    (workdir / "metrics.jsonl").write_text("".join(rows[:1] + rows[2:]))  # without the first evaluation
    assert advised(0.9) == (True, False)


def last_values(text: str, title: str) -> list[float]:
    """Return the numbers of the legend of a chart."""
    chart = text[text.index(f"<figcaption>{title}</figcaption>") :]
    return Page(chart[chart.index("<ul") : chart.index("</figure>")]).values


def test_curves_end_at_the_last_values_of_the_metrics(tmp_path: Path) -> None:
    text, _ = page_of(write_run(tmp_path / "run"))
    assert last_values(text, "Loss (nats)") == [0.5625, 0.8125, 0.609375]  # the last validation loss is not finite
    assert last_values(text, "Accuracy") == [0.6875, 0.65625, 0.671875]
    assert last_values(text, "MFU") == [0.328125]
    assert last_values(text, "Loss scale") == [8192]
    assert last_values(text, "Examples per second") == [1250.5]
    assert '</span>examples per second <data value="1250.5">' in text
    assert "</span>MFU <data" in text
    assert "Gradient norm" not in text  # no row has it


def test_memory_and_traffic_are_those_of_the_plan(tmp_path: Path) -> None:
    _, page = page_of(write_run(tmp_path / "run"))
    at = page.rows.index(["device", "parameters", "optimizer", "activations <", "total"])
    assert page.rows[at + 1 : at + 3] == [
        ["0", "1.02 kB", "2.05 kB", "0 B", "3.07 kB"],
        ["1", "1.02 kB", "0 B", "77 B", "1.1 kB"],
    ]
    at = page.rows.index(["collective", "mesh axis", "dtype", "bytes", "messages"])
    assert page.rows[at + 1 : at + 4] == [  # not what is sent along an axis of one device: nothing
        ["all-reduce", "data", "float32", "2.4 kB", "4"],
        ["all-gather", "data", "int8", "100 B", "1"],
        ["total", "", "", "2.5 kB", "5"],
    ]
    assert {1025, 3072, 1102, 2500} <= set(page.values)


def test_starts_and_the_config(tmp_path: Path) -> None:
    workdir = write_run(tmp_path / "run", "data.source=csv", "data.train=<b>&.csv", "optimizer.lr=0.25")
    text, page = page_of(workdir)
    start = ["2026-11-02 10:00:00 UTC", "20", "data_parallel", "2", "config.strategy: 'single' -> 'data_parallel'"]
    assert start in page.rows
    assert text.count(">1 -&gt; 2 devices after step 20</text>") == 3  # the chart of each rate
    at = page.rows.index(["key", "value", "default"])
    default = configs.keys(configs.default_config())
    assert page.rows[at + 1 : at + 4] == [
        ["data.source", "'csv'", repr(default["data.source"])],
        ["data.train", "'<b>&.csv'", repr(default["data.train"])],
        ["optimizer.lr", "0.25", repr(default["optimizer.lr"])],
    ]
    assert {row[0] for row in page.rows} >= default.keys()


@pytest.mark.parametrize("damaged", [False, True])
def test_the_certificate(damaged: bool, tmp_path: Path) -> None:
    workdir = write_run(tmp_path / "run")
    certified = {"outside": [], "batches": [0, 1], "tolerance": {"loss": 1}, "config": {}}
    (workdir / "certificate.json").write_text("{" if damaged else json.dumps(certified))
    _, page = page_of(workdir)
    [verdict] = [row[1] for row in page.rows if row[0] == "certificate"]
    assert "certificate.json is damaged" in verdict if damaged else verdict == "passed, 2 steps"


def test_timelines_of_a_pipeline(tmp_path: Path) -> None:
    text, page = page_of(
        write_run(tmp_path / "run"), planned=[Span(0, 0, 0, 0, 0, 1)], measured=[Span(0, 3, 0, 0, 0, 2)]
    )
    assert [caption for caption in page.texts if caption in ("planned", "measured")] == ["planned", "measured"]
    assert "<h2>Schedule</h2>" in text
    assert "<h2>Schedule</h2>" not in page_of(tmp_path / "run")[0]


def test_traffic_of_one_device() -> None:
    assert traffic_table(replace(PLAN, traffic=())) == "<p>Devices send nothing to each other in a step.</p>"


def test_names_of_metrics() -> None:
    assert [metric_label(name) for name in ("test_macro_f1", "test_r2", "test_rmse")] == [
        *("test macro F1", "test R2", "test RMSE")
    ]


def test_confusions_of_many_classes_are_listed_by_number() -> None:
    names = [f"c{number}" for number in range(30)]
    counts = [[0] * 30 for _ in names]
    counts[3][4], counts[3][3], counts[7][0] = 5, 90, 8
    rows = Page(confusions(names, counts)).rows
    assert rows[1:3] == [["c7", "c0", "8", "8"], ["c3", "c4", "5", "95"]]
    assert rows[3] == ["", *names]  # the matrix follows
    assert rows[4:] == [[name, *map(str, of_name)] for name, of_name in zip(names, counts, strict=True)]


def test_cells_and_headings_of_a_matrix() -> None:
    names = list("abcdefg")
    assert 'class="matrix"' in confusions(names, [[1] * 7] * 7)  # the names above many columns are turned
    text = confusions(["a", "b"], [[0, 4], [2, 6]])
    assert 'class="matrix"' not in text
    assert [text.count(f'<th scope="col"{kind}>') for kind in ("", ' class="number"')] == [1, 2]
    assert re.findall(r'<td class="([a-z ]+)"( style)?', text) == [
        *[("number zero", ""), ("number", " style"), ("number", " style"), ("number", " style")]
    ]


def test_texts_in_a_table() -> None:
    text = table([["a", "b", "c" * 41], ["d", number_cell(1.5), ""]], ["x", "y", "z"])
    assert re.findall(r'<td class="([a-z]*)">', text) == ["right", "text", "number", ""]


def test_an_error_of_the_page_is_reported_and_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text("{}")
    write_report(cast(Any, SimpleNamespace(workdir=tmp_path / "run", plan=PLAN, num_steps=1, strategy=None)))
    assert capsys.readouterr().out.startswith(f"report    {tmp_path}/run/report.html was not written: AttributeError: ")
    assert not (tmp_path / "run" / "report.html").exists()
