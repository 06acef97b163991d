"""Reads text examples from tables (csv, tsv, jsonl, parquet) and from plain text, one row at a time.

Every reader is a generator of `TextRow`, so that a file need not fit in memory, and names the file
and line of whatever is wrong in it.
"""

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpar.data.files import DAMAGED, invalid_utf8, open_bytes
from jaxpar.errors import UserError, nearest

LARGEST_TARGET = float(np.finfo(np.float32).max)  # targets are trained in float32


class Columns(NamedTuple):
    """The columns to read.

    Attributes:
      texts: one or two of text.
      label: of the class, or of the tags; None: there is none.
      targets: of numbers.
      has_tags: the text is a list of words, the label a list of as many tags.
    """

    texts: tuple[str, ...]
    label: str | None
    targets: tuple[str, ...] = ()
    has_tags: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        """The texts' columns, then the label's, then the targets'."""
        return (*self.texts, *([] if self.label is None else [self.label]), *self.targets)


class TextRow(NamedTuple):
    """One example.

    Attributes:
      texts: one or two; of tagged words, each of them.
      label: the class, or ''.
      file: that it is in.
      line: from 1 (parquet: the row).
      targets: numbers.
      tags: of the words, in IOB2.
    """

    texts: tuple[str, ...]
    label: str
    file: Path
    line: int
    targets: tuple[float, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """file:line, for messages."""
        return f"{self.file}:{self.line}"


def read_files(source: str, files: Sequence[Path], columns: Columns) -> Iterator[TextRow]:
    """The rows of all files. `source`: a key of READERS. Raises UserError naming file and line."""
    for path in files:
        row = None
        try:
            for row in READERS[source](path, columns):
                yield _valid(row, columns)
        except UnicodeDecodeError:
            raise invalid_utf8(path) from None
        except DAMAGED as error:
            raise UserError(f"{path}: the compressed file is damaged ({error}).") from None
        if row is None:
            raise UserError(f"{path} has no examples.")


def _valid(row: TextRow, columns: Columns) -> TextRow:
    if columns.label is not None and not columns.has_tags and not row.label.strip():
        raise UserError(f"{row.place}: the label (column {columns.label!r}) is empty.")
    for text in row.texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{row.place}: the text holds half a character ({error.reason}).") from None
    return row


def _read_csv(path: Path, columns: Columns) -> Iterator[TextRow]:
    """RFC 4180: fields with commas, quotes or line ends are quoted, a quote is doubled. Blank lines are skipped."""
    csv.field_size_limit(sys.maxsize)
    with _open_text(path) as file:
        reader = csv.reader(file, strict=True)
        places, width, line = None, 0, 1
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise UserError(f"{path}:{line}: {error}: a quote opens here and does not close properly.") from None
            if fields and places is None:
                places, width = _places(path, fields, columns), len(fields)
            elif fields and places is not None:
                yield _row(path, line, fields, places, width, columns)
            line = reader.line_num + 1


def _read_tsv(path: Path, columns: Columns) -> Iterator[TextRow]:
    """IANA text/tab-separated-values: a field holds no tab and no line end; a quote is a quote."""
    with _open_text(path) as file:
        header = next(file, "").rstrip("\r\n").split("\t")
        places = _places(path, header, columns)
        for number, text in enumerate(file, start=2):
            if text.strip("\r\n"):
                yield _row(path, number, text.rstrip("\r\n").split("\t"), places, len(header), columns)


def _read_jsonl(path: Path, columns: Columns) -> Iterator[TextRow]:
    """One JSON object a line; keys that are not asked for are ignored; blank lines are skipped."""
    with _open_text(path) as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}.") from None
            except ValueError:  # Python reads no longer ones, for the time that they take
                digits = sys.get_int_max_str_digits()
                raise UserError(f"{path}:{number}: a number must have at most {digits} digits.") from None
            if not isinstance(record, dict):
                raise UserError(f"{path}:{number}: a line must be a JSON object, not {type(record).__name__}.")
            places = _places(path, list(record), columns, number)
            yield _typed_row(path, number, [list(record.values())[place] for place in places], columns)


def _read_parquet(path: Path, columns: Columns) -> Iterator[TextRow]:
    import pyarrow as pa  # here: it takes a third of a second to import
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _places(path, file.schema_arrow.names, columns)
            number = 0
            for batch in file.iter_batches(columns=list(columns.all)):
                for values in zip(*(batch.column(name).to_pylist() for name in columns.all), strict=True):
                    number += 1
                    yield _typed_row(path, number, values, columns)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from None


