"""The lines of Python of a compiled program: from its header by hand, and of a function compiled here."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpar
from jaxpar.measure.hlo import HloProgram, Instruction, SourceLine, SourceLines

LAYERS = Path(jaxpar.__file__).parent / "models" / "layers.py"
# Frame 3 (flax) is called by frame 2 (a layer), which is called by frame 1 (a script); frame 4 is flax's alone.
HEADER = f"""HloModule test, is_scheduled=true

FileNames
1 "/home/user/train.py"
2 "{LAYERS}"
3 "/venv/lib/python3.11/site-packages/flax/nnx/linear.py"

FunctionNames
1 "<module>"
2 "MLP.__call__"
3 "Linear.__call__"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=5 end_line=5 column=1 end_column=9}}
2 {{file_name_id=2 function_name_id=2 line=20 end_line=20 column=1 end_column=9}}
3 {{file_name_id=3 function_name_id=3 line=431 end_line=431 column=1 end_column=9}}

StackFrames
"""
PARENTS = {"as printed, plus 1": (1, 2, 3, 1), "plain": (0, 1, 2, 0)}


def instruction(frame: str) -> Instruction:
    return Instruction(f'f32[] add(%a, %b), metadata={{op_name="f"{frame}}}', "add", (), ("a", "b"), "")


@pytest.mark.parametrize("parents", PARENTS.values(), ids=PARENTS)
def test_the_innermost_line_of_the_user_or_of_jaxpar(parents: tuple[int, ...]) -> None:
    frames = zip((1, 2, 3, 3), parents, strict=True)
    table = [
        f"{number} {{file_location_id={location} parent_frame_id={parent}}}"
        for number, (location, parent) in enumerate(frames, 1)
    ]
    lines = SourceLines(HEADER + "\n".join(table) + "\n\nENTRY %main (x: f32[]) -> f32[] {\n")
    script = SourceLine(Path("/home/user/train.py"), 5, "<module>")
    layer = SourceLine(LAYERS, 20, "MLP.__call__")
    flax = SourceLine(Path("/venv/lib/python3.11/site-packages/flax/nnx/linear.py"), 431, "Linear.__call__")
    assert list(lines.stack(instruction(" stack_frame_id=3"))) == [flax, layer, script]
    assert lines.own(instruction(" stack_frame_id=3")) == layer
    assert lines.own(instruction(" stack_frame_id=1")) == script
    assert lines.own(instruction(" stack_frame_id=4")) == flax  # nothing else calls it
    assert lines.own(instruction("")) is None
    assert str(layer) == "jaxpar/models/layers.py:20 in MLP.__call__"
    assert str(script) == "/home/user/train.py:5 in <module>"


def halved(x: jax.Array) -> jax.Array:
    return jnp.sort(x) / 2


def sort_line(function: Callable[[jax.Array], jax.Array]) -> SourceLine | None:
    """Return the line of the sort in a compiled function."""
    text = jax.jit(lambda x: function(x) * 3).lower(jnp.ones(64)).compile().as_text()
    assert text is not None
    program, lines = HloProgram(text), SourceLines(text)
    [line] = {
        lines.own(one)
        for instructions in program.computations.values()
        for one in instructions.values()
        if one.operation == "sort"
    }
    return line


@pytest.mark.usefixtures("lines_in_programs")
def test_the_line_of_a_compiled_function() -> None:
    assert sort_line(halved) == SourceLine(Path(__file__), inspect.getsourcelines(halved)[1] + 1, "halved")


@pytest.mark.usefixtures("lines_in_programs")
def test_a_program_in_the_cache_has_other_lines() -> None:
    """The same function, further down in a file, is compiled again."""
    for number in (1, 4):
        namespace: dict[str, Any] = {"jnp": jnp}
        exec(compile("\n" * (number - 1) + "def f(x): return jnp.sort(x) / 5", "/lines.py", "exec"), namespace)
        assert sort_line(namespace["f"]) == SourceLine(Path("/lines.py"), number, "f")
