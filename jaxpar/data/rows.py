"""Reads text examples from tables (csv, tsv, jsonl, parquet), from plain text and from lines, one row at a time.

Every reader is a generator of `TextRow`, so that a table does not have to fit in memory. Error messages contain the
file and the line.
"""

import csv
import io
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxpar.data.files import DAMAGED, invalid_utf8, open_bytes
from jaxpar.errors import UserError, nearest
from jaxpar.files import parse_json

LARGEST_TARGET = float(np.finfo(np.float32).max)  # targets are trained in float32


class Columns(NamedTuple):
    """The names of the columns to read."""

    texts: tuple[str, ...]  # one or two text columns
    label: str | None  # the column of the class or of the tags, or None if there is no label
    targets: tuple[str, ...] = ()  # the columns of the regression targets
    has_tags: bool = False  # whether the text is a list of words and the label a list of tags, one per word
    keeps_record: bool = False  # whether rows keep the values of all columns of the file

    @property
    def all(self) -> tuple[str, ...]:
        """The text columns, then the label column, then the target columns."""
        return (*self.texts, *([] if self.label is None else [self.label]), *self.targets)


class TextRow(NamedTuple):
    """One text example."""

    texts: tuple[str, ...]  # one or two texts; with tags, the words
    label: str  # the class; '' if the row has none, or blank
    file: Path  # the file that contains the example
    line: int  # the line in the file, from 1 (for parquet, the row)
    targets: tuple[float, ...] = ()  # the regression targets; () if one of them is missing
    tags: tuple[str, ...] = ()  # the tags of the words, in IOB2 format; () if there are none
    # the values of all columns by name, if `Columns.keeps_record` is set
    record: Mapping[str, Any] = MappingProxyType({})

    @property
    def place(self) -> str:
        """The location as file:line, for error messages."""
        return f"{self.file}:{self.line}"

    def is_labelled(self, columns: Columns) -> bool:
        """Return whether the row has a value in the label column and in the target columns, if there are any."""
        if columns.targets or columns.has_tags:
            return bool(self.targets or self.tags)
        return columns.label is None or bool(self.label.strip())


def read_files(source: str, files: Sequence[Path], columns: Columns) -> Iterator[TextRow]:
    """Yield the rows of all files. `source` is a key of READERS or of INPUT_READERS.

    Raises UserError with the file and line if a row is invalid.
    """
    for path in files:
        row = None
        try:
            for row in (READERS | INPUT_READERS)[source](path, columns):
                yield _valid(row)
        except UnicodeDecodeError:
            raise invalid_utf8(path) from None
        except DAMAGED as error:
            raise UserError(f"{path}: the compressed file is damaged ({error})") from None
        if row is None:
            raise UserError(f"{path} contains no examples")


def _valid(row: TextRow) -> TextRow:
    for text in row.texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{row.place}: the text contains an unpaired surrogate ({error.reason})") from None
    return row


def _read_csv(path: Path, columns: Columns) -> Iterator[TextRow]:
    """Read CSV as in RFC 4180: fields with commas, quotes or line ends are quoted, and quotes inside are doubled.

    Blank lines are skipped.
    """
    csv.field_size_limit(sys.maxsize)
    with _open_text(path) as file:
        reader = csv.reader(file, strict=True)
        header: list[str] = []
        places: list[int] = []
        line = 1
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise UserError(f"{path}:{line}: a quote opens here and is not closed properly ({error})") from None
            if fields and not header:
                header, places = fields, _places(path, fields, columns)
            elif fields:
                yield _row(path, line, fields, places, header, columns)
            line = reader.line_num + 1


def _read_tsv(path: Path, columns: Columns) -> Iterator[TextRow]:
    """Read TSV as in IANA text/tab-separated-values: fields contain no tabs or line ends, and quotes are literal."""
    with _open_text(path) as file:
        header = next(file, "").rstrip("\r\n").split("\t")
        places = _places(path, header, columns)
        for number, text in enumerate(file, start=2):
            if text.strip("\r\n"):
                yield _row(path, number, text.rstrip("\r\n").split("\t"), places, header, columns)


