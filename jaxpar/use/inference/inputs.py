"""Reads texts, images or vectors without labels, from a file or a pipe, a window at a time.

A window holds enough examples to sort them by length as training does, and few enough to fit in memory, so that a file
of any size can be read.
"""

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxpar.data import Labels, Split
from jaxpar.data.batches import WINDOW
from jaxpar.data.examples import DataInfo, SameSize
from jaxpar.data.files import DECOMPRESSORS
from jaxpar.data.rows import INPUT_READERS, Columns, TextRow, read_files
from jaxpar.data.tokens import Encoder
from jaxpar.errors import UserError
from jaxpar.files import path_error
from jaxpar.use.inference.load import Trained

STDIN = Path("/dev/stdin")
FIRST_WINDOW = 4  # batches of the first window
WINDOW_CHARACTERS = 2**25  # the most characters in a window
LINES_SUFFIXES = ("txt", "text")
Item = TypeVar("Item")
Record = Mapping[str, Any]


class Window(NamedTuple):
    """Consecutive examples of the input."""

    records: Sequence[Record]  # for each example, the values of all its columns by name
    num_truncated: int  # number of texts that are longer than the model allows


def input_format(path: Path, given: str | None, trained: Trained, option: str = "--input") -> str:
    """Return the format of the input: a key of INPUT_READERS, or npy. It must be one for this kind of model.

    given: the format that the user named; None: by the extension of the file, lines for STDIN.
    option: the option that named the file, for error messages.
    """
    kinds = ("npy",) if trained.info.kind != "text" else (*INPUT_READERS,)
    suffixes = [suffix for suffix in path.suffixes if suffix not in DECOMPRESSORS]
    suffix = suffixes[-1].removeprefix(".").lower() if suffixes else ""
    found = given or ("lines" if path == STDIN or suffix in LINES_SUFFIXES else suffix)
    if found not in kinds:
        name, value = ("--format", given) if given else (option, "-" if path == STDIN else path)
        possible = ", ".join(kind if kind != "lines" else "lines (txt)" for kind in kinds)
        of = f"{trained.workdir}, whose data is {trained.info.kind}"
        raise UserError(f"{name} is {str(value)!r}; its format must be {possible} for {of}")
    if path == STDIN and found in ("parquet", "npy"):
        raise UserError(f"--input is '-' with the format {found}; it must be a file, because {found} is not a stream")
    if found in ("csv", "tsv") and trained.task.labels is Labels.TAGS:
        raise UserError(
            f"{option} is {str(path)!r} with the format {found}; it must be jsonl, parquet or lines, because the task "
            f"{trained.task.name} reads lists of words"
        )
    return found


