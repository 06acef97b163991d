import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict
from tokenizers import Tokenizer

from jaxpar.data import Batches, DataInfo, Dataset, Split, tokenizer
from jaxpar.data.corpus import split_of
from jaxpar.errors import UserError

from .conftest import WRITERS, load, reviews, write_csv

POEM = "".join(f"the {i} green bottles, hanging on the wall\nand if one should fall\n\n" for i in range(200))


@pytest.fixture
def config(config: ConfigDict, tmp_path: Path) -> ConfigDict:
    write_csv(tmp_path / "reviews.csv", reviews(400))
    config.data.source, config.data.train = "csv", str(tmp_path / "reviews.csv")
    return config


def all_examples(split: Split | None) -> dict[str, np.ndarray]:
    assert split is not None
    return Batches(split, batch_size=len(split), seed=0, shuffle=False).batch(0)


def equal(one: Dataset, other: Dataset) -> bool:
    pairs = [
        (all_examples(getattr(one, name)), all_examples(getattr(other, name)))
        for name in ("train", "validation", "test")
    ]
    return one.info == other.info and all(np.array_equal(a[key], b[key]) for a, b in pairs for key in a)


def test_classification(config: ConfigDict, tmp_path: Path) -> None:
    dataset = load(config, tmp_path / "run")
    made = Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json"))
    assert dataset.info == DataInfo("text", (32,), 3, ("mixed", "neg", "pos"), made.get_vocab_size(), 0)
    made.no_truncation()
    label_of = {record["text"]: record["label"] for record in reviews(400)}
    by_tokens = {tuple(made.encode(text).ids[:31]): label for text, label in label_of.items()}
    found = 0
    for split in (dataset.train, dataset.validation, dataset.test):
        batch = all_examples(split)
        for tokens_T, mask_T, label in zip(batch["inputs"], batch["mask"], batch["labels"], strict=True):
            tokens = tuple(tokens_T[mask_T].tolist())
            assert by_tokens[tokens[:31]] == dataset.info.class_names[label]
            found += 1
    assert found == 400


def test_all_formats_give_the_same_data(config: ConfigDict, tmp_path: Path) -> None:
    datasets = []
    for source, write in WRITERS.items():
        path = tmp_path / f"same.{source}"
        write(path, reviews(400))
        config.data.source, config.data.train = source, str(path)
        datasets.append(load(config, tmp_path / source))
    assert all(equal(dataset, datasets[0]) for dataset in datasets)
    tokenizers = {(tmp_path / source / "tokenizer.json").read_bytes() for source in WRITERS}
    assert len(tokenizers) == 1


