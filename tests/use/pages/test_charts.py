"""Charts: a point is where the ticks of the axes put it, and a timeline has a box for each action."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from jaxpar.strategies.pipeline.tables.simulate import Span
from jaxpar.strategies.pipeline.tables.table import BW, F, U
from jaxpar.use.pages import charts
from jaxpar.use.pages.charts import Series, line_chart, thinned, ticks, timeline_chart


def svg(chart: str) -> ElementTree.Element:
    return ElementTree.fromstring(chart[chart.index("<svg") : chart.index("</svg>") + len("</svg>")])


def places(path: ElementTree.Element) -> list[tuple[float, float]]:
    """Return the points of a curve in the units of the picture."""
    points = [point.split() for point in path.attrib["d"].removeprefix("M").split(" L")]
    return [(float(x), float(y)) for x, y in points]


def test_points_are_where_the_ticks_put_them() -> None:
    rng = np.random.default_rng(0)
    points = [(20.0 * step, float(value)) for step, value in enumerate(rng.normal(2, 0.7, 40), start=1)]
    picture = svg(line_chart("Loss", [Series("train", points)]))
    axes: dict[str, list[tuple[float, float]]] = {"end": [], "middle": []}
    for text in picture.iter("text"):
        if re.fullmatch(r"-?[\d,.]+", text.text or ""):
            # A label of the y axis is centered on its line, 4 units above the base line of the text.
            place = float(text.attrib["y"]) - 4 if text.attrib["text-anchor"] == "end" else float(text.attrib["x"])
            axes[text.attrib["text-anchor"]].append((place, float((text.text or "").replace(",", ""))))
    (y_slope, y_start), (x_slope, x_start) = (
        np.polyfit([at for at, _ in axes[name]], [value for _, value in axes[name]], 1) for name in axes
    )
    [path] = picture.iter("path")
    read = [(x_start + x_slope * x, y_start + y_slope * y) for x, y in places(path)]
    np.testing.assert_allclose(read, points, atol=0.02)


def values_of(picture: ElementTree.Element) -> list[str | None]:
    """Return what the points and lines of a chart show: their elements can get the focus, as on a touch screen."""
    return [one.findtext("text[@class='value']") for one in picture.iter("g") if one.attrib["tabindex"] == "-1"]


def test_points_show_their_values() -> None:
    """A long curve has at most MOST_HOVERED of them."""
    picture = svg(line_chart("Loss", [Series("train", [(20.0, 0.5), (40.0, 0.25)])]))
    assert values_of(picture) == ["train, step 20: 0.5", "train, step 40: 0.25"]
    long = svg(line_chart("Loss", [Series("train", [(float(x), float(x)) for x in range(799)])]))
    assert 100 < len(values_of(long)) <= charts.MOST_HOVERED


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([4.9e6, 15.1e6], ["5 M", "10 M", "15 M"]),
        ([1.24e10, 1.265e10], ["12.4 G", "12.5 G", "12.6 G"]),
        ([10_001.0, 20_001.0], ["10,000", "15,000", "20,000"]),
        ([1.234e-6, 1.238e-6], ["1.234e-06", "1.235e-06", "1.236e-06", "1.237e-06", "1.238e-06"]),
    ],
)
def test_labels_of_the_y_axis_are_in_the_picture(values: list[float], labels: list[str]) -> None:
    """A digit of 12 units height is less than 7.7 wide in common fonts."""
    picture = svg(line_chart("FLOP/s", [Series("rate", list(enumerate(values, start=1)))]))
    found = [text for text in picture.iter("text") if text.attrib["text-anchor"] == "end" and text.text != "step"]
    assert [text.text for text in found] == labels
    assert min(float(text.attrib["x"]) - 7.7 * len(text.text or "") for text in found) > -0.5


def test_events_are_where_their_values_are() -> None:
    picture = svg(line_chart("Rate", [Series("rate", [(10.0, 1.0), (20.0, 2.0)])], events=[(20.0, "<lost>")]))
    [path] = picture.iter("path")
    [line] = [line for one in picture.iter("g") for line in one.iter("line")]
    assert float(line.attrib["x1"]) == float(line.attrib["x2"]) == places(path)[-1][0]
    assert "<lost>" in values_of(picture)


def test_the_legend_has_the_last_values_and_escapes_names() -> None:
    chart = line_chart("<t>", [Series('<b>&"', [(1, 0.25), (2, 0.125)], is_marked=True), Series("none", [])])
    assert '&lt;b&gt;&amp;&quot; <data value="0.125">0.125</data>' in chart
    assert "&lt;b&gt;&amp;&quot;, step 1: 0.25</text>" in chart
    assert "none" not in chart.replace("list-style", "")
    assert line_chart("t", [Series("none", [])]) == ""
    compared = line_chart("t", [Series("single", [(1, 2)], is_reference=True), Series("ddp", [(1, 2)])])
    assert re.findall(r'class="key" style="color:var\(--(\w+)\)"', compared) == ["faint", "c1"]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (-3, 7, [-2, 0, 2, 4, 6]), (1190, 1210, [1190, 1195, 1200, 1205, 1210])],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == expected


@pytest.mark.parametrize("points", [[(3, 0.0)], [(1, 5.0), (2, 5.0)], [(0, -1e-9), (1, 1e9)]])
def test_curves_without_an_extent(points: list[tuple[float, float]]) -> None:
    for path in svg(line_chart("t", [Series("a", points)])).iter("path"):
        for x, y in places(path):
            assert 0 <= x <= 440
            assert 0 <= y <= 250


def test_the_name_of_a_value_is_as_long_as_fits() -> None:
    chart = svg(line_chart("t", [Series("a/long/path/" * 9 + "run", [(1, 2.5)])]))
    [value] = [text.text or "" for text in chart.iter("text") if text.attrib.get("class") == "value"]
    assert value.startswith("…")
    assert value.endswith("path/run, step 1: 2.5")
    assert 45 < len(value) < 60


def test_a_long_curve_keeps_its_extremes() -> None:
    points = [(float(x), 0.0) for x in range(100_000)]
    points[12_345], points[77_777] = (12_345.0, -3.0), (77_777.0, 8.0)
    drawn = thinned(points)
    assert len(drawn) <= 802
    assert {points[12_345], points[77_777], points[-1]} <= set(drawn)
    assert list(drawn) == sorted(drawn)


def test_a_timeline_has_a_box_for_each_action() -> None:
    spans = [Span(0, F, 0, 0, 0, 1), Span(1, F, 0, 0, 1, 2), Span(1, BW, 0, 0, 2, 4), Span(0, BW, 0, 0, 4, 6)]
    picture = svg(timeline_chart("<1f1b>", [*spans, Span(0, U, 0, 0, 6, 6)]))
    boxes = [re.findall(r"M([\d.]+) (\d+)h([\d.]+)v", path.attrib["d"]) for path in picture.iter("path")]
    unit = min(float(width) for [(_, _, width)] in boxes)
    read = sorted(
        (int(y) // 20, round((float(x) - 30) / unit, 2), round(float(width) / unit, 2)) for [(x, y, width)] in boxes
    )
    assert read == [(0, 0, 1), (0, 4, 2), (1, 1, 1), (1, 2, 2)]
    assert [title.text for title in picture.iter("title")] == [
        *("F forward, microbatch 0, at 0: 1", "F forward, microbatch 0, at 1: 1"),
        *("BW backward, microbatch 0, at 2: 2", "BW backward, microbatch 0, at 4: 2"),
    ]
    assert picture.attrib["aria-label"] == "<1f1b>"


def test_the_axis_of_a_timeline() -> None:
    spans = [Span(0, F, number, 0, 5 + 0.25 * number, 5.25 + 0.25 * number) for number in range(40)]
    picture = svg(timeline_chart("measured", spans))  # 800 wide, from 5 to 15
    *ends, bottom = (float(picture.attrib[name]) for name in ("width", "height"))
    axis = {
        float(text.attrib["x"]): text.text for text in picture.iter("text") if float(text.attrib["y"]) > bottom - 20
    }
    assert axis == {30 + 80 * at: str(at) for at in range(11)}
    assert max(axis) < min(ends)


def test_the_actions_of_a_long_timeline_share_a_path() -> None:
    spans = [Span(0, F, number, 0, number, number + 1) for number in range(2001)]
    assert [len(list(svg(timeline_chart("t", spans)).iter(name))) for name in ("path", "title")] == [1, 0]


def test_curves_keep_their_colors_and_the_seventh_is_dashed() -> None:
    series = [Series(f"run {number}", [(1, 0.25), (2, 0.125)] if number else []) for number in range(8)]
    chart = line_chart("Loss", series)
    styles = [path.attrib["style"] for path in svg(chart).iter("path")]
    assert styles == [
        *(f"stroke:var(--c{number})" for number in range(1, 6)),  # run 0 has no curve here, and has in other charts
        *(f"stroke:var(--c{number});stroke-dasharray:5 3" for number in range(2)),
    ]
    keys = re.findall(r'class="(key[a-z ]*)" style="color:var\(--c(\d)\)"></span>run (\d)', chart)
    assert keys == [("key dashed" if number > 5 else "key", str(number % 6), str(number)) for number in range(1, 8)]


@pytest.mark.parametrize(
    ("gap", "width"),
    [
        (1, 100),  # each of 3 actions is 20 wide, and so is each of 2 gaps
        (98, 1200),  # longer gaps: the width of a page
    ],
)
def test_the_width_of_a_timeline(gap: int, width: int) -> None:
    spans = [Span(0, F, number, 0, number * (1 + gap), number * (1 + gap) + 1) for number in range(3)]
    picture = svg(timeline_chart("measured", spans))
    assert float(picture.attrib["width"]) == pytest.approx(30 + width, abs=1.5)
