from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxpar.data import tokenizer, tokens
from jaxpar.data.corpus import SplitRow
from jaxpar.data.rows import TextRow
from jaxpar.errors import UserError

DOCUMENTS = ["the cat sat on the mat\nand so on\n" * 9, "one\n", "", "a dog, a cat; the mat\n" * 5]
SPLITS = ("train", "validation", "train", "train")


def rows(labels: tuple[str, ...] = ("", "", "", "")) -> Iterator[SplitRow]:
    for i, (split, text) in enumerate(zip(SPLITS, DOCUMENTS, strict=True)):
        yield split, TextRow((text,), labels[i], Path("file"), i + 1)


@pytest.fixture(scope="module", params=[True, False], ids=["bytes", "wordpiece"])
def made(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer.train_tokenizer(lambda: iter(DOCUMENTS), 280 if request.param else 60, byte_level=request.param)


def stream(made: Tokenizer, split: str, end: int) -> list[int]:
    """Return the token stream by a direct computation: every non-empty document, followed by `end`."""
    texts = [text for name, text in zip(SPLITS, DOCUMENTS, strict=True) if name == split and text]
    return [token for text in texts for token in [*made.encode(text, add_special_tokens=False).ids, end]]


def test_blocks_are_the_stream_cut(made: Tokenizer, tmp_path: Path) -> None:
    facts = tokens.write_blocks(tmp_path, rows(), made, 7, 33)
    for split in ("train", "validation", "test"):
        expected = stream(made, split, 33)
        blocks = [expected[at : at + 8] for at in range(0, len(expected) - 7, 8)]
        saved = np.load(tmp_path / f"{split}.blocks.npy")
        assert saved.reshape(-1, 8).tolist() == blocks
        assert saved.dtype == np.uint16
        assert facts["examples"][split] == len(blocks)
    assert facts["examples"]["train"] > 3


def test_packed_examples_are_the_stream_between_marks(made: Tokenizer, tmp_path: Path) -> None:
    facts = tokens.write_packed(tmp_path, rows(), made, 10, (2, 3))
    for split in ("train", "validation", "test"):
        expected = stream(made, split, 3)
        examples = [[2, *expected[at : at + 8], 3] for at in range(0, len(expected), 8)]
        assert load_examples(tmp_path, split) == examples
        assert facts["examples"][split] == len(examples)


def load_examples(directory: Path, split: str, name: str = "tokens") -> list[list[int]]:
    flat, offsets = np.load(directory / f"{split}.{name}.npy"), np.load(directory / f"{split}.offsets.npy")
    return [flat[start:stop].tolist() for start, stop in pairwise(offsets)]


def test_long_documents_in_pieces_are_the_whole_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words never span lines, so WordPiece gives the same tokens for all sizes of pieces and chunks."""
    made = tokenizer.train_tokenizer(lambda: iter(DOCUMENTS), 60, byte_level=False)
    tokens.write_blocks(tmp_path, rows(), made, 7, 3)
    whole = np.load(tmp_path / "train.blocks.npy")
    monkeypatch.setattr(tokens, "_PIECE", 20)
    monkeypatch.setattr(tokens, "_CHUNK", 50)
    tokens.write_blocks(tmp_path, rows(), made, 7, 3)
    assert np.array_equal(np.load(tmp_path / "train.blocks.npy"), whole)
    pieces = [text for (text,), _, _ in tokens._pieces(rows())]
    assert "".join(pieces) == "".join(DOCUMENTS)
    assert max(map(len, pieces)) <= 20 + len("the cat sat on the mat\n")


def test_examples_are_cut_and_labels_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_CHUNK", 50)
    made = tokenizer.train_tokenizer(lambda: iter(DOCUMENTS), 60, byte_level=False)
    labelled = rows(("10", "9", "2", "9"))
    facts = tokens.write_examples(tmp_path, labelled, made, 12)
    assert facts == {"classes": ["2", "9", "10"], "examples": {"train": 3, "validation": 1, "test": 0}}
    made.no_truncation()
    expected = [made.encode(text).ids for text in DOCUMENTS]
    cut = [ids if len(ids) <= 12 else [*ids[:11], ids[-1]] for ids in expected]
    assert load_examples(tmp_path, "train") == [cut[0], cut[2], cut[3]]
    assert load_examples(tmp_path, "validation") == [cut[1]]
    assert np.load(tmp_path / "train.labels.npy").tolist() == [2, 0, 1]
    assert np.load(tmp_path / "validation.labels.npy").tolist() == [1]
    assert len(np.load(tmp_path / "train.segments.npy")) == 0


def test_pairs_have_segments_and_are_cut_at_the_longer(tmp_path: Path) -> None:
    made = tokenizer.train_tokenizer(lambda: iter(DOCUMENTS), 60, byte_level=False)
    pairs = [("the cat", "the mat the mat the mat the mat"), ("on the mat", "one")]
    facts = tokens.write_examples(tmp_path, (("train", TextRow(pair, "x", Path("f"), 1)) for pair in pairs), made, 9)
    assert facts["examples"]["train"] == 2
    decoded = [[made.id_to_token(index) for index in example] for example in load_examples(tmp_path, "train")]
    assert decoded[0] == ["[CLS]", "the", "cat", "[SEP]", "the", "mat", "the", "mat", "[SEP]"]
    for example, segments in zip(decoded, load_examples(tmp_path, "train", "segments"), strict=True):
        first = example.index("[SEP]") + 1
        assert segments == [0] * first + [1] * (len(example) - first)


def test_a_text_without_tokens() -> None:
    made = tokenizer.train_tokenizer(lambda: iter(DOCUMENTS), 280, byte_level=True)
    with pytest.raises(UserError, match=r"file:3: the text has no tokens"):
        tokens.write_examples(Path("nowhere"), rows(), made, 12)


def test_tagged_words_without_tokens(tmp_path: Path) -> None:
    """WordPiece drops spaces, control and zero-width characters; the unknown token replaces such words."""
    made = tokenizer.train_tokenizer(lambda: iter(DOCUMENTS), 60, byte_level=False)
    examples = [
        (("\a",), ("B-X",)),
        (("cat", " ", "\u200b", "mat", "\a"), ("O", "B-X", "I-X", "O", "B-Y")),
        (("the", "cat", "\a", "sat", "on", "\a", "the"), ("O", "O", "B-X", "O", "O", "I-Y", "O")),
    ]
    tagged = [("train", TextRow(words, "", Path("file"), 1, tags=tags)) for words, tags in examples]
    tokens.write_examples(tmp_path, tagged, made, 8, "[UNK]")
    decoded = [[made.id_to_token(index) for index in example] for example in load_examples(tmp_path, "train")]
    assert decoded == [
        ["[CLS]", "[UNK]", "[SEP]"],
        ["[CLS]", "cat", "[UNK]", "[UNK]", "mat", "[UNK]", "[SEP]"],
        ["[CLS]", "the", "cat", "[UNK]", "sat", "on", "[UNK]", "[SEP]"],  # truncated
    ]
    classes = {"O": 0, "B-X": 1, "I-X": 2, "B-Y": 3, "I-Y": 4}
    expected = [[-1, *(classes[tag] for tag in tags[:6]), -1] for _, tags in examples]
    assert load_examples(tmp_path, "train", "tags") == expected


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    vocab = {name: i for i, name in enumerate([*tokenizer.WORDPIECE_SPECIALS, *map(str, range(70_000))])}
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(vocab), "utf-8")
    made = Tokenizer.from_str(tokenizer.read_tokenizer(path))
    tokens.write_blocks(tmp_path, [("train", TextRow(("69999 3",), "", path, 1))], made, 2, 1)
    assert np.load(tmp_path / "train.blocks.npy").tolist() == [[70_004, 8, 1]]


@pytest.mark.parametrize(
    ("labels", "order"),
    [("b a c", "a b c"), ("10 9 -1 0", "-1 0 9 10"), ("10 9 x", "10 9 x"), ("01 1 0", "0 01 1")],
)
def test_the_order_of_classes(labels: str, order: str) -> None:
    assert tokens.class_order(labels.split()) == order.split()
