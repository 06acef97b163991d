import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxpar.data import Batches
from jaxpar.data.examples import Blocks, Masking, SameSize, Split, Texts

NUM = 103


def make(kind: str) -> Split:
    """Return 103 examples. Example i is identified by its first token (or pixel), 10 + i."""
    random = np.random.default_rng(0)
    if kind == "blocks":
        blocks_NK = random.integers(5, 300, (NUM, 9))
        blocks_NK[:, 0] = 10 + np.arange(NUM)
        return Blocks(blocks_NK)
    if kind == "images":
        images_NHWC = np.tile((10 + np.arange(NUM, dtype=np.uint8))[:, None, None, None], (1, 6, 6, 3))
        return SameSize(images_NHWC, np.arange(NUM) % 7, shift=True, flip=True)
    lengths_N = random.integers(3, 33, NUM)
    offsets = np.concatenate([[0], np.cumsum(lengths_N)])
    tokens_M = random.integers(150, 300, offsets[-1])
    tokens_M[offsets[:-1]] = 10 + np.arange(NUM)
    if kind == "texts":
        return Texts(tokens_M, offsets, np.arange(NUM) % 7, None, (8, 16, 32), 0, None)
    return Texts(tokens_M, offsets, None, None, (8, 16, 32), 0, Masking(0.15, 4, np.arange(300) < 150))


KINDS = ("texts", "masked", "blocks", "images")


def batches(kind: str, *, shuffle: bool = True, seed: int = 5) -> Batches:
    return Batches(make(kind), batch_size=8, seed=seed, shuffle=shuffle)


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return set(one) == set(other) and all(
        np.array_equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one
    )


