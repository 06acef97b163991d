"""The temporary arrays in memory at the peak: by hand for each kind of instruction, and against XLA's own total."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxpar.measure.hlo import HloProgram
from jaxpar.measure.liveness import LiveArray, live_at_peak

HEADER = "HloModule test, is_scheduled=true\n"


def at_peak(text: str) -> list[LiveArray]:
    return live_at_peak(HloProgram(HEADER + text))


def names_at_peak(text: str) -> dict[str, int]:
    """Return {op_name of the instruction that computes an array: bytes} of the arrays at the peak."""
    return {array.computed_by.source: array.type.nbytes for array in at_peak(text)}


def entry(*lines: str) -> str:
    """Return a computation with an argument %x of 1024 bytes, in which `@name` stands for metadata."""
    body = "\n".join(f"  {line}" for line in ("%x = f32[256]{0} parameter(0)", *lines))
    return with_metadata(f"ENTRY %main (x: f32[256]) -> f32[256] {{\n{body}\n}}\n")


def with_metadata(text: str) -> str:
    return "\n".join(
        f'{line.partition(" @")[0]}, metadata={{op_name="{line.partition(" @")[2]}"}}' if " @" in line else line
        for line in text.splitlines()
    )


def test_arguments_and_results_are_not_temporary() -> None:
    """Both products live until the sum, which is the result."""
    text = entry(
        "%a = f32[256]{0} dot(%x, %x) @a",
        "%b = f32[256]{0} dot(%a, %x) @b",
        "ROOT %c = f32[256]{0} dot(%a, %b) @c",
    )
    assert names_at_peak(text) == {"a": 1024, "b": 1024}


def test_an_array_ends_with_its_last_use() -> None:
    """Two of the chain of products are in memory at the same time, and the larger two count."""
    text = entry(
        "%a = f32[256]{0} dot(%x, %x) @a",
        "%b = f32[512]{0} dot(%a, %x) @b",
        "%c = f32[1024]{0} dot(%b, %x) @c",
        "%d = f32[16]{0} dot(%c, %x) @d",
        "ROOT %e = f32[256]{0} dot(%d, %x) @e",
    )
    assert names_at_peak(text) == {"b": 2048, "c": 4096}


def test_elementwise_results_overwrite_operands_that_end() -> None:
    """%b has the memory of %a, because nothing reads %a later; %c cannot have that of %b, which is read again."""
    text = entry(
        "%a = f32[256]{0} dot(%x, %x) @a",
        "%b = f32[256]{0} add(%a, %x) @b",
        "%c = f32[256]{0} add(%b, %x) @c",
        "ROOT %d = f32[256]{0} dot(%b, %c) @d",
    )
    assert names_at_peak(text) == {"b": 1024, "c": 1024}


FUSED = with_metadata("""%fused (p: f32[256], q: f32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  %q = f32[256]{0} parameter(1)
  %negated = f32[256]{0} negate(%p) @negated
  %reversed = f32[256]{0} reverse(%q), dimensions={0} @reversed
  ROOT %sum = f32[256]{0} add(%negated, %reversed) @sum
}

""")


@pytest.mark.parametrize(("operands", "number"), [("%a, %x", 1), ("%x, %a", 2)])
def test_a_fusion_overwrites_only_what_it_reads_elementwise(operands: str, number: int) -> None:
    text = FUSED + entry(
        "%a = f32[256]{0} dot(%x, %x) @a",
        f"%b = f32[256]{{0}} fusion({operands}), kind=kLoop, calls=%fused @b",
        "ROOT %c = f32[256]{0} dot(%b, %x) @c",
    )
    assert len(at_peak(text)) == number


LOOP = with_metadata("""%update (p: f32[4,256], q: f32[256], i: s32[]) -> f32[4,256] {
  %p = f32[4,256]{1,0} parameter(0)
  %q = f32[256]{0} parameter(1)
  %i = s32[] parameter(2)
  %row = f32[1,256]{1,0} bitcast(%q)
  ROOT %updated = f32[4,256]{1,0} dynamic-update-slice(%p, %row, %i, %i) @update
}

%body (arg: (s32[], f32[4,256])) -> (s32[], f32[4,256]) {
  %arg = (s32[], f32[4,256]{1,0}) parameter(0)
  %number = s32[] get-tuple-element(%arg), index=0
  %stack = f32[4,256]{1,0} get-tuple-element(%arg), index=1
  %hidden = f32[256]{0} custom-call(%number), custom_call_target="f" @hidden
  %stacked = f32[4,256]{1,0} fusion(%stack, %hidden, %number), kind=kLoop, calls=%update @stacked
  ROOT %out = (s32[], f32[4,256]{1,0}) tuple(%number, %stacked)
}

%condition (arg: (s32[], f32[4,256])) -> pred[] {
  %arg.1 = (s32[], f32[4,256]{1,0}) parameter(0)
  ROOT %less = pred[] custom-call(%arg.1), custom_call_target="less" @less
}

