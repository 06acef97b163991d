"""Loads text data sets: reads the rows, finds or trains the tokenizer, and builds the token arrays."""

import hashlib
import uuid
from collections import Counter
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict
from tokenizers import Tokenizer

from jaxpar.data import cache, files, tokenizer, tokens
from jaxpar.data.cache import Facts
from jaxpar.data.corpus import Corpus
from jaxpar.data.examples import Blocks, DataInfo, Dataset, Labels, Masking, Split, Texts, buckets_of
from jaxpar.errors import UserError
from jaxpar.files import file_of, unusable

# Versions of the cached arrays. Increase a version whenever the code produces different arrays from the same input.
_FORMAT = 1
_FORMAT_OF_TAGS = 2
_FORMAT_OF_TOKENIZERS = 2
CHUNK = 2**20  # tokens that are examined at a time


def load(config: ConfigDict, labels: Labels, workdir: Path) -> Dataset:
    """Load the data set of a text source, and save its tokenizer as workdir/tokenizer.json."""
    corpus = Corpus(config, labels)
    corpus.check_columns()
    facts = corpus.facts()
    path, serialized = _tokenizer(config, labels, workdir, corpus, facts)
    made = Tokenizer.from_str(serialized)
    array_format = _FORMAT_OF_TAGS if labels is Labels.TAGS else _FORMAT
    facts |= {"format": array_format, "task": labels.value, "max_length": config.data.max_length}
    facts["tokenizer"] = hashlib.sha256(serialized.encode()).hexdigest()
    pad_id = 0 if labels is Labels.NEXT else tokenizer.special(made, tokenizer.PADDING, "padding", path)
    masking = _masking(config, labels, made, path)
    source = config.data.train or config.data.source
    entry = cache.entry(
        cache.cache_dir(config) / "data",
        cache.fingerprint(facts),
        lambda directory: _write(directory, config, labels, corpus, made, path),
        doing=f"Tokenizing {source}",
    )
    _check_entry(config, labels, corpus, entry)
    classes = tuple(entry.facts["classes"]) if labels in (Labels.CLASSES, Labels.TAGS) else ()
    if len(classes) == 1:
        what, rule = f"whose only class is {classes[0]!r}", "have at least two classes"
        if labels is Labels.TAGS:
            what, rule = "in which all tags are 'O'", "contain entities"
        raise UserError(f"config.data.train is {config.data.train!r}, {what}; it must {rule}")
    if classes:
        _check_labels(entry, labels, classes, config.data.train)
    _check_maskable(entry, masking)
    if not (workdir / "tokenizer.json").exists():
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            temporary = workdir / f".tokenizer.{uuid.uuid4().hex}"  # several processes can write it
            temporary.write_text(serialized, "utf-8")
            temporary.replace(workdir / "tokenizer.json")
        except OSError as error:
            raise unusable(workdir, error) from None
    targets = tuple(config.data.target_columns) if labels is Labels.TARGETS else ()
    size = tokenizer.vocab_size(made)
    info = DataInfo("text", (config.data.max_length,), len(classes), classes, size, pad_id, targets)
    facts |= {"buckets": buckets_of(config), "mask_fraction": config.data.mask_fraction}
    splits = {
        name: _split(config, labels, entry, name, pad_id, masking) if count else None
        for name, count in entry.facts["examples"].items()
    }
    assert splits["train"] is not None
    return Dataset(info, splits["train"], splits["validation"], splits["test"], cache.fingerprint(facts))


