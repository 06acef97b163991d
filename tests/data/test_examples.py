import numpy as np
import pytest

from jaxpar.data.examples import Blocks, Masking, SameSize, Texts

PAD, CLS, SEP, MASK, VOCAB = 0, 2, 3, 4, 200
SPECIAL_V = np.arange(VOCAB) < 5


def make_texts(lengths: list[int], fraction: float | None = None, pairs: bool = False) -> tuple[Texts, list[list[int]]]:
    """Return texts of the form [CLS] regular tokens [SEP], as `Texts` and as lists of tokens."""
    random = np.random.default_rng(0)
    lists = [[CLS, *random.integers(5, VOCAB, length - 2).tolist(), SEP] for length in lengths]
    tokens_M = np.array([token for text in lists for token in text], np.uint16)
    segments_M = np.concatenate([np.arange(length) >= length // 2 for length in lengths]).astype(np.uint8)
    offsets = np.array([sum(lengths[:i]) for i in range(len(lengths) + 1)])
    labels_N = None if fraction else np.arange(len(lengths)) % 3
    masking = Masking(fraction, MASK, SPECIAL_V) if fraction else None
    return Texts(tokens_M, offsets, labels_N, segments_M if pairs else None, (8, 16, 40), PAD, masking), lists


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_texts_are_padded_on_the_right_to_the_bucket_of_the_longest() -> None:
    texts, lists = make_texts([5, 9, 3, 40, 12], pairs=True)
    examples = [4, 2, 0, 1]
    batch = texts.gather(np.array(examples), slice(None), rng(), training=True)
    for row, example in enumerate(examples):
        tokens = lists[example]
        padding = 16 - len(tokens)
        assert batch["inputs"][row].tolist() == tokens + [PAD] * padding
        assert batch["mask"][row].tolist() == [True] * len(tokens) + [False] * padding
        segments = [int(at >= len(tokens) // 2) for at in range(len(tokens))]
        assert batch["segments"][row].tolist() == segments + [0] * padding
    assert batch["labels"].tolist() == [example % 3 for example in examples]
    assert batch["weights"].tolist() == [1.0] * 4
    kinds = {key: array.dtype.name for key, array in batch.items()}
    int_keys = dict.fromkeys(("inputs", "segments", "labels"), "int32")
    assert kinds == {**int_keys, "mask": "bool", "weights": "float32"}


def test_the_least_bucket_that_holds_it() -> None:
    texts, _ = make_texts([3, 8, 9, 16, 17, 40])
    batches = [texts.gather(np.array([example]), slice(None), rng(), training=True) for example in range(6)]
    assert [batch["inputs"].shape[1] for batch in batches] == [8, 8, 16, 16, 40, 40]


def test_a_shard_is_padded_as_the_whole_batch() -> None:
    texts, _ = make_texts([5, 6, 30, 7])
    share = texts.gather(np.arange(4), slice(0, 2), rng(), training=True)
    assert share["inputs"].shape == (2, 40)


def test_masking_statistics() -> None:
    texts, _ = make_texts([30] * 4000, fraction=0.15)
    batch = texts.gather(np.arange(4000), slice(None), rng(), training=True)
    inputs, labels, chosen = batch["inputs"], batch["labels"], batch["weights"] > 0
    assert (chosen.sum(1) == round(0.15 * 28)).all()
    assert not chosen[SPECIAL_V[labels] | ~batch["mask"]].any()
    assert (inputs[~chosen] == labels[~chosen]).all()
    masked = (inputs == MASK)[chosen].mean()
    same = (inputs == labels)[chosen].mean()
    others = inputs[chosen & (inputs != MASK) & (inputs != labels)]
    assert abs(masked - 0.8) < 0.01
    assert abs(same - (0.1 + 0.1 / 195)) < 0.01
    assert not SPECIAL_V[others].any()
    assert len(np.unique(others)) == 195  # any regular token
    # All positions are equally likely: binomial with 4000 draws, tolerance five standard deviations.
    by_position = chosen[:, 1:29].mean(0)
    assert np.abs(by_position - 4 / 28).max() < 5 * np.sqrt(4 / 28 * 24 / 28 / 4000)


def test_at_least_one_position_is_masked_where_there_is_a_token() -> None:
    texts, _ = make_texts([3, 4, 2, 5], fraction=0.01)  # the third has no regular token
    batch = texts.gather(np.arange(4), slice(None), rng(), training=True)
    assert (batch["weights"] > 0).sum(1).tolist() == [1, 1, 0, 1]


def test_random_parts_do_not_depend_on_the_shard() -> None:
    texts, _ = make_texts([30, 9, 12, 17, 5, 30], fraction=0.3)
    images = SameSize(np.arange(6 * 8 * 8 * 3, dtype=np.uint8).reshape(6, 8, 8, 3), np.arange(6), shift=True, flip=True)
    for split in (texts, images):
        whole = split.gather(np.arange(6), slice(None), rng(), training=True)
        parts = [split.gather(np.arange(6), slice(i, i + 2), rng(), training=True) for i in (0, 2, 4)]
        for key, array in whole.items():
            assert np.array_equal(np.concatenate([part[key] for part in parts]), array), key


def test_blocks_are_shifted_by_one() -> None:
    blocks = Blocks(np.arange(20, dtype=np.uint16).reshape(4, 5))
    batch = blocks.gather(np.array([3, 0]), slice(None), rng(), training=True)
    assert batch["inputs"].tolist() == [[15, 16, 17, 18], [0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[16, 17, 18, 19], [1, 2, 3, 4]]
    assert batch["weights"].tolist() == [[1.0] * 4] * 2
    assert set(batch) == {"inputs", "labels", "weights"}


@pytest.mark.parametrize(("shift", "flip"), [(True, True), (True, False), (False, True)])
def test_augmented_images_are_shifts_and_flips_of_the_original(shift: bool, flip: bool) -> None:
    images = np.random.default_rng(3).integers(1, 256, (300, 9, 9, 1), np.uint8)
    split = SameSize(images, np.zeros(300, np.int32), shift=shift, flip=flip)
    plain = split.gather(np.arange(300), slice(None), rng(), training=False)["inputs"]
    assert np.array_equal(plain, images)
    seen = set()
    for image, result in zip(
        images, split.gather(np.arange(300), slice(None), rng(), training=True)["inputs"], strict=True
    ):
        seen.add(_how(image[..., 0], result[..., 0]))
    expected = (81 if shift else 1) * (2 if flip else 1)
    assert 0.75 * expected < len(seen) <= expected
    shifts = set(range(-4, 5)) if shift else {0}
    assert {down for down, _, _ in seen} == {right for _, right, _ in seen} == shifts
    assert {flipped for _, _, flipped in seen} == ({False, True} if flip else {False})


def _how(image: np.ndarray, result: np.ndarray) -> tuple[int, int, bool]:
    """Return the (down, right, flipped) that turns `image` into `result`, found by comparing pixels."""
    size = len(image)
    for flipped in (False, True):
        unflipped = result[:, ::-1] if flipped else result
        for down in range(-4, 5):
            for right in range(-4, 5):
                expected = np.zeros_like(image)
                for y in range(max(0, -down), min(size, size - down)):
                    first, last = max(0, -right), min(size, size - right)
                    expected[y, first:last] = image[y + down, first + right : last + right]
                if np.array_equal(unflipped, expected):
                    return down, right, flipped
    raise AssertionError("neither shifted nor flipped")
