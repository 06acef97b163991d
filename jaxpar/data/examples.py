"""A data set as arrays: its splits, labels and properties, and how shards of a batch are gathered.

Random numbers (for masking and augmentation) are drawn for the whole global batch and then cut to the requested
shard, so that a shard equals the same examples of the global batch.

Dims: N examples of the split, M tokens, B examples of the global batch, R examples of a shard, T positions,
K tokens of a block, H W C image height, width and channels, D features, V vocabulary.
"""

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from ml_collections import ConfigDict

from jaxpar.errors import UserError
from jaxpar.files import parse_json, regular, write_text

Arrays = dict[str, np.ndarray]


class Split(Protocol):
    """The examples of one split."""

    @property
    def lengths_N(self) -> np.ndarray | None:
        """Number of tokens of each example, or None if all examples have the same size."""

    def __len__(self) -> int:
        """Number of examples, N."""

    def gather(self, examples_B: np.ndarray, shard: slice, random: np.random.Generator, *, training: bool) -> Arrays:
        """Return a shard of the global batch of these examples: all keys except index (see jaxpar.data)."""


class Labels(Enum):
    """A kind of labels, shared by one or more tasks. The value, the first task's name, is used in fingerprints."""

    CLASSES = "classification"  # int32 [B]: the class of each example, from the label column
    MASKED = "masked_lm"  # int32 [B, T]: the input tokens before masking
    TARGETS = "regression"  # float32 [B, K]: the numbers of each example, from the target columns
    TAGS = "token_classification"  # int32 [B, T]: the tag of each word at its first token, from the label column
    NEXT = "causal_lm"  # int32 [B, T]: the next token at each position

    @property
    def in_columns(self) -> bool:
        """Whether the labels are columns of a table; otherwise they are derived from the text."""
        return self not in (Labels.MASKED, Labels.NEXT)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The kinds of data (see `DataInfo.kind`) that can have these labels."""
        return {Labels.CLASSES: ("text", "image", "vector"), Labels.TARGETS: ("text", "vector")}.get(self, ("text",))


class DataInfo(NamedTuple):
    """The properties of a data set that a model depends on."""

    kind: str  # text, image or vector
    input_shape: tuple[int, ...]  # of one example; for text, (longest padded length,)
    num_classes: int  # 0 for language models and regression
    class_names: tuple[str, ...]  # by class index
    vocab_size: int  # number of tokens; 0 unless kind is text
    pad_id: int  # token of padding
    targets: tuple[str, ...] = ()  # names of the regression targets; empty for other labels

    @property
    def num_outputs(self) -> int:
        """Number of model outputs for each example or word, unless the outputs are logits over the vocabulary."""
        return len(self.targets) or self.num_classes


def write_info(workdir: Path, info: DataInfo) -> None:
    """Write the properties of a data set to workdir/data.json."""
    write_text(workdir / "data.json", json.dumps(info._asdict(), indent=1) + "\n")


def read_info(workdir: Path) -> DataInfo:
    """Return the properties that `write_info` wrote. Raises UserError if the file is missing or damaged."""
    path = workdir / "data.json"
    try:
        values = parse_json(regular(path).read_text())
        if not isinstance(values, dict):
            raise TypeError(f"it contains {values!r:.40}")
        fields: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        info = DataInfo(**fields)
        for name, value in info._asdict().items():
            is_tuple = name in ("input_shape", "class_names", "targets")
            kind = str if name in ("kind", "class_names", "targets") else int
            items = value if is_tuple else [value]
            if isinstance(value, tuple) != is_tuple or any(type(item) is not kind for item in items):
                raise TypeError(f"{name} is {value!r:.40}")
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        why = "is damaged (it is not UTF-8)"
    except (ValueError, KeyError, TypeError) as error:
        why = f"is damaged ({error!r:.200})"
    else:
        return info
    raise UserError(f"{path} {why}; it must be the file that the run wrote")


class Dataset(NamedTuple):
    """The splits of a data set."""

    info: DataInfo
    train: Split
    validation: Split | None
    test: Split | None
    fingerprint: str  # of everything that determines the batches except the seed, the batch size and class weights


@dataclass(frozen=True)
class Masking:
    """BERT masking (Devlin et al. 2019, section 3.1).

    Of the positions to predict, 80% are replaced by `mask_id`, 10% by a random regular token, and 10% are unchanged.
    """

    fraction: float  # fraction of the regular tokens of a text to predict; at least one token
    mask_id: int
    is_special_V: np.ndarray  # bool; special tokens are never masked and never drawn as replacements

    def __call__(
        self, tokens_RT: np.ndarray, real_RT: np.ndarray, draws_3RT: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the masked tokens, and the positions to predict, bool. draws_3RT: random numbers in [0, 1)."""
        maskable_RT = real_RT & ~self.is_special_V[tokens_RT]
        count_R = maskable_RT.sum(1)
        wanted_R = np.minimum(np.maximum(np.rint(self.fraction * count_R), 1), count_R).astype(np.int64)
        # Choose the maskable positions with the wanted_R smallest draws: an exact count, uniform over all choices.
        score_RT = np.where(maskable_RT, draws_3RT[0], 2.0)
        order_RT = score_RT.argsort(1, kind="stable").argsort(1, kind="stable")
        chosen_RT = order_RT < wanted_R[:, None]
        regular = np.flatnonzero(~self.is_special_V)
        random_RT = regular[(draws_3RT[2] * len(regular)).astype(np.int64)]
        replaced_RT = np.where(draws_3RT[1] < 0.8, self.mask_id, np.where(draws_3RT[1] < 0.9, random_RT, tokens_RT))
        return np.where(chosen_RT, replaced_RT, tokens_RT).astype(np.int32), chosen_RT


