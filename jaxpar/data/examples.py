"""A data set as arrays: its splits, the properties that a model depends on, and how shards of a batch are gathered.

Random numbers (for masking and augmentation) are drawn for the whole global batch and then cut to the requested
shard, so that a shard equals the same examples of the global batch.

Dims: N examples of the split, M tokens, B examples of the global batch, R examples of a shard, T positions,
K tokens of a block, H W C image height, width and channels, D features, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from jaxpar.data import plan

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


class DataInfo(NamedTuple):
    """The properties of a data set that a model depends on.

    Attributes:
      kind: text, image or vector.
      input_shape: shape of one example; for text, (longest padded length,).
      num_classes: number of classes; 0 for language models and regression.
      class_names: names of the classes, by class index.
      vocab_size: number of tokens; 0 unless kind is text.
      pad_id: token id of padding.
      targets: names of the regression targets; empty for other labels.
    """

    kind: str
    input_shape: tuple[int, ...]
    num_classes: int
    class_names: tuple[str, ...]
    vocab_size: int
    pad_id: int
    targets: tuple[str, ...] = ()

    @property
    def num_outputs(self) -> int:
        """Number of model outputs for each example or word, unless the outputs are logits over the vocabulary."""
        return len(self.targets) or self.num_classes


class Dataset(NamedTuple):
    """The splits of a data set.

    Attributes:
      fingerprint: hash of everything that determines the batches except the seed, the batch size and class weights.
    """

    info: DataInfo
    train: Split
    validation: Split | None
    test: Split | None
    fingerprint: str


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
        """Return the masked tokens, and a bool array that is True at the positions to predict.

        draws_3RT: random numbers, uniform in [0, 1).
        """
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
    """Texts of different lengths, one per example, padded to the smallest bucket that fits the longest of the batch."""

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
        length = plan.bucket(int(lengths_B.max()), self.buckets)
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

    blocks_NK: np.ndarray

    @property
    def lengths_N(self) -> None:
        """None: all blocks are full."""
        return None

    def __len__(self) -> int:
        return len(self.blocks_NK)

    def gather(self, examples_B: np.ndarray, shard: slice, random: np.random.Generator, *, training: bool) -> Arrays:
        """See Split."""
        blocks_RK = self.blocks_NK[examples_B[shard]].astype(np.int32)
        inputs_RT, labels_RT = blocks_RK[:, :-1], blocks_RK[:, 1:]
        weights_RT = np.ones(labels_RT.shape, np.float32)
        return {
            "inputs": np.ascontiguousarray(inputs_RT),
            "labels": np.ascontiguousarray(labels_RT),
            "weights": weights_RT,
        }


@dataclass(frozen=True)
class Images:
    """Images of one size, uint8.

    In training, images are optionally shifted by up to 4 pixels, with black at the border, and flipped left to right
    (He et al. 2016, section 4.2).
    """

    images_NHWC: np.ndarray
    labels_N: np.ndarray
    shift: bool
    flip: bool

    @property
    def lengths_N(self) -> None:
        """None: all images have the same size."""
        return None

    def __len__(self) -> int:
        return len(self.labels_N)

    def gather(self, examples_B: np.ndarray, shard: slice, random: np.random.Generator, *, training: bool) -> Arrays:
        """See Split."""
        images_RHWC = self.images_NHWC[examples_B[shard]]
        if training:
            draws_R3 = random.integers(0, (9, 9, 2), (len(examples_B), 3))[shard]
            if self.shift:
                images_RHWC = _shifted(images_RHWC, draws_R3[:, 0], draws_R3[:, 1])
            if self.flip:
                images_RHWC = np.where(draws_R3[:, 2, None, None, None] == 1, images_RHWC[:, :, ::-1], images_RHWC)
        return {"inputs": images_RHWC, **_labels(self.labels_N, examples_B[shard])}


@dataclass(frozen=True)
class Vectors:
    """Feature vectors of one length."""

    vectors_ND: np.ndarray
    labels_N: np.ndarray

    @property
    def lengths_N(self) -> None:
        """None: all vectors have the same length."""
        return None

    def __len__(self) -> int:
        return len(self.labels_N)

    def gather(self, examples_B: np.ndarray, shard: slice, random: np.random.Generator, *, training: bool) -> Arrays:
        """See Split."""
        return {"inputs": self.vectors_ND[examples_B[shard]], **_labels(self.labels_N, examples_B[shard])}


def _labels(labels_N: np.ndarray, examples_R: np.ndarray) -> Arrays:
    """Return the labels of the examples, int32 classes or float32 targets, and their weights."""
    dtype = np.float32 if labels_N.dtype.kind == "f" else np.int32
    return {"labels": labels_N[examples_R].astype(dtype), "weights": np.ones(len(examples_R), np.float32)}


def _shifted(images_RHWC: np.ndarray, down_R: np.ndarray, right_R: np.ndarray) -> np.ndarray:
    """Pad each image with 4 black pixels on every side and crop it to its size at offset (down, right).

    Offsets are 0 to 8; at (4, 4) the image is unchanged.
    """
    num_images, height, width = images_RHWC.shape[:3]
    padded = np.pad(images_RHWC, ((0, 0), (4, 4), (4, 4), (0, 0)))
    y_RH11 = (down_R[:, None] + np.arange(height))[:, :, None]
    x_R1W = (right_R[:, None] + np.arange(width))[:, None, :]
    return padded[np.arange(num_images)[:, None, None], y_RH11, x_R1W]
