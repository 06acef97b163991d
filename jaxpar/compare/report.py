"""The table of a comparison as Markdown and as CSV."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from jaxpar.errors import format_bytes

REFERENCE = "single"  # the strategy to which the others are compared
EMULATED = "emulated"  # marks times of an emulation
BAR = r"\|"  # a vertical line in a cell of Markdown
Value = TypeVar("Value")


@dataclass(frozen=True)
class StrategyOutcome:
    """The results of a strategy."""

    # the reason why there are no results; empty if there are. Without results, the other attributes keep their
    # defaults.
    failed: str = ""
    # measured time of a step, the median over the log intervals, without compilation; None if no interval was measured
    step_seconds: float | None = None
    # whether the strategy ran in virtual time, so that its time here is that of the emulation
    is_emulated: bool = False
    wire_bytes: int | None = None  # bytes that a device sends in a step, according to the plan
    device_bytes: tuple[int, ...] = ()  # bytes of the state that each device holds, according to the plan
    # bytes that a step needs on the fullest device in addition, such as gradients and activations: of a pipeline from
    # the plan, otherwise an estimate
    in_flight_bytes: int | None = None
    memory: Mapping[str, float] = field(default_factory=dict)  # both by purpose, of the fullest device
    metric: float | None = None  # the metric of the task on the held-out split
    # mean and maximum number of updates that are missing in the weights from which gradients are computed
    staleness: tuple[float, int] | None = None
    guarantee: str = ""  # how the results relate to those of one device, according to the plan
    certificate: str = ""  # verdict of the certificate of this run; empty if there is none
    curve: tuple[tuple[int, float], ...] = ()  # (step, metric on the validation split) of each evaluation
    seconds: Mapping[str, float] = field(default_factory=dict)  # of the last start, by phase


@dataclass(frozen=True)
class TableColumn:
    """A column of the table."""

    heading: str  # heading of the column
    name: str  # name of the column in the CSV file
    values: Sequence[object]  # a value for each row, or None
    cells: Sequence[str]  # the formatted values


def comparison_columns(
    outcomes: Mapping[str, StrategyOutcome], *, batch_size: int, metric: str, metric_format: str
) -> list[TableColumn]:
    """Return the columns of the table of outcomes by strategy."""
    rows, two_digits = list(outcomes.values()), "{:.2f}".format
    measured = {name: row.step_seconds for name, row in outcomes.items()}
    emulated = frozenset(name for name, row in outcomes.items() if row.is_emulated)
    return [
        _text("strategy", "strategy", list(outcomes)),
        _numbers(metric.replace("_", " "), metric, [row.metric for row in rows], lambda x: format(x, metric_format)),
        *time_columns(measured, "measured", batch_size=batch_size, emulated=emulated),
        _numbers("sent by a device", "sent_bytes", [row.wire_bytes for row in rows], format_bytes),
        TableColumn(
            "state of a device",
            "state_bytes",
            [max(row.device_bytes, default=None) for row in rows],
            [format_range(row.device_bytes) for row in rows],
        ),
        _numbers("in flight, about", "in_flight_bytes", [row.in_flight_bytes for row in rows], format_bytes),
        _numbers("mean staleness", "staleness_mean", [row.staleness and row.staleness[0] for row in rows], two_digits),
        _numbers("maximum staleness", "staleness_max", [row.staleness and row.staleness[1] for row in rows], str),
        _text("by its plan", "guarantee", [row.guarantee for row in rows]),
        _text(
            "measured by a certificate",
            "certificate",
            [f"failed: {row.failed}" if row.failed else row.certificate or "not certified" for row in rows],
        ),
    ]  # fmt: skip


def fullest_bytes(outcome: StrategyOutcome) -> int:
    """Return the bytes that the fullest device needs in a step."""
    return max(outcome.device_bytes) + (outcome.in_flight_bytes or 0)


def equal_outcomes(outcomes: Mapping[str, StrategyOutcome]) -> dict[str, StrategyOutcome]:
    """Return the outcomes of the strategies that equal REFERENCE."""
    return {name: row for name, row in outcomes.items() if row.guarantee == f"equal to {REFERENCE}"}


def best_of(outcomes: Mapping[str, StrategyOutcome]) -> tuple[str, str] | None:
    """Return which strategies that equal REFERENCE are the fastest and the smallest; None if no time was measured."""
    equal = equal_outcomes(outcomes)
    seconds = {name: row.step_seconds for name, row in equal.items() if row.step_seconds and not row.is_emulated}
    nbytes = {name: fullest_bytes(row) for name, row in equal.items() if row.device_bytes}
    if not seconds or not nbytes:
        return None
    return min(seconds, key=seconds.__getitem__), min(nbytes, key=nbytes.__getitem__)


def describe_best(outcomes: Mapping[str, StrategyOutcome]) -> str:
    """Return a sentence with the results of `best_of`; empty if there are none."""
    best = best_of(outcomes)
    if best is None:
        return ""
    fastest, smallest = best
    seconds, memory = outcomes[fastest].step_seconds, format_bytes(fullest_bytes(outcomes[smallest]))
    assert seconds is not None
    time = format_step_seconds(seconds)
    return (
        f"Of the strategies that equal {REFERENCE}, `{fastest}` is the fastest, {time} for a step, and "
        f"`{smallest}` needs least memory, about {memory}."
    )


def time_columns(
    seconds: Mapping[str, float | None], origin: str, *, batch_size: int, emulated: frozenset[str] = frozenset()
) -> list[TableColumn]:
    """Return the time of a step, the examples per second, and the speed relative to REFERENCE.

    origin: the first word of the headings, `measured` or `predicted`.
    emulated: strategies whose times are marked, and not compared with those of others.
    """
    base = seconds.get(REFERENCE)
    rates = [time and batch_size / time for time in seconds.values()]
    ratios = [base / time if base and time and name not in emulated else None for name, time in seconds.items()]
    step = _numbers(f"{origin} time of a step", f"{origin}_step_seconds", list(seconds.values()), format_step_seconds)
    cells = [
        f"{cell} ({EMULATED})" if name in emulated else cell for name, cell in zip(seconds, step.cells, strict=True)
    ]
    return [
        replace(step, cells=cells),
        _numbers(f"{origin} examples/s", f"{origin}_examples_per_second", rates, "{:,.0f}".format),
        _numbers(f"{origin} relative to {REFERENCE}", f"{origin}_relative", ratios, "{:.2f}".format),
    ]


def _text(heading: str, name: str, values: Sequence[str]) -> TableColumn:
    return TableColumn(heading, name, values, values)


def _numbers(heading: str, name: str, values: Sequence[Value | None], formatted: Callable[[Value], str]) -> TableColumn:
    """Return a column of numbers, in which a row without a value has an empty cell."""
    return TableColumn(heading, name, values, ["" if value is None else formatted(value) for value in values])


def markdown(columns: Sequence[TableColumn]) -> list[str]:
    """Return the lines of the table in Markdown."""
    return markdown_table(
        [column.heading for column in columns], zip(*(column.cells for column in columns), strict=True)
    )


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown. A vertical line in a cell does not end it."""
    lines = (headings, ["---"] * len(headings), *rows)
    return [f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |" for cells in lines]


def csv_text(columns: Sequence[TableColumn]) -> str:
    """Return the values as CSV: seconds, bytes and fractions, without rounding."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.name for column in columns])
    writer.writerows(zip(*(column.values for column in columns), strict=True))
    return text.getvalue()


def format_step_seconds(seconds: float) -> str:
    """Format the time of a step: `12.3 ms`, `1.23 s`."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def format_range(nbytes: Sequence[int]) -> str:
    """Format the bytes of several devices: `1.2 MB`, or `1.2 to 3.4 MB` if they differ."""
    if not nbytes:
        return ""
    least, most = format_bytes(min(nbytes)), format_bytes(max(nbytes))
    if least == most:
        return most
    return f"{least.removesuffix(most[most.index(' ') :])} to {most}"
