"""Reads tokenizers (tokenizer.json, vocab.txt) and trains new ones with Hugging Face `tokenizers`.

A trained tokenizer depends on the training texts alone. This does not hold for the library's own WordPiece training: it
numbers the initial pieces inside words in the order of a hash table, and breaks ties between merges by these numbers.
`train_tokenizer` therefore passes these pieces in sorted order.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxpar.errors import UserError
from jaxpar.files import file_of, parse_json, regular

WORDPIECE_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# The settings of a tokenizer_config.json that apply to a vocab.txt, with their defaults.
SETTINGS: dict[str, bool | None] = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
# Names of the special tokens by use; the first name in the vocabulary is used.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
PADDING = ("[PAD]", "<pad>", "<|endoftext|>")  # GPT-2 has no padding token; padding is masked, so any token works
MASK = ("[MASK]", "<mask>")
UNKNOWN = ("[UNK]", "<unk>", *PADDING)  # a byte-level vocabulary has no unknown token; padding works as well
# Training takes time that is quadratic in the length of a word, so long words are left out (WordPiece, which encodes
# them as [UNK]) or cut (byte-level BPE).
MAX_CHARACTERS = 100  # in a word, as in BERT
MAX_TOKENS = 10_000_000  # of a vocabulary that is read, for each of which masking keeps a byte
MAX_BYTES = 1000  # in a word: more than in a sentence of a language without spaces


def train_tokenizer(texts: Callable[[], Iterator[str]], vocab_size: int, *, byte_level: bool) -> Tokenizer:
    """Train a tokenizer of at most `vocab_size` tokens: BERT's uncased WordPiece, or GPT-2's byte-level BPE.

    `texts` returns a new iterator over the training texts; it is called up to twice.
    """
    if byte_level:
        return _train_bytes(texts(), vocab_size)
    scratch = Tokenizer(models.BPE(unk_token="[UNK]", continuing_subword_prefix="##"))
    scratch.normalizer = normalizers.BertNormalizer()
    long_word = pre_tokenizers.Split(Regex(rf"^.{{{MAX_CHARACTERS + 1},}}$"), "removed")
    scratch.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), long_word])
    pieces = [f"##{char}" for char in _inner_characters(scratch, texts())]
    special = [*WORDPIECE_SPECIALS, *pieces]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, continuing_subword_prefix="##", show_progress=False
    )
    scratch.train_from_iterator(texts(), trainer)
    vocab = scratch.get_vocab(with_added_tokens=False)
    if len(vocab) > vocab_size:
        raise _too_small(vocab_size, len(vocab))
    return _wordpiece(vocab, SETTINGS)


def _inner_characters(tokenizer: Tokenizer, texts: Iterable[str]) -> list[str]:
    """Return the characters that occur in words after the first position, sorted."""
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
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    short_words = pre_tokenizers.Split(Regex(rf".{{1,{MAX_BYTES}}}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, short_words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words
    return tokenizer


def _too_small(vocab_size: int, least: int) -> UserError:
    return UserError(
        f"config.data.vocab_size is {vocab_size}; it must be at least {least}, to have one token per character"
    )


def _wordpiece(vocab: dict[str, int], settings: dict[str, bool | None]) -> Tokenizer:
    """Return BERT's tokenizer for a vocabulary that contains WORDPIECE_SPECIALS. settings: values of SETTINGS."""
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=MAX_CHARACTERS))
    lowercase, strip_accents, chinese = (settings[key] for key in SETTINGS)
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=bool(lowercase), strip_accents=strip_accents, handle_chinese_chars=bool(chinese)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    tokenizer.add_special_tokens(list(WORDPIECE_SPECIALS))
    return tokenizer


def read_tokenizer(path: Path) -> str:
    """Return the tokenizer in a tokenizer.json or a vocab.txt as JSON. Raises UserError if the file is neither.

    If tokenizer_config.json exists next to a vocab.txt, its SETTINGS apply, as in Hugging Face transformers.
    """
    kind = "a tokenizer.json or vocab.txt in Hugging Face format"
    try:
        text = regular(path).read_text("utf-8")
        if path.suffix == ".txt":
            return _read_vocab(path, text).to_str()
        made = Tokenizer.from_str(text)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); it must be {kind}") from None
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not {kind}: {(str(error) or repr(error)).splitlines()[0]}") from None
    ids = made.get_vocab(with_added_tokens=True).values()
    if not ids or max(ids) >= MAX_TOKENS:
        largest = f"token {max(ids)}" if ids else "no tokens"
        raise UserError(f"{path} has {largest}; it must have tokens with numbers less than {MAX_TOKENS:,}")
    return text


def _read_vocab(path: Path, text: str) -> Tokenizer:
    tokens = text.removesuffix("\n").split("\n")
    vocab = {token.rstrip("\r"): index for index, token in enumerate(tokens)}
    if missing := [token for token in WORDPIECE_SPECIALS if token not in vocab]:
        rule = "a BERT vocabulary must have one token per line, including these"
        raise UserError(f"{path} lacks {', '.join(missing)}; {rule}")
    path = file_of(path.parent, "tokenizer_config.json")
    if not path.exists():
        return _wordpiece(vocab, SETTINGS)
    try:
        settings = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not JSON ({error}); it must be the settings of a tokenizer, or not exist") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path} is {settings!r:.40}; it must be an object with the settings of a tokenizer")
    for key, default in SETTINGS.items():
        if not isinstance(value := settings.get(key, default), bool) and value is not default:
            raise UserError(f"{path} has {key} {value!r:.40}; it must be true or false")
    return _wordpiece(vocab, SETTINGS | settings)


def special(tokenizer: Tokenizer, names: Iterable[str], use: str, path: Path) -> int:
    """Return the id of the first of `names` in the vocabulary. Raises UserError if the vocabulary has none of them."""
    index = find_special(tokenizer, names)
    if index is None:
        raise UserError(f"{path} has no token for {use}; it must contain {' or '.join(names)}")
    return index


def find_special(tokenizer: Tokenizer, names: Iterable[str]) -> int | None:
    """Return the id of the first of `names` in the vocabulary, or None."""
    return next((index for index in map(tokenizer.token_to_id, names) if index is not None), None)


def unknown_token(tokenizer: Tokenizer, path: Path) -> str:
    """Return the token of words without tokens. Raises UserError if the vocabulary has none."""
    unknown = tokenizer.id_to_token(special(tokenizer, UNKNOWN, "words without tokens", path))
    assert unknown is not None
    return unknown


def vocab_size(tokenizer: Tokenizer) -> int:
    """Return one more than the largest id."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def specials_V(tokenizer: Tokenizer) -> np.ndarray:
    """Return bool [V]: True at special tokens and at unused ids."""
    special_V = np.ones(vocab_size(tokenizer), bool)
    special_V[list(tokenizer.get_vocab(with_added_tokens=True).values())] = False
    special_V[[index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special]] = True
    return special_V
