"""Validates the data keys of a config and the existence of its files before any data is read."""

from pathlib import Path

from ml_collections import ConfigDict

from jaxpar.data import files, images, rows, synthetic, text
from jaxpar.data.class_weights import check_class_weights
from jaxpar.data.examples import Labels
from jaxpar.errors import UserError, check_choice
from jaxpar.host_memory import check_host_memory

TABLES = tuple(name for name in rows.READERS if name != "text")
SOURCES = ("wordnet", *rows.READERS, *images.IMAGE_READERS, "synthetic")
# Sources that provide each kind of label; every source provides the kinds that are not listed here.
LABEL_SOURCES = {Labels.TARGETS: (*TABLES, "synthetic"), Labels.TAGS: ("jsonl", "parquet", "synthetic")}
MAX_POSITIONS = 2**31 - 1  # tokens, or examples without tokens, of a batch: JAX counts them with int32


def check_data(config: ConfigDict, labels: Labels) -> None:
    """Raise UserError for the first key that is invalid for a task with these labels."""
    source = config.data.source
    check_choice("data.source", source, SOURCES)
    kind = "image" if source in images.IMAGE_READERS else synthetic.kind(config) if source == "synthetic" else "text"
    _check_labels(config, labels, kind)
    check_class_weights(config, labels)
    _check_numbers(config)
    _check_files(config)
    if kind == "text":
        _check_text(config, labels)
    _check_sizes(config, config.data.max_length if kind == "text" else 1)


def _check_labels(config: ConfigDict, labels: Labels, kind: str) -> None:
    source = config.data.source
    if labels.in_columns and source == "text":
        unlabelled = " or ".join(other.value for other in Labels if not other.in_columns)
        raise UserError(f"config.data.source is 'text', which has no labels; config.task must be {unlabelled}")
    if kind not in labels.inputs:
        data = source if source in images.IMAGE_READERS else f"{source} data for the model {config.model.name}"
        needed, possible = labels.inputs, " or ".join(other.value for other in Labels if kind in other.inputs)
        what = f"{config.task!r}, which needs {' or '.join(needed)}"
        raise UserError(f"config.task is {what}; with {data} it must be {possible}")
    if source not in LABEL_SOURCES.get(labels, SOURCES):
        possible = ", ".join(LABEL_SOURCES[labels])
        raise UserError(f"config.data.source is {source!r}; for task {config.task} it must be one of {possible}")
    if labels is Labels.TARGETS:
        targets, columns = tuple(config.data.target_columns), tuple(config.data.text_columns)
        if not targets or len(set(targets)) < len(targets) or not all(targets):
            raise UserError(f"config.data.target_columns is {targets}; it must name at least one column, each once")
        if set(targets) & set(columns):
            raise UserError(
                f"config.data.target_columns is {targets}; it must not contain any of text_columns {columns}"
            )


def _check_numbers(config: ConfigDict) -> None:
    """Check the numbers and the keys of texts, whatever the data is."""
    data = config.data
    for key, bound in (("num_threads", 0), ("prefetch", 1), ("synthetic_examples", 2)):
        if data[key] < bound:
            raise UserError(f"config.data.{key} is {data[key]}; it must be at least {bound}")
    for key, bound in (("num_threads", 1000), ("prefetch", 1_000_000), ("vocab_size", 10_000_000)):
        if data[key] > bound:
            raise UserError(f"config.data.{key} is {data[key]}; it must be at most {bound:,}")
    buckets = tuple(data.length_buckets)
    if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
        raise UserError(f"config.data.length_buckets is {buckets}; it must be at least one length, in ascending order")
    if not 0 < data.mask_fraction < 1:
        raise UserError(f"config.data.mask_fraction is {data.mask_fraction}; it must be between 0 and 1")
    for key, bound in (("max_length", 1), ("vocab_size", 32)):
        if data[key] < bound:
            raise UserError(f"config.data.{key} is {data[key]}; it must be at least {bound}")
    if data.tokenizer:
        text.named_tokenizer(config)
    for key in ("validation_fraction", "test_fraction"):
        if not 0 <= data[key] < 1:
            raise UserError(f"config.data.{key} is {data[key]}; it must be at least 0 and less than 1")
    if data.validation_fraction + data.test_fraction >= 1:
        total = f"{data.validation_fraction} + {data.test_fraction}"
        rest = "(the remainder is the training split)"
        raise UserError(f"config.data.validation_fraction + test_fraction is {total}; it must be less than 1 {rest}")


