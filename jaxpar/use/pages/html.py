"""Elements of HTML pages: the document with its style for light and dark themes, tables, and numbers.

All functions escape the texts that they get; only their results, and the elements passed to `document`, `section` and
`folded`, are HTML.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from jaxpar.errors import printable

# The colors of lines are those of Okabe and Ito, "Color Universal Design", 2008; yellow is darker on white.
STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --back: #ffffff; --line: #d0d0d0; --head: #f2f4f7; --faint: #737373;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #b8860b; --c5: #56b4e9; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --back: #14171a; --line: #3a3f45; --head: #20252a; --faint: #8a8f94;
    --c0: #56b4e9; --c1: #e69f00; --c2: #2fc79a; --c3: #e39cc4; --c4: #f0e442; --c5: #4d93d9; }
}
body { margin: 0 auto; padding: 1rem; max-width: 80rem; color: var(--text); background: var(--back);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.15rem; margin: 2rem 0 0.75rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.3rem 0.6rem; border: 1px solid var(--line); text-align: left; vertical-align: top; }
th { background: var(--head); }
tbody th { position: sticky; left: 0; max-width: 40vw; overflow-wrap: break-word; font-weight: normal; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.zero { color: var(--faint); }
.matrix thead th { max-height: 10rem; padding: 0.6rem 0.3rem; writing-mode: vertical-rl; text-align: end;
  white-space: nowrap; }
.matrix td { padding: 0.3rem; }
td.text { min-width: 12rem; }
td.right { text-align: right; }
td.bar { min-width: 8rem; }
td.bar span { display: block; height: 1.1rem; background: var(--c0); }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
.pictures svg { width: 100%; height: auto; }
.drawings { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); gap: 0 1rem; }
.drawings section { min-width: 0; }
.drawings svg { width: 100%; height: auto; min-width: 32rem; }
.chart { margin: 0; }
.chart + .chart { margin-top: 1rem; }
.pictures .chart { margin: 0; }
.chart svg { max-width: 32rem; }
.chart svg.wide { max-width: none; }
.chart text { fill: currentColor; font: 12px system-ui, sans-serif; }
.chart .grid { stroke: var(--line); }
.chart .axis { stroke: currentColor; }
.chart path { fill: none; stroke-width: 1.5; }
.chart path.span { stroke: #000000; stroke-width: 0.3; }
.chart text.on { fill: #000000; font-size: 10px; }
.legend { list-style: none; margin: 0; padding: 0; font-size: 0.875rem; display: flex; flex-wrap: wrap; gap: 0 1rem; }
.key { display: inline-block; width: 1rem; border-top: 0.25rem solid; margin-right: 0.4rem; vertical-align: middle; }
.key.dashed { border-top-style: dashed; }
details { margin: 0.75rem 0; }
summary { cursor: pointer; }
code { overflow-wrap: anywhere; }
@media (max-width: 30rem) { th, td { padding: 0.25rem 0.4rem; } table { font-size: 0.8125rem; } }
""".strip()

LONG_TEXT = 40  # characters of a cell that is not narrowed to one word a line


class Cell(NamedTuple):
    """A cell of a table."""

    text: str  # what the cell shows
    # its exact number, which programs can read from the attribute `value` of the element `data`; None: a text
    value: float | None = None
    bar: float | None = None  # length of a bar that the cell shows instead of the text, from 0 to 1; None: no bar
    # opacity of the background, from 0 to 1. The number is faint if it is 0; None: the cells are not shaded.
    shade: float | None = None


Row = Sequence[str | Cell]  # of a table; a text is a cell without a number


def document(title: str, body: Iterable[str]) -> str:
    """Return a whole page. body: HTML elements below the heading with the title."""
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escaped_text(title)}</title>",
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{escaped_text(title)}</h1>",
        *body,
        "</body></html>",
    ]
    return "\n".join(lines) + "\n"


def section(title: str, *elements: str) -> str:
    """Return a section of HTML elements. Returns an empty string if all elements are empty."""
    present = [element for element in elements if element]
    return "\n".join([f"<section><h2>{escaped_text(title)}</h2>", *present, "</section>"]) if present else ""


def folded(title: str, element: str) -> str:
    """Return an HTML element that is hidden until the reader opens it."""
    return f"<details><summary>{escaped_text(title)}</summary>\n{element}\n</details>"


def paragraph(text: str) -> str:
    """Return a paragraph. Text between two backticks is code."""
    return f"<p>{marked(text)}</p>"


def table(rows: Sequence[Row], headings: Sequence[str] = (), *, is_matrix: bool = False) -> str:
    """Return a table that scrolls in its own box. The first cell of a row is the heading of the row.

    is_matrix: whether to turn the headings of the columns, so that many columns of small numbers fit.
    """
    cells = [(column, cell) for row in rows for column, cell in enumerate(row) if isinstance(cell, Cell)]
    numeric = {column for column, cell in cells if cell.value is not None}
    kinds = [' class="number"' if column in numeric else "" for column in range(len(headings))]
    head = "".join(
        f'<th scope="col"{kind}>{escaped_text(heading)}</th>' for kind, heading in zip(kinds, headings, strict=True)
    )
    start = '<table class="matrix">' if is_matrix else "<table>"
    lines = [f'<div class="scroll">{start}', f"<thead><tr>{head}</tr></thead>" if head else "", "<tbody>"]
    for first, *others in rows:
        name = first if isinstance(first, str) else first.text
        body = [_body_cell(cell, is_right=bool(headings) and place in numeric) for place, cell in enumerate(others, 1)]
        lines.append(f'<tr><th scope="row">{escaped_text(name)}</th>{"".join(body)}</tr>')
    return "\n".join([*filter(None, lines), "</tbody></table></div>"])


def _body_cell(cell: str | Cell, *, is_right: bool) -> str:
    """Return an element. is_right: whether a text is in a column with numbers, below a heading."""
    cell = cell if isinstance(cell, Cell) else Cell(cell)
    if cell.bar is not None:
        return f'<td class="bar"><span style="width:{100 * cell.bar:.1f}%"></span></td>'
    if cell.value is None:
        kind = "right" if is_right else "text" if len(cell.text) > LONG_TEXT else ""
        return f'<td class="{kind}">{escaped_text(cell.text)}</td>'
    shade = f' style="background:rgb(0 114 178 / {cell.shade:.2f})"' if cell.shade else ""
    kind = "number" if cell.shade != 0 else "number zero"
    return f'<td class="{kind}"{shade}><data value="{cell.value!r}">{escaped_text(cell.text)}</data></td>'


def number_cell(value: float | None, shade: float | None = None) -> Cell:
    """Return a cell with a number: whole ones with all digits, and others with at least four significant digits."""
    if value is None:
        return Cell("not finite")
    return Cell(format_number(value), value, shade=shade)


def format_number(value: float) -> str:
    """Format a number for a reader: `12,345`, `0.1235`, `1.235e-05`."""
    if isinstance(value, int) or (math.isfinite(value) and abs(value) >= 1000):
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.4g}"
    return f"{value:.4g}"


def escaped_text(text: str) -> str:
    """Return a text as HTML. Control characters are written as escape sequences."""
    return escape(printable(text))


def marked(text: str) -> str:
    """Return a text as HTML, with the parts between two backticks as code."""
    parts = escaped_text(text).split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))
