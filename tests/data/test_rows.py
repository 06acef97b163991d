import gzip
import json
import lzma
import os
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpar.data import files
from jaxpar.data.files import invalid_utf8
from jaxpar.data.rows import Columns, TextRow, read_files
from jaxpar.errors import UserError

from .conftest import WRITERS, reviews

COLUMNS = Columns(("text",), "label")


def rows(source: str, path: Path, columns: Columns = COLUMNS) -> list[TextRow]:
    return list(read_files(source, [path], columns))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
KEYS = ("id", "text", "label")
RECORDS = st.lists(st.tuples(TEXT, TEXT, TEXT).map(lambda texts: dict(zip(KEYS, texts, strict=True))), min_size=1)


@pytest.mark.parametrize("source", WRITERS)
@given(records=RECORDS)
@example(records=reviews(50))
def test_all_formats_give_what_was_written(source: str, records: list[dict[str, str]], tmp_path: Path) -> None:
    """All texts are read back, also those with quotes, tabs, line ends of any kind, NUL and other controls."""
    if source == "tsv":  # whose fields cannot contain tabs or line ends
        records = [{key: re.sub(r"[\t\r\n]", " ", text) for key, text in record.items()} for record in records]
    path = tmp_path / f"reviews.{source}"
    WRITERS[source](path, records)
    found = rows(source, path)
    assert [(row.texts, row.label) for row in found] == [((record["text"],), record["label"]) for record in records]
    pairs = rows(source, path, Columns(("label", "text"), None, keeps_record=True))
    assert [(row.texts, row.label) for row in pairs] == [((one["label"], one["text"]), "") for one in records]
    assert [row.record for row in pairs] == records
    lines = [row.line for row in found]
    if records == reviews(50):  # a row a line
        first = 1 if source in ("jsonl", "parquet") else 2  # after the header
        assert lines == list(range(first, 50 + first))
    assert lines == sorted(set(lines))


