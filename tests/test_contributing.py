"""CONTRIBUTING.md names files and tests that exist, and all files of the project have one version."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
PAGE = 25  # lines


def test_files_of_the_guides_exist() -> None:
    named = set(re.findall(r"`((?:configs|docs|jaxpar|scripts|tests)/[\w./]+)`", GUIDE))
    assert len(named) > 30
    assert not {name for name in named if not (ROOT / name).exists()}


def test_tests_of_the_guides_exist() -> None:
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}
    named = set(re.findall(r"`(test_\w+)`", GUIDE)) | set(re.findall(r"^def (test_\w+)", GUIDE, re.MULTILINE))
    assert len(named) >= 5
    assert not named - defined


def test_a_guide_is_at_most_a_page() -> None:
    guides = ["A new " + text for text in GUIDE.split("\n## A new ")[1:]]
    lengths = {guide.splitlines()[0]: len(guide.splitlines()) for guide in guides}
    assert len(lengths) == 6
    assert {name: length for name, length in lengths.items() if length > PAGE} == {}


def test_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    [cited] = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    latest = re.findall(r"^## (\S+) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert cited == latest == version


def test_tables_of_the_guides_exist() -> None:
    """A table that a guide extends, "`NAME` in `file`", is in that file."""
    named = re.findall(r"`([A-Z_]{4,})`(?:,? and `\w+`)?(?: in| of|\s+in)\s+`([\w/]+\.py)`", GUIDE)
    assert len(named) > 8
    missing = [(name, file) for name, file in named if not re.search(rf"^{name}\b", (ROOT / file).read_text(), re.M)]
    assert missing == []