@dataclass(frozen=True)
class Texts:
    """Texts of different lengths, padded to the smallest of the ascending buckets that fits the longest of a batch."""

    tokens_M: np.ndarray
    offsets_N1: np.ndarray  # [N + 1]
    labels_N: np.ndarray | None  # classes [N] or targets [N, K]; None for masked language modelling and tags
    segments_M: np.ndarray | None
    buckets: tuple[int, ...]
    pad_id: int
    masking: Masking | None
    tags_M: np.ndarray | None = None  # class of each word at its first token, -1 elsewhere

    @property
    def lengths_N(self) -> np.ndarray:
        """Number of tokens of each text."""
        return np.diff(self.offsets_N1)

    def __len__(self) -> int:
        return len(self.offsets_N1) - 1

    def gather(self, examples_B: np.ndarray, shard: slice, random: np.random.Generator, *, training: bool) -> Arrays:
        """See Split."""
        lengths_B = self.offsets_N1[examples_B + 1] - self.offsets_N1[examples_B]
        length = next(size for size in self.buckets if size >= lengths_B.max())
        real_RT = np.arange(length) < lengths_B[shard, None]
        at_RT = np.minimum(self.offsets_N1[examples_B[shard], None] + np.arange(length), len(self.tokens_M) - 1)
        tokens_RT = np.where(real_RT, self.tokens_M[at_RT], self.pad_id).astype(np.int32)
        batch = {"inputs": tokens_RT, "mask": real_RT}
        if self.segments_M is not None:
            batch["segments"] = np.where(real_RT, self.segments_M[at_RT], 0).astype(np.int32)
        if self.tags_M is not None:
            tags_RT = np.where(real_RT, self.tags_M[at_RT], -1)
            labels_RT = np.maximum(tags_RT, 0).astype(np.int32)
            return {**batch, "labels": labels_RT, "weights": (tags_RT >= 0).astype(np.float32)}
        if self.masking is None:
            assert self.labels_N is not None
            return {**batch, **_labels(self.labels_N, examples_B[shard])}
        draws_3BT = random.random((3, len(examples_B), length), np.float32)
        masked_RT, chosen_RT = self.masking(tokens_RT, real_RT, draws_3BT[:, shard])
        return {**batch, "inputs": masked_RT, "labels": tokens_RT, "weights": chosen_RT.astype(np.float32)}


@dataclass(frozen=True)
class Blocks:
    """Blocks of a token stream. Inputs are all tokens but the last of a block, labels all tokens but the first."""

    lengths_N: ClassVar[None] = None  # all blocks are full
    blocks_NK: np.ndarray

    def __len__(self) -> int:
        return len(self.blocks_NK)

    def gather(self, examples_B: np.ndarray, shard: slice, random: np.random.Generator, *, training: bool) -> Arrays:
        """See Split."""
        blocks_RK = self.blocks_NK[examples_B[shard]].astype(np.int32)
        inputs_RT, labels_RT = np.ascontiguousarray(blocks_RK[:, :-1]), np.ascontiguousarray(blocks_RK[:, 1:])
        return {"inputs": inputs_RT, "labels": labels_RT, "weights": np.ones(labels_RT.shape, np.float32)}


@dataclass(frozen=True)
class SameSize:
    """Examples of one size: images, uint8, or feature vectors."""

    lengths_N: ClassVar[None] = None
    inputs_N: np.ndarray  # [N, H, W, C] or [N, D]
    labels_N: np.ndarray
    # Whether training shifts images by up to 4 pixels, and flips them left to right (He et al. 2016, section 4.2)
    shift: bool = False
    flip: bool = False

    def __len__(self) -> int:
        return len(self.labels_N)

    def gather(self, examples_B: np.ndarray, shard: slice, random: np.random.Generator, *, training: bool) -> Arrays:
        """See Split."""
        inputs_R = self.inputs_N[examples_B[shard]]
        if training:
            draws_R3 = random.integers(0, (9, 9, 2), (len(examples_B), 3))[shard]
            if self.shift:
                # Pad with 4 black pixels on every side, and crop at an offset of 0 to 8; at 4, an image is unchanged.
                height, width = inputs_R.shape[1:3]
                padded = np.pad(inputs_R, ((0, 0), (4, 4), (4, 4), (0, 0)))
                y_RH11 = (draws_R3[:, :1] + np.arange(height))[:, :, None]
                x_R1W = (draws_R3[:, 1:2] + np.arange(width))[:, None, :]
                inputs_R = padded[np.arange(len(inputs_R))[:, None, None], y_RH11, x_R1W]
            if self.flip:
                inputs_R = np.where(draws_R3[:, 2, None, None, None] == 1, inputs_R[:, :, ::-1], inputs_R)
        return {"inputs": inputs_R, **_labels(self.labels_N, examples_B[shard])}


def buckets_of(config: ConfigDict) -> tuple[int, ...]:
    """Return the padded lengths: the values of length_buckets below max_length, and max_length."""
    longest = config.data.max_length
    return (*(length for length in config.data.length_buckets if length < longest), longest)


def _labels(labels_N: np.ndarray, examples_R: np.ndarray) -> Arrays:
    """Return the labels of the examples, int32 classes or float32 targets, and their weights."""
    dtype = np.float32 if labels_N.dtype.kind == "f" else np.int32
    return {"labels": labels_N[examples_R].astype(dtype), "weights": np.ones(len(examples_R), np.float32)}