@settings(max_examples=15)
@given(suffix=st.sampled_from([".gz", ".xz"]), cut=st.floats(0.05, 0.99))
def test_compressed_files(suffix: str, cut: float, tmp_path: Path) -> None:
    """Compressed files are read like others, and damage at any place is reported."""
    compress: Callable[[bytes], bytes] = gzip.compress if suffix == ".gz" else lzma.compress
    for source in ("csv", "tsv", "jsonl"):
        path = tmp_path / f"reviews.{source}"
        WRITERS[source](path, reviews(20))
        packed = path.with_name(path.name + suffix)
        packed.write_bytes(compress(path.read_bytes()))
        assert [row[:2] for row in rows(source, packed)] == [row[:2] for row in rows(source, path)]
        packed.write_bytes(packed.read_bytes()[: int(cut * packed.stat().st_size)])
        with pytest.raises(UserError, match=f"{packed.name}: the compressed file is damaged"):
            rows(source, packed)


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_file_that_expands_to_too_much(
    suffix: str, compress: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small files may expand to any ratio, and large files to 200 times their size."""
    path = tmp_path / f"a.csv{suffix}"
    path.write_bytes(compress(b"text,label\n" + b"a" * 2**20 + b",b\n"))
    assert [len(row.texts[0]) for row in rows("csv", path)] == [2**20]
    monkeypatch.setattr(files, "ALWAYS_EXPANDED", 2**16)
    with pytest.raises(UserError, match=rf"a.csv{suffix} expands to more than 200 times its size; it must be less"):
        rows("csv", path)
    monkeypatch.setattr(files, "MAX_EXPANSION", 10_000)
    assert len(rows("csv", path)) == 1


def test_csv_fields_over_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'\xef\xbb\xbftext,label\r\n"one\r\ntwo ""quoted"", three",x\r\n\r\nfour,y\r\n' + b"z" * 200_000 + b",y\r\n"
    )
    found = rows("csv", path)
    assert found[0] == TextRow(('one\r\ntwo "quoted", three',), "x", path, 2)
    assert found[1] == TextRow(("four",), "y", path, 5)
    assert len(found[2].texts[0]) == 200_000


def test_tsv_quotes_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('label\ttext\n1\t"Oh" he said, "\n2\tit\'s\n')
    assert [row.texts[0] for row in rows("tsv", path)] == ['"Oh" he said, "', "it's"]


def test_labels_that_are_not_texts(tmp_path: Path) -> None:
    """JSON numbers and booleans are labels like the same characters in CSV."""
    values = ["3", "4.5", "-1.0", "true", "", "", "x"]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"a,{value}\n" for value in values))
    typed = ["3", "4.5", "-1.0", "true", "null", "NaN", '"x"']
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "a", "label": {value}}}\n' for value in typed))
    pq.write_table(pa.table({"text": ["a"] * 3, "label": [4.5, None, float("nan")]}), tmp_path / "a.parquet")
    for source in ("csv", "jsonl"):
        found = rows(source, tmp_path / f"a.{source}")
        assert [row.label for row in found] == values
        assert [row.is_labelled(COLUMNS) for row in found] == [True] * 4 + [False] * 2 + [True]
    assert [row.label for row in rows("parquet", tmp_path / "a.parquet")] == ["4.5", "", ""]


@pytest.mark.parametrize("value", ["", " ", None])
def test_missing_targets_and_tags(value: str | None, tmp_path: Path) -> None:
    columns = Columns(("text",), None, ("y", "z"))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a", "y": 1, "z": value}) + "\n")
    [row] = rows("jsonl", tmp_path / "a.jsonl", columns)
    assert (row.targets, row.is_labelled(columns)) == ((), False)
    columns = Columns(("words",), "tags", has_tags=True)
    (tmp_path / "a.jsonl").write_text(json.dumps({"words": ["a"], "tags": None if value is None else []}) + "\n")
    [row] = rows("jsonl", tmp_path / "a.jsonl", columns)
    assert (row.tags, row.is_labelled(columns)) == ((), False)


def test_numeric_labels(tmp_path: Path) -> None:
    jsonl, parquet = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    jsonl.write_text('{"text": "a", "label": 3}\n\n{"label": "3", "text": "b", "more": [1]}\n')
    pq.write_table(pa.table({"text": pa.array(["a", "b"]).dictionary_encode(), "label": [3, 3]}), parquet)
    assert [row.label for row in rows("jsonl", jsonl)] == ["3", "3"]
    assert [(row.texts, row.label) for row in rows("parquet", parquet)] == [(("a",), "3"), (("b",), "3")]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\n")
    assert rows("text", path, Columns(("text",), None)) == [TextRow(("one\n\ntwo\n",), "", path, 1)]


HEADER = "text,label\n"
MISTAKES = {
    "ragged.csv": (HEADER + "a,x\nb\n", r"ragged.csv:3 has 1 columns; it must have 2, as the header has"),
    "wide.csv": (HEADER + '"a\nb",x\nc,d,y\n', r"wide.csv:4 has 3 columns; it must have 2, as the header has"),
    "ragged.tsv": ("text\tlabel\na\tx\tz\n", r"ragged.tsv:2 has 3 columns; it must have 2, as the header has"),
    "header.csv": (HEADER, "header.csv contains no examples"),
    "header.tsv": ("text\tlabel\n", "header.tsv contains no examples"),
    "blank.jsonl": ("\n\n", "blank.jsonl contains no examples"),
    "blank.csv": ("\n\n", "blank.csv contains no examples"),
    "blank.txt": (" \n", "blank.txt contains no examples"),
    "unknown.csv": ("txt,label\na,x\n", r"unknown.csv:1 has no column 'text'; its columns are 'txt', 'label'; set "
                    r"config.data.text_columns. Did you mean 'txt'\?$"),
    "nolabel.tsv": ("text\tLabel\na\tx\n", r"no column 'label'; its columns are 'text', 'Label'; set "
                    r"config.data.label_column. Did you mean 'Label'\?$"),
    "twice.csv": ("text,label,text\na,x,b\n", "twice.csv:1 has more than one column 'text'; it must have one"),
    "unknown.jsonl": ('{"text": "a", "label": "x"}\n{"text": "b"}\n', "unknown.jsonl:2 has no column 'label'"),
    "quote.csv": (HEADER + 'a,x\n"b,x\nc,x\n', "quote.csv:3: a quote opens here and is not closed"),
    "quote2.csv": (HEADER + 'a,x\n"b" c,x\n', "quote2.csv:3: a quote opens here and is not closed"),
    "broken.jsonl": ('{"text": "a", "label": "x"}\n{"text": \n', "broken.jsonl:2: invalid JSON: Expecting value at"),
    "deep.jsonl": ('{"text": "a", "label": ' + "[" * 100_000 + "\n", "deep.jsonl:1: invalid JSON: nested more than"),
    "twice.jsonl": ('{"text": "a", "label": "x", "text": "b"}\n', "invalid JSON: the key 'text' occurs twice"),
    "list.jsonl": ('["a", "x"]\n', "list.jsonl:1: the line is JSON of type list; it must be an object"),
    "number.jsonl": ('{"text": 1, "label": "x"}\n', "number.jsonl:1: column 'text' is 1; it must be a string"),
    "array.jsonl": ('{"text": "a", "label": [1]}\n', r"column 'label' is \[1\]; it must be a string, a number"),
    "half.jsonl": ('{"text": "\\ud83d", "label": "x"}\n', "half.jsonl:1: the text contains an unpaired surrogate"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_name_file_and_line(name: str, tmp_path: Path) -> None:
    content, message = MISTAKES[name]
    path = tmp_path / name
    path.write_text(content)
    source = {"txt": "text"}.get(path.suffix[1:], path.suffix[1:])
    with pytest.raises(UserError, match=message) as caught:
        rows(source, path, Columns(("text",), None) if source == "text" else COLUMNS)
    assert "\n" not in str(caught.value)


TARGETS = {
    "word": ("csv", "two", "is 'two'; it must be a finite number"),
    "nan": ("csv", "nan", "is 'nan'; it must be a finite number"),
    "underscore": ("csv", "1_0", "is '1_0'; it must be a finite number"),
    "beyond float64": ("jsonl", "9" * 400, f"is {'9' * 40}; it must be a finite number"),
    "beyond float32": ("jsonl", "1e39", r"is 1e\+39; it must be in the range .*, from -3.402823e\+38 to 3.402823e\+38"),
    "beyond float32 in csv": ("csv", "-1e39", "is '-1e39'; it must be in the range of float32, from .*"),
    "true": ("jsonl", "true", "is True; it must be a finite number"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_targets_that_are_no_numbers_of_float32(name: str, tmp_path: Path) -> None:
    source, value, message = TARGETS[name]
    path = tmp_path / f"a.{source}"
    lines = {"csv": "text,y\na,{}\nb,{}\n", "jsonl": '{{"text": "a", "y": {}}}\n{{"text": "b", "y": {}}}\n'}[source]
    line = {"csv": 3, "jsonl": 2}[source]
    path.write_text(lines.format("3.4e38", value))
    with pytest.raises(UserError, match=f"a.{source}:{line}: column 'y' {message}$"):
        rows(source, path, Columns(("text",), None, ("y",)))
    path.write_text(lines.format("3.4e38", "-1.5e1"))
    assert [row.targets for row in rows(source, path, Columns(("text",), None, ("y",)))] == [(3.4e38,), (-15.0,)]


def test_a_number_of_too_many_digits(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "y": ' + "9" * 5000 + "}\n")
    with pytest.raises(
        UserError, match=r"a.jsonl:1: invalid JSON: a number has 5000 digits; it must have at most 4000"
    ):
        rows("jsonl", path, Columns(("text",), None, ("y",)))


@pytest.mark.parametrize("source", ["csv", "tsv", "jsonl", "text"])
def test_invalid_utf8_names_the_line(source: str, tmp_path: Path) -> None:
    path = tmp_path / "latin"
    good = {"csv": "text,label\n", "tsv": "text\tlabel\n", "jsonl": '{"text":"a","label":"x"}\n', "text": "one\n"}[
        source
    ]
    more = {"csv": "a,x\n", "tsv": "a\tx\n", "jsonl": good, "text": "two\n"}[source] * 20_000
    path.write_bytes((good + more).encode() + b"caf\xe9" + more.encode())
    with pytest.raises(UserError, match=r"latin:20002: byte 4 of the line \(0xe9\) is not UTF-8") as caught:
        rows(source, path)
    assert "\n" not in str(caught.value)


def test_invalid_utf8_in_a_pipe(tmp_path: Path) -> None:
    """A pipe cannot be read again to find the line."""
    os.mkfifo(tmp_path / "pipe")
    assert str(invalid_utf8(tmp_path / "pipe")) == f"{tmp_path}/pipe is not UTF-8; it must be text in UTF-8"


def test_files_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"\x7fELF\x02\x01\x00\xff")
    with pytest.raises(UserError, match=r"a.csv is not a text file; it must be text in UTF-8"):
        rows("csv", path)
    path.write_text("text,label\na,b\n", "utf-16")
    with pytest.raises(UserError, match=r"a.csv is UTF-16; convert it to UTF-8, .* iconv -f utf-16 -t utf-8"):
        rows("csv", path)


def test_parquet_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"

    def fails(message: str) -> None:
        with pytest.raises(UserError, match=message) as caught:
            rows("parquet", path)
        assert "\n" not in str(caught.value)

    path.write_text("text,label\na,x\n")
    fails("a.parquet is not a readable parquet file")
    WRITERS["parquet"](path, reviews(5))
    path.write_bytes(path.read_bytes()[:-30])
    fails("a.parquet is not a readable parquet file")
    pq.write_table(pa.table({"txt": ["a"], "label": ["x"]}), path)
    fails(r"has no column 'text'; its columns are 'txt', 'label'; set config.data.text_columns. Did you mean 'txt'\?")
    pq.write_table(pa.table({"text": ["a", None], "label": ["x", "y"]}), path)
    fails("a.parquet:2: column 'text' is None; it must be a string")
    pq.write_table(pa.table({"text": ["a"], "label": ["x"]}).slice(0, 0), path)
    fails("a.parquet contains no examples")
