"""A data set as arrays: its splits, what a model depends on, and how shards of a batch are gathered.

Whatever is random (masking, augmentation) is drawn for the whole global batch and then cut to the shard
asked for, so that any shard of a batch equals the same examples of the whole.

Dims: N examples, M tokens, B examples of the global batch, R of its shard, T positions,
K tokens of a block, H W C of an image, D features, V vocabulary.
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
        """Tokens of each example; None where all are alike."""

    def __len__(self) -> int:
        """N."""

    def gather(self, examples_B: np.ndarray, shard: slice, random: np.random.Generator, *, training: bool) -> Arrays:
        """A shard of the global batch of these examples: all keys of a batch but index (see jaxpar.data)."""


class DataInfo(NamedTuple):
    """The facts of a data set that a model depends on.

    Attributes:
      kind: text, image or vector.
      input_shape: of one example. text: (longest padded length,).
      num_classes: 0 for language models.
      class_names: in the order of their numbers.
      vocab_size: 0 unless text.
      pad_id: the token at padding.
      targets: names of the numbers of an example, where these are its labels.
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
        """Numbers that a model returns for each example, or word, unless they are logits of tokens."""
        return len(self.targets) or self.num_classes


class Dataset(NamedTuple):
    """The splits of a data set. fingerprint: hash of all that determines their batches, apart from seed and size."""

    info: DataInfo
    train: Split
    validation: Split | None
    test: Split | None
    fingerprint: str


@dataclass(frozen=True)
class Masking:
    """BERT's masking (Devlin et al. 2019, 3.1): of the positions to predict 80% read `mask_id`, 10% a random
    regular token, 10% the token itself.
    """

    fraction: float  # of the regular tokens of a text; at least one is masked
    mask_id: int
    is_special_V: np.ndarray  # bool: never masked, never drawn

    def __call__(
        self, tokens_RT: np.ndarray, real_RT: np.ndarray, draws_3RT: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The masked tokens, and which positions are to predict. draws_3RT: uniform in [0, 1)."""
        maskable_RT = real_RT & ~self.is_special_V[tokens_RT]
        count_R = maskable_RT.sum(1)
        wanted_R = np.minimum(np.maximum(np.rint(self.fraction * count_R), 1), count_R).astype(np.int64)
        # The wanted_R least draws among the maskable ones: exactly that many, each choice as likely.
        score_RT = np.where(maskable_RT, draws_3RT[0], 2.0)
        order_RT = score_RT.argsort(1, kind="stable").argsort(1, kind="stable")
        chosen_RT = order_RT < wanted_R[:, None]
        regular = np.flatnonzero(~self.is_special_V)
        random_RT = regular[(draws_3RT[2] * len(regular)).astype(np.int64)]
        replaced_RT = np.where(draws_3RT[1] < 0.8, self.mask_id, np.where(draws_3RT[1] < 0.9, random_RT, tokens_RT))
        return np.where(chosen_RT, replaced_RT, tokens_RT).astype(np.int32), chosen_RT


@dataclass(frozen=True)
class Texts:
    """Texts of unequal length, one an example, padded to the least bucket that holds the batch's longest."""

    tokens_M: np.ndarray
    offsets_N1: np.ndarray  # [N + 1]
    labels_N: np.ndarray | None  # classes, or targets [N, K]; None: masked language modelling, tags
    segments_M: np.ndarray | None
    buckets: tuple[int, ...]
    pad_id: int
    masking: Masking | None
    tags_M: np.ndarray | None = None  # classes of words at their first tokens, -1 elsewhere

    @property
    def lengths_N(self) -> np.ndarray:
        """Tokens of each text."""
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
    """Blocks of a token stream: all but the last token are the inputs, all but the first the labels."""

    blocks_NK: np.ndarray

    @property
    def lengths_N(self) -> None:
        """All are full."""
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
    """Images of one size, uint8. In training, where asked for: shifted by up to 4 pixels (black comes in) and
    flipped left to right (He et al. 2016, 4.2).
    """

    images_NHWC: np.ndarray
    labels_N: np.ndarray
    shift: bool
    flip: bool

    @property
    def lengths_N(self) -> None:
        """All are of one size."""
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
    """Vectors of one length."""

    vectors_ND: np.ndarray
    labels_N: np.ndarray

    @property
    def lengths_N(self) -> None:
        """All are of one length."""
        return None

    def __len__(self) -> int:
        return len(self.labels_N)

    def gather(self, examples_B: np.ndarray, shard: slice, random: np.random.Generator, *, training: bool) -> Arrays:
        """See Split."""
        return {"inputs": self.vectors_ND[examples_B[shard]], **_labels(self.labels_N, examples_B[shard])}


def _labels(labels_N: np.ndarray, examples_R: np.ndarray) -> Arrays:
    """Classes, int32, or targets, float32, with their weights."""
    dtype = np.float32 if labels_N.dtype.kind == "f" else np.int32
    return {"labels": labels_N[examples_R].astype(dtype), "weights": np.ones(len(examples_R), np.float32)}


def _shifted(images_RHWC: np.ndarray, down_R: np.ndarray, right_R: np.ndarray) -> np.ndarray:
    """Each image cut from itself with 4 black pixels around, at (down, right) of 0..8; 4 is where it was."""
    num_images, height, width = images_RHWC.shape[:3]
    padded = np.pad(images_RHWC, ((0, 0), (4, 4), (4, 4), (0, 0)))
    y_RH11 = (down_R[:, None] + np.arange(height))[:, :, None]
    x_R1W = (right_R[:, None] + np.arange(width))[:, None, :]
    return padded[np.arange(num_images)[:, None, None], y_RH11, x_R1W]
