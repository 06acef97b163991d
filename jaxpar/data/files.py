"""Finds, opens and hashes the user's files, and reports every failure in one line."""

import codecs
import glob
import gzip
import hashlib
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from jaxpar.errors import UserError, most_similar

DECOMPRESSORS: dict[str, Callable[[Path], io.BufferedIOBase]] = {".gz": gzip.GzipFile, ".xz": lzma.LZMAFile}
MAX_EXPANSION = 200  # texts are compressed about 3 to 30 times, malicious files up to 1,000 (gz) or 7,000 times (xz)
ALWAYS_EXPANDED = 2**26  # bytes, which are accepted from a file of any size
DAMAGED = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)  # raised on reading a damaged .gz or .xz file


def find_files(key: str, pattern: str) -> list[Path]:
    """Return the files that match `pattern`, the value of config key `key`: a path or a glob. Sorted by name.

    Raises UserError if no file matches, or if a match is not a readable, non-empty file.
    """
    pattern = str(Path(pattern).expanduser())
    matches = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)  # noqa: PTH207 - may be absolute
    paths = sorted(map(Path, matches))
    if not paths:
        where = _nearest_file(Path(pattern))
        raise UserError(f"config.{key} is {pattern!r}, which does not exist; it must be a file or a glob{where}")
    for path in paths:
        given = f"config.{key} is {str(path)!r}"
        if path.is_dir():
            raise UserError(f"{given}, which is a directory; it must be a file or a glob such as {path}/*")
        if not os.access(path, os.R_OK):
            raise UserError(f"{given}, which is not readable; it must be a readable file")
        if path.stat().st_size == 0:
            raise UserError(f"{given}, which is empty; it must be a non-empty file")
    return paths


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f". The directory {path.parent} does not exist either"
    files = sorted(path.parent.iterdir())
    stem = most_similar(path.stem, [file.stem for file in files])
    same = [file for file in files if file.stem == stem]
    suffix = most_similar(path.suffix, [file.suffix for file in same])
    return f". Did you mean {next((file for file in same if file.suffix == suffix), same[0])}?" if same else ""


class Expanded(io.RawIOBase):
    """The expanded contents of a compressed file, up to MAX_EXPANSION times its size."""

    def __init__(self, path: Path, file: io.BufferedIOBase):
        """file: decompresses the file at `path`."""
        self._path, self._file = path, file
        self._left = max(MAX_EXPANSION * path.stat().st_size, ALWAYS_EXPANDED)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read into the buffer and return the number of bytes. Raises UserError beyond the limit."""
        count = self._file.readinto(buffer)
        self._left -= count
        if self._left < 0:
            rule = "it must be less compressed, or not compressed at all"
            raise UserError(f"{self._path} expands to more than {MAX_EXPANSION} times its size; {rule}")
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def open_bytes(path: Path) -> BinaryIO:
    """Open the file for reading in binary mode, and decompress it if its name ends in .gz or .xz.

    Reading raises UserError for a file that expands to implausibly many bytes.
    """
    if path.suffix in DECOMPRESSORS:
        return io.BufferedReader(Expanded(path, DECOMPRESSORS[path.suffix](path)), buffer_size=2**16)
    return path.open("rb")


def digest_files(paths: Iterable[Path]) -> str:
    """Return the SHA-256 hash of the contents of the files, in order."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def invalid_utf8(path: Path) -> UserError:
    """Return the error for a file that is not UTF-8: that it is not text, or the line and the byte."""
    if not path.is_file():  # a pipe, which cannot be read again
        return UserError(f"{path} is not UTF-8; it must be text in UTF-8")
    with open_bytes(path) as file:
        start = file.read(2**16)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return UserError(f"{path} is UTF-16; convert it to UTF-8, for example with iconv -f utf-16 -t utf-8")
    if b"\0" in start:
        return UserError(f"{path} is not a text file; it must be text in UTF-8")
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                place = f"{path}:{number}: byte {error.start + 1} of the line (0x{line[error.start]:02x})"
                return UserError(f"{place} is not UTF-8; convert the file, for example with iconv -f latin1 -t utf-8")
    raise AssertionError(f"{path} is UTF-8")
