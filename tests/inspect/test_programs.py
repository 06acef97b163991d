"""The summary of a program, from text as XLA writes it for GPUs. tests/cluster/test_target.py compiles for GPUs."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxpar.inspect.programs import MatrixProduct, Moves, OverlappedCollective, summarize
from jaxpar.strategies.strategy import CompiledProgram

META = 'metadata={op_name="jit(step)/%s"}'
SLICE = "transpose(jvp(block_0-block_4))/while/body/jit(dynamic_index_in_dim)/dynamic_slice"
UPDATE = "jvp(block_0-block_4)/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice"
ROW, LARGE = 4 * 1024, 4 * 1024**2  # bytes
TEXT = f"""HloModule jit_step, is_scheduled=true, replica_count=2, num_partitions=4

%fused (p: bf16[8,8], q: bf16[8,8]) -> bf16[8,8] {{
  %p = bf16[8,8]{{1,0}} parameter(0)
  %q = bf16[8,8]{{1,0}} parameter(1)
  ROOT %dot.1 = bf16[8,8]{{1,0}} dot(%p, %q), lhs_contracting_dims={{1}}, {META % "fused"}
}}

%body (arg: (s32[], bf16[8,8], f32[1024,1024])) -> (s32[], bf16[8,8], f32[1024,1024]) {{
  %arg = (s32[], bf16[8,8]{{1,0}}, f32[1024,1024]{{1,0}}) parameter(0)
  %x = bf16[8,8]{{1,0}} get-tuple-element(%arg), index=1
  %large = f32[1024,1024]{{1,0}} get-tuple-element(%arg), index=2
  %bits = u16[512]{{0}} bitcast(%large)
  %all-gather-start = (u16[512]{{0}}, u16[2,512]{{1,0}}) all-gather-start(%bits), {META % "gather"}
  %first = bf16[8,8]{{1,0}} fusion(%x, %x), kind=kCustom, calls=%fused
  %second = bf16[8,8]{{1,0}} custom-call(%first, %x), custom_call_target="__cublas$gemm", {META % "library"}, \
backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"]}}}}}}
  %all-gather-done = u16[2,512]{{1,0}} all-gather-done(%all-gather-start), {META % "gather"}
  %third = bf16[8,8]{{1,0}} fusion(%second, %x), kind=kCustom, calls=%fused
  %all-reduce-start = f32[1024,1024]{{1,0}} all-reduce-start(%large), {META % "reduce"}
  %all-reduce-done = f32[1024,1024]{{1,0}} all-reduce-done(%all-reduce-start)
  %norm-start = f32[] all-reduce-start(%scalar), {META % "norm"}
  %norm-done = f32[] all-reduce-done(%norm-start)
  %copy.1 = f32[1024,1024]{{1,0}} copy(%large)
  %copy.4 = f32[1024,1024]{{0,1}} fusion(%large), kind=kLoop, calls=%copied
  %copy.2 = bf16[8,8]{{1,0}} copy(%x)
  %slice.1 = f32[1,1024]{{1,0}} fusion(%large, %row), kind=kLoop, calls=%taken, {META % "loop"}
  %slice.2 = f32[1,1024]{{1,0}} dynamic-slice(%large, %row, %row), {META % "clock/dynamic_slice"}
  %doubled.1 = f32[1,1024]{{1,0}} fusion(%large, %row), kind=kLoop, calls=%doubled, {META % SLICE}
  %update.1 = f32[1024,1024]{{1,0}} dynamic-update-slice(%large, %slice.1, %row, %row), {META % UPDATE}
  ROOT %out = (s32[], bf16[8,8]{{1,0}}, f32[1024,1024]{{1,0}}) tuple(%arg, %third, %copy.1)
}}

%copied (c: f32[1024,1024]) -> f32[1024,1024] {{
  %c = f32[1024,1024]{{1,0}} parameter(0)
  ROOT %copy.5 = f32[1024,1024]{{0,1}} copy(%c)
}}

%taken (t: f32[1024,1024], row: s32[]) -> f32[1,1024] {{
  %t = f32[1024,1024]{{1,0}} parameter(0)
  %row.1 = s32[] parameter(1)
  %row.2 = s32[] add(%row.1, %row.1)
  %slice.3 = f32[1,1024]{{1,0}} dynamic-slice(%t, %row.2, %row.2), {META % SLICE}
  ROOT %copy.6 = f32[1,1024]{{1,0}} copy(%slice.3)
}}

