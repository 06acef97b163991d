"""Tokenizes texts without labels as the training data was tokenized.

Dims: N texts, M tokens of all texts.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict
from tokenizers import Tokenizer

from jaxpar.data import tokenizer as tokenizers
from jaxpar.data import tokens
from jaxpar.data.corpus import text_columns
from jaxpar.data.examples import DataInfo, Labels, Texts
from jaxpar.data.text import buckets_of
from jaxpar.errors import UserError


class Encoded(NamedTuple):
    """Texts as tokens."""

    # the examples. Their labels are 0. Weights are positive at the first tokens of words, for tags, and at mask tokens,
    # for masked language models.
    split: Texts
    is_truncated_N: np.ndarray  # whether a text is longer than the model allows, bool


class Encoder:
    """Converts texts to examples, with the tokenizer, columns and lengths of a run."""

    def __init__(self, config: ConfigDict, info: DataInfo, labels: Labels, tokenizer: Tokenizer, path: Path):
        """Create the encoder of a run.

        Args:
          config: config of the run.
          info: properties of its data.
          labels: the kind of labels of its task.
          tokenizer: its tokenizer, which is copied.
          path: file of the tokenizer, for error messages.
        """
        self.columns = text_columns(config)
        self._labels = labels
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_padding()
        # The next token depends most on the last ones.
        direction = "left" if labels is Labels.NEXT else "right"
        self._tokenizer.enable_truncation(config.data.max_length, direction=direction)
        self._buckets, self._pad_id = buckets_of(config), info.pad_id
        self._mask_id = (
            tokenizers.special(tokenizer, tokenizers.MASK, "masking", path) if labels is Labels.MASKED else -1
        )
        self._unknown = tokenizers.unknown_token(tokenizer, path) if labels is Labels.TAGS else ""

    def __call__(self, texts: Sequence[tuple[str, ...]], places: Sequence[str] | None = None) -> Encoded:
        """Tokenize texts. A text is a tuple with a string for each text column or, for tags, the words.

        Raises UserError for a text without tokens. places: the locations of the texts, for this error.
        """
        if self._labels is Labels.TAGS:
            encodings = tokens.encode_words([list(words) for words in texts], self._tokenizer, self._unknown)
        else:
            inputs = [text if len(text) == 2 else text[0] for text in texts]
            with_specials = self._labels is not Labels.NEXT
            encodings = self._tokenizer.encode_batch_fast(inputs, add_special_tokens=with_specials)
        lengths_N = np.fromiter((len(encoding.ids) for encoding in encodings), np.int64, len(encodings))
        if not lengths_N.all():
            number = int(lengths_N.argmin())
            raise UserError(f"{places[number] if places else f'texts[{number}]'}: the text has no tokens")
        tokens_M = np.concatenate([encoding.ids for encoding in encodings]).astype(np.int32)
        segments_M = tags_M = None
        if len(self.columns) == 2:
            segments_M = np.concatenate([encoding.type_ids for encoding in encodings]).astype(np.int32)
        if self._labels is Labels.TAGS:
            tags_M = np.concatenate([_first_tokens(encoding.word_ids) for encoding in encodings]) - 1
        elif self._labels is Labels.MASKED:
            tags_M = (tokens_M == self._mask_id).astype(np.int32) - 1
        split = Texts(
            tokens_M,
            np.concatenate([[0], np.cumsum(lengths_N)]),
            np.zeros(len(texts), np.int32),
            segments_M,
            self._buckets,
            self._pad_id,
            masking=None,
            tags_M=tags_M,
        )
        return Encoded(split, np.array([bool(encoding.overflowing) for encoding in encodings]))

    def blank(self, number: int, length: int) -> Texts:
        """Return texts of `length` tokens 0 with one word or mask token each, to compile programs with."""
        zeros_M = np.zeros(number * length, np.int32)
        tags_M = np.where(np.arange(number * length) % length, -1, 0).astype(np.int32)
        return Texts(
            zeros_M,
            np.arange(number + 1) * length,
            zeros_M[:number],
            zeros_M if len(self.columns) == 2 else None,
            self._buckets,
            self._pad_id,
            masking=None,
            tags_M=tags_M if self._labels in (Labels.TAGS, Labels.MASKED) else None,
        )


def _first_tokens(word_ids: Sequence[int | None]) -> np.ndarray:
    """Return 1 at the first token of each word, and 0 at other tokens."""
    pairs = itertools.pairwise([None, *word_ids])
    return np.array([word is not None and word != before for before, word in pairs], np.int32)
