import json
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from jaxpar.data import tokenizer
from jaxpar.errors import UserError

TEXTS = [
    "Welcome to the 🤗 Tokenizers library, naïve café!",
    "the theatre of the absurd",
    "中文 and the rest: a, b; c.",
] * 3
TRAIN = """
import sys, hashlib
from jaxpar.data import tokenizer
texts = %r
for byte_level in (False, True):
    made = {tokenizer.train_tokenizer(lambda: iter(texts), 400, byte_level=byte_level).to_str() for _ in range(20)}
    print(len(made), hashlib.sha256(made.pop().encode()).hexdigest())
"""


def trained(byte_level: bool = False, vocab_size: int = 120) -> Tokenizer:
    return tokenizer.train_tokenizer(lambda: iter(TEXTS), vocab_size, byte_level=byte_level)


def test_training_gives_the_same_bytes_in_every_process() -> None:
    """The library's own WordPiece training gives different results in each process, and even in each call."""
    outputs = set()
    for threads in ("1", "2", "5"):
        environment = {"RAYON_NUM_THREADS": threads, "PATH": "", "PYTHONPATH": ":".join(sys.path)}
        command = [sys.executable, "-c", TRAIN % (TEXTS,)]
        outputs.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(outputs) == 1
    assert [line.split()[0] for line in outputs.pop().splitlines()] == ["1", "1"]


def test_a_trained_wordpiece() -> None:
    made = trained()
    assert made.get_vocab_size() <= 120
    assert [made.token_to_id(name) for name in tokenizer.WORDPIECE_SPECIALS] == [0, 1, 2, 3, 4]
    encoding = made.encode("The  THEATRE, näive 中!", "Q")
    assert encoding.tokens[0] == "[CLS]"
    assert encoding.tokens[-3:] == ["[SEP]", "[UNK]", "[SEP]"]
    assert encoding.type_ids == [0] * (len(encoding.ids) - 2) + [1, 1]
    words = ["the", "theatre", ",", "naive", "中", "!"]
    assert encoding.tokens[1:-3] == [piece for word in words for piece in longest_match(word, made.get_vocab())]
    assert made.decode(made.encode("the rest of the library").ids) == "the rest of the library"


def longest_match(word: str, vocab: dict[str, int]) -> list[str]:
    """Tokenize a word with WordPiece, as in the code of the BERT paper."""
    pieces: list[str] = []
    while word:
        prefix = "##" if pieces else ""
        size = next((size for size in range(len(word), 0, -1) if prefix + word[:size] in vocab), 0)
        if not size:
            return ["[UNK]"]
        pieces.append(prefix + word[:size])
        word = word[size:]
    return pieces


def test_merges_are_by_count() -> None:
    """'ab' is the most frequent pair, then 'abc'."""
    made = tokenizer.train_tokenizer(lambda: iter(["abc abc abd xab"]), 5 + 4 + 5 + 2, byte_level=False)
    vocab = made.get_vocab()
    letters = {"a", "b", "c", "d", "x", "##a", "##b", "##c", "##d"}
    assert set(vocab) - set(tokenizer.WORDPIECE_SPECIALS) - letters == {"ab", "abc"}


def test_a_trained_byte_level_bpe_loses_nothing() -> None:
    made = trained(byte_level=True, vocab_size=300)
    assert made.get_vocab_size() == 300
    assert made.token_to_id("<|endoftext|>") == 0
    for text in ("  odd   spaces\n\n\ttabs ", "letters 🤷 it never saw: Ωß", "".join(map(chr, range(32, 500)))):
        assert made.decode(made.encode(text).ids) == text


def test_long_words() -> None:
    """WordPiece leaves out words of more than 100 characters; byte-level BPE cuts words after 1000 bytes."""

    def made(word: str, *, byte_level: bool = False) -> str:
        texts = [*TEXTS, *([word] if word else [])]
        return tokenizer.train_tokenizer(lambda: iter(texts), 400, byte_level=byte_level).to_str()

    assert made("q" * 101) == made("") != made("q" * 100)
    whole, pieces = made("ab" * 1250, byte_level=True), ["ab" * 500, "ab" * 500, "ab" * 250]
    cut = tokenizer.train_tokenizer(lambda: iter([*TEXTS, *pieces]), 400, byte_level=True)
    assert whole == cut.to_str() != made("", byte_level=True)


