"""Reads text examples from tables (csv, tsv, jsonl, parquet), from plain text and from lines, one row at a time.

Every reader is a generator, so that a table does not have to fit in memory. Error messages contain the file and the
line.
"""

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxpar.data.files import DAMAGED, invalid_utf8, open_bytes
from jaxpar.errors import UserError, nearest
from jaxpar.files import parse_json

LARGEST_TARGET = float(np.finfo(np.float32).max)  # targets are trained in float32
Record = Mapping[str, Any]  # the values of a row by column
NO_RECORD: Record = MappingProxyType({})


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
    record: Record = NO_RECORD  # the values of all columns, if `Columns.keeps_record` is set

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
        line = 0
        try:
            for line, record in (READERS | INPUT_READERS)[source](path, columns):
                row = _row(path, line, record, columns)
                "".join(row.texts).encode()
                yield row
        except UnicodeEncodeError as error:
            raise UserError(f"{path}:{line}: the text contains an unpaired surrogate ({error.reason})") from None
        except UnicodeDecodeError:
            raise invalid_utf8(path) from None
        except DAMAGED as error:
            raise UserError(f"{path}: the compressed file is damaged ({error})") from None
        if not line:
            raise UserError(f"{path} contains no examples")


def format_places(rows: Sequence[TextRow], number: int) -> str:
    """Format the places of the first of `number` rows: `a.csv:5, 17, b.csv:3 and 8 more`."""
    names = [row.place if i == 0 or rows[i - 1].file != row.file else str(row.line) for i, row in enumerate(rows)]
    return ", ".join(names) + (f" and {number - len(rows):,} more" if number > len(rows) else "")


def _open_text(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="")


def _read_csv(path: Path, columns: Columns) -> Iterator[tuple[int, Record]]:
    """Read CSV as in RFC 4180: fields with commas, quotes or line ends are quoted, and quotes inside are doubled.

    Blank lines are skipped.
    """
    csv.field_size_limit(sys.maxsize)
    with _open_text(path) as file:
        reader = csv.reader(file, strict=True)
        header: list[str] = []
        kept: dict[str, int] = {}
        line = 1
        try:
            for fields in reader:
                if fields and header:
                    yield line, _record(path, line, header, fields, kept)
                elif fields:
                    header = fields
                    kept = _kept_columns(path, header, columns)
                line = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"{path}:{line}: a quote opens here and is not closed properly ({error})") from None


def _read_tsv(path: Path, columns: Columns) -> Iterator[tuple[int, Record]]:
    """Read TSV as in IANA text/tab-separated-values: fields contain no tabs or line ends, and quotes are literal."""
    with _open_text(path) as file:
        header = next(file, "").rstrip("\r\n").split("\t")
        kept = _kept_columns(path, header, columns)
        for line, text in enumerate(file, start=2):
            if text.strip("\r\n"):
                yield line, _record(path, line, header, text.rstrip("\r\n").split("\t"), kept)


def _kept_columns(path: Path, header: Sequence[str], columns: Columns) -> dict[str, int]:
    """Return the places of the columns of a record in the header."""
    _check_columns(path, header, columns)
    return {name: i for i, name in enumerate(header) if columns.keeps_record or name in columns.all}


def _record(path: Path, line: int, header: Sequence[str], fields: Sequence[str], kept: Mapping[str, int]) -> Record:
    if len(fields) != len(header):
        raise UserError(f"{path}:{line} has {len(fields)} columns; it must have {len(header)}, as the header has")
    return {name: fields[i] for name, i in kept.items()}


def _read_jsonl(path: Path, columns: Columns) -> Iterator[tuple[int, Record]]:
    """Read one JSON object per line. Other keys and blank lines are ignored."""
    with _open_text(path) as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                record = parse_json(text, nonfinite=True)  # for numbers that are missing; `_targets` checks the rest
            except ValueError as error:
                why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                raise UserError(f"{path}:{line}: invalid JSON: {why}") from None
            if not isinstance(record, dict):
                kind = type(record).__name__
                raise UserError(f"{path}:{line}: the line is JSON of type {kind}; it must be an object")
            _check_columns(path, list(record), columns, line)
            yield line, record


def _read_parquet(path: Path, columns: Columns) -> Iterator[tuple[int, Record]]:
    import pyarrow as pa  # imported lazily: it takes a third of a second
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow.names, columns)
            batches = file.iter_batches(columns=None if columns.keeps_record else list(columns.all))
            yield from enumerate((record for batch in batches for record in batch.to_pylist()), start=1)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from None


def _read_text(path: Path, columns: Columns) -> Iterator[tuple[int, Record]]:
    """Read the whole file as one document."""
    with _open_text(path) as file:
        text = file.read()
    if text.strip():
        yield 1, {columns.texts[0]: text}


