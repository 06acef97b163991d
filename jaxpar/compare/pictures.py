"""Pictures of a comparison: bars of the throughput and the memory, and the metric against time."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxpar.compare.report import EMULATED, REFERENCE, StrategyOutcome, fullest_bytes
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
PICTURE_STYLE: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
_WIDTH = 6.4  # inches


class PolicyCurve(NamedTuple):
    """A metric against steps or virtual seconds."""

    name: str  # label of the curve
    x: Sequence[float] | np.ndarray  # [P], in the unit of the panel
    values: Sequence[float]  # of the metric, [P]
    reached: int | None = None  # index of the point to mark; None: no point


class CurvePanel(NamedTuple):
    """A panel of at most MOST_LINES curves."""

    title: str
    xlabel: str
    curves: Sequence[PolicyCurve]


def draw_pictures(
    outcomes: Mapping[str, StrategyOutcome], kinds: Mapping[str, str], *, batch_size: int, metric: str
) -> dict[str, Figure]:
    """Return the pictures by name. kinds: value of config.strategy by strategy."""
    timed = {name: row for name, row in outcomes.items() if row.step_seconds}
    colors = {name: COLORS[kind] for name, kind in kinds.items()}
    with matplotlib.rc_context(PICTURE_STYLE):
        return {
            "throughput": _draw_throughput(timed, colors, batch_size),
            metric: _draw_curves(curve_panels(outcomes, kinds, metric), metric),
            "memory": _draw_memory(outcomes, colors),
        }


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
        axis.bar_label(bar, [format_bytes(fullest_bytes(row))], padding=3, fontsize=8)
    axis.set_xlabel("MB: state, from the plan (solid); in flight during a step (light)")
    return figure


def curve_panels(outcomes: Mapping[str, StrategyOutcome], kinds: Mapping[str, str], metric: str) -> list[CurvePanel]:
    """Return the metric against the time of the steps, in panels of few strategies of one kind, with REFERENCE."""
    drawn = {name: row for name, row in outcomes.items() if row.step_seconds and row.curve}
    first = [REFERENCE] if REFERENCE in drawn else []
    groups: list[tuple[str, list[str]]] = []
    for kind in dict.fromkeys(kinds[name] for name in drawn if name != REFERENCE):
        names = [name for name in drawn if kinds[name] == kind and name != REFERENCE]
        size = MOST_LINES - 1
        groups += [(kind, [*first, *names[start : start + size]]) for start in range(0, len(names), size)]
    panels = []
    for kind, names in groups or [(REFERENCE, first)]:
        curves = []
        for name in names:
            row = drawn[name]
            assert row.step_seconds
            steps, values = zip(*row.curve, strict=True)
            label = f"{name} ({EMULATED})" if row.is_emulated else name
            curves.append(PolicyCurve(label, [step * row.step_seconds for step in steps], values))
        panels.append(CurvePanel(f"Validation {metric}, {kind}", "time of the steps (s)", curves))
    return panels


def _draw_curves(panels: Sequence[CurvePanel], metric: str) -> Figure:
    """Draw panels of a metric on the validation split, two in a row."""
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(_WIDTH, 0.6 + 2.8 * rows), layout="constrained")
    for place, panel in enumerate(panels, 1):
        axis = figure.add_subplot(rows, min(len(panels), 2), place)
        has_reference = [curve.name for curve in panel.curves[:1]] == [REFERENCE]
        for curve, color, marker in zip(panel.curves, CURVE_COLORS[not has_reference :], MARKERS, strict=False):
            axis.plot(curve.x, curve.values, color=color, marker=marker, ms=3, lw=1.2, label=curve.name)
        axis.set_xlabel(panel.xlabel)
        axis.set_ylabel(f"validation {metric}")
        axis.set_xlim(left=0)
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


def draw_panels(rows: Sequence[Sequence[CurvePanel]], metric: str, target: float | None = None) -> Figure:
    """Draw rows of panels of a metric, with a legend below each column. target: a value to show as a line.

    Equal curves do not hide each other: the later ones are thinner, and no two of them mark the same points.
    """
    with matplotlib.rc_context(PICTURE_STYLE):
        figure = Figure(figsize=(8, 3 * len(rows) + 1), layout="constrained")
        axes_RC = figure.subplots(len(rows), len(rows[0]), sharey=True, squeeze=False)
        for axis, panel in zip(axes_RC.flat, itertools.chain(*rows), strict=True):
            for place, curve in enumerate(panel.curves):
                color, every = CURVE_COLORS[place], (place, MOST_LINES)
                style = {"color": color, "marker": MARKERS[place], "ms": 4, "lw": 2.6 - 0.2 * place}
                axis.plot(curve.x, curve.values, label=curve.name, markevery=every, **style)
                if curve.reached is not None:
                    x, y = np.asarray(curve.x)[curve.reached], curve.values[curve.reached]
                    axis.plot(x, y, "o", ms=10, markerfacecolor="none", markeredgecolor=color)
            if target is not None:
                axis.axhline(target, color="black", ls=":", lw=1, label="target (circles)")
            axis.set_title(panel.title, fontsize=9)
            axis.set(xlabel=panel.xlabel, xlim=0)
            axis.grid(alpha=0.3)
        for axis in axes_RC[:, 0]:
            axis.set_ylabel(metric)
        for axes_R in axes_RC.T:
            lines = {line.get_label(): line for axis in axes_R for line in axis.get_legend_handles_labels()[0]}
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 2, "frameon": False}
            axes_R[-1].legend(handles=lines.values(), **below)
    return figure
