"""The reference and the pages of results are current, and a result is recorded with what its commands print."""

from typing import Any

import pytest

from jaxpar.errors import UserError
from scripts import reference
from scripts.bench import results


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


def test_the_pages_of_results_are_current() -> None:
    """`scripts/python scripts/bench/results.py` writes the pages again."""
    pages = results.pages()
    assert {name: (results.PAGES / f"{name}.md").read_text() for name in pages} == pages


def test_a_result_is_recorded() -> None:
    """The output replaces the table, and what a person wrote stays."""
    old: dict[str, Any] = {"page": "cpu", "title": "T", "conclusion": "C", "columns": ["a"], "rows": [["1"]]}
    found = results.record({**old, "date": "2000-01-01", "commands": ["echo one; echo two", "echo three"]})
    assert found["output"] == ["one", "two", "three"]
    assert (found["conclusion"], "rows" in found, "columns" in found) == ("C", False, False)
    assert found["date"] > "2026"
    assert "jaxpar " in found["software"]
    assert "cores of" in found["hardware"]
    shown = results.section(found)
    assert "$ echo three" in shown
    assert shown.endswith("```text\none\ntwo\nthree\n```")
    with pytest.raises(UserError, match="'exit 3' ended with exit code 3; it must end with 0"):
        results.record({**old, "commands": ["exit 3"]})
    with pytest.raises(UserError, match="has no commands"):
        results.record({**old, "commands": []})
