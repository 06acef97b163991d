"""Documents: links, anchors, widths, keys, and Python that runs."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxpar import config as configs
from scripts import reference
from scripts.bench import published, results
from tests.docs.prose import FENCE, ROOT, documents

PAGES = [str(path.relative_to(ROOT)) for path in documents()]
LANGUAGES = {"bash", "console", "json", "python", "text", "toml", "yaml"}
# Pages whose Python does not run alone.
PARTS = {
    "README.md": "a part of docs/tutorials/train.md",
    "docs/tutorials/train.md": "reads the checkpoint of a run, and a model in another file; it was run",
    "docs/howto/certify_functions.md": "part of scripts/examples/certify_functions.py, which was run",
    "docs/howto/predict.md": "reads the checkpoint of a run, as tests/use/inference does",
    "docs/howto/generate.md": "reads the checkpoint of a run, as tests/use/serve does",
    "docs/reference/checkpoint.md": "reads the checkpoint of a run, as tests/test_export.py does",
    "docs/howto/export.md": "reads the export of a run, as tests/test_export.py does",
}
WIDTH = 100
# The generated reference, and the history.
LONG = ("docs/reference/commands.md", "docs/reference/config.md", "CHANGELOG.md")
# A list of names, which mkdocs replaces by their docstrings.
API = re.compile(r"^:::.*(?:\n +.*)*$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: str) -> str:
    """Return a page with empty lines for its code blocks."""
    return FENCE.sub(lambda block: "\n" * block[0].count("\n"), (ROOT / page).read_text())


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each code block of a page."""
    for block in FENCE.findall((ROOT / page).read_text()):
        head, _, rest = block.partition("\n")
        yield head.removeprefix("```").strip(), rest.removesuffix("```")


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).lower() for heading in headings)
    return {re.sub(r"\s", "-", text.strip()) for text in words}


@pytest.mark.parametrize("page", PAGES)
def test_links(page: str) -> None:
    """Links lead to what exists. On the site of the documentation, they cannot lead to folders."""
    folder = (ROOT / page).parent
    for target in LINK.findall(prose(page)):
        if target.startswith(("https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = folder / name if name else ROOT / page
        assert path.is_file() or (path.is_dir() and folder == ROOT), f"{page} links to {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page} links to {target}; headings: {sorted(anchors(path))}"


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_wrapped(page: str) -> None:
    """Tables are as wide as they are, and the address of a link does not count."""
    lines = [re.sub(r"\]\([^)]*\)", "]", line) for line in prose(page).splitlines() if not line.startswith("|")]
    assert not [line for line in lines if len(line) > WIDTH]


def test_pages_are_short() -> None:
    """Pages have at most 1,500 words, how-to guides 600, and what people write for users 30,000 in all.

    Of the results, this includes what people write about the tables; most of the reference is generated.
    """
    counts = {page: len((ROOT / page).read_text().split()) for page in PAGES if page not in LONG}
    assert not [page for page, count in counts.items() if count > (600 if page.startswith("docs/howto/") else 1500)]
    generated = ("docs/results/", *(f"docs/reference/{name}.md" for name in reference.PAGES))
    written = [(ROOT / page).read_text() for page in counts if not page.startswith(generated)]
    written += [results.INDEX, *(result["conclusion"] for result in results.read().values()), published.HEAD]
    for paper in map(published.read, published.PAPERS):
        written += [paper["text"], *(table["text"] for table in paper["tables"])]
    assert sum(len(API.sub("", text).split()) for text in written) <= 30_000


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_have_a_language(page: str) -> None:
    assert {language for language, _ in blocks(page)} <= LANGUAGES


KEYS = re.compile(r"`config\.(?!py`|json`)([a-z_]+(?:\.[a-z_]+)*)[=`]")  # config.json is a file


@pytest.mark.parametrize("page", PAGES)
def test_config_keys_exist(page: str) -> None:
    keys = configs.keys(configs.default_config())
    sections = {key.rpartition(".")[0] for key in keys}
    former = set(configs.RENAMED) if page == "CHANGELOG.md" else set()
    unknown = set(KEYS.findall(prose(page))) - keys.keys() - sections - former
    assert not unknown, f"{page}: {sorted(unknown)}"


WITH_PYTHON = [page for page in PAGES if any(language == "python" for language, _ in blocks(page))]
ESTIMATE = re.compile(r"about\s+([\d.]+)")


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All Python blocks of a page run, from top to bottom, as one program, and print the text blocks behind them.

    A number after `about` depends on the version of JAX, by at most a tenth.
    """
    monkeypatch.chdir(tmp_path)
    of_page = list(blocks(page))
    program = compile("\n".join(text for language, text in of_page if language == "python"), page, "exec")
    if page in PARTS:
        return
    exec(program, {"__name__": "__main__"})
    pairs = itertools.pairwise(of_page)
    expected = "".join(text for (before, _), (language, text) in pairs if (before, language) == ("python", "text"))
    printed = capsys.readouterr().out  # what goes before, such as the progress of a first run, is not on the page
    got = printed.split()[-len(expected.split()) :] if expected else []
    assert ESTIMATE.sub("about", " ".join(got)) == ESTIMATE.sub("about", " ".join(expected.split()))
    actual, wanted = ([float(number) for number in ESTIMATE.findall(text)] for text in (" ".join(got), expected))
    np.testing.assert_allclose(actual, wanted, rtol=0.1)


def test_the_api_has_what_pages_import() -> None:
    source = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("api*.md"))
    listed = set(re.findall(r"\w+", " ".join(re.findall(r"members: \[(.*)\]", source))))
    modules = re.findall(r"^::: (\S+)", source, re.MULTILINE)
    text = "\n".join(
        text for page in PAGES if page not in PARTS for language, text in blocks(page) if language == "python"
    )
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    names = {(node.module or "", alias.name) for node in imports for alias in node.names}
    used = {name for name in names if name[0].startswith("jaxpar")}
    lacking = {name for name in used if name[1] not in listed and f"{name[0]}.{name[1]}" not in modules}
    assert not lacking, sorted(lacking)
