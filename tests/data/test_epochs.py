import numpy as np
import pytest

from jaxpar.data.batches import in_order, shuffled


@pytest.mark.parametrize("num_examples", [1, 7, 8, 9, 1000, 1003])
@pytest.mark.parametrize("batch_size", [1, 8, 16])
@pytest.mark.parametrize("same_length", [True, False])
def test_every_example_comes_once(num_examples: int, batch_size: int, same_length: bool) -> None:
    lengths_N = None if same_length else np.random.default_rng(0).integers(1, 50, num_examples)
    for order_SB in (
        shuffled(lengths_N, num_examples, batch_size, seed=3, epoch=2),
        in_order(lengths_N, num_examples, batch_size),
    ):
        assert order_SB.shape == (-(-num_examples // batch_size), batch_size)
        assert sorted(order_SB[order_SB >= 0]) == list(range(num_examples))
        padding_S = (order_SB < 0).sum(1)
        assert (padding_S > 0).sum() <= 1  # only one batch has padding, at its end
        assert all((row[len(row) - padding :] < 0).all() for row, padding in zip(order_SB, padding_S, strict=True))


def test_an_epoch_is_a_function_of_seed_and_epoch() -> None:
    lengths_N = np.arange(500) % 37

    def made(seed: int, epoch: int) -> bytes:
        return shuffled(lengths_N, 500, 16, seed, epoch).tobytes()

    assert made(0, 0) == made(0, 0)
    assert len({made(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_the_shuffle_never_changes() -> None:
    """Runs can be resumed years later, so these numbers must never change."""
    assert shuffled(None, 10, 5, seed=0, epoch=0).tolist() == [[5, 1, 2, 6, 4], [0, 8, 9, 3, 7]]


def test_batches_of_a_window_do_not_overlap_in_length() -> None:
    lengths_N = np.random.default_rng(1).integers(1, 1000, 64 * 4 * 2)  # two windows of batches of 4
    order_SB = shuffled(lengths_N, len(lengths_N), 4, seed=0, epoch=0)
    ranges = sorted((lengths_N[row].min(), lengths_N[row].max()) for row in order_SB)
    # Every length is strictly inside the range of at most one batch per window.
    for length in range(1, 1001):
        assert sum(low < length < high for low, high in ranges) <= 2
    firsts_S = lengths_N[order_SB[:, 0]]
    assert abs(np.corrcoef(firsts_S, np.arange(len(firsts_S)))[0, 1]) < 0.3  # and batches are not in order of length


def test_short_texts_do_not_pay_for_long_ones() -> None:
    """Lengths are log-normal with mean 20, like the WordNet glosses. Unsorted batches would all be padded to 64."""
    lengths_N = np.clip(np.random.default_rng(2).lognormal(2.85, 0.5, 20_000), 3, 64).astype(int)
    buckets = (16, 32, 64)
    order_SB = shuffled(lengths_N, len(lengths_N), 256, seed=0, epoch=0)
    padded_S = [next(size for size in buckets if size >= lengths_N[row[row >= 0]].max()) for row in order_SB]
    ideal = np.take(buckets, np.searchsorted(buckets, lengths_N)).sum()
    assert sum(padded_S) * 256 / ideal < 1.08
    assert sum(padded_S) * 256 / lengths_N.sum() < 1.6  # unsorted: 3.4
    assert set(padded_S) == set(buckets)


def test_evaluation_goes_by_length() -> None:
    lengths_N = np.array([5, 3, 9, 3, 1])
    assert in_order(lengths_N, 5, 2).tolist() == [[4, 1], [3, 0], [2, -1]]
    assert in_order(None, 3, 2).tolist() == [[0, 1], [2, -1]]
