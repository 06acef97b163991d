"""Tokenizes rows of text and writes the token arrays of the splits as files of a cache entry.

For causal language models, split S has one file, S.blocks.npy [N, max_length + 1]. Otherwise it has

- S.tokens.npy [M]: the tokens of all examples, concatenated
- S.offsets.npy [N + 1]: example i is tokens[offsets[i] : offsets[i + 1]]
- S.labels.npy [N]: classes, for rows of a table
- S.segments.npy [M]: segment ids, for text pairs
- S.targets.npy [N, targets]: regression targets
- S.tags.npy [M]: for tagged words, the class of each word at its first token, -1 elsewhere

Dims: M tokens of a split, N examples, K tokens of a block, C classes.
"""

from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Encoding, Tokenizer

from jaxpar.data.cache import Facts
from jaxpar.data.corpus import SPLITS, SplitRow
from jaxpar.data.tokenizer import vocab_size
from jaxpar.errors import UserError

Item = TypeVar("Item", bound=tuple[Any, ...])

_CHUNK = 1 << 20  # characters that are tokenized together, in parallel on all cores
_PIECE = 1 << 16  # characters: a longer document is tokenized in pieces of whole lines


def write_examples(directory: Path, rows: Iterable[SplitRow], tokenizer: Tokenizer, max_length: int) -> Facts:
    """Write one example per row, with special tokens, truncated to max_length.

    Returns the names of the classes, by class index, and the number of examples by split.
    """
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    splits = {name: _SplitArrays(tokenizer) for name in SPLITS}
    seen: dict[str, int] = {}  # label -> number, in order of appearance
    for chunk in _chunks((row.texts, split, row) for split, row in rows):
        texts = [texts if len(texts) == 2 else texts[0] for texts, _, _ in chunk]
        for (_, split, row), encoding in zip(chunk, tokenizer.encode_batch(texts), strict=True):
            if not encoding.ids:
                raise UserError(f"{row.place}: the text has no tokens")
            arrays = splits[split]
            arrays.tokens.extend(encoding.ids)
            arrays.offsets.append(len(arrays.tokens))
            arrays.labels.append(seen.setdefault(row.label, len(seen)))
            arrays.targets.extend(row.targets)
            if len(row.texts) == 2:
                arrays.segments.extend(encoding.type_ids)
    classes = class_order(seen)
    place = {label: number for number, label in enumerate(classes)}
    number_C = np.array([place[label] for label in seen], np.int32)
    for name, arrays in splits.items():
        np.save(directory / f"{name}.tokens.npy", np.array(arrays.tokens))
        np.save(directory / f"{name}.offsets.npy", np.array(arrays.offsets))
        np.save(directory / f"{name}.labels.npy", number_C[np.array(arrays.labels, np.int32)])
        np.save(directory / f"{name}.segments.npy", np.array(arrays.segments))
        if arrays.targets:
            targets = np.array(arrays.targets, np.float32).reshape(len(arrays.labels), -1)
            np.save(directory / f"{name}.targets.npy", targets)
    return {"classes": classes, "examples": {name: len(arrays.labels) for name, arrays in splits.items()}}


