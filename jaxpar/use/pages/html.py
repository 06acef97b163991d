"""Elements of HTML pages: the document with its style for light and dark themes, tables, and numbers.

All functions escape the texts that they get; only their results, and the elements passed to `document`, `section` and
`folded`, are HTML.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import NamedTuple

from jaxpar.errors import printable

LONG_TEXT = 36  # characters of a cell that is not narrowed to one word a line, and may break words, such as a hash
DARKEST = 0.6  # opacity of a shaded cell on which text of both themes is legible
SI_PREFIXES = "kMGTPE"


class Cell(NamedTuple):
    """A cell of a table."""

    text: str  # what the cell shows
    value: float | None = None  # its exact number, which programs can read in the element `data`; None: a text
    bar: float | None = None  # length of a bar that the cell shows instead of the text, from 0 to 1; None: no bar
    shade: float | None = None  # opacity of the background, from 0 (also faint) to 1; None: the cells are not shaded
    is_hatched: bool = False  # whether the bar is hatched


Row = Sequence[str | Cell]  # of a table; a text is a cell without a number


def document(title: str, body: Iterable[str]) -> str:
    """Return a whole page. body: HTML elements below the heading with the title."""
    page = Template(files("jaxpar.use.pages").joinpath("page.html").read_text("utf-8"))
    return page.substitute(title=escaped_text(title), body="\n".join(body))


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


def pictures(charts: Sequence[str]) -> str:
    """Return charts side by side, or below each other on a narrow screen. Charts without points are left out."""
    return "\n".join(['<div class="pictures">', *filter(None, charts), "</div>"]) if any(charts) else ""


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
        kind = ' class="hatched"' if cell.is_hatched else ""
        return f'<td class="bar"><span{kind} style="width:{100 * cell.bar:.1f}%"></span></td>'
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
    """Format a number for a reader: `12,345`, `0.1235`, `1.235e-05`, `12.35 G`."""
    if math.isfinite(value) and abs(value) >= 1e9:
        return format_si(value)
    if isinstance(value, int) or (math.isfinite(value) and abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def format_si(value: float, digits: int = 4) -> str:
    """Format a number of at least 1000 with a prefix of the SI: `12.5 k`, `15 M`, `28.47 G`."""
    power = min(math.floor(math.log10(abs(value))) // 3, len(SI_PREFIXES))
    return f"{value / 1000**power:.{digits}g} {SI_PREFIXES[power - 1]}"


def escaped_text(text: str) -> str:
    """Return a text as HTML. Control characters are written as escape sequences."""
    return escape(printable(text))


def marked(text: str) -> str:
    """Return a text as HTML, with the parts between two backticks as code."""
    parts = escaped_text(text).split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))