def load_split(
    config: ConfigDict, labels: Labels, info: DataInfo, serialized: str, workdir: Path, directory: Path
) -> Split:
    """Load the file config.data.test of another data set as a split, with the tokenizer and classes of a run.

    config, info, serialized (the tokenizer) and workdir (for error messages) are those of the run, except for
    config.data.test and config.data.source. directory: empty directory for the token arrays, which the split reads.

    Raises UserError if the file is invalid, or has labels that the training data lacks.
    """
    made, path = Tokenizer.from_str(serialized), workdir / "tokenizer.json"
    corpus = Corpus(config, labels, only="test")
    corpus.check_columns()
    entry = cache.Entry(directory, _write(directory, config, labels, corpus, made, path))
    _check_entry(config, labels, corpus, entry)
    if labels in (Labels.CLASSES, Labels.TAGS):
        name, classes = "labels" if labels is Labels.CLASSES else "tags", entry.facts["classes"]
        if unseen := [label for label in classes if label not in info.class_names]:
            known = ", ".join(map(repr, info.class_names[:5]))
            why = f"which the training data of {workdir} lacks; it must have labels such as {known}"
            raise UserError(f"{config.data.test} has the label {unseen[0]!r}, {why}")
        number_C = np.array([*map(info.class_names.index, classes), -1], np.int32)  # index -1 maps to -1
        np.save(directory / f"test.{name}.npy", number_C[entry.array(f"test.{name}")])
    masking = _masking(config, labels, made, path)
    _check_maskable(entry, masking)
    return _split(config, labels, entry, "test", info.pad_id, masking)


def _check_entry(config: ConfigDict, labels: Labels, corpus: Corpus, entry: cache.Entry) -> None:
    """Print how many rows were dropped or are empty. Raises UserError if no row has a text, or a split no examples."""
    rows: Counter[str] = Counter(entry.facts.get("rows", {}))  # entries of earlier versions lack it
    if rows["empty"] and rows["empty"] == rows["rows"] - rows["unlabelled"]:
        columns = tuple(config.data.text_columns)
        raise UserError(f"config.data.text_columns is {columns}, which is empty in all rows; it must contain texts")
    for name, what in (("unlabelled", "dropped, because they have no label"), ("empty", "with empty text")):
        if rows[name]:
            print(f"rows      {rows[name]:,} of {rows['rows']:,} {what}", flush=True)
    corpus.check_sizes(entry.facts["examples"], "blocks" if labels is Labels.NEXT else "examples")


