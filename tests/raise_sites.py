"""Checks that every place in jaxpar that creates a UserError is reached by some test.

conftest.py records these places in every worker and compares them at the end of a run of the whole suite.
"""

import ast
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jaxpar
from jaxpar.errors import UserError

ROOT = Path(jaxpar.__file__).parent
# Errors, by file and start of the message, that tests/launch/test_processes.py raises in several processes.
OF_SEVERAL = {
    "run/build.py: this if changed else 'another process differs from process 0; see the error",
}
# Files whose errors are raised in the process of the service that tests/use/serve/test_serve.py starts.
OF_SERVICE = ("use/serve/app.py", "use/serve/guard.py")


class Site(NamedTuple):
    """A call `UserError(...)`: its file in jaxpar and its lines."""

    file: str
    first: int
    last: int
    message: str  # start of the source of the message

    @property
    def name(self) -> str:
        """Name that does not depend on line numbers."""
        return f"{self.file}: {self.message}"


reached: set[tuple[str, int]] = set()  # (file, line)


def record() -> None:
    """Start recording where this process creates a UserError."""

    def init(self: UserError, *arguments: Any) -> None:
        Exception.__init__(self, *arguments)
        frame = sys._getframe(1)
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            reached.add((str(path.relative_to(ROOT)), frame.f_lineno))

    UserError.__init__ = init  # type: ignore[assignment, method-assign]


def sites() -> list[Site]:
    """Return every place in jaxpar that creates a UserError."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "UserError":
                last, message = node.end_lineno or node.lineno, ast.unparse(node.args[0])
                found.append(Site(str(path.relative_to(ROOT)), node.lineno, last, message[:75]))
    return found


def unreached(lines: set[tuple[str, int]]) -> list[str]:
    """Return the names of the sites that contain none of these lines, except those of other processes."""
    return [
        site.name
        for site in sites()
        if site.name not in OF_SEVERAL
        and site.file not in OF_SERVICE
        and not any(file == site.file and site.first <= line <= site.last for file, line in lines)
    ]
