"""The page of a comparison: one HTML file with the table and the pictures, which needs no other file."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby

from scripts.comparison.table import Column

STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --back: #ffffff; --line: #d0d0d0; --head: #f2f4f7; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --back: #14171a; --line: #3a3f45; --head: #20252a; }
}
body { margin: 0 auto; padding: 1rem; max-width: 80rem; color: var(--text); background: var(--back);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.05rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.6rem; border: 1px solid var(--line); text-align: left; vertical-align: top; }
th { background: var(--head); }
tbody th { position: sticky; left: 0; }
td.number { text-align: right; white-space: nowrap; }
td.text { min-width: 12rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
.pictures svg { width: 100%; height: auto; }
code { overflow-wrap: anywhere; }
""".strip()


def html_page(title: str, columns: Sequence[Column], pictures: Mapping[str, str], notes: Sequence[str]) -> str:
    """Return the page.

    Args:
      title: its title.
      columns: the columns of the table. The first one is the heading of the rows.
      pictures: SVG elements by their titles.
      notes: lines below the title. Text between two backticks is code.
    """
    sections = [f"<section><h2>{escape(name)}</h2>{picture}</section>" for name, picture in pictures.items()]
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{marked(note)}</p>" for note in notes),
        '<div class="scroll"><table>',
        *heads(columns),
        "<tbody>",
        *(f"<tr>{''.join(cells)}</tr>" for cells in zip(*map(body_cells, columns), strict=True)),
        "</tbody></table></div>",
        '<div class="pictures">',
        *sections,
        "</div></body></html>",
    ]
    return "\n".join(lines) + "\n"


def heads(columns: Sequence[Column]) -> list[str]:
    """Return the head of the table: groups of columns above their headings, and the other headings over both rows."""
    above, below = [], []
    for group, of_group in groupby(columns, key=lambda column: column.group):
        headings = [escape(column.heading) for column in of_group]
        if group:
            above.append(f'<th scope="colgroup" colspan="{len(headings)}">{escape(group)}</th>')
            below += [f'<th scope="col">{heading}</th>' for heading in headings]
        else:
            above += [f'<th scope="col" rowspan="2">{heading}</th>' for heading in headings]
    return ["<thead>", f"<tr>{''.join(above)}</tr>", f"<tr>{''.join(below)}</tr>", "</thead>"]


def body_cells(column: Column) -> list[str]:
    """Return the cells of a column. Those of the strategies are the headings of the rows."""
    if column.name == "strategy":
        return [f'<th scope="row">{escape(cell)}</th>' for cell in column.cells]
    kind = "text" if column.values is column.cells else "number"
    return [f'<td class="{kind if cell else ""}">{marked(cell)}</td>' for cell in column.cells]


def marked(text: str) -> str:
    """Return a text as HTML, with the parts between two backticks as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))