def _read_lines(path: Path, columns: Columns) -> Iterator[tuple[int, Record]]:
    """Read one example per line. Two texts are separated by a tab, and words by spaces. Blank lines are skipped."""
    with _open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            text = line.rstrip("\r\n")
            values = [text.split()] if columns.has_tags else text.split("\t", len(columns.texts) - 1)
            if len(values) != len(columns.texts):
                raise UserError(f"{path}:{number} has {len(values)} text; it must have 2, separated by a tab")
            yield number, dict(zip(columns.texts, values, strict=True))


READERS: dict[str, Callable[[Path, Columns], Iterator[tuple[int, Record]]]] = {
    "csv": _read_csv,
    "tsv": _read_tsv,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "text": _read_text,
}
INPUT_READERS = {**{name: read for name, read in READERS.items() if name != "text"}, "lines": _read_lines}


def _check_columns(path: Path, names: Sequence[str], columns: Columns, line: int = 1) -> None:
    for name in columns.all:
        if name not in names:
            key = "label_column" if name == columns.label else "text_columns"
            key = "target_columns" if name in columns.targets else key
            there, hint = ", ".join(map(repr, names)), nearest(name, names)
            rule = f"set config.data.{key}{hint and '.' + hint}"
            if columns.keeps_record:
                rule = f"rename one to {name!r}, the name in the run's training data"
            raise UserError(f"{path}:{line} has no column {name!r}; its columns are {there}; {rule}")
    for name in names if columns.keeps_record else columns.all:
        if list(names).count(name) > 1:
            raise UserError(f"{path}:{line} has more than one column {name!r}; it must have one")


def _row(path: Path, line: int, record: Record, columns: Columns) -> TextRow:
    """Return the row. Texts must be strings, labels strings, numbers or booleans, and targets numbers."""
    place, kept = f"{path}:{line}", record if columns.keeps_record else NO_RECORD
    if columns.has_tags:
        words, tags = _tagged_words(place, record, columns)
        return TextRow(words, "", path, line, (), tags, kept)
    texts = tuple(record[name] for name in columns.texts)
    for name, text in zip(columns.texts, texts, strict=True):
        if not isinstance(text, str):
            raise UserError(f"{place}: column {name!r} is {text!r:.40}; it must be a string")
    targets = _targets(place, record, columns.targets) if columns.targets else ()
    label = "" if columns.targets or columns.label is None else _label(place, record, columns.label)
    return TextRow(texts, label, path, line, targets, (), kept)


def _label(place: str, record: Record, name: str) -> str:
    """Return the label as text: numbers and booleans as in JSON, an empty string for null and NaN."""
    value = record.get(name)  # files of plain text have none
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if not isinstance(value, str | int | float):
        raise UserError(f"{place}: column {name!r} is {value!r:.40}; it must be a string, a number or a boolean")
    return value if isinstance(value, str) else json.dumps(value)


def _targets(place: str, record: Record, names: Sequence[str]) -> tuple[float, ...]:
    """Return the targets as numbers; () if one of them is missing."""
    values = [record.get(name) for name in names]
    if any(value is None or (isinstance(value, str) and not value.strip()) for value in values):
        return ()
    numbers = tuple(map(_number, values))
    for name, value, number in zip(names, values, numbers, strict=True):
        if not math.isfinite(number):
            raise UserError(f"{place}: column {name!r} is {value!r:.40}; it must be a finite number")
        if abs(number) > LARGEST_TARGET:
            limits = f"in the range of float32, from -{LARGEST_TARGET:.7g} to {LARGEST_TARGET:.7g}"
            raise UserError(f"{place}: column {name!r} is {value!r:.40}; it must be {limits}")
    return numbers


def _number(value: Any) -> float:
    """Return the value as a float; NaN if it is not a number, or an integer too large for float64."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):  # float() would accept "1_000"
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _tagged_words(place: str, record: Record, columns: Columns) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words and their tags, one per word: O, B-TYPE or I-TYPE; no tags if the row has none."""
    words = record[columns.texts[0]]
    tags: Any = record.get(columns.label) if columns.label else None
    is_tagged = tags is not None and tags != []
    for name, value in zip(columns.all, (words, tags) if is_tagged else (words,), strict=False):
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise UserError(f"{place}: column {name!r} must be a non-empty list of non-empty strings")
    if not is_tagged:
        return tuple(words), ()
    if len(words) != len(tags):
        raise UserError(f"{place} has {len(words)} words, but {len(tags)} tags; every word must have one tag")
    for tag in tags:
        if tag != "O" and (tag[:2] not in ("B-", "I-") or len(tag) == 2):
            raise UserError(f"{place}: a tag is {tag!r}; it must be O, B-TYPE or I-TYPE")
    return tuple(words), tuple(tags)