def write_tagged(
    directory: Path, rows: Iterable[SplitRow], tokenizer: Tokenizer, max_length: int, unknown: str
) -> Facts:
    """Write one example per row of words and tags, with special tokens, truncated to max_length.

    Words beyond max_length have no label. A word without tokens, such as a control character, is replaced by the token
    `unknown`, because predictions refer to words by position.
    Returns the names of the classes, which are O followed by B-TYPE and I-TYPE for each type, and the number of
    examples by split.
    """
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    splits = {name: _SplitArrays(tokenizer) for name in SPLITS}
    seen: dict[str, int] = {}  # tag -> number, in order of appearance
    for chunk in _chunks((row.texts, split, row) for split, row in rows):
        encodings = encode_words([list(words) for words, _, _ in chunk], tokenizer, unknown)
        for (_, split, row), encoding in zip(chunk, encodings, strict=True):
            arrays, previous = splits[split], None
            for word in encoding.word_ids:
                if word is None or word == previous:
                    arrays.tags.append(-1)
                else:
                    arrays.tags.append(seen.setdefault(row.tags[word], len(seen)))
                previous = word
            arrays.tokens.extend(encoding.ids)
            arrays.offsets.append(len(arrays.tokens))
    types = sorted({tag[2:] for tag in seen if tag != "O"})
    classes = ["O", *(f"{prefix}-{kind}" for kind in types for prefix in "BI")]
    number_C = np.array([*(classes.index(tag) for tag in seen), -1], np.int32)  # index -1 maps to -1
    for name, arrays in splits.items():
        np.save(directory / f"{name}.tokens.npy", np.array(arrays.tokens))
        np.save(directory / f"{name}.offsets.npy", np.array(arrays.offsets))
        np.save(directory / f"{name}.tags.npy", number_C[np.array(arrays.tags, np.int32)])
    return {"classes": classes, "examples": {name: len(arrays.offsets) - 1 for name, arrays in splits.items()}}


def encode_words(texts: list[list[str]], tokenizer: Tokenizer, unknown: str) -> list[Encoding]:
    """Return the encodings of lists of words, with `unknown` in place of words without tokens."""
    encodings = tokenizer.encode_batch(texts, is_pretokenized=True)
    for number, (words, encoding) in enumerate(zip(texts, encodings, strict=True)):
        # Words with tokens, including those that truncation moved to `overflowing`.
        there = {word for part in (encoding, *encoding.overflowing) for word in part.word_ids}
        if not there.issuperset(range(len(words))):
            whole = [word if place in there else unknown for place, word in enumerate(words)]
            encodings[number] = tokenizer.encode(whole, is_pretokenized=True)
    return encodings


def write_packed(
    directory: Path, rows: Iterable[SplitRow], tokenizer: Tokenizer, max_length: int, ends: tuple[int, int]
) -> Facts:
    """Write examples for masked language models: documents, each followed by ends[1], cut into pieces.

    An example is ends[0], a piece of the token stream, and ends[1], together max_length tokens. The last example may be
    shorter.
    """
    streams = _streams(rows, tokenizer, ends[1])
    examples = {}
    for name, tokens_M in streams.items():
        body = max_length - 2
        count = -(-len(tokens_M) // body)
        tokens_NK = np.full((count, max_length), ends[1], tokens_M.dtype)
        tokens_NK[:, 0] = ends[0]
        padded = np.pad(tokens_M, (0, count * body - len(tokens_M)), constant_values=ends[1])
        tokens_NK[:, 1:-1] = padded.reshape(count, body)
        total = len(tokens_M) + 2 * count
        np.save(directory / f"{name}.tokens.npy", tokens_NK.reshape(-1)[:total])
        np.save(directory / f"{name}.offsets.npy", np.minimum(np.arange(count + 1) * max_length, total))
        examples[name] = count
    return {"classes": [], "examples": examples}


def write_blocks(
    directory: Path, rows: Iterable[SplitRow], tokenizer: Tokenizer, max_length: int, end_of_text: int
) -> Facts:
    """Write blocks of max_length + 1 tokens, cut from the documents, each followed by end_of_text.

    The remainder is dropped.
    """
    streams = _streams(rows, tokenizer, end_of_text)
    examples = {}
    for name, tokens_M in streams.items():
        count = len(tokens_M) // (max_length + 1)
        blocks_NK = tokens_M[: count * (max_length + 1)].reshape(count, max_length + 1)
        np.save(directory / f"{name}.blocks.npy", blocks_NK)
        examples[name] = count
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
        self.labels = array("i")
        self.targets = array("d")
        self.tags = array("i")


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
