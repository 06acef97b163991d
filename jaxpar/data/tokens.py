"""Tokenizes rows of text into the files of a cache entry, and texts without labels into examples to predict.

Of the files, for causal language models, split S has one file, S.blocks.npy [N, max_length + 1]. Otherwise it has

- S.tokens.npy [M]: the tokens of all examples, concatenated
- S.offsets.npy [N + 1]: example i is tokens[offsets[i] : offsets[i + 1]]
- S.labels.npy [N]: classes, for rows of a table
- S.segments.npy [M]: segment ids, for text pairs
- S.targets.npy [N, targets]: regression targets
- S.tags.npy [M]: for tagged words, the class of each word at its first token, -1 elsewhere

Dims: M tokens of all examples, N examples, K tokens of a block, C classes.
"""

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from ml_collections import ConfigDict
from tokenizers import Encoding, Tokenizer

from jaxpar.data.cache import Facts
from jaxpar.data.corpus import SPLITS, SplitRow, text_columns
from jaxpar.data.examples import DataInfo, Labels, Texts, buckets_of
from jaxpar.data.tokenizer import MASK, special, unknown_token, vocab_size
from jaxpar.errors import UserError

Item = TypeVar("Item", bound=tuple[Any, ...])

_CHUNK = 1 << 20  # characters that are tokenized together, in parallel on all cores
_PIECE = 1 << 16  # characters: a longer document is tokenized in pieces of whole lines


def write_examples(
    directory: Path, rows: Iterable[SplitRow], tokenizer: Tokenizer, max_length: int, unknown: str | None = None
) -> Facts:
    """Write one example per row, with special tokens, truncated to max_length.

    Returns the names of the classes, by class index, and the number of examples by split. For tags, the classes are O,
    followed by B-TYPE and I-TYPE for each type, and words beyond max_length have none. unknown: see `encode`.
    """
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    splits = {name: _SplitArrays(tokenizer) for name in SPLITS}
    seen: dict[str, int] = {}  # label or tag -> number, in order of appearance
    for chunk in _chunks((row.texts, split, row) for split, row in rows):
        encodings = encode([texts for texts, _, _ in chunk], tokenizer, unknown)
        for (_, split, row), encoding in zip(chunk, encodings, strict=True):
            if not encoding.ids:
                raise UserError(f"{row.place}: the text has no tokens")
            arrays = splits[split]
            arrays.tokens.extend(encoding.ids)
            arrays.offsets.append(len(arrays.tokens))
            arrays.targets.extend(row.targets)
            if unknown is None:
                arrays.labels.append(seen.setdefault(row.label, len(seen)))
                arrays.segments.extend(encoding.type_ids if len(row.texts) == 2 else ())
                continue
            for word in first_tokens(encoding):
                arrays.labels.append(-1 if word is None else seen.setdefault(row.tags[word], len(seen)))
    classes = class_order(seen)
    if unknown is not None:
        types = sorted({tag[2:] for tag in seen if tag != "O"})
        classes = ["O", *(f"{prefix}-{kind}" for kind in types for prefix in "BI")]
    number = {label: number for number, label in enumerate(classes)}
    number_C = np.array([*(number[label] for label in seen), -1], np.int32)  # index -1 maps to -1
    for name, arrays in splits.items():
        np.save(directory / f"{name}.tokens.npy", np.array(arrays.tokens))
        np.save(directory / f"{name}.offsets.npy", np.array(arrays.offsets))
        labels = number_C[np.array(arrays.labels, np.int32)]
        if unknown is None:
            np.save(directory / f"{name}.labels.npy", labels)
            np.save(directory / f"{name}.segments.npy", np.array(arrays.segments))
        else:
            np.save(directory / f"{name}.tags.npy", labels)
        if arrays.targets:
            targets = np.array(arrays.targets, np.float32).reshape(len(arrays.labels), -1)
            np.save(directory / f"{name}.targets.npy", targets)
    return {"classes": classes, "examples": {name: len(arrays.offsets) - 1 for name, arrays in splits.items()}}


