"""Charts: text is compared in full, and pictures by the texts, shapes and colours in them."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.text import Text

from jaxpar.strategies.pipeline.tables import draw
from jaxpar.strategies.pipeline.tables.simulate import Span, Times, simulate_table
from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS, BW, B, F, W
from tests.strategies.pipeline.named_tables import make

DRAWN = [kind for kind in ACTION_KINDS if kind.passes]  # an update takes no time


def test_text_of_one_chunk() -> None:
    expected = """
0:  F0         BW0  F1         BW1
1:      F0BW0           F1BW1
""".strip("\n")
    table = make("model_parallel", 2, 2)
    actions = table.actions.copy()
    last = actions["device"] == 1
    actions["clock"] -= (actions["clock"] > 1).astype(np.int32) + (actions["clock"] > 5)  # let F and BW share a clock
    assert last.sum() == 4
    assert draw.format_table(table._replace(actions=actions)) == expected


def test_text_of_two_chunks() -> None:
    expected = """
0:  F0a            F0b  B0b  W0b            B0a  W0a
1:       F0a  F0b            B0b  W0b  B0a  W0a
""".strip("\n")
    assert draw.format_table(make("zb_v", 2, 1)) == expected


def texts(svg: str) -> Counter[str]:
    return Counter(re.findall(r"<text [^>]*>([^<]*)</text>", svg))


def test_picture_has_the_number_of_every_microbatch(tmp_path: Path) -> None:
    table = make("zb_v", 8, 32)
    simulation = simulate_table(table, Times(1, 1, 1))
    draw.save_charts(tmp_path / "chart.svg", [("planned: bubble 0.0%", simulation.timeline)])
    found = texts((tmp_path / "chart.svg").read_text())
    for microbatch in range(32):
        assert found[str(microbatch)] >= 8 * 2 * 3, microbatch
    assert found["planned: bubble 0.0%"] == 1
    assert found["F forward, chunk a"] == found["W weight gradient, chunk b"] == 1
    sizes = re.findall(r"font-size: ([\d.]+)px[^>]*>31</text>", (tmp_path / "chart.svg").read_text())
    assert len(sizes) == 8 * 2 * 3
    assert min(map(float, sizes)) >= 6


@pytest.mark.parametrize("times", [1, 3, 8])
def test_titles_end_in_the_picture(times: int) -> None:
    title = times * "mine.csv, planned: bubble 33.5% "
    figure = draw.draw_charts([(title, simulate_table(make("1f1b", 2, 3), Times(1, 1, 1)).timeline)])
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    [drawn] = [one for one in figure.axes[0].get_children() if isinstance(one, Text) and one.get_text() == title]
    assert drawn.get_window_extent(canvas.get_renderer()).x1 <= figure.bbox.x1


def test_planned_and_measured_on_one_page(tmp_path: Path) -> None:
    planned = simulate_table(make("1f1b", 2, 3), Times(1, 1, 1)).timeline
    measured = [span._replace(start=span.start * 0.8 + 5, end=span.end * 0.8 + 4.999) for span in planned]
    charts = [("planned: bubble 25.0%", planned), ("measured: bubble 28.0%", measured)]
    figure = draw.draw_charts(charts)
    assert [ax.get_title(loc="left") for ax in figure.axes] == [title for title, _ in charts]
    for ax, (_, timeline) in zip(figure.axes, charts, strict=True):
        boxes = ax.collections[0].get_paths()
        start = min(span.start for span in timeline)
        for box, span in zip(boxes, timeline, strict=True):
            (left, top), (right, bottom) = box.get_extents().get_points()
            np.testing.assert_allclose((left + start, right + start), (span.start, span.end))
            assert round((top + bottom) / 2) == span.device
        assert [text.get_text() for text in ax.texts] == [str(span.microbatch) for span in timeline]
        assert ax.get_ylim() == (1.5, -0.5)  # device 0 on top
        assert ax.get_xlim() == (0, planned[-1].end)  # one scale, so that lengths can be compared
    draw.save_charts(tmp_path / "chart.png", charts)
    draw.save_charts(tmp_path / "again.png", charts)
    assert (tmp_path / "chart.png").read_bytes() == (tmp_path / "again.png").read_bytes()


def test_pixels_have_the_colour_of_their_kind(tmp_path: Path) -> None:
    timeline = [Span(0, kind, 0, 0, kind, kind + 1) for kind in (F, B, W, BW)]
    draw.save_charts(tmp_path / "chart.png", [("", timeline)])
    pixels = Counter(
        map(tuple, np.round(imread(tmp_path / "chart.png")[..., :3] * 255).astype(int).reshape(-1, 3).tolist())
    )
    for kind in DRAWN:
        colour = tuple(round(255 * value) for value in draw.shade(kind, 0, 1))
        assert pixels[colour] > 1000, (kind, colour)


def test_kinds_and_chunks_differ_for_every_eye() -> None:
    """Kinds differ with every type of colour blindness. Chunks of a kind differ in lightness."""
    kinds = np.array([draw.shade(kind, 0, 1) for kind in DRAWN]) ** 2.2
    # Machado, Oliveira and Fernandes, 2009: protanomaly, deuteranomaly and tritanomaly of severity 1.
    eyes = [
        np.eye(3),
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    ]
    for eye in eyes:
        seen = np.clip(kinds @ np.array(eye).T, 0, 1) ** (1 / 2.2)
        apart = np.linalg.norm(seen[:, None] - seen[None], axis=-1) + 10 * np.eye(4)
        assert apart.min() > 0.2, apart
    for kind in DRAWN:
        light = [np.dot(draw.shade(kind, chunk, 3), (0.299, 0.587, 0.114)) for chunk in range(3)]
        assert light[1] - light[0] > 0.08
        assert light[2] - light[1] > 0.08


def test_width_is_bounded_and_nothing_breaks_at_zero_length() -> None:
    long = simulate_table(make("zb_h1", 2, 200), Times(1, 1, 0.01)).timeline
    assert draw.draw_charts([("", long)]).get_size_inches()[0] < draw.MAX_INCHES + 2
    high = [Span(device, F, 0, 0, device, device + 1) for device in range(1000)]
    figure = draw.draw_charts([("", high)])
    assert figure.get_size_inches()[1] < draw.MAX_INCHES + 2
    assert not figure.axes[0].texts  # too small to read
    assert len(figure.axes[0].get_yticks()) == 200  # 30 inches, of which each takes at least 0.15
    draw.draw_charts([("", [Span(0, F, 0, 0, 1, 1)])]).draw_without_rendering()
    with pytest.raises(ValueError, match="Format 'xyz' is not supported"):
        draw.save_charts("chart.xyz", [("", long[:2])])


def test_small_cells_take_their_share_of_the_pixels(tmp_path: Path) -> None:
    """Cells that are smaller than a pixel are seen as the mean of their colours. F takes a third of the time."""
    kinds = np.array([draw.shade(kind, 0, 1) for kind in (ACTION_KINDS[F], ACTION_KINDS[BW])])
    passes = [(Span(0, F, k, 0, 3 * k, 3 * k + 1), Span(0, BW, k, 0, 3 * k + 1, 3 * k + 3)) for k in range(4000)]
    timeline = [span for of_microbatch in passes for span in of_microbatch]
    draw.save_charts(tmp_path / "chart.png", [("", timeline)])
    pixels = imread(tmp_path / "chart.png")[..., :3]
    row = pixels[int(150 * (draw.TITLE_INCHES + draw.ROW_INCHES / 2)), 200:-200]
    np.testing.assert_allclose(row.mean(axis=0), kinds.T @ (1 / 3, 2 / 3), atol=0.08)
