"""Tests of the texts in error messages."""

import pytest

from jaxpar.errors import format_bytes, most_similar, nearest

CONFIGS = ("configs/default.py", "configs/gpt_wordnet.py", "configs/vit_cifar10.py")
KEYS = ("optimizer.lr", "optimizer.b1", "optimizer.eps", "data.train")


@pytest.mark.parametrize(
    ("name", "choices", "expected"),
    [
        ("asink", ["sync", "async", "ssp"], "async"),
        ("tarin.csv", ["train.csv", "test.csv"], "train.csv"),
        ("configs/defualt.py", CONFIGS, "configs/default.py"),
        ("cofigs/default.py", CONFIGS, "configs/default.py"),
        ("configs/nope.py", CONFIGS, None),
        ("optimizer.lrr", KEYS, "optimizer.lr"),
        ("optimzer.lr", KEYS, "optimizer.lr"),
        ("optimizer.momentum2", KEYS, None),
        ("txt", ["text", "label"], "text"),
        ("anything", [], None),
    ],
)
def test_the_most_similar_name(name: str, choices: list[str], expected: str | None) -> None:
    """Common sections, folders and extensions make no names similar."""
    assert most_similar(name, choices) == expected
    assert nearest(name, choices) == (f" Did you mean {expected!r}?" if expected else "")


def test_units() -> None:
    numbers = {0: "0 B", 999: "999 B", 1000: "1 kB", 12_345: "12.3 kB", 999_900: "1 MB", 80e9: "80 GB"}
    assert {number: format_bytes(number) for number in numbers} == numbers
    assert format_bytes(1.54e12) == "1.54 TB"
    assert format_bytes(2e18) == "2e+03 PB"
