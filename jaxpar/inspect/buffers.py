"""Lists the temporary arrays of a step that are in memory at its peak, with the layers and lines that compute them."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxpar.measure.hlo import DTYPE_NAMES, HloArray, HloProgram, Instruction, SourceLines
from jaxpar.measure.liveness import live_at_peak
from jaxpar.strategies.strategy import CompiledProgram


class Buffers(NamedTuple):
    """Equal temporary arrays that one line of code computes, such as one in each of several layers."""

    nbytes: int  # bytes of all arrays together
    number: int  # number of arrays
    dtype: str  # the NumPy name of their dtype
    shape: tuple[int, ...]  # their shape
    layers: tuple[str, ...]  # names of the layers; `block_0-block_11` for a scan over layers. Empty outside of layers.
    # `file:line in function`. For a copy of an argument, the argument. If the program does not contain the line, the
    # path of named scopes, or else the operation.
    source: str


def buffers_at_peak(programs: Sequence[CompiledProgram], layers: Iterable[str]) -> list[Buffers]:
    """Return the temporary arrays at the peak of the program that has most, the largest groups first.

    Args:
      programs: the compiled programs of a step.
      layers: the names of the layers of the model.
    """

    def temporary_bytes(program: CompiledProgram) -> int:
        analysis = program.compiled.memory_analysis()
        assert analysis is not None
        return int(analysis.temp_size_in_bytes)

    text = max(programs, key=temporary_bytes).compiled.as_text()
    assert text is not None
    lines, names = SourceLines(text), list(layers)
    groups: dict[tuple[HloArray, str, str], list[str]] = {}  # the layers of the arrays in each group
    for array in live_at_peak(HloProgram(text)):
        layer = _layer(array.computed_by, names)
        key = (array.type, re.sub(r"\d+", "*", layer), _source(array.computed_by, lines))
        groups.setdefault(key, []).append(layer)
    buffers = [
        Buffers(
            array.nbytes * len(group),
            len(group),
            DTYPE_NAMES.get(array.dtype, array.dtype),
            array.dims,
            tuple(sorted(set(filter(None, group)))),
            source,
        )
        for (array, _, source), group in groups.items()
    ]
    return sorted(buffers, key=lambda group: -group.nbytes)


def _source(instruction: Instruction, lines: SourceLines) -> str:
    if line := lines.own(instruction):
        return str(line)
    if instruction.operation == "parameter":
        return f"copy of {instruction.source}".replace("\\'", "'")
    return instruction.source if instruction.has_source else f"{instruction.operation} added by XLA"


def _layer(instruction: Instruction, layers: Sequence[str]) -> str:
    """Return the layer that an instruction belongs to, from its named scopes; empty if there is none."""
    names = "|".join(map(re.escape, sorted(layers, key=len, reverse=True)))
    found = re.search(rf"[/(]((?:{names})(?:-(?:{names}))?)[)/]", instruction.source)
    return found[1] if found else ""
