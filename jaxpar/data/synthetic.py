"""Synthetic data that every kind of model learns quickly, so that every task runs without files.

Dims: N examples, M tokens, T positions, K tokens of a block, H W C image height, width and channels, D features. C is
also the classes.
"""

from collections.abc import Callable

import numpy as np
from ml_collections import ConfigDict

from jaxpar.data import cache
from jaxpar.data.examples import Blocks, DataInfo, Dataset, Labels, Masking, SameSize, Split, Texts, buckets_of

NUM_CLASSES = 8
_PAD, _CLS, _SEP, _MASK, _FIRST = 0, 2, 3, 4, 5  # as in a trained WordPiece vocabulary
_TAGS = ("O", "B-A", "I-A", "B-B", "I-B")
_USED = 256  # number of regular tokens that occur, if the vocabulary is large enough
# Kind of data by config.model.name; otherwise text. This repeats models.MODELS, because models import data.
_KINDS = {"resnet": "image", "vit": "image", "mlp": "vector"}


def kind(config: ConfigDict) -> str:
    """Return the kind of data for the model: text, image or vector."""
    return _KINDS.get(config.model.name, "text")


def bytes_per_example(config: ConfigDict) -> int:
    """Return the approximate bytes of host memory in which an example is generated, temporary arrays included."""
    return {"text": 40 * (config.data.max_length + 1), "image": 3 * 32 * 32 * 3, "vector": 3 * 32 * 4}[kind(config)]


Make = tuple[DataInfo, Callable[[slice], Split]]


def load(config: ConfigDict, labels: Labels) -> Dataset:
    """Return config.data.synthetic_examples examples, drawn from config.seed and split by the config's fractions."""
    data, total = config.data, config.data.synthetic_examples
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence((config.seed, 2))))
    sizes = [0, round(total * data.validation_fraction), round(total * data.test_fraction)]
    sizes[0] = total - sum(sizes)
    # All splits come from one draw, so that they share the same patterns.
    info, cut = {"image": _images, "vector": _vectors, "text": _texts}[kind(config)](config, labels, random)
    ends = zip(sizes, np.cumsum(sizes).tolist(), strict=True)
    train, validation, test = (cut(slice(end - size, end)) if size else None for size, end in ends)
    assert train is not None
    facts = {"task": labels.value, "kind": kind(config), "seed": config.seed, "sizes": sizes, "augment": data.augment}
    facts |= {"targets": len(info.targets)} if info.targets else {}
    facts |= {"vocab_size": data.vocab_size, "buckets": buckets_of(config), "mask_fraction": data.mask_fraction}
    return Dataset(info, train, validation, test, cache.fingerprint(facts))


def _texts(config: ConfigDict, labels: Labels, random: np.random.Generator) -> Make:
    """Generate Markov chains of tokens: each token leaves three choices for the next one.

    In a text of class c, half of the tokens are congruent to c modulo NUM_CLASSES. Targets are functions of the class,
    and a tag is a function of the token and the token before it.
    """
    data = config.data
    total, longest = data.synthetic_examples, data.max_length
    names = {Labels.CLASSES: tuple(map(str, range(NUM_CLASSES))), Labels.TAGS: _TAGS}.get(labels, ())
    targets = tuple(data.target_columns) if labels is Labels.TARGETS else ()
    info = DataInfo("text", (longest,), len(names), names, data.vocab_size, _PAD, targets)
    chains_NK = _chains(random, total, longest + 1, min(_USED, data.vocab_size - _FIRST))
    if labels is Labels.NEXT:
        blocks_NK = chains_NK.astype(np.int32)
        return info, lambda part: Blocks(blocks_NK[part])
    labels_N, is_special_V = None, np.arange(data.vocab_size) < _FIRST
    masking = Masking(data.mask_fraction, _MASK, is_special_V) if labels is Labels.MASKED else None
    if labels in (Labels.CLASSES, Labels.TARGETS):
        labels_N = random.integers(0, NUM_CLASSES, total, np.int32)
        marked_NK = chains_NK - (chains_NK - _FIRST) % NUM_CLASSES + labels_N[:, None]
        chains_NK = np.where(random.random(chains_NK.shape) < 0.5, marked_NK, chains_NK)
    lengths_N = random.integers(min(8, longest), longest + 1, total)
    tokens_NT = chains_NK[:, :longest].astype(np.int32)
    tokens_NT[:, 0] = _CLS
    tokens_NT[np.arange(total), lengths_N - 1] = _SEP
    is_real_NT = np.arange(longest) < lengths_N[:, None]
    tokens_M = tokens_NT[is_real_NT]
    tags_M = _tags(tokens_NT)[is_real_NT] if labels is Labels.TAGS else None
    if targets:
        assert labels_N is not None
        labels_N = _as_targets(random, labels_N, targets)
    offsets_N1 = np.concatenate([[0], np.cumsum(lengths_N)])
    buckets = buckets_of(config)

    def cut(part: slice) -> Split:
        labels_R = None if labels_N is None else labels_N[part]
        return Texts(tokens_M, offsets_N1[part.start : part.stop + 1], labels_R, None, buckets, _PAD, masking, tags_M)

    return info, cut