def _read_text(path: Path, _columns: Columns) -> Iterator[TextRow]:
    """The whole file is one document."""
    with _open_text(path) as file:
        text = file.read()
    if text.strip():
        yield TextRow((text,), "", path, 1)


READERS: dict[str, Callable[[Path, Columns], Iterator[TextRow]]] = {
    "csv": _read_csv,
    "tsv": _read_tsv,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "text": _read_text,
}


def _open_text(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="")


def _places(path: Path, names: Sequence[str], columns: Columns, line: int = 1) -> list[int]:
    """Return the places of the columns among `names`."""
    for name in columns.all:
        if name not in names:
            key = "label_column" if name == columns.label else "text_columns"
            key = "target_columns" if name in columns.targets else key
            there = ", ".join(map(repr, names))
            missing = f"{path}:{line} has no column {name!r}; it has {there}.{nearest(name, names)}"
            raise UserError(f"{missing} Set config.data.{key}.")
        if list(names).count(name) > 1:
            raise UserError(f"{path}:{line} has more than one column {name!r}.")
    return [list(names).index(name) for name in columns.all]


def _row(path: Path, line: int, fields: Sequence[str], places: Iterable[int], width: int, columns: Columns) -> TextRow:
    if len(fields) != width:
        raise UserError(f"{path}:{line}: {len(fields)} columns, where the header has {width}.")
    values = [fields[place] for place in places]
    texts = tuple(values[: len(columns.texts)])
    if columns.targets:
        return TextRow(texts, "", path, line, _targets(path, line, values, columns))
    return TextRow(texts, "".join(values[len(texts) :]), path, line)


def _targets(path: Path, line: int, values: Sequence[Any], columns: Columns) -> tuple[float, ...]:
    """The last values of a row, as numbers."""
    numbers = []
    for name, value in zip(columns.targets, values[-len(columns.targets) :], strict=True):
        number = _target(value)
        if not math.isfinite(number):
            raise UserError(f"{path}:{line}: column {name!r} must be a finite number, not {value!r:.40}.")
        if abs(number) > LARGEST_TARGET:
            limits = f"a number from -{LARGEST_TARGET:.7g} to {LARGEST_TARGET:.7g}, as float32 is"
            raise UserError(f"{path}:{line}: column {name!r} must be {limits}, not {value!r:.40}.")
        numbers.append(number)
    return tuple(numbers)


def _target(value: Any) -> float:
    """Return the value as a number; NaN where it is none, or a whole number beyond float64."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):  # 1_000 is a number in Python alone
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _typed_row(path: Path, line: int, values: Sequence[Any], columns: Columns) -> TextRow:
    """A row of values that carry their type: texts are strings, labels strings or whole numbers, targets numbers."""
    if columns.has_tags:
        return _tagged_row(path, line, values[0], values[1], columns)
    num_words = len(columns.all) - len(columns.targets)
    for name, value in zip(columns.all[:num_words], values[:num_words], strict=True):
        is_label = name == columns.label
        fits = isinstance(value, str) or (is_label and isinstance(value, int) and not isinstance(value, bool))
        if is_label and value is None:
            raise UserError(f"{path}:{line}: the label (column {name!r}) is empty.")
        if not fits:
            kinds = "a string or a whole number" if is_label else "a string"
            raise UserError(f"{path}:{line}: column {name!r} must be {kinds}, not {value!r}.")
    texts = tuple(values[: len(columns.texts)])
    if columns.targets:
        return TextRow(texts, "", path, line, _targets(path, line, values, columns))
    return TextRow(texts, "".join(map(str, values[len(texts) :])), path, line)


def _tagged_row(path: Path, line: int, words: Any, tags: Any, columns: Columns) -> TextRow:
    """A row of words and as many tags: O, B-TYPE or I-TYPE."""
    for name, value in zip(columns.all, (words, tags), strict=True):
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise UserError(f"{path}:{line}: column {name!r} must be a list of strings that are not empty.")
    if len(words) != len(tags):
        raise UserError(f"{path}:{line}: {len(words)} words, but {len(tags)} tags.")
    for tag in tags:
        if tag != "O" and (tag[:2] not in ("B-", "I-") or len(tag) == 2):
            raise UserError(f"{path}:{line}: a tag is {tag!r}; it must be O, B-TYPE or I-TYPE.")
    return TextRow(tuple(words), "", path, line, tags=tuple(tags))
