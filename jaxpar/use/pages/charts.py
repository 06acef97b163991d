"""Charts as SVG elements in a page: lines over the steps of a run, and the timelines of a pipeline.

They have the colors of the theme of the page (page.html), and no ids that could occur twice in a page.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from jaxpar.strategies.pipeline.tables.simulate import Span
from jaxpar.strategies.pipeline.tables.table import ACTION_KINDS
from jaxpar.use.pages.html import escaped_text, format_number, format_si

CHART_WIDTH, CHART_HEIGHT = 400, 240  # of a line chart, in units of which a letter is 12 high
RIGHT, ABOVE, BELOW = 12, 8, 36  # margins of a line chart; that on the left follows from the labels
LETTER, GAP = 7.7, 6  # width of a letter or digit, and space between a label and the axis
MEAN_LETTER = 6.5  # of a text
MOST_DIGITS = 1e5  # numbers of an axis that are not written with a prefix of the SI
NUM_COLORS = 6
NUM_TICKS = 5  # about, on an axis
TICK_SPACE = 60  # about, between the ticks of a timeline
BUCKETS = 400  # a longer curve is drawn as the minimum and the maximum of this many equal numbers of points
MOST_HOVERED = 200
ROW, SIDE, CELL = 20, 30, 20  # height of the row of a device, width of its number, and usual width of an action
PAGE_WIDTH = 1200  # about, of a timeline that fits the page on a desktop
MOST_WIDTH = 4000  # width of the actions of a timeline
MOST_SPANS = 20_000  # actions of a drawn timeline
NARROWEST_LABEL = 10  # width of an action that shows the number of its microbatch
MOST_TITLED = 2000  # actions of a timeline in which each shows its times when the pointer is over it


class Series(NamedTuple):
    """A curve of a line chart."""

    name: str  # its name in the legend
    points: Sequence[tuple[float, float]]  # (x, y), in the order of x
    is_marked: bool = False  # whether each point has a marker
    is_reference: bool = False  # whether the others are compared with it, and it is grey


def line_chart(
    title: str, series: Sequence[Series], x_label: str = "step", events: Sequence[tuple[float, str]] = ()
) -> str:
    """Return a chart with a legend that contains the last value of each curve; empty if there are no points.

    Points show their values when the pointer is over them or a finger taps them, at most MOST_HOVERED of a curve
    without markers.

    events: (x, text) of vertical lines, which show the text in the same way.

    The color of a curve depends on its place in `series`, so that it is the same in charts that lack other curves.
    """
    drawn = [(number, one) for number, one in enumerate(series) if one.points]
    if not drawn:
        return ""
    xs, ys = ([point[axis] for _, one in drawn for point in one.points] for axis in (0, 1))
    (x_low, x_high), (y_low, y_high) = _range(min(0, *xs), max(xs)), _range(min(ys), max(ys))
    labels = {y: _axis_number(y) for y in ticks(y_low, y_high)}
    left = round(GAP + LETTER * max(map(len, labels.values())))
    right, bottom = CHART_WIDTH - RIGHT, CHART_HEIGHT - BELOW
    x_scale, y_scale = (right - left) / (x_high - x_low), (bottom - ABOVE) / (y_high - y_low)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (x - x_low) * x_scale, bottom - (y - y_low) * y_scale

    parts: list[str] = []
    keys: list[str] = []
    for y, label in labels.items():
        height = place(x_low, y)[1]
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{height:.2f}" y2="{height:.2f}"/>')
        parts.append(_text(left - GAP, height + 4, label, "end"))
    x_ticks = ticks(x_low, x_high)
    parts += [_text(place(x, y_low)[0], bottom + 15, _axis_number(x), "middle") for x in x_ticks]
    parts.append(_text(right, CHART_HEIGHT - 4, x_label, "end"))
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    for x, label in events:
        at, style = f"{place(x, y_low)[0]:.2f}", 'style="stroke-dasharray:2 2"'
        line = f'<line class="axis" {style} x1="{at}" x2="{at}" y1="{ABOVE}" y2="{bottom}"/>'
        parts.append(_with_value(line, label, left))
    for number, one in drawn:
        color, is_dashed = f"var(--c{number % NUM_COLORS})", number // NUM_COLORS % 2
        if one.is_reference:
            color, is_dashed = "var(--faint)", 0
        points = thinned(one.points)
        placed = [place(*point) for point in points]
        line = ";stroke-dasharray:5 3" if is_dashed else ""
        parts.append(f'<path style="stroke:{color}{line}" d="M{" L".join(f"{x:.2f} {y:.2f}" for x, y in placed)}"/>')
        is_marked = one.is_marked or len(placed) == 1
        each = -(-len(placed) // MOST_HOVERED)
        for point, (x, y) in list(zip(points, placed, strict=True))[:: 1 if is_marked else each]:
            label = f", {x_label} {format_number(point[0])}: {format_number(point[1])}"
            label = _ending(one.name, int((right - left) / MEAN_LETTER) - len(label)) + label
            look = f'style="fill:{color}"' if is_marked else 'class="hover"'
            circle = f'<circle {look} cx="{x:.2f}" cy="{y:.2f}" r="{3 if is_marked else 6}"/>'
            parts.append(_with_value(circle, label, left))
        last = f'<data value="{one.points[-1][1]!r}">{format_number(one.points[-1][1])}</data>'
        key = f'<span class="key{" dashed" if is_dashed else ""}" style="color:{color}"></span>'
        keys.append(f"<li>{key}{escaped_text(one.name)} {last}</li>")
    return _figure(title, _svg(f'viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}"', title, parts), keys)


def _axis_number(value: float) -> str:
    """Return the label of a number of an axis: `20,000`, `15 M`. Two numbers of an axis differ in their labels."""
    return format_si(value, digits=6) if abs(value) >= MOST_DIGITS else f"{value:,.6g}"


def _range(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis, which differ."""
    margin = (high - low) * 0.03 or abs(high) * 0.1 or 1.0
    return low if low == 0 else low - margin, high + margin