%doubled (d: f32[1024,1024], row: s32[]) -> f32[1,1024] {{
  %d = f32[1024,1024]{{1,0}} parameter(0)
  %row.3 = s32[] parameter(1)
  %slice.4 = f32[1,1024]{{1,0}} dynamic-slice(%d, %row.3, %row.3), {META % SLICE}
  ROOT %sum = f32[1,1024]{{1,0}} add(%slice.4, %slice.4)
}}

%condition (arg: (s32[], bf16[8,8], f32[1024,1024])) -> pred[] {{
  %arg.2 = (s32[], bf16[8,8]{{1,0}}, f32[1024,1024]{{1,0}}) parameter(0)
  ROOT %less = pred[] custom-call(%arg.2), custom_call_target="compare"
}}

%yes (y: f32[8,8]) -> f32[8,8] {{
  %y = f32[8,8]{{1,0}} parameter(0)
  ROOT %dot.2 = f32[8,8]{{1,0}} dot(%y, %y), lhs_contracting_dims={{1}}, {META % "branch"}
}}

%no (n: f32[8,8]) -> f32[8,8] {{
  ROOT %n = f32[8,8]{{1,0}} parameter(0)
}}

ENTRY %main (a: f32[1024,1024], choice: pred[]) -> f32[8,8] {{
  %a = f32[1024,1024]{{1,0}} parameter(0)
  %choice = pred[] parameter(1)
  %start = (s32[], bf16[8,8]{{1,0}}, f32[1024,1024]{{1,0}}) tuple(%a, %a, %a)
  %loop = (s32[], bf16[8,8]{{1,0}}, f32[1024,1024]{{1,0}}) while(%start), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"5"}}}}, {META % "loop/while"}
  %copy.3 = f32[1024,1024]{{1,0}} copy(%a)
  %stack = f32[2,1024,1024]{{2,1,0}} concatenate(%a, %a), dimensions={{0}}, {META % "jvp(block_0-block_4)/stack"}
  %small = f32[8,8]{{1,0}} fusion(%a), kind=kLoop, calls=%no
  ROOT %chosen = f32[8,8]{{1,0}} conditional(%choice, %small, %small), true_computation=%yes, false_computation=%no, \
{META % "choose/x"}
}}
"""


def program(text: str = TEXT, **frequencies: Any) -> Any:
    compiled: Any = SimpleNamespace(as_text=lambda: text)
    return CompiledProgram(compiled, {"choose": (0.25, 0.75)} | frequencies)


def test_schedule() -> None:
    found = summarize(program())
    assert found.collectives == [
        OverlappedCollective("all-gather", "uint16", 1024, 5.0, 2, 2, "jit(step)/gather", "all-gather-start"),
        OverlappedCollective("all-reduce", "float32", 2**22, 5.0, 0, 0, "jit(step)/reduce", "all-reduce-start"),
    ]
    assert sorted(found.products) == [
        MatrixProduct("bfloat16", 5.0, 1024.0, "", "jit(step)/fused"),
        MatrixProduct("bfloat16", 5.0, 1024.0, "", "jit(step)/fused"),
        MatrixProduct("bfloat16", 5.0, 1024.0, "__cublas$gemm", "jit(step)/library"),
        MatrixProduct("float32", 0.75, 1024.0, "", "jit(step)/branch"),
    ]
    # In each iteration, two slices are read, one with its index, and written, and another one is an update. A kernel
    # that also adds does not count. Before the loop, two arrays are stacked.
    assert found.stacks == Moves(5 * 3 + 1, 5 * (6 * ROW + 4) + 4 * LARGE)
    assert found.copies == Moves(5 * 3, 5 * 2 * (2 * LARGE + 128))  # in the loop: two large arrays and a small one
    assert found.num_devices == 8
    assert found.flops == 1024 * 15.75
    # Of an iteration: two products, the library call, three copies, four with slices, the condition. Outside: a copy,
    # a stack and a fusion, and the product of a branch.
    assert found.kernels.number == 5 * 11 + 3 + 0.75
    assert found.synchronizations == 1  # the conditional
    # Of the loop, the host now also asks before each iteration, and at the end.
    text = TEXT.replace('"known_trip_count"', '"other"')
    assert summarize(program(text, loop=(5.0,))).synchronizations == 1 + 6


def test_a_collective_without_an_end() -> None:
    text = TEXT.replace("all-gather-done(%all-gather-start)", "all-gather-done(%other)")
    with pytest.raises(ValueError, match="all-gather-start has no end"):
        summarize(program(text))
