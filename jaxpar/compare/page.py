"""The page of a comparison of strategies: the table, bars, curves, where the time went, and what to try."""

from collections import Counter
from collections.abc import Mapping, Sequence

from jaxpar.compare.pictures import CurvePanel, PolicyCurve
from jaxpar.compare.report import EMULATED, REFERENCE, StrategyOutcome, TableColumn, format_range, fullest_bytes
from jaxpar.errors import format_bytes
from jaxpar.use.pages.charts import Series, line_chart
from jaxpar.use.pages.html import DARKEST, Cell, Row, document, number_cell, paragraph, pictures, section, table

SHOWN_BELOW = ("measured_examples_per_second", "state_bytes", "in_flight_bytes")  # columns that other sections show


def html_page(
    title: str,
    columns: Sequence[TableColumn],
    outcomes: Mapping[str, StrategyOutcome],
    panels: Sequence[CurvePanel],
    *,
    batch_size: int,
    advice: Sequence[str],
    notes: Sequence[str],
) -> str:
    """Return the page. panels: of `curve_panels`.

    The first note is below the title, the last one is of the environment, and the others are of the table.
    """

    def series(curve: PolicyCurve) -> Series:
        points = list(zip(curve.x, curve.values, strict=True))
        return Series(curve.name, points, is_marked=True, is_reference=curve.name == REFERENCE)

    charts = [line_chart(panel.title, list(map(series, panel.curves)), panel.xlabel) for panel in panels]
    return document(
        title,
        [
            *map(paragraph, notes[:1]),
            _table([column for column in columns if any(column.cells) and column.name not in SHOWN_BELOW]),
            section("Examples per second", _rates(outcomes, batch_size)),
            section("Curves", pictures(charts)),
            section("Where the time went", *_seconds(outcomes)),
            section("What to try", *map(paragraph, advice)),
            section("Memory of the fullest device", _memory(outcomes)),
            section("How to read the table", *map(paragraph, notes[1:-1])),
            section("Environment", *map(paragraph, notes[-1:])),
        ],
    )


def _table(columns: Sequence[TableColumn]) -> str:
    cells = [
        [
            Cell(cell, value) if isinstance(value, int | float) else cell
            for cell, value in zip(column.cells, column.values, strict=True)
        ]
        for column in columns
    ]
    return table(list(zip(*cells, strict=True)), [column.heading for column in columns])


def _rates(outcomes: Mapping[str, StrategyOutcome], batch_size: int) -> str:
    """Return the examples per second, with bars."""
    rates = {name: batch_size / row.step_seconds for name, row in outcomes.items() if row.step_seconds}
    rows: list[Row] = []
    for name, rate in rates.items():
        is_emulated = outcomes[name].is_emulated
        note = f" ({EMULATED})" if is_emulated else ""
        bar = Cell("", bar=rate / max(rates.values()), is_hatched=is_emulated)
        rows.append([name, Cell(f"{rate:,.0f}{note}", rate), bar])
    return table(rows, ["strategy", "examples/s", ""]) if rows else ""


def _memory(outcomes: Mapping[str, StrategyOutcome]) -> str:
    """Return the bytes of the state and those in flight, with bars of their sums on the fullest device."""
    total = {name: fullest_bytes(row) for name, row in outcomes.items() if row.device_bytes}
    rows: list[Row] = []
    for name, nbytes in total.items():
        state = outcomes[name].device_bytes
        others = [Cell(format_bytes(number), number) for number in (nbytes - max(state), nbytes)]
        bar = Cell("", bar=nbytes / max(total.values()))
        rows.append([name, Cell(format_range(state), max(state)), *others, bar])
    return table(rows, ["strategy", "state of a device", "in flight, about", "together", ""]) if rows else ""


def _seconds(outcomes: Mapping[str, StrategyOutcome]) -> list[str]:
    """Return the seconds of the phases of each run, the longest phase first."""
    spent = {name: row.seconds for name, row in outcomes.items() if row.seconds}
    phases: Counter[str] = Counter()
    for seconds in spent.values():
        phases.update(seconds)
    rows: list[Row] = []
    for name, seconds in spent.items():
        total = sum(seconds.values())
        shaded = [
            number_cell(seconds.get(phase, 0), DARKEST * seconds.get(phase, 0) / total)
            for phase, _ in phases.most_common()
        ]
        rows.append([name, *shaded, number_cell(round(total, 2))])
    headings = ["strategy", *(phase for phase, _ in phases.most_common()), "total"]
    return [paragraph("Seconds of the last start of each run."), table(rows, headings)] if rows else []
