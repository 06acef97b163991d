"""mkdocs hooks: files outside of docs/ that pages link to (`../jaxpar/core/plan.py`), search, and the copy button.

Markdown files become pages; other files become pages that show their source in a code block. The search finds guides
before reference and history, and no source. A page with a wide table has no table of contents at its side. Long names
in tables break between words. On a phone, the cells of a row are below each other, each with the name of its column, if
the table would be wider than the screen. A picture is a link to itself, because a phone shows it too small. The copy
button of a console block copies its commands only.
"""

import itertools
import posixpath
import re
from html import escape, unescape
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!https?:)([\w./-]+)(#[\w-]+)?\)")
COMMAND = re.compile(r"^\$ (.*<<END\n(?:.*\n)*?END$|.*(?:(?<=\\)\n.*)*)", re.MULTILINE)
CONSOLE = re.compile(r'<div class="language-console highlight">(.*?)</div>', re.DOTALL)
WIDE = re.compile(r"^\|(?:[^|\n]*\|){7,}$", re.MULTILINE)  # a row of a table that needs the width of the window
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
PHONE = 44  # characters, besides margins, in the width of a phone
BREAK = re.compile(r"(?<=[._=/])(?=[a-zA-Z])")  # where long names may break
CELL = re.compile(r"<t([dh])\b.*?</t\1>", re.DOTALL)
LONG_NAME = re.compile(r"[\w.=/]{14,}(?=[^<>]*<)")  # in a text, not in a tag
PICTURE = re.compile(r'<img [^>]*src="([^"]+)"[^>]*>')
# How much less than guides pages count in the search, by the start of their path: the first that fits.
BOOST = {"reference/api": 0.0001, "explanation": 0.02, "reference": 0.01, "results": 0.0001, "source": 0.0001}
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", "": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of docs/ that a page links to, including the pages added here."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    while waiting:
        for path in targets(waiting.pop()):
            if files.get_file_from_path(page_of(path)) is None and (ROOT / path).is_file():
                page = File.generated(config, page_of(path), content=content(path), inclusion=InclusionLevel.NOT_IN_NAV)
                files.append(page)
                waiting += [path] if path.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirect links to files outside of docs/ to their pages. Links to missing files are kept, and fail the build.

    Source pages are left out of the search.
    """
    del config
    uri = page.file.src_uri
    page.meta["search"] = {"boost": next((boost for start, boost in BOOST.items() if uri.startswith(start)), 1)}
    if WIDE.search(markdown):
        page.meta["hide"] = ["toc"]
    path = uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}"
    if not (ROOT / path).is_file():  # a page generated from a file that is not Markdown
        page.meta["search"] = {"exclude": True}
        return markdown

    def link(match: re.Match[str]) -> str:
        target = page_of(resolve(path, match[1]))
        if files.get_file_from_path(target) is None:
            return match[0]
        return f"]({posixpath.relpath(target, posixpath.dirname(uri) or '.')}{match[2] or ''})"

    return LINK.sub(link, markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change console blocks, tables and pictures, as above."""
    del page, config, files
    html = PICTURE.sub(r'<a href="\1">\g<0></a>', html)
    return CELL.sub(with_breaks, TABLE.sub(with_labels, CONSOLE.sub(with_copy, html)))


def with_labels(table: re.Match[str]) -> str:
    """Return a wide table with the names of the columns at its cells, which site.css shows on a phone."""
    rows = [[visible(cell[0]) for cell in CELL.finditer(row)] for row in table[0].split("<tr>")[1:]]
    labels, *_ = rows
    if sum(max(map(longest_word, column)) + 1 for column in zip(*rows, strict=True)) < PHONE:
        return table[0]
    names = itertools.cycle(labels)
    labelled = re.sub("<td", lambda _: f'<td data-label="{escape(next(names))}"', table[0])
    return labelled.replace("<table>", "<table data-stacked>")


def longest_word(cell: str) -> int:
    """Return the length of the longest part of a cell that does not break."""
    return max((len(part) for word in cell.split() for part in BREAK.split(word)), default=0)


def with_breaks(cell: re.Match[str]) -> str:
    """Return a cell of a table whose long names may break before a word, as in `pipeline.|num_|microbatches`."""
    return LONG_NAME.sub(lambda name: BREAK.sub("<wbr>", name[0]), cell[0])


def with_copy(block: re.Match[str]) -> str:
    """Return a console block with its commands in the attribute that the theme copies, if it has any."""
    copied = "\n".join(commands(visible(block[1])))
    return block[0].replace("<div", f'<div data-copy="{escape(copied)}"', 1) if copied else block[0]


def visible(html: str) -> str:
    """Return what a reader sees of a piece of HTML."""
    return unescape(TAG.sub("", html))


def commands(console: str) -> list[str]:
    """Return the commands of a console session, without prompts and output."""
    return COMMAND.findall(console)


def content(path: str) -> str:
    """Return the Markdown of the page for a file of the repository."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n~~~~~~{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n~~~~~~\n"


def targets(path: str) -> set[str]:
    """Return the files that a Markdown file links to, as paths from the root of the repository."""
    return {resolve(path, match[1]) for match in LINK.finditer((ROOT / path).read_text())}


def resolve(path: str, link: str) -> str:
    """Return the target of a relative link in a file, as a path from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def page_of(path: str) -> str:
    """Return the path on the site, relative to docs/, of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"