def _read_jsonl(path: Path, columns: Columns) -> Iterator[TextRow]:
    """Read one JSON object per line. Other keys and blank lines are ignored."""
    with _open_text(path) as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                record = parse_json(text, nonfinite=True)  # for numbers that are missing; `_targets` checks the rest
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: invalid JSON: {error.msg} at column {error.colno}") from None
            except ValueError as error:
                raise UserError(f"{path}:{number}: invalid JSON: {error}") from None
            if not isinstance(record, dict):
                raise UserError(
                    f"{path}:{number}: the line is JSON of type {type(record).__name__}; it must be an object"
                )
            places = _places(path, list(record), columns, number)
            row = _typed_row(path, number, [list(record.values())[place] for place in places], columns)
            yield row._replace(record=record) if columns.keeps_record else row


def _read_parquet(path: Path, columns: Columns) -> Iterator[TextRow]:
    import pyarrow as pa  # imported lazily: it takes a third of a second
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _places(path, file.schema_arrow.names, columns)
            number = 0
            for batch in file.iter_batches(columns=None if columns.keeps_record else list(columns.all)):
                records = batch.to_pylist() if columns.keeps_record else itertools.repeat({}, batch.num_rows)
                values_of_rows = zip(*(batch.column(name).to_pylist() for name in columns.all), strict=True)
                for record, values in zip(records, values_of_rows, strict=True):
                    number += 1
                    yield _typed_row(path, number, values, columns)._replace(record=record)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from None


def _read_text(path: Path, _columns: Columns) -> Iterator[TextRow]:
    """Read the whole file as one document."""
    with _open_text(path) as file:
        text = file.read()
    if text.strip():
        yield TextRow((text,), "", path, 1)


def _read_lines(path: Path, columns: Columns) -> Iterator[TextRow]:
    """Read one example per line. Two texts are separated by a tab, and words by spaces. Blank lines are skipped."""
    with _open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            text = line.rstrip("\r\n")
            texts = text.split() if columns.has_tags else text.split("\t", len(columns.texts) - 1)
            if not columns.has_tags and len(texts) != len(columns.texts):
                raise UserError(f"{path}:{number} has {len(texts)} text; it must have 2, separated by a tab")
            values = [texts] if columns.has_tags else texts
            record = dict(zip(columns.texts, values, strict=True)) if columns.keeps_record else {}
            yield TextRow(tuple(texts), "", path, number, record=record)


def format_places(rows: Sequence[TextRow], number: int) -> str:
    """Format the places of the first of `number` rows: `a.csv:5, 17, b.csv:3 and 8 more`."""
    names = [row.place if i == 0 or rows[i - 1].file != row.file else str(row.line) for i, row in enumerate(rows)]
    return ", ".join(names) + (f" and {number - len(rows):,} more" if number > len(rows) else "")


READERS: dict[str, Callable[[Path, Columns], Iterator[TextRow]]] = {
    "csv": _read_csv,
    "tsv": _read_tsv,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "text": _read_text,
}
INPUT_READERS = {**{name: read for name, read in READERS.items() if name != "text"}, "lines": _read_lines}


def _open_text(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="")


def _places(path: Path, names: Sequence[str], columns: Columns, line: int = 1) -> list[int]:
    """Return the indices of the columns in `names`."""
    for name in columns.all:
        if name not in names:
            key = "label_column" if name == columns.label else "text_columns"
            key = "target_columns" if name in columns.targets else key
            there = ", ".join(map(repr, names))
            hint = nearest(name, names)
            rule = "it must have those of the run" if columns.keeps_record else f"set config.data.{key}"
            raise UserError(
                f"{path}:{line} has no column {name!r}; its columns are {there}; {rule}{hint and '.' + hint}"
            )
        if list(names).count(name) > 1:
            raise UserError(f"{path}:{line} has more than one column {name!r}; it must have one")
    if columns.keeps_record and len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise UserError(f"{path}:{line} has more than one column {twice!r}; it must have one")
    return [list(names).index(name) for name in columns.all]


