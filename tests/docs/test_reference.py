"""The reference and the pages of results are current, and results are recorded as rows or as text."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from jaxpar.compare.report import markdown_table
from jaxpar.errors import UserError
from scripts import reference
from scripts.bench import published, results, scale, staleness, topologies
from scripts.bench.tables import show


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
    """`scripts/python scripts/bench/results.py` writes the pages again, and nothing else writes pages of results."""
    pages = results.pages()
    assert {name: (results.PAGES / name).read_text() for name in pages} == pages
    written = {f"{path.relative_to(results.PAGES)}" for path in results.PAGES.rglob("*.md")}
    assert written == pages.keys() | published.pages().keys()
    assert all(one["folder"] in results.FOLDERS for one in results.read().values())  # the index has them all


def test_the_pictures_of_gpt2_xl_are_current() -> None:
    """The planner still predicts what scale.png and memory.png show, here on 8 GPUs."""
    recorded = results.read()["scale"]["rows"]
    found = [scale.row(one) for one in itertools.islice(scale.predictions(), 6)]
    assert found == recorded[:6]


@pytest.mark.parametrize("module", [staleness, topologies])
def test_pictures_are_current(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures can be drawn from the records, and show them."""
    monkeypatch.setattr(sys, "argv", ["draw", f"--out={tmp_path / 'picture.png'}"])
    module.main()
    with Image.open(tmp_path / "picture.png") as drawn, Image.open(results.ROOT / module.PICTURE) as shown:
        assert drawn.info.get("Description") == shown.info.get("Description")  # the points of staleness.png


SHOWS = """
from scripts.bench.tables import show

show(["case", "time / `ddp`"], ([name, value] for name, value in [("ddp", "1.00"), ("a longer name", "12.34")]))
"""


def test_rows_of_a_benchmark_are_recorded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of all commands form one table; what a person wrote stays. Outside of results.py, nothing is recorded."""
    (tmp_path / "shows.py").write_text(SHOWS)
    (tmp_path / "shows.py.other").write_text('from scripts.bench.tables import show; show(["x"], [["1"]])')
    command = f"{sys.executable} {tmp_path / 'shows.py'}"
    monkeypatch.setenv("PYTHONPATH", str(results.ROOT))
    old: dict[str, Any] = {"folder": "cpu", "title": "T", "conclusion": "C", "output": ["old"]}
    found = results.record({**old, "date": "2000-01-01", "commands": [command, "echo text", command]})
    assert found["columns"] == ["case", "time / `ddp`"]
    assert found["rows"] == 2 * [["ddp", "1.00"], ["a longer name", "12.34"]]
    assert (found["conclusion"], "output" in found) == ("C", False)
    assert found["date"] > "2026"
    assert "jaxpar " in found["software"]
    assert "cores of" in found["hardware"]
    assert "| ddp | 1.00 |\n| a longer name | 12.34 |\n" in results.page(found)
    with pytest.raises(UserError, match=r"the columns of a row are \['x'\]; they must be those of the first row"):
        results.record({**old, "commands": [command, f"{command}.other"]})
    show(found["columns"], found["rows"][:2])
    assert capfd.readouterr().out == (
        "case           time / `ddp`\nddp                    1.00\na longer name         12.34\n"
    )


def test_a_table_of_a_file_is_recorded(tmp_path: Path) -> None:
    """A result can name the Markdown file of its command. Its columns choose some of those of the first table."""
    lines = ["Text.", "", *markdown_table(["name", "x|y", "z"], [["a", "1|2", ""], ["b", "", "3"]]), "", "| no |"]
    path = tmp_path / "table.md"
    old: dict[str, Any] = {"title": "T", "commands": ["true"], "table": str(path), "rows": []}
    path.write_text("\n".join(lines))
    found = results.record({**old, "columns": ["name", "x|y"]})
    assert (found["columns"], found["rows"]) == (["name", "x|y"], [["a", "1|2"], ["b", ""]])
    with pytest.raises(UserError, match=r"table\.md has no column 'w'; it must be one of name, x"):
        results.record({**old, "columns": ["name", "w"]})


def test_text_is_recorded_without_rows() -> None:
    old: dict[str, Any] = {"folder": "cpu", "title": "T", "conclusion": "C", "columns": ["a"], "rows": [["1"]]}
    found = results.record({**old, "commands": ["echo one; echo two", "echo three"]})
    assert found["output"] == ["one", "two", "three"]
    assert ("rows" in found, "columns" in found) == (False, False)
    shown = results.page(found)
    assert "$ echo three" in shown
    assert "```text\none\ntwo\nthree\n```\n" in shown
    with pytest.raises(UserError, match="'exit 3' ended with exit code 3; it must end with 0"):
        results.record({**old, "commands": ["exit 3"]})
    with pytest.raises(UserError, match="has no commands"):
        results.record({**old, "commands": []})
