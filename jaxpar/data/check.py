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
    check_choice("data.source", config.data.source, SOURCES)
    _check_labels(config, labels)
    if labels is Labels.TARGETS:
        _check_targets(config)
    check_class_weights(config, labels)
    _check_numbers(config)
    _check_lengths(config)
    _check_fractions(config)
    _check_files(config)
    if _is_text(config):
        _check_text(config, labels)
    _check_sizes(config)


def _is_text(config: ConfigDict) -> bool:
    source = config.data.source
    return source not in images.IMAGE_READERS and (source != "synthetic" or synthetic.kind(config) == "text")


def _check_labels(config: ConfigDict, labels: Labels) -> None:
    source = config.data.source
    if labels.in_columns and source == "text":
        unlabelled = " or ".join(other.value for other in Labels if not other.in_columns)
        raise UserError(f"config.data.source is 'text', which has no labels; config.task must be {unlabelled}")
    is_image = source in images.IMAGE_READERS
    kind = "text" if _is_text(config) else "image" if is_image else synthetic.kind(config)
    if kind not in labels.inputs:
        what = source if is_image else f"{source} data for the model {config.model.name}"
        possible, needed = " or ".join(other.value for other in Labels if kind in other.inputs), labels.inputs
        raise UserError(
            f"config.task is {config.task!r}, which needs {' or '.join(needed)}; with {what} it must be {possible}"
        )
    if source not in LABEL_SOURCES.get(labels, SOURCES):
        raise UserError(
            f"config.data.source is {source!r}; for task {config.task} it must be one of "
            f"{', '.join(LABEL_SOURCES[labels])}"
        )


def _check_numbers(config: ConfigDict) -> None:
    data = config.data
    least = {"num_threads": 0, "prefetch": 1, "synthetic_examples": 2}
    for key, bound in least.items():
        if data[key] < bound:
            raise UserError(f"config.data.{key} is {data[key]}; it must be at least {bound}")
    most = {"num_threads": 1000, "prefetch": 1_000_000, "vocab_size": 10_000_000}
    for key, bound in most.items():
        if data[key] > bound:
            raise UserError(f"config.data.{key} is {data[key]}; it must be at most {bound:,}")


def _check_sizes(config: ConfigDict) -> None:
    """Check sizes whose arrays would exceed the indices of JAX or the host memory."""
    data = config.data
    length = data.max_length if _is_text(config) else 1
    for key, size in (("batch_size", config.batch_size), ("eval.batch_size", config.eval.batch_size)):
        if size * length > MAX_POSITIONS:
            texts = f" and config.data.max_length is {length}, which is {size * length:,} tokens" * (length > 1)
            raise UserError(f"config.{key} is {size}{texts}; a batch must have at most {MAX_POSITIONS:,}")
    if data.source == "synthetic":
        texts = f" and config.data.max_length is {length}" * (length > 1)
        needed = data.synthetic_examples * synthetic.bytes_per_example(config)
        check_host_memory(f"config.data.synthetic_examples is {data.synthetic_examples}{texts}", needed)


def _check_fractions(config: ConfigDict) -> None:
    data = config.data
    for key in ("validation_fraction", "test_fraction"):
        if not 0 <= data[key] < 1:
            raise UserError(f"config.data.{key} is {data[key]}; it must be at least 0 and less than 1")
    if data.validation_fraction + data.test_fraction >= 1:
        total = f"{data.validation_fraction} + {data.test_fraction}"
        raise UserError(
            f"config.data.validation_fraction + test_fraction is {total}; it must be less than 1 (the remainder is the "
            "training split)"
        )


def _check_files(config: ConfigDict) -> None:
    data = config.data
    if data.source in ("wordnet", "synthetic"):
        for key in ("train", "validation", "test"):
            if data[key]:
                raise UserError(
                    f"config.data.{key} is {data[key]!r}; it must be empty when config.data.source is {data.source!r}"
                )
        return
    if not data.train:
        raise UserError(f"config.data.train is empty; it must be a path when config.data.source is {data.source!r}")
    if data.source in images.IMAGE_READERS:
        if not Path(data.train).expanduser().is_dir():
            raise UserError(
                f"config.data.train is {data.train!r}; it must be the directory that contains the {data.source} files"
            )
        for key in ("validation", "test"):
            if data[key]:
                raise UserError(
                    f"config.data.{key} is {data[key]!r}; it must be empty, because {data.source} has its own test file"
                )
        return
    for key in ("train", "validation", "test"):
        for path in files.find_files(f"data.{key}", data[key]) if data[key] else ():
            _check_suffix(key, path, data.source)


def _check_suffix(key: str, path: Path, source: str) -> None:
    suffixes = [suffix.removeprefix(".") for suffix in path.suffixes if suffix not in (".gz", ".xz")]
    kind = suffixes[-1].lower() if suffixes else ""
    if kind in TABLES and kind != source:
        raise UserError(
            f"config.data.{key} is {str(path)!r}, which has the extension of a {kind} file; it must be a {source} "
            f"file, because config.data.source is {source!r}"
        )
    if source == "parquet" and kind != "parquet":
        raise UserError(
            f"config.data.{key} is {str(path)!r}; it must end in .parquet, because config.data.source is 'parquet'"
        )


def _check_lengths(config: ConfigDict) -> None:
    """Check the keys of texts, whatever the data is."""
    data = config.data
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


def _check_text(config: ConfigDict, labels: Labels) -> None:
    data = config.data
    least = 1 if labels is Labels.NEXT else 8
    if data.max_length < least:
        raise UserError(f"config.data.max_length is {data.max_length}; for {config.task} it must be at least {least}")
    longest = config.model.max_length
    if longest is not None and longest < least:
        raise UserError(f"config.model.max_length is {longest}; for {config.task} it must be at least {least}")
    if longest is not None and data.max_length > longest:
        raise UserError(
            f"config.data.max_length is {data.max_length}; it must be at most config.model.max_length ({longest})"
        )
    _check_columns(config, labels)
    if config.data.source != "synthetic":
        text.named_tokenizer(config)


def _check_columns(config: ConfigDict, labels: Labels) -> None:
    columns = tuple(config.data.text_columns)
    if len(columns) not in (1, 2) or len(set(columns)) < len(columns) or not all(columns):
        raise UserError(f"config.data.text_columns is {columns}; it must name one column or two different columns")
    if labels in (Labels.NEXT, Labels.TAGS) and len(columns) == 2:
        raise UserError(f"config.data.text_columns is {columns}; it must name one column for task {config.task}")
    if len(columns) == 2 and config.data.source in ("wordnet", "text", "synthetic"):
        raise UserError(
            f"config.data.text_columns is {columns}; it must name one column for source {config.data.source!r}"
        )
    has_label = labels in (Labels.CLASSES, Labels.TAGS)
    if has_label and config.data.label_column in columns:
        raise UserError(
            f"config.data.label_column is {config.data.label_column!r}; it must not be one of text_columns {columns}"
        )
    if has_label and not config.data.label_column:
        raise UserError(f"config.data.label_column is empty; it must name the label column for task {config.task}")


def _check_targets(config: ConfigDict) -> None:
    targets, columns = tuple(config.data.target_columns), tuple(config.data.text_columns)
    if not targets or len(set(targets)) < len(targets) or not all(targets):
        raise UserError(f"config.data.target_columns is {targets}; it must name at least one column, each once")
    if set(targets) & set(columns):
        raise UserError(f"config.data.target_columns is {targets}; it must not contain any of text_columns {columns}")
