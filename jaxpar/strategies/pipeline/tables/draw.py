"""Draws pipelines: tables as text, and simulated or measured timelines as pictures. Every row is a device."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxpar.strategies.pipeline.tables.simulate import Span
from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS, Kind, Table, U

CHUNKS = "abcdefghijklmnopqrstuvwxyz"  # further chunks are numbered
ROW_INCHES, CELL_INCHES = 0.32, 0.14
MIN_INCHES, MAX_INCHES = 6.5, 30.0  # total width of the cells; the rows of a chart are at most as high
TITLE_INCHES, AXIS_INCHES, LEGEND_INCHES, SIDE_INCHES = 0.4, 0.5, 0.2, 0.6
MIN_FONT, MAX_FONT = 5.5, 9.0  # smaller numbers are left out
TITLE_FONT, TITLE_LETTER = 12.0, 0.55  # largest size of a title; width of a letter, relative to its size
LABEL_INCHES = 0.15  # of the number of a device
MAX_SHAPES = 50_000  # cells of a chart that a vector format draws one by one; more become an image
POINTS = 72.0  # per inch


def format_table(table: Table) -> str:
    """Format the table as a grid with a column per clock. `F3b` is F of microbatch 3 on the second chunk."""
    cells = [[""] * table.num_clocks for _ in range(table.num_devices)]
    for clock, device, kind, microbatch, chunk, *_ in table.actions.tolist():
        suffix = letter(chunk) if table.num_chunks > 1 else ""
        cells[device][clock] += f"{ACTION_KINDS[kind].name}{microbatch}{suffix}"
    widths = [max(len(row[clock]) for row in cells) for clock in range(table.num_clocks)]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(f"{device}:  {row}".rstrip() for device, row in enumerate(rows))


def letter(chunk: int) -> str:
    """Return the letter of a chunk, or `.26` and so on after z."""
    return CHUNKS[chunk] if chunk < len(CHUNKS) else f".{chunk}"


def save_charts(path: Path | str, charts: Sequence[tuple[str, Sequence[Span]]], *, axis: str = "time") -> None:
    """Write a picture with one chart per (title, timeline), stacked. The suffix of the path selects the format.

    axis: title of the time axis, with the unit if the times have one.
    """
    Path(path).unlink(missing_ok=True)  # a link is replaced, not followed
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": "jaxpar"}  # text stays text; output is reproducible
    with matplotlib.rc_context(options):
        metadata = {"Date": None} if str(path).endswith(".svg") else None
        draw_charts(charts, axis).savefig(path, dpi=150, metadata=metadata)


def draw_charts(charts: Sequence[tuple[str, Sequence[Span]]], axis: str = "time") -> Figure:
    """Draw the charts on one scale, wide enough for the microbatch numbers to be legible. axis: see `save_charts`."""
    width = float(np.clip(CELL_INCHES * max(_num_cells(timeline) for _, timeline in charts), MIN_INCHES, MAX_INCHES))
    length = max(_makespan(timeline) for _, timeline in charts)
    rows = [min(ROW_INCHES * _num_devices(timeline), MAX_INCHES) for _, timeline in charts]
    below = [AXIS_INCHES + LEGEND_INCHES * (1 + max(span.chunk for span in timeline)) for _, timeline in charts]
    full_width, full_height = SIDE_INCHES * 2 + width, sum(rows) + sum(below) + TITLE_INCHES * len(charts)
    result = Figure(figsize=(full_width, full_height))
    bottom = full_height
    for (title, timeline), height, under in zip(charts, rows, below, strict=True):
        bottom -= TITLE_INCHES + height
        sides = (SIDE_INCHES / full_width, bottom / full_height, width / full_width, height / full_height)
        axes = result.add_axes(sides)
        _chart(axes, title, timeline, length, width, height)
        axes.set_xlabel(axis, loc="right")
        bottom -= under
    return result


def _num_cells(timeline: Sequence[Span]) -> float:
    """Return the length of a timeline in actions of median length."""
    usual = float(np.median([span.end - span.start for span in timeline]))
    return _makespan(timeline) / max(usual, 1e-9 * _makespan(timeline))


def _makespan(timeline: Sequence[Span]) -> float:
    return float(max(span.end for span in timeline) - min(span.start for span in timeline)) or 1.0


def _num_devices(timeline: Sequence[Span]) -> int:
    return 1 + max(span.device for span in timeline)


def _chart(ax: Axes, title: str, timeline: Sequence[Span], length: float, width: float, height: float) -> None:
    """Draw a chart of `width` x `height` inches, as wide as the time `length`."""
    num_devices, num_chunks = _num_devices(timeline), 1 + max(span.chunk for span in timeline)
    start, makespan = float(min(span.start for span in timeline)), _makespan(timeline)
    points, row = POINTS * width / length, height / num_devices  # per unit of time; inches per device
    timeline = [span for span in timeline if span.kind != U or span.end > span.start]  # simulated updates take no time
    device_N, kind_N, _, chunk_N, begin_N, end_N = np.array(timeline, float).reshape(-1, 6).T
    left_N, right_N = begin_N - start, end_N - start
    colours = np.array([[shade(kind, chunk, num_chunks) for chunk in range(num_chunks)] for kind in ACTION_KINDS])
    colours_N3 = colours[kind_N.astype(int), chunk_N.astype(int)]
    fonts_N = np.minimum(points * (right_N - left_N), POINTS * row) / 0.72
    is_dark_N = colours_N3 @ (0.299, 0.587, 0.114) <= 0.5
    for span, left, right, font, is_dark in zip(timeline, left_N, right_N, fonts_N, is_dark_N, strict=True):
        size = min(MAX_FONT, font / max(1.4, len(str(span.microbatch))))  # with some space around a single digit
        if size >= MIN_FONT:
            where = ((left + right) / 2, span.device, str(span.microbatch))
            ax.text(*where, color="white" if is_dark else "black", fontsize=size, ha="center", va="center_baseline")
    corners_N42 = np.stack([[left_N, left_N, right_N, right_N], device_N + np.array([[-0.5], [0.5], [0.5], [-0.5]])])
    usual = min(points * makespan / _num_cells(timeline), POINTS * row)  # size of a cell in points
    cells = PolyCollection([*corners_N42.T], facecolors=colours_N3, edgecolors="black", linewidths=min(0.3, usual / 20))
    cells.set_rasterized(len(timeline) > MAX_SHAPES)
    if usual < MIN_FONT:  # cells as wide as few pixels would be drawn as whole pixels, so that some hide others
        cells.set_snap(False)
    ax.add_collection(cells)
    fitting = POINTS * (width + SIDE_INCHES) / (TITLE_LETTER * max(len(title), 1))
    ax.set_title(title, loc="left", fontsize=min(TITLE_FONT, fitting))
    ax.set(ylabel="device", xlim=(0, length), ylim=(num_devices - 0.5, -0.5), facecolor="#eeeeee")
    ax.set_yticks(range(0, num_devices, int(np.ceil(LABEL_INCHES / row))))
    kinds = [ACTION_KINDS[kind] for kind in sorted({span.kind for span in timeline})]
    legend = []
    for kind, chunk in itertools.product(kinds, range(num_chunks)):
        label = kind.title + (f", chunk {letter(chunk)}" if num_chunks > 1 else "")
        legend.append(Patch(color=shade(kind, chunk, num_chunks), label=label))
    below = (0, -0.25 / height)  # below the tick labels of the time axis
    ax.legend(handles=legend, loc="upper left", bbox_to_anchor=below, ncols=len(kinds), frameon=False, fontsize=8)


def shade(kind: Kind, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    """Return the colour of a kind. Later chunks are lighter."""
    white = 0.65 * chunk / max(1, num_chunks - 1)
    red, green, blue = (value + (1 - value) * white for value in to_rgb(kind.colour))
    return red, green, blue
