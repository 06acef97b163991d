"""The reference is current, and its columns agree with what the checks of a config accept."""

import pytest

from scripts import reference


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_page_is_current(name: str) -> None:
    """`scripts/python scripts/reference.py` writes the pages again."""
    assert (reference.FOLDER / f"{name}.md").read_text() == reference.PAGES[name]()


def test_every_generated_page_has_a_script() -> None:
    generated = {path.stem for path in reference.FOLDER.glob("*.md") if reference.NOTE in path.read_text()}
    assert generated == set(reference.PAGES)


def test_bytes_of_exchanges_are_those_of_the_formulas() -> None:
    """All-reduces of n replicas send 2 (n - 1) / n of the gradient; the first device of dp sends it n - 1 times."""
    n = reference.REPLICAS
    ddp = reference.sent("ddp")
    assert reference.sent("zero3") / ddp == pytest.approx(1.5, rel=1e-3)
    assert reference.sent("bagua_model_average") / ddp == pytest.approx(1 / 8, rel=1e-3)
    assert reference.sent("dp") / ddp == pytest.approx((n - 1) / (2 * (n - 1) / n), rel=1e-3)