def encode(
    texts: Sequence[tuple[str, ...]], tokenizer: Tokenizer, unknown: str | None, *, specials: bool = True
) -> list[Encoding]:
    """Return the encodings of texts: tuples of one or two texts, or of words.

    unknown: for words, the token that replaces words without tokens, such as a control character, because predictions
    refer to words by position. specials: whether to add the special tokens.
    """
    if unknown is None:
        inputs = [text if len(text) == 2 else text[0] for text in texts]
        return tokenizer.encode_batch_fast(inputs, add_special_tokens=specials)
    encodings = tokenizer.encode_batch(list(map(list, texts)), is_pretokenized=True)
    for number, (words, encoding) in enumerate(zip(texts, encodings, strict=True)):
        # Words with tokens, including those that truncation moved to `overflowing`.
        there = {word for part in (encoding, *encoding.overflowing) for word in part.word_ids}
        if not there.issuperset(range(len(words))):
            whole = [word if place in there else unknown for place, word in enumerate(words)]
            encodings[number] = tokenizer.encode(whole, is_pretokenized=True)
    return encodings


def first_tokens(encoding: Encoding) -> list[int | None]:
    """Return, for each token, the index of its word if it is the first token of a word, otherwise None."""
    return [None if word == before else word for before, word in itertools.pairwise([None, *encoding.word_ids])]


