"""Pictures of a comparison: bars of the throughput and the memory, and the metric against time."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxpar.colors import CURVE_COLORS
from jaxpar.compare.report import EMULATED, REFERENCE, StrategyOutcome
from jaxpar.errors import format_bytes

# By value of config.strategy, and by purpose of memory. Bytes for other purposes, such as residuals, are one part.
DRAWN_KINDS = ("single", "data_parallel", "async_data_parallel", "pipeline", "swarm")
COLORS = dict(zip(DRAWN_KINDS, CURVE_COLORS, strict=False))
PURPOSES_DRAWN = ("parameters", "gradients", "optimizer", "other state", "activations", "stashes", "transfers")
PURPOSE_COLORS = dict(zip(PURPOSES_DRAWN, (*CURVE_COLORS[1:4], CURVE_COLORS[0], *CURVE_COLORS[4:]), strict=False))
MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*")
MOST_LINES = len(CURVE_COLORS)  # in a panel
PICTURE_STYLE: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
_WIDTH = 6.4  # inches
_COLUMNS = 4  # panels of a metric in a row


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
    with matplotlib.rc_context(PICTURE_STYLE):
        return {
            "throughput": _draw_throughput(timed, kinds, batch_size),
            metric: _draw_metric(timed, kinds, metric),
            "memory": draw_memory({name: row.memory for name, row in outcomes.items() if row.memory}),
        }


def _draw_throughput(timed: Mapping[str, StrategyOutcome], kinds: Mapping[str, str], batch_size: int) -> Figure:
    """Draw a bar for each strategy: examples per second. The bars of emulations are hatched."""
    figure, axis = _bars(list(timed))
    for place, (name, row) in enumerate(timed.items()):
        assert row.step_seconds
        rate, color = batch_size / row.step_seconds, COLORS[kinds[name]]
        fill = {"fill": False, "hatch": "////", "edgecolor": color} if row.is_emulated else {"color": color}
        bar = axis.barh(place, rate, **fill)
        note = f"  ({EMULATED})" if row.is_emulated else ""
        axis.bar_label(bar, [f"{rate:,.0f}{note}"], padding=3, fontsize=8)
    axis.set_xlabel("examples per second")
    _add_legend(figure, [kinds[name] for name in timed])
    return figure


def draw_memory(memory: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw a bar for each strategy: bytes by purpose, those of PURPOSES_DRAWN in their order. memory: by strategy."""
    figure, axis = _bars(list(memory))
    largest = max((sum(parts.values()) for parts in memory.values()), default=0)
    unit, divisor = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    left = np.zeros(len(memory))
    for purpose, color in PURPOSE_COLORS.items():
        if purpose == "other state":
            others = (sum(n for name, n in parts.items() if name not in PURPOSES_DRAWN) for parts in memory.values())
        else:
            others = (0.0 for _ in memory)
        sizes = np.array([parts.get(purpose, 0.0) for parts in memory.values()]) + list(others)
        if sizes.any():
            axis.barh(range(len(memory)), sizes / divisor, left=left / divisor, color=color, label=purpose)
        left += sizes
    for place, total in enumerate(left):
        axis.text(total / divisor, place, f" {format_bytes(total)}", va="center", fontsize=8)
    axis.use_sticky_edges = False  # those of empty bars would leave no space for the totals
    axis.set_xlim(left=0)
    axis.set_xlabel(f"memory of the fullest device ({unit})")
    if memory:
        figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure


def curve_panels(outcomes: Mapping[str, StrategyOutcome], kinds: Mapping[str, str], metric: str) -> list[CurvePanel]:
    """Return the metric against the time of the steps, in panels of few strategies of one kind, with REFERENCE."""
    drawn = {name: row for name, row in outcomes.items() if row.step_seconds and row.curve}
    first = [REFERENCE] if REFERENCE in drawn else []
    groups: list[tuple[str, list[str]]] = []
    for kind in dict.fromkeys(kinds[name] for name in drawn if name != REFERENCE):
        names = [name for name in drawn if kinds[name] == kind and name != REFERENCE]
        size = MOST_LINES - 1
        starts = range(0, len(names), size)
        for number, start in enumerate(starts, 1):
            part = f" ({number} of {len(starts)})" if len(starts) > 1 else ""
            groups.append((f"{kind}{part}", [*first, *names[start : start + size]]))
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


def _draw_metric(timed: Mapping[str, StrategyOutcome], kinds: Mapping[str, str], metric: str) -> Figure:
    """Draw the metric against the time of the steps, in a panel for each strategy, with the curve of REFERENCE."""
    drawn = {name: row for name, row in timed.items() if row.curve}
    names = [name for name in drawn if name != REFERENCE] or list(drawn)
    columns = min(max(len(names), 1), _COLUMNS)
    rows = -(-max(len(names), 1) // columns)
    figure = Figure(figsize=(_WIDTH, 0.8 + 1.3 * rows), layout="constrained")
    axes_RC = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axis in axes_RC.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes_RC.flat, names, strict=False):
        for one in dict.fromkeys((REFERENCE, name)):
            if one in drawn:
                row = drawn[one]
                assert row.step_seconds
                points = [(step * row.step_seconds, value) for step, value in row.curve]
                style = {"color": COLORS[kinds[one]], "ms": 2.5, "lw": 1.4, "label": one}
                axis.plot(*zip(*points, strict=True), "o-", **style)
        axis.set_title(f"{name} ({EMULATED})" if drawn[name].is_emulated else name, fontsize=8)
        axis.grid(alpha=0.3)
    for axis in axes_RC.flat[max(len(names) - columns, 0) : len(names)]:
        axis.tick_params(labelbottom=True)  # also above an empty place
    axes_RC[0, 0].set_xlim(left=0)  # shared by all
    figure.supxlabel("time of the steps (s)", fontsize=9)
    figure.supylabel(f"validation {metric}", fontsize=9)
    _add_legend(figure, [kinds[name] for name in drawn])
    return figure


def _add_legend(figure: Figure, kinds: Sequence[str]) -> None:
    """Add a legend above the picture: the color of each kind of strategy."""
    patches = [Patch(color=COLORS[kind], label=kind) for kind in dict.fromkeys(kinds)]
    if patches:
        figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False, fontsize=8)


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