def test_vocabularies_that_are_too_small() -> None:
    with pytest.raises(
        UserError, match=r"config.data.vocab_size is 40; it must be at least \d+, to have one token per character"
    ):
        trained(vocab_size=40)
    with pytest.raises(UserError, match=r"config.data.vocab_size is 200; it must be at least 257"):
        trained(byte_level=True, vocab_size=200)


def test_vocab_txt(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text(
        "\n".join([*tokenizer.WORDPIECE_SPECIALS, "un", "Un", "##able", "cafe", "café", "!"]) + "\n", "utf-8"
    )

    def tokens(text: str) -> list[str]:
        return Tokenizer.from_str(tokenizer.read_tokenizer(path)).encode(text).tokens

    assert tokens("Unable café!") == ["[CLS]", "un", "##able", "cafe", "!", "[SEP]"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    assert tokens("Unable café!") == ["[CLS]", "Un", "##able", "café", "!", "[SEP]"]
    made = Tokenizer.from_str(tokenizer.read_tokenizer(path))
    assert tokenizer.vocab_size(made) == 11
    assert tokenizer.specials_V(made).tolist() == [True] * 5 + [False] * 6
    assert unicodedata.normalize("NFD", "é") != "é"


def test_files_that_are_not_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in (b"{}", b"hello", b"\xff\xfe", b'{"model": {"type": "Nothing"}}'):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer.json is not a tokenizer.json or vocab.txt") as caught:
            tokenizer.read_tokenizer(path)
        assert "\n" not in str(caught.value)
    path.write_text(json.dumps({"version": "\x1b[2J\u202e", "model": {"type": "WordLevel"}}))
    with pytest.raises(UserError, match=r"\\x1b\[2J\\u202e") as caught:
        tokenizer.read_tokenizer(path)
    assert str(caught.value).isprintable()
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("[UNK]\n[CLS]\n[SEP]\nword\n")
    with pytest.raises(UserError, match=r"vocab.txt lacks \[PAD\], \[MASK\]"):
        tokenizer.read_tokenizer(vocab)


def test_special_tokens_by_their_usual_names(tmp_path: Path) -> None:
    made = trained(byte_level=True, vocab_size=300)
    assert tokenizer.special(made, tokenizer.END_OF_TEXT, "the end of a text", tmp_path) == 0
    assert tokenizer.special(made, tokenizer.PADDING, "padding", tmp_path) == 0
    with pytest.raises(UserError, match=r"has no token for masking; it must contain \[MASK\] or <mask>"):
        tokenizer.special(made, tokenizer.MASK, "masking", tmp_path)


SETTINGS = {
    "{": "tokenizer_config.json is not JSON (",
    "[" * 100_000: "tokenizer_config.json is not JSON (nested more than 100 levels deep)",
    "[]": "tokenizer_config.json is []; it must be an object with the settings of a tokenizer",
    '{"do_lower_case": "no"}': "tokenizer_config.json has do_lower_case 'no'; it must be true or false",
    '{"do_lower_case": null}': "tokenizer_config.json has do_lower_case None; it must be true or false",
    '{"strip_accents": 1}': "tokenizer_config.json has strip_accents 1; it must be true or false",
}


@pytest.mark.parametrize("text", SETTINGS)
def test_damaged_settings_of_a_vocabulary_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*tokenizer.WORDPIECE_SPECIALS, "a"]))
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(UserError) as caught:
        tokenizer.read_tokenizer(tmp_path / "vocab.txt")
    assert SETTINGS[text] in str(caught.value)


@pytest.mark.parametrize(
    ("vocab", "message"),
    [({}, "has no tokens; it must have tokens"), ({"a": 4294967295}, "has token 4294967295; it m")],
)
def test_vocabularies_without_tokens_or_with_huge_numbers(vocab: dict[str, int], message: str, tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(UserError, match=message):
        tokenizer.read_tokenizer(tmp_path / "tokenizer.json")