def _check_labels(entry: cache.Entry, labels: Labels, classes: tuple[str, ...], path: str) -> None:
    """Raise UserError for a class or entity type that occurs in validation or test, but not in training."""

    def labels_in(name: str) -> np.ndarray:
        """Return the class indices in a split; for tags, the index of B-TYPE for every entity type."""
        if labels is Labels.CLASSES:
            return np.unique(entry.array(f"{name}.labels"))
        tags = np.unique(entry.array(f"{name}.tags"))
        return np.unique((tags[tags > 0] - 1) // 2 * 2 + 1)

    trained = labels_in("train")
    for name in ("validation", "test"):
        unseen = np.setdiff1d(labels_in(name), trained)
        if len(unseen):
            label = repr(classes[unseen[0]])
            raise UserError(
                f"config.data.train is {path!r}, whose label {label} is so rare that the split by hash puts it only "
                f"into {name}; remove the label, or set config.data.validation and config.data.test"
            )


def _check_maskable(entry: cache.Entry, masking: Masking | None) -> None:
    """Raise UserError for a split without a token to predict: its loss would be 0."""
    for name, count in entry.facts["examples"].items():
        if masking is None or not count:
            continue
        tokens_M = entry.array(f"{name}.tokens")
        chunks = (tokens_M[start : start + CHUNK] for start in range(0, len(tokens_M), CHUNK))
        if all(masking.is_special_V[chunk].all() for chunk in chunks):
            raise UserError(
                f"the {name} split has only special tokens, such as [UNK], none of which can be masked; it must have "
                "other tokens (a tokenizer that the run trains has none for words of more than "
                f"{tokenizer.MAX_CHARACTERS} characters)"
            )


def _masking(config: ConfigDict, labels: Labels, made: Tokenizer, path: Path) -> Masking | None:
    if labels is not Labels.MASKED:
        return None
    mask_id = tokenizer.special(made, tokenizer.MASK, "masking", path)
    return Masking(config.data.mask_fraction, mask_id, tokenizer.specials_V(made))


def _split(
    config: ConfigDict, labels: Labels, entry: cache.Entry, name: str, pad_id: int, masking: Masking | None
) -> Split:
    if labels is Labels.NEXT:
        return Blocks(entry.array(f"{name}.blocks"))
    files = {Labels.CLASSES: "labels", Labels.TARGETS: "targets"}
    labels_N = entry.array(f"{name}.{files[labels]}") if labels in files else None
    tags_M = entry.array(f"{name}.tags") if labels is Labels.TAGS else None
    segments_M = entry.array(f"{name}.segments") if len(config.data.text_columns) == 2 else None
    tokens_M, offsets_N1 = entry.array(f"{name}.tokens"), entry.array(f"{name}.offsets")
    return Texts(tokens_M, offsets_N1, labels_N, segments_M, buckets_of(config), pad_id, masking, tags_M)


def _write(directory: Path, config: ConfigDict, labels: Labels, corpus: Corpus, made: Tokenizer, path: Path) -> Facts:
    """Write the arrays of a cache entry, as required by the labels and the source. Returns its metadata."""
    longest = config.data.max_length
    if labels is Labels.NEXT:
        end = tokenizer.special(made, tokenizer.END_OF_TEXT, "the end of a text", path)
        facts = tokens.write_blocks(directory, corpus.rows(), made, longest, end)
    elif config.data.source == "text":
        ends = made.encode("").ids
        if len(ends) != 2:
            raise UserError(
                f"{path} does not add one token before and one after a text (such as [CLS] and [SEP]), which task "
                f"{config.task} needs"
            )
        facts = tokens.write_packed(directory, corpus.rows(), made, longest, (ends[0], ends[1]))
    else:
        unknown = tokenizer.unknown_token(made, path) if labels is Labels.TAGS else None
        facts = tokens.write_examples(directory, corpus.rows(), made, longest, unknown)
    return {**facts, "rows": dict(corpus.counts)}


def _tokenizer(config: ConfigDict, labels: Labels, workdir: Path, corpus: Corpus, facts: Facts) -> tuple[Path, str]:
    """Return the path of the tokenizer, for messages, and the tokenizer as JSON.

    The tokenizer is the one that the config names, or else the one in the workdir, or else a newly trained one.
    """
    saved, named = workdir / "tokenizer.json", named_tokenizer(config)
    if named is not None:
        serialized = tokenizer.read_tokenizer(named)
        if saved.exists() and tokenizer.read_tokenizer(saved) != serialized:
            why = f"differs from {named}, so this workdir belongs to another run; use a new --workdir"
            raise UserError(f"{saved} {why}")
        return named, serialized
    size, byte_level = config.data.vocab_size, labels is Labels.NEXT
    if saved.exists():
        serialized = tokenizer.read_tokenizer(saved)
        num_tokens = tokenizer.vocab_size(Tokenizer.from_str(serialized))
        if num_tokens > size:
            raise UserError(
                f"config.data.vocab_size is {size}; it must be at least {num_tokens}, the number of tokens in {saved}; "
                "to use another tokenizer, use a new --workdir"
            )
        return saved, serialized

    def make(directory: Path) -> Facts:
        trained = tokenizer.train_tokenizer(corpus.training_texts, size, byte_level=byte_level)
        (directory / "tokenizer.json").write_text(trained.to_str(), "utf-8")
        return {}

    name = cache.fingerprint({**facts, "format": _FORMAT_OF_TOKENIZERS, "vocab_size": size, "byte_level": byte_level})
    doing = f"Training a tokenizer of up to {size} tokens"
    trained = cache.entry(cache.cache_dir(config) / "tokenizers", name, make, doing=doing)
    return saved, (trained.directory / "tokenizer.json").read_text("utf-8")


def named_tokenizer(config: ConfigDict) -> Path | None:
    """Return the tokenizer file in config.data.tokenizer, or the one in config.model.init_from, or None."""
    if config.data.tokenizer:
        return files.find_files("data.tokenizer", config.data.tokenizer)[0]
    if not config.model.init_from:
        return None
    directory = Path(config.model.init_from).expanduser()
    for path in (file_of(directory, name) for name in ("tokenizer.json", "vocab.txt")):
        if path.is_file():
            return path
    why = "which contains no tokenizer.json or vocab.txt"
    raise UserError(f"config.model.init_from is {str(directory)!r}, {why}; set config.data.tokenizer")
