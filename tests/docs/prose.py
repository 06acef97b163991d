"""Every sentence of the project that people read: documents, docstrings, comments and messages."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CODE = ("jaxpar", "configs", "scripts", "tests")
# What holds the words that the check refuses.
CHECK = {"tests/docs/test_english.py"}
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)


class Text(NamedTuple):
    """A string in a Python file, with its line."""

    line: int
    value: str


class Passage(NamedTuple):
    """A text that people read.

    Attributes:
      file: path from the root of the repository.
      line: its first line in the file, counted from 1.
      kind: "document", "docstring", "comment", "message", or "file" for the whole of another file.
      text: the words.
    """

    file: str
    line: int
    kind: str
    text: str


def documents() -> list[Path]:
    """Return the Markdown files of the repository."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def code() -> list[Path]:
    """Return the Python files of the repository."""
    files = (path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in files if str(path.relative_to(ROOT)) not in CHECK)


def others() -> list[Path]:
    """Return the other files with comments and descriptions that people read."""
    scripts = [path for path in (ROOT / "scripts").rglob("*") if path.is_file() and not path.suffix]
    return sorted([*scripts, *(ROOT / name for name in ("pyproject.toml", "mkdocs.yml", "CITATION.cff"))])


@functools.cache
def passages() -> list[Passage]:
    """Return all texts of the repository that people read."""
    found = [one for path in documents() for one in of_document(path)]
    found += [one for path in code() for one in of_code(path)]
    return [*found, *(Passage(str(path.relative_to(ROOT)), 1, "file", path.read_text()) for path in others())]


def of_document(path: Path) -> Iterator[Passage]:
    """Yield the prose of a Markdown file, with empty lines for code blocks and without inline code."""
    prose = FENCE.sub(lambda block: "\n" * block[0].count("\n"), path.read_text())
    yield Passage(str(path.relative_to(ROOT)), 1, "document", re.sub(r"`[^`\n]*`", "``", prose))


def of_code(path: Path) -> Iterator[Passage]:
    """Yield the docstrings, comments and messages of a Python file."""
    name, source = str(path.relative_to(ROOT)), path.read_text()
    tree = ast.parse(source)
    described = docstrings(tree)
    for line, value in described:
        yield Passage(name, line, "docstring", value)
    messages = [] if name.startswith("tests/") else [text for text in strings(tree) if text not in described]
    for line, value in messages:
        yield Passage(name, line, "message", value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Passage(name, token.start[0], "comment", token.string)


def strings(tree: ast.AST) -> list[Text]:
    """Return all strings under a node, parts of f-strings included."""
    return [
        Text(node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def docstrings(tree: ast.AST) -> list[Text]:
    """Return the docstrings in a file, or in a statement of it."""
    found = []
    if isinstance(tree, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        found = strings(tree.body[0])[:1] if ast.get_docstring(tree) is not None else []
    inside = (node for node in ast.iter_child_nodes(tree) if isinstance(node, ast.stmt))
    return [*found, *(one for node in inside for one in docstrings(node))]
