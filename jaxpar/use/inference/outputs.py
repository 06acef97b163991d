"""Writes predictions next to the columns of the input: csv, jsonl or parquet, a window at a time.

A file appears under its name when it is complete; until then it has the extension .tmp.
"""

import contextlib
import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from jaxpar.command_line import check_absent
from jaxpar.errors import UserError
from jaxpar.files import unwritable, without_nonfinite
from jaxpar.tasks import Prediction
from jaxpar.use.inference.inputs import Record

TABLE_FORMATS = ("csv", "jsonl", "parquet")
Write = Callable[[Sequence[Record], Sequence[Prediction]], None]  # writes consecutive examples


def check_table_file(path: Path) -> None:
    """Raise UserError unless `path` can be written: a new file with an extension of TABLE_FORMATS, in a directory."""
    if path.suffix.removeprefix(".") not in TABLE_FORMATS:
        endings = ", ".join(f".{name}" for name in TABLE_FORMATS)
        raise UserError(f"--output is {str(path)!r}; its extension must be one of {endings}")
    check_absent("--output", path)


def _merge(names: dict[str, str], records: Sequence[Record], predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Add predictions to the columns of the input. Raises UserError for a later record with a column of their name.

    names: is empty at first. The column of each prediction: its own name, or `predicted_NAME` if the first record has a
    column of this name.
    """
    for name in () if names else predictions[0]:
        names[name] = name
        while names[name] in records[0]:
            names[name] = f"predicted_{names[name]}"
    for record in records:
        if both := sorted(record.keys() & set(names.values())):
            raise UserError(
                f"a record has the key {both[0]!r}, which the first one lacks, and which is the name of a "
                "prediction; rename it, or add it to the first record"
            )
    return [
        {**record, **{names[name]: value for name, value in prediction.items()}}
        for record, prediction in zip(records, predictions, strict=True)
    ]


@contextlib.contextmanager
def open_output(path: Path | None, kind: str, schema: Any = None) -> Iterator[Write]:
    """Return, for a `with` block, the function that writes predictions. If the block raises, no file is left.

    path: a new file; None: the standard output. kind: one of TABLE_FORMATS. schema: for parquet, the pyarrow.Schema of
    the columns of the input; None: they are texts.
    """
    if path is None:
        yield _text_writer(sys.stdout, kind)
        sys.stdout.flush()
        return
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # left over from a crash; a link is replaced, not followed
        if kind == "parquet":
            with _open_parquet(temporary, schema) as write:
                yield write
        else:
            with temporary.open("x", encoding="utf-8", newline="") as file:
                yield _text_writer(file, kind)
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"--output is {str(path)!r}; it must be {unwritable(path, error)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _text_writer(file: TextIO, kind: str) -> Write:
    """Return the function that writes predictions as jsonl or csv."""
    names: dict[str, str] = {}
    header: list[str] = []
    table = csv.writer(file, lineterminator="\n")

    def write(records: Sequence[Record], predictions: Sequence[Prediction]) -> None:
        merged = _merge(names, records, predictions)
        if kind == "jsonl":
            file.writelines(f"{to_json(record)}\n" for record in merged)
            return
        if not header:
            header.extend(merged[0])
            table.writerow(header)
        table.writerows([_as_text(value) for value in _values(record, header)] for record in merged)

    return write


def to_json(value: Any) -> str:
    """Return a value as JSON in one line. Values of other types, such as dates in parquet files, become texts."""
    return json.dumps(without_nonfinite(value), ensure_ascii=False, allow_nan=False, default=str)


def _as_text(value: Any) -> str:
    """Return a value as text: texts as they are, an empty text for None, and all other values as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else to_json(value)


def _values(record: Record, header: Sequence[str]) -> list[Any]:
    """Return the values of the columns, None where a key is missing. Raises UserError for any other key."""
    if odd := sorted(record.keys() - set(header)):
        raise UserError(
            f"a record has the key {odd[0]!r}, which the first one lacks; use --output=FILE.jsonl, or add it to the "
            "first record"
        )
    return [record.get(name) for name in header]


@contextlib.contextmanager
def _open_parquet(path: Path, schema: Any) -> Iterator[Write]:
    """Return, for a `with` block, the function that writes predictions to a parquet file. schema: see `open_output`."""
    import pyarrow as pa  # imported lazily: it takes a third of a second
    import pyarrow.parquet as pq

    of_input = {field.name: field.type for field in schema} if schema else {}
    names: dict[str, str] = {}
    writer: pq.ParquetWriter | None = None

    def type_of(name: str, value: Any) -> pa.DataType:
        is_number = isinstance(value, float) and name in names.values()
        return of_input.get(name) or (pa.float64() if is_number else pa.string())

    def write(records: Sequence[Record], predictions: Sequence[Prediction]) -> None:
        nonlocal writer
        merged = _merge(names, records, predictions)
        if writer is None:
            fields = [(name, type_of(name, value)) for name, value in merged[0].items()]
            writer = stack.enter_context(pq.ParquetWriter(path, pa.schema(fields)))
        columns = zip(*(_values(record, writer.schema.names) for record in merged), strict=True)
        arrays = []
        for field, values in zip(writer.schema, columns, strict=True):
            is_text = field.type == pa.string() and field.name not in of_input
            texts = (None if value is None else _as_text(value) for value in values)
            arrays.append(pa.array(texts if is_text else values, field.type))
        writer.write_table(pa.Table.from_arrays(arrays, schema=writer.schema))

    with contextlib.ExitStack() as stack:
        yield write