def check_unicode(text: str, name: str) -> None:
    """Raise UserError for a text that is not Unicode, such as one from bytes that are not UTF-8. name: of the text."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{name} is {text!r:.60}; it must be valid Unicode, in UTF-8")


def schema_of(path: Path, kind: str) -> Any:
    """Return the pyarrow.Schema of a parquet file, or None for another format."""
    if kind != "parquet":
        return None
    import pyarrow as pa  # imported lazily: it takes a third of a second
    import pyarrow.parquet as pq

    with contextlib.suppress(pa.ArrowException):  # reading the rows reports it
        return pq.read_schema(path)
    return None


def check_file(path: Path, option: str) -> None:
    """Raise UserError unless the path is a file that can be read and is not empty."""
    try:
        with path.open("rb") as file:
            is_empty = path.is_file() and not file.read(1)
    except OSError as error:
        raise UserError(f"{option} is {str(path)!r}, {path_error(error)}; it must be a file") from None
    if is_empty:
        raise UserError(f"{option} is {str(path)!r}, which is empty; it must contain at least one example")


def read_windows(trained: Trained, path: Path, kind: str, batch_size: int) -> Iterator[tuple[Window, Split]]:
    """Yield the windows of a file and their examples as arrays, which another thread reads and tokenizes in advance."""
    if kind == "npy":
        return arrays_of(read_array(path, trained), WINDOW * batch_size)
    encoder = make_encoder(trained)
    columns = Columns(encoder.columns, None, (), trained.task.labels is Labels.TAGS, keeps_record=True)

    def windows() -> Iterator[tuple[Window, Split]]:
        for rows in chunks(read_files(kind, [path], columns), batch_size):
            encoded = encoder([row.texts for row in rows], [row.place for row in rows])
            yield Window([row.record for row in rows], int(encoded.is_truncated_N.sum())), encoded.split

    return in_background(windows())


def make_encoder(trained: Trained) -> Encoder:
    """Return the encoder of a model of texts. Raises UserError if the model was trained on synthetic tokens."""
    if trained.tokenizer is None:
        raise UserError(
            f"{trained.workdir} was trained on {trained.config.data.source} data of kind {trained.info.kind}, without "
            "a tokenizer; it must be a run on texts"
        )
    where = trained.workdir / "tokenizer.json"
    return Encoder(trained.config, trained.info, trained.task.labels, trained.tokenizer, where)


def chunks(rows: Iterable[TextRow], batch_size: int) -> Iterator[list[TextRow]]:
    """Group consecutive rows: a few batches at first, so that the devices soon have work, and later WINDOW batches.

    A chunk has about WINDOW_CHARACTERS characters at most.
    """
    chunk: list[TextRow] = []
    size, most = 0, min(FIRST_WINDOW, WINDOW)
    for row in rows:
        chunk.append(row)
        size += sum(map(len, row.texts))
        if len(chunk) == most * batch_size or size >= WINDOW_CHARACTERS:
            yield chunk
            chunk, size, most = [], 0, min(2 * most, WINDOW)
    if chunk:
        yield chunk


def read_array(path: Path, trained: Trained) -> np.ndarray:
    """Return the images or vectors in an npy file, memory-mapped. Raises UserError if they have another shape."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"--input is {str(path)!r}; it must be an array in NumPy's format npy: {error}") from None
    return check_array(array, trained.info, f"--input is {str(path)!r}, with an array")


def check_array(array: np.ndarray, info: DataInfo, what: str) -> np.ndarray:
    """Return the examples [N, ...] as the model reads them. Raises UserError if their shape or dtype is wrong.

    what: the array, as the start of the message. Images of one channel can lack the last dim.
    """
    if info.kind == "image" and info.input_shape[-1] == 1 and array.shape[1:] == info.input_shape[:-1]:
        array = array[..., None]
    dtype = {"image": "uint8", "vector": "float32"}[info.kind]
    if array.shape[1:] != info.input_shape or array.dtype != dtype or not len(array):
        shape = ", ".join(map(str, ("N", *info.input_shape)))
        raise UserError(f"{what} {array.dtype} {list(array.shape)}; it must be {dtype} [{shape}], with N at least 1")
    return array


def arrays_of(array: np.ndarray, most: int) -> Iterator[tuple[Window, Split]]:
    """Yield windows of at most `most` images or vectors. The record of an example is its index."""
    for start in range(0, len(array), most):
        part = array[start : start + most]
        if (wrong := np.flatnonzero(~np.isfinite(part).reshape(len(part), -1).all(axis=1))).size:
            place = start + wrong[0]
            raise UserError(f"example {place} of the array has values that are not finite; they must be finite")
        labels_N = np.zeros(len(part), np.int32)
        yield Window([{"index": number} for number in range(start, start + len(part))], 0), SameSize(part, labels_N)


def in_background(items: Iterable[Item], ahead: int = 2) -> Iterator[Item]:
    """Yield the items that another thread makes, at most `ahead` in advance. Raises the exceptions of that thread."""
    made: queue.Queue[Item | Exception | None] = queue.Queue(ahead)

    def make() -> None:
        try:
            for item in items:
                made.put(item)
            made.put(None)
        except Exception as error:
            made.put(error)

    threading.Thread(target=make, name="input", daemon=True).start()
    while (item := made.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item
