"""Pictures of a comparison: bars of the throughput and the memory, and the metric against time."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from jaxpar.compare.report import EMULATED, REFERENCE, StrategyOutcome
from jaxpar.errors import format_bytes

# Colors of Okabe and Ito, "Color Universal Design", 2008, by value of config.strategy. All are visible on white and on
# black.
COLORS = {
    "single": "#808080",
    "data_parallel": "#0072b2",
    "pipeline": "#009e73",
    "async_data_parallel": "#d55e00",
    "swarm": "#cc79a7",
}
# Of curves: first that of REFERENCE, then the others, which also differ in their markers.
CURVE_COLORS = ("#808080", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b")
MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*")
MOST_LINES = len(CURVE_COLORS)  # in a panel
INK = "#010101"  # the color of text and axes, which `svg` replaces by the color of the text of the page
COLORED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
PICTURE_STYLE: dict[Any, Any] = dict.fromkeys(COLORED, INK) | {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_WIDTH = 6.4  # inches


class DrawnPicture(NamedTuple):
    """A picture."""

    name: str  # of its file
    title: str
    figure: Figure


def draw_pictures(
    outcomes: Mapping[str, StrategyOutcome], kinds: Mapping[str, str], *, batch_size: int, machine: str, metric: str
) -> list[DrawnPicture]:
    """Return the pictures of strategies that were timed. kinds: value of config.strategy by strategy."""
    timed = {name: row for name, row in outcomes.items() if row.step_seconds}
    colors, on = {name: COLORS[kind] for name, kind in kinds.items()}, f"measured on {machine}"
    with matplotlib.rc_context(PICTURE_STYLE):
        throughput = _draw_throughput(timed, colors, batch_size)
        curves = _draw_metric(timed, kinds, metric)
        return [
            DrawnPicture("throughput", f"Examples per second, {on}", throughput),
            DrawnPicture(metric, f"{metric.capitalize()} against time, {on}", curves),
            DrawnPicture("memory", "Memory of the fullest device", _draw_memory(outcomes, colors)),
        ]


def _draw_throughput(timed: Mapping[str, StrategyOutcome], colors: Mapping[str, str], batch_size: int) -> Figure:
    """Draw a bar for each strategy: examples per second. The bars of emulations are hatched."""
    figure, axis = _bars(list(timed))
    for place, (name, row) in enumerate(timed.items()):
        assert row.step_seconds
        rate, color = batch_size / row.step_seconds, colors[name]
        fill = {"fill": False, "hatch": "////", "edgecolor": color} if row.is_emulated else {"color": color}
        bar = axis.barh(place, rate, **fill)
        note = f"  ({EMULATED})" if row.is_emulated else ""
        axis.bar_label(bar, [f"{rate:,.0f}{note}"], padding=3, fontsize=8)
    axis.set_xlabel("examples per second")
    return figure


def _draw_memory(outcomes: Mapping[str, StrategyOutcome], colors: Mapping[str, str]) -> Figure:
    """Draw two bars in a line for each strategy: the bytes of the state, and those in flight during a step."""
    rows = {name: row for name, row in outcomes.items() if row.device_bytes}
    figure, axis = _bars(list(rows))
    for place, (name, row) in enumerate(rows.items()):
        held, more = max(row.device_bytes), row.in_flight_bytes or 0
        axis.barh(place, held / 1e6, color=colors[name])
        bar = axis.barh(place, more / 1e6, left=held / 1e6, color=colors[name], alpha=0.4)
        axis.bar_label(bar, [format_bytes(held + more)], padding=3, fontsize=8)
    axis.set_xlabel("MB: state, from the plan (solid); in flight during a step (light)")
    return figure


def _draw_metric(timed: Mapping[str, StrategyOutcome], kinds: Mapping[str, str], metric: str) -> Figure:
    """Draw the metric against the time of the steps, in panels of few curves of one kind, with REFERENCE."""
    drawn = [name for name, row in timed.items() if row.curve]
    first = [REFERENCE] if REFERENCE in drawn else []
    panels = []
    for kind in dict.fromkeys(kinds[name] for name in drawn if name != REFERENCE):
        names = [name for name in drawn if kinds[name] == kind and name != REFERENCE]
        size = MOST_LINES - 1
        panels += [[*first, *names[start : start + size]] for start in range(0, len(names), size)]
    panels = panels or [first]
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(_WIDTH, 0.6 + 2.8 * rows), layout="constrained")
    for place, names in enumerate(panels, 1):
        axis = figure.add_subplot(rows, min(len(panels), 2), place)
        for name, color, marker in zip(names, CURVE_COLORS[REFERENCE not in names :], MARKERS, strict=False):
            row = timed[name]
            assert row.step_seconds
            points = [(step * row.step_seconds, value) for step, value in row.curve]
            label = f"{name} ({EMULATED})" if row.is_emulated else name
            axis.plot(*zip(*points, strict=True), color=color, marker=marker, ms=3, lw=1.2, label=label)
        axis.set_xlabel("time of the steps (s)")
        axis.set_ylabel(f"validation {metric}")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, frameon=False)
    return figure


def _bars(names: Sequence[str]) -> tuple[Figure, Axes]:
    """Return a picture without bars that has a line for each name, from top to bottom, and its axes."""
    figure = Figure(figsize=(_WIDTH, 1 + 0.23 * len(names)), layout="constrained")
    axis = figure.subplots()
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(alpha=0.3, axis="x")
    axis.set_axisbelow(True)
    axis.margins(x=0.18)
    return figure, axis


def svg(picture: DrawnPicture) -> str:
    """Return a picture as an SVG element whose text has the color of the page."""
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": picture.name}):  # names the parts of the picture
        picture.figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    whole = text.getvalue().replace(INK, "currentColor")
    return whole[whole.index("<svg") :]


class PolicyCurve(NamedTuple):
    """A metric against steps and against virtual seconds."""

    name: str  # label of the curve
    x: tuple[ArrayLike, ArrayLike]  # the steps, and the virtual seconds
    values: Sequence[float]  # of the metric
    style: Mapping[str, Any]  # keyword arguments of a line of matplotlib
    reached: int | None = None  # index of the point to mark; None: no point


def save_policy_curves(
    path: Path, panels: Mapping[str, Sequence[PolicyCurve]], metric: str, target: float | None = None
) -> None:
    """Draw a row of two panels for each title: a metric against steps, and against virtual seconds."""
    figure = Figure(figsize=(14, 4.5 * len(panels) + 0.5), layout="constrained")
    axes = figure.subplots(len(panels), 2, sharey="row", squeeze=False)
    for row, (title, curves) in zip(axes, panels.items(), strict=True):
        for index, (axis, label) in enumerate(zip(row, ("step", "virtual seconds"), strict=True)):
            for curve in curves:
                [line] = axis.plot(curve.x[index], curve.values, label=curve.name, **curve.style)
                if curve.reached is not None:
                    x = line.get_xdata()[curve.reached]
                    axis.plot(x, curve.values[curve.reached], "o", color=line.get_color(), ms=6)
            if target is not None:
                axis.axhline(target, color="grey", lw=0.8, label="target" if index == 0 else None)
            axis.set_xlim(left=0)
            axis.set_xlabel(label)
            axis.set_title(title)
            axis.grid(alpha=0.3)
        row[0].set_ylabel(metric)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    figure.savefig(path, dpi=120)
