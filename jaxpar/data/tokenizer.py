"""Tokenizers by Hugging Face `tokenizers`: given (tokenizer.json, vocab.txt) or trained here.

What is trained depends on its texts alone. The library's own WordPiece training does not (it
numbers the pieces inside words in the order of a hash table, and ties between merges break by these
numbers), so `_train_wordpiece` hands it those pieces in sorted order.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxpar.errors import UserError

WORDPIECE_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # the first that a vocabulary has
PADDING = ("[PAD]", "<pad>", "<|endoftext|>")  # GPT-2's has no padding: behind the mask its end-of-text does as well
MASK = ("[MASK]", "<mask>")
UNKNOWN = ("[UNK]", "<unk>", *PADDING)  # a vocabulary of bytes has no unknown token: padding does as well


def train_tokenizer(texts: Callable[[], Iterator[str]], vocab_size: int, *, byte_level: bool) -> Tokenizer:
    """A tokenizer of at most `vocab_size` tokens: BERT's lower-casing WordPiece, or GPT-2's byte-level BPE.

    `texts` gives a fresh iterator over the training texts; it is called up to twice.
    """
    return _train_bytes(texts(), vocab_size) if byte_level else _train_wordpiece(texts, vocab_size)


def _train_wordpiece(texts: Callable[[], Iterator[str]], vocab_size: int) -> Tokenizer:
    scratch = Tokenizer(models.BPE(unk_token="[UNK]", continuing_subword_prefix="##"))
    scratch.normalizer = normalizers.BertNormalizer()
    scratch.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces = [f"##{char}" for char in _inner_characters(scratch, texts())]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*WORDPIECE_SPECIALS, *pieces],
        continuing_subword_prefix="##",
        show_progress=False,
    )
    scratch.train_from_iterator(texts(), trainer)
    vocab = scratch.get_vocab(with_added_tokens=False)
    if len(vocab) > vocab_size:
        raise _too_small(vocab_size, len(vocab))
    return _wordpiece(vocab, lowercase=True, strip_accents=None, chinese=True)


def _inner_characters(tokenizer: Tokenizer, texts: Iterable[str]) -> list[str]:
    """The characters, in order, that occur inside words, not only first."""
    assert tokenizer.normalizer is not None
    assert tokenizer.pre_tokenizer is not None
    distinct = list({word for text in texts for word in text.split(" ")})
    characters: set[str] = set()
    for start in range(0, len(distinct), 1000):
        text = tokenizer.normalizer.normalize_str(" ".join(distinct[start : start + 1000]))
        characters.update(char for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text) for char in word[1:])
    return sorted(characters)


def _train_bytes(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise _too_small(vocab_size, len(alphabet) + 1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _too_small(vocab_size: int, least: int) -> UserError:
    return UserError(f"config.data.vocab_size is {vocab_size}; it must be at least {least}: one token a character.")


def _wordpiece(vocab: dict[str, int], *, lowercase: bool, strip_accents: bool | None, chinese: bool) -> Tokenizer:
    """BERT's tokenizer over a vocabulary that has WORDPIECE_SPECIALS."""
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=chinese
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    tokenizer.add_special_tokens(list(WORDPIECE_SPECIALS))
    return tokenizer


def read_tokenizer(path: Path) -> str:
    """The given tokenizer.json, or vocab.txt made into one, as JSON. Raises UserError where it is neither.

    Beside a vocab.txt, tokenizer_config.json may say do_lower_case (otherwise true), strip_accents and
    tokenize_chinese_chars, as Hugging Face has it.
    """
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".txt":
            return _read_vocab(path, text).to_str()
        Tokenizer.from_str(text)
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exception
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not a tokenizer.json or vocab.txt of Hugging Face tokenizers: {reason}") from None
    return text


def _read_vocab(path: Path, text: str) -> Tokenizer:
    tokens = text.removesuffix("\n").split("\n")
    vocab = {token.rstrip("\r"): index for index, token in enumerate(tokens)}
    missing = [token for token in WORDPIECE_SPECIALS if token not in vocab]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}; a BERT vocabulary has one token a line, these among them.")
    settings_path = path.parent / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text("utf-8")) if settings_path.exists() else {}
    return _wordpiece(
        vocab,
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        chinese=settings.get("tokenize_chinese_chars", True),
    )


def special(tokenizer: Tokenizer, names: Iterable[str], use: str, path: Path) -> int:
    """The id of the first of `names` that the vocabulary has. Raises UserError where it has none."""
    for name in names:
        index = tokenizer.token_to_id(name)
        if index is not None:
            return index
    raise UserError(f"{path} has no token for {use}; it needs {' or '.join(names)}.")


def vocab_size(tokenizer: Tokenizer) -> int:
    """Return one more than the largest id."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def specials_V(tokenizer: Tokenizer) -> np.ndarray:
    """bool [V]: True at special tokens, and at ids that no token has."""
    special_V = np.ones(vocab_size(tokenizer), bool)
    special_V[list(tokenizer.get_vocab(with_added_tokens=True).values())] = False
    special_V[[index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special]] = True
    return special_V