def write_packed(
    directory: Path, rows: Iterable[SplitRow], tokenizer: Tokenizer, max_length: int, ends: tuple[int, int]
) -> Facts:
    """Write examples for masked language models: documents, each followed by ends[1], cut into pieces.

    An example is ends[0], a piece of the token stream, and ends[1]: max_length tokens, or fewer in the last example.
    """
    examples = {}
    for name, tokens_M in _streams(rows, tokenizer, ends[1]).items():
        body = max_length - 2
        count = examples[name] = -(-len(tokens_M) // body)
        tokens_NK = np.full((count, max_length), ends[1], tokens_M.dtype)
        tokens_NK[:, 0] = ends[0]
        padded = np.pad(tokens_M, (0, count * body - len(tokens_M)), constant_values=ends[1])
        tokens_NK[:, 1:-1] = padded.reshape(count, body)
        total = len(tokens_M) + 2 * count
        np.save(directory / f"{name}.tokens.npy", tokens_NK.reshape(-1)[:total])
        np.save(directory / f"{name}.offsets.npy", np.minimum(np.arange(count + 1) * max_length, total))
    return {"classes": [], "examples": examples}


def write_blocks(
    directory: Path, rows: Iterable[SplitRow], tokenizer: Tokenizer, max_length: int, end_of_text: int
) -> Facts:
    """Write blocks of max_length + 1 tokens, cut from the documents, each followed by end_of_text; drop the rest."""
    examples, size = {}, max_length + 1
    for name, tokens_M in _streams(rows, tokenizer, end_of_text).items():
        count = examples[name] = len(tokens_M) // size
        np.save(directory / f"{name}.blocks.npy", tokens_M[: count * size].reshape(count, size))
    return {"classes": [], "examples": examples}


def class_order(labels: Iterable[str]) -> list[str]:
    """Return the labels in the order of their class indices: by value if all are integers, otherwise by name."""
    labels = list(labels)
    try:
        return sorted(labels, key=lambda label: (int(label), label))
    except ValueError:
        return sorted(labels)


class _SplitArrays:
    """The growing arrays of one split. `array` stores a token in 2 or 4 bytes; a list would need 8 or more."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokens = array("H" if vocab_size(tokenizer) <= 1 << 16 else "I")
        self.offsets = array("q", [0])
        self.segments = array("B")
        self.labels = array("i")  # of examples, or of their tokens
        self.targets = array("d")


def _streams(rows: Iterable[SplitRow], tokenizer: Tokenizer, end: int) -> dict[str, np.ndarray]:
    """Return the concatenated tokens of the documents of each split, each document followed by `end`."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    splits = {name: _SplitArrays(tokenizer) for name in SPLITS}
    for chunk in _chunks(_pieces(rows)):
        encodings = tokenizer.encode_batch([texts[0] for texts, _, _ in chunk], add_special_tokens=False)
        for (_, split, is_last), encoding in zip(chunk, encodings, strict=True):
            splits[split].tokens.extend(encoding.ids)
            if is_last:
                splits[split].tokens.append(end)
    return {name: np.array(arrays.tokens) for name, arrays in splits.items()}


def _pieces(rows: Iterable[SplitRow]) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    """Yield (texts, split, whether this is the last piece of the document); long documents are cut at line ends."""
    for split, row in rows:
        text, start = row.texts[0], 0
        while start < len(text):
            end = text.find("\n", start + _PIECE) + 1 or len(text)
            yield (text[start:end],), split, end == len(text)
            start = end


def _chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Group consecutive items so that the texts of a group (the first field of each) total about _CHUNK characters."""
    chunk: list[Item] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += sum(map(len, item[0]))
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class Encoded(NamedTuple):
    """Texts as tokens."""

    # the examples. Their labels are 0. Weights are positive at the first tokens of words, for tags, and at mask tokens,
    # for masked language models.
    split: Texts
    is_truncated_N: np.ndarray  # whether a text is longer than the model allows, bool


class Encoder:
    """Converts texts to examples, with the tokenizer, columns and lengths of a run."""

    def __init__(self, config: ConfigDict, info: DataInfo, labels: Labels, tokenizer: Tokenizer, path: Path):
        """Create the encoder of a run. The tokenizer is copied; `path` is its file, for error messages."""
        self.columns = text_columns(config)
        self._labels = labels
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_padding()
        # The next token depends most on the last ones.
        direction = "left" if labels is Labels.NEXT else "right"
        self._tokenizer.enable_truncation(config.data.max_length, direction=direction)
        self._buckets, self._pad_id = buckets_of(config), info.pad_id
        self._mask_id = special(tokenizer, MASK, "masking", path) if labels is Labels.MASKED else -1
        self._unknown = unknown_token(tokenizer, path) if labels is Labels.TAGS else None

    def __call__(self, texts: Sequence[tuple[str, ...]], places: Sequence[str] | None = None) -> Encoded:
        """Tokenize texts. A text is a tuple with a string for each text column or, for tags, the words.

        Raises UserError for a text without tokens. places: the locations of the texts, for this error.
        """
        encodings = encode(texts, self._tokenizer, self._unknown, specials=self._labels is not Labels.NEXT)
        lengths_N = np.fromiter((len(encoding.ids) for encoding in encodings), np.int64, len(encodings))
        if not lengths_N.all():
            number = int(lengths_N.argmin())
            raise UserError(f"{places[number] if places else f'texts[{number}]'}: the text has no tokens")
        tokens_M = np.concatenate([encoding.ids for encoding in encodings]).astype(np.int32)
        segments_M = np.concatenate([encoding.type_ids for encoding in encodings]).astype(np.int32)
        is_predicted_M = tokens_M == self._mask_id
        if self._labels is Labels.TAGS:
            is_predicted_M = np.array([word is not None for one in encodings for word in first_tokens(one)])
        split = self._texts(tokens_M, lengths_N, segments_M, is_predicted_M.astype(np.int32) - 1)
        return Encoded(split, np.array([bool(encoding.overflowing) for encoding in encodings]))

    def blank(self, number: int, length: int) -> Texts:
        """Return texts of `length` tokens 0 with one word or mask token each, to compile programs with."""
        zeros_M = np.zeros(number * length, np.int32)
        tags_M = np.where(np.arange(number * length) % length, -1, 0).astype(np.int32)
        return self._texts(zeros_M, np.full(number, length), zeros_M, tags_M)

    def _texts(self, tokens_M: np.ndarray, lengths_N: np.ndarray, segments_M: np.ndarray, tags_M: np.ndarray) -> Texts:
        return Texts(
            tokens_M,
            np.concatenate([[0], np.cumsum(lengths_N)]),
            np.zeros(len(lengths_N), np.int32),
            segments_M if len(self.columns) == 2 else None,
            self._buckets,
            self._pad_id,
            masking=None,
            tags_M=tags_M if self._labels in (Labels.TAGS, Labels.MASKED) else None,
        )
