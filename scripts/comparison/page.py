"""The page of a comparison: a self-contained HTML file with the table and the pictures."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby

from jaxpar.pages.html import document, marked, paragraph, section
from scripts.comparison.table import Column


def html_page(title: str, columns: Sequence[Column], pictures: Mapping[str, str], notes: Sequence[str]) -> str:
    """Return the page.

    Args:
      title: its title.
      columns: the columns of the table. The first one is the heading of the rows. Columns without a value are left out.
      pictures: SVG elements by their titles.
      notes: lines: the first is below the title, and the others at the end. Text between two backticks is code.
    """
    columns = [column for column in columns if any(column.cells)]
    body = [
        *map(paragraph, notes[:1]),
        '<div class="scroll"><table>',
        *heads(columns),
        "<tbody>",
        *(f"<tr>{''.join(cells)}</tr>" for cells in zip(*map(body_cells, columns), strict=True)),
        "</tbody></table></div>",
        '<div class="drawings">',
        *(section(name, f'<div class="scroll">{picture}</div>') for name, picture in pictures.items()),
        "</div>",
        section("How to read the table", *map(paragraph, notes[1:])),
    ]
    return document(title, body)


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