def test_the_second_load_reads_the_cache(
    config: ConfigDict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = load(config, tmp_path / "one")
    made = capsys.readouterr().out.splitlines()
    assert [line.split(" (only once")[0] for line in made] == [
        "Training a tokenizer of up to 300 tokens",
        f"Tokenizing {tmp_path}/reviews.csv",
    ]
    for workdir in ("one", "two"):  # a workdir with a tokenizer, and a new workdir
        again = load(config, tmp_path / workdir)
        assert again.fingerprint == first.fingerprint
        assert equal(again, first)
    assert capsys.readouterr().out == ""
    assert (tmp_path / "one/tokenizer.json").read_bytes() == (tmp_path / "two/tokenizer.json").read_bytes()
    arrays = next((tmp_path / "cache" / "data").iterdir())
    content = (arrays / "train.tokens.npy").read_bytes()
    (arrays / "train.tokens.npy").unlink()  # not overwritten in place, because `first` still maps it
    (arrays / "train.tokens.npy").write_bytes(content[:1000])
    repaired = load(config, tmp_path / "one")
    assert "is damaged; rebuilding it" in capsys.readouterr().out
    assert equal(repaired, first)


def test_the_fingerprint_is_of_all_that_matters(config: ConfigDict, tmp_path: Path) -> None:
    write_csv(tmp_path / "other.csv", reviews(401))
    changes = [
        {},
        {"data.train": str(tmp_path / "other.csv")},
        {"data.text_columns": ("id",)},
        {"data.max_length": 16},
        {"data.length_buckets": (8, 16)},
        {"data.test_fraction": 0.2},
        {"data.validation_fraction": 0.2},
        {"data.vocab_size": 200},
        {"task": "masked_lm"},
        {"task": "masked_lm", "data.mask_fraction": 0.3},
    ]
    seen = set()
    for i, change in enumerate(changes):
        changed = config.copy_and_resolve_references()
        changed.update_from_flattened_dict(change)
        seen.add(load(changed, tmp_path / str(i)).fingerprint)
    assert len(seen) == len(changes)
    config.data.prefetch, config.data.num_threads, config.batch_size = 3, 2, 7
    assert load(config, tmp_path / "again").fingerprint in seen


def test_the_tokenizer_sees_the_training_split_only(config: ConfigDict, tmp_path: Path) -> None:
    write_csv(tmp_path / "test.csv", [{"id": "0", "text": "Ж", "label": "pos"}])
    config.data.test = str(tmp_path / "test.csv")
    load(config, tmp_path / "run")
    vocab = Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json")).get_vocab()
    assert "ж" not in vocab
    assert "f" in vocab


def test_a_named_tokenizer(config: ConfigDict, tmp_path: Path) -> None:
    hub = tmp_path / "bert"
    hub.mkdir()
    words = [*tokenizer.WORDPIECE_SPECIALS, "good", "film", "##s", "plot", "of", "it"]
    (hub / "vocab.txt").write_text("\n".join(words), "utf-8")
    config.model.init_from = str(hub)
    dataset = load(config, tmp_path / "run")
    assert dataset.info.vocab_size == len(words)
    saved = tmp_path / "run" / "tokenizer.json"
    config.model.init_from = ""
    config.data.tokenizer = str(saved)
    assert equal(load(config, tmp_path / "other"), dataset)
    config.data.tokenizer = str(hub / "vocab.txt")
    assert equal(load(config, tmp_path / "run"), dataset)
    (hub / "vocab.txt").write_text("\n".join([*words, "more"]), "utf-8")
    with pytest.raises(UserError, match=r"tokenizer.json differs from .*vocab.txt, so this workdir belongs to another"):
        load(config, tmp_path / "run")
    config.data.tokenizer, config.data.vocab_size = "", 200
    saved.write_text(tokenizer.train_tokenizer(lambda: iter(POEM.split("\n")), 300, byte_level=True).to_str())
    message = r"config.data.vocab_size is 200; it must be at least 300, the number of tokens in .*run/tokenizer.json"
    with pytest.raises(UserError, match=message):
        load(config, tmp_path / "run")


def test_a_tokenizer_without_the_tokens_that_the_task_needs(config: ConfigDict, tmp_path: Path) -> None:
    made = tokenizer.train_tokenizer(lambda: iter(POEM.split("\n")), 300, byte_level=True)
    path = tmp_path / "tokenizer.json"
    path.write_text(made.to_str())
    config.data.tokenizer = str(path)
    assert load(config, tmp_path / "run").info.pad_id == made.token_to_id("<|endoftext|>")
    config.task = "masked_lm"
    with pytest.raises(UserError, match=r"tokenizer.json has no token for masking; it must contain \[MASK\] or <mask>"):
        load(config, tmp_path / "run2")
    path.write_text(made.to_str().replace("<|endoftext|>", "<|finis|>"))
    config.task = "classification"
    with pytest.raises(UserError, match=r"tokenizer.json has no token for padding; it must contain \[PAD\] or"):
        load(config, tmp_path / "run3")
    config.task = "causal_lm"
    with pytest.raises(UserError, match=r"tokenizer.json has no token for the end of a text"):
        load(config, tmp_path / "run4")
    assert not any((tmp_path / f"run{i}").exists() for i in (2, 3, 4))


def test_a_tokenizer_without_marks_around_a_text(config: ConfigDict, tmp_path: Path) -> None:
    made = tokenizer.train_tokenizer(lambda: iter(POEM.split("\n")), 300, byte_level=False)
    unmarked = json.loads(made.to_str()) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unmarked))
    (tmp_path / "poem.txt").write_text(POEM)
    config.task, config.data.source, config.data.train = "masked_lm", "text", str(tmp_path / "poem.txt")
    config.data.tokenizer = str(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer.json does not add one token before and one after a text"):
        load(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [("text", "train", "the train split has only special tokens, such as"), ("csv", "test", "the test split has only")],
)
def test_a_split_that_cannot_be_masked(
    source: str, name: str, message: str, config: ConfigDict, tmp_path: Path
) -> None:
    """Words of more than 100 characters are not in a trained vocabulary, so their only token is [UNK]."""
    path = tmp_path / f"long.{source}"
    path.write_text("a" * 5000 + "\n" if source == "text" else f"text\n{'a' * 5000}\n")
    config.task, config.data.source, config.data[name] = "masked_lm", source, str(path)
    config.data.validation_fraction = config.data.test_fraction = 0.0
    with pytest.raises(UserError, match=message):
        load(config, tmp_path / "run")


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm"])
def test_plain_text(task: str, config: ConfigDict, tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_text(POEM)
    config.task, config.data.source, config.data.train = task, "text", str(path)
    dataset = load(config, tmp_path / "run")
    made = Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json"))
    assert dataset.info == DataInfo("text", (32,), 0, (), made.get_vocab_size(), 0)
    texts = [decoded(split, made, task) for split in (dataset.train, dataset.validation, dataset.test)]
    starts = [0, round(0.85 * len(POEM)), round(0.9 * len(POEM))]
    for start, text in zip(starts, texts, strict=True):
        begin = 0 if start == 0 else POEM.index("\n", start - 1) + 1
        expected = POEM[begin:] if task == "causal_lm" else " ".join(POEM[begin:].split())
        assert len(text) > 200
        assert expected.startswith(text.removesuffix("<|endoftext|>"))


def decoded(split: Split | None, made: Tokenizer, task: str) -> str:
    """Return the text of all examples of a language model, concatenated in order."""
    batch = all_examples(split)
    if task == "causal_lm":
        tokens = np.concatenate([batch["inputs"], batch["labels"][:, -1:]], axis=1)
        assert batch["inputs"].shape[1] == 32
        assert np.array_equal(batch["inputs"][:, 1:], batch["labels"][:, :-1])
        return made.decode(tokens.ravel().tolist(), skip_special_tokens=False)
    # The last example of the stream can be shorter; in order of length it comes first.
    full = [row for row in range(len(batch["mask"])) if batch["mask"][row].all()]
    assert len(full) >= len(batch["mask"]) - 1
    return made.decode([token for row in full for token in batch["labels"][row, 1:-1]])


def test_causal_lm_on_a_table_keeps_rows_apart(config: ConfigDict, tmp_path: Path) -> None:
    config.task = "causal_lm"
    dataset = load(config, tmp_path / "run")
    made = Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json"))
    texts = set(decoded(dataset.train, made, "causal_lm").split("<|endoftext|>")[1:-1])
    assert texts <= {record["text"] for record in reviews(400)}
    held_out = set(decoded(dataset.test, made, "causal_lm").split("<|endoftext|>")[1:-1])
    assert len(held_out) > 5
    assert not texts & held_out


def test_two_text_columns(config: ConfigDict, tmp_path: Path) -> None:
    config.data.text_columns = ("id", "text")
    dataset = load(config, tmp_path / "run")
    made = Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json"))
    made.enable_truncation(32)
    expected = {}
    for record in reviews(400):
        encoding = made.encode(record["id"], record["text"])
        expected[tuple(encoding.ids)] = encoding.type_ids
    batch = all_examples(dataset.train)
    for tokens_T, mask_T, segments_T in zip(batch["inputs"], batch["mask"], batch["segments"], strict=True):
        assert segments_T[mask_T].tolist() == expected[tuple(tokens_T[mask_T].tolist())]
        assert not segments_T[~mask_T].any()


def test_splits_that_come_out_empty(config: ConfigDict, tmp_path: Path) -> None:
    write_csv(tmp_path / "few.csv", reviews(6))
    config.data.train = str(tmp_path / "few.csv")
    config.data.validation_fraction = 0.001
    with pytest.raises(
        UserError,
        match=r"data.validation_fraction is too small; it must be 0, or leave examples for the validation split",
    ):
        load(config, tmp_path / "run")
    config.data.validation_fraction = config.data.test_fraction = 0.0
    dataset = load(config, tmp_path / "run")
    assert (len(dataset.train), dataset.validation, dataset.test) == (6, None, None)
    (tmp_path / "a.txt").write_text("few words\n")
    config.task, config.data.source, config.data.train = "causal_lm", "text", str(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"config.data.train is too short; it must yield one or more blocks"):
        load(config, tmp_path / "run2")


def test_rows_without_a_label_or_a_text(config: ConfigDict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their numbers are printed whether the data is tokenized or comes from the cache."""
    records = reviews(60)
    records[3]["label"] = records[4]["label"] = ""
    records[7]["text"] = " "
    write_csv(tmp_path / "a.csv", records)
    config.data.source, config.data.train, config.data.drop_unlabelled = "csv", str(tmp_path / "a.csv"), True
    config.data.validation_fraction = config.data.test_fraction = 0.0
    for name in ("run", "again"):
        assert len(load(config, tmp_path / name).train) == 58
        out = capsys.readouterr().out
        assert "rows      2 of 60 dropped, because they have no label\nrows      1 of 60 with empty text\n" in out
    write_csv(tmp_path / "b.csv", [{**record, "text": ""} for record in records])
    config.data.train = str(tmp_path / "b.csv")
    with pytest.raises(UserError, match=r"data.text_columns is \('text',\), which is empty in all rows; it must"):
        load(config, tmp_path / "empty")


def test_a_missing_column_is_found_before_a_tokenizer_is_trained(config: ConfigDict, tmp_path: Path) -> None:
    write_csv(tmp_path / "test.csv", [{"text": "good", "lable": "pos"}])
    config.data.test = str(tmp_path / "test.csv")
    with pytest.raises(UserError, match=r"test.csv:1 has no column 'label'.* Did you mean 'lable'\?"):
        load(config, tmp_path / "run")
    assert not Path(config.cache_dir).exists()


def test_one_class_only(config: ConfigDict, tmp_path: Path) -> None:
    write_csv(tmp_path / "one.csv", [{**record, "label": "pos"} for record in reviews(100)])
    config.data.train = str(tmp_path / "one.csv")
    with pytest.raises(
        UserError, match=r"config.data.train is '.*', whose only class is 'pos'; it must have at least two classes"
    ):
        load(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_class_that_training_lacks(config: ConfigDict, tmp_path: Path) -> None:
    fractions = config.data.validation_fraction, config.data.test_fraction
    texts = (f"text {i}" for i in itertools.count())
    rare = next(text for text in texts if split_of((text,), *fractions) == "test")
    write_csv(tmp_path / "rare.csv", [*reviews(200), {"id": "200", "text": rare, "label": "odd"}])
    config.data.train = str(tmp_path / "rare.csv")
    message = r"is '.*rare.csv', whose label 'odd' is so rare that the split by hash puts it only into test; remove the"
    with pytest.raises(UserError, match=message):
        load(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_workdir_that_cannot_be_written(config: ConfigDict, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"--workdir is '.*file/run', which is inside a file; it must be a writable directory$"
    ):
        load(config, tmp_path / "file" / "run")
