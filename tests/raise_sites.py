"""Guard: each place in jaxpar that makes a user's error is reached by some test.

conftest.py records where a UserError is made, in every worker, and compares at the end of a run of the whole suite.
"""

import ast
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jaxpar
from jaxpar.errors import UserError

ROOT = Path(jaxpar.__file__).parent
# Files whose errors are reached in processes of their own, where nothing is recorded.
IN_PROCESSES = {
    "pipeline/flags.py": "tests/pipeline/test_scripts.py",
}
# As that, by file and beginning of the message: tests/launch/test_processes.py starts several processes.
OF_SEVERAL = {
    "run/build.py: this if changed else 'a process is given another run than process 0, and re",
}


class Site(NamedTuple):
    """A `UserError(..)`: its file in jaxpar, and its lines."""

    file: str
    first: int
    last: int
    message: str  # the beginning of its source

    @property
    def name(self) -> str:
        """Name that stays as lines move."""
        return f"{self.file}: {self.message}"


reached: set[tuple[str, int]] = set()  # file and line


def record() -> None:
    """Note from now on where this process makes a UserError."""

    def init(self: UserError, *arguments: Any) -> None:
        Exception.__init__(self, *arguments)
        frame = sys._getframe(1)
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            reached.add((str(path.relative_to(ROOT)), frame.f_lineno))

    UserError.__init__ = init  # type: ignore[assignment, method-assign]


def sites() -> list[Site]:
    """Every place in jaxpar that makes a UserError, to raise it or as the reason of `jaxpar.errors.Refusals`."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "UserError":
                last, message = node.end_lineno or node.lineno, ast.unparse(node.args[0])
                found.append(Site(str(path.relative_to(ROOT)), node.lineno, last, message[:75]))
    return found


def unreached(lines: set[tuple[str, int]]) -> list[str]:
    """Names of the sites that none of these lines is in, but for those of several processes."""
    return [
        site.name
        for site in sites()
        if site.file not in IN_PROCESSES
        and site.name not in OF_SEVERAL
        and not any(file == site.file and site.first <= line <= site.last for file, line in lines)
    ]