def ticks(low: float, high: float, number: int = NUM_TICKS) -> list[float]:
    """Return about `number` multiples of 1, 2 or 5 times a power of ten between `low` and `high`."""
    least = (high - low) / number
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(number * step, digits + 1) for number in range(first, last + 1)]


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return the points to draw: all of a short curve, otherwise the lowest and the highest of each of BUCKETS."""
    if len(points) <= 2 * BUCKETS:
        return points
    size = -(-len(points) // BUCKETS)
    remaining = []
    for first in range(0, len(points), size):
        bucket = points[first : first + size]
        ends = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
        remaining += sorted(ends)
    return [*remaining, points[-1]] if remaining[-1] != points[-1] else remaining


def timeline_chart(title: str, timeline: Sequence[Span]) -> str:
    """Return a chart of the actions of a step, with a row for each device. Of a very long one, only the first actions.

    The axis below has the unit of the timeline. An action shows its start and length when the pointer is over it.
    Its actions have their usual width, unless the devices are idle for so long that the chart would be wider than the
    page and than the actions side by side. It scrolls in its own box.
    """
    drawn = sorted((span for span in timeline if span.end > span.start), key=lambda span: span.start)[:MOST_SPANS]
    begin, end = float(min(span.start for span in drawn)), float(max(span.end for span in drawn))
    lengths = sorted(float(span.end - span.start) for span in drawn)
    usual = CELL / lengths[len(lengths) // 2]
    busiest = max(Counter(span.device for span in drawn).values())
    widest = min(MOST_WIDTH, max(PAGE_WIDTH, 2 * CELL * busiest))
    scale = min(usual, widest / (end - begin))
    num_devices, num_chunks = 1 + max(span.device for span in drawn), 1 + max(span.chunk for span in drawn)
    parts = [_text(SIDE - 6, ROW * device + 14, str(device), "end") for device in range(num_devices)]
    bottom, width = ROW * num_devices, (end - begin) * scale
    for time in ticks(0, end - begin, max(1, round(width / TICK_SPACE))):
        x, anchor = SIDE + time * scale, "end" if time * scale > width - CELL else "middle"
        parts.append(f'<line class="grid" x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 15, _axis_number(time), anchor))
    by_kind: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in drawn:
        by_kind[span.kind, span.chunk].append(span)
    labels, keys = [], []
    for kind, chunk in sorted(by_kind):
        opacity = 1 - 0.6 * chunk / max(1, num_chunks - 1)
        style = f"fill:{ACTION_KINDS[kind].colour};fill-opacity:{opacity:.2f}"
        name = ACTION_KINDS[kind].title + (f", chunk {chunk}" if num_chunks > 1 else "")
        boxes, texts = [], []
        for span in by_kind[kind, chunk]:
            start, lasts = float(span.start) - begin, float(span.end - span.start)
            left, length = SIDE + start * scale, lasts * scale
            boxes.append(f"M{left:.2f} {ROW * span.device + 1}h{length:.2f}v{ROW - 2}h{-length:.2f}z")
            texts.append(f"{name}, microbatch {span.microbatch}, at {format_number(start)}: {format_number(lasts)}")
            if length >= NARROWEST_LABEL:
                labels.append(_text(left + length / 2, ROW * span.device + 14, str(span.microbatch), "middle", "on"))
        look = f'class="span" style="{style}"'
        if len(drawn) <= MOST_TITLED:
            titled = zip(boxes, map(escaped_text, texts), strict=True)
            parts += [f'<path {look} d="{box}"><title>{text}</title></path>' for box, text in titled]
        else:
            parts.append(f'<path {look} d="{"".join(boxes)}"/>')
        swatch = f"color:{ACTION_KINDS[kind].colour};opacity:{opacity:.2f}"
        keys.append(f'<li><span class="key" style="{swatch}"></span>{escaped_text(name)}</li>')
    is_cut = len(drawn) == MOST_SPANS < len(timeline)
    rest = f" (the first {len(drawn):,} of {len(timeline):,} actions)" if is_cut else ""
    size = f'class="wide" width="{SIDE + width + 1:.0f}" height="{bottom + 20}"'
    picture = _svg(size, title, [*parts, *labels])
    return _figure(title + rest, f'<div class="scroll">{picture}</div>', keys)


def _with_value(element: str, value: str, left: float) -> str:
    """Return an element that shows its value at the top of the chart when it is pointed at or tapped."""
    return f'<g class="point" tabindex="-1">{element}{_text(left + GAP, ABOVE + 8, value, "start", "value")}</g>'


def _ending(text: str, most: int) -> str:
    """Return the end of a text that has more than `most` characters."""
    return text if len(text) <= most else f"…{text[len(text) - most + 1 :]}"


def _svg(attributes: str, title: str, parts: Sequence[str]) -> str:
    return "\n".join([f'<svg {attributes} role="img" aria-label="{escaped_text(title)}">', *parts, "</svg>"])


def _figure(caption: str, picture: str, keys: Sequence[str]) -> str:
    head = f"<figure class='chart'><figcaption>{escaped_text(caption)}</figcaption>"
    return f'{head}\n{picture}\n<ul class="legend">{"".join(keys)}</ul></figure>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text{of_kind} x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escaped_text(text)}</text>'