@pytest.mark.parametrize("kind", KINDS)
def test_padded_batches_for_replicas_that_do_not_divide_them(kind: str) -> None:
    """Shards of a padded batch contain the batch, whatever their number, and after it examples of weight 0."""
    whole, split = batches(kind), make(kind)
    for step in (0, 5, 12):  # the step whose batch has a remainder is among those of an epoch, too
        expected = whole.batch(step, with_example_ids=True)
        for num, size in ((3, 9), (5, 10), (7, 14)):
            padded = Batches(split, batch_size=8, seed=5, shuffle=True, padded_size=size)
            shards = [slice(start, start + size // num) for start in range(0, size, size // num)]
            parts = [padded.batch(step, shard, with_example_ids=True) for shard in shards]
            got = {name: np.concatenate([part[name] for part in parts]) for name in expected}
            assert same({name: x[:8] for name, x in got.items()}, expected)
            assert not got["weights"][8:].any()
            assert (got["example_ids"][8:] == -1).all()
            assert {name: len(x) for name, x in padded.longest().items()} == dict.fromkeys(padded.longest(), size)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_example_once_an_epoch(kind: str, shuffle: bool) -> None:
    source = batches(kind, shuffle=shuffle)
    assert source.steps_per_epoch == 13
    assert source.examples_per_epoch == NUM
    orders = []
    for epoch in range(2):
        seen: list[int] = []
        for step in range(13):
            batch = source.batch(13 * epoch + step)
            assert len(batch["inputs"]) == 8
            assert batch["index"].tolist() == list(range(8))
            real_B = batch["weights"].reshape(8, -1).any(1)
            key = "inputs" if kind != "masked" else "labels"
            first_B = batch[key].reshape(8, -1)
            numbers_B = first_B.max(1) if kind == "images" else first_B[:, 0]
            seen += (numbers_B[real_B] - 10).tolist()
        assert sorted(seen) == list(range(NUM))
        orders.append(seen)
    assert (orders[0] != orders[1]) == shuffle


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_a_function_of_seed_and_step(kind: str) -> None:
    forward = batches(kind)
    expected = [forward.batch(step) for step in range(40)]
    backward = batches(kind)
    for step in reversed(range(40)):
        assert same(backward.batch(step), expected[step]), step
    assert same(batches(kind).batch(1000), batches(kind).batch(1000))
    assert not same(batches(kind, seed=6).batch(0), expected[0])


def test_every_step_draws_anew() -> None:
    """For the same text, each training epoch masks different positions, and an evaluation always the same ones."""
    text = Texts(np.full(40, 200), np.array([0, 40]), None, None, (40,), 0, Masking(0.15, 4, np.arange(300) < 150))
    for shuffle in (True, False):
        source = Batches(text, batch_size=1, seed=0, shuffle=shuffle)
        masked = {source.batch(step)["weights"].tobytes() for step in range(5)}
        assert len(masked) == (5 if shuffle else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shares_of_hosts_make_up_the_batch(kind: str) -> None:
    whole, first, second = batches(kind), batches(kind), batches(kind)
    for step in (0, 12, 13, 30):
        one, other = first.batch(step, slice(0, 4)), second.batch(step, slice(4, 8))
        assert same({key: np.concatenate([one[key], other[key]]) for key in one}, whole.batch(step))


@pytest.mark.parametrize("num_threads", [0, 1, 4])
def test_the_loader_gives_the_same_batches_in_order(num_threads: int) -> None:
    source = batches("masked")
    loaded = list(batches("masked").loader(9, 30, num_threads=num_threads, prefetch=3))
    assert len(loaded) == 21
    assert all(same(batch, source.batch(step)) for step, batch in enumerate(loaded, start=9))
    share = next(iter(source.loader(9, 10, shard=slice(2, 4))))
    assert same(share, source.batch(9, slice(2, 4)))
    assert list(source.loader(3, 3)) == []


def test_padding_examples_weigh_nothing() -> None:
    for kind in KINDS:
        source = batches(kind, shuffle=False)
        last = source.batch(12)  # 103 = 12 * 8 + 7
        weights_B = last["weights"].reshape(8, -1).sum(1)
        assert weights_B[7] == 0
        assert (weights_B[:7] > 0).all()
        assert same(source.batch(12), source.batch(12 + 13)), "an evaluation is the same every time"


def test_the_number_of_shapes_is_that_of_the_buckets() -> None:
    source = batches("texts")
    assert {source.batch(step)["inputs"].shape for step in range(39)} <= {(8, 8), (8, 16), (8, 32)}


def test_few_plans_are_cached() -> None:
    source = batches("texts")
    for epoch in range(20):
        source.batch(13 * epoch)
    assert len(source._orders) == 2


def test_threads_share_a_source() -> None:
    source, expected = batches("masked"), [batches("masked").batch(step) for step in range(60)]
    wrong: list[int] = []

    def work(order: list[int]) -> None:
        wrong.extend(step for step in order if not same(source.batch(step), expected[step]))

    orders = [np.random.default_rng(i).permutation(60).tolist() for i in range(4)]
    threads = [threading.Thread(target=work, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_exception_reaches_the_caller() -> None:
    split = make("blocks")
    object.__setattr__(split, "blocks_NK", make("blocks").blocks_NK[:50])  # type: ignore[attr-defined]
    source = Batches(split, batch_size=8, seed=0, shuffle=False)
    source.examples_per_epoch, source.steps_per_epoch = NUM, 13
    loader = source.loader(0, 13)
    assert len(next(loader)["inputs"]) == 8
    with pytest.raises(IndexError):
        list(loader)


def test_a_loader_that_is_left_does_not_hold_the_process() -> None:
    code = """
import numpy as np
from jaxpar.data import Batches
from jaxpar.data.examples import Blocks
loader = Batches(Blocks(np.zeros((5000, 9), int)), batch_size=8, seed=0, shuffle=True).loader(0, 10**6, num_threads=2)
print(next(loader)["inputs"].shape)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.returncode) == ("(8, 8)\n", 0), result.stderr


def test_examples_before_counts_no_padding() -> None:
    """The incomplete batch of an epoch can be at any step, because batches are shuffled."""
    source = batches("texts")
    counted = 0
    for step in range(3 * source.steps_per_epoch):
        assert source.examples_before(step) == counted
        counted += int((source.batch(step)["weights"] > 0).sum())
    assert counted == 3 * NUM