def _check_files(config: ConfigDict) -> None:
    data, source = config.data, config.data.source
    is_image = source in images.IMAGE_READERS
    if source not in ("wordnet", "synthetic"):
        if not data.train:
            raise UserError(f"config.data.train is empty; it must be a path when config.data.source is {source!r}")
        if is_image and not Path(data.train).expanduser().is_dir():
            contents = f"the {source} files"
            raise UserError(f"config.data.train is {data.train!r}; it must be the directory that contains {contents}")
    for key in ("train", "validation", "test"):
        if not data[key] or (is_image and key == "train"):
            continue
        if source in ("wordnet", "synthetic"):
            when = f"when config.data.source is {source!r}"
            raise UserError(f"config.data.{key} is {data[key]!r}; it must be empty {when}")
        if is_image:
            why = f"because {source} has its own test file"
            raise UserError(f"config.data.{key} is {data[key]!r}; it must be empty, {why}")
        for path in files.find_files(f"data.{key}", data[key]):
            suffixes = [suffix.removeprefix(".") for suffix in path.suffixes if suffix not in (".gz", ".xz")]
            kind = suffixes[-1].lower() if suffixes else ""
            why = f"because config.data.source is {source!r}"
            if kind in TABLES and kind != source:
                what = f"{str(path)!r}, which has the extension of a {kind} file"
                raise UserError(f"config.data.{key} is {what}; it must be a {source} file, {why}")
            if source == "parquet" and kind != "parquet":
                raise UserError(f"config.data.{key} is {str(path)!r}; it must end in .parquet, {why}")


def _check_text(config: ConfigDict, labels: Labels) -> None:
    data = config.data
    least = 1 if labels is Labels.NEXT else 8
    longest = config.model.max_length
    if data.max_length < least:
        raise UserError(f"config.data.max_length is {data.max_length}; for {config.task} it must be at least {least}")
    if longest is not None and longest < least:
        raise UserError(f"config.model.max_length is {longest}; for {config.task} it must be at least {least}")
    if longest is not None and data.max_length > longest:
        most = f"config.model.max_length ({longest})"
        raise UserError(f"config.data.max_length is {data.max_length}; it must be at most {most}")
    columns, label = tuple(data.text_columns), data.label_column
    if len(columns) not in (1, 2) or len(set(columns)) < len(columns) or not all(columns):
        raise UserError(f"config.data.text_columns is {columns}; it must name one column or two different columns")
    if labels in (Labels.NEXT, Labels.TAGS) and len(columns) == 2:
        raise UserError(f"config.data.text_columns is {columns}; it must name one column for task {config.task}")
    if len(columns) == 2 and data.source in ("wordnet", "text", "synthetic"):
        raise UserError(f"config.data.text_columns is {columns}; it must name one column for source {data.source!r}")
    if labels in (Labels.CLASSES, Labels.TAGS):
        if label in columns:
            raise UserError(f"config.data.label_column is {label!r}; it must not be one of text_columns {columns}")
        if not label:
            raise UserError(f"config.data.label_column is empty; it must name the label column for task {config.task}")
    if data.source != "synthetic":
        text.named_tokenizer(config)


def _check_sizes(config: ConfigDict, length: int) -> None:
    """Check sizes whose arrays would exceed the indices of JAX or the host memory. length: tokens of an example."""
    data = config.data
    for key, size in (("batch_size", config.batch_size), ("eval.batch_size", config.eval.batch_size)):
        if size * length > MAX_POSITIONS:
            texts = f" and config.data.max_length is {length}, which is {size * length:,} tokens" * (length > 1)
            raise UserError(f"config.{key} is {size}{texts}; a batch must have at most {MAX_POSITIONS:,}")
    if data.source == "synthetic":
        texts = f" and config.data.max_length is {length}" * (length > 1)
        needed = data.synthetic_examples * synthetic.bytes_per_example(config)
        check_host_memory(f"config.data.synthetic_examples is {data.synthetic_examples}{texts}", needed)