""")


def test_the_state_of_a_loop_is_one_array() -> None:
    """The stacked activations need memory once, before, in and after the loop. The line is that of the activations."""
    text = LOOP + entry(
        '%zero = s32[] custom-call(), custom_call_target="zero" @zero',
        '%zeros = f32[4,256]{1,0} custom-call(), custom_call_target="zeros" @zeros',
        "%start = (s32[], f32[4,256]{1,0}) tuple(%zero, %zeros)",
        "%loop = (s32[], f32[4,256]{1,0}) while(%start), condition=%condition, body=%body @loop",
        "%end = f32[4,256]{1,0} get-tuple-element(%loop), index=1",
        "ROOT %c = f32[256]{0} dot(%end, %x) @c",
    )
    found = sorted((array.type.nbytes, array.computed_by.source) for array in at_peak(text))
    assert found == [(4, "zero"), (1024, "hidden"), (4096, "hidden")]


RESULTS = with_metadata("""%fused (y: f32[256]) -> ((f32[256], s32[128]), f32[512]) {
  %y = f32[256]{0} parameter(0)
  %most = (f32[256]{0}, s32[128]{0}) custom-call(%y), custom_call_target="most" @most
  %sum = f32[512]{0} dot(%y, %y) @sum
  ROOT %r = ((f32[256]{0}, s32[128]{0}), f32[512]{0}) tuple(%most, %sum)
}

""")


def test_an_instruction_of_a_fusion_can_have_two_results() -> None:
    text = RESULTS + entry(
        "%f = ((f32[256]{0}, s32[128]{0}), f32[512]{0}) fusion(%x), kind=kInput, calls=%fused",
        "%last = f32[512]{0} get-tuple-element(%f), index=1",
        "ROOT %c = f32[256]{0} dot(%last, %x) @c",
    )
    found = [(array.type.nbytes, array.computed_by.source) for array in at_peak(text)]
    assert sorted(found) == [(512, "most"), (1024, "most"), (2048, "sum")]


BRANCHES = with_metadata("""%yes (y: f32[256]) -> f32[256] {
  %y = f32[256]{0} parameter(0)
  %large = f32[1000]{0} dot(%y, %y) @large
  ROOT %r = f32[256]{0} dot(%large, %y) @r
}

%no (n: f32[256]) -> f32[256] {
  %n = f32[256]{0} parameter(0)
  %larger = f32[2000]{0} dot(%n, %n) @larger
  ROOT %s = f32[256]{0} dot(%larger, %n) @s
}

""")


@pytest.mark.parametrize(
    "branches", ["branch_computations={%yes, %no}", "true_computation=%yes, false_computation=%no"]
)
def test_only_one_branch_of_a_conditional_runs(branches: str) -> None:
    text = BRANCHES + entry(
        '%choice = s32[] custom-call(), custom_call_target="choice" @choice',
        "%a = f32[256]{0} dot(%x, %x) @a",
        f"%b = f32[256]{{0}} conditional(%choice, %a, %a), {branches} @b",
        "ROOT %c = f32[256]{0} dot(%b, %x) @c",
    )
    assert names_at_peak(text) == {"choice": 4, "a": 1024, "larger": 8000, "s": 1024}


def test_an_asynchronous_collective_reads_its_operand_until_it_ends() -> None:
    text = entry(
        "%a = f32[256]{0} dot(%x, %x) @a",
        "%start = ((f32[256]{0}), f32[512]{0}) all-gather-start(%a) @gathered",
        "%b = f32[2000]{0} dot(%x, %x) @b",
        "%done = f32[512]{0} all-gather-done(%start) @done",
        "ROOT %c = f32[256]{0} dot(%b, %done) @c",
    )
    assert sorted(array.type.nbytes for array in at_peak(text)) == [1024, 2048, 8000]


def test_arrays_on_the_host_do_not_count() -> None:
    text = entry(
        "%a = f32[256]{0} dot(%x, %x) @a",
        "%start = (f32[256]{0:S(5)}, f32[256]{0}, u32[]) copy-start(%a) @copied",
        "%done = f32[256]{0:S(5)} copy-done(%start) @done",
        "ROOT %c = f32[256]{0} dot(%done, %x) @c",
    )
    assert sorted(array.type.nbytes for array in at_peak(text)) == [4, 1024]


def chain(x: jax.Array, w: jax.Array) -> jax.Array:
    for _ in range(6):
        x = jnp.tanh(jnp.sort(x) @ w)  # XLA fuses a chain of products alone to one instruction
    return jnp.sum(x * x)


def remat(x: jax.Array, w: jax.Array) -> jax.Array:
    for _ in range(6):
        x = jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w))(x)
    return jnp.sum(x * x)


def scanned(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(lax.scan(lambda x, _: (jnp.tanh(x @ w), jnp.sin(x)), x, length=5)[0])


def branching(x: jax.Array, w: jax.Array) -> jax.Array:
    wide = [lambda x: jnp.sum(jnp.tanh(x @ w)), lambda x: jnp.sum(jnp.sin(jnp.tile(x, (1, 3)) @ jnp.tile(w, (3, 1))))]
    return lax.switch((x[0, 0] > 0).astype(jnp.int32), wide, jnp.tanh(x @ w))


def softmax(x: jax.Array, w: jax.Array) -> jax.Array:
    logits = x @ jnp.tile(w, (1, 8))
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])


@pytest.mark.parametrize("function", [chain, remat, scanned, branching, softmax])
def test_the_total_is_that_of_the_compiler(function: Callable[..., Any]) -> None:
    """The arrays at the peak need as much as XLA assigns to temporary arrays, except for gaps of at most 15%."""
    x, w = jax.ShapeDtypeStruct((512, 128), jnp.float32), jax.ShapeDtypeStruct((128, 128), jnp.float32)

    def norm(x: jax.Array, w: jax.Array) -> jax.Array:  # a scalar, because XLA also uses the memory of the result
        return jnp.max(jax.grad(function)(x, w))

    compiled = jax.jit(norm).lower(x, w).compile()
    text, analysis = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert analysis is not None
    total = sum(array.type.nbytes for array in live_at_peak(HloProgram(text)))
    assert total > 500_000
    assert 0.85 * analysis.temp_size_in_bytes <= total <= 1.03 * analysis.temp_size_in_bytes
