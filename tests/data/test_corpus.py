import hashlib
import re
from collections import Counter
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from jaxpar.data import Labels, corpus
from jaxpar.data.corpus import Corpus
from jaxpar.data.rows import Columns, TextRow, read_files
from jaxpar.errors import UserError

from .conftest import reviews, write_csv


def table(config: ConfigDict, path: Path, records: list[dict[str, str]]) -> Corpus:
    write_csv(path, records)
    config.data.source = "csv"
    config.data.train = str(path)
    return Corpus(config, Labels.CLASSES)


def test_a_text_is_in_one_split_only(config: ConfigDict, tmp_path: Path) -> None:
    """Every text occurs twice, with two labels."""
    records = reviews(2000)
    again = [{**record, "label": "other"} for record in reversed(records)]
    config.data.validation_fraction, config.data.test_fraction = 0.2, 0.3
    splits: dict[tuple[str, ...], str] = {}
    for split, row in table(config, tmp_path / "a.csv", records + again).rows():
        place = int(hashlib.sha256(row.texts[0].encode()).hexdigest()[:16], 16) / 16**16
        assert split == ("test" if place < 0.3 else "validation" if place < 0.5 else "train")
        assert splits.setdefault(row.texts, split) == split
    sizes = Counter(splits.values())
    assert abs(sizes["test"] / 2000 - 0.3) < 0.05
    assert abs(sizes["validation"] / 2000 - 0.2) < 0.05


def test_the_rows_of_a_pair_are_split_by_both_texts() -> None:
    splits = {corpus.split_of(("same", str(i)), 0.3, 0.3) for i in range(100)}
    assert splits == {"train", "validation", "test"}
    assert corpus.split_of(("ab", "c"), 0.3, 0.3) == corpus.split_of(("ab", "c"), 0.3, 0.3)


def test_given_files_are_the_splits(config: ConfigDict, tmp_path: Path) -> None:
    records = reviews(300)
    for name, part in (("validation", records[:40]), ("test", records[40:60])):
        write_csv(tmp_path / f"{name}.csv", part)
        config.data[name] = str(tmp_path / f"{name}.csv")
    found = list(table(config, tmp_path / "train.csv", records[60:]).rows())
    assert [split for split, _ in found] == ["train"] * 240 + ["validation"] * 40 + ["test"] * 20
    assert [row.texts[0] for _, row in found[240:280]] == [record["text"] for record in records[:40]]


def test_one_given_file_leaves_the_other_fraction(config: ConfigDict, tmp_path: Path) -> None:
    write_csv(tmp_path / "test.csv", reviews(10))
    config.data.test = str(tmp_path / "test.csv")
    config.data.validation_fraction = 0.2
    sizes = Counter(split for split, _ in table(config, tmp_path / "train.csv", reviews(1000)).rows())
    assert sizes["test"] == 10
    assert abs(sizes["validation"] / 1000 - 0.2) < 0.05


def test_labels_that_training_never_saw(config: ConfigDict, tmp_path: Path) -> None:
    write_csv(tmp_path / "test.csv", [*reviews(3), {"id": "9", "text": "what", "label": "negg"}])
    config.data.test = str(tmp_path / "test.csv")
    made = table(config, tmp_path / "train.csv", reviews(300))
    message = r"test.csv:5: the label 'negg' is not one of the 3 labels in the training file. Did you mean 'neg'\?"
    with pytest.raises(UserError, match=message):
        list(made.rows())


def test_rows_without_a_label(config: ConfigDict, tmp_path: Path) -> None:
    """The error names the first five of all such rows of a split."""
    records = [{"text": f"text {i}", "label": "" if i in (1, 2, 30, 40, 50, 60, 70) else "x"} for i in range(80)]
    for number, part in enumerate((records[:40], records[40:])):
        write_csv(tmp_path / f"{number}.csv", part)
    config.data.source, config.data.train = "csv", f"{tmp_path}/*.csv"
    reader = Corpus(config, Labels.CLASSES)
    message = (
        f"7 rows without a label (column 'label'): {tmp_path}/0.csv:3, 4, 32, {tmp_path}/1.csv:2, 12 and 2 more; add "
        "the labels, or drop these rows with config.data.drop_unlabelled=True"
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        list(reader.rows())
    config.data.drop_unlabelled = True
    dropping = Corpus(config, Labels.CLASSES)
    assert dropping.facts() != reader.facts()
    assert [row.texts[0] for _, row in dropping.rows()] == [row["text"] for row in records if row["label"]]
    assert dropping.counts == {"rows": 80, "unlabelled": 7, "empty": 0}
    assert len(list(Corpus(config, Labels.MASKED).rows())) == 80  # labels that the task does not need


def test_several_files_by_a_glob(config: ConfigDict, tmp_path: Path) -> None:
    records = reviews(90)
    for i in range(3):
        write_csv(tmp_path / f"part-{i}.csv", records[30 * i : 30 * i + 30])
    config.data.source, config.data.train = "csv", str(tmp_path / "part-*.csv")
    assert [row.texts[0] for _, row in Corpus(config, Labels.CLASSES).rows()] == [record["text"] for record in records]


def test_plain_text_is_cut_at_line_ends_in_order(tmp_path: Path) -> None:
    lines = [f"line {i} {'x' * (i % 17)}\n" for i in range(500)]
    texts = ["".join(lines[:120]), "".join(lines[120:])]
    rows = [TextRow((text,), "", tmp_path / str(i), 1) for i, text in enumerate(texts)]
    parts = [(split, row.texts[0]) for split, row in corpus.split_by_place(rows, 0.1, 0.2)]
    assert [split for split, _ in parts] == ["train", "train", "validation", "test"]
    assert "".join(text for _, text in parts) == "".join(lines)
    assert all(text.endswith("\n") for _, text in parts)
    total = sum(map(len, lines))
    sizes: Counter[str] = Counter()
    for split, text in parts:
        sizes[split] += len(text)
    assert abs(sizes["validation"] / total - 0.1) < 0.01
    assert abs(sizes["test"] / total - 0.2) < 0.01
    assert [split for split, _ in corpus.split_by_place(rows, 0.0, 0.0)] == ["train", "train"]


def test_a_text_of_one_line_is_cut_all_the_same(tmp_path: Path) -> None:
    row = TextRow(("a" * 100,), "", tmp_path, 1)
    assert [len(part.texts[0]) for _, part in corpus.split_by_place([row], 0.1, 0.2)] == [70, 10, 20]


def test_the_shipped_glosses() -> None:
    rows = list(read_files("tsv", [corpus.WORDNET], Columns(("text",), "label")))
    pairs = {(row.texts[0], row.label) for row in rows}
    assert len(rows) == len(pairs) == 117_181
    by_class = Counter(row.label for row in rows)
    assert len(by_class) == 45
    assert 0.12 < by_class["adj.all"] / len(rows) < 0.13
    assert ("an entity that has physical existence", "noun.Tops") in pairs
    assert all(row.texts[0] == " ".join(row.texts[0].split()) for row in rows)
    licence = (corpus.WORDNET.parent / "LICENSE").read_text()
    assert "WordNet 3.1 Copyright 2011 by Princeton University.  All rights reserved." in licence