def _tags(tokens_NT: np.ndarray) -> np.ndarray:
    """Return a tag for each token, as if each token were a word; -1 at special tokens.

    Of every eight tokens, two begin an entity, of type A or B, and one continues an entity that begins before it.
    """
    place_NT = (tokens_NT - _FIRST) % NUM_CLASSES
    begins_NT = np.where(place_NT < 2, 1 + 2 * place_NT, 0)
    before_NT = np.pad(begins_NT, ((0, 0), (1, 0)))[:, :-1]
    tags_NT = np.where((place_NT == 2) & (before_NT > 0), before_NT + 1, begins_NT)
    return np.where(tokens_NT < _FIRST, -1, tags_NT).astype(np.int32)


def _as_targets(random: np.random.Generator, labels_N: np.ndarray, targets: tuple[str, ...]) -> np.ndarray:
    """Return the targets [N, targets] of the examples: each class has its own random numbers."""
    return random.standard_normal((NUM_CLASSES, len(targets)), np.float32)[labels_N]


def _chains(random: np.random.Generator, total: int, length: int, used: int) -> np.ndarray:
    """Return chains [N,K] in which token x is followed by one of three tokens determined by x."""
    used -= used % NUM_CLASSES
    chains_NK = np.empty((total, length), np.int64)
    chains_NK[:, 0] = random.integers(0, used, total)
    steps_NK = random.integers(0, 3, (total, length))
    for at in range(1, length):
        chains_NK[:, at] = (5 * chains_NK[:, at - 1] + steps_NK[:, at]) % used
    return chains_NK + _FIRST


def _images(config: ConfigDict, _labels: Labels, random: np.random.Generator) -> Make:
    """Generate images with noise; each class is a pattern of 4x4 coloured squares."""
    labels_N = random.integers(0, NUM_CLASSES, config.data.synthetic_examples, np.int32)
    pattern_CHWC = random.integers(0, 128, (NUM_CLASSES, 4, 4, 3), np.uint8).repeat(8, 1).repeat(8, 2)
    noise_NHWC = random.integers(0, 128, (len(labels_N), 32, 32, 3), np.uint8)
    images_NHWC = pattern_CHWC[labels_N] + noise_NHWC
    augment = config.data.augment
    info = DataInfo("image", (32, 32, 3), NUM_CLASSES, tuple(map(str, range(NUM_CLASSES))), 0, 0)
    return info, lambda part: SameSize(images_NHWC[part], labels_N[part], shift=augment, flip=augment)


def _vectors(config: ConfigDict, labels: Labels, random: np.random.Generator) -> Make:
    """Generate vectors; each class is a Gaussian around its own centre."""
    labels_N = random.integers(0, NUM_CLASSES, config.data.synthetic_examples, np.int32)
    centre_CD = random.standard_normal((NUM_CLASSES, 32), np.float32)
    vectors_ND = centre_CD[labels_N] + random.standard_normal((len(labels_N), 32), np.float32)
    targets = tuple(config.data.target_columns) if labels is Labels.TARGETS else ()
    names = () if targets else tuple(map(str, range(NUM_CLASSES)))
    values_N = _as_targets(random, labels_N, targets) if targets else labels_N
    info = DataInfo("vector", (32,), len(names), names, 0, 0, targets)
    return info, lambda part: SameSize(vectors_ND[part], values_N[part])