def _row(
    path: Path, line: int, fields: Sequence[str], places: Iterable[int], header: Sequence[str], columns: Columns
) -> TextRow:
    if len(fields) != len(header):
        raise UserError(f"{path}:{line} has {len(fields)} columns; it must have {len(header)}, as the header has")
    values = [fields[place] for place in places]
    texts = tuple(values[: len(columns.texts)])
    record = dict(zip(header, fields, strict=True)) if columns.keeps_record else {}
    if columns.targets:
        return TextRow(texts, "", path, line, _targets(path, line, values, columns), record=record)
    return TextRow(texts, "".join(values[len(texts) :]), path, line, record=record)


def _targets(path: Path, line: int, values: Sequence[Any], columns: Columns) -> tuple[float, ...]:
    """Return the last values of a row, the targets, as numbers; () if one of them is missing."""
    numbers = []
    targets = values[-len(columns.targets) :]
    if any(value is None or (isinstance(value, str) and not value.strip()) for value in targets):
        return ()
    for name, value in zip(columns.targets, targets, strict=True):
        number = _target(value)
        if not math.isfinite(number):
            raise UserError(f"{path}:{line}: column {name!r} is {value!r:.40}; it must be a finite number")
        if abs(number) > LARGEST_TARGET:
            limits = f"in the range of float32, from -{LARGEST_TARGET:.7g} to {LARGEST_TARGET:.7g}"
            raise UserError(f"{path}:{line}: column {name!r} is {value!r:.40}; it must be {limits}")
        numbers.append(number)
    return tuple(numbers)


def _target(value: Any) -> float:
    """Return the value as a float; NaN if it is not a number, or an integer too large for float64."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):  # float() would accept "1_000"
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _typed_row(path: Path, line: int, values: Sequence[Any], columns: Columns) -> TextRow:
    """Return a row of typed values. Texts must be strings, labels strings, numbers or booleans, and targets numbers."""
    if columns.has_tags:
        return _tagged_row(path, line, values[0], values[1] if columns.label else None, columns)
    texts = tuple(values[: len(columns.texts)])
    for name, text in zip(columns.texts, texts, strict=True):
        if not isinstance(text, str):
            raise UserError(f"{path}:{line}: column {name!r} is {text!r:.40}; it must be a string")
    if columns.targets:
        return TextRow(texts, "", path, line, _targets(path, line, values, columns))
    if columns.label is None:
        return TextRow(texts, "", path, line)
    label = values[-1]
    if not (label is None or isinstance(label, str | int | float)):
        kinds = "a string, a number or a boolean"
        raise UserError(f"{path}:{line}: column {columns.label!r} is {label!r:.40}; it must be {kinds}")
    return TextRow(texts, _label(label), path, line)


def _label(value: str | int | float | None) -> str:
    """Return a label as text: numbers and booleans as in JSON, an empty string for null and NaN."""
    if isinstance(value, str):
        return value
    is_missing = value is None or (isinstance(value, float) and math.isnan(value))
    return "" if is_missing else json.dumps(value)


def _tagged_row(path: Path, line: int, words: Any, tags: Any, columns: Columns) -> TextRow:
    """Return a row of words and their tags, one per word: O, B-TYPE or I-TYPE."""
    is_tagged = tags is not None and tags != []
    for name, value in zip(columns.all, (words, tags) if is_tagged else (words,), strict=False):
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise UserError(f"{path}:{line}: column {name!r} must be a non-empty list of non-empty strings")
    if not is_tagged:
        return TextRow(tuple(words), "", path, line)
    if len(words) != len(tags):
        raise UserError(f"{path}:{line} has {len(words)} words, but {len(tags)} tags; every word must have one tag")
    for tag in tags:
        if tag != "O" and (tag[:2] not in ("B-", "I-") or len(tag) == 2):
            raise UserError(f"{path}:{line}: a tag is {tag!r}; it must be O, B-TYPE or I-TYPE")
    return TextRow(tuple(words), "", path, line, tags=tuple(tags))
