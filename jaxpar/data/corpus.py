"""Reads the rows of the user's files and assigns each row to a split."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from jaxpar.data import files
from jaxpar.data.cache import Facts
from jaxpar.data.examples import Labels
from jaxpar.data.rows import Columns, TextRow, format_places, read_files
from jaxpar.errors import UserError, format_count, nearest

SPLITS = ("train", "validation", "test")
WORDNET = Path(__file__).parent / "wordnet" / "glosses.tsv.xz"

SplitRow = tuple[str, TextRow]
SHOWN = 5  # rows without a label that an error message names


class Corpus:
    """The rows of all splits.

    A split without a file of its own is taken from the training file. Rows of a table are split by the hash of their
    text, so that no text is in two splits. Plain text is split by position: the test split is the end of the text and
    the validation split comes before it.
    """

    def __init__(self, config: ConfigDict, labels: Labels, only: str | None = None):
        """Create the corpus of a config. only: the split whose file is read, whatever the training file contains."""
        data = config.data
        self._source = "tsv" if data.source == "wordnet" else data.source
        label = data.label_column if labels in (Labels.CLASSES, Labels.TAGS) else None
        targets = tuple(data.target_columns) if labels is Labels.TARGETS else ()
        self._columns = Columns(text_columns(config), label, targets, labels is Labels.TAGS)
        names = [only] if only else [name for name in SPLITS if data[name]]
        self._files = {name: files.find_files(f"data.{name}", data[name]) for name in names}
        if not only and data.source == "wordnet":
            self._files = {"train": [WORDNET]}
        self._validation = 0.0 if data.validation or only else float(data.validation_fraction)
        self._test = 0.0 if data.test or only else float(data.test_fraction)
        self._drops_unlabelled = bool(data.drop_unlabelled)
        # number of rows that `rows` has read so far: all (`rows`), those without a label (`unlabelled`), and those with
        # empty text (`empty`)
        self.counts: Counter[str] = Counter()

    def facts(self) -> Facts:
        """Return everything that determines the rows; file contents are represented by their hash."""
        facts = {"source": self._source, "columns": (self._columns.texts, self._columns.label)}
        facts |= {"files": {name: files.digest_files(paths) for name, paths in self._files.items()}}
        facts |= {"targets": self._columns.targets} if self._columns.targets else {}
        facts |= {"drop_unlabelled": True} if self._drops_unlabelled else {}
        return facts | {"validation": self._validation, "test": self._test}

    def rows(self) -> Iterator[SplitRow]:
        """Yield (split, row) for every row that has a label.

        Raises UserError for a label that does not occur in the training file and, after the last row of a split, for
        rows without a label, unless config.data.drop_unlabelled is set.
        """
        known: set[str] = set()
        self.counts.clear()
        for name, paths in self._files.items():
            rows = self._labelled(read_files(self._source, paths, self._columns))
            if name == "train" and self._source == "text":
                yield from split_by_place(list(rows), self._validation, self._test)
                continue
            for row in rows:
                labels = {tag[2:] for tag in row.tags if tag != "O"} if row.tags else {row.label}
                if name == "train":
                    known |= labels
                elif "train" in self._files and (unseen := sorted(labels - known)):  # otherwise the caller knows them
                    hint = nearest(unseen[0], known)
                    seen = f"is not one of the {len(known)} labels in the training file{hint and '.' + hint}"
                    raise UserError(f"{row.place}: the label {unseen[0]!r} {seen}")
                yield name if name != "train" else split_of(row.texts, self._validation, self._test), row

    def _labelled(self, rows: Iterator[TextRow]) -> Iterator[TextRow]:
        """Yield the rows that have a label, and count the rows. Raises UserError as `rows` does."""
        number = 0
        first: list[TextRow] = []
        for row in rows:
            self.counts["rows"] += 1
            if row.is_labelled(self._columns):
                self.counts["empty"] += not self._columns.has_tags and not all(text.strip() for text in row.texts)
                yield row
                continue
            number += 1
            if len(first) < SHOWN:
                first.append(row)
        self.counts["unlabelled"] += number
        if number and not self._drops_unlabelled:
            names = ", ".join(map(repr, [self._columns.label] if self._columns.label else self._columns.targets))
            where = f"{format_count(number, 'row')} without a label (column {names}): {format_places(first, number)}"
            rule = "add the labels, or drop these rows with config.data.drop_unlabelled=True"
            raise UserError(f"{where}; {rule}")

    def check_columns(self) -> None:
        """Raise UserError if the first row of a table does not match the config, before reading the rest."""
        if self._source != "text":
            for path in itertools.chain(*self._files.values()):
                next(read_files(self._source, [path], self._columns))

    def training_texts(self) -> Iterator[str]:
        """Return an iterator over all texts of the training split."""
        return (text for split, row in self.rows() if split == "train" for text in row.texts)

    def check_sizes(self, examples: dict[str, int], unit: str) -> None:
        """Raise UserError if a split that the config requests has no examples."""
        for name, fraction in (("train", 0.0), ("validation", self._validation), ("test", self._test)):
            if not examples[name] and (name in self._files or fraction > 0):
                there = ", ".join(f"{count} {split}" for split, count in examples.items())
                what = f"config.data.{name}_fraction is too small; it must be 0, or leave {unit} for the {name} split"
                if name in self._files:
                    what = f"config.data.{name} is too short; it must yield one or more {unit}"
                raise UserError(f"{what} (number of {unit}: {there})")


def text_columns(config: ConfigDict) -> tuple[str, ...]:
    """Return the names of the text columns: those of the config, or that of the glosses."""
    return ("text",) if config.data.source == "wordnet" else tuple(config.data.text_columns)


def split_of(texts: tuple[str, ...], validation: float, test: float) -> str:
    """Return the split of a row, which depends on the hash of its text alone."""
    digest = hashlib.sha256("\0".join(texts).encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    return "test" if place < test else "validation" if place < test + validation else "train"


def split_by_place(rows: list[TextRow], validation: float, test: float) -> Iterator[SplitRow]:
    """Concatenate the documents and cut them into three splits, at the first line ends after the given fractions."""
    total = sum(len(row.texts[0]) for row in rows)
    bounds = (round(total * (1 - validation - test)), round(total * (1 - test)), total)
    begin = 0
    for row in rows:
        text, start = row.texts[0], 0
        for split, bound in zip(SPLITS, bounds, strict=True):
            stop = min(max(bound - begin, 0), len(text))
            if 0 < stop < len(text):
                stop = text.find("\n", stop - 1) + 1 or stop
            if stop > start:
                yield split, row._replace(texts=(text[start:stop],))
                start = stop
        begin += len(text)
