"""Reads from the text of a compiled program which lines of Python its instructions come from."""

import contextlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

import jaxpar
from jaxpar.measure.hlo import Instruction

SOURCE_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")  # at the top of the text
ENTRY = re.compile(r"^(\d+) (?:\"(.*)\"|\{(.*)\})$")
PACKAGE = Path(jaxpar.__file__).parent
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


@contextlib.contextmanager
def present_lines() -> Iterator[None]:
    """Compile a program again if it is cached with other lines, such as those before a change of a comment."""
    name = "jax_compilation_cache_include_metadata_in_key"
    former = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, former)


class SourceLine(NamedTuple):
    """A line of Python, and the function that it is in."""

    file: Path
    line: int
    function: str

    @property
    def is_own(self) -> bool:
        """Whether the file is one of jaxpar or of the user, and not one of an installed package."""
        is_installed = "site-packages" in self.file.parts or self.file.is_relative_to(STANDARD_LIBRARY)
        return self.file.is_relative_to(PACKAGE) or not is_installed

    def __str__(self) -> str:
        """Return `file:line in function`; files of jaxpar and of the current directory have relative paths."""
        roots = [path for path in (PACKAGE.parent, Path.cwd()) if self.file.is_relative_to(path)]
        return f"{self.file.relative_to(roots[0]) if roots else self.file}:{self.line} in {self.function}"


class SourceLines:
    """The lines of Python of a compiled program."""

    def __init__(self, text: str):
        """text: the result of `jax.stages.Compiled.as_text`."""
        self._names: dict[str, dict[int, str]] = {name: {} for name in SOURCE_TABLES[:2]}
        self._numbers: dict[str, dict[int, dict[str, int]]] = {name: {} for name in SOURCE_TABLES[2:]}
        table = ""
        for line in text.splitlines():
            if line in SOURCE_TABLES:
                table = line
            elif line.endswith("{"):  # the first computation
                break
            elif table and (entry := ENTRY.match(line)):
                if table in self._names:
                    self._names[table][int(entry[1])] = entry[2]
                else:
                    fields = re.findall(r"(\w+)=(\d+)", entry[3])
                    self._numbers[table][int(entry[1])] = {name: int(number) for name, number in fields}
        frames = self._numbers["StackFrames"]
        # XLA prints the number of the parent plus 1: an outermost frame, whose parent is 0, seems to be its own parent.
        self._shift = int(any(frame.get("parent_frame_id") == number for number, frame in frames.items()))

    def stack(self, instruction: Instruction) -> Iterator[SourceLine]:
        """Yield the lines that an instruction comes from, the innermost first; none if the program has none."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.line)
        number = int(found[1]) if found else 0
        while frame := self._numbers["StackFrames"].get(number):
            location = self._numbers["FileLocations"][frame["file_location_id"]]
            names = self._names
            yield SourceLine(
                Path(names["FileNames"][location["file_name_id"]]),
                location["line"],
                names["FunctionNames"][location["function_name_id"]],
            )
            number = frame.get("parent_frame_id", 0) - self._shift

    def own(self, instruction: Instruction) -> SourceLine | None:
        """Return the innermost line that is in jaxpar or in a module of the user, or else the innermost one."""
        stack = list(self.stack(instruction))
        return next((line for line in stack if line.is_own), stack[0] if stack else None)
