"""Pictures of a comparison: bars of the throughput and the memory, and the metric against time."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxpar.errors import format_bytes
from scripts.comparison.table import EMULATED, Outcome

# Colors of Okabe and Ito, "Color Universal Design", 2008, by value of config.strategy. All are visible on white and on
# black. The strategies of a color differ in line style and marker.
COLORS = {
    "single": "#808080",
    "data_parallel": "#0072b2",
    "pipeline": "#009e73",
    "async_data_parallel": "#d55e00",
    "swarm": "#cc79a7",
}
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "v", "D")
INK = "#010101"  # the color of text and axes, which `svg` replaces by the color of the text of the page
COLORED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
STYLE: dict[Any, Any] = dict.fromkeys(COLORED, INK) | {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
WIDTH = 6.4  # inches


class Picture(NamedTuple):
    """A picture, with a name for its file and its title."""

    name: str
    title: str
    figure: Figure


def pictures(
    outcomes: Mapping[str, Outcome], kinds: Mapping[str, str], *, batch_size: int, machine: str, metric: str
) -> list[Picture]:
    """Return the pictures. Strategies that failed or were not timed are left out.

    Args:
      outcomes: results by strategy.
      kinds: value of config.strategy by strategy.
      batch_size: number of examples of a step.
      machine: where the strategies were trained.
      metric: name of the metric of `Outcome.curve`.
    """
    timed = {name: row for name, row in outcomes.items() if row.step_seconds}
    colors = {name: COLORS[kind] for name, kind in kinds.items()}
    with matplotlib.rc_context(STYLE):
        return [
            Picture(
                "throughput", f"Examples per second, measured on {machine}", draw_throughput(timed, colors, batch_size)
            ),
            Picture(
                metric, f"{metric.capitalize()} against time, measured on {machine}", draw_curves(timed, colors, metric)
            ),
            Picture("memory", "Memory of the fullest device, according to the plan", draw_memory(outcomes, colors)),
        ]


def draw_throughput(timed: Mapping[str, Outcome], colors: Mapping[str, str], batch_size: int) -> Figure:
    """Draw a bar for each strategy: examples per second. The bars of emulations are hatched."""
    figure, axis = _bars(list(timed))
    for place, (name, row) in enumerate(timed.items()):
        assert row.step_seconds
        rate = batch_size / row.step_seconds
        color = colors[name]
        fill = {"fill": False, "hatch": "////", "edgecolor": color} if row.is_emulated else {"color": color}
        bar = axis.barh(place, rate, **fill)
        note = f"  ({EMULATED})" if row.is_emulated else ""
        axis.bar_label(bar, [f"{rate:,.0f}{note}"], padding=3, fontsize=8)
    axis.set_xlabel("examples per second")
    axis.margins(x=0.18)
    return figure


def draw_memory(outcomes: Mapping[str, Outcome], colors: Mapping[str, str]) -> Figure:
    """Draw two bars in a line for each strategy: the bytes that the plan counts, and those in flight during a step."""
    rows = {name: row for name, row in outcomes.items() if row.device_bytes}
    figure, axis = _bars(list(rows))
    for place, (name, row) in enumerate(rows.items()):
        held, more = max(row.device_bytes), row.in_flight_bytes or 0
        axis.barh(place, held / 1e6, color=colors[name])
        bar = axis.barh(place, more / 1e6, left=held / 1e6, color=colors[name], alpha=0.4)
        axis.bar_label(bar, [format_bytes(held + more)], padding=3, fontsize=8)
    axis.set_xlabel("MB: state and stashes, from the plan (solid); in flight during a step, estimated (light)")
    axis.margins(x=0.18)
    return figure


def draw_curves(timed: Mapping[str, Outcome], colors: Mapping[str, str], metric: str) -> Figure:
    """Draw the metric on the validation split against the time of the steps, without compilation and evaluations."""
    figure = Figure(figsize=(WIDTH, 6), layout="constrained")
    axis = figure.subplots()
    for place, (name, row) in enumerate(timed.items()):
        assert row.step_seconds
        seconds = [step * row.step_seconds for step, _ in row.curve]
        label = f"{name} ({EMULATED})" if row.is_emulated else name
        style, marker = LINES[place % len(LINES)], MARKERS[place % len(MARKERS)]
        axis.plot(
            seconds,
            [value for _, value in row.curve],
            style,
            color=colors[name],
            marker=marker,
            ms=3,
            lw=1.2,
            label=label,
        )
    axis.set_xlabel("seconds of training: steps x time of a step")
    axis.set_ylabel(f"validation {metric}")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if timed:
        figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _bars(names: Sequence[str]) -> tuple[Figure, Axes]:
    """Return a picture without bars that has a line for each name, from top to bottom, and its axes."""
    figure = Figure(figsize=(WIDTH, 1 + 0.23 * len(names)), layout="constrained")
    axis = figure.subplots()
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(alpha=0.3, axis="x")
    axis.set_axisbelow(True)
    return figure, axis


def svg(picture: Picture) -> str:
    """Return a picture as an SVG element whose text has the color of the page."""
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": picture.name}):  # names the parts of the picture
        picture.figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    whole = text.getvalue().replace(INK, "currentColor")
    return whole[whole.index("<svg") :]
